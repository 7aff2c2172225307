"""Questions to measure with: the benchmarks of the papers, and the project's own."""

from __future__ import annotations

from data.benchmarks import arithmetic, dialogue, programs, summaries, translation
from data.benchmarks.question import Benchmark, Checks, Question, Style
from data.benchmarks.rows import Rows, file_rows, hub_rows, split_files

__all__ = ["BENCHMARKS", "NAMES", "Checks", "Question", "check_selection", "find", "length_cap", "load"]

BENCHMARKS: dict[str, Benchmark] = {
    **dialogue.BENCHMARKS,
    **arithmetic.BENCHMARKS,
    **programs.BENCHMARKS,
    **summaries.BENCHMARKS,
    **translation.BENCHMARKS,
}


def benchmark_names() -> list[str]:
    """Return the names of the benchmarks."""
    return [*BENCHMARKS]


def find(name: str) -> tuple[Benchmark, Style]:
    """Return the benchmark and the prompt style that ``NAME`` or ``NAME:STYLE`` means.

    Raises:
        ValueError: There is no such benchmark, or it has no such style.
    """
    benchmark, colon, style = name.partition(":")
    if benchmark not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {benchmark!r}; choose one of: {', '.join(benchmark_names())}")
    styles = BENCHMARKS[benchmark].styles
    if colon and style not in styles:
        raise ValueError(f"{benchmark} has no prompt style {style!r}; choose one of: {', '.join(styles)}")
    return BENCHMARKS[benchmark], styles[style] if colon else next(iter(styles.values()))


def length_cap(name: str) -> int:
    """Return how many tokens the papers let an answer of this benchmark have.

    HumanEval, MBPP 512, GSM8K 256, CNN/DM 128, WMT16 64 are Ouroboros's (section 4.1), MT-Bench 512 is that of the CTC
    recordings, Spec-Bench 1024 its own; XSum goes like CNN/DM.
    """
    return find(name)[0].max_new_tokens


def load(name: str, questions: str | None = None, offset: int = 0, limit: int | None = None) -> list[Question]:
    """Load questions from local files, from the hub, or (embedded) from the project itself.

    Args:
        name: One of `NAMES()`, with ``:STYLE`` for another prompt style than its first.
        questions: A JSONL file (gzip or not) in the benchmark's own columns or the hub's. wmt16 also reads two text
            files, ``GERMAN,ENGLISH``; a style with examples takes them from a second file, ``FILE,TRAIN_FILE``.
        offset: Skip this many questions.
        limit: Load at most this many.

    Raises:
        ValueError: The benchmark is unknown, out of reach or malformed, or no question is selected.
    """
    benchmark, style = find(name)
    check_selection(offset, limit)
    files = split_files(questions) if questions is not None else []
    num_asked = len(benchmark.parallel) if benchmark.parallel and len(files) > 1 else 1
    if len(files) > num_asked + bool(style.num_shots) or 0 < len(files) < num_asked:
        raise ValueError(f"{questions}: {len(files)} files are too many or too few for {name}")
    loaded = _read(name, benchmark, _asked_rows(name, benchmark, files[:num_asked]), benchmark.ids)
    chosen = loaded[offset:][:limit]
    if not chosen:
        raise ValueError(f"no question selected: {name} has {len(loaded)}, offset is {offset}, limit is {limit}")
    shots = _shots(name, benchmark, style, files, num_asked) if style.num_shots else []
    return [style.put(question, shots) for question in chosen]


def check_selection(offset: int, limit: int | None) -> None:
    """Raise ValueError where there is no such selection of questions."""
    if offset < 0 or (limit is not None and limit < 1):
        raise ValueError(f"offset must be at least 0 and limit at least 1, not {offset} and {limit}")


def _asked_rows(name: str, benchmark: Benchmark, files: list[str]) -> Rows:
    if files:
        return file_rows(files, benchmark.parallel)
    if name.partition(":")[0] == "embedded":
        from data import embedded

        return (("embedded", row) for row in embedded.questions())
    if benchmark.hub is None:
        raise ValueError(f"{name} has no copy on the hub; download {benchmark.download} and pass --questions FILE")
    return hub_rows(benchmark.hub, benchmark.hub.split, benchmark)


def _shots(name: str, benchmark: Benchmark, style: Style, files: list[str], num_asked: int) -> list[Question]:
    """The first questions of the part that examples come from."""
    assert benchmark.hub is not None and benchmark.hub.shot_split is not None
    if len(files) > num_asked:
        rows = file_rows(files[num_asked:])
    elif files and benchmark.shot_ids:
        rows = file_rows(files)
    elif files:
        raise ValueError(f"{name} shows examples of the train part: pass --questions {files[0]},TRAIN_FILE")
    else:
        rows = hub_rows(benchmark.hub, f"{benchmark.hub.shot_split}[:{style.num_shots}]", benchmark)
    shots = _read(name, benchmark, rows, benchmark.shot_ids)[: style.num_shots]
    if len(shots) < style.num_shots:
        raise ValueError(f"{name} shows {style.num_shots} examples, but {len(shots)} were found in the files given")
    return shots


def _read(name: str, benchmark: Benchmark, rows: Rows, ids: range | None) -> list[Question]:
    loaded = []
    for index, (place, row) in enumerate(rows):
        try:
            question = benchmark.read(row, index)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{place}: not a question of {name}, expected the fields {benchmark.fields} ({error!r})"
            ) from error
        if ids is None or question.question_id in ids:
            loaded.append(question)
    return loaded
