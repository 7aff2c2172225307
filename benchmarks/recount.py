"""Published answers counted again by every convention: those of EAGLE, Spec-Bench, CTC-drafter and `drafters eval`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.harness import ResultTable, main, show
from data.files import reading
from data.sources import read_rows
from inference.evaluate.intervals import quotient


@dataclass(frozen=True)
class Recorded:
    """An answered question in FastChat's form; what a file does not hold is None."""

    texts: list[str]  # of each turn
    tokens: int  # of all turns; some public baselines record 0, and a base alone writes one token per step
    index: int | None  # sum over the turns of the zero-based index of the last step
    steps: int | None  # that emitted the tokens
    emitted: int  # tokens that these steps emitted: all of them where the first step includes the prefill
    seconds: float | None  # wall time


Pairs = Sequence[tuple[Recorded, Recorded]]  # an answer, and the baseline's answer to the same question
Convention = Callable[[Pairs], float | None]


def recount(answers: list[str], baseline: str, out: str | None = None) -> None:
    """Read answers in FastChat's form, and count acceptance lengths and speed-ups by every convention.

    Args:
        answers: JSONL file of recorded answers, such as those of EAGLE, Spec-Bench, the original CTC-drafter and
            `drafters eval`; may be repeated.
        baseline: JSONL file of the base's own answers to the same questions.
        out: Markdown file to write.
    """
    base, tables = read(baseline), list[ResultTable]()
    for path in answers:
        pairs = pair(read(path), base)
        identical, turns = count_identical(pairs)
        table = ResultTable(path, ["figure", "value", "how it is counted"])
        for name, value in figures(pairs).items():
            table.rows.append([name, "–" if value is None else f"{value:.2f}", CONVENTIONS[name][0]])
        table.notes.append(f"identical turns: {identical} of {turns} ({100 * identical / turns:.1f} %)")
        tables.append(table)
    show(tables, torch.device("cpu"), out)


def read(path: str | Path) -> dict[int, Recorded]:
    """Read a file of answers, one question per line; raises ValueError if a line is none."""
    answers = {}
    for place, row in recorded_rows(path):
        with reading(place, "it is not a recorded answer"):
            answers[int(row["question_id"])] = parse(row)
    if not answers:
        raise ValueError(f"{path} holds no answer: give a JSONL file of recorded answers")
    return answers


def parse(row: dict[str, Any]) -> Recorded:
    """Read the answer in one line."""
    choice = row["choices"][0]
    indices = choice.get("idxs")
    if indices is None and "decoding_steps" in choice:  # Spec-Bench's later files count the steps
        indices = [steps - 1 for steps in choice["decoding_steps"]]
    index = None if indices is None or None in indices else sum(indices)
    counts = [len(ids) for ids in choice["token_ids"]] if "token_ids" in choice else choice["new_tokens"]
    tokens = sum(count or indices[turn] + 1 for turn, count in enumerate(counts))
    lengths = choice.get("accept_lengths")  # of each step, prefills excluded
    steps = len(lengths) if lengths is not None else None if index is None else index + len(counts)
    emitted = sum(lengths) if lengths is not None else tokens
    seconds = sum(choice["wall_time"]) if "wall_time" in choice else None
    if min(tokens, index or 0, seconds or 0) < 0:
        raise ValueError("a count is negative")
    return Recorded(choice["turns"], tokens, index, steps, emitted, seconds)


def recorded_rows(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield the place, such as ``FILE line 3``, and the value of each row; raises ValueError if one cannot be read."""
    for line, row in read_rows(str(path)):
        with reading(place := f"{path} {line}"):
            if isinstance(row, ValueError):
                raise row
        yield place, row


def pair(answers: dict[int, Recorded], baseline: dict[int, Recorded]) -> Pairs:
    """Pair each answer with the baseline's to the same question; raises ValueError if one does not fit."""
    for question, answer in answers.items():
        if question not in baseline or len(baseline[question].texts) != len(answer.texts):
            raise ValueError(
                f"question {question}: the baseline has no answer of as many turns: pass the same questions"
            )
    return [(answer, baseline[question]) for question, answer in answers.items()]


def _mean(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return fmean(measured) if measured else None


def _speed(answers: Sequence[Recorded]) -> float | None:
    """Tokens per second; None if a time is missing."""
    seconds = [answer.seconds for answer in answers if answer.seconds is not None]
    return quotient(sum(answer.tokens for answer in answers), sum(seconds)) if len(seconds) == len(answers) else None


def _micro(pairs: Pairs) -> float | None:
    counted = [answer for answer, _ in pairs if answer.steps is not None]
    return quotient(sum(answer.emitted for answer in counted), sum(answer.steps or 0 for answer in counted))


def _spec_bench(pairs: Pairs) -> float | None:
    answers, baseline = zip(*pairs, strict=True)
    return quotient(_mean(_speed([answer]) for answer in answers), _mean(_speed([base]) for base in baseline))


CONVENTIONS: dict[str, tuple[str, Convention]] = {
    "beta, CTC paper": (
        "mean over questions of new tokens / last step index, from 0 and summed over turns: a step per turn is missing",
        lambda pairs: _mean(quotient(answer.tokens, answer.index) for answer, _ in pairs),
    ),
    "acceptance length, mean": (
        "mean over questions of new tokens / steps; steps = that index + 1",
        lambda pairs: _mean(quotient(answer.emitted, answer.steps) for answer, _ in pairs),
    ),
    "acceptance length, micro": (
        "all new tokens / all steps, prefills excluded; Spec-Bench's mean accepted tokens",
        _micro,
    ),
    "gamma, CTC paper": (
        "mean over questions of tokens per second / the baseline's tokens per second",
        lambda pairs: _mean(quotient(_speed([answer]), _speed([base])) for answer, base in pairs),
    ),
    "speed-up, Spec-Bench": ("mean over questions of tokens per second / the baseline's mean", _spec_bench),
    "speed-up, micro": (
        "(all tokens / all seconds) / the same ratio of the baseline",
        lambda pairs: quotient(*(_speed(side) for side in zip(*pairs, strict=True))),
    ),
}


def figures(pairs: Pairs) -> dict[str, float | None]:
    """The figure of each convention."""
    return {name: count(pairs) for name, (_, count) in CONVENTIONS.items()}


def count_identical(pairs: Pairs) -> tuple[int, int]:
    """The number of turns with the baseline's text, and of all turns."""
    turns = [both for answer, base in pairs for both in zip(answer.texts, base.texts, strict=True)]
    return sum(text == base_text for text, base_text in turns), len(turns)


if __name__ == "__main__":
    main(recount)
