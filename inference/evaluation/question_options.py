"""Options that several commands share: which questions are decoded, and how they are put to the base."""

from __future__ import annotations

from dataclasses import dataclass

from data import benchmarks
from data.benchmarks import Question
from inference.api.prompts import BenchmarkPrompts, select_questions
from inference.engine.base import BaseInfo


@dataclass(frozen=True)
class QuestionOptions:
    """The questions of one benchmark that a command decodes.

    Args:
        benchmark: Name of the benchmark, or NAME:STYLE for another prompt style; an unknown name lists all of them.
        questions: Local file with the benchmark's questions; by default they come from the Hugging Face hub, and those
            of embedded from the package itself.
        offset: Number of questions to skip at the beginning.
        limit: Maximum number of questions. Questions whose prompts are longer than the base's context are skipped and
            not counted.
        max_new_tokens: Maximum number of tokens of an answer.
        template: Chat template: vicuna_v1.1, llama2_chat, or tokenizer for the tokenizer's own.
    """

    benchmark: str = "embedded"
    questions: str | None = None
    offset: int = 0
    limit: int | None = 5
    max_new_tokens: int = 128
    template: str = "tokenizer"

    def load(self) -> list[Question]:
        """Load all questions from the offset on.

        It needs no base, so that a mistake in these options is found before one is loaded.

        Raises:
            ValueError: The benchmark is unknown, its file cannot be read, or the offset or limit is out of range.
        """
        benchmarks.check_selection(self.offset, self.limit)
        return benchmarks.load(self.benchmark, self.questions, self.offset)

    def select(self, base: BaseInfo, questions: list[Question]) -> BenchmarkPrompts:
        """Select the questions whose prompts fit into the context of the base, up to the limit.

        Args:
            base: The base, of which only the tokenizer and the context length are read.
            questions: The questions that `load` returned.

        Raises:
            ValueError: A prompt is empty, `max_new_tokens` is less than 1, or no question fits.
        """
        return select_questions(base, self.benchmark, questions, self.template, self.max_new_tokens, self.limit)
