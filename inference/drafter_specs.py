"""Drafters by name: ``anpd``, ``anpd:order=4,num_draft=5``, ``ctc=FOLDER:num_nodes=16``."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

import drafters
from data.dtypes import Dtype
from data.files import read_json, reading
from data.hub import find_folder
from data.tokenizer import tokenizer_hash
from drafters import checkpoint, recipe
from drafters.checkpoint import DrafterConfig
from drafters.protocol import Drafter, LearnedDrafter, RequiredOutputs
from drafters.registry import MODULES, Registration, find_class, learned, register, registered
from drafters.training_free.corpus import CorpusTable
from drafters.training_free.ngram import NgramPool
from inference.arguments import must_be
from inference.verifier.base import Base, BaseConfig, check_fit, load_base
from inference.verifier.compiled import make_runner
from inference.verifier.draft_model import DraftModelSession, Lenient
from inference.verifier.layer_skipping import LayerSkippingSession, default_skips, read_skips
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler, Sampler
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
            raise ValueError(f"unknown drafter {self.name!r}; known are {known()}; {hint}")
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


def known() -> str:
    """The names of all drafters, each with what it needs, for messages."""
    usages = []
    for name, registration in registered().items():
        file = "FOLDER" if registration.learned_class else registration.file
        usages.append(f"{name}[={file}]" if registration.is_optional else f"{name}={file}" if file else name)
    return ", ".join(usages)


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
        return _make_learned(parts, base)
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


def load_index(load: Callable[[str], Any], command: str, file: str, base: Base | BaseConfig) -> Any:
    """Read a file that a command has built from texts; raises ValueError if it was built with another tokenizer."""
    loaded = load(file)
    if loaded.tokenizer_hash != tokenizer_hash(base.tokenizer):
        raise ValueError(
            f"the {command} {file} was built with another tokenizer than that of {base.name}: "
            f"build it again with `drafters index {command} OUT --tokenizer {base.name}`"
        )
    return loaded


# ---- learned drafters


def drafter_folder(name: str) -> Path:
    """Return the folder of an exported drafter; ``OWNER/NAME@REVISION`` is downloaded from the hub."""
    return find_folder(name, checkpoint.FILES)


def name_of(config: DrafterConfig) -> str:
    """Return the name of an exported drafter in specs, such as ctc; raises ValueError if it is not registered."""
    kind = find_class(config.class_path)
    return next(name for name, known in learned().items() if known is kind)


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
    init_args = dict(config.init_args)
    defaults = recipe.draft_defaults(drafter_class)
    fixed = recipe.training_defaults(drafter_class)
    fixed |= {key.rpartition(".")[2]: value for key, value in recipe.flattened(init_args).items()}
    for key, _ in parts.pairs:
        if key in fixed and key not in defaults:
            has = f"{folder} has {json.dumps(fixed[key])}"
            raise ValueError(f"{key} is fixed by training: {has}; decoding reads {', '.join(defaults)}")
    trained = init_args.get(recipe.DRAFT, {})
    own_number = {key: value for key, value in trained.items() if key == "num_nodes"}
    if draft := {**trained, **_typed(parts, defaults | own_number)}:
        init_args[recipe.DRAFT] = draft
    config = replace(config, init_args=init_args)
    if parts.pairs:
        with torch.device("meta"):
            config.build()  # so that an option that does not fit is not taken for a damaged file
    return config


def _make_learned(parts: Spec, base: Base) -> LearnedDrafter:
    if parts.file:  # one commit for configuration and weights
        parts = parts._replace(file=str(drafter_folder(parts.file)))
    config = learned_config(parts, base)
    drafter, _ = checkpoint.load(str(parts.file), base.model.dtype, config)
    base.lend_weights_to(drafter)
    return drafter


# ---- drafters that need a second model or the base itself: the runner, what NAME=... names, and their options


def model_runner(folder: str, base: Base) -> Runner:
    """A runner of a draft model, with a KV cache of its own; raises ValueError if it has not the base's tokenizer."""
    dtype = cast("Dtype", str(base.model.dtype).removeprefix("torch."))
    model = _load_model(folder, dtype, str(base.model.device))
    if tokenizer_hash(model.tokenizer) != tokenizer_hash(base.tokenizer):
        raise ValueError(
            f"the draft model {folder} has another tokenizer ({len(model.tokenizer)} tokens) than the base {base.name} "
            f"({len(base.tokenizer)} tokens): pass a model with the same tokenizer"
        )
    return make_runner(model, vocab_size=base.config.vocab_size)


@lru_cache(maxsize=4)
def _load_model(folder: str, dtype: Dtype, device: str) -> Base:
    return load_base(folder, dtype, device, bitwise=False)  # drafts need not be bit-identical


@register("draft_model", "MODEL")
def draft_model(
    runner: Runner,
    folder: str,
    num_draft: int = 5,
    threshold: float = 0.0,
    schedule: str = "constant",
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Drafter:
    """Draft-model speculation: greedy chains at temperature 0, above it sampled ones with exact rejection.

    Args:
        folder: Folder of the draft model.
        num_draft: Largest number of drafted tokens per step.
        threshold: A draft ends after a token whose probability is below this; 0 never ends a draft.
        schedule: constant, or heuristic: ``num_draft`` grows by 2 after a draft that is accepted in full and else falls
            by 1, down to 1, as in transformers; or heuristic_transient, which starts anew with each text.
        temperature: Temperature at which drafts are sampled; 0 for greedy drafts.
        top_k: Number of tokens that are sampled from; 0 for all.
        top_p: Probability of the tokens that are sampled from.
        seed: Selects other samples for the same request.
    """
    sampler = KeyedSampler(temperature, top_k, top_p, seed) if temperature else None
    session = DraftModelSession(model_runner(folder, runner.base), sampler=sampler)
    return drafters.DraftModel(session, num_draft, threshold, schedule)


@register("cascade", "MODEL")
def cascade(
    runner: Runner,
    folder: str,
    inner: str = "",
    num_draft: int = 5,
    inner_ngram: int = 10,
    inner_draft: int = 5,
    lookup: bool = True,
    extension: int = 0,
    leniency: float = 1.0,
    corpus: str = "",
) -> Drafter:
    """Vertical cascade: prompt lookup drafts for a draft model, and the draft model for the base.

    Args:
        folder: Folder of the draft model.
        inner: Folders of further draft models, joined by ``+`` from the largest to the smallest. Each drafts for the
            one before it, and prompt lookup for the last. With ``lookup=false``, this is the cascade of Ouroboros,
            Table 14.
        num_draft: Number of tokens that the first draft model writes per step.
        inner_ngram: Number of tokens of the longest match of prompt lookup.
        inner_draft: Largest number of tokens that an inner model, or prompt lookup, drafts for the model above it.
        lookup: Whether prompt lookup drafts for the last model; if not, this one writes token by token.
        extension: Number of tokens that prompt lookup appends to the chain of the first model (horizontal cascade).
        leniency: Draft models keep a token drafted for them if they give it more than 1 / leniency; 1 is not lenient.
        corpus: File that ``drafters index corpus`` wrote; prompt lookup drafts its bigrams where nothing matches.
    """
    table = load_index(CorpusTable.load, "corpus", corpus, runner.base) if corpus else None
    drafter: Drafter | None = drafters.MaxGram(table, inner_ngram, inner_draft) if lookup else None
    sampler = Lenient(leniency) if leniency != 1 else None
    for model in reversed(inner.split("+") if inner else []):
        session = DraftModelSession(model_runner(model, runner.base), drafter, sampler)
        drafter = drafters.DraftModel(session, inner_draft)
    session = DraftModelSession(model_runner(folder, runner.base), drafter, sampler)
    if extension:
        return drafters.HorizontalCascade(session, drafters.MaxGram(table, inner_ngram, extension), num_draft)
    return drafters.DraftModel(session, num_draft)


@register("ouroboros", "MODEL")
def ouroboros(
    runner: Runner,
    folder: str,
    num_draft: int = 12,
    num_phrases: int = 3,
    level: int = 7,
    window: int = 20,
    phrases_draft: bool = True,
    lengthen: bool = True,
    verify_phrases: bool = True,
    history: bool = True,
    drop_last: bool = False,
    seed: int = 0,
) -> Drafter:
    """Ouroboros: the draft model decodes by lookahead over the phrase pool that also lengthens its drafts.

    Args:
        folder: Folder of the draft model.
        num_draft: Gamma, number of tokens that the draft model writes per step.
        num_phrases: K, number of phrases appended to the last of them, the newest.
        level: Number of tokens of a phrase with its key; the paper's beta is one more.
        window: W of lookahead, and the number of phrases that a key keeps, as in the authors' code.
        phrases_draft: Whether phrases draft for the draft model; if not, it writes token by token (section 3.1).
        lengthen: Whether phrases lengthen drafts (section 3.2).
        verify_phrases: Whether verification makes phrases (section 3.3).
        history: Whether phrases are kept from text to text (section 3.4). If not, each text starts with an empty pool.
        drop_last: Leave out the last token of each phrase, as the authors' code does, which never emits a bonus token
            after a complete phrase.
        seed: Seed of the tokens that fill lookahead's window at first.
    """
    pool = NgramPool(window)
    lookahead = drafters.Lookahead(level, window, window, drop_last=drop_last, seed=seed, pool=pool)
    inner = DraftModelSession(model_runner(folder, runner.base), lookahead if phrases_draft else None)
    return drafters.Ouroboros(inner, pool, num_draft, num_phrases, level, lengthen, verify_phrases, history, drop_last)


@register("self_speculative", "SKIPS.json", is_optional=True)
def self_speculative(
    runner: Runner,
    file: str | None = None,
    num_draft: int = 8,
    threshold: float = 0.8,
    adaptive: bool = True,
    carry: bool = False,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Drafter:
    """Self-speculation: the base drafts on its own KV cache, without the sublayers that the file names.

    Without a file every second layer is skipped. Greedy chains at temperature 0, above it sampled ones with exact
    rejection.
    """
    num_layers = runner.base.model.config.num_hidden_layers
    attention, mlp = read_skips(file, num_layers) if file else default_skips(num_layers)
    sampler = KeyedSampler(temperature, top_k, top_p, seed) if temperature else None
    inner = LayerSkippingSession(runner, attention, mlp, sampler)
    return drafters.SelfSpeculative(inner, num_draft, threshold, adaptive, carry)


@register("merged", "FOLDER")
def merged(
    runner: Runner,
    folder: str,
    num_nodes: int = 32,
    min_probability: float = 0.01,
    order: int = 3,
    history: bool = True,
    runner_up: int = 4,
    corpus: str = "",
) -> Drafter:
    """A learned drafter and the n-grams of `joint` in one tree.

    Args:
        folder: Folder of the learned drafter, of any kind that gives node probabilities.
        num_nodes: Largest number of nodes of the tree; the learned drafter gives three times as many to choose from.
        min_probability: A node whose estimated probability is below this is not fed.
        order: Number of tokens of the longest n-gram context.
        history: Whether texts decoded earlier are remembered.
        runner_up: Number of the base's most probable tokens remembered after each fed token.
        corpus: File that ``drafters index corpus`` wrote, for n-grams of a fixed text.
    """
    found = drafter_folder(folder)
    name = name_of(checkpoint.read_config(found))
    drafter = _make_learned(Spec(name, str(found), f"num_nodes={3 * num_nodes}"), runner.base)
    table = load_index(CorpusTable.load, "corpus", corpus, runner.base) if corpus else None
    ngrams = drafters.Joint(order=order, history=history, runner_up=runner_up, corpus=table)
    return drafters.Merged(drafter, ngrams, num_nodes, min_probability)
