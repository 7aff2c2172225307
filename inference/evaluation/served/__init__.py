"""Drafters measured in vLLM or in any OpenAI-compatible server.

One load generator asks both, so that the figures of both mean the same. vLLM is started for each drafter.
"""
