"""The benchmark questions of the papers, and the project's own."""

from __future__ import annotations

from collections.abc import Mapping

from data.benchmarks import arithmetic, dialogue, programs, summaries, translation
from data.benchmarks.question import Benchmark, Checks, Question, Style
from data.benchmarks.rows import Rows, file_rows, hub_rows, split_files
from data.files import MALFORMED

__all__ = [
    "BENCHMARKS",
    "Checks",
    "Question",
    "benchmark_names",
    "check_selection",
    "find_benchmark",
    "length_cap",
    "load_questions",
]

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


def find_benchmark(name: str) -> tuple[Benchmark, Style]:
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
    """Return the largest number of new tokens per answer that the papers use for a benchmark.

    HumanEval and MBPP (512), GSM8K (256), CNN/DM (128) and WMT16 (64) follow section 4.1 of the Ouroboros paper,
    MT-Bench (512) follows the answers released with CTC-drafter, and Spec-Bench (1024) its own evaluation. XSum uses
    the value of CNN/DM. The others are our own choice: papers on models that reason use several times as many.
    """
    return find_benchmark(name)[0].max_new_tokens


def load_questions(
    name: str, questions: str | None = None, offset: int = 0, limit: int | None = None
) -> list[Question]:
    """Load the questions of a benchmark from local files, from the hub, or from the project itself (embedded).

    Args:
        name: One of `benchmark_names()`, with ``:STYLE`` appended for a prompt style other than the first.
        questions: A JSONL file (also .gz) with the columns of the benchmark or of its copy on the hub. wmt16 also reads
            two text files, ``GERMAN,ENGLISH``. A style with examples reads them from a second file,
            ``FILE,TRAIN_FILE``. By default the questions come from the hub.
        offset: Number of questions to skip.
        limit: Largest number of questions to load. By default all are loaded.

    Raises:
        ValueError: The benchmark is unknown, cannot be reached or is malformed, or no question is selected.
    """
    benchmark, style = find_benchmark(name)
    check_selection(offset, limit)
    files = split_files(questions) if questions is not None else []
    num_question_files = len(benchmark.parallel) if benchmark.parallel and len(files) > 1 else 1
    if len(files) > num_question_files + bool(style.num_shots) or 0 < len(files) < num_question_files:
        raise ValueError(f"{questions}: {len(files)} files are too many or too few for {name}")
    loaded = _read(name, benchmark, _question_rows(name, benchmark, files[:num_question_files]), benchmark.ids)
    chosen = loaded[offset:][:limit]
    if not chosen:
        raise ValueError(f"no question selected: {name} has {len(loaded)}, offset is {offset}, limit is {limit}")
    shots = _shots(name, benchmark, style, files, num_question_files) if style.num_shots else []
    return [style.put(question, shots) for question in chosen]


def check_selection(offset: int, limit: int | None) -> None:
    """Raise ValueError if `offset` or `limit` is out of range."""
    if offset < 0 or (limit is not None and limit < 1):
        raise ValueError(f"offset must be at least 0 and limit at least 1, not {offset} and {limit}")


def _question_rows(name: str, benchmark: Benchmark, files: list[str]) -> Rows:
    if files:
        return file_rows(files, benchmark.parallel)
    if name.partition(":")[0] == "embedded":
        from data import embedded

        return (("embedded", row) for row in embedded.questions())
    if benchmark.hub is None:
        raise ValueError(f"{name} has no copy on the hub; download {benchmark.download} and pass --questions FILE")
    return hub_rows(benchmark.hub, benchmark.hub.split, benchmark)


def _shots(name: str, benchmark: Benchmark, style: Style, files: list[str], num_question_files: int) -> list[Question]:
    """Return the questions that the style shows as examples, the first of the train split."""
    assert benchmark.hub is not None and benchmark.hub.shot_split is not None
    if len(files) > num_question_files:
        rows = file_rows(files[num_question_files:])
    elif files and benchmark.shot_ids:
        rows = file_rows(files)
    elif files:
        raise ValueError(f"{name} shows examples of the train split: pass --questions {files[0]},TRAIN_FILE")
    else:
        rows = hub_rows(benchmark.hub, f"{benchmark.hub.shot_split}[:{style.num_shots}]", benchmark)
    shots = _read(name, benchmark, rows, benchmark.shot_ids)[: style.num_shots]
    if len(shots) < style.num_shots:
        raise ValueError(f"{name} shows {style.num_shots} examples, but the files hold only {len(shots)}")
    return shots


def _read(name: str, benchmark: Benchmark, rows: Rows, ids: range | None) -> list[Question]:
    loaded: dict[int, Question] = {}
    for index, (place, row) in enumerate(rows):
        try:
            if not isinstance(row, Mapping):
                raise TypeError("not a JSON object")
            question = benchmark.read(row, index)
        except MALFORMED as error:
            raise ValueError(
                f"{place}: not a question of {name}, expected the fields {benchmark.fields} ({error!r})"
            ) from error
        if ids is None or question.question_id in ids:
            if question.question_id in loaded:
                raise ValueError(
                    f"{place}: the question_id {question.question_id} is there twice; give each row its own"
                )
            loaded[question.question_id] = question
    return list(loaded.values())
