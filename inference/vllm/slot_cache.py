"""The draft module's KV cache at vLLM's own physical slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafters.parallel import ParallelDrafter

MAX_GATHERED_BYTES = 1 << 30
"""Keys and values that one draft gathers at most, unless a single text has more."""


@dataclass(frozen=True)
class FedBatch:
    """Where the last forward of the base put the keys and values of each request.

    Args:
        block_table: (R, blocks) physical blocks of each request.
        block_size: Slots of a block.
    """

    block_table: Tensor
    block_size: int

    @classmethod
    def of(cls, metadata: Any, positions: Tensor, block_size: int) -> FedBatch:
        """Read the attention metadata of a forward; ``positions`` (N,) are those of its tokens.

        Raises:
            ValueError: The attention backend tells no block table of this block size.
        """
        table = getattr(metadata, "block_table", None)
        if table is not None:
            batch = cls(table, block_size)
            first = batch.slots([0], positions[:1].cpu() + 1)[0, -1]  # the first token belongs to the first request
            if first == metadata.slot_mapping[0]:
                return batch
        raise ValueError(
            f"vLLM's attention backend gives no table of the cache's blocks ({type(metadata).__name__}), which the "
            "drafter needs: start vLLM with --attention-backend FLASH_ATTN or TRITON_ATTN"
        )

    def slots(self, rows: list[int], lengths: Tensor) -> Tensor:
        """Physical slots (N, S) of the first positions of N requests, S being the largest of their lengths (N,).

        Behind the length of a request they are slot 0.
        """
        positions = torch.arange(int(lengths.max()), device=self.block_table.device)
        blocks = self.block_table[rows].long()[:, positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        return slots * (positions < lengths.to(positions.device)[:, None])


def groups(lengths: list[int], max_positions: int) -> list[list[int]]:
    """Divide texts into groups of similar lengths, of which each fits into a gathered tensor (texts, longest text).

    >>> groups([3, 100, 5, 4], max_positions=15)
    [[0, 3, 2], [1]]

    Args:
        lengths: Length of each text.
        max_positions: Number of positions of the tensor, which only a single text may exceed.
    """
    found: list[list[int]] = []
    for text in sorted(range(len(lengths)), key=lengths.__getitem__):
        if found and (len(found[-1]) + 1) * lengths[text] <= max_positions:
            found[-1].append(text)
        else:
            found.append([text])
    return found


class SlotCache:
    """Keys and values of a drafter's trunk, one row for every slot of the base's own cache.

    A position's keys and values lie at the slot of its base keys and values. So whatever vLLM does with its blocks
    holds for ours too: shared prefixes are shared, a preempted request is fed again, and rejected drafts are written
    over.

    Args:
        drafter: The drafter.
        num_slots: Number of slots, vLLM's blocks times their size.
    """

    def __init__(self, drafter: ParallelDrafter, num_slots: int) -> None:
        layer: Any = drafter.trunk.layers[0]
        attention, weight = layer.self_attn, drafter.frame_embedding
        self.num_slots, self.num_layers = num_slots, len(drafter.trunk.layers)
        shape = self.num_layers, 2, num_slots, attention.num_heads, attention.head_dim
        self._rows = torch.zeros(shape, dtype=weight.dtype, device=weight.device)

    @property
    def num_bytes(self) -> int:
        return self._rows.numel() * self._rows.element_size()

    @property
    def max_gathered(self) -> int:
        """Number of positions that one draft may gather."""
        return MAX_GATHERED_BYTES * self.num_slots // self.num_bytes

    def write(self, slots: Tensor, context: list[tuple[Tensor, Tensor]]) -> None:
        """Store the keys and values of N positions, as `Trunk.context` gives them: for each layer two (1, h, N, d)."""
        for layer, pair in enumerate(context):
            for part, states in enumerate(pair):
                self._rows[layer, part, slots] = states[0].transpose(0, 1)

    def read(self, slots: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The keys and values at slots (B, S): for each layer two tensors of (B, h, S, d)."""
        layers = self._rows[:, :, slots].transpose(-3, -2)
        return [(keys, values) for keys, values in layers]
