"""From benchmarks to prompts: the questions that a command asks, and their tokens by the base's chat template."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from data import benchmarks
from data.benchmarks import Question
from data.conversations import Message, user_message
from data.files import check_encodable
from data.templates import ReasoningMarks, encode_prompt, find_marks, resolve_template
from inference.verifier.base import Base, BaseConfig
from inference.verifier.session import check_prompt

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


@dataclass(frozen=True)
class QuestionOptions:
    """The questions of one or several benchmarks, as eval, verify, tune and the scripts of benchmarks/ select them.

    Args:
        benchmark: NAME[:STYLE][=FILE[,FILE]], such as mt_bench or gsm8k:ctc=test.jsonl; may be repeated. By default
            embedded, which the package contains; an unknown name lists all.
        limit: Maximum number of questions of each benchmark; those too long for the base's context are not counted.
        rows: Rows of each benchmark: a slice such as 1200:1260 or ::10, or random:COUNT[:SEED]; by default all.
        max_new_tokens: Maximum number of tokens of an answer; by default what the papers use for each benchmark.
        template: Chat template: vicuna_v1.1, llama2_chat, or tokenizer[:thinking=on|off] for the tokenizer's own.
    """

    benchmark: list[str] | None = None
    limit: int | None = None
    rows: str = ":"
    max_new_tokens: int | None = None
    template: str = "tokenizer"

    def files(self) -> dict[str, str | None]:
        """The files of the questions, by the name of the benchmark; None stands for the benchmark's own source."""
        files: dict[str, str | None] = {}
        for given in self.benchmark or ["embedded"]:
            name, _, file = given.partition("=")
            if name in files:
                raise ValueError(f"the benchmark {name} is named twice: name it once")
            files[name] = file or None
        return files

    def caps(self) -> dict[str, int]:
        """The maximum number of tokens of an answer, by benchmark."""
        caps = {name: benchmarks.find_benchmark(name)[0].max_new_tokens for name in self.files()}
        return caps if self.max_new_tokens is None else dict.fromkeys(caps, self.max_new_tokens)

    def load(self) -> dict[str, list[Question]]:
        """Load the rows of each benchmark; raises ValueError for a mistake in the options, before a base is loaded."""
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, not {self.limit}")
        chosen = _choice_of_rows(self.rows)
        selected: dict[str, list[Question]] = {}
        for name, file in self.files().items():
            questions = benchmarks.load_questions(name, file)
            selected[name] = [questions[row] for row in chosen(len(questions))]
            if not selected[name]:
                raise ValueError(f"--rows {self.rows} selects none of the {len(questions)} questions of {name}")
        return selected

    def select(self, base: Base | BaseConfig, questions: dict[str, list[Question]]) -> dict[str, BenchmarkPrompts]:
        """Select loaded questions whose first prompt fits into the context. (A later turn too long ends its answer.)

        Raises ValueError if a prompt is empty, the template refuses a question or leaves out its system prompt or
        tools, ``max_new_tokens`` is below 1, or no question of a benchmark fits.
        """
        caps, found = self.caps(), {name: BenchmarkPrompts(name, base.context_length) for name in questions}
        for name, selected in found.items():
            for question in questions[name]:
                if len(selected.questions) == self.limit:
                    break
                try:
                    prompt = encode_first_prompt(base, question, self.template)
                    if len(prompt) >= base.context_length:
                        selected.left_out.append(question.question_id)
                        continue
                    check_prompt(base, prompt, caps[name])
                except ValueError as error:
                    raise ValueError(f"{name}, question {question.question_id}: {error}") from error
                selected.questions.append(question)
                selected.prompts.append(prompt)
            if not selected.questions:
                raise ValueError(
                    f"{name}: none of {len(questions[name])} prompts fits into the context of {base.name}, which ends "
                    f"at {base.context_length} tokens: shorten the prompts, or take a base that reads more"
                )
        return found


def _choice_of_rows(text: str) -> Callable[[int], Sequence[int]]:
    """Read which of a number of rows are chosen: a slice as Python writes it, or a random sample, with seed 0 if none.

    >>> list(_choice_of_rows("::10")(30)), _choice_of_rows("random:3:7")(30)
    ([0, 10, 20], [4, 10, 12])
    """
    if match := re.fullmatch(r"random:(\d+)(?::(\d+))?", text):
        count, seed = int(match[1]), int(match[2] or 0)
        return lambda size: sorted(random.Random(seed).sample(range(size), min(count, size)))
    try:
        parts = [int(part) if part else None for part in text.split(":")]
    except ValueError:
        parts = []
    if len(parts) not in (2, 3) or 0 in parts[2:]:
        raise ValueError(f"rows must be a slice such as 1200:1260 or ::10, or random:COUNT[:SEED], not {text!r}")
    return lambda size: range(size)[slice(*parts)]
