"""What other programs call: `generate`, `stream`, transformers' `custom_generate`, and the encoding of prompts.

May import `engine`, `compiled`, `registry` and `results`.
"""
