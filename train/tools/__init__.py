"""Small commands around training: show-mask, tokenizer, tree-search.

May import `validation`.
"""
