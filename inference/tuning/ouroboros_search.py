"""``drafters ouroboros-search``: the heuristic search of Ouroboros' hyper-parameters (Algorithm 1 of its paper)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal

from rich.table import Table

from data.benchmarks import Question
from data.files import SafeConsole
from inference import drafter_specs
from inference.evaluation.answering import answer_question
from inference.evaluation.question_options import QuestionOptions
from inference.progress import progress_bars
from inference.results.records import Turn
from inference.tuning.trials import Trial, TrialFile
from inference.verifier.base import Base, resolve_device
from inference.verifier.options import ModelOptions
from inference.verifier.runner import Runner
from inference.verifier.session import Session

# The ranges of the paper's Table 11. Its beta is one more than the level of lookahead decoding (Table 12 and the
# authors' scripts), so beta = 5 to 7 are levels 4 to 6.
NUM_DRAFT = {"high": range(7, 15), "low": range(2, 7)}
WINDOW = range(15, 21)
LEVEL = range(4, 7)


@dataclass(frozen=True)
class Setting:
    """The hyper-parameters that are searched.

    Args:
        num_draft: Draft tokens, gamma in the paper.
        window: Lookahead window, W in the paper.
        level: Length of phrases, beta - 1 in the paper.
    """

    num_draft: int
    window: int
    level: int

    def spec(self, model: str, num_phrases: int) -> str:
        """The drafter as it is written on a command line."""
        return (
            f"ouroboros={model}:num_draft={self.num_draft},num_phrases={num_phrases},"
            f"level={self.level},window={self.window}"
        )


@dataclass(frozen=True)
class OuroborosOptions:
    """What is searched, and by which measure.

    Args:
        homogeneity: How alike the draft model and the base are on these questions: high searches drafts of 7 to 14
            tokens, as for code; low searches drafts of 2 to 6 tokens, as for translation.
        num_phrases: Number of phrases that extend a draft; the paper always uses 3.
        draft_cost: Compare settings by counted forwards instead of seconds, with a forward of the draft model costing
            this share of a forward of the base. The result is then the same in every run.
        seed: Seed of the random window and level that the search starts with.
    """

    homogeneity: Literal["high", "low"] = "low"
    num_phrases: int = 3
    draft_cost: float | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise ValueError if `draft_cost` is negative or not finite."""
        if self.draft_cost is not None and not 0 <= self.draft_cost < float("inf"):
            raise ValueError(f"--draft-cost must be at least 0 and finite, not {self.draft_cost}")

    def ranges(self) -> dict[str, range]:
        """The values of each field of a `Setting`, in the order of the search."""
        return {"num_draft": NUM_DRAFT[self.homogeneity], "window": WINDOW, "level": LEVEL}

    def time(self, trial: Trial) -> float:
        """The time per token of a trial, by the chosen measure."""
        return trial.clock_time() if self.draft_cost is None else trial.modelled_time(self.draft_cost)


def search(time: Callable[[Setting], float], ranges: Mapping[str, range], start: Setting) -> Setting:
    """Optimise one hyper-parameter after the other while the others keep their current values.

    Args:
        time: The objective to minimise. It is called once for every setting that is tried, or more often.
        ranges: The values of each field of a `Setting`, in the order of the search: gamma, W, beta.
        start: Provides W and beta while gamma is searched, and beta while W is searched.
    """
    best = start
    for name, values in ranges.items():
        best = min((replace(best, **{name: value}) for value in values), key=time)
    return best


def ouroboros_search(
    model: ModelOptions,
    selection: QuestionOptions,
    options: OuroborosOptions,
    drafter_model: str,
    out: str | None = None,
) -> None:
    """Search the draft length, then the window, then the phrase length of Ouroboros, and print the best drafter.

    This is Algorithm 1 of the paper, which tries twelve to fifteen settings instead of a grid of ninety or more.

    Args:
        model: The base.
        selection: The questions.
        options: What is searched.
        drafter_model: Folder or hub id of the draft model.
        out: JSON file of trials. Trials in it that were made with the same arguments are not repeated.
    """
    options.check()
    questions = selection.load()
    trial_file = TrialFile(out, trial_arguments(model, selection))
    base = model.load()
    prompts = selection.select(base, questions)
    for note in prompts.notes():
        SafeConsole(stderr=True).print(f"left out: {note}", markup=False, highlight=False)
    trials, best = run(base, prompts.questions, selection, options, drafter_model, trial_file)
    print_table(trials, best, options.draft_cost)
    print(best.spec(drafter_model, options.num_phrases))


def trial_arguments(model: ModelOptions, selection: QuestionOptions) -> tuple[object, ...]:
    """Everything that a trial depends on besides the drafter's spec."""
    return (
        model.base,
        selection.benchmark,
        selection.questions,
        selection.offset,
        selection.limit,
        selection.max_new_tokens,
        selection.template,
        model.dtype,
        resolve_device(model.device).type,
    )


def run(
    base: Base,
    questions: list[Question],
    selection: QuestionOptions,
    options: OuroborosOptions,
    drafter_model: str,
    trial_file: TrialFile,
) -> tuple[dict[Setting, Trial], Setting]:
    """Search; return the trials that were needed, in their order, and the best setting."""
    runner, rng, ranges = Runner(base), random.Random(options.seed), options.ranges()
    start = Setting(**{name: rng.choice(values) for name, values in ranges.items()})
    trials: dict[Setting, Trial] = {}
    num_settings = sum(map(len, ranges.values())) - 2  # the best setting of one range is also in the next range
    with progress_bars() as progress:
        task = progress.add_task("settings x questions", total=num_settings * len(questions))

        def time(setting: Setting) -> float:
            if setting not in trials:
                spec = setting.spec(drafter_model, options.num_phrases)
                trial = trial_file.get(spec)
                if trial is None:
                    turns: list[Turn] = []
                    for answer_turns in decode(runner, spec, questions, selection):
                        turns += answer_turns
                        progress.advance(task)
                    trial = Trial.of(turns)
                    trial_file.add(spec, trial)
                else:
                    progress.advance(task, len(questions))
                trials[setting] = trial
            return options.time(trials[setting])

        return trials, search(time, ranges, start)


def decode(
    runner: Runner, spec: str, questions: list[Question], selection: QuestionOptions
) -> Iterator[Sequence[Turn]]:
    """Yield the turns of each question's answer, after a warm-up whose phrases are discarded."""
    session = Session(runner, drafter_specs.make(spec, runner))
    template, max_new_tokens = selection.template, selection.max_new_tokens
    answer_question(session, spec, questions[0], runner.base, template, min(16, max_new_tokens))
    session.drafter.reset()
    for question in questions:
        yield answer_question(session, spec, question, runner.base, template, max_new_tokens).turns


def print_table(trials: Mapping[Setting, Trial], best: Setting, draft_cost: float | None) -> None:
    """Print the measurements of every trial, with the best setting in bold."""
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
    SafeConsole().print(table)
