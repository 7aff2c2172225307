"""The dtypes that options name, for commands that explain themselves without torch."""

from typing import Literal

Dtype = Literal["float32", "bfloat16", "float16", "int8", "nf4"]  # of a base
StoreDtype = Literal["float32", "float16", "bfloat16", "int8"]  # of stored hidden states
