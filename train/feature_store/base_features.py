"""What the frozen base says about texts: asked in process, or read from a feature store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from data.feature_store.shards import unpack
from data.feature_store.store import LAST, FeatureStore
from drafters.protocol import TrainingBatch
from inference.engine.base import Base, base_hash


@torch.no_grad()
def extract_features(base: Base, layers: Sequence[int], input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One forward of the base over texts (B, S), in its own number format whatever the trainer's.

    Returns:
        ``hidden`` (B, S, F * D), ``last`` (B, S, D), and ``labels`` (B, S), its own next token at each position.
    """
    with torch.autocast(input_ids.device.type, enabled=False):  # what the base says when it decodes, it says here
        hidden, last = base.hidden_states(input_ids, layers)
        head = base.base_weights.head
        labels = torch.stack([(row @ head.T).argmax(-1) for row in last])  # one sequence's logits at a time
    return hidden, last, labels


def stored_features(
    batch: Mapping[str, Tensor], layers: Sequence[int], dtype: torch.dtype, step: int = 0
) -> TrainingBatch:
    """What a batch from a feature store holds, as `extract_features` would give it.

    Args:
        batch: Of `data.batch.collate`, with stored states of ``layers`` side by side.
        layers: The drafter's hidden layers.
        dtype: Number format of the base.
        step: Optimizer steps taken before this batch.
    """
    hidden = unpack(batch["hidden"], batch.get("hidden_scale"), dtype)
    given = hidden, batch["input_ids"], batch["labels"], batch["loss_mask"]
    if LAST in layers:
        last = hidden.unflatten(-1, (len(layers), -1))[..., list(layers).index(LAST), :]
    elif "last" in batch:
        last = unpack(batch["last"], batch.get("last_scale"), dtype)
    else:
        return BatchWithoutLastHidden(*given, step)
    return TrainingBatch(given[0], last, *given[1:], step)


class BatchWithoutLastHidden(TrainingBatch):
    """A batch from a store that does not hold the base's last states, which few losses read."""

    def __init__(self, hidden: Tensor, input_ids: Tensor, labels: Tensor, loss_mask: Tensor, step: int) -> None:
        values = {"hidden": hidden, "input_ids": input_ids, "labels": labels, "loss_mask": loss_mask}
        for name, value in (values | {"step": step}).items():
            object.__setattr__(self, name, value)  # the class is frozen

    @property
    def last(self) -> Tensor:
        raise ValueError(
            "this drafter's loss reads the base's last states, which the feature store does not hold: "
            "write it with `drafters features --with-last`"
        )


def name_of(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def choose_layers(store: FeatureStore, base: Base, layers: Sequence[int]) -> None:
    """Let a store hand out the layers a drafter needs.

    Raises:
        ValueError: It was written by another base, in another number format, or without some of the layers.
    """
    written, dtype = store.manifest, name_of(base.model.dtype)
    if dtype != written.base_dtype:
        raise ValueError(
            f"the feature store {store.folder} was written by a base in {written.base_dtype}, not in {dtype}: "
            f"pass --model.base_dtype {written.base_dtype}, or write another store"
        )
    if base_hash(base) != written.base_hash:
        raise ValueError(
            f"the feature store {store.folder} was written by {written.base}, whose weights are not those of "
            f"{base.name}: pass the base it was written by, or write another store"
        )
    if not set(layers) <= set(written.layers):
        has, wants = (",".join(map(str, names)) for names in (written.layers, layers))
        raise ValueError(
            f"the feature store {store.folder} holds the layers {has}, but the drafter needs {wants}: "
            f"write one with --layers {wants}"
        )
    store.layers = tuple(layers)
