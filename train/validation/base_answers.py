"""The base's own greedy answers to held-out prompts, so that validation decodes what it would really write."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from inference.engine.base import Base
from train.validation.simulate import answer_spans

Answers = Literal["greedy", "text"]


@torch.no_grad()
def with_own_answers(base: Base, batch: dict[str, Tensor], max_tokens: int) -> dict[str, Tensor]:
    """Replace what follows each first prompt by the base's greedy answer.

    Args:
        batch: ``input_ids`` (B, S) and ``loss_mask`` (B, S).
        max_tokens: Longest answer.

    Returns:
        The same keys on the host, right-padded anew; prompts without an answer are left out.

    Raises:
        ValueError: A prompt fills the base's context.
    """
    prompts = [
        ids[: spans[0][0]]
        for ids, mask in zip(batch["input_ids"], batch["loss_mask"].tolist(), strict=True)
        if (spans := answer_spans(mask))
    ]
    width = max(map(len, prompts))
    pad = base.tokenizer.pad_token_id or 0
    padded = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0), value=pad) for prompt in prompts])
    real = torch.stack([torch.arange(width, device=padded.device) >= width - len(prompt) for prompt in prompts])
    room = min(max_tokens, base.context_length - width)
    if room < 1:
        raise ValueError(
            f"a held-out prompt has {width} tokens and the context of {base.name} ends at {base.context_length}: "
            "lower data.max_length, or set model.val_answers to text"
        )
    with torch.autocast(padded.device.type, enabled=False):
        written = base.greedy(padded, real.long(), room)
    rows, masks = [], []
    for prompt, answer in zip(prompts, written, strict=True):
        ends = [int(at) for token in base.eos for at in (answer == token).nonzero()]
        answer = answer[: min(ends) + 1] if ends else answer
        rows.append(torch.cat([prompt, answer]).cpu())
        masks.append(torch.arange(len(rows[-1])) >= len(prompt))
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad),
        "loss_mask": torch.nn.utils.rnn.pad_sequence(masks, batch_first=True, padding_value=False),
        "lengths": torch.tensor([len(row) for row in rows]),
    }
