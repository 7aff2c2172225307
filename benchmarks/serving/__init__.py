"""Drafters in vLLM, and what a batch of drafts costs; docs/results/serving.md shows the results.

`vllm_drafters` runs them in vLLM beside vLLM alone, and `batched_drafts` measures the CPU time of a batch of drafts.
"""
