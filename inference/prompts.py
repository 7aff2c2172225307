"""Questions as the base reads them: chat turns through its template, or plain text where it has none."""

from __future__ import annotations

from collections.abc import Sequence

from data.conversation import encode_prompt
from inference.base import Base


def prompt_ids(base: Base, messages: Sequence[tuple[str, str]], template: str) -> list[int]:
    """Token ids of a chat that waits for the assistant's next turn.

    A base that was never taught to chat (no template of its own, and none named) reads the turns as plain text.

    Args:
        messages: (role, text) pairs, the last one the user's.
        template: A name of `data.conversation.TEMPLATES`, or ``tokenizer`` for the tokenizer's own.
    """
    if template == "tokenizer" and not base.tokenizer.chat_template:
        return list(base.tokenizer("\n".join(text for _, text in messages)).input_ids)
    return encode_prompt(messages, base.tokenizer, template)
