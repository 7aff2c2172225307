"""From a training checkpoint to a drafter folder or a vLLM checkpoint, and the check of the result.

May import `checkpointing`, `modules`, `validation` and `feature_store`.
"""
