"""Turning a training checkpoint into a drafter folder or a vLLM checkpoint, and checking the result.

May import `checkpointing`, `modules`, `validation` and `feature_store`.
"""
