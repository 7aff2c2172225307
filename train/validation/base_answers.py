"""The base's own greedy answers to held-out prompts, so that validation decodes what the base would really write."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from inference.verifier.base import Base
from train.validation.simulate import answer_spans

Answers = Literal["greedy", "text"]


@torch.no_grad()
def with_own_answers(base: Base, batch: dict[str, Tensor], max_tokens: int) -> dict[str, Tensor]:
    """Replace everything after the first prompt of each conversation by the base's greedy answer.

    All answers may be equally long, at most half of the context, so that no answer depends on the other prompts of its
    batch. Prompts that leave less room are left out and counted on the terminal. If no prompt of a batch leaves enough,
    the shortest one is answered up to the end of the context.

    Args:
        base: The base that answers.
        batch: ``input_ids`` (B, S) and ``loss_mask`` (B, S).
        max_tokens: Maximum number of tokens of an answer.

    Returns:
        The same keys on the CPU, padded on the right. Conversations without an answer are left out.

    Raises:
        ValueError: All prompts fill the base's context.
    """
    prompts = [
        ids[: spans[0][0]]
        for ids, mask in zip(batch["input_ids"], batch["loss_mask"].tolist(), strict=True)
        if (spans := answer_spans(mask))
    ]
    # One call for all rows: where the base is sharded, every process makes as many calls as the others.
    max_new_tokens = min(max_tokens, base.context_length // 2)
    fitting = [prompt for prompt in prompts if len(prompt) + max_new_tokens <= base.context_length]
    if num_left_out := len(prompts) - max(1, len(fitting)):
        print(
            f"validation leaves out {num_left_out} of {len(prompts)} prompts of a batch: they leave less than "
            f"{max_new_tokens} tokens of the context of {base.name}",
            flush=True,
        )
    prompts = fitting or [min(prompts, key=len)]
    width = max(map(len, prompts))
    max_new_tokens = min(max_new_tokens, base.context_length - width)
    pad = base.tokenizer.pad_token_id or 0
    padded = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0), value=pad) for prompt in prompts])
    is_token = torch.stack([torch.arange(width, device=padded.device) >= width - len(prompt) for prompt in prompts])
    if max_new_tokens < 1:
        raise ValueError(
            f"a held-out prompt has {width} tokens and the context of {base.name} ends at {base.context_length}: "
            "lower data.max_length, or set model.val_answers to text"
        )
    with torch.autocast(padded.device.type, enabled=False):
        answers = base.greedy(padded, is_token.long(), max_new_tokens)
    texts, masks = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        ends = [int(position) for token in base.eos for position in (answer == token).nonzero()]
        answer = answer[: min(ends) + 1] if ends else answer
        texts.append(torch.cat([prompt, answer]).cpu())
        masks.append(torch.arange(len(texts[-1])) >= len(prompt))
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=pad),
        "loss_mask": torch.nn.utils.rnn.pad_sequence(masks, batch_first=True, padding_value=False),
        "lengths": torch.tensor([len(text) for text in texts]),
    }
