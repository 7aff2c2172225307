"""The files of a feature store: a manifest and safetensors shards of hidden states.

Imports no other package of `data`.
"""
