"""Options that several commands share: which questions are decoded, and how they are put to the base."""

from __future__ import annotations

from dataclasses import dataclass

from data import benchmarks
from data.benchmarks import Question
from inference.prompts import BenchmarkPrompts, select_questions
from inference.verifier.base import Base, BaseConfig


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
        template: Chat template: vicuna_v1.1, llama2_chat, or tokenizer for the tokenizer's own, whose thinking switch
            tokenizer:thinking=on or tokenizer:thinking=off sets.
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
        return benchmarks.load_questions(self.benchmark, self.questions, self.offset)

    def select(self, base: Base | BaseConfig, questions: list[Question]) -> BenchmarkPrompts:
        """Select the questions whose prompts fit into the context of the base, up to the limit.

        Args:
            base: The base, of which only the tokenizer and the context length are read.
            questions: The questions that `load` returned.

        Raises:
            ValueError: A prompt is empty, `max_new_tokens` is less than 1, or no question fits.
        """
        return select_questions(base, self.benchmark, questions, self.template, self.max_new_tokens, self.limit)


@dataclass(frozen=True)
class BenchmarkOptions:
    """The questions of one or several benchmarks that `drafters eval` decodes.

    Args:
        benchmark: NAME or NAME:STYLE, such as mt_bench, gsm8k:ctc or cnn_dm:alpaca; an unknown name lists all of them.
            May be repeated. By default embedded, the questions that the package itself contains.
        questions: Local file with the questions of each benchmark, in the same order; by default they come from the
            Hugging Face hub. wmt16 takes GERMAN,ENGLISH, a style with examples FILE,TRAIN_FILE, and '' stands for the
            default.
        offset: Number of questions of each benchmark to skip at the beginning.
        limit: Maximum number of questions of each benchmark; by default all. Questions whose prompts are longer than
            the base's context are skipped, listed and not counted.
        spaced: Take the questions of the limit evenly spaced from the whole benchmark, and so from all its categories,
            instead of the first ones.
        max_new_tokens: Maximum number of tokens of an answer; by default what the papers use for each benchmark.
        template: Chat template: vicuna_v1.1, llama2_chat, or tokenizer for the tokenizer's own, whose thinking switch
            tokenizer:thinking=on or tokenizer:thinking=off sets.
    """

    benchmark: list[str] | None = None
    questions: list[str] | None = None
    offset: int = 0
    limit: int | None = None
    spaced: bool = False
    max_new_tokens: int | None = None
    template: str = "tokenizer"

    @property
    def names(self) -> list[str]:
        """The names of the benchmarks."""
        return self.benchmark or ["embedded"]

    def caps(self) -> dict[str, int]:
        """The maximum number of tokens of an answer, by benchmark."""
        return {
            name: benchmarks.length_cap(name) if self.max_new_tokens is None else self.max_new_tokens
            for name in self.names
        }

    def load(self) -> dict[str, list[Question]]:
        """Load all questions from the offset on, by benchmark.

        It needs no base, so that a mistake in these options is found before one is loaded.

        Raises:
            ValueError: An option is out of range, a benchmark is unknown or named twice, or a file cannot be read.
        """
        names, files = self.names, self.questions or []
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"the benchmark {repeated[0]} is named twice")
        if files and len(files) != len(names):
            raise ValueError(
                f"{len(files)} --questions for {len(names)} --benchmark: give one file for each, in the same order"
            )
        benchmarks.check_selection(self.offset, self.limit)
        if self.spaced and self.limit is None:
            raise ValueError("--spaced selects the questions of a --limit: give a --limit too")
        return {
            name: benchmarks.load_questions(name, file or None, self.offset)
            for name, file in zip(names, files or [""] * len(names), strict=True)
        }

    def select(self, base: Base | BaseConfig, questions: dict[str, list[Question]]) -> dict[str, BenchmarkPrompts]:
        """Select the questions whose prompts fit into the context of the base, up to the limit, by benchmark.

        Args:
            base: The base, of which only the tokenizer and the context length are read.
            questions: The questions that `load` returned.

        Raises:
            ValueError: A prompt is empty, `max_new_tokens` is less than 1, or no question of a benchmark fits.
        """
        caps = self.caps()
        return {
            name: select_questions(base, name, loaded, self.template, caps[name], self.limit, self.spaced)
            for name, loaded in questions.items()
        }
