"""Applies chat templates, and finds in what they write the text of the assistant, which the loss is taken on."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

PRIVATE_USE = tuple(map(chr, range(0xE000, 0xF900)))  # characters that texts hardly contain
REASONING = "reasoning_content", "thinking"  # names by which templates read the reasoning of a message


def render(
    messages: list[dict], tokenizer: PreTrainedTokenizerBase, template: str, **options: Any
) -> tuple[list[int], list]:
    """Return the token ids of messages, and the mask of the ``{% generation %}`` marks if it is asked for.

    The template writes BOS itself, so `apply_chat_template` must add no special tokens.

    Args:
        messages: Dicts as chat templates read them.
        tokenizer: Tokenizer of the base.
        template: Text of the template.
        options: Further options of `apply_chat_template`.

    Raises:
        ValueError: The template refuses the messages.
    """
    # No warning about texts beyond the tokenizer's maximum: `encode` cuts them.
    options |= {"return_dict": True, "tokenizer_kwargs": {"verbose": False}}
    encoded = _apply(messages, tokenizer, template, **options)
    return list(encoded["input_ids"]), list(encoded.get("assistant_masks", []))


def mask_without_marks(
    messages: list[dict], tokenizer: PreTrainedTokenizerBase, template: str, tools: list[dict] | None = None
) -> tuple[list[int], list[int]]:
    """Return the token ids and the loss mask (S,) of a conversation whose template has no ``{% generation %}`` marks.

    What the template writes for an answer after its prompt is in the mask, up to the last EOS token: reasoning, tool
    calls and the names of channels too, if the template shows them. The rendered texts are compared rather than the
    ids, because an answer that starts with a line break may share its first token with the prompt.

    Args:
        messages: Dicts as chat templates read them.
        tokenizer: Tokenizer of the base.
        template: Text of the template.
        tools: Descriptions of the tools that the assistant may call.

    Raises:
        ValueError: The template refuses the conversation, or an answer cannot be found in what it writes.
    """
    texts = _Texts(messages, tokenizer, template, tools)
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    answers: list[tuple[int, int]] = []
    for turn in turns:
        answers.append(texts.answer(turn, after=answers[-1][1] if answers else 0))
    encoded = tokenizer(texts.whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, mask = list(encoded["input_ids"]), [0] * len(encoded["input_ids"])
    ends = [end for _, end in encoded["offset_mapping"]]
    for start, end in answers:
        answer = range(bisect_right(ends, start), bisect_right(ends, end))
        eos = [place for place in answer if ids[place] == tokenizer.eos_token_id]
        for place in answer:
            # Anything the template writes after the last EOS, such as a line break, is not part of the answer.
            mask[place] = int(not eos or place <= eos[-1])
    return ids, mask


def masked_text(ids: Sequence[int], mask: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Text:
    """Decode tokens into a text that shows those inside the loss mask in bold green and the others dimmed."""
    from rich.text import Text

    text, decoded, end = Text(), "", 0
    for is_masked_in, run in groupby(mask):
        end += len(list(run))
        # Decoding from the start keeps the space that SentencePiece drops at the start of a text.
        longer = str(tokenizer.decode(list(ids[:end]), clean_up_tokenization_spaces=False))
        text.append(longer[len(decoded) :], style="bold green" if is_masked_in else "dim")
        decoded = longer
    return text


class _Texts:
    """What a template writes for a conversation and for parts of it."""

    def __init__(
        self, messages: list[dict], tokenizer: PreTrainedTokenizerBase, template: str, tools: list[dict] | None
    ) -> None:
        self.messages, self.tokenizer, self.template, self.tools = messages, tokenizer, template, tools
        self.whole = self._text(messages)
        used = {*self.whole, *json.dumps([messages, tools], ensure_ascii=False, default=str)}
        self.stand_in = next((character for character in PRIVATE_USE if character not in used), PRIVATE_USE[0])
        if not self._shows_all_calls():
            raise ValueError("the chat template leaves out a tool call")

    def _text(self, messages: Sequence[dict], is_prompt: bool = False) -> str:
        options = {"tools": self.tools, "tokenize": False, "add_generation_prompt": is_prompt}
        return _apply(list(messages), self.tokenizer, self.template, **options)

    def _shows_all_calls(self) -> bool:
        """Whether the template writes the name of each tool that is called, wherever it is called."""
        renamed, num_calls = [], 0
        for message in self.messages:
            calls = message.get("tool_calls", [])
            named = [call | {"function": call["function"] | {"name": self.stand_in}} for call in calls]
            renamed.append(message | {"tool_calls": named} if named else message)
            num_calls += len(named)
        return not num_calls or self._text(renamed).count(self.stand_in) >= num_calls

    def answer(self, turn: int, after: int) -> tuple[int, int]:
        """Return the half-open range of an answer in the text of the whole conversation.

        Args:
            turn: Index of the answer among the messages.
            after: Where the answer before it ends in the text.
        """
        prompt = self._text(self.messages[:turn], is_prompt=True)
        answered = self._text(self.messages[: turn + 1])
        if self.whole.startswith(answered) and answered.startswith(prompt):
            return len(prompt), len(answered)
        # Many templates write the answers of earlier turns in another way than the last one: without the reasoning
        # (Qwen3), with another end (gpt-oss), or without the system message (Mistral).
        found = self._where_stand_in_is(turn) or self._where_tool_call_is(turn, prompt, after)
        if found is None:
            raise ValueError(
                "the chat template does not extend its own prompt, so the answers cannot be found in it; "
                "add {% generation %} marks to it, or choose another template"
            )
        start, end = found
        if self.whole.startswith(prompt) and len(prompt) < start:
            start = len(prompt)
        eos = str(self.tokenizer.eos_token or "")
        return start, end + len(eos) * self.whole.startswith(eos, end)

    def _where_stand_in_is(self, turn: int) -> tuple[int, int] | None:
        """The range that changes if the answer is another one, unless anything else changes with it."""
        message = {"role": "assistant", "content": self.stand_in}
        try:
            changed = self._text([*self.messages[:turn], message, *self.messages[turn + 1 :]])
        except ValueError:  # the results of tools may have to follow calls
            return None
        before, _, behind = changed.partition(self.stand_in)
        is_only_change = self.whole.startswith(before) and self.whole.endswith(behind)
        if self.stand_in in self.whole or changed.count(self.stand_in) != 1 or not is_only_change:
            return None
        end = len(self.whole) - len(behind)
        return (len(before), end) if len(before) <= end else None

    def _where_tool_call_is(self, turn: int, prompt: str, after: int) -> tuple[int, int] | None:
        """The range of a tool call, written as after its own prompt: the first such text behind the answer before it.

        Unless a message between the two quotes it.
        """
        message = self.messages[turn]
        if "tool_calls" not in message:
            return None
        earlier = self.messages[:turn]
        between = list(takewhile(lambda message: message["role"] != "assistant", reversed(earlier)))
        without_reasoning = {name: value for name, value in message.items() if name not in REASONING}
        for written in (message, without_reasoning):
            answered = self._text([*earlier, written])
            call = answered.removeprefix(prompt)
            is_quoted = any(call.strip() in str(message["content"]) for message in between)
            start = self.whole.find(call, after)
            if call and call != answered and start >= 0 and not is_quoted:
                return start, start + len(call)
        return None


def _apply(messages: list[dict], tokenizer: PreTrainedTokenizerBase, template: str, **options) -> Any:
    from jinja2 import TemplateError

    if "tool_calls" not in template and any("tool_calls" in message for message in messages):
        raise ValueError("the chat template has no place for tool calls")
    try:
        return tokenizer.apply_chat_template(messages, chat_template=template, **options)
    except (TemplateError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the chat template refuses the conversation: {error}") from error
