"""Drafters in the formats of vLLM, llama.cpp, speculators, SpecForge and DeepSpec, written and read."""
