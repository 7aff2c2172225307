"""Greedy decoding of many prompts at once, for a base that answers a whole data set itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from inference.engine.base import Base

SHRINK = 0.75  # rows still written to, of those in the batch, at which the finished ones are thrown out


@torch.inference_mode()
def greedy_batch(base: Base, prompts: Sequence[Sequence[int]], rooms: Sequence[int]) -> list[list[int]]:
    """What the base writes after each prompt alone, by argmax: `Base.greedy` for rows of their own lengths.

    In float32 and float64 a row's text does not depend on the others but where two logits are equal up to rounding.

    Args:
        base: A causal language model with full attention.
        prompts: B lists of token ids, none empty.
        rooms: B numbers of tokens: an answer is cut there, where no EOS ended it (which is then its last token).

    Raises:
        ValueError: The base has layers that are not full attention.
    """
    kinds = set(getattr(base.model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(base.model.config, "sliding_window", None):
        raise ValueError(f"{base.name} has layers that are not full attention ({', '.join(sorted(kinds))})")
    device, width = base.model.device, max(map(len, prompts))
    fed = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    seen = (torch.arange(width + max(rooms), device=device) >= width - lengths[:, None]).long()  # (B, C)
    positions = (torch.arange(width, device=device) - (width - lengths[:, None])).clamp(min=0)
    answers: list[list[int]] = [[] for _ in prompts]
    cache = BatchCache(base.model.config.num_hidden_layers, width + max(rooms))
    rows = list(range(len(prompts)))  # of the batch as it is now: which prompt each belongs to
    is_open = [True] * len(prompts)
    for end in range(width, width + max(rooms)):
        logits = base.model(
            fed,
            attention_mask=seen[:, :end],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        picks = logits[:, -1].argmax(-1)  # (B,)
        for row, token in zip(rows, picks.tolist(), strict=True):
            if is_open[row]:
                answers[row].append(token)
                is_open[row] = token not in base.eos and len(answers[row]) < rooms[row]
        kept = [place for place, row in enumerate(rows) if is_open[row]]
        if not kept:
            break
        positions = positions[:, -1:] + 1
        if len(kept) <= SHRINK * len(rows):
            rows, places = [rows[place] for place in kept], torch.tensor(kept, device=device)
            picks, positions, seen = picks[places], positions[places], seen[places]
            cache.keep_rows(places)
        fed = picks[:, None]
    return answers


class _BatchLayer(DynamicLayer):
    """Keys and values (B, H, C, d) of one layer, allocated once and written in place."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0
        self.buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Add (B, H, q, d) at the end and return all there is."""
        if not self.buffers:
            self.buffers = [
                states.new_empty(*states.shape[:2], self.capacity, states.shape[3])
                for states in (key_states, value_states)
            ]
            self.is_initialized = True
        start, self.length = self.length, self.length + key_states.shape[2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start : self.length] = states
        return tuple(buffer[:, :, : self.length] for buffer in self.buffers)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0


class BatchCache(Cache):
    """A buffer for each layer, of a length known beforehand; rows whose text has ended can be thrown out."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        super().__init__(layers=[_BatchLayer(capacity) for _ in range(num_layers)])

    def keep_rows(self, places: Tensor) -> None:
        """Keep the rows at ``places`` (b,) of the batch only."""
        for layer in self.layers:
            layer.buffers = [buffer[places] for buffer in layer.buffers]
