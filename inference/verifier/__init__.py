"""The verifier: one base forward over a draft tree, exact acceptance, and the KV cache of the accepted path.

`session` shows a whole step and is the file to read first.
"""
