"""Task quality of a base alone on whole benchmarks: it answers many questions at once, as `drafters eval` cannot.

A drafter changes no answer, so this is the quality with any of them, up to rounding: rows of a batch are rounded
otherwise than those of a text alone.
"""

from collections.abc import Sequence
from functools import partial
from math import isclose
from typing import Literal

from benchmarks.harness import ResultTable, main, show
from data.benchmarks import Question, find_benchmark, score
from data.dtypes import Dtype
from data.files import hash_of
from data.templates import decode_answer
from inference import sandbox
from inference.evaluate.intervals import ratio
from inference.journal import Journal
from inference.options import ModelOptions, QuestionOptions
from inference.regenerate.answerers import LocalAnswerer, Request
from inference.regenerate.command import RecordedAnswers, batches_of
from inference.runs import progress_bars
from inference.verifier.base import base_hash, resolve_device


def task_quality(
    base: str,
    benchmark: list[str],
    dtype: Dtype = "bfloat16",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    rows: str = ":",
    max_new_tokens: int | None = None,
    batch_size: int = 64,
    max_tokens: int = 8192,
    out: str = "task_quality.md",
    overwrite: bool = False,
) -> None:
    """Answer the first turns of questions greedily in batches, and score them; a run that was stopped continues.

    Args:
        base: Folder or hub id of the base.
        benchmark: NAME[:STYLE][=FILE], such as humaneval or mbpp; may be repeated.
        dtype: Dtype of the base.
        device: cpu, cuda or auto.
        rows: Rows of each benchmark: a slice, or random:COUNT[:SEED].
        max_new_tokens: Maximum number of tokens of an answer; by default what the papers use for each benchmark.
        batch_size: Maximum number of questions answered together.
        max_tokens: Maximum number of tokens of the prompts read together, padding included.
        out: Markdown file to write; the answers are kept beside it, in a file with .jsonl behind this name.
        overwrite: Replace answers that are there under other conditions.
    """
    selection = QuestionOptions(benchmark, rows=rows, max_new_tokens=max_new_tokens)
    questions = selection.load()
    if any(find_benchmark(name)[0].runs_code for name in questions):
        sandbox.require()
    place = resolve_device(device)
    loaded = ModelOptions(base, dtype=dtype, device=device, bitwise=False).load_on(place)
    answerer, caps = LocalAnswerer(loaded, loaded.context_length), selection.caps()
    selected = selection.select(loaded, questions)
    prompts_hash = hash_of([each.prompts for each in selected.values()], 16)
    how = {"batch_size": batch_size, "max_tokens": max_tokens}  # by which rows are rounded
    settings = {"base": base_hash(loaded), "dtype": dtype, "caps": caps, "prompts": prompts_hash, **how}
    table = ResultTable(f"Task quality of {base}", ["benchmark", "questions", "score, %", "cut, %"])
    with Journal(f"{out}.jsonl", settings, overwrite) as kept:
        recorded = RecordedAnswers(answerer, kept)
        for turn, (name, prompts) in enumerate(selected.items()):
            requests = {row: Request([], prompt, caps[name]) for row, prompt in enumerate(prompts.prompts)}
            replies: dict[int, list[int]] = {}
            with progress_bars() as bars:
                task = bars.add_task(f"{name}, tokens", total=len(requests) * caps[name])
                for batch in batches_of(requests, batch_size, max_tokens):
                    replies |= recorded.answer(turn, batch, partial(bars.advance, task))
                    bars.update(task, completed=len(replies) * caps[name])  # as if all answers reached the cap
            texts = [decode_answer(replies[row], loaded.tokenizer).strip() for row in sorted(replies)]
            cut = sum(reply[-1] not in loaded.eos for reply in replies.values()) / len(replies)
            table.rows.append([name, f"{len(texts)}", quality(name, prompts.questions, texts), f"{100 * cut:.1f}"])
            table.notes += prompts.notes()
    table.notes.append("in brackets: 95 % interval over questions")
    show([table], place, out)


def quality(name: str, questions: Sequence[Question], texts: Sequence[str]) -> str:
    """The scores of a benchmark, with their intervals if they are means over its questions."""
    each = [score(name, [question], [text], sandbox.finishes) for question, text in zip(questions, texts, strict=True)]
    cells = []
    for measure, percent in score(name, questions, texts, sandbox.finishes).items():
        mean = ratio((scores[measure], 1) for scores in each if scores)
        span = mean.interval if isclose(mean.value or 0, percent, rel_tol=1e-6) else None
        cells.append(f"{measure} {percent:.1f}" + (f" ({span[0]:.1f}-{span[1]:.1f})" if span else ""))
    return ", ".join(cells) or "–"


if __name__ == "__main__":
    main(task_quality)
