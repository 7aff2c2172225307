"""Reads conversations from records of many forms: the messages, and what was said besides their text."""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from data.files import MALFORMED
from data.sources import read_rows

ROLES = {"human": "user", "user": "user", "system": "system", "tool": "tool"}
ROLES |= dict.fromkeys(["gpt", "chatgpt", "assistant", "model", "bard", "bing", "claude"], "assistant")
# The roles that may come after a message; an assistant's message is a call of tools or an answer.
FOLLOWING = {"": "user", "user": "assistant", "call": "tool", "tool": "tool assistant", "answer": "user"}
REASONING = "reasoning_content", "thinking"  # names by which templates read the reasoning of a message
# The columns of a table that `parse` reads.
COLUMNS = {"id", "conversations", "conversation", "messages", "question", "answer", "instruction", "input", "output"}
COLUMNS |= {"response", "history", "input_ids", "loss_mask", "tokenizer", "template", "tools"}
NUM_EXAMPLES, NUM_REASONS = 3, 12  # places that are listed of each reason, and reasons that are listed


@dataclass(frozen=True)
class RecordedTokens:
    """The exact tokens of a conversation that the base answered itself; tokenising its text again may differ."""

    input_ids: array  # (S,) token ids; an answer that was cut at a length limit has no EOS
    loss_mask: array  # (S,) 1 on the tokens that the base generated
    tokenizer: str  # `tokenizer_hash` of the tokenizer that produced the ids
    template: str  # `short_hash` of the text of the chat template that rendered the conversation


@dataclass(frozen=True)
class Conversation:
    """The messages of a conversation: an optional system message, then user and assistant turns in alternation.

    Between a user's turn and the answer, the assistant may call tools, whose results are messages of their own.
    """

    id: str  # its name in its file
    messages: tuple[tuple[str, str], ...]  # pairs of a role (system, user, assistant or tool) and a text
    recorded: RecordedTokens | None = None  # used instead of the messages
    # What messages have besides their text, by index: reasoning, `tool_calls`, `tool_call_id`, `name`.
    details: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()  # descriptions of the tools that the assistant may call

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the messages as the dicts that chat templates read."""
        messages = enumerate(self.messages)
        return [{"role": role, "content": text} | self.details.get(index, {}) for index, (role, text) in messages]


@dataclass
class Dropped:
    """Counts records that were left out, by reason, and remembers where the first of them are."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)  # places and reasons
    what: str = "records"  # what is counted, in the plural

    def add(self, reason: str, place: str) -> None:
        """Count one record, and remember it if it is among the first `NUM_EXAMPLES` of its reason."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if self.counts[reason] <= NUM_EXAMPLES and len(self.examples) < NUM_EXAMPLES * NUM_REASONS:
            self.examples.append(f"{place}: {reason}")

    @property
    def total(self) -> int:
        """Number of records left out, for any reason."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        if not self.counts:
            return f"no {self.what} dropped"
        listed = sorted(self.counts.items(), key=lambda entry: -entry[1])
        reasons = ", ".join(f"{count} x {reason}" for reason, count in listed[:NUM_REASONS])
        if len(listed) > NUM_REASONS:
            reasons += f", {sum(count for _, count in listed[NUM_REASONS:])} for other reasons"
        return "\n  ".join([f"dropped {self.total} {self.what} ({reasons}), for example", *self.examples])


def load_conversations(
    files: Sequence[str], limit: int | None = None, requires_answers: bool = True
) -> tuple[list[Conversation], Dropped]:
    """Load up to ``limit`` conversations in total, and count the records that cannot be parsed.

    Files are named as in `data.sources.read_rows`; `parse` says what ``requires_answers`` does. Raises ValueError if a
    file cannot be read, or holds no usable conversation.
    """
    conversations: list[Conversation] = []
    dropped = Dropped()
    for file in files:
        read, last_reason = 0, "no records"
        for number, (place, record) in enumerate(read_rows(file, COLUMNS), 1):
            if limit is not None and len(conversations) >= limit:
                return conversations, dropped
            try:
                conversations.append(parse(record, number, requires_answers))
                read += 1
            except ValueError as error:
                last_reason = str(error)
                dropped.add(last_reason, f"{Path(file).name} {place}")
        if not read:
            raise ValueError(
                f"{file}: no usable conversation ({last_reason}); "
                'expected records like {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}'
            )
    return conversations, dropped


def parse(record: object, index: int, requires_answers: bool = True) -> Conversation:
    """Parse a record in ShareGPT (`conversations`, `from`, `value`) or OpenAI form (`messages`, `role`, `content`).

    A single exchange may also be given as `question` and `answer` (GSM8K) or as `instruction`, `input` and `output`
    (Alpaca; `response` is read like `output`), and several as a `history` of `user` and `bot` (MT-Bench-101). Records
    written by `drafters regenerate` also hold their tokens: `input_ids`, `loss_mask`, `tokenizer` and `template`.

    In OpenAI form, an assistant's message may hold its reasoning (`reasoning_content`, `reasoning` or `thinking`) and
    `tool_calls`, whose results are messages with the role `tool`; the record's `tools` describe the tools.

    Assistant turns before the first user turn are dropped, as in FastChat. A key whose value is null counts as missing,
    because parquet fills missing columns with null. Raises ValueError if the record is not a valid conversation; a
    ValueError in its place says why it could not be read, and is raised. Its position in the file is the id of a record
    that has none. The assistant's turns must be present and not empty unless only the user's are read.
    """
    if isinstance(record, ValueError):
        raise record
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
    last = ""
    for role, text, details in messages:
        if role not in FOLLOWING[last].split():
            raise ValueError("user and assistant do not alternate, or a call of a tool and its result")
        last = role if role != "assistant" else "call" if "tool_calls" in details else "answer"
        if last == "answer" and requires_answers and not text.strip():
            raise ValueError("an assistant turn is empty")
    tools = record.get("tools") or []
    tools = json.loads(tools) if isinstance(tools, str) else tools  # as tables hold them
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools is not a list of objects")
    if not requires_answers and (tools or any(role == "tool" for role, _, _ in messages)):
        raise ValueError("it holds tools or their results, which new answers cannot ask for")
    messages = [*system, *messages]
    return Conversation(
        str(record["id"]) if isinstance(record.get("id"), str | int) else str(index),
        tuple((role, text) for role, text, _ in messages),
        _recorded_tokens(record) if requires_answers and "input_ids" in record else None,
        {index: details for index, (_, _, details) in enumerate(messages) if details} if requires_answers else {},
        tuple(tools),
    )


def _object(value: object, problem: str) -> dict:
    """Return a JSON object without the keys whose value is null."""
    if not isinstance(value, dict):
        raise ValueError(problem)
    return {key: entry for key, entry in value.items() if entry is not None}


def _exchange(record: dict) -> list[dict] | None:
    """Return the messages of the forms that have no list of turns; None if it is none of them."""
    if "question" in record and "answer" in record:
        pairs = [(record["question"], record["answer"])]
    elif "instruction" in record and (key := next((key for key in ("output", "response") if key in record), "")):
        parts = [record["instruction"], record.get("input")]
        pairs = [("\n\n".join(part for part in parts if isinstance(part, str) and part), record[key])]
    elif isinstance(record.get("history"), list):
        turns = [_object(turn, "a turn is not a JSON object") for turn in record["history"]]
        pairs = [(turn.get("user"), turn.get("bot")) for turn in turns]
    else:
        return None
    roles = "user", "assistant"
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def _message(turn: object) -> tuple[str, str, dict[str, Any]]:
    """Return role, text and details of a message."""
    turn = _object(turn, "a turn is not a JSON object")
    speaker, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise ValueError(f"unknown speaker {shortened(speaker)}")
    details: dict[str, Any] = {}
    if ROLES[speaker] == "assistant":
        reasoning = next((turn[name] for name in (*REASONING, "reasoning") if turn.get(name)), None)
        if not isinstance(reasoning, str | None):
            raise ValueError("the reasoning of a turn is not a text")
        details = dict.fromkeys(REASONING, reasoning) if reasoning else {}
        if turn.get("tool_calls"):
            details["tool_calls"], text = _tool_calls(turn["tool_calls"]), text or ""
    elif ROLES[speaker] == "tool":
        details = {name: turn[name] for name in ("tool_call_id", "name") if isinstance(turn.get(name), str)}
    if not isinstance(text, str):
        raise ValueError("a turn has no text")
    return ROLES[speaker], text, details


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, as templates read them; the OpenAI form holds them as JSON texts."""
    checked = []
    try:
        for call in calls:
            function = call["function"]
            arguments = function.get("arguments", {})
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            function = function | {"name": str(function["name"]), "arguments": arguments}
            checked.append(call | {"function": function})
    except MALFORMED as error:
        raise ValueError("tool_calls is not a list of objects like {function: {name, arguments as JSON}}") from error
    return checked


def _recorded_tokens(record: dict) -> RecordedTokens:
    tokenizer, template = record.get("tokenizer"), record.get("template")
    if not isinstance(tokenizer, str) or not isinstance(template, str):
        raise ValueError("input_ids without the tokenizer and template they belong to")
    try:
        ids, mask = array("i", record["input_ids"]), array("b", record["loss_mask"])
    except MALFORMED as error:
        raise ValueError("input_ids or loss_mask is not a list of whole numbers") from error
    if not ids or min(ids) < 0 or not set(mask) <= {0, 1} or len(ids) != len(mask):
        raise ValueError("input_ids is empty or negative, or loss_mask is not as many zeros and ones")
    return RecordedTokens(ids, mask, tokenizer, template)
