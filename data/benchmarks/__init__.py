"""The benchmarks of the papers and the project's own: a file has the rows, the prompts and the score of a family."""

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from data.benchmarks import dialogue, mathematics, programs, texts
from data.benchmarks.question import Benchmark, ProgramRunner, Question, Style
from data.files import MALFORMED, cause_of, check_encodable
from data.sources import Rows, read_rows

BENCHMARKS = dialogue.BENCHMARKS | mathematics.BENCHMARKS | programs.BENCHMARKS | texts.BENCHMARKS


def find_benchmark(name: str) -> tuple[Benchmark, Style]:
    """Return the benchmark and the prompt style that ``NAME`` or ``NAME:STYLE`` means.

    Raises ValueError if there is no such benchmark, or it has no such style.
    """
    benchmark, colon, style = name.partition(":")
    if benchmark not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {benchmark!r}; choose one of: {', '.join(BENCHMARKS)}")
    styles = BENCHMARKS[benchmark].styles
    if colon and style not in styles:
        raise ValueError(f"{benchmark} has no prompt style {style!r}; choose one of: {', '.join(styles)}")
    return BENCHMARKS[benchmark], styles[style] if colon else next(iter(styles.values()))


def load_questions(name: str, questions: str | None = None) -> list[Question]:
    """Load the questions of a benchmark from local files, from the hub, or from the project itself (embedded).

    Raises ValueError if the benchmark is unknown, cannot be reached or is malformed, or has no question.

    Args:
        name: One of `BENCHMARKS`, with ``:STYLE`` appended for a prompt style other than the first.
        questions: A JSONL (also .gz), JSON or Parquet file with the columns of the benchmark or of its copy on the hub.
            A style with examples reads them from a second file, ``FILE,TRAIN_FILE``. By default the questions come from
            the hub.
    """
    benchmark, style = find_benchmark(name)
    files = [questions] if questions and Path(questions).expanduser().is_file() else (questions or "").split(",")
    files = [file for file in files if file]
    if len(files) > 1 + bool(style.num_shots):
        raise ValueError(f"{questions}: no such file, and {len(files)} files, which commas separate, do not fit {name}")
    loaded = _read(name, _rows(name, files[0] if files else benchmark.source), benchmark.ids)
    if not loaded:
        raise ValueError(f"{questions or benchmark.source} holds no question of {name}: give another file")
    shots: list[Question] = []
    if style.num_shots:
        others = files[1:] or (files if benchmark.shot_ids else [])
        if files and not others:
            raise ValueError(f"{name} shows examples of the train split: give {files[0]},TRAIN_FILE")
        rows = _rows(name, others[0] if others else benchmark.shots)
        rows = rows if benchmark.shot_ids else islice(rows, style.num_shots)
        shots = _read(name, rows, benchmark.shot_ids)[: style.num_shots]
        if len(shots) < style.num_shots:
            raise ValueError(f"{name} shows {style.num_shots} examples, but the files hold only {len(shots)}")
    return [style.put(question, shots) for question in loaded]


def _rows(name: str, source: str | None) -> Rows:
    """Yield the rows of a source with their places, which begin with the source."""
    place = find_benchmark(name)[0].where_to_download
    download = f"download {place} and give that file" if place else f"write {name}=FILE"
    if source == "embedded":
        source = str(Path(__file__).with_name("embedded.jsonl"))
    if source is None:
        raise ValueError(f"{name} has no copy on the hub; {download}")
    try:
        rows = read_rows(source)
    except ValueError as error:
        if not source.startswith("hub:"):
            raise
        raise ValueError(f"{error}; or {download}") from error
    return ((f"{source} {place}", row) for place, row in rows)


def _read(name: str, rows: Rows, ids: range | None) -> list[Question]:
    benchmark, _ = find_benchmark(name)
    loaded: dict[int, Question] = {}
    for index, (place, row) in enumerate(rows):
        if isinstance(row, ValueError):
            raise ValueError(f"{place}: {row}; repair or download the file again") from row
        try:
            if not isinstance(row, Mapping):
                raise TypeError(f"a {type(row).__name__} instead of an object")
            question = benchmark.read(row, index)
            check_encodable(question.as_dict())
        except MALFORMED as error:
            raise ValueError(
                f"{place}: not a question of {name}, expected the fields {benchmark.fields} ({cause_of(error)})"
            ) from error
        if ids is None or question.question_id in ids:
            if question.question_id in loaded:
                raise ValueError(
                    f"{place}: the question_id {question.question_id} is there twice; give each row its own"
                )
            loaded[question.question_id] = question
    return list(loaded.values())


def score(
    name: str, questions: Sequence[Question], texts: Sequence[str], run: ProgramRunner | None = None
) -> dict[str, float]:
    """Score one text per question, without its reasoning, in percent.

    The score is empty if the benchmark has no references, or if its programs are not run or its package is missing.
    """
    benchmark, _ = find_benchmark(name)
    pairs = [
        (question, re.split("|".join(map(re.escape, question.stops)) or r"\Z", text, maxsplit=1)[0])  # up to a stop
        for question, text in zip(questions, texts, strict=True)
        if question.reference is not None
    ]
    if not pairs or benchmark.score is None or needs_package(name) or (benchmark.runs_code and run is None):
        return {}
    with_references, answers = map(list, zip(*pairs, strict=True))
    return benchmark.score(with_references, answers, *([run] if benchmark.runs_code else []))


def needs_package(name: str) -> str:
    """Return the package that the score of a benchmark needs if it is not installed, else an empty text."""
    package = find_benchmark(name)[0].package
    return package if package and find_spec(package) is None else ""
