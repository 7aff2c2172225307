"""Parses conversations, and encodes them with a chat template into tokens and their loss mask."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

from data.loss_mask import REASONING, mask_without_marks, render
from data.reasoning import with_thinking
from data.tokenizer import short_hash, tokenizer_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = {"human": "user", "user": "user", "system": "system", "tool": "tool"}
ROLES |= dict.fromkeys(["gpt", "chatgpt", "assistant", "model", "bard", "bing", "claude"], "assistant")
# The roles that may come after a message; an assistant's message is a call of tools or an answer.
FOLLOWING = {"": "user", "user": "assistant", "call": "tool", "tool": "tool assistant", "answer": "user"}
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)

# Both reproduce FastChat's prompts exactly. `{% generation %}` marks what the loss is taken on: the answer and its EOS.
TEMPLATES = {
    "vicuna_v1.1": (
        "{%- if messages[0]['role'] == 'system' -%}{%- set system = messages[0]['content'] -%}"
        f"{{%- else -%}}{{%- set system = {VICUNA_SYSTEM!r} -%}}{{%- endif -%}}"
        "{{- bos_token + system + ' ' -}}"
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'user' -%}{{- 'USER: ' + message['content'] + ' ' -}}"
        "{%- elif message['role'] == 'assistant' -%}{{- 'ASSISTANT:' -}}"
        "{%- generation -%}{{- ' ' + message['content'] + eos_token -}}{%- endgeneration -%}"
        "{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"
    ),
    "llama2_chat": (
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'user' -%}"
        "{{- bos_token + '[INST] ' -}}"
        "{%- if loop.index0 == 1 and messages[0]['role'] == 'system' -%}"
        "{{- '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' -}}{%- endif -%}"
        "{{- message['content'] + ' [/INST]' -}}"
        "{%- elif message['role'] == 'assistant' -%}"
        "{%- generation -%}{{- ' ' + message['content'] + ' ' + eos_token -}}{%- endgeneration -%}"
        "{%- endif -%}{%- endfor -%}"
    ),
}


@dataclass(frozen=True)
class RecordedTokens:
    """The exact tokens of a conversation that the base answered itself; tokenising its text again may differ.

    Args:
        input_ids: (S,) token ids. An answer that was cut at a length limit has no EOS.
        loss_mask: (S,) 1 on the tokens that the base generated.
        tokenizer: `tokenizer_hash` of the tokenizer that produced the ids.
        template: `short_hash` of the text of the chat template that rendered the conversation.
    """

    input_ids: array
    loss_mask: array
    tokenizer: str
    template: str


@dataclass(frozen=True)
class Conversation:
    """The messages of a conversation: an optional system message, then user and assistant turns in alternation.

    Between a user's turn and the answer, the assistant may call tools, whose results are messages of their own.

    Args:
        id: Name of the conversation in its file.
        messages: (role, text) pairs; a role is "system", "user", "assistant" or "tool".
        recorded: The tokens of the conversation, if the record holds them. They are used instead of the messages.
        details: What messages have besides their text, by index: reasoning, ``tool_calls``, ``tool_call_id``, ``name``.
        tools: Descriptions of the tools that the assistant may call.
    """

    id: str
    messages: tuple[tuple[str, str], ...]
    recorded: RecordedTokens | None = None
    details: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the messages as the dicts that chat templates read."""
        return [
            {"role": role, "content": text} | self.details.get(index, {})
            for index, (role, text) in enumerate(self.messages)
        ]


def parse(record: object, index: int, requires_answers: bool = True) -> Conversation:
    """Parse a record in ShareGPT (`conversations`, `from`, `value`) or OpenAI form (`messages`, `role`, `content`).

    A single exchange may also be given as `question` and `answer` (GSM8K) or as `instruction`, `input` and `output`
    (Alpaca; `response` is read like `output`), and several as a `history` of `user` and `bot` (MT-Bench-101). Records
    written by `drafters regenerate` also hold their tokens: `input_ids`, `loss_mask`, `tokenizer` and `template`.

    In OpenAI form, an assistant's message may hold its reasoning (`reasoning_content`, `reasoning` or `thinking`) and
    `tool_calls`, whose results are messages with the role `tool`; the record's `tools` describe the tools.

    Assistant turns before the first user turn are dropped, as in FastChat. A key whose value is null counts as missing,
    because parquet fills missing columns with null.

    Args:
        record: The decoded JSON object. In place of the record, or of a turn in it, there may be a ValueError that says
            why it could not be read; it is raised.
        index: Position of the record in its file, used as the id of a record that has none.
        requires_answers: Whether the assistant's turns must be present and not empty. Pass false where only the user's
            turns are read.

    Raises:
        ValueError: The record is not a valid conversation.
    """
    record = _object(record, "not a JSON object")
    turns = next((record[name] for name in ("conversations", "conversation", "messages") if record.get(name)), None)
    turns = turns or _exchange(record)
    if not isinstance(turns, list) or not turns:
        raise ValueError("no turns: neither `conversations` nor `messages` holds any")
    messages = [_message(turn) for turn in turns]
    system = messages[:1] if messages[0][0] == "system" else []
    messages = messages[len(system) :]
    while messages and messages[0][0] == "assistant":
        messages.pop(0)
    if not any(role == "assistant" for role, _, _ in messages) and (requires_answers or not messages):
        raise ValueError(f"no {'assistant turn after a ' if requires_answers else ''}user turn")
    _check_order(messages)
    if requires_answers and any(
        role == "assistant" and not (text.strip() or "tool_calls" in details) for role, text, details in messages
    ):
        raise ValueError("an assistant turn is empty")
    tools = _tools(record.get("tools") or [])
    if not requires_answers and (tools or any(role == "tool" for role, _, _ in messages)):
        raise ValueError("it holds tools or their results, which new answers cannot ask for")
    messages = [*system, *messages]
    name = record.get("id")
    return Conversation(
        _valid(str(name), "its id") if isinstance(name, str | int) else str(index),
        tuple((role, text) for role, text, _ in messages),
        _recorded_tokens(record) if requires_answers and "input_ids" in record else None,
        {index: details for index, (_, _, details) in enumerate(messages) if details} if requires_answers else {},
        tools,
    )


def _check_order(messages: Sequence[tuple[str, str, dict]]) -> None:
    """Raise ValueError unless user and assistant alternate, with the results of tools after the assistant's calls."""
    last = ""
    for role, _, details in messages:
        if role not in FOLLOWING[last].split():
            raise ValueError("user and assistant do not alternate, or a call of a tool and its result")
        last = role if role != "assistant" else "call" if "tool_calls" in details else "answer"


def _object(value: object, problem: str) -> dict:
    """Return a JSON object without the keys whose value is null."""
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, dict):
        raise ValueError(problem)
    return {key: entry for key, entry in value.items() if entry is not None}


def _valid(text: str, what: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is not valid Unicode (half of a surrogate pair)") from error
    return text


def _recorded_tokens(record: dict) -> RecordedTokens:
    tokenizer, template = record.get("tokenizer"), record.get("template")
    if not isinstance(tokenizer, str) or not isinstance(template, str):
        raise ValueError("input_ids without the tokenizer and template they belong to")
    try:
        ids, mask = array("i", record["input_ids"]), array("b", record["loss_mask"])
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError("input_ids or loss_mask is not a list of whole numbers") from error
    if not ids or min(ids) < 0 or not set(mask) <= {0, 1}:
        raise ValueError("input_ids is empty or holds a negative token, or loss_mask holds a number other than 0 and 1")
    if len(ids) != len(mask):
        raise ValueError("input_ids and loss_mask differ in length")
    return RecordedTokens(ids, mask, tokenizer, template)


def _exchange(record: dict) -> list[dict] | None:
    if "question" in record and "answer" in record:
        question, answer = record["question"], record["answer"]
    elif "instruction" in record and (key := next((key for key in ("output", "response") if key in record), "")):
        parts = [record["instruction"], record.get("input")]
        question, answer = "\n\n".join(part for part in parts if isinstance(part, str) and part), record[key]
    elif isinstance(record.get("history"), list):
        pairs = [_object(pair, "a turn is not a JSON object") for pair in record["history"]]
        sides = ("user", "user"), ("assistant", "bot")
        return [{"role": role, "content": pair.get(key)} for pair in pairs for role, key in sides]
    else:
        return None
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _message(turn: object) -> tuple[str, str, dict[str, Any]]:
    """Return role, text and details of a message."""
    turn = _object(turn, "a turn is not a JSON object")
    speaker, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise ValueError(f"unknown speaker {shortened(speaker)}")
    role = ROLES[speaker]
    details: dict[str, Any] = {}
    if role == "assistant":
        if reasoning := next((turn[name] for name in (*REASONING, "reasoning") if turn.get(name)), None):
            if not isinstance(reasoning, str):
                raise ValueError("the reasoning of a turn is not a text")
            details = dict.fromkeys(REASONING, _valid(reasoning, "a turn"))
        if turn.get("tool_calls"):
            details["tool_calls"] = _tool_calls(turn["tool_calls"])
            text = "" if text is None else text
    elif role == "tool":
        details = {name: turn[name] for name in ("tool_call_id", "name") if isinstance(turn.get(name), str)}
    if not isinstance(text, str):
        raise ValueError("a turn has no text")
    return role, _valid(text, "a turn"), details


def _tool_calls(calls: object) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, as templates read them; the OpenAI form holds them as JSON texts."""
    checked: list[dict[str, Any]] = []
    listed: list[Any] = calls if isinstance(calls, list) else [None]
    for call in listed:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("tool_calls is not a list of objects like {function: {name, arguments}}")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise ValueError("the arguments of a tool call are not JSON") from error
        checked.append(call | {"function": function | {"arguments": arguments}})
    _valid(_as_json(checked, "a tool call"), "a tool call")
    return checked


def _tools(tools: object) -> tuple[dict[str, Any], ...]:
    if isinstance(tools, str):  # as tables hold them
        tools = json.loads(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools is not a list of objects")
    _valid(_as_json(tools, "a tool"), "a tool")
    return tuple(tools)


def _as_json(value: object, name: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:  # a date from a table, or an object that names a key twice
        raise ValueError(f"{name} is not JSON ({error})") from error


def resolve_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a chat template.

    Args:
        name: One of `TEMPLATES`, or ``tokenizer`` for the tokenizer's own template. With ``:thinking=on`` or
            ``:thinking=off`` after it, the template's own switch asks for answers with or without reasoning.
        tokenizer: Tokenizer of the base.

    Raises:
        ValueError: There is no such template, or it has no such switch.
    """
    name, _, option = name.partition(":")
    if option:
        return with_thinking(resolve_template(name, tokenizer), name, option)
    if name in TEMPLATES:
        return TEMPLATES[name]
    if name != "tokenizer":
        raise ValueError(f"unknown chat template {name!r}; choose one of: tokenizer, {', '.join(TEMPLATES)}")
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer has no chat template of its own; choose one of: {', '.join(TEMPLATES)}")
    return tokenizer.get_chat_template()


def encode(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, template: str, max_length: int | None = None
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation and its loss mask, both (S,).

    The mask is 1 on the assistant's tokens, its tool calls included, and on the EOS after each answer.

    Args:
        conversation: The conversation to encode.
        tokenizer: Tokenizer of the base.
        template: Name of the chat template, see `resolve_template`.
        max_length: Tokens after this many are cut off. None keeps all.

    Raises:
        ValueError: The template refuses the conversation, or recorded tokens belong to another tokenizer or template.
    """
    text, messages = resolve_template(template, tokenizer), conversation.as_dicts()
    if conversation.recorded:
        return _encode_recorded(conversation.recorded, tokenizer, text, max_length)
    tools = list(conversation.tools) or None
    if "{% generation" in text or "{%- generation" in text:
        ids, mask = render(messages, tokenizer, text, tools=tools, return_assistant_tokens_mask=True)
    else:
        ids, mask = mask_without_marks(messages, tokenizer, text, tools)
    return ids[:max_length], mask[:max_length]


def _encode_recorded(
    recorded: RecordedTokens, tokenizer: PreTrainedTokenizerBase, text: str, max_length: int | None
) -> tuple[list[int], list[int]]:
    for name, expected, found in (
        ("tokenizer", tokenizer_hash(tokenizer), recorded.tokenizer),
        ("chat template", short_hash(text), recorded.template),
    ):
        if expected != found:
            raise ValueError(
                f"its tokens were written with another {name}: use that one, or remove input_ids from the records"
            )
    if max(recorded.input_ids) >= len(tokenizer):
        raise ValueError("input_ids holds tokens that the tokenizer does not know")
    return recorded.input_ids[:max_length].tolist(), recorded.loss_mask[:max_length].tolist()


def encode_prompt(
    messages: Sequence[tuple[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Return the token ids of a prompt: the messages and the start of the assistant's next turn.

    Args:
        messages: (role, text) pairs that end with a user message.
        tokenizer: Tokenizer of the base.
        template: Name of the chat template, see `resolve_template`.
        tools: Definitions of the tools that the template offers, each a JSON object.
    """
    dicts, options = Conversation("prompt", tuple(messages)).as_dicts(), {"tools": list(tools)} if tools else {}
    return render(dicts, tokenizer, resolve_template(template, tokenizer), add_generation_prompt=True, **options)[0]
