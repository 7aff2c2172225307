"""What other programs call: `generate`, `stream`, transformers' `custom_generate`, and prompts.

May import `engine`, `registry` and `results`.
"""
