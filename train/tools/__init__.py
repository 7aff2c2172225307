"""Small commands around training: show-mask and tokenizer.

May import `validation`.
"""
