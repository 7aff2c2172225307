"""Drafters by name: ``anpd``, ``anpd:order=4,num_draft=5``, ``ctc=FOLDER:num_nodes=16``."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from data.files import read_json, reading
from data.hub import find_folder
from drafters import checkpoint, recipe
from drafters.checkpoint import DrafterConfig
from drafters.protocol import Drafter, RequiredOutputs
from drafters.registry import MODULES, Registration, find_class, learned, registered
from inference.arguments import must_be
from inference.model_drafters import load_index, load_learned, with_draft_options
from inference.verifier.base import Base, BaseConfig, check_fit
from inference.verifier.runner import Runner
from inference.verifier.sampling import Sampler
from inference.verifier.session import Session

AnyDrafter = str | Path | Drafter  # a spec, the folder of a trained drafter, or an object
SPEC = re.compile(r"(?P<name>\w+)(=(?P<file>.+?))?(:(?P<options>\w+=.*))?")


class Spec(NamedTuple):
    """The parts of ``NAME[=FILE][:key=value,...]``."""

    name: str
    file: str | None
    options: str

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The options; one without ``=`` has an empty value."""
        pairs = (pair.partition("=") for pair in self.options.split(",") if self.options)
        return [(key, value) for key, _, value in pairs]

    @property
    def registration(self) -> Registration:
        """The registered drafter of this name; raises ValueError if there is none."""
        if self.name not in registered():
            hint = f"the environment variable {MODULES} names modules with more"
            raise ValueError(f"unknown drafter {self.name!r}; known are {usages()}; {hint}")
        return registered()[self.name]


def split(spec: str) -> Spec:
    """Split ``NAME[=FILE][:key=value,...]`` into its three parts."""
    match = SPEC.fullmatch(spec)
    if not match:
        raise ValueError(f"{spec!r} is no drafter: write NAME, NAME:key=value,... or NAME=FOLDER")
    return Spec(match["name"], match["file"], match["options"] or "")


def label(spec: str) -> str:
    """The name of a drafter in tables: its spec without the file or folder."""
    name, _, options = split(spec)
    return name + (f":{options}" if options else "")


def labels(specs: Sequence[str]) -> dict[str, str]:
    """A distinct name for each spec: its `label`, or the whole spec if two share one; none may be repeated."""
    names: dict[str, str] = {}
    for spec in specs:
        is_shared = sum(label(other) == label(spec) for other in specs) > 1
        name = spec if is_shared else label(spec)
        if name in names:
            raise ValueError(f"the drafter {spec} is given twice: remove one, or change its options")
        names[name] = spec
    return names


def usages() -> str:
    """The names of all drafters, each with what it needs, for messages."""
    texts = []
    for name, registration in registered().items():
        file = "FOLDER" if registration.learned_class else registration.file
        texts.append(f"{name}[={file}]" if registration.is_optional else f"{name}={file}" if file else name)
    return ", ".join(texts)


# ---- building


def make_session(spec: str, runner: Runner, sampler: Sampler | None = None) -> Session:
    return Session(runner, make(spec, runner), sampler)


def resolve(drafter: AnyDrafter) -> str | Drafter:
    """Return the spec of a drafter, or the object itself; raises ValueError if it is neither, or unknown."""
    if isinstance(drafter, Path):
        drafter = f"{name_of(checkpoint.read_config(drafter_folder(str(drafter))))}={drafter}"
    if isinstance(drafter, str):
        _ = split(drafter).registration
    elif isinstance(drafter, type) or not isinstance(drafter, Drafter):
        raise must_be("drafter", "a name such as anpd, the Path of a folder, or a drafter object", drafter)
    return drafter


def make(drafter: AnyDrafter, runner: Runner) -> Drafter:
    """Build the drafter that a spec names, ready to decode with the base of ``runner``; an object is returned as it is.

    Raises ValueError if a name or option is unknown, a file missing or damaged, or the drafter fits another base.
    """
    if not isinstance(spec := resolve(drafter), str):
        return spec
    parts, base = split(spec), runner.base
    build, learned_class = parts.registration.build, parts.registration.learned_class
    if learned_class:
        if parts.file:  # one commit for configuration and weights
            parts = parts._replace(file=str(drafter_folder(parts.file)))
        return load_learned(str(parts.file), learned_config(parts, base), base)
    if _reads_model(parts.registration):
        _check_file(parts)
        return build(runner, parts.file, **_typed(parts, _defaults(build)))
    return _builder_without_model(parts, base)()


def builder_from_tokens(spec: str, base: Base | BaseConfig) -> Callable[[], Drafter]:
    """Return a function that builds independent drafters of one spec; a corpus or datastore is read only once.

    Raises ValueError as `make` does, or if the drafter reads more than tokens, which needs the base's model.
    """
    parts, needs = split(spec), "the base's model"
    if not (parts.registration.learned_class or _reads_model(parts.registration)):
        build = _builder_without_model(parts, base)
        required = build().required_outputs
        if required == RequiredOutputs():
            return build
        needs = "the base's most probable tokens" if required.top_k else "the base's hidden states"
    hint = ": pass joint:runner_up=0" if parts.name == "joint" else ""
    raise ValueError(f"the drafter {spec} reads {needs}, and here are only tokens{hint}")


def _reads_model(registration: Registration) -> bool:
    """Whether a drafter without weights of its own is built with a second model or with the base itself."""
    return bool(registration.file) and registration.load is None


def _builder_without_model(parts: Spec, base: Base | BaseConfig) -> Callable[[], Drafter]:
    """A function that builds a drafter from its options and a file that a command has made."""
    _check_file(parts)
    registration = parts.registration
    options = _typed(parts, _defaults(registration.build))
    if parts.file and registration.load:
        options[registration.argument] = load_index(registration.load, registration.command, parts.file, base)
    return partial(registration.build, **options)


def _check_file(parts: Spec) -> None:
    """Raise ValueError if a spec names a file that the drafter does not read, or none where it needs one."""
    name, file, is_optional = parts.name, parts.registration.file, parts.registration.is_optional
    if parts.file and not file:
        raise ValueError(f"the drafter {name} has no weights: write {name}:key=value, without a folder")
    if file and not (parts.file or is_optional):
        raise ValueError(f"the drafter {name} needs its {file}: write {name}={file}")


def _defaults(build: Callable[..., Drafter]) -> dict[str, Any]:
    """The options of a drafter without weights, with their defaults; arguments that are objects have none."""
    parameters = inspect.signature(build).parameters
    return {key: p.default for key, p in parameters.items() if p.default not in (p.empty, None)}


def _typed(parts: Spec, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a spec, each of the type of its default."""
    values: dict[str, Any] = {}
    for key, value in parts.pairs:
        if key not in defaults or not value:
            given = f"{key}={value}" if value else key
            wrong = f"{key} has no value" if key in defaults else f"not {given!r}"
            raise ValueError(f"{parts.name} takes {', '.join(defaults) or 'no arguments'}; {wrong}")
        values[key] = _value(key, value, type(defaults[key]))
    return values


def _value(key: str, text: str, kind: type) -> Any:
    """The value of an option: of a tuple, such as a static tree, the text is a JSON file that holds it."""
    if kind is tuple:
        with reading(text, f"give a JSON file with an entry {key!r}"):
            return read_json(text)[key]
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, LookupError) as error:
        raise ValueError(f"{key} must be {kind.__name__}, not {text!r}") from error


# ---- learned drafters


def drafter_folder(name: str) -> Path:
    """Return the folder of an exported drafter; ``OWNER/NAME@REVISION`` is downloaded from the hub."""
    return find_folder(name, checkpoint.FILES)


def name_of(config: DrafterConfig) -> str:
    """Return the name of an exported drafter in specs, such as ctc; raises ValueError if it is not registered."""
    kind = find_class(config.class_path)
    return next(name for name, drafter_class in learned().items() if drafter_class is kind)


def learned_config(parts: Spec, base: Base | BaseConfig) -> DrafterConfig:
    """The configuration of a trained drafter, with the options of its spec in it.

    Raises ValueError if the folder holds no such drafter, it fits another base, or decoding may not set an option.
    """
    (name, folder, _), drafter_class = parts, parts.registration.learned_class
    assert drafter_class is not None, "only drafters with weights have a configuration"
    if not folder:
        raise ValueError(f"the drafter {name} needs its folder: {name}=FOLDER, made by `drafters export CKPT FOLDER`")
    config = checkpoint.read_config(drafter_folder(folder))
    if find_class(config.class_path) is not drafter_class:
        raise ValueError(f"{folder} holds a {config.class_path}, not a {name}")
    check_fit(config, base)
    defaults = recipe.draft_defaults(drafter_class)
    fixed = recipe.training_defaults(drafter_class)
    trained = {name: value for name, value in config.init_args.items() if name != recipe.DRAFT}
    fixed |= {key.rpartition(".")[2]: value for key, value in recipe.flattened(trained).items()}
    for key, _ in parts.pairs:
        if key in fixed and key not in defaults:
            has = f"{folder} has {json.dumps(fixed[key])}"
            raise ValueError(f"{key} is fixed by training: {has}; decoding reads {', '.join(defaults)}")
    if "num_nodes" in (draft := config.init_args.get(recipe.DRAFT, {})):
        defaults["num_nodes"] = draft["num_nodes"]
    return with_draft_options(config, _typed(parts, defaults)) if parts.pairs else config
