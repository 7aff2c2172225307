"""``drafters replay``: drafters that read nothing but the text, measured on recorded answers without a base."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.text import Text

from data import benchmarks
from data.tokenizer import load_tokenizer
from drafters.protocol import Drafter, RequiredOutputs
from inference.engine.session import Session, StepCost
from inference.registry import catalogue
from inference.replay import recordings
from inference.replay.recordings import NoModel, Recorded, RecordedBase, Recording, Recordings, ReplayRunner
from inference.reporting.tables import Row, escape, markdown_table, number, rich_table
from inference.results.metrics import acceptance_length, decode_steps
from inference.runs.outputs import new_folder

COUNTING = (
    "Tokens per forward counts the prefill, which may draft too; all else leaves it out. Averages over steps (micro), "
    "but for the mean per question. The texts are the recorded ones."
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
    """What the steps of one recorded turn cost; the first is the prefill."""

    question_id: int
    category: str
    steps: list[StepCost]


@dataclass(frozen=True)
class Figures:
    """One drafter on recorded turns. A ratio of nothing is None.

    Args:
        turns: Turns replayed.
        tokens: Tokens of their answers.
        tokens_per_forward: Tokens / base forwards, prefill included, micro average.
        acceptance_length: The same, prefill excluded from both.
        acceptance_length_mean: Its mean over questions.
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


def figures(turns: Sequence[ReplayedTurn]) -> Figures:
    """Count the steps of some turns."""
    questions: dict[int, list[ReplayedTurn]] = {}
    for turn in turns:
        questions.setdefault(turn.question_id, []).append(turn)
    lengths = [length for own in questions.values() if (length := acceptance_length(own)) is not None]
    every, later = [step for turn in turns for step in turn.steps], decode_steps(turns)
    tokens = sum(step.emitted for step in every)
    return Figures(
        turns=len(turns),
        tokens=tokens,
        tokens_per_forward=_ratio(tokens, len(every)),
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
        ValueError: It needs more of the base than its tokens, or `zoo.make` refuses it.
    """
    try:
        drafter = catalogue.make(spec, runner)
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
    """Decode recorded turns in their order with the loop that decodes live. What the drafter keeps across texts stays.

    Args:
        runner: Of the base that was recorded.
        drafter: One that reads nothing but the text.
        recorded: The turns.
        max_new_tokens: The recording's cap on a turn.

    Raises:
        ValueError: An end-of-sequence token stands inside an answer.
    """
    session = Session(runner, drafter, Recorded())
    eos = runner.base.eos | {turn.tokens[-1] for turn in recorded if turn.ended}
    drafter.reset()
    for turn in recorded:
        runner.load([*turn.prompt, *turn.tokens], turn.ended)
        result = session.run(turn.prompt, max_new_tokens if turn.ended else len(turn.tokens), eos)
        if result.tokens != turn.tokens:
            raise ValueError(
                f"question {turn.question_id}, turn {turn.turn + 1} goes on after its end-of-sequence token "
                f"{result.tokens[-1]}: pass the --tokenizer of the recording"
            )
        yield ReplayedTurn(turn.question_id, turn.category, result.steps)


def replay(
    answers: str,
    questions: str,
    tokenizer: str,
    drafter: list[str],
    template: str = "vicuna_v1.1",
    benchmark: str = "mt_bench",
    limit: int | None = None,
    max_new_tokens: int = 512,
    out: str | None = None,
    overwrite: bool = False,
) -> None:
    """Measure drafters that read nothing but the text on recorded greedy answers, without the base that wrote them.

    The steps are those of live decoding, one for one. Prints tables; with --out also writes results.json and
    results.md.

    Args:
        answers: Recorded answers: JSONL of FastChat's form (turns, new_tokens, idxs), or of drafters eval.
        questions: The questions that were answered, a local file.
        tokenizer: Folder of the tokenizer of the base that answered.
        drafter: none, anpd, prompt_lookup or another that reads only the text, with :key=value,... if wanted; may be
            repeated.
        template: Chat template of the recording: vicuna_v1.1, llama2_chat or tokenizer, the tokenizer's own.
        benchmark: Form of the questions: mt_bench, gsm8k or embedded.
        limit: Recorded questions at most.
        max_new_tokens: Cap of the recording on a turn.
        out: Folder for the results.
        overwrite: Replace results that are already there.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    folder = new_folder(out, overwrite)
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    runner = ReplayRunner(RecordedBase(answers, load_tokenizer(tokenizer)))
    drafters = {name: make(spec, runner) for name, spec in catalogue.labels(drafter).items()}
    asked = benchmarks.load(benchmark, questions)
    recorded = recordings.read(answers, asked, runner.base, template, max_new_tokens, limit)

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    replayed = {}
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        for name, chosen in drafters.items():
            steps = decode(runner, chosen, recorded.turns, max_new_tokens)
            replayed[name] = list(progress.track(steps, len(recorded.turns), description=name))
    tables = {
        "all turns": _by_drafter(replayed),
        "by category: tokens per forward, acceptance length": _by_kind(replayed),
    }
    notes = [COUNTING, *_left_out(recorded)]
    console = Console()
    for title, grid in tables.items():
        console.print(Text(title, style="bold"), rich_table(*grid), Text(), sep="\n")
    for note in notes:
        console.print(note, style="dim")
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        results = {
            "context": {"command": " ".join(["drafters", *sys.argv[1:]]), "counting": COUNTING},
            "left_out": [asdict(mismatch) for mismatch in recorded.mismatches],
            "results": {
                name: asdict(figures(found))
                | {"by_category": {kind: asdict(figures(own)) for kind, own in _kinds(found).items()}}
                for name, found in replayed.items()
            },
        }
        lines = [
            line for title, grid in tables.items() for line in (f"## {title.capitalize()}", "", *markdown_table(*grid))
        ]
        lines += [line for note in notes for line in (escape(note), "")]
        _write(folder / "results.md", "\n".join(lines))
        _write(folder / "results.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")


def _by_drafter(replayed: Mapping[str, list[ReplayedTurn]]) -> tuple[list[str], list[Row]]:
    rows = []
    for name, turns in replayed.items():
        found = figures(turns)
        rows.append(Row([name, *(number(getattr(found, figure), places) for _, figure, places in COLUMNS)]))
    return ["drafter", *(heading for heading, _, _ in COLUMNS)], rows


def _by_kind(replayed: Mapping[str, list[ReplayedTurn]]) -> tuple[list[str], list[Row]]:
    by_drafter = {name: {kind: figures(own) for kind, own in _kinds(turns).items()} for name, turns in replayed.items()}
    rows = []
    for kind, first in next(iter(by_drafter.values())).items():
        found = [by_kind[kind] for by_kind in by_drafter.values()]
        cells = [f"{number(f.tokens_per_forward, 3)} {number(f.acceptance_length, 3)}" for f in found]
        rows.append(Row([kind, str(first.turns), *cells]))
    return ["category", "turns", *by_drafter], rows


def _kinds(turns: Sequence[ReplayedTurn]) -> dict[str, list[ReplayedTurn]]:
    kinds: dict[str, list[ReplayedTurn]] = {}
    for turn in turns:
        kinds.setdefault(turn.category, []).append(turn)
    return kinds


def _left_out(recorded: Recordings) -> list[str]:
    """How many turns were measured, and why not the others."""
    missing = recorded.mismatches
    notes = [f"{len(recorded.turns)} of {len(recorded.turns) + len(missing)} turns were replayed."]
    if missing:
        first = missing[0]
        notes.append(
            f"The text of the other {len(missing)} does not give back the recorded number of tokens; the first is "
            f"question {first.question_id}, turn {first.turn + 1}: {first.retokenised}, not {first.recorded}."
        )
    return notes


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
