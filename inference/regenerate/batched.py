"""Decoding of many prompts in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from inference.verifier.attention import attention_kinds
from inference.verifier.base import Base
from inference.verifier.layers import cache_argument
from inference.verifier.sampling import KeyedSampler, draw_tokens

SHRINK = 0.75  # finished rows leave the batch once at most this share of its rows is unfinished


@torch.inference_mode()
def decode_batch(
    base: Base,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: Sequence[int],
    samplers: Sequence[KeyedSampler] = (),
) -> list[list[int]]:
    """Continue B prompts, each to its own length.

    Every row is what its prompt is continued by alone: greedily as by `Base.greedy`, sampled as by a session with the
    row's sampler. In float32 and float64 the other rows can change it only where two logits, or a sum of probabilities
    and the number drawn, are equal up to rounding.

    Args:
        base: A causal language model whose layers all use full attention.
        prompts: B lists of token ids, none empty.
        max_new_tokens: B limits: a row ends with its first EOS token, or is cut off at this many new tokens.
        samplers: B samplers that differ in their seeds only; none to decode greedily.

    Raises:
        ValueError: A layer of the base does not use full attention.
    """
    if (kinds := set(attention_kinds(base.model.config))) != {"full_attention"}:
        raise ValueError(f"{base.name} has layers without full attention ({', '.join(sorted(kinds))})")
    device, width = base.model.device, max(map(len, prompts))
    fed = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    attended = (torch.arange(width + max(max_new_tokens), device=device) >= width - lengths[:, None]).long()  # (B, C)
    positions = (torch.arange(width, device=device) - (width - lengths[:, None])).clamp(min=0)
    answers: list[list[int]] = [[] for _ in prompts]
    cache = BatchCache(base.model.config.num_hidden_layers, width + max(max_new_tokens))
    rows = list(range(len(prompts)))  # index of the prompt that each row of the current batch continues
    is_unfinished = [True] * len(prompts)
    for end in range(width, width + max(max_new_tokens)):
        logits = base.model(
            fed,
            attention_mask=attended[:, :end],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **cache_argument(base.model, cache),
        ).logits
        if samplers:
            numbers = [samplers[row].uniform(len(prompts[row]) + len(answers[row])) for row in rows]
            picks = draw_tokens(samplers[0].probabilities(logits[:, -1]), numbers)  # (B,)
        else:
            picks = logits[:, -1].argmax(-1)
        for row, token in zip(rows, picks.tolist(), strict=True):
            if is_unfinished[row]:
                answers[row].append(token)
                is_unfinished[row] = token not in base.eos and len(answers[row]) < max_new_tokens[row]
        unfinished = [place for place, row in enumerate(rows) if is_unfinished[row]]
        if not unfinished:
            break
        positions = positions[:, -1:] + 1
        if len(unfinished) <= SHRINK * len(rows):
            rows, places = [rows[place] for place in unfinished], torch.tensor(unfinished, device=device)
            picks, positions, attended = picks[places], positions[places], attended[places]
            cache.keep_rows(places)
        fed = picks[:, None]
    return answers


class _BatchLayer(DynamicLayer):
    """Keys and values of one layer, (B, H, C, d), allocated once and written in place."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0
        self.buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (B, H, q, d) and return everything cached so far."""
        if not self.buffers:
            self.buffers = [
                states.new_empty(*states.shape[:2], self.capacity, states.shape[3])
                for states in (key_states, value_states)
            ]
            self.is_initialized = True
        start, self.length = self.length, self.length + key_states.shape[2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start : self.length] = states
        keys, values = (buffer[:, :, : self.length] for buffer in self.buffers)
        return keys, values

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0


class BatchCache(Cache):
    """KV cache of a fixed capacity from which rows can be removed."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.batch_layers = [_BatchLayer(capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.batch_layers))

    def keep_rows(self, places: Tensor) -> None:
        """Keep only the rows of the batch at ``places`` (b,)."""
        for layer in self.batch_layers:
            layer.buffers = [buffer[places] for buffer in layer.buffers]
