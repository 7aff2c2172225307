"""``drafters tune``: search the options of a drafter for measured speed or acceptance, with optuna."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.table import Table

from data.files import short_hash, write_text
from data.hub import find_base
from data.safe_text import SafeConsole
from drafters import Medusa
from drafters.checks import check_at_least
from drafters.protocol import NoDrafter
from drafters.trees.static import static_tree
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
    from optuna import Study
    from optuna.distributions import BaseDistribution

RANGE = re.compile(r"(-?\d+(?:\.\d+)?)\.\.(-?\d+(?:\.\d+)?)")
FILE, STATIC, SKIPS = "file", "static", "skips"  # options of --space that are no plain option of the drafter
WARM_UP_TOKENS = 16
NUM_RANKS = 10  # ranks of each of Medusa's heads whose accuracy is measured
NUM_SHOWN = 20  # trials in the table
HEADINGS = {
    "speedup": "speed-up",
    "tokens_per_second": "tokens/s",
    "acceptance_length": "acceptance length",
    "fed_per_step": "fed tokens/step",
    "identical": "identical",
}

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
    questions = selection.load()
    base = model.load()
    space = read_space(search.space, drafter, base)
    first_trials(space, search)  # raises ValueError if the grid is too large
    selected = selection.select(base, questions).values()
    prompts, max_new_tokens = [prompt for each in selected for prompt in each.prompts], max(selection.caps().values())
    settings = {
        "base": [model.base, fingerprint(find_base(model.base))],
        "questions": short_hash(json.dumps(prompts)),
        "decoding": [max_new_tokens, *vars(sampling).values()],
        "machine": [model.dtype, base.model.device.type, torch.get_num_threads()],
    }
    runner, sampler, path = make_runner(base), sampling.sampler(), folder / "study.db"
    tuner = Tuner(runner, prompts, max_new_tokens, sampler, drafter, search.objective, folder, settings)
    folder.mkdir(parents=True, exist_ok=True)
    with storage_errors(path):
        name = " ".join([drafter, *sorted(search.space), search.objective, short_hash(json.dumps(settings))])
        study, known = open_study(path, name, search)
        trials = run(study, known, space, tuner, search)
    best = tuner.spec(trials[0]["options"])
    write_text(folder / "tune.json", json.dumps({"best": best, "settings": settings, "trials": trials}, indent=1))
    console = SafeConsole(highlight=False, soft_wrap=True)
    console.print(table(trials, search.objective))
    impossible = [f"{shown(each['options'])}: {each['error']}" for each in trials if "error" in each]
    for note in [*(note for each in selected for note in each.notes()), *impossible]:
        console.print(f"left out: {note}", style="yellow", markup=False)
    found, own = f"--drafter {best}", trials[0]["measured"][search.objective]
    if search.objective == "speedup" and own < 1:
        found = f"no setting is faster than the base alone: {best}, the best, decodes at {own:.3g} times its speed"
    console.print(found, markup=False)


# ---- the space


def read_space(texts: Sequence[str], drafter: str, base: Base) -> Space:
    """Return the distribution of each option; raises ValueError if a text is none, or an option is named twice."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    name, file, options = drafter_specs.split(drafter)
    named = [pair.partition("=")[0] for pair in options.split(",") if pair] + ([FILE] if file else [])
    space: Space = {}
    for text in texts:
        option, _, values = text.partition("=")
        if option in named or (option == SKIPS and file):
            raise ValueError(f"{option} is given twice: give it once, in --space or in --drafter {drafter}")
        for special, owner in ((STATIC, "medusa"), (SKIPS, "self_speculative")):
            if option == special and name != owner:
                raise ValueError(f"{option} is for the drafter {owner}, not for {name}")
        named.append(option)
        parts = [_number(part) for part in values.split(",")]
        if text == SKIPS:
            layers = range(len(sublayers(base.model.base_model)[0]))
            names = [f"{kind} {layer}" for kind in ("attention", "mlp") for layer in layers]
            space |= dict.fromkeys(names, CategoricalDistribution([False, True]))
        elif match := RANGE.fullmatch(values):
            ends = [_number(end) for end in match.groups()]
            range_of = IntDistribution if all(isinstance(end, int) for end in ends) else FloatDistribution
            space[option] = range_of(*sorted(ends))  # type: ignore[arg-type]
        elif option.isidentifier() and "" not in parts and len(set(parts)) == len(parts):
            space[option] = CategoricalDistribution(parts)
        else:
            raise ValueError(f"{text!r} is no space: write NAME=VALUE,VALUE,... or NAME=LOW..HIGH, each value once")
    return space


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _as_text(params: Params) -> dict[str, str]:
    """The values of options as they are written, without skipped sublayers."""
    options = {key: value for key, value in params.items() if " " not in key}
    return {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in options.items()}


def first_trials(space: Space, search: SearchOptions) -> list[dict[str, Any]]:
    """Return what is tried first: all of a grid, which must be finite and small enough, or two sets of sublayers."""
    if search.sampler != "grid":
        names = [name for name in space if " " in name]
        attention, mlp = default_skips(len(names) // 2)
        default = {*(f"attention {layer}" for layer in attention), *(f"mlp {layer}" for layer in mlp)}
        return [dict.fromkeys(names, False), {name: name in default for name in names}] if names else []
    axes: list[Sequence[Any]] = []
    for name, values in space.items():
        if not (choices := getattr(values, "choices", None)):
            if not isinstance(low := values.low, int):  # type: ignore[attr-defined]
                raise ValueError(f"a grid has no range of real numbers: list values of {name}, or pass --sampler gp")
            choices = range(low, values.high + 1)  # type: ignore[attr-defined]
        axes.append(choices)
    if (size := math.prod(map(len, axes))) > search.trials:
        raise ValueError(f"the grid has {size} combinations: raise --trials, or pass --sampler tpe or gp")
    return [dict(zip(space, place, strict=True)) for place in product(*axes)]


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
    folder: Path  # for the files that options name
    settings: Mapping[str, Any]  # what a measurement depends on besides the drafter

    def key(self, params: Params) -> str:
        """Everything that a measurement depends on."""
        file = params.get(FILE) or drafter_specs.split(self.drafter)[1]
        files = fingerprint(file and drafter_specs.drafter_folder(str(file)))
        return json.dumps([self.settings, self.drafter, sorted(params.items()), files])

    def spec(self, params: Params) -> str:
        """Return the drafter with these options, and write the files that they name."""
        name, file, options = drafter_specs.split(self.drafter)
        values = _as_text(params)
        file = values.pop(FILE, file or "")
        if STATIC in values:
            values[STATIC] = self._write_static(int(values[STATIC]))
        if any(" " in key for key in params):
            file = self._write_skips(params)
        options = ",".join([*filter(None, [options]), *(f"{key}={value}" for key, value in values.items())])
        return name + (f"={file}" if file else "") + (f":{options}" if options else "")

    def measure(self, params: Params) -> dict[str, Any]:
        """Decode the prompts, for the speed-up also without a drafter; raises ValueError if there is no such one."""
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

    def _write_skips(self, params: Params) -> str:
        skipped = [key.split() for key, value in params.items() if " " in key and value]
        parts = {kind: [int(layer) for part, layer in skipped if part == kind] for kind in ("attention", "mlp")}
        path, base = self.folder / "skips.json", self.runner.base
        write_text(path, json.dumps(parts | {"num_layers": base.model.config.num_hidden_layers, "base": base.name}))
        return str(path)

    def _write_static(self, num_nodes: int) -> str:
        shares, num_positions = self.head_accuracies
        paths = static_tree(shares, num_nodes)
        if not paths:
            raise ValueError(f"no token of the first head was ever right at {num_positions} positions: train it longer")
        length = 1 + sum(math.prod(float(shares[head, rank]) for head, rank in enumerate(path)) for path in paths)
        measured = {"accuracies": shares.tolist(), "num_positions": num_positions, "expected_acceptance_length": length}
        path = self.folder / f"static-{num_nodes}.json"
        write_text(path, json.dumps({"static": paths} | measured) + "\n")
        return str(path)

    @cached_property
    def head_accuracies(self) -> tuple[np.ndarray, int]:
        """How often each rank of each of Medusa's heads is the base's own token along its greedy answers.

        These are shares (K, k); the number is that of positions of the first head.
        """
        drafter, base = drafter_specs.make(self.drafter, self.runner), self.runner.base
        assert isinstance(drafter, Medusa)
        num_ranks = min(NUM_RANKS, drafter.vocab_size)
        hits, positions = np.zeros((drafter.num_heads, num_ranks), dtype=int), np.zeros(drafter.num_heads, dtype=int)
        for prompt in self.prompts:
            answer = Session(self.runner, NoDrafter()).run(prompt, self.max_new_tokens, base.eos).tokens
            ranked = ranked_tokens(drafter, base, prompt, answer, num_ranks)  # (R, K, k)
            for head in range(drafter.num_heads):
                targets = np.array(answer[1 + head :], dtype=int)[:, None]
                hits[head] += (ranked[: len(targets), head] == targets).sum(0)
                positions[head] += len(targets)
        return hits / positions.clip(min=1)[:, None], int(positions[0])


@torch.inference_mode()
def ranked_tokens(drafter: Medusa, base: Base, prompt: list[int], answer: list[int], num_ranks: int) -> np.ndarray:
    """Each head's most probable tokens (R, K, k) where each of the R tokens of an answer but the last is the root."""
    ids = torch.tensor([[*prompt, *answer]], device=base.model.device)
    hidden, _ = base.hidden_states(ids, drafter.required_outputs.hidden_layers)
    before_roots = drafter.encode(hidden)[0, len(prompt) - 1 : -2]
    return drafter(before_roots, base.base_weights, num_ranks)[1].cpu().numpy()


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
    studies = [optuna.load_study(study_name=each, storage=storage) for each in optuna.get_all_study_names(storage)]
    measured = (each.user_attrs.get("measured") for study in studies for each in study.trials)
    known = {each["key"]: each for each in measured if each}
    samplers = {"gp": optuna.samplers.GPSampler, "tpe": optuna.samplers.TPESampler}
    sampler = samplers.get(search.sampler, optuna.samplers.RandomSampler)(seed=search.search_seed)
    study = optuna.create_study(
        storage=storage, sampler=sampler, study_name=name, direction="maximize", load_if_exists=True
    )
    return study, known


def run(
    study: Study, known: dict[str, dict[str, Any]], space: Space, tuner: Tuner, search: SearchOptions
) -> list[dict[str, Any]]:
    """Measure until all trials of the study are done, without what is known already.

    Returns the options of each trial with what was measured or why it was impossible, the best first; ValueError if all
    were impossible.
    """
    from optuna.trial import TrialState

    for stale in study.get_trials(states=[TrialState.RUNNING]):  # of an interrupted run
        study.tell(stale.number, state=TrialState.FAIL)
    finished = TrialState.COMPLETE, TrialState.PRUNED
    done = [each.params for each in study.get_trials(states=finished)]
    first = [params for params in first_trials(space, search) if params not in done]
    num_trials = len(first) if search.sampler == "grid" else max(0, search.trials - len(done))
    with progress_bars() as bars:
        for number in bars.track(range(num_trials), description="trials"):
            if number < len(first):
                study.enqueue_trial(first[number])
            trial = study.ask(space)
            key = tuner.key(trial.params)
            try:
                if known.get(key, {}).get(search.objective) is None:
                    known[key] = tuner.measure(trial.params) | {"key": key}
            except ValueError as error:
                trial.set_user_attr("error", " ".join(str(error).split()))
                study.tell(trial, state=TrialState.PRUNED)
                continue
            trial.set_user_attr("measured", known[key])
            study.tell(trial, known[key][search.objective])
    trials = sorted(study.get_trials(states=finished), key=lambda each: -math.inf if each.value is None else each.value)
    if trials[-1].value is None:
        raise ValueError(trials[-1].user_attrs["error"])
    found = {json.dumps(each.params): each for each in trials}
    return [{"options": each.params} | each.user_attrs for each in reversed(found.values())]


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
    best = [trial for trial in trials if "error" not in trial][:NUM_SHOWN]
    names = [name for name in HEADINGS if best[0]["measured"][name] is not None]
    result = Table("options", title=f"the {len(best)} best trials by {HEADINGS[objective]}", title_justify="left")
    for name in names:
        result.add_column(HEADINGS[name], justify="right")
    for trial in best:
        numbers = [trial["measured"][name] for name in names]
        result.add_row(shown(trial["options"]), *(f"{n:.2f}" if isinstance(n, float) else str(n) for n in numbers))
    return result


def shown(params: Params) -> str:
    """Options in one line; sublayers that are skipped as ``attention 2 3, mlp 4``."""
    values = _as_text(params)
    for kind, layer in (key.split() for key, value in params.items() if " " in key and value):
        values[kind] = f"{values.get(kind, '')} {layer}".strip()
    return ", ".join(f"{key} {value}" for key, value in values.items()) or "nothing skipped"
