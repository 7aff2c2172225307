"""Drafters inside vLLM, by its ``custom_class`` hook; vLLM itself is imported only while it runs."""
