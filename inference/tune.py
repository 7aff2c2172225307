"""``drafters tune``: search the options of a drafter for measured speed or acceptance, with optuna."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data.benchmarks import Question
from data.files import short_hash, write_text
from data.hub import find_base
from data.safe_text import SafeConsole
from drafters.checks import check_at_least
from drafters.protocol import NoDrafter
from inference import drafter_specs
from inference.evaluate.answers import Answer
from inference.evaluate.conditions import drafter_fingerprint
from inference.evaluate.figures import summarise
from inference.evaluate.intervals import quotient
from inference.evaluate.own_loop import answer_questions
from inference.options import ModelOptions, SamplingOptions, SearchOptions, TuneQuestions
from inference.runs import fingerprint, folder_above, progress_bars
from inference.timing import machine_name
from inference.verifier.base import Base, resolve_device
from inference.verifier.graphed import make_runner
from inference.verifier.layer_skipping import default_skips, sublayers
from inference.verifier.runner import Runner
from inference.verifier.sampling import Sampler
from inference.verifier.session import Session

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial

RANGE = re.compile(r"(-?\d+(?:\.\d+)?)\.\.(-?\d+(?:\.\d+)?)")
FILE, SKIPS = "file", "skips"  # options of --space that are no plain option of the drafter
DRAFTED, ALONE = "drafted", "alone"
MAX_ROWS = 20  # of the table

Params = Mapping[str, Any]  # values by option; a skipped sublayer is an option "attention 3" or "mlp 3"
Space = dict[str, "BaseDistribution"]


def tune(
    model: ModelOptions, selection: TuneQuestions, sampling: SamplingOptions, search: SearchOptions, drafter: str,
    out: str,
) -> None:  # fmt: skip
    """Run `drafters tune`, see `inference.commands.tune`."""
    if find_spec("optuna") is None:
        raise ValueError("drafters tune needs optuna: pip install 'ctc-drafters[tune]'")
    check_at_least(1, trials=search.trials)
    folder = Path(out)
    folder_above(folder / "study.db")  # raises ValueError if the folder cannot be made
    by_benchmark = selection.load()
    base = model.load_on(resolve_device(model.device))
    space = read_space(search.space, drafter, base)
    first_trials(space, search)  # raises ValueError if the grid is too large
    selected = selection.select(base, by_benchmark).values()
    first_turns = [replace(question, turns=question.turns[:1]) for part in selected for question in part.questions]
    questions = [replace(question, question_id=number) for number, question in enumerate(first_turns)]
    max_new_tokens = max(selection.caps().values())
    settings = {
        "base": [model.base, fingerprint(find_base(model.base))],
        "questions": short_hash(json.dumps([prompt for part in selected for prompt in part.prompts])),
        "decoding": [max_new_tokens, *vars(sampling).values()],
        "machine": [machine_name(base.model.device.type), torch.get_num_threads()],
        "forward": [model.dtype, model.forward, model.bitwise],
    }
    decoding = make_runner(base), questions, selection.template, max_new_tokens, sampling.sampler()
    tuner = Tuner(*decoding, drafter, search.objective, folder, settings)
    folder.mkdir(parents=True, exist_ok=True)
    trials = run(folder / "study.db", space, tuner, search)
    best = tuner.spec(trials[0]["options"])
    write_text(folder / "tune.json", json.dumps({"best": best, "settings": settings, "trials": trials}, indent=1))

    console = SafeConsole(highlight=False, soft_wrap=True)
    console.print(table(trials, search.objective), markup=False)
    notes = [note for part in selected for note in part.notes()]
    notes += [f"{in_words(trial['options'])}: {trial['error']}" for trial in trials if "error" in trial]
    for note in notes:
        console.print(f"left out: {note}", style="yellow", markup=False)
    gain = trials[0]["measured"]["speedup"]
    if search.objective == "speedup" and gain < 1:
        line = f"no setting is faster than the base alone: {best}, the best, decodes at {gain:.3g} times its speed"
        console.print(line, markup=False)
    else:
        console.print(f"--drafter {best}", markup=False)


# ---- the space


def read_space(texts: Sequence[str], drafter: str, base: Base) -> Space:
    """Return the distribution of each option; raises ValueError if a text is none, or an option is named twice."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    name, file, _ = spec = drafter_specs.split(drafter)
    taken = {option for option, _ in spec.pairs} | ({FILE, SKIPS} if file else set())
    space: Space = {}
    for text in texts:
        option, _, values = text.partition("=")
        parts = [_number(part) for part in values.split(",")]
        if option in taken:
            raise ValueError(f"{option} is given twice: give it once, in --space or in --drafter {drafter}")
        if option == SKIPS and name != "self_speculative":
            raise ValueError(f"skips is for the drafter self_speculative, not for {name}")
        taken.add(option)
        if text == SKIPS:
            layers = range(len(sublayers(base.model.base_model)[0]))
            names = [f"{kind} {layer}" for kind in ("attention", "mlp") for layer in layers]
            space |= dict.fromkeys(names, CategoricalDistribution([False, True]))
        elif match := RANGE.fullmatch(values):
            low, high = sorted(map(_number, match.groups()))
            is_whole = isinstance(low, int) and isinstance(high, int)
            space[option] = IntDistribution(low, high) if is_whole else FloatDistribution(low, high)
        elif option.isidentifier() and "" not in parts and len(set(parts)) == len(parts):
            space[option] = CategoricalDistribution(parts)
        else:
            raise ValueError(f"{text!r} is no space: write NAME=VALUE,VALUE,... or NAME=LOW..HIGH, each value once")
    return space


def _number(text: str) -> Any:
    """The number that a text is, else the text itself."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def first_trials(space: Space, search: SearchOptions) -> list[dict[str, Any]]:
    """Return what is tried first: all of a grid, which must be finite and small enough, or two sets of sublayers."""
    if search.sampler != "grid":
        names = [name for name in space if " " in name]
        attention, mlp = default_skips(len(names) // 2)
        default = {*(f"attention {layer}" for layer in attention), *(f"mlp {layer}" for layer in mlp)}
        return [dict.fromkeys(names, False), {name: name in default for name in names}] if names else []
    axes = []
    for name, distribution in space.items():
        values: Any = distribution
        if isinstance(getattr(values, "low", None), float):
            raise ValueError(f"a grid has no range of real numbers: list values of {name}, or pass --sampler gp")
        axes.append(values.choices if hasattr(values, "choices") else range(values.low, values.high + 1))
    if (size := math.prod(map(len, axes))) > search.trials:
        raise ValueError(f"the grid has {size} combinations: raise --trials, or pass --sampler tpe or gp")
    return [dict(zip(space, values, strict=True)) for values in product(*axes)]


# ---- measuring


@dataclass
class Tuner:
    """Measures a drafter with different options."""

    runner: Runner
    questions: list[Question]  # whose first turns are decoded
    template: str
    max_new_tokens: int
    sampler: Sampler
    drafter: str  # without the options that are searched
    objective: str  # only the speed-up needs the base's own speed
    folder: Path  # for the file of skipped sublayers
    settings: Mapping[str, Any]  # what a measurement depends on besides the drafter

    def key(self, params: Params) -> str:
        """Everything that a measurement depends on."""
        named, values = drafter_specs.split(self.drafter), _texts(params)
        files = drafter_fingerprint(values.pop(FILE, named.file), [*named.pairs, *values.items()])
        return json.dumps([self.settings, self.drafter, sorted(params.items()), files])

    def spec(self, params: Params) -> str:
        """Return the drafter with these options, and write the file of its skipped sublayers."""
        name, file, options = drafter_specs.split(self.drafter)
        values = _texts(params)
        file = values.pop(FILE, file or "")
        if any(" " in option for option in params):
            base, file = self.runner.base, str(self.folder / "skips.json")
            origin = {"num_layers": base.model.config.num_hidden_layers, "base": base.name}
            write_text(file, json.dumps(skipped_layers(params) | origin))
        options = ",".join([*filter(None, [options]), *(f"{option}={text}" for option, text in values.items())])
        return name + (f"={file}" if file else "") + (f":{options}" if options else "")

    def measure(self, params: Params) -> dict[str, Any]:
        """Decode the prompts, for the speed-up also without a drafter; raises ValueError if there is no such one."""
        sessions = {DRAFTED: drafter_specs.make_session(self.spec(params), self.runner, self.sampler)}
        if self.objective == "speedup":
            sessions[ALONE] = Session(self.runner, NoDrafter(), self.sampler)
        answers: dict[str, list[Answer]] = {name: [] for name in sessions}
        for answer in answer_questions(sessions, self.questions, self.template, self.max_new_tokens):
            answers[answer.drafter].append(answer)
        summary = summarise([answers[DRAFTED]], [answers.get(ALONE, answers[DRAFTED])])
        return {
            "speedup": summary.speed.speedup.value if ALONE in answers else None,
            "tokens_per_second": quotient(summary.tokens, summary.speed.median_seconds),
            "acceptance_length": summary.acceptance.length.value or 0.0,
            "fed_per_step": summary.acceptance.fed_per_step or 0.0,
            "identical": summary.identical if ALONE in answers else None,
        }


# ---- the study


def run(path: Path, space: Space, tuner: Tuner, search: SearchOptions) -> list[dict[str, Any]]:
    """Measure until all trials of a study are done, without what any study in the file ``path`` has measured already.

    Returns the options of each trial with what was measured or why it was impossible, the best first; ValueError if all
    were impossible, or the file cannot be read or written.
    """
    import optuna
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    samplers = {"gp": optuna.samplers.GPSampler, "tpe": optuna.samplers.TPESampler}
    make_sampler = samplers.get(search.sampler, optuna.samplers.RandomSampler)
    # A study of the drafter's files as they are: a sampler does not learn from what others gave.
    about = short_hash(json.dumps([tuner.settings, tuner.key({})]))
    name = " ".join([tuner.drafter, *sorted(search.space), search.objective, about])

    def finished() -> list[FrozenTrial]:
        """The trials whose files, which options may name, have not changed since."""
        trials = study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
        return [trial for trial in trials if trial.user_attrs.get("key") == tuner.key(trial.params)]

    with open_storage(path) as storage, progress_bars() as bars:
        names = optuna.get_all_study_names(storage)
        earlier = [trial for other in names for trial in optuna.load_study(study_name=other, storage=storage).trials]
        measurements = {record["key"]: record for trial in earlier if (record := trial.user_attrs.get("measured"))}
        study = optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
        study.sampler = make_sampler(seed=search.search_seed + len(study.trials))  # goes on where it stopped
        for stale in study.get_trials(states=[TrialState.RUNNING]):  # of an interrupted run
            study.tell(stale.number, state=TrialState.FAIL)
        done = [trial.params for trial in finished()]
        first = [params for params in first_trials(space, search) if params not in done]
        num_trials = len(first) if search.sampler == "grid" else max(0, search.trials - len(done))
        for number in bars.track(range(num_trials), description="trials"):
            if number < len(first):
                study.enqueue_trial(first[number])
            trial = study.ask(space)
            key = tuner.key(trial.params)
            trial.set_user_attr("key", key)
            try:
                if measurements.get(key, {}).get(search.objective) is None:
                    measurements[key] = tuner.measure(trial.params) | {"key": key}
            except ValueError as error:
                trial.set_user_attr("error", " ".join(str(error).split()))
                study.tell(trial, state=TrialState.PRUNED)
                continue
            trial.set_user_attr("measured", measurements[key])
            study.tell(trial, measurements[key][search.objective])
        trials = finished()
    trials.sort(key=lambda trial: -math.inf if trial.value is None else trial.value)
    if trials[-1].value is None:
        raise ValueError(trials[-1].user_attrs["error"])
    different = {json.dumps(trial.params): trial for trial in trials}  # a sampler may repeat itself
    return [{"options": trial.params} | trial.user_attrs for trial in reversed(different.values())]


@contextmanager
def open_storage(path: Path) -> Iterator[RDBStorage]:
    """Open a file of studies, and turn the errors of SQLite, such as a full disk or a damaged file, into ValueError."""
    from optuna.exceptions import StorageInternalError
    from optuna.storages import RDBStorage
    from sqlalchemy.engine import URL
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield RDBStorage(str(URL.create("sqlite", database=str(path))))
    except (StorageInternalError, SQLAlchemyError) as error:
        reason = getattr(error, "orig", None) or getattr(error.__cause__, "orig", None) or error
        raise ValueError(
            f"{path} could not be read or written ({reason}), and the trials in it are kept: make room, or choose "
            "another --out"
        ) from error


# ---- the results


def table(trials: Sequence[Mapping[str, Any]], objective: str) -> str:
    """The best trials, for the terminal."""
    import pandas

    best = [trial for trial in trials if "error" not in trial][:MAX_ROWS]
    rows = [{"options": in_words(trial["options"])} | trial["measured"] for trial in best]
    columns = pandas.DataFrame(rows).drop(columns="key").dropna(axis=1)
    text = columns.to_string(index=False, float_format="{:.2f}".format)
    return f"the {len(best)} best trials by {objective}\n{text}"


def in_words(params: Params) -> str:
    """Options in one line; sublayers that are skipped as ``attention 2 3, mlp 4``."""
    skipped = {kind: " ".join(map(str, layers)) for kind, layers in skipped_layers(params).items() if layers}
    return ", ".join(f"{name} {text}" for name, text in (_texts(params) | skipped).items()) or "nothing skipped"


def skipped_layers(params: Params) -> dict[str, list[int]]:
    """The layers whose attention is skipped, and those whose MLP is."""
    layers: dict[str, list[int]] = {"attention": [], "mlp": []}
    for option, value in params.items():
        if " " in option and value:
            kind, layer = option.split()
            layers[kind].append(int(layer))
    return layers


def _texts(params: Params) -> dict[str, str]:
    """The values of options as text, without skipped sublayers."""
    options = {option: value for option, value in params.items() if " " not in option}
    return {option: f"{value:.4g}" if isinstance(value, float) else str(value) for option, value in options.items()}
