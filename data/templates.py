"""Chat templates: tokens of prompts and conversations, the loss mask on the assistant's text, marks of reasoning."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from datetime import date
from functools import lru_cache, partial
from itertools import groupby, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, meta
from rich.text import Text

from data.computing_limit import computing_limit
from data.conversations import REASONING, Conversation, Message, load_conversations, user_message
from data.files import check_encodable, short_hash
from data.safe_text import SafeConsole
from data.tokenizer import load_tokenizer, tokenizer_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]  # each is defined by a JSON object


# Both reproduce FastChat's prompts exactly. `{% generation %}` marks what the loss is taken on: the answer and its EOS.
# Their lines are broken and indented for readers only.
TEMPLATES = {
    name: "".join(map(str.strip, Path(__file__).with_name(f"{name}.jinja").read_text(encoding="utf-8").splitlines()))
    for name in ("vicuna_v1.1", "llama2_chat")
}
TEMPLATE_ERRORS = (
    TemplateError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError, ValueError
)  # fmt: skip
PRIVATE_USE = tuple(map(chr, range(0xE000, 0xF900)))  # characters that texts hardly contain
THINKING = {"thinking=on": "true", "thinking=off": "false"}
TODAY = re.compile(r"strftime_now\( *(['\"])(.*?)\1 *\)")  # how templates ask for today's date, and its format
RENDER_SECONDS = 10  # of computing for one text; a loop of a hostile template ends then
# Before and after the reasoning, in the templates of Qwen3 and DeepSeek-R1, Magistral, Cohere, Seed-OSS and others. Not
# the channels of gpt-oss, whose template refuses answers that contain them.
MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<reasoning>", "</reasoning>"),
)


def resolve_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a chat template; ValueError if there is no such template, or it has no such switch.

    It is one of `TEMPLATES`, or ``tokenizer`` for the tokenizer's own. With ``:thinking=on`` or ``:thinking=off`` after
    it, the template's own switch asks for answers with or without reasoning; with ``:date=2026-11-28``, a template that
    writes today's date writes this one.
    """
    name, *options = name.split(":")
    if name not in (*TEMPLATES, "tokenizer"):
        raise ValueError(f"unknown chat template {name!r}; choose one of: tokenizer, {', '.join(TEMPLATES)}")
    if name == "tokenizer" and not tokenizer.chat_template:
        raise ValueError(f"the tokenizer has no chat template of its own; choose one of: {', '.join(TEMPLATES)}")
    named: Any = tokenizer.chat_template
    if name == "tokenizer" and isinstance(named, dict) and "default" not in named:
        remedy = "set tokenizer.chat_template to one of them and save it again"
        raise ValueError(f"the tokenizer has several chat templates and no default ({', '.join(named)}): {remedy}")
    text = TEMPLATES[name] if name in TEMPLATES else tokenizer.get_chat_template()
    for option in options:
        if option in THINKING:
            if not (switch := thinking_switch(text)):
                raise ValueError(
                    f"the chat template has no thinking switch (enable_thinking): write {name} without {option}"
                )
            # transformers drops a line break after a block, so this one keeps one with which the template may begin.
            text = f"{{% set {switch} = {THINKING[option]} %}}\n{text}"
        elif option.startswith("date=") and TODAY.search(text):
            text = TODAY.sub(partial(_write_date, option.removeprefix("date=")), text)
        else:
            raise ValueError(
                f"unknown option {option!r} of the chat template: write {name}:{' or :'.join(THINKING)}, or, for a "
                "template that writes today's date, :date=YEAR-MONTH-DAY"
            )
    return text


def _write_date(day: str, call: re.Match[str]) -> str:
    try:
        return json.dumps(date.fromisoformat(day).strftime(call[2]))
    except ValueError as error:
        raise ValueError(f"{day!r} is no date of a chat template: write it like 2026-11-28") from error


def thinking_switch(template: str) -> str | None:
    """Return the variable by which a template's text is told whether to begin an answer with its reasoning."""
    unmarked = re.sub(r"\{%-? *(end)?generation *-?%\}", "", template)
    try:
        read = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(unmarked))
    except TemplateError as error:
        raise ValueError(f"the chat template is damaged: {error}") from error
    return next((name for name in ("enable_thinking", "thinking") if name in read), None)


def with_date(name: str, tokenizer: PreTrainedTokenizerBase, stored: str = "") -> str:
    """Return the name of a template with the date that it writes, if it writes any: that of ``stored``, or today's."""
    if stored.partition(":date=")[0] == name:
        return stored
    if not name.startswith("tokenizer") or ":date=" in name or not tokenizer.chat_template:
        return name
    return f"{name}:date={date.today()}" if TODAY.search(resolve_template(name, tokenizer)) else name


def template_hash(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a short hash of a template's text, which is the same on every day."""
    return short_hash(resolve_template(re.sub(":date=[^:]*", "", name), tokenizer))


def encode_prompt(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str, tools: Tools = ()
) -> list[int]:
    """Return the token ids of a prompt: messages as chat templates read them, and the start of the next answer.

    The template is named as in `resolve_template`; each of the tools that it offers is defined by a JSON object.
    """
    return list(_apply_to_prompt(messages, tokenizer, template, tools, return_dict=True)["input_ids"])


def render(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str, tools: Tools = ()) -> str:
    """Return the text of a prompt; the arguments are those of `encode_prompt`."""
    return str(_apply_to_prompt(messages, tokenizer, template, tools, tokenize=False))


def _apply_to_prompt(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str, tools: Tools, **options: Any
) -> Any:
    text = resolve_template(template, tokenizer)
    return _apply(messages, tokenizer, text, list(tools) or None, is_prompt=True, **options)


def encode(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, template: str, max_length: int | None = None
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation and its loss mask, both (S,).

    The mask is 1 on the assistant's tokens, its tool calls included, and on the EOS after each answer. The template is
    named as in `resolve_template`; tokens after the first ``max_length`` are cut off. Raises ValueError if the template
    refuses the conversation, or recorded tokens belong to another tokenizer or template.
    """
    text, messages = resolve_template(template, tokenizer), list(conversation.messages)
    tools = list(conversation.tools) or None
    if recorded := conversation.recorded:
        is_same = {
            "tokenizer": recorded.tokenizer == tokenizer_hash(tokenizer),
            "chat template": recorded.template == template_hash(template, tokenizer),
        }
        for name in (name for name in is_same if not is_same[name]):
            raise ValueError(
                f"its tokens were written with another {name}: use that one, or remove input_ids from the records"
            )
        if max(recorded.input_ids) >= len(tokenizer):
            raise ValueError("input_ids holds tokens that the tokenizer does not know")
        return recorded.input_ids.tolist()[:max_length], recorded.loss_mask.tolist()[:max_length]
    _check_shown(messages, tokenizer, text, tools)
    if "{% generation" in text or "{%- generation" in text:
        encoded = _apply(messages, tokenizer, text, tools, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        if conversation.not_learned:
            _, others = mask_without_marks(messages, tokenizer, text, tools, conversation.not_learned)
            mask = [int(is_in and not is_out) for is_in, is_out in zip(mask, others, strict=True)]
    else:
        learned = frozenset(range(len(messages))) - conversation.not_learned
        ids, mask = mask_without_marks(messages, tokenizer, text, tools, learned)
    return ids[:max_length], mask[:max_length]


def _check_shown(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str, tools: list | None
) -> None:
    """Raise ValueError if a template leaves out a call of a tool, or what a tool returned."""
    changed = json.loads(json.dumps(messages, default=str))
    calls, results = _functions_called(changed), [message for message in changed if message["role"] == "tool"]
    if not calls and not results:
        return
    said = json.dumps([messages, tools], ensure_ascii=False, default=str)
    called, returned = islice((character for character in PRIVATE_USE if character not in said), 2)
    for call in calls:
        call["name"] = called
    for result in results:
        result["content"] = returned
    shown = str(_apply(changed, tokenizer, template, tools, tokenize=False))
    if shown.count(called) < len(calls):
        raise ValueError("the chat template leaves out a tool call")
    if shown.count(returned) < len(results):
        raise ValueError("the chat template leaves out what a tool returned")


def _apply(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str, tools: list | None,
    is_prompt: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Apply a template, which writes BOS itself, so that no special tokens are added.

    The arguments of tool calls are objects in most templates; a template that refuses those gets them as texts.
    """
    if "tool_calls" not in template and any("tool_calls" in message for message in messages):
        raise ValueError("the chat template has no place for tool calls")
    if options.get("return_dict"):  # no warning about texts beyond the tokenizer's maximum: `encode` cuts them
        options["tokenizer_kwargs"] = {"verbose": False}
    shared: Any = {"chat_template": template, "tools": tools, "add_generation_prompt": is_prompt}
    apply: Any = partial(tokenizer.apply_chat_template, **shared)
    expired = TimeoutError(f"the chat template does not end within {RENDER_SECONDS} seconds: choose another one")
    try:
        with computing_limit(RENDER_SECONDS, expired):
            if any(message.get("tool_calls") for message in messages):
                messages = _with_arguments(messages, partial(apply, tokenize=False))
            return apply(messages, **options)
    except TEMPLATE_ERRORS as error:
        check_encodable([messages, tools])
        raise ValueError(f"the chat template refuses the conversation: {error}") from error


def _with_arguments(messages: Sequence[Message], render: Callable[[list], str]) -> list[Message]:
    """Return messages with the arguments of their tool calls as a template reads them: objects, or else JSON texts."""
    objects, texts = deepcopy(list(messages)), deepcopy(list(messages))
    for call, same_in_texts in zip(_functions_called(objects), _functions_called(texts), strict=True):
        arguments = call.get("arguments", {})
        is_text = isinstance(arguments, str)
        call["arguments"] = json.loads(arguments) if is_text else arguments
        same_in_texts["arguments"] = arguments if is_text else json.dumps(arguments, ensure_ascii=False)
    with suppress(*TEMPLATE_ERRORS):
        render(objects)
        # A template that takes them for a text may write an object as Python does, here one that no message quotes.
        others, stand_in, text = deepcopy(objects), dict.fromkeys(PRIVATE_USE[:1], PRIVATE_USE[0]), ""
        for call in _functions_called(others):
            call["arguments"] = stand_in
        with suppress(*TEMPLATE_ERRORS):  # of a template that reads particular arguments
            text = render(others)
        if str(stand_in) not in text:
            return objects
    return texts


def _functions_called(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [call["function"] for message in messages for call in message.get("tool_calls") or ()]


def mask_without_marks(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    tools: list[dict] | None,
    turns: Collection[int],
) -> tuple[list[int], list[int]]:
    """Return the token ids and the loss mask (S,) of a conversation whose template has no ``{% generation %}`` marks.

    What the template writes for the answers among ``turns`` after their prompts is in the mask, up to the last token
    that ends an answer: reasoning, tool calls and the names of channels too, if the template shows them. The rendered
    texts are compared rather than the ids, because an answer that starts with a line break may share its first token
    with the prompt. Raises ValueError if the template refuses the conversation, or an answer cannot be found in it.
    """
    texts = _RenderedTexts(messages, tokenizer, template, tools)
    answers: dict[int, tuple[int, int]] = {}
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            answers[turn] = texts.answer(turn, after=max((end for _, end in answers.values()), default=0))
    encoded = tokenizer(texts.whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, mask = list(encoded["input_ids"]), [0] * len(encoded["input_ids"])
    ends = [end for _, end in encoded["offset_mapping"]]
    for start, end in (place for turn, place in answers.items() if turn in turns):
        answer = range(bisect_right(ends, start), bisect_right(ends, end))
        last = next((place for place in reversed(answer) if ids[place] in texts.ends), len(ids))
        for place in answer:
            # Anything the template writes after the end of the turn, such as a line break, is not part of the answer.
            mask[place] = int(place <= last)
    return ids, mask


@lru_cache(maxsize=8)
def end_tokens(tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> tuple[int, ...]:
    """Return the tokens that end an answer: end of sequence, and the special token in the chat template after one.

    The template is a text; by default it is the tokenizer's own.
    """
    tokens, answer = {tokenizer.eos_token_id} - {None}, PRIVATE_USE[0]
    messages: Any = [user_message("?"), {"role": "assistant", "content": answer}]
    with suppress(Exception):  # there may be no template, or one that refuses these messages
        text = str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
        first = tokenizer(text.rpartition(answer)[2].lstrip(), add_special_tokens=False).input_ids[0]
        tokens |= {first} if tokenizer.added_tokens_decoder[first].special else set()
    return tuple(sorted(tokens))


class _RenderedTexts:
    """What a template writes for a conversation and for parts of it."""

    def __init__(
        self, messages: list[Message], tokenizer: PreTrainedTokenizerBase, template: str, tools: list[dict] | None
    ) -> None:
        self.messages, self.tokenizer, self.template, self.tools = messages, tokenizer, template, tools
        self.whole, self.ends = self._text(messages), list(end_tokens(tokenizer, template))
        used = {*self.whole, *json.dumps([messages, tools], ensure_ascii=False, default=str)}
        self.stand_in = next((character for character in PRIVATE_USE if character not in used), PRIVATE_USE[0])

    def _text(self, messages: Sequence[Message], is_prompt: bool = False) -> str:
        return _apply(list(messages), self.tokenizer, self.template, self.tools, is_prompt, tokenize=False)

    def answer(self, turn: int, after: int) -> tuple[int, int]:
        """Return the half-open range of an answer in the whole text, where the answer before it ends at ``after``."""
        prompt = self._text(self.messages[:turn], is_prompt=True)
        answered = self._text(self.messages[: turn + 1])
        if self.whole.startswith(answered) and answered.startswith(prompt):
            return len(prompt), len(answered)
        # Many templates write the answers of earlier turns in another way than the last one: without the reasoning
        # (Qwen3), with another end (gpt-oss), or without the system message (Mistral).
        place = self._where_stand_in_is(turn) or self._where_tool_call_is(turn, prompt, after)
        if place is None:
            raise ValueError(
                "the chat template does not extend its own prompt, so the answers cannot be found in it; "
                "add {% generation %} marks to it, or choose another template"
            )
        start, end = place
        if self.whole.startswith(prompt) and len(prompt) < start:
            start = len(prompt)
        ending = re.compile(rf"\s*({'|'.join(map(re.escape, self.tokenizer.convert_ids_to_tokens(self.ends)))})")
        match = ending.match(self.whole, end) if self.ends else None
        return start, match.end() if match else end

    def _where_stand_in_is(self, turn: int) -> tuple[int, int] | None:
        """The range that changes if the answer is another one, unless anything else changes with it."""
        message = {"role": "assistant", "content": self.stand_in}
        try:
            changed = self._text([*self.messages[:turn], message, *self.messages[turn + 1 :]])
        except ValueError:  # the results of tools may have to follow calls
            return None
        before, _, behind = changed.partition(self.stand_in)
        end = len(self.whole) - len(behind)
        is_only_change = self.whole.startswith(before) and self.whole.endswith(behind) and len(before) <= end
        if self.stand_in in self.whole or changed.count(self.stand_in) != 1 or not is_only_change:
            return None
        return len(before), end

    def _where_tool_call_is(self, turn: int, prompt: str, after: int) -> tuple[int, int] | None:
        """The range of a tool call, written as after its own prompt: the first such text behind the answer before it.

        Unless a message between the two quotes it.
        """
        message, earlier = self.messages[turn], self.messages[:turn]
        between = list(takewhile(lambda message: message["role"] != "assistant", reversed(earlier)))
        without_reasoning = {name: value for name, value in message.items() if name not in REASONING}
        for form in (message, without_reasoning) if "tool_calls" in message else ():
            answered = self._text([*earlier, form])
            call = answered.removeprefix(prompt)
            is_quoted = any(call.strip() in str(message["content"]) for message in between)
            start = self.whole.find(call, after)
            if call and call != answered and start >= 0 and not is_quoted:
                return start, start + len(call)
        return None


def masked_text(ids: Sequence[int], mask: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Text:
    """Decode tokens into a text that shows those inside the loss mask in bold green and the others dimmed."""
    text, decoded, end = Text(), "", 0
    for is_masked_in, run in groupby(mask):
        end += len(list(run))
        # Decoding from the start keeps the space that SentencePiece drops at the start of a text.
        longer = str(tokenizer.decode(list(ids[:end]), clean_up_tokenization_spaces=False))
        text.append(longer[len(decoded) :], style="bold green" if is_masked_in else "dim")
        decoded = longer
    return text


def show_mask(tokenizer: str, files: list[str], template: str, max_length: int, limit: int) -> None:
    """Run `drafters show-mask`, see `train.commands.show_mask`."""
    loaded = load_tokenizer(tokenizer)
    conversations, dropped = load_conversations(files, limit)
    console = SafeConsole()
    console.print(f"{len(conversations):,} conversations read, {dropped}")
    num_masked = 0
    for conversation in conversations:
        try:
            ids, mask = encode(conversation, loaded, template, max_length)
        except ValueError as error:
            console.print(f"{conversation.id} is left out: {error}")
            continue
        num_masked += sum(mask)
        console.rule(f"{conversation.id}: {len(ids)} tokens, {sum(mask)} of the assistant")
        console.print(masked_text(ids, mask, loaded))
    if not num_masked:
        raise ValueError("the loss mask is zero everywhere: check --template and --max_length")


@dataclass(frozen=True)
class ReasoningMarks:
    """The marks around the reasoning in an answer."""

    texts: tuple[str, str]  # before the reasoning, and after it
    start: tuple[int, ...]  # the first as token ids
    end: tuple[int, ...]
    is_open: bool  # whether the prompt ends within the reasoning, so that an answer begins with it

    def span(self, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """The first and the end position of the reasoning in an answer, marks included; None if there is none.

        Reasoning without an end lasts until the answer was cut. An end without a start belongs to an answer that begins
        with the reasoning.
        """
        start, end = _find(token_ids, self.start), _find(token_ids, self.end)
        if start is None and end is None and not self.is_open:
            return None
        if start is None or self.is_open or (end is not None and end < start):
            start = 0
        return start, len(token_ids) if end is None else end + len(self.end)

    def without_reasoning(self, text: str) -> str:
        """What an answer says after its reasoning: nothing if the reasoning has no end, everything if there is none."""
        start, end = self.texts
        reasoning, mark, rest = text.partition(end)
        if mark:
            return rest.strip()
        return "" if self.is_open or start in reasoning else text


def find_marks(template: str, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> ReasoningMarks | None:
    """Return the marks that the text of a chat template contains, which rendered ``prompt``; None if it has none."""
    marks = next((pair for pair in MARKS if pair[1] in template), None)
    if marks is None:
        return None
    start, end = (tuple(tokenizer(mark, add_special_tokens=False).input_ids) for mark in marks)
    reverse = prompt[::-1]
    opened, closed = _find(reverse, start[::-1]), _find(reverse, end[::-1])
    return ReasoningMarks(marks, start, end, opened is not None and (closed is None or opened < closed))


def decode_answer(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Decode an answer without special tokens but with the marks of `MARKS`, which are special in some tokenizers.

    Without its marks, reasoning would be part of the answer for whoever reads the text, also for the chat template that
    renders the next prompt.
    """
    special = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    marks = {index for index, content in special.items() if any(content in pair for pair in MARKS)}
    if marks.isdisjoint(token_ids):
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))
    return str(tokenizer.decode([token for token in token_ids if token in marks or token not in special]))


def _find(tokens: Sequence[int], part: Sequence[int]) -> int | None:
    """Position at which a part first occurs in tokens."""
    places = range(len(tokens) - len(part) + 1) if part else ()
    return next((place for place in places if tuple(tokens[place : place + len(part)]) == tuple(part)), None)
