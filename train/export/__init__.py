"""Turning a training checkpoint into a drafter folder or a vLLM checkpoint, checking it, and reading those of others.

May import `formats`, `checkpointing`, `modules`, `validation` and `feature_store`.
"""
