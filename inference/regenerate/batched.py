"""Decoding of many prompts in one batch."""

from collections.abc import Sequence
from typing import Any

import torch

from inference.verifier.attention import attention_kinds
from inference.verifier.base import Base
from inference.verifier.cache import BufferCache
from inference.verifier.layers import cache_argument
from inference.verifier.sampling import KeyedSampler, draw_tokens, most_probable

SHRINK = 0.75  # finished rows leave the batch once at most this share of its rows is unfinished


@torch.inference_mode()
def decode_batch(
    base: Base, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int], samplers: Sequence[KeyedSampler] = ()
) -> list[list[int]]:
    """Continue B prompts, each to its own length.

    Every row is what its prompt is continued by alone: greedily as by `Base.greedy`, sampled as by a session with the
    row's sampler. In float32 and float64 the other rows can change it only where two logits, or a sum of probabilities
    and the number drawn, are equal up to rounding. Raises ValueError if a layer of the base has no full attention.

    No prompt is empty. A row ends with its first EOS token, or is cut off at its limit of new tokens. The samplers
    differ in their seeds only; without any, decoding is greedy.
    """
    if (kinds := set(attention_kinds(base.model.config))) != {"full_attention"}:
        raise ValueError(f"{base.name} has layers without full attention ({', '.join(sorted(kinds))})")
    device, width = base.model.device, max(map(len, prompts))
    fed = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    attended = (torch.arange(width + max(max_new_tokens), device=device) >= width - lengths[:, None]).long()  # (B, C)
    positions = (torch.arange(width, device=device) - (width - lengths[:, None])).clamp(min=0)
    answers: list[list[int]] = [[] for _ in prompts]
    cache = BufferCache(base.model.config.num_hidden_layers, width + max(max_new_tokens))
    rows = list(range(len(prompts)))  # index of the prompt that each row of the current batch continues
    is_unfinished = [True] * len(prompts)
    # An index, as a slice of a prompt's states is not contiguous: the LM head would be copied for each row on a CPU.
    last = torch.tensor([-1], device=device)
    options: dict[str, Any] = {"use_cache": True, "logits_to_keep": last, **cache_argument(base.model, cache)}
    for end in range(width, width + max(max_new_tokens)):
        logits = base.model(fed, attention_mask=attended[:, :end], position_ids=positions, **options).logits
        if samplers:
            numbers = [samplers[row].uniform(len(prompts[row]) + len(answers[row])) for row in rows]
            picks = draw_tokens(samplers[0].probabilities(logits[:, -1]), numbers)  # (B,)
        else:
            picks = most_probable(logits[:, -1])
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
            for states in (states for pair in cache.views for states in pair):
                states[: len(rows)] = states[places]
            cache.views = [(keys[: len(rows)], values[: len(rows)]) for keys, values in cache.views]
        fed = picks[:, None]
    return answers
