"""``drafters ouroboros-search``: the heuristic search of Ouroboros' hyper-parameters (Algorithm 1 of its paper)."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Literal

from data import benchmarks
from data.benchmarks import Question
from drafters.atomic_write import atomic_write
from inference.api.prompts import fitting
from inference.engine.base import Base, Dtype, load_base, resolve_device
from inference.engine.runner import Runner
from inference.engine.session import Session
from inference.evaluation.evaluate import answer
from inference.registry import catalogue
from inference.results.metrics import decode_steps
from inference.results.records import Turn
from inference.runs.outputs import folder_above

# The recipe of the paper's Table 11. Its beta is one more than the level of lookahead decoding (Table 12 and the
# authors' scripts), so 5 to 7 are levels 4 to 6.
NUM_DRAFT = {"high": range(7, 15), "low": range(2, 7)}
WINDOW = range(15, 21)
LEVEL = range(4, 7)


@dataclass(frozen=True)
class Setting:
    """What is searched for: gamma, W, and beta - 1."""

    num_draft: int
    window: int
    level: int

    def spec(self, model: str, num_phrases: int) -> str:
        """The drafter's spec on a command line."""
        return (
            f"ouroboros={model}:num_draft={self.num_draft},num_phrases={num_phrases},"
            f"level={self.level},window={self.window}"
        )


@dataclass(frozen=True)
class Trial:
    """What decoding the questions with one setting took, prefill included; ``steps`` and ``gained`` without it.

    Args:
        tokens: Tokens of all answers.
        seconds: Wall time.
        base_forwards, draft_forwards: Forwards of the two models.
        steps: Base forwards after each turn's first.
        gained: Tokens those emitted.
        step_drafts: Forwards of the draft model in those.
    """

    tokens: int
    seconds: float
    base_forwards: int
    draft_forwards: int
    steps: int
    gained: int
    step_drafts: int

    @classmethod
    def of(cls, turns: list[Turn]) -> Trial:
        """Sum up the turns of all answers."""
        steps, later = [step for turn in turns for step in turn.steps], decode_steps(turns)
        return cls(
            tokens=sum(len(turn.token_ids) for turn in turns),
            seconds=sum(turn.seconds for turn in turns),
            base_forwards=len(steps),
            draft_forwards=sum(step.draft_forwards for step in steps),
            steps=len(later),
            gained=sum(step.emitted for step in later),
            step_drafts=sum(step.draft_forwards for step in later),
        )

    def clock_time(self) -> float:
        """Seconds a token: the objective of Algorithm 1, as every setting writes the same text."""
        return self.seconds / self.tokens

    def modelled_time(self, draft_cost: float) -> float:
        """Base forwards a token when one of the draft model costs ``draft_cost`` of them: the same in every run."""
        return (self.base_forwards + draft_cost * self.draft_forwards) / self.tokens


def search(time: Callable[[Setting], float], ranges: Mapping[str, range], start: Setting) -> Setting:
    """One hyper-parameter after the other, each the quickest of its range with the others as they are so far.

    Args:
        time: To be small; asked for each setting tried, for some more than once.
        ranges: What each field of a `Setting` may be, in the order of the search: gamma, W, beta.
        start: W and beta while gamma is searched, beta while W is.
    """
    best = start
    for name, values in ranges.items():
        best = min((replace(best, **{name: value}) for value in values), key=time)
    return best


def ouroboros_search(
    base: str,
    drafter_model: str,
    benchmark: str = "embedded",
    questions: str | None = None,
    offset: int = 0,
    limit: int = 5,
    max_new_tokens: int = 128,
    homogeneity: Literal["high", "low"] = "low",
    num_phrases: int = 3,
    draft_cost: float | None = None,
    seed: int = 0,
    template: str = "tokenizer",
    dtype: Dtype = "float32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    out: str | None = None,
) -> None:
    """Search gamma, then the window, then the phrase length of Ouroboros, and print the drafter to pass on.

    Algorithm 1 of the paper: some twelve to fifteen settings instead of a grid of ninety and more.

    Args:
        base: Folder or hub id of the base.
        drafter_model: Folder or hub id of the draft model.
        benchmark: Whose questions are decoded: one that `drafters eval` knows.
        questions: File of the benchmark, where it is not to come from the hub.
        offset: Leave out the first questions.
        limit: Questions at most; those that do not fit into the base's context are left out and not counted.
        max_new_tokens: Tokens of an answer at most.
        homogeneity: Of draft model and base on these questions. high searches drafts of 7 to 14 tokens, as for code,
            low those of 2 to 6, as for translation.
        num_phrases: Phrases that lengthen a draft; the paper always takes 3.
        draft_cost: Count forwards instead of seconds, one of the draft model as this share of one of the base; such a
            search ends the same in every run.
        seed: Of the draw of the window and the phrase length that the search begins with.
        template: Chat template: the tokenizer's own, vicuna_v1.1 or llama2_chat.
        dtype: Number format of base and draft model.
        device: auto takes the GPU where there is one.
        out: JSON file of trials; those it holds already, made with the same arguments, are not made again.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if draft_cost is not None and not 0 <= draft_cost < float("inf"):
        raise ValueError(f"--draft-cost must be at least 0 and finite, not {draft_cost}")
    where = resolve_device(device)
    benchmarks.check_selection(offset, limit)
    chosen = benchmarks.load(benchmark, questions, offset)
    ledger = Ledger(out, (base, benchmark, questions, offset, limit, max_new_tokens, template, dtype, where.type))
    loaded = load_base(base, dtype, where)
    fit = fitting(loaded, benchmark, chosen, template, max_new_tokens, limit)
    asked = fit.questions
    runner, rng = Runner(loaded), random.Random(seed)
    ranges = {"num_draft": NUM_DRAFT[homogeneity], "window": WINDOW, "level": LEVEL}
    start = Setting(**{name: rng.choice(values) for name, values in ranges.items()})
    trials: dict[Setting, Trial] = {}

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    for line in fit.notes():
        console.print(f"left out: {line}", markup=False, highlight=False)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        settings = sum(map(len, ranges.values())) - 2  # the best of one range is in the next one too
        task = progress.add_task("settings x questions", total=settings * len(asked))

        def time(setting: Setting) -> float:
            if setting not in trials:
                spec = setting.spec(drafter_model, num_phrases)
                trial = ledger.get(spec)
                if trial is None:
                    turns = []
                    for given in decode(runner, spec, asked, loaded, template, max_new_tokens):
                        turns += given
                        progress.advance(task)
                    trial = Trial.of(turns)
                    ledger.add(spec, trial)
                else:
                    progress.advance(task, len(asked))
                trials[setting] = trial
            trial = trials[setting]
            return trial.clock_time() if draft_cost is None else trial.modelled_time(draft_cost)

        best = search(time, ranges, start)
    _print(trials, best, draft_cost)
    print(best.spec(drafter_model, num_phrases))


def decode(
    runner: Runner, spec: str, questions: list[Question], base: Base, template: str, max_new_tokens: int
) -> Iterator[list[Turn]]:
    """Yield the turns of each question's answer, after a warm-up whose phrases are forgotten."""
    session = Session(runner, catalogue.make(spec, runner))
    answer(session, spec, questions[0], base, template, min(16, max_new_tokens))
    session.drafter.reset()
    for question in questions:
        yield answer(session, spec, question, base, template, max_new_tokens).turns


class Ledger:
    """Trials in a JSON file, by the arguments they were made with and then by spec; written after each.

    Args:
        file: Where; None keeps nothing.
        arguments: What a trial depends on besides its spec.

    Raises:
        ValueError: The file is not one of trials, or there is no folder for it that may be written to.
    """

    def __init__(self, file: str | None, arguments: tuple[object, ...]) -> None:
        self.path, self.key, self.pages = Path(file) if file else None, json.dumps(arguments), {}
        if self.path and folder_above(self.path) != self.path.absolute().parent:
            raise ValueError(f"{file}: there is no folder {self.path.parent}; make it, or give another --out")
        if self.path and self.path.exists():
            try:
                self.pages = json.loads(self.path.read_text(encoding="utf-8"))
                for page in self.pages.values():
                    for trial in page.values():
                        Trial(**trial)
            except (OSError, ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{file} holds no trials of ouroboros-search: give another --out") from error

    def get(self, spec: str) -> Trial | None:
        """The trial of a setting, if it was made before."""
        found = self.pages.get(self.key, {}).get(spec)
        return found and Trial(**found)

    def add(self, spec: str, trial: Trial) -> None:
        """Write a trial down."""
        self.pages.setdefault(self.key, {})[spec] = asdict(trial)
        if self.path:
            with atomic_write(self.path) as new:
                new.write_text(json.dumps(self.pages, indent=1), encoding="utf-8")


def _print(trials: dict[Setting, Trial], best: Setting, draft_cost: float | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("gamma", "window", "level", "tokens/s", "acceptance length", "draft forwards/step")
    if draft_cost is not None:
        table.add_column("base forwards/token")
    for setting, trial in trials.items():
        numbers = [
            trial.tokens / trial.seconds,
            trial.gained / max(1, trial.steps),
            trial.step_drafts / max(1, trial.steps),
        ]
        numbers += [] if draft_cost is None else [trial.modelled_time(draft_cost)]
        cells = [*map(str, astuple(setting)), *(f"{number:.2f}" for number in numbers)]
        table.add_row(*cells, style="bold green" if setting == best else None)
    for column in table.columns:
        column.justify = "right"
    Console().print(table)
