"""The base's outputs that drafters train on: computed by the base in process, or read from a feature store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from data.features import LAST_HIDDEN, FeatureStore, unpack
from drafters.protocol import TrainingBatch
from inference.verifier.base import Base, base_hash


class BaseFeatures(NamedTuple):
    """Outputs of the base over texts (B, S).

    Args:
        hidden: (B, S, F * D) hidden states of the chosen layers, side by side.
        last_hidden: (B, S, D) normed last hidden states, which the LM head reads.
        labels: (B, S) the base's most probable next token at each position.
    """

    hidden: Tensor
    last_hidden: Tensor
    labels: Tensor


@torch.no_grad()
def compute_features(base: Base, layers: Sequence[int], input_ids: Tensor) -> BaseFeatures:
    """Run one forward pass of the base over texts (B, S).

    Autocast is switched off: the base's outputs are the same as in decoding, whatever precision the trainer uses.
    """
    with torch.autocast(input_ids.device.type, enabled=False):
        hidden, last_hidden = base.hidden_states(input_ids, layers)
        head = base.base_weights.head
        # The logits of a whole batch would not fit into memory, so they are computed one sequence at a time.
        labels = torch.stack([(states @ head.T).argmax(-1) for states in last_hidden])
    return BaseFeatures(hidden, last_hidden, labels)


def read_features(
    batch: Mapping[str, Tensor], layers: Sequence[int], dtype: torch.dtype, step: int = 0
) -> TrainingBatch:
    """Turn a batch of a feature store into the training batch that `compute_features` would lead to.

    Args:
        batch: A batch made by `data.batches.collate`, with the stored states of ``layers`` side by side.
        layers: The drafter's hidden layers.
        dtype: Dtype of the base.
        step: Optimizer steps taken before this batch.
    """
    hidden = unpack(batch["hidden"], batch.get("hidden_scale"), dtype)
    last_hidden: Tensor | None = None  # few losses read it, so a store need not hold it
    if LAST_HIDDEN in layers:
        last_hidden = hidden.unflatten(-1, (len(layers), -1))[..., list(layers).index(LAST_HIDDEN), :]
    elif "last_hidden" in batch:
        last_hidden = unpack(batch["last_hidden"], batch.get("last_hidden_scale"), dtype)
    return TrainingBatch(hidden, last_hidden, batch["input_ids"], batch["labels"], batch["loss_mask"], step)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def choose_layers(store: FeatureStore, base: Base, layers: Sequence[int]) -> None:
    """Make a store return the hidden layers that a drafter needs.

    Raises:
        ValueError: The store was written by another base or with another dtype, or lacks some of the layers.
    """
    manifest, dtype = store.manifest, dtype_name(base.model.dtype)
    if dtype != manifest.base_dtype:
        raise ValueError(
            f"the feature store {store.folder} was written by a base in {manifest.base_dtype}, not in {dtype}: "
            f"pass --model.base_dtype {manifest.base_dtype}, or write another store"
        )
    if base_hash(base) != manifest.base_hash:
        raise ValueError(
            f"the feature store {store.folder} was written by {manifest.base}, whose weights are not those of "
            f"{base.name}: pass the base it was written by, or write another store"
        )
    if not set(layers) <= set(manifest.layers):
        stored, needed = (",".join(map(str, each)) for each in (manifest.layers, layers))
        raise ValueError(
            f"the feature store {store.folder} holds the layers {stored}, but the drafter needs {needed}: "
            f"write one with --layers {needed}"
        )
    store.layers = tuple(layers)
