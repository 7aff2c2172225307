"""Small commands around training: show-mask, tokenizer and tree-search.

May import `validation`.
"""
