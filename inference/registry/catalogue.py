"""Drafters by the names a command line uses: ``anpd``, ``anpd:order=4,num_draft=5``, ``ctc=FOLDER:num_nodes=16``."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import drafters
from drafters import checkpoint
from drafters.protocol import Drafter, LearnedDrafter
from inference.engine.base import Base, check_fit
from inference.engine.runner import Runner
from inference.registry import builders


@dataclass(frozen=True)
class Kind:
    """A training-free drafter.

    Args:
        build: A class with flat arguments; or, where a model is named, a function of the base's runner, of what is
            named, and of flat arguments.
        named: What ``NAME=...`` names; empty where nothing.
        optional: Whether it may be left out.
        load: Where a file is named, what reads it, given the base.
        loaded: Argument of ``build`` that takes what was read.
    """

    build: Callable[..., Drafter]
    named: str = ""
    optional: bool = False
    load: Callable[[str, Base], object] | None = None
    loaded: str = ""


TRAINING_FREE = {
    "none": Kind(drafters.NoDrafter),
    "anpd": Kind(drafters.ANPD),
    "prompt_lookup": Kind(drafters.PromptLookup),
    "lookahead": Kind(drafters.Lookahead),
    "token_recycling": Kind(drafters.TokenRecycling),
    "joint": Kind(drafters.Joint, "CORPUS", True, builders.corpus_table, "corpus"),
    "draft_model": Kind(builders.draft_model, "MODEL"),
    "cascade": Kind(builders.cascade, "MODEL"),
    "ouroboros": Kind(builders.ouroboros, "MODEL"),
    "self_draft": Kind(drafters.SelfDraft, "CORPUS", True, builders.corpus_table, "corpus"),
    "corpus": Kind(drafters.CorpusCache, "CORPUS", False, builders.corpus_table, "table"),
    "rest": Kind(drafters.REST, "STORE", False, builders.datastore, "store"),
    "self_speculative": Kind(builders.self_speculative, "SKIPS.json", optional=True),
}
LEARNED = {
    "ctc": drafters.CTC,
    "block": drafters.Block,
    "medusa": drafters.Medusa,
    "hydra": drafters.Hydra,
    "eagle": drafters.EAGLE,
    "eagle3": drafters.EAGLE3,
}


SPEC = re.compile(r"(?P<name>\w+)(=(?P<folder>.+?))?(:(?P<arguments>\w+=.*))?")


def split(spec: str) -> tuple[str, str | None, str]:
    """Take ``NAME[=FOLDER][:key=value,...]`` apart."""
    match = SPEC.fullmatch(spec)
    if not match:
        raise ValueError(f"{spec!r} is no drafter: write NAME, NAME:key=value,... or NAME=FOLDER")
    return match["name"], match["folder"], match["arguments"] or ""


def label(spec: str) -> str:
    """The name a drafter goes by in tables: its spec without the folder."""
    name, _, arguments = split(spec)
    return name + (f":{arguments}" if arguments else "")


def labels(specs: Sequence[str]) -> dict[str, str]:
    """A distinct name for each spec: its `label`, with the folder where two would be called alike.

    Raises:
        ValueError: A drafter is named twice.
    """
    named = {}
    for spec in specs:
        alike = sum(label(other) == label(spec) for other in specs) > 1
        name = spec if alike else label(spec)
        if name in named:
            raise ValueError(f"the drafter {spec} is named twice: name it once, or give it other arguments")
        named[name] = spec
    return named


def known() -> str:
    """The names, each with what it needs."""
    free = [
        name + (f"[={kind.named}]" if kind.optional else f"={kind.named}" if kind.named else "")
        for name, kind in TRAINING_FREE.items()
    ]
    return ", ".join([*free, *(f"{name}=FOLDER" for name in LEARNED)])


def make(spec: str, runner: Runner) -> Drafter:
    """Build the drafter that ``spec`` names, ready to decode with the base of ``runner``.

    Raises:
        ValueError: Unknown name or argument, a missing or damaged folder, or a drafter of another base.
    """
    name, folder, text = split(spec)
    if name in LEARNED:
        return _learned(name, folder, text, runner.base)
    if name not in TRAINING_FREE:
        raise ValueError(f"unknown drafter {name!r}; known are {known()}")
    kind = TRAINING_FREE[name]
    if folder and not kind.named:
        raise ValueError(f"the drafter {name} has no weights: write {name}:key=value, without a folder")
    if not folder and kind.named and not kind.optional:
        raise ValueError(f"the drafter {name} needs its {kind.named}: write {name}={kind.named}")
    arguments = _arguments(name, kind.build, text)
    if kind.load:
        return kind.build(**arguments, **({kind.loaded: kind.load(folder, runner.base)} if folder else {}))
    return kind.build(runner, folder, **arguments) if kind.named else kind.build(**arguments)


def _learned(name: str, folder: str | None, text: str, base: Base) -> LearnedDrafter:
    if not folder:
        raise ValueError(f"the drafter {name} needs its folder: {name}=FOLDER, made by `drafters export CKPT FOLDER`")
    config = checkpoint.read_config(Path(folder))
    kind = LEARNED[name]
    if config.class_path != f"drafters.{kind.__name__}":
        raise ValueError(f"{folder} holds a {config.class_path}, not a {name}")
    check_fit(config, base)
    _refuse_fixed(kind, folder, config.init_args, text)
    overrides = _arguments(name, kind, text)
    drafter, _ = checkpoint.load(folder, base.model.dtype, replace(config, init_args=config.init_args | overrides))
    drafter.to(base.model.device).attach_base_weights(base.base_weights)
    return drafter


def _refuse_fixed(kind: type[LearnedDrafter], folder: str, init_args: dict[str, object], text: str) -> None:
    """Refuse an argument that a drafter was trained with and that decoding does not read, or cannot change."""
    defaults = {key: p.default for key, p in inspect.signature(kind).parameters.items() if p.default is not p.empty}
    for key in (pair.partition("=")[0] for pair in text.split(",")):
        if key in defaults and key not in kind.decoding:
            value = json.dumps((defaults | init_args)[key])
            reads = ", ".join(_settable(kind))
            raise ValueError(f"{key} is fixed by training: {folder} has {value}; decoding reads {reads}")


def _settable(build: Callable) -> dict[str, object]:
    """The arguments that a spec may give, each with its default; of a trained drafter those that decoding reads."""
    parameters = inspect.signature(build).parameters
    given = getattr(build, "decoding", parameters)
    return {key: p.default for key, p in parameters.items() if key in given and p.default not in (p.empty, None)}


def _arguments(name: str, build: Callable, text: str) -> dict[str, object]:
    """Typed arguments of ``key=value,...``; the types are those of the constructor."""
    if not text:
        return {}
    known = _settable(build)
    values: dict[str, object] = {}
    for pair in text.split(","):
        key, equals, value = pair.partition("=")
        if key not in known or not equals:
            raise ValueError(f"{name} takes {', '.join(known) or 'no arguments'}; not {pair!r}")
        default = known[key]
        if isinstance(default, tuple):
            values[key] = _entry(value, key)
            continue
        try:
            values[key] = _typed(value, type(default))
        except ValueError as error:
            raise ValueError(f"{key} must be {type(default).__name__}, not {value!r}") from error
    return values


def _entry(file: str, key: str) -> object:
    """What a JSON file, such as `drafters tree-search` writes, holds under the name of an argument."""
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is not a JSON file with an entry {key!r}: give the file that was made for it"
        ) from error


def _typed(value: str, kind: type) -> object:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError(value)
        return value.lower() == "true"
    return kind(value)
