"""Reads records of many forms: conversations, as the messages that chat templates read, and documents of text."""

import json
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, ParamSpec, TypeVar

from data.files import MALFORMED, check_encodable
from data.sources import is_text, paragraphs, read_rows, text_paths

# The speakers of turns: OpenAI, ShareGPT and its kin, and for calls of tools LLaMA-Factory and OpenAI's older form.
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user"}
ROLES |= dict.fromkeys(["assistant", "gpt", "chatgpt", "model", "bard", "bing", "claude", "function_call"], "assistant")
ROLES |= dict.fromkeys(["tool", "observation", "function"], "tool")
# The columns of a record that are read: the first of a kind that holds anything.
COLUMNS = {
    "turns": ("conversations", "messages", "conversation", "data"),  # ShareGPT, OpenAI, Capybara, UltraChat
    "question": ("instruction", "question", "prompt", "query", "input"),  # Alpaca, GSM8K, TRL, MetaMath and xLAM
    "context": ("input", "context"),  # Alpaca, Dolly
    "answer": ("output", "response", "answer", "completion", "answers"),  # Alpaca, Dolly, GSM8K, TRL, xLAM
    "history": ("history",),  # LLaMA-Factory, MT-Bench-101
    "system": ("system", "system_prompt"),  # OpenThoughts and LLaMA-Factory, OpenOrca
    "tools": ("tools",),
}
PAIRS = ("user", "bot"), ("input", "output")  # the keys of an exchange: MT-Bench-101, Capybara
NOT_READ = {"id", "cut", "input_ids", "loss_mask", "tokenizer", "template"}  # columns that are no part of the messages
REASONING = "reasoning_content", "thinking"  # names by which templates read the reasoning of a message
IN_LOSS = "weight", "loss", "train"  # of OpenAI, ms-swift and axolotl: 0 or false on a turn that is not learned
# The roles that may come after a message; an assistant's message is a call of tools or an answer.
FOLLOWING = {"": "user", "user": "assistant", "call": "tool", "tool": "tool assistant", "answer": "user tool"}
NUM_EXAMPLES, NUM_REASONS = 3, 12  # places that are listed of each reason, and reasons or columns that are listed

P = ParamSpec("P")
T = TypeVar("T")
Message = Mapping[str, Any]  # as chat templates read it: role, content, and what else it holds


def user_message(text: str) -> Message:
    """Return what the user says as a message."""
    return {"role": "user", "content": text}


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
    # Each holds `role` (system, user, assistant or tool) and `content`, and some hold reasoning or calls of tools.
    messages: tuple[Message, ...]
    recorded: RecordedTokens | None = None  # used instead of the messages
    tools: tuple[dict[str, Any], ...] = ()  # descriptions of the tools that the assistant may call
    not_learned: frozenset[int] = frozenset()  # indices of the assistant's messages that are left out of the loss


@dataclass
class Dropped:
    """Counts records that were left out, by reason, and remembers where the first of them are."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)  # places and reasons
    what: str = "records"  # what is counted, in the plural
    unread: Counter[str] = field(default_factory=Counter)  # columns that were not read, in how many records

    def add(self, reason: str, place: str) -> None:
        """Count one record, and remember it if it is among the first `NUM_EXAMPLES` of its reason."""
        self.counts[reason] += 1
        if self.counts[reason] <= NUM_EXAMPLES and len(self.examples) < NUM_EXAMPLES * NUM_REASONS:
            self.examples.append(f"{place}: {reason}")

    def __str__(self) -> str:
        text, columns = f"no {self.what} dropped", _listed(self.unread, "{0} ({1:,})", "{} more")
        if self.counts:
            reasons = _listed(self.counts, "{1} x {0}", "{} for other reasons")
            text = "\n  ".join([f"dropped {self.counts.total()} {self.what} ({reasons}), for example", *self.examples])
        return f"{text}\ncolumns not read, with the number of their {self.what}: {columns}" if columns else text


def _listed(counts: Counter[str], form: str, more: str) -> str:
    """The largest counts in a line, and what is left."""
    largest = counts.most_common(NUM_REASONS)
    rest = counts.total() - sum(count for _, count in largest)
    return ", ".join([form.format(*entry) for entry in largest] + ([more.format(rest)] if rest else []))


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
        for number, (place, record) in enumerate(read_rows(file), 1):
            if limit is not None and len(conversations) >= limit:
                return conversations, dropped
            try:
                conversation = parse(record, number, requires_answers, dropped.unread)
                has_tools = conversation.tools or any(message["role"] == "tool" for message in conversation.messages)
                if has_tools and not requires_answers:
                    raise ValueError("it holds tools or their results, which new answers cannot ask for")
                conversations.append(conversation)
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


def _not_too_deep(read: Callable[P, T]) -> Callable[P, T]:
    """Let a function that reads JSON values raise ValueError where they are nested too deeply."""

    @wraps(read)
    def refuse(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return read(*arguments, **options)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error

    return refuse


@_not_too_deep
def parse(
    record: object, index: int, requires_answers: bool = True, unread: Counter[str] | None = None
) -> Conversation:
    """Parse a record in ShareGPT (`conversations`, `from`, `value`) or OpenAI form (`messages`, `role`, `content`).

    `COLUMNS` has the other forms: exchanges of a question, with its context, and an answer, and a `history` of such
    exchanges before it. A system prompt may be a column of its own. Records written by `drafters regenerate` also hold
    their tokens: `input_ids`, `loss_mask`, `tokenizer` and `template`.

    An assistant's message may hold its reasoning (`reasoning_content`, `reasoning` or `thinking`) and `tool_calls`,
    whose results are messages with the role `tool`; the record's `tools` describe the tools.

    Assistant turns before the first user turn are dropped, as in FastChat. A key whose value is null counts as missing,
    because tables fill missing keys with null. Raises ValueError if the record is not a valid conversation; a
    ValueError in its place says why it could not be read, and is raised. Its position in the file is the id of a record
    that has none. The assistant's turns must be present and not empty unless only the user's are read. ``unread``
    counts the other columns that hold texts, lists or objects which no message repeats.
    """
    if isinstance(record, ValueError):
        raise record
    record = _object(record, "not a JSON object")
    columns = _take_columns(record)
    turns = [_message(turn) for turn in _turns(columns)]
    system = turns.pop(0)[0] if turns and turns[0][0]["role"] == "system" else None
    if prompt := columns.get("system"):
        if not isinstance(prompt, str) or (system and system["content"] != prompt):
            raise ValueError("its system prompt is not a text, or another one than that of the first turn")
        system = {"role": "system", "content": prompt}
    while turns and turns[0][0]["role"] == "assistant":
        turns.pop(0)
    _check_order([message for message, _ in turns], requires_answers)
    first = [system] if system else []
    messages = (*first, *(message for message, _ in turns))
    tools, name = _tools(columns.get("tools")), record.get("id")
    if system and "<tools>" in system["content"]:  # Hermes: the system prompt defines them already
        tools = ()
    conversation = Conversation(
        str(name) if isinstance(name, str | int) else str(index),
        messages,
        _recorded_tokens(record) if requires_answers and "input_ids" in record else None,
        tools,
        frozenset(index for index, (_, is_learned) in enumerate(turns, len(first)) if not is_learned),
    )
    check_encodable([conversation.id, messages, tools])
    if unread is not None:
        texts = {message["content"] for message in messages}
        left = {name: value for name, value in record.items() if value and name not in NOT_READ}
        unread.update(name for name, value in left.items() if isinstance(value, list | dict))
        unread.update(name for name, value in left.items() if isinstance(value, str) and value not in texts)
    return conversation


def _check_order(messages: Sequence[Message], requires_answers: bool) -> None:
    """Raise ValueError if users, assistant and tools do not take turns, or an answer is missing."""
    if not any(message["role"] == "assistant" for message in messages) and (requires_answers or not messages):
        raise ValueError(f"no {'assistant turn after a ' if requires_answers else ''}user turn")
    last = ""
    for message in messages:
        if message["role"] not in FOLLOWING[last].split():
            raise ValueError("user and assistant do not alternate, or a call of a tool and its result")
        last = message["role"] if message["role"] != "assistant" else "call" if "tool_calls" in message else "answer"
        if last == "answer" and requires_answers and not message["content"].strip():
            raise ValueError("an assistant turn is empty")


@_not_too_deep
def parse_chat(turns: Sequence, tools: Sequence) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    """Return messages and tools of OpenAI's API as chat templates read them, with all else that the messages hold."""
    turns = [_object(turn, "a message is not a JSON object") for turn in turns]
    return [_without_nulls(turn) | _message(turn)[0] for turn in turns], _tools(tools)


def read_texts(files: Sequence[str]) -> Iterator[str]:
    """Yield the documents of files in order, skipping empty ones, for drafters that index plain text.

    In .jsonl, .json or .parquet files, a record with a field ``text`` is one document; of any other record, which is
    read as by `parse`, each message is one. In files with other names, which are text, the documents are the
    paragraphs, separated by blank lines. Records without text are counted in a warning. Raises ValueError if a file
    cannot be read.
    """
    dropped, num_read = Dropped(), 0
    for file, path in zip(files, text_paths(files), strict=True):
        plain = ((file, {"text": text}) for text in paragraphs(file, path))
        for place, row in plain if is_text(path) else read_rows(file):
            try:
                yield from (text for text in _documents(row) if text.strip())
                num_read += 1
            except ValueError as error:
                dropped.add(str(error), f"{path.name} {place}")
    if dropped.counts and not num_read:
        raise ValueError(f"there is no text in {', '.join(files)}: {dropped}")
    if dropped.counts:
        logging.getLogger(__name__).warning("%s", dropped)


def _documents(row: object) -> list[str]:
    if not isinstance(row, dict) or "text" not in row:
        return [message["content"] for message in parse(row, 0, requires_answers=False).messages]
    if not isinstance(row["text"], str):
        raise ValueError("`text` is not a text")
    check_encodable(row["text"])
    return [row["text"]]


def _object(value: object, problem: str) -> dict:
    """Return a JSON object without the keys whose value is null."""
    if not isinstance(value, dict):
        raise ValueError(problem)
    return {key: entry for key, entry in value.items() if entry is not None}


def _without_nulls(value: Any) -> Any:
    """Return a JSON value without the keys, at any depth, by whose nulls a table fills up objects of other keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _from_json(value: Any, problem: str) -> Any:
    """Return what a JSON text holds, as which tables keep nested values; any other value is returned as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(problem) from error


def _take_columns(record: dict) -> dict[str, Any]:
    """Remove from a record the columns that make up its messages, and return them by kind."""
    columns: dict[str, Any] = {}
    for kind, names in COLUMNS.items():
        held = [name for name in names if name in record]
        if kind == "turns":
            held = [name for name in held if isinstance(record[name], list) or str(record[name]).startswith("[")]
        is_read = not columns.get("turns") or kind not in ("question", "context", "answer", "history")
        if isinstance(columns.get("question"), list) and kind in ("context", "history"):
            is_read = False  # TRL's have a prompt and a completion
        if held and is_read:
            name = next((name for name in held if record[name]), held[0])
            columns["calls" if name == "answers" else kind] = value = record.pop(name)
            if name == "data":  # questions and answers in turn
                value = _from_json(value, "`data` is not JSON")
                columns[kind] = [value[place : place + 2] for place in range(0, len(value), 2)]
    return columns


def _turns(columns: dict[str, Any]) -> list:
    """Return the turns of a record, as messages that are still to be checked."""
    question, context, answer = (columns.get(name) for name in ("question", "context", "answer"))
    if turns := _from_json(columns.get("turns"), "`conversations` or `messages` is not JSON"):
        return _exchanges(turns) or turns
    if isinstance(question, list):  # TRL: the messages of the prompt, and those of the completion
        return [*question, *(answer if isinstance(answer, list) else _exchanges([[None, answer]]))]
    history = _from_json(columns.get("history"), "history is not JSON")
    messages = _exchanges(history)
    if history and not messages:
        raise ValueError("history is not a list of exchanges, such as [question, answer]")
    if question is not None or context is not None:
        parts = [part for part in (question, context) if part not in (None, "", [], {})]
        if not all(isinstance(part, str) for part in parts) or isinstance(answer, list):
            raise ValueError("its question, context or answer is not a text")
        messages += _exchanges([["\n\n".join(parts) if parts else question, answer]])
    if not messages:
        raise ValueError("no turns: neither `conversations` nor `messages` holds any")
    calls = _from_json(columns.get("calls"), "`answers` is not JSON")
    return messages if calls is None else [*messages, {"role": "assistant", "tool_calls": calls}]


def _exchanges(values: Any) -> list[dict[str, Any]]:
    """Return the messages of a list of exchanges; none if it is none."""
    pairs = [_pair(value) for value in values] if isinstance(values, list) else []
    if None in pairs:
        return []
    said = [(role, text) for pair in pairs if pair for role, text in zip(("user", "assistant"), pair, strict=True)]
    return [{"role": role, "content": text} for role, text in said if text is not None]


def _pair(value: Any) -> tuple[Any, Any] | None:
    """Return question and answer of an exchange; None if it is none."""
    if isinstance(value, dict):
        return next(((value[first], value.get(second)) for first, second in PAIRS if first in value), None)
    return (*value, None)[:2] if isinstance(value, list) and 0 < len(value) < 3 else None


def _message(turn: Any) -> tuple[dict[str, Any], bool]:
    """Return a turn as a message that templates read, and whether it is learned."""
    turn = _object(_from_json(turn, "a turn is not a JSON object"), "a turn is not a JSON object")
    speaker, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise ValueError(f"unknown speaker {shortened(speaker)}")
    message: dict[str, Any] = {"role": ROLES[speaker], "content": text_of(content)}
    message |= {name: turn[name] for name in ("tool_call_id", "name") if isinstance(turn.get(name), str)}
    if message["role"] == "assistant":
        reasoning = next((turn[name] for name in (*REASONING, "reasoning") if turn.get(name)), None)
        if not isinstance(reasoning, str | None):
            raise ValueError("the reasoning of a turn is not a text")
        message |= dict.fromkeys(REASONING, reasoning) if reasoning else {}
        calls = _from_json(turn.get("tool_calls"), "tool_calls is not JSON") or turn.get("function_call")
        if isinstance(calls, dict) and not any(calls.values()):  # what a table fills up
            calls = None
        if speaker == "function_call":
            calls, message["content"] = _from_json(content, "a call of a function is not JSON"), ""
        if calls:
            message["tool_calls"] = _tool_calls(calls if isinstance(calls, list) else [calls])
            message["content"] = message["content"] or ""
    if not isinstance(message["content"], str):
        raise ValueError("a turn has no text")
    return message, all(turn.get(name, True) not in (0, False) for name in IN_LOSS)


def text_of(content: Any) -> Any:
    """Return the content of a message as a text if it is a list of parts, all of which are texts."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        raise ValueError("a message has parts that are not texts, such as images")
    return "\n".join(texts)


def _tool_calls(calls: list) -> list[dict[str, Any]]:
    """Check tool calls, and return them in OpenAI's form; their arguments stay objects or JSON texts, as they are."""
    checked = []
    try:
        for call in map(_without_nulls, calls):
            call = call if "function" in call else {"type": "function", "function": call}
            arguments = call["function"].setdefault("arguments", {})
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(call["function"]["name"], str) or not isinstance(arguments, dict):
                raise ValueError("no name, or arguments that are no object")
            checked.append(call)
    except MALFORMED as error:
        raise ValueError("tool_calls is not a list of objects like {function: {name, arguments as JSON}}") from error
    return checked


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Return definitions of tools in OpenAI's form."""
    tools = (_from_json(tools, "tools is not JSON") if isinstance(tools, str) else _without_nulls(tools)) or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools is not a list of objects")
    return tuple({"type": "function", "function": tool} if "name" in tool else tool for tool in tools)


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
