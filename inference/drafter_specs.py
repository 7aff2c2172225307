"""Drafters from command-line specs: ``anpd``, ``anpd:order=4,num_draft=5``, ``ctc=FOLDER:num_nodes=16``."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from data.files import read_json
from drafters import checkpoint, recipe
from drafters.protocol import Drafter, LearnedDrafter, NoDrafter
from drafters.registry import Registration, class_path, full_path, registered
from drafters.trees.step_cost import read_costs
from inference import drafter_builders
from inference.budget import BudgetController
from inference.verifier.base import Base, BaseIdentity, check_fit
from inference.verifier.runner import Runner
from inference.verifier.sampling import Sampler
from inference.verifier.session import Session

Budget = str  # fixed, auto, or a file that `drafters step-cost` wrote, which is auto with these costs to start from
AUTO = "num_nodes=auto"
AUTO_NODES = 64  # what num_nodes=auto raises a drafter's number of nodes to
SPEC = re.compile(r"(?P<name>\w+)(=(?P<file>.+?))?(:(?P<options>\w+=.*))?")


def split(spec: str) -> tuple[str, str | None, str]:
    """Split ``NAME[=FILE][:key=value,...]`` into its three parts."""
    match = SPEC.fullmatch(spec)
    if not match:
        raise ValueError(f"{spec!r} is no drafter: write NAME, NAME:key=value,... or NAME=FOLDER")
    return match["name"], match["file"], match["options"] or ""


def label(spec: str) -> str:
    """The name of a drafter in tables: its spec without the file or folder."""
    name, _, options = split(spec)
    return name + (f":{options}" if options else "")


def labels(specs: Sequence[str]) -> dict[str, str]:
    """A distinct name for each spec: its `label`, or the whole spec if two labels are equal.

    Raises:
        ValueError: A drafter is named twice.
    """
    names: dict[str, str] = {}
    for spec in specs:
        is_shared = sum(label(other) == label(spec) for other in specs) > 1
        name = spec if is_shared else label(spec)
        if name in names:
            raise ValueError(f"the drafter {spec} is named twice: name it once, or give it other arguments")
        names[name] = spec
    return names


def known() -> str:
    """The names of all drafters, each with what it needs, for messages."""
    return ", ".join(_usage(registration) for registration in registered().values())


def _usage(registration: Registration) -> str:
    file = "FOLDER" if registration.learned_class else registration.file
    if registration.is_optional:
        return f"{registration.name}[={file}]"
    return f"{registration.name}={file}" if file else registration.name


def make(spec: str, runner: Runner) -> Drafter:
    """Build the drafter that a spec names, ready to decode with the base of ``runner``.

    Raises:
        ValueError: The name or an option is unknown, a file is missing or damaged, or the drafter fits another base.
    """
    return builder(spec, runner)()


def builder(spec: str, runner: Runner) -> Callable[[], Drafter]:
    """Return a function that builds independent drafters of one spec; a corpus or datastore is read only once.

    Raises:
        ValueError: As `make`; what only building shows is raised by the function.
    """
    name, file, text = split(spec)
    registration = registered().get(name)
    if registration is None:
        raise ValueError(f"unknown drafter {name!r}; known are {known()}")
    if drafter_class := registration.learned_class:
        return partial(_learned, name, drafter_class, file, text, runner.base)
    if file and not registration.file:
        raise ValueError(f"the drafter {name} has no weights: write {name}:key=value, without a folder")
    if not file and registration.file and not registration.is_optional:
        raise ValueError(f"the drafter {name} needs its {registration.file}: write {name}={registration.file}")
    defaults = _defaults(registration.build)
    options = _parse(name, _number_for_auto(text, defaults), defaults)
    if registration.file and not registration.load:
        return partial(registration.build, runner, file, **options)
    if file and registration.load:
        index = drafter_builders.load_index(registration.load, registration.command, file, runner.base)
        options[registration.argument] = index
    return partial(registration.build, **options)


def make_session(spec: str, runner: Runner, sampler: Sampler | None = None, budget: Budget = "fixed") -> Session:
    """Build a session with the drafter that a spec names.

    Args:
        spec: The drafter.
        runner: The base and its KV cache.
        sampler: Picks the base's tokens; greedy decoding if not given.
        budget: Budget of a drafter whose spec does not decide that, ``fixed``, ``auto`` or a file of step costs; see
            `make_budget`.

    Raises:
        ValueError: As `make`.
    """
    drafter = make(spec, runner)
    return Session(runner, drafter, sampler, budget=make_budget(drafter, spec, budget))


def make_budget(drafter: Drafter, spec: str | None, default: Budget) -> BudgetController | None:
    """The controller of how many draft tokens are fed, or None if the drafter's own number is.

    Drafters that draw their drafts have none by default: their texts under a seed would depend on the clock.

    Args:
        drafter: The drafter.
        spec: Its spec, if it has one.
        default: What holds if the spec does not decide. If it is a file, an automatic budget starts from its costs.

    Raises:
        ValueError: The default is none of the three.
    """
    is_asked = spec is not None and is_auto(spec, "fixed")
    is_default = default != "fixed" and not drafter.samples_drafts and (spec is None or is_auto(spec, "auto"))
    if not (is_asked or is_default) or isinstance(drafter, NoDrafter):
        return None
    return BudgetController(not drafter.is_divisible, read_step_seconds(default), drafter.may_skip_module)


def read_step_seconds(budget: Budget) -> list[float]:
    """The seconds of steps that feed 0, 1, 2, ... draft tokens, if a budget is a file of them; else an empty list.

    Raises:
        ValueError: It is neither ``fixed`` nor ``auto`` nor such a file.
    """
    if budget in ("fixed", "auto"):
        return []
    try:
        return read_costs(budget).tolist()
    except ValueError as error:
        raise ValueError(f"budget must be fixed, auto or a file of step costs: {error}") from error


def is_auto(spec: str, default: Budget) -> bool:
    """Whether a spec says ``num_nodes=auto`` or, unless the default is fixed, no ``num_nodes`` or ``num_draft``."""
    options = split(spec)[2].split(",")
    is_numbered = any(option.startswith(("num_nodes=", "num_draft=")) for option in options)
    return AUTO in options or (default != "fixed" and not is_numbered and spec != "none")


def _number_for_auto(text: str, defaults: Mapping[str, Any]) -> str:
    """Options in which ``num_nodes=auto`` is a number: the drafter's own, at least `AUTO_NODES`."""
    number = defaults.get("num_nodes")
    replaced = [] if number is None else [f"num_nodes={max(number, AUTO_NODES)}"]
    parts = text.split(",")
    return ",".join(part for option in parts for part in (replaced if option == AUTO else [option]))


def _learned(name: str, drafter_class: type[LearnedDrafter], folder: str | None, text: str, base: Base) -> Drafter:
    folder = folder and str(drafter_builders.drafter_folder(folder))  # one commit for configuration and weights
    config = learned_config(name, drafter_class, folder, text, base)
    return drafter_builders.load_learned(folder or "", config, base)


def name_of(config: checkpoint.DrafterConfig) -> str:
    """Return the name of an exported drafter in specs, such as ctc.

    Raises:
        ValueError: Its class is not registered.
    """
    for name, registration in registered().items():
        kind = registration.learned_class
        if kind and config.class_path in (class_path(kind), full_path(kind)):
            return name
    raise ValueError(f"{config.class_path} is not registered: import its module by DRAFTERS_MODULES")


def learned_config(
    name: str, drafter_class: type[LearnedDrafter], folder: str | None, text: str, base: BaseIdentity
) -> checkpoint.DrafterConfig:
    """The configuration of a trained drafter, with the options ``key=value,...`` in it.

    Raises:
        ValueError: The folder holds no such drafter, it fits another base, or an option is none that decoding may set.
    """
    if not folder:
        raise ValueError(f"the drafter {name} needs its folder: {name}=FOLDER, made by `drafters export CKPT FOLDER`")
    config = checkpoint.read_config(drafter_builders.drafter_folder(folder))
    if config.class_path not in (class_path(drafter_class), full_path(drafter_class)):
        raise ValueError(f"{folder} holds a {config.class_path}, not a {name}")
    check_fit(config, base)
    init_args = config.nested_init_args()
    defaults = recipe.draft_defaults(drafter_class)
    _refuse_fixed(drafter_class, folder, init_args, text)
    draft = init_args.get(recipe.DRAFT, {})
    draft = {**draft, **_parse(name, _number_for_auto(text, defaults | draft), defaults)}
    if draft:
        init_args[recipe.DRAFT] = draft
    return replace(config, init_args=init_args)


def _refuse_fixed(drafter_class: type[LearnedDrafter], folder: str, init_args: Mapping[str, Any], text: str) -> None:
    """Raise ValueError if a spec sets an option that training has fixed."""
    values = recipe.training_defaults(drafter_class)
    values |= {key.rpartition(".")[2]: value for key, value in recipe.flattened(init_args).items()}
    draft = recipe.draft_defaults(drafter_class)
    for key in (pair.partition("=")[0] for pair in text.split(",")):
        if key in values and key not in draft:
            value = json.dumps(values[key])
            raise ValueError(f"{key} is fixed by training: {folder} has {value}; decoding reads {', '.join(draft)}")


def _defaults(build: Callable[..., Drafter]) -> dict[str, Any]:
    """The options of a drafter without weights, with their defaults; arguments that are objects have none."""
    parameters = inspect.signature(build).parameters
    return {key: p.default for key, p in parameters.items() if p.default not in (p.empty, None)}


def _parse(name: str, text: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options in ``key=value,...``, each of the type of its default."""
    values: dict[str, Any] = {}
    for pair in text.split(",") if text else ():
        key, equals, value = pair.partition("=")
        if key not in defaults or not equals:
            raise ValueError(f"{name} takes {', '.join(defaults) or 'no arguments'}; not {pair!r}")
        default = defaults[key]
        if isinstance(default, tuple):
            values[key] = _read_entry(value, key)
            continue
        try:
            values[key] = _typed(value, type(default))
        except ValueError as error:
            raise ValueError(f"{key} must be {type(default).__name__}, not {value!r}") from error
    return values


def _read_entry(file: str, key: str) -> Any:
    """The entry ``key`` of a JSON file, such as the one that `drafters tree-search` writes."""
    try:
        return read_json(file)[key]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{file} is not a JSON file with an entry {key!r}: give the file that was made for it"
        ) from error


def _typed(value: str, kind: type) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError(value)
        return value.lower() == "true"
    return kind(value)
