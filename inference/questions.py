"""Which questions a command decodes: options that eval, verify, tune and the benchmarks share."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data import benchmarks
from data.benchmarks import Question
from inference.prompts import BenchmarkPrompts, select_questions
from inference.verifier.base import Base, BaseConfig


@dataclass(frozen=True)
class QuestionOptions:
    """The questions of one or several benchmarks.

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
        given = self.max_new_tokens
        return {name: benchmarks.length_cap(name) if given is None else given for name in self.files()}

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
        """Select the loaded questions whose prompts fit into the context of the base, see `select_questions`."""
        caps = self.caps()
        return {
            name: select_questions(base, name, loaded, self.template, caps[name], self.limit)
            for name, loaded in questions.items()
        }


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
