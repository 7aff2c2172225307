"""Questions to measure with: MT-Bench, GSM8K, and the project's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# name: hub dataset, configuration, split; the file to download instead
HUB = {
    "mt_bench": ("HuggingFaceH4/mt_bench_prompts", None, "train", "question.jsonl of lm-sys/FastChat"),
    "gsm8k": ("openai/gsm8k", "main", "test", "test.jsonl of openai/grade-school-math"),
}


@dataclass(frozen=True)
class Question:
    """What a user asks, turn by turn."""

    question_id: int
    category: str
    turns: tuple[str, ...]
    reference: str | None = None


def NAMES() -> list[str]:
    """Return the names of the benchmarks."""
    return [*HUB, "embedded"]


def load(name: str, questions: str | None = None, offset: int = 0, limit: int | None = None) -> list[Question]:
    """Load questions from a local file, from the hub, or (embedded) from the project itself.

    A GSM8K prompt is the text of the question alone, in one turn; its id is the zero-based index in the file.

    Args:
        name: one of `NAMES()`.
        questions: JSONL file; MT-Bench form (question_id, category, turns), or GSM8K form (question, answer).
        offset: skip this many questions.
        limit: load at most this many.

    Raises:
        ValueError: The benchmark is unknown, out of reach or malformed, or no question is selected.
    """
    if name not in NAMES():
        raise ValueError(f"unknown benchmark {name!r}; choose one of: {', '.join(NAMES())}")
    if offset < 0 or (limit is not None and limit < 1):
        raise ValueError(f"offset must be at least 0 and limit at least 1, not {offset} and {limit}")
    if questions is not None:
        rows: Iterable[tuple[str, object]] = _file_rows(questions)
    elif name == "embedded":
        from data import embedded

        rows = (("embedded", row) for row in embedded.questions())
    else:
        rows = _hub_rows(name)
    read: Callable = _gsm8k if name == "gsm8k" else _mt_bench
    loaded = []
    for index, (place, row) in enumerate(rows):
        try:
            loaded.append(read(row, index))
        except (KeyError, TypeError, ValueError) as error:
            fields = "question, answer" if name == "gsm8k" else "question_id, category, turns"
            raise ValueError(f"{place}: not a question of {name}, expected the fields {fields} ({error!r})") from error
    chosen = loaded[offset:][:limit]
    if not chosen:
        raise ValueError(f"no question selected: {name} has {len(loaded)}, offset is {offset}, limit is {limit}")
    return chosen


def _file_rows(file: str) -> Iterator[tuple[str, object]]:
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"{file}: no such file; give a JSONL file of questions")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error.reason}); convert the file") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{file} line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{file} line {number}: invalid JSON ({error.msg}); expected an object a line"
                ) from error


def _hub_rows(name: str) -> Iterator[tuple[str, object]]:
    from datasets import load_dataset

    repository, configuration, split, file = HUB[name]
    try:
        rows = load_dataset(repository, configuration, split=split)
    except Exception as error:  # no network, no such repository, a proxy: each has its own
        raise ValueError(f"cannot reach {repository} on the hub; download {file} and pass --questions FILE") from error
    return ((f"{repository} row {index}", row) for index, row in enumerate(rows))


def _mt_bench(row: dict, index: int) -> Question:
    """Read MT-Bench's own form, or that of its copy on the hub (prompt_id, category, prompt)."""
    turns = row["turns"] if "turns" in row else row["prompt"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise ValueError("turns is not a list of texts")
    number = row["question_id"] if "question_id" in row else row["prompt_id"]
    reference = row.get("reference")
    return Question(int(number), str(row["category"]), tuple(turns), "\n\n".join(reference) if reference else None)


def _gsm8k(row: dict, index: int) -> Question:
    if not isinstance(row["question"], str):
        raise ValueError("question is not a text")
    return Question(index, "math", (row["question"],), row["answer"])
