"""From benchmarks to prompts: the questions that a command asks, and their tokens by the base's chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from data.benchmarks import Question
from data.conversations import Message, user_message
from data.files import check_encodable
from data.templates import ReasoningMarks, encode_prompt, find_marks, resolve_template
from inference.verifier.base import Base, BaseConfig

MAX_LISTED_IDS = 5  # of the questions left out


@dataclass(frozen=True)
class BenchmarkPrompts:
    """The selected questions of a benchmark, and those left out because their prompts do not fit into the context.

    The first prompt of each selected question, with these token ids, leaves room for at least one token.
    """

    benchmark: str
    context_length: int
    questions: list[Question] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)  # ids of the other questions

    def notes(self) -> list[str]:
        """Return a line that lists the questions left out, or nothing if all fit."""
        if not self.left_out:
            return []
        count, ids = len(self.left_out), ", ".join(map(str, self.left_out[:MAX_LISTED_IDS]))
        more = f" and {count - MAX_LISTED_IDS} more" if count > MAX_LISTED_IDS else ""
        return [
            f"{self.benchmark}: {count} of {count + len(self.questions)} questions, whose prompts do not fit into the "
            f"base's context of {self.context_length} tokens: {ids}{more}"
        ]


def encode_messages(
    base: Base | BaseConfig, messages: Sequence[Message], template: str, tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Return the token ids of a chat that waits for the assistant's next turn.

    If the tokenizer's own template is asked for (``tokenizer``) and it has none, the base was not trained to chat: it
    gets the texts of the messages.
    """
    if template == "tokenizer" and not base.tokenizer.chat_template:
        check_encodable(messages)
        return list(base.tokenizer("\n".join(message["content"] for message in messages)).input_ids)
    return encode_prompt(messages, base.tokenizer, template, tools)


def encode_question(base: Base | BaseConfig, question: Question, messages: list[Message], template: str) -> list[int]:
    """Return the token ids of a question with the chat so far, or of a raw question's text without a template.

    The question's system prompt and tools come before the chat.
    """
    if question.is_raw:
        return list(base.tokenizer(messages[-1]["content"]).input_ids)
    system = [{"role": "system", "content": question.system}] if question.system else []
    return encode_messages(base, [*system, *messages], template, question.tools)


def encode_first_prompt(base: Base | BaseConfig, question: Question, template: str) -> list[int]:
    """Return the token ids of a question's first prompt; ValueError if they lack its system prompt or its tools."""
    messages: list[Message] = [user_message(question.turns[0])]
    prompt = encode_question(base, question, messages, template)
    # Another system prompt rather than none, in whose place a template may write the very same one by default.
    others = {"list of tools": replace(question, tools=())}
    if question.system:
        others["system prompt"] = replace(question, system=f"{question.system} .")
    for name, other in others.items():
        if other != question and encode_question(base, other, messages, template) == prompt:
            reason = "a raw prompt passes through no template" if question.is_raw else "the chat template ignores it"
            raise ValueError(f"it has a {name}, but {reason}: leave it out, or choose another --template")
    return prompt


def find_reasoning_marks(base: Base | BaseConfig, template: str) -> ReasoningMarks | None:
    """Return the marks by which a chat template delimits the reasoning in an answer; None if it knows none."""
    if template == "tokenizer" and not base.tokenizer.chat_template:
        return None
    text = resolve_template(template, base.tokenizer)
    return find_marks(text, base.tokenizer, encode_messages(base, [user_message("Why?")], template))
