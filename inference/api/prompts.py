"""Questions as the base reads them: chat turns through its template, or plain text where it has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from data.benchmarks import Question
from data.conversation import encode_prompt
from inference.engine.base import BaseInfo
from inference.engine.session import check_prompt

MAX_NAMED = 5  # questions left out


@dataclass(frozen=True)
class BenchmarkPrompts:
    """The questions of a benchmark that are asked, and those left out because their prompts do not fit.

    Args:
        benchmark: Its name.
        context_length: Of the base.
        questions: Whose first prompt leaves room for a token at least.
        prompts: Token ids of those first prompts.
        left_out: Ids of the other questions.
    """

    benchmark: str
    context_length: int
    questions: list[Question] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)

    def notes(self) -> list[str]:
        """A line that names what is left out, if anything is."""
        if not self.left_out:
            return []
        count, named = len(self.left_out), ", ".join(map(str, self.left_out[:MAX_NAMED]))
        more = f" and {count - MAX_NAMED} more" if count > MAX_NAMED else ""
        return [
            f"{self.benchmark}: {count} of {count + len(self.questions)} questions, whose prompts do not fit into the "
            f"base's context of {self.context_length} tokens: {named}{more}"
        ]


def encode_messages(base: BaseInfo, messages: Sequence[tuple[str, str]], template: str) -> list[int]:
    """Token ids of a chat that waits for the assistant's next turn.

    A base that was never taught to chat (no template of its own, and none named) reads the turns as plain text.

    Args:
        messages: (role, text) pairs, the last one the user's.
        template: A name of `data.conversation.TEMPLATES`, or ``tokenizer`` for the tokenizer's own.
    """
    if template == "tokenizer" and not base.tokenizer.chat_template:
        return list(base.tokenizer("\n".join(text for _, text in messages)).input_ids)
    return encode_prompt(messages, base.tokenizer, template)


def encode_question(base: BaseInfo, question: Question, messages: list[tuple[str, str]], template: str) -> list[int]:
    """Token ids of what the base reads: the chat so far, or the whole prompt that the question is."""
    if question.is_raw:
        return list(base.tokenizer(messages[-1][1]).input_ids)
    return encode_messages(base, messages, template)


def select_questions(
    base: BaseInfo,
    benchmark: str,
    questions: list[Question],
    template: str,
    max_new_tokens: int,
    limit: int | None = None,
    spaced: bool = False,
) -> BenchmarkPrompts:
    """Leave out the questions whose first prompt is too long. (A later turn that is ends its answer early.)

    Args:
        limit: So many that fit are enough: what comes after them is not looked at.
        spaced: Take the first that fits of each of so many stretches of equal length.

    Raises:
        ValueError: A prompt is empty, no token may be written, or no question is left.
    """
    asked, wanted = BenchmarkPrompts(benchmark, base.context_length), limit or len(questions)
    stretch = max(1, len(questions) // wanted)
    for place, question in enumerate(questions):
        if len(asked.questions) >= min(wanted, place // stretch + 1 if spaced else wanted):
            continue
        prompt = encode_question(base, question, [("user", question.turns[0])], template)
        if len(prompt) >= base.context_length:
            asked.left_out.append(question.question_id)
            continue
        try:
            check_prompt(base, prompt, max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{benchmark}, question {question.question_id}: {error}") from error
        asked.questions.append(question)
        asked.prompts.append(prompt)
    if not asked.questions:
        raise ValueError(
            f"{benchmark}: none of {len(questions)} prompts fits into the context of {base.name}, which ends at "
            f"{base.context_length} tokens: shorten the prompts, or take a base that reads more"
        )
    return asked
