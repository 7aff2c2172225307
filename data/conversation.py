"""A conversation, the chat templates that render it, and the loss mask that marks the assistant's tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from reprlib import repr as shortened
from typing import TYPE_CHECKING

from data.tokenizer import short_hash, tokenizer_hash

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

ROLES = {"human": "user", "user": "user", "system": "system"}
ROLES |= dict.fromkeys(["gpt", "chatgpt", "assistant", "model", "bard", "bing", "claude"], "assistant")

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)

# Both follow FastChat's strings exactly: `{% generation %}` marks what the loss sees, the answer and its EOS.
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
class DraftedTokens:
    """A conversation as the very tokens that the base read and wrote: its text may not give them back.

    Args:
        input_ids: (S,) tokens; an answer that was cut short has no EOS.
        loss_mask: (S,) 1 on the base's own tokens.
        tokenizer: `tokenizer_hash` of the tokenizer they belong to.
        template: `short_hash` of the text of the chat template they were rendered with.
    """

    input_ids: array
    loss_mask: array
    tokenizer: str
    template: str


@dataclass(frozen=True)
class Conversation:
    """What was said, in turns: an optional system message, then user and assistant in alternation."""

    id: str
    messages: tuple[tuple[str, str], ...]  # (role, text); the roles are "system", "user", "assistant"
    written: DraftedTokens | None = None  # taken as it is, in place of the messages

    def as_dicts(self) -> list[dict[str, str]]:
        """Return the messages in the form that chat templates read."""
        return [{"role": role, "content": text} for role, text in self.messages]


def parse(record: object, index: int, needs_answers: bool = True) -> Conversation:
    """Read one record of ShareGPT (`conversations`, `from`, `value`) or OpenAI form (`messages`, `role`, `content`).

    A single exchange may also stand as `question`, `answer` (GSM8K) or `instruction`, `input`, `output` (Alpaca; also
    `response` for `output`), several as `history` of `user` and `bot` (MT-Bench-101).
    Assistant turns before the first user turn are dropped, as FastChat does. Broken records raise `ValueError`.
    What `drafters regenerate` wrote carries its tokens: `input_ids`, `loss_mask`, `tokenizer`, `template`.
    A key without a value (null, as parquet fills what a row lacks) counts as missing.

    Args:
        record: the decoded JSON object; in its place, or a turn's, may stand the ValueError that says why it is not.
        index: place of the record in its file, the id where the record has none.
        needs_answers: False where only the user's turns are wanted: the answers may be empty, or missing.
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
    if "assistant" not in dict(messages) and (needs_answers or not messages):
        raise ValueError(f"no {'assistant turn after a ' if needs_answers else ''}user turn")
    if any(role != ("user", "assistant")[n % 2] for n, (role, _) in enumerate(messages)):
        raise ValueError("user and assistant do not alternate")
    if needs_answers and any(role == "assistant" and not text.strip() for role, text in messages):
        raise ValueError("an assistant turn is empty")
    written = _written(record) if needs_answers and "input_ids" in record else None
    name = record.get("id")
    return Conversation(
        _valid(str(name), "its id") if isinstance(name, str | int) else str(index), (*system, *messages), written
    )


def _object(value: object, problem: str) -> dict:
    """A JSON object without the keys that have no value."""
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


def _written(record: dict) -> DraftedTokens:
    ids, mask, *names = (record.get(key) for key in ("input_ids", "loss_mask", "tokenizer", "template"))
    if not all(isinstance(name, str) for name in names):
        raise ValueError("input_ids without the tokenizer and template they belong to")
    try:
        written = DraftedTokens(array("i", ids), array("b", mask), *names)
    except (TypeError, OverflowError) as error:
        raise ValueError("input_ids or loss_mask is not a list of whole numbers") from error
    if not written.input_ids or min(written.input_ids) < 0 or not set(written.loss_mask) <= {0, 1}:
        raise ValueError("input_ids holds no or negative tokens, or loss_mask another number than 0 and 1")
    if len(written.input_ids) != len(written.loss_mask):
        raise ValueError("input_ids and loss_mask differ in length")
    return written


def _exchange(record: dict) -> list[dict] | None:
    if "question" in record and "answer" in record:
        asked, given = record["question"], record["answer"]
    elif "instruction" in record and (answer := next((key for key in ("output", "response") if key in record), "")):
        parts = [record["instruction"], record.get("input")]
        asked, given = "\n\n".join(part for part in parts if isinstance(part, str) and part), record[answer]
    elif isinstance(record.get("history"), list):
        pairs = [_object(pair, "a turn is not a JSON object") for pair in record["history"]]
        sides = ("user", "user"), ("assistant", "bot")
        return [{"role": role, "content": pair.get(key)} for pair in pairs for role, key in sides]
    else:
        return None
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": given}]


def _message(turn: object) -> tuple[str, str]:
    turn = _object(turn, "a turn is not a JSON object")
    speaker, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise ValueError(f"unknown speaker {shortened(speaker)}")
    if not isinstance(text, str):
        raise ValueError("a turn has no text")
    return ROLES[speaker], _valid(text, "a turn")


def resolve_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a chat template: one of `TEMPLATES`, or `tokenizer` for the tokenizer's own."""
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
    """Render a conversation as token ids and its loss mask, both (S,): 1 on the assistant's tokens and their EOS.

    Args:
        conversation: what was said.
        tokenizer: of the base.
        template: name of the chat template, see `resolve_template`.
        max_length: longest S; what is beyond is cut off.
    """
    text, messages = resolve_template(template, tokenizer), conversation.as_dicts()
    if conversation.written:
        return _as_written(conversation.written, tokenizer, text, max_length)
    if "{% generation" in text or "{%- generation" in text:
        ids, mask = _render(messages, tokenizer, text, return_assistant_tokens_mask=True)
    else:
        ids, mask = _mask_by_prefixes(messages, tokenizer, text)
    return ids[:max_length], mask[:max_length]


def _as_written(
    written: DraftedTokens, tokenizer: PreTrainedTokenizerBase, text: str, max_length: int | None
) -> tuple[list[int], list[int]]:
    for name, ours, theirs in (
        ("tokenizer", tokenizer_hash(tokenizer), written.tokenizer),
        ("chat template", short_hash(text), written.template),
    ):
        if ours != theirs:
            raise ValueError(
                f"its tokens were written with another {name}: take that one, or remove input_ids from the records"
            )
    if max(written.input_ids) >= len(tokenizer):
        raise ValueError("input_ids holds tokens that the tokenizer does not know")
    return written.input_ids[:max_length].tolist(), written.loss_mask[:max_length].tolist()


def encode_prompt(messages: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, template: str) -> list[int]:
    """Render (role, text) messages that end with the user's, up to where the assistant's answer starts."""
    dicts = Conversation("prompt", tuple(messages)).as_dicts()
    return _render(dicts, tokenizer, resolve_template(template, tokenizer), add_generation_prompt=True)[0]


def masked_text(ids: Sequence[int], mask: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Text:
    """Colour the tokens the loss sees in bold green, the others dim."""
    from rich.text import Text

    text, shown, end = Text(), "", 0
    for seen, run in groupby(mask):
        end += len(list(run))
        # Decoding from the start keeps the space that SentencePiece drops at the start of a text.
        whole = tokenizer.decode(list(ids[:end]), clean_up_tokenization_spaces=False)
        text.append(whole[len(shown) :], style="bold green" if seen else "dim")
        shown = whole
    return text


def _render(messages: list[dict], tokenizer: PreTrainedTokenizerBase, text: str, **options) -> tuple[list[int], list]:
    """Apply a template. It writes BOS itself, so `apply_chat_template` rightly adds no special tokens."""
    encoded = _apply(
        messages,
        tokenizer,
        text,
        return_dict=True,
        tokenizer_kwargs={"verbose": False},  # a text beyond the tokenizer's length is cut by us, not an error
        **options,
    )
    return list(encoded["input_ids"]), list(encoded.get("assistant_masks", []))


def _mask_by_prefixes(messages: list[dict], tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list]:
    """Find each answer between the prompt before it and the same prompt with the answer added.

    Texts are compared, not ids: an answer that starts with a line break may share its first token with the prompt.
    """
    whole = _apply(messages, tokenizer, text, tokenize=False)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, mask = list(encoded["input_ids"]), [0] * len(encoded["input_ids"])
    ends = [end for _, end in encoded["offset_mapping"]]
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _apply(messages[:turn], tokenizer, text, tokenize=False, add_generation_prompt=True)
        after = _apply(messages[: turn + 1], tokenizer, text, tokenize=False)
        if not (whole.startswith(after) and after.startswith(before)):
            raise ValueError(
                "the chat template does not extend its own prompt, so the answers cannot be found in it; "
                "add {% generation %} marks to it, or choose another template"
            )
        answer = [place for place, end in enumerate(ends) if len(before) < end <= len(after)]
        eos = [place for place in answer if ids[place] == tokenizer.eos_token_id]
        for place in answer:
            # What a template writes after the last EOS, as a line break, is not the assistant's.
            mask[place] = int(not eos or place <= eos[-1])
    return ids, mask


def _apply(messages: list[dict], tokenizer: PreTrainedTokenizerBase, text: str, **options):
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, chat_template=text, **options)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the conversation: {error}") from error
