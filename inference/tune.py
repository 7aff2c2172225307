"""``drafters tune``: search the options of a drafter for measured speed or acceptance, with optuna."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.table import Table

from data.files import short_hash, write_text
from data.hub import find_base
from data.safe_text import SafeConsole
from drafters.checks import check_at_least
from drafters.protocol import NoDrafter
from inference import drafter_specs
from inference.options import ModelOptions, SamplingOptions, SearchOptions, TuneQuestions
from inference.runs import fingerprint, folder_above, progress_bars
from inference.verifier.base import Base
from inference.verifier.compiled import make_runner
from inference.verifier.layer_skipping import default_skips, sublayers
from inference.verifier.runner import Runner
from inference.verifier.sampling import Sampler
from inference.verifier.session import Generation, Session, acceptance_length

if TYPE_CHECKING:
    from optuna import Study, Trial

RANGE = re.compile(r"(-?\d+(?:\.\d+)?)\.\.(-?\d+(?:\.\d+)?)")
FILE, SKIPS = "file", "skips"  # options of --space that are no plain option of the drafter
WARM_UP_TOKENS = 16
MAX_ROWS = 20  # trials in the table
HEADINGS = {
    "speedup": "speed-up",
    "tokens_per_second": "tokens/s",
    "acceptance_length": "acceptance length",
    "fed_per_step": "fed tokens/step",
    "identical": "identical",
}

Params = Mapping[str, Any]  # values by option; a skipped sublayer is an option "attention 3" or "mlp 3"


class Range(NamedTuple):
    """All numbers between two, which are included: integers if both are."""

    low: float
    high: float

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


Space = dict[str, "list[Any] | Range"]


def tune(
    model: ModelOptions,
    selection: TuneQuestions,
    sampling: SamplingOptions,
    search: SearchOptions,
    drafter: str,
    out: str,
) -> None:
    """See `inference.commands.tune`."""
    if find_spec("optuna") is None:
        raise ValueError("drafters tune needs optuna: pip install 'ctc-drafters[tune]'")
    check_at_least(1, trials=search.trials)
    folder = Path(out)
    folder_above(folder / "study.db")  # raises ValueError if the folder cannot be made
    questions = selection.load()
    base = model.load()
    space = read_space(search.space, drafter, base)
    first = combinations(space, search.trials) if search.sampler == "grid" else default_sets(space)
    selected = selection.select(base, questions).values()
    prompts = [prompt for benchmark in selected for prompt in benchmark.prompts]
    max_new_tokens = max(selection.caps().values())
    settings = {
        "base": [model.base, fingerprint(find_base(model.base))],
        "questions": short_hash(json.dumps(prompts)),
        "decoding": [max_new_tokens, *vars(sampling).values()],
        "machine": [model.dtype, base.model.device.type, torch.get_num_threads()],
    }
    tuner = Tuner(
        make_runner(base), prompts, max_new_tokens, sampling.sampler(), drafter, search.objective, folder, settings
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "study.db"
    with storage_errors(path):
        name = " ".join([drafter, *sorted(search.space), search.objective, short_hash(json.dumps(settings))])
        study, measured = open_study(path, name, search)
        trials = run(study, measured, space, tuner, search, first)
    best = tuner.spec(trials[0]["options"])
    write_text(folder / "tune.json", json.dumps({"best": best, "settings": settings, "trials": trials}, indent=1))
    console = SafeConsole(highlight=False, soft_wrap=True)
    console.print(table(trials, search.objective))
    notes = [note for benchmark in selected for note in benchmark.notes()]
    notes += [f"{in_words(trial['options'])}: {trial['error']}" for trial in trials if "error" in trial]
    for note in notes:
        console.print(f"left out: {note}", style="yellow", markup=False)
    conclusion, speedup = f"--drafter {best}", trials[0]["measured"][search.objective]
    if search.objective == "speedup" and speedup < 1:
        slower = f"{best}, the best, decodes at {speedup:.3g} times its speed"
        conclusion = f"no setting is faster than the base alone: {slower}"
    console.print(conclusion, markup=False)


# ---- the space


def read_space(texts: Sequence[str], drafter: str, base: Base) -> Space:
    """Return the values of each option; raises ValueError if a text has none, or an option is named twice."""
    drafter_name, file, options = drafter_specs.split(drafter)
    named = [pair.partition("=")[0] for pair in options.split(",") if pair] + ([FILE] if file else [])
    space: Space = {}
    for text in texts:
        option, _, values = text.partition("=")
        if option in named or (option == SKIPS and file):
            raise ValueError(f"{option} is given twice: give it once, in --space or in --drafter {drafter}")
        if option == SKIPS and drafter_name != "self_speculative":
            raise ValueError(f"skips is for the drafter self_speculative, not for {drafter_name}")
        named.append(option)
        choices = [number(part) for part in values.split(",")]
        if text == SKIPS:
            layers = range(len(sublayers(base.model.base_model)[0]))
            space |= {f"{kind} {layer}": [False, True] for kind in ("attention", "mlp") for layer in layers}
        elif match := RANGE.fullmatch(values):
            space[option] = Range(*sorted(map(number, match.groups())))  # type: ignore[arg-type]
        elif option.isidentifier() and "" not in choices and len(set(choices)) == len(choices):
            space[option] = choices
        else:
            raise ValueError(f"{text!r} is no space: write NAME=VALUE,VALUE,... or NAME=LOW..HIGH, each value once")
    return space


def number(text: str) -> int | float | str:
    """The number that a text is, or the text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def combinations(space: Space, max_trials: int) -> list[dict[str, Any]]:
    """Return all combinations of a grid; raises ValueError if there are more than trials."""
    axes: list[Sequence[Any]] = []
    for name, values in space.items():
        if isinstance(values, Range) and not values.is_whole:
            raise ValueError(f"a grid has no range of real numbers: list values of {name}, or pass --sampler gp")
        axes.append(range(int(values.low), int(values.high) + 1) if isinstance(values, Range) else values)
    if (size := math.prod(map(len, axes))) > max_trials:
        raise ValueError(f"the grid has {size} combinations: raise --trials, or pass --sampler tpe or gp")
    return [dict(zip(space, combination, strict=True)) for combination in product(*axes)]


def default_sets(space: Space) -> list[dict[str, Any]]:
    """The sets of sublayers with which a search of them begins: none, and those skipped by default."""
    names = [name for name in space if " " in name]
    attention, mlp = default_skips(len(names) // 2)
    default = {*(f"attention {layer}" for layer in attention), *(f"mlp {layer}" for layer in mlp)}
    return [dict.fromkeys(names, False), {name: name in default for name in names}] if names else []


def suggest(trial: Trial, space: Space) -> dict[str, Any]:
    """Let the sampler choose the options of a trial."""
    params: dict[str, Any] = {}
    for name, values in space.items():
        if not isinstance(values, Range):
            params[name] = trial.suggest_categorical(name, values)
        elif values.is_whole:
            params[name] = trial.suggest_int(name, int(values.low), int(values.high))
        else:
            params[name] = trial.suggest_float(name, *values)
    return params


# ---- measuring


@dataclass
class Tuner:
    """Measures a drafter with different options."""

    runner: Runner
    prompts: list[list[int]]
    max_new_tokens: int
    sampler: Sampler
    drafter: str  # without the options that are searched
    objective: str  # only the speed-up needs the base's own speed
    folder: Path  # for the file of skipped sublayers
    settings: Mapping[str, Any]  # what a measurement depends on besides the drafter

    def key(self, params: Params) -> str:
        """Everything that a measurement depends on."""
        file = params.get(FILE) or drafter_specs.split(self.drafter)[1]
        files = fingerprint(file and drafter_specs.drafter_folder(str(file)))
        return json.dumps([self.settings, self.drafter, sorted(params.items()), files])

    def spec(self, params: Params) -> str:
        """Return the drafter with these options, and write the file of its skipped sublayers."""
        name, file, options = drafter_specs.split(self.drafter)
        values = as_text(params)
        file = values.pop(FILE, file or "")
        if any(" " in key for key in params):
            skipped = [key.split() for key, is_skipped in params.items() if " " in key and is_skipped]
            parts: dict[str, Any] = {kind: [int(n) for k, n in skipped if k == kind] for kind in ("attention", "mlp")}
            base = self.runner.base
            parts |= {"num_layers": base.model.config.num_hidden_layers, "base": base.name}
            file = str(self.folder / "skips.json")
            write_text(file, json.dumps(parts))
        options = ",".join([*filter(None, [options]), *(f"{key}={value}" for key, value in values.items())])
        return name + (f"={file}" if file else "") + (f":{options}" if options else "")

    def measure(self, params: Params) -> dict[str, Any]:
        """Decode the prompts, for the speed-up also without a drafter; ValueError if there is no such drafter."""
        sessions = {"drafted": drafter_specs.make_session(self.spec(params), self.runner, self.sampler)}
        if self.objective == "speedup":
            sessions["alone"] = Session(self.runner, NoDrafter(), self.sampler)
        eos = self.runner.base.eos
        for session in sessions.values():
            session.run(self.prompts[0], min(WARM_UP_TOKENS, self.max_new_tokens), eos)
            session.drafter.reset()
        texts: dict[str, list[Generation]] = defaultdict(list)
        for index, prompt in enumerate(self.prompts):
            for name in sorted(sessions, reverse=bool(index % 2)):  # each comes first as often
                texts[name].append(sessions[name].run(prompt, self.max_new_tokens, eos))
        drafted, alone = texts["drafted"], texts["alone"]
        steps = [step for text in drafted for step in text.steps[1:]]  # the first step is the prefill
        return {
            "speedup": speed(drafted) / speed(alone) if alone else None,
            "tokens_per_second": speed(drafted),
            "acceptance_length": acceptance_length(text.steps for text in drafted) or 0.0,
            "fed_per_step": sum(step.fed for step in steps) / max(1, len(steps)),
            "identical": sum(a.tokens == b.tokens for a, b in zip(drafted, alone, strict=True)) if alone else None,
        }


def speed(texts: Sequence[Generation]) -> float:
    """Tokens per second, with each step counted as the median of those that feed as much and draft as often.

    Other work on the machine hardly changes it.
    """
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in (step for text in texts for step in text.steps):
        groups[step.fed, step.draft_forwards].append(sum(step.seconds))
    return sum(len(text.tokens) for text in texts) / sum(len(group) * median(group) for group in groups.values())


# ---- the study


def open_study(path: Path, name: str, search: SearchOptions) -> tuple[Study, dict[str, dict[str, Any]]]:
    """Open the study of this name in a file of studies; also return what all of them have measured, by `Tuner.key`."""
    import optuna
    from sqlalchemy.engine import URL

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.RDBStorage(str(URL.create("sqlite", database=str(path))))
    measured: dict[str, dict[str, Any]] = {}
    for other in optuna.get_all_study_names(storage):
        for trial in optuna.load_study(study_name=other, storage=storage).trials:
            if figures := trial.user_attrs.get("measured"):
                measured[figures["key"]] = figures
    samplers = {"gp": optuna.samplers.GPSampler, "tpe": optuna.samplers.TPESampler}
    sampler = samplers.get(search.sampler, optuna.samplers.RandomSampler)(seed=search.search_seed)
    study = optuna.create_study(
        storage=storage, sampler=sampler, study_name=name, direction="maximize", load_if_exists=True
    )
    return study, measured


def run(
    study: Study,
    measured: dict[str, dict[str, Any]],
    space: Space,
    tuner: Tuner,
    search: SearchOptions,
    first: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Try what comes first, all of a grid, then as many as there are trials; nothing is measured twice.

    Returns the options of each trial with what was measured or why it was impossible, the best first; ValueError if all
    were impossible.
    """
    from optuna import TrialPruned
    from optuna.trial import TrialState

    def objective(trial: Trial) -> float:
        params = suggest(trial, space)
        key = tuner.key(params)
        try:
            if measured.get(key, {}).get(search.objective) is None:
                measured[key] = tuner.measure(params) | {"key": key}
        except ValueError as error:
            trial.set_user_attr("error", " ".join(str(error).split()))
            raise TrialPruned from error
        trial.set_user_attr("measured", measured[key])
        return float(measured[key][search.objective])

    finished = TrialState.COMPLETE, TrialState.PRUNED  # not those that were interrupted
    done = [trial.params for trial in study.get_trials(states=finished)]
    missing = [params for params in first if params not in done]
    num_trials = len(missing) if search.sampler == "grid" else max(0, search.trials - len(done))
    with progress_bars() as bars:
        for index in bars.track(range(num_trials), description="trials"):
            if index < len(missing):
                study.enqueue_trial(missing[index])
            study.optimize(objective, n_trials=1)
    trials = study.get_trials(states=finished)
    trials.sort(key=lambda trial: -math.inf if trial.value is None else trial.value)
    if trials[-1].value is None:
        raise ValueError(trials[-1].user_attrs["error"])
    distinct = {json.dumps(trial.params): trial for trial in trials}
    return [{"options": trial.params} | trial.user_attrs for trial in reversed(distinct.values())]


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn the errors of SQLite, such as a full disk or a damaged file, into ValueError."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (StorageInternalError, SQLAlchemyError) as error:
        reason = getattr(error, "orig", None) or getattr(error.__cause__, "orig", None) or error
        raise ValueError(
            f"{path} could not be read or written ({reason}), and the trials in it are kept: make room, or choose "
            "another --out"
        ) from error


# ---- the results


def table(trials: Sequence[Mapping[str, Any]], objective: str) -> Table:
    """The best trials, for the terminal."""
    best = [trial for trial in trials if "error" not in trial][:MAX_ROWS]
    names = [name for name in HEADINGS if best[0]["measured"][name] is not None]
    result = Table("options", title=f"the {len(best)} best trials by {HEADINGS[objective]}", title_justify="left")
    for name in names:
        result.add_column(HEADINGS[name], justify="right")
    for trial in best:
        numbers = [trial["measured"][name] for name in names]
        result.add_row(in_words(trial["options"]), *(f"{n:.2f}" if isinstance(n, float) else str(n) for n in numbers))
    return result


def in_words(params: Params) -> str:
    """Options in one line; sublayers that are skipped as ``attention 2 3, mlp 4``."""
    values = as_text(params)
    for kind, layer in (key.split() for key, is_skipped in params.items() if " " in key and is_skipped):
        values[kind] = f"{values.get(kind, '')} {layer}".strip()
    return ", ".join(f"{key} {value}" for key, value in values.items()) or "nothing skipped"


def as_text(params: Params) -> dict[str, str]:
    """The values of options as they are written, without skipped sublayers."""
    options = {key: value for key, value in params.items() if " " not in key}
    return {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in options.items()}
