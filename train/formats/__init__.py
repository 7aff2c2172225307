"""Drafters in the formats of vLLM and llama.cpp."""
