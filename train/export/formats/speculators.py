"""What all checkpoints of speculators share: the fields of config.json that name the algorithm and the base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.tokenizer import load_pretrained
from inference.verifier.base import load_base_info
from inference.vllm.own_methods import Algorithm
from train.export.formats.public_checkpoint import PublicCheckpoint


@dataclass(frozen=True)
class Verifier:
    """The base as the formats describe it.

    Args:
        name: Folder or hub id.
        architectures: Its model class in transformers.
        context_length: Maximum number of tokens of a text.
        stored_dtype: Name of the dtype that it is stored in.
    """

    name: str
    architectures: Sequence[str]
    context_length: int
    stored_dtype: str


def read_verifier(name: str) -> Verifier:
    """Read a base's configuration, without its weights."""
    from transformers import AutoConfig

    context_length = load_base_info(name).context_length  # its errors say what to do if there is no such base
    config = load_pretrained(AutoConfig, name)
    stored = str(config.dtype).removeprefix("torch.")
    return Verifier(
        name,
        config.architectures or [],
        context_length,
        stored if stored in ("bfloat16", "float16") else "float32",
    )


def speculators_config(algorithm: str, architecture: str, num_tokens: int, verifier: Verifier) -> dict[str, Any]:
    """The fields that every checkpoint of speculators has, in the form of version 0.7."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens, "verifier_accept_k": 1}
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"accept_tolerance": 0.0}],
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
    }


def algorithm_of(checkpoint: PublicCheckpoint) -> Algorithm:
    """The ``speculators_config`` of a checkpoint; of another format, one that names nothing."""
    return checkpoint.settings(Algorithm, checkpoint.config.get("speculators_config") or {})


def check_hidden_layers(checkpoint: PublicCheckpoint, layers: Sequence[int], num_layers: int) -> list[int]:
    """Return base layers that are fused, counted as here.

    Raises:
        ValueError: The base does not have them, or they include its last one.
    """
    if num_layers in layers:
        checkpoint.refuse(
            f"it reads the base's last layer ({num_layers}), which trainers take before or after the final norm"
        )
    if not layers or not all(0 <= layer < num_layers for layer in layers):
        checkpoint.refuse(f"it reads the layers {list(layers)} of a base that has {num_layers}")
    return list(layers)
