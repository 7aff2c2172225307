"""``drafters replay``: measure drafters that read only the text, on recorded answers and without the base."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from rich.text import Text

from data import benchmarks
from data.files import SafeConsole, escape_markdown, write_text
from data.tokenizer import load_tokenizer
from drafters.protocol import Drafter, RequiredOutputs
from inference import drafter_specs
from inference.replay import recordings
from inference.replay.recordings import NoModel, Recorded, RecordedBase, Recording, Recordings, ReplayRunner
from inference.reporting.rows import Row, markdown_table, number, rich_table
from inference.results.metrics import acceptance_length, decode_steps
from inference.runs import new_folder, progress_bars
from inference.verifier.runner import Runner
from inference.verifier.session import Session, StepCost

COUNTING = (
    "Tokens per forward include the prefill, in which a drafter may draft too; the other numbers exclude it. All are "
    "averages over steps (micro averages), except for the mean per question. The texts are the recorded ones."
)
COLUMNS = (
    ("tokens per forward", "tokens_per_forward", 3),
    ("acceptance length", "acceptance_length", 3),
    ("mean per question", "acceptance_length_mean", 3),
    ("fed tokens/step", "fed_per_step", 1),
    ("hit ratio", "draft_hit_ratio", 3),
)


@dataclass(frozen=True)
class ReplayedTurn:
    """The cost of the steps of one recorded turn; the first step is the prefill."""

    question_id: int
    category: str
    steps: list[StepCost]


@dataclass(frozen=True)
class ReplayMetrics:
    """The metrics of one drafter on recorded turns; a ratio whose denominator is zero is None.

    Args:
        turns: Number of turns.
        tokens: Number of tokens of their answers.
        tokens_per_forward: Tokens / base forwards, prefill included, over all turns (micro average).
        acceptance_length: Emitted tokens / base forwards, prefill excluded, over all turns (micro average).
        acceptance_length_mean: Mean over questions of the acceptance length of each.
        fed_per_step: Mean number of tokens fed to the base, prefill excluded.
        draft_hit_ratio: Accepted / fed draft tokens, prefill excluded.
    """

    turns: int
    tokens: int
    tokens_per_forward: float | None
    acceptance_length: float | None
    acceptance_length_mean: float | None
    fed_per_step: float | None
    draft_hit_ratio: float | None


def measure(turns: Sequence[ReplayedTurn]) -> ReplayMetrics:
    """Compute the metrics of some turns."""
    questions: dict[int, list[ReplayedTurn]] = {}
    for turn in turns:
        questions.setdefault(turn.question_id, []).append(turn)
    lengths = [length for own in questions.values() if (length := acceptance_length(own)) is not None]
    all_steps, later = [step for turn in turns for step in turn.steps], decode_steps(turns)
    tokens = sum(step.emitted for step in all_steps)
    return ReplayMetrics(
        turns=len(turns),
        tokens=tokens,
        tokens_per_forward=_ratio(tokens, len(all_steps)),
        acceptance_length=acceptance_length(turns),
        acceptance_length_mean=_ratio(sum(lengths), len(lengths)),
        fed_per_step=_ratio(sum(step.fed for step in later), len(later)),
        draft_hit_ratio=_ratio(sum(step.accepted for step in later), sum(step.fed_candidates for step in later)),
    )


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def make(spec: str, runner: ReplayRunner) -> Drafter:
    """Build a drafter that can be replayed.

    Raises:
        ValueError: The drafter needs more of the base than its tokens, or `drafter_specs.make` cannot build it.
    """
    try:
        # A drafter that reads only tokens does not touch the runner, and others raise NoModel.
        drafter = drafter_specs.make(spec, cast("Runner", runner))
        replayable = drafter.history_only and drafter.required_outputs == RequiredOutputs()
    except NoModel:
        replayable = False
    if not replayable:
        raise ValueError(
            f"{spec} needs the base itself and cannot be replayed: name drafters that read nothing but the text, "
            "or run `drafters eval`"
        )
    return drafter


def decode(
    runner: ReplayRunner, drafter: Drafter, recorded: Sequence[Recording], max_new_tokens: int
) -> Iterator[ReplayedTurn]:
    """Decode recorded turns in their order, with the same loop that decodes live.

    Args:
        runner: Stands in for the base that was recorded.
        drafter: A drafter that reads only the text; it remembers earlier turns as in live decoding.
        recorded: The turns.
        max_new_tokens: Maximum number of tokens of a turn in the recording.

    Raises:
        ValueError: An answer contains an end-of-sequence token before its end.
    """
    session = Session(runner, drafter, Recorded())
    eos = runner.base.eos | {turn.tokens[-1] for turn in recorded if turn.ended}
    drafter.reset()
    for turn in recorded:
        runner.load([*turn.prompt, *turn.tokens], turn.ended)
        result = session.run(turn.prompt, max_new_tokens if turn.ended else len(turn.tokens), eos)
        if result.tokens != turn.tokens:
            raise ValueError(
                f"question {turn.question_id}, turn {turn.turn + 1} continues after the end-of-sequence token "
                f"{result.tokens[-1]}: pass the --tokenizer of the recording"
            )
        yield ReplayedTurn(turn.question_id, turn.category, result.steps)


@dataclass(frozen=True)
class RecordingOptions:
    """The recorded answers that are replayed.

    Args:
        answers: JSONL file of recorded greedy answers, in FastChat's form (turns, new_tokens, idxs) or as drafters eval
            writes them.
        questions: Local file of the questions that were answered.
        tokenizer: Folder of the tokenizer of the base that answered.
        template: Chat template of the recording: vicuna_v1.1, llama2_chat, or tokenizer for the tokenizer's own.
        benchmark: Benchmark that the questions belong to, as NAME or NAME:STYLE; an unknown name lists all of them.
        limit: Maximum number of recorded questions; by default all.
        max_new_tokens: Maximum number of tokens of a turn in the recording.
    """

    answers: str
    questions: str
    tokenizer: str
    template: str = "vicuna_v1.1"
    benchmark: str = "mt_bench"
    limit: int | None = None
    max_new_tokens: int = 512


def replay(recording: RecordingOptions, drafter: list[str], out: str | None = None, overwrite: bool = False) -> None:
    """Measure drafters that read only the text on recorded greedy answers, without the base that wrote them.

    The steps are exactly those of live decoding. Prints tables; with --out it also writes results.json and results.md.

    Args:
        drafter: none, anpd, prompt_lookup or another drafter that reads only the text, optionally with
            :key=value,...; may be repeated.
        out: Folder for the results; by default nothing is written.
        overwrite: Replace the results that the folder already holds.
    """
    folder = new_folder(out, overwrite)
    if recording.limit is not None and recording.limit < 1:
        raise ValueError(f"limit must be at least 1, not {recording.limit}")
    runner = ReplayRunner(RecordedBase(recording.answers, load_tokenizer(recording.tokenizer)))
    drafters = {name: make(spec, runner) for name, spec in drafter_specs.labels(drafter).items()}
    recorded = read_recordings(recording, runner.base)
    with progress_bars() as bars:
        replayed = {
            name: list(
                bars.track(
                    decode(runner, chosen, recorded.turns, recording.max_new_tokens),
                    total=len(recorded.turns),
                    description=name,
                )
            )
            for name, chosen in drafters.items()
        }
    tables = {
        "all turns": _drafter_table(replayed),
        "by category: tokens per forward, acceptance length": _category_table(replayed),
    }
    notes = [COUNTING, *_mismatch_notes(recorded)]
    console = SafeConsole()
    for title, table in tables.items():
        console.print(Text(title, style="bold"), rich_table(*table), Text(), sep="\n")
    for note in notes:
        console.print(note, style="dim")
    if folder:
        _write_results(folder, replayed, recorded)
        _write_markdown(folder, tables, notes)


def read_recordings(recording: RecordingOptions, base: RecordedBase) -> Recordings:
    """Read the recorded answers and their questions.

    Raises:
        ValueError: A file cannot be read, or the answers do not belong to the questions, tokenizer or template.
    """
    questions = benchmarks.load_questions(recording.benchmark, recording.questions)
    return recordings.read(
        recording.answers, questions, base, recording.template, recording.max_new_tokens, recording.limit
    )


def _write_results(folder: Path, replayed: Mapping[str, list[ReplayedTurn]], recorded: Recordings) -> None:
    results = {
        "context": {"command": " ".join(["drafters", *sys.argv[1:]]), "counting": COUNTING},
        "left_out": [asdict(mismatch) for mismatch in recorded.mismatches],
        "results": {
            name: asdict(measure(turns))
            | {"by_category": {category: asdict(measure(own)) for category, own in _by_category(turns).items()}}
            for name, turns in replayed.items()
        },
    }
    write_text(folder / "results.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")


def _write_markdown(folder: Path, tables: Mapping[str, tuple[list[str], list[Row]]], notes: Sequence[str]) -> None:
    lines = [
        line for title, table in tables.items() for line in (f"## {title.capitalize()}", "", *markdown_table(*table))
    ]
    lines += [line for note in notes for line in (escape_markdown(note), "")]
    write_text(folder / "results.md", "\n".join(lines))


def _drafter_table(replayed: Mapping[str, list[ReplayedTurn]]) -> tuple[list[str], list[Row]]:
    rows = []
    for name, turns in replayed.items():
        metrics = measure(turns)
        rows.append(Row([name, *(number(getattr(metrics, field), places) for _, field, places in COLUMNS)]))
    return ["drafter", *(heading for heading, _, _ in COLUMNS)], rows


def _category_table(replayed: Mapping[str, list[ReplayedTurn]]) -> tuple[list[str], list[Row]]:
    by_drafter = {
        name: {category: measure(own) for category, own in _by_category(turns).items()}
        for name, turns in replayed.items()
    }
    rows = []
    for category, first in next(iter(by_drafter.values())).items():
        metrics = [by_category[category] for by_category in by_drafter.values()]
        cells = [f"{number(m.tokens_per_forward, 3)} {number(m.acceptance_length, 3)}" for m in metrics]
        rows.append(Row([category, str(first.turns), *cells]))
    return ["category", "turns", *by_drafter], rows


def _by_category(turns: Sequence[ReplayedTurn]) -> dict[str, list[ReplayedTurn]]:
    by_category: dict[str, list[ReplayedTurn]] = {}
    for turn in turns:
        by_category.setdefault(turn.category, []).append(turn)
    return by_category


def _mismatch_notes(recorded: Recordings) -> list[str]:
    """How many turns were replayed, and why the others were not."""
    missing = recorded.mismatches
    notes = [f"{len(recorded.turns)} of {len(recorded.turns) + len(missing)} turns were replayed."]
    if missing:
        first = missing[0]
        notes.append(
            f"The texts of the other {len(missing)} do not have the recorded number of tokens; the first is question "
            f"{first.question_id}, turn {first.turn + 1}, with {first.retokenised} tokens instead of {first.recorded}."
        )
    return notes
