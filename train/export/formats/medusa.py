"""Medusa: written in the layout of vLLM, up to version 0.32, whose weights have the same names as ours."""

from __future__ import annotations

from typing import Any

from drafters import Medusa
from drafters.protocol import BaseShape


def medusa_config(drafter: Medusa, shape: BaseShape) -> dict[str, Any]:
    """Return the config.json of vLLM's Medusa, whose weights have the same names as ours.

    No other key may contain "num" together with "heads" or "layers": vLLM would take it for one of these two.

    Raises:
        ValueError: The heads share the base's LM head.
    """
    if not drafter.own_heads:
        raise ValueError("the vllm format of Medusa has an output layer in each head: train with own_heads: true")
    head: Any = drafter.blocks[0]  # all heads have equally many layers
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "truncated_vocab_size": shape.vocab_size,
        "num_heads": drafter.num_heads,
        "num_hidden_layers": len(head.layers),
        "medusa_fc_bias": True,
        "original_lm_head": False,
    }
