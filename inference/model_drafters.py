"""The drafters that read a model: a second one, the base itself, or the folder of a learned drafter with n-grams.

Each function is registered under its name in specs. It gets the base's runner, what ``NAME=...`` names, and options.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch

import drafters
from data.dtypes import Dtype
from data.hub import find_folder
from data.tokenizer import tokenizer_hash
from drafters import checkpoint, recipe
from drafters.checkpoint import DrafterConfig
from drafters.protocol import Drafter, LearnedDrafter
from drafters.registry import register
from drafters.training_free.corpus import CorpusTable
from drafters.training_free.ngram import NgramPool
from inference.verifier.base import Base, BaseConfig, check_fit, load_base
from inference.verifier.draft_model import DraftModelSession, Lenient
from inference.verifier.graphed import make_runner
from inference.verifier.layer_skipping import LayerSkippingSession, default_skips, read_skips
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler

# ---- what drafters read


def load_index(load: Callable[[str], Any], command: str, file: str, base: Base | BaseConfig) -> Any:
    """Read a file that a command has built from texts; raises ValueError if it was built with another tokenizer."""
    loaded = load(file)
    if loaded.tokenizer_hash != tokenizer_hash(base.tokenizer):
        raise ValueError(
            f"the {command} {file} was built with another tokenizer than that of {base.name}: "
            f"build it again with `drafters index {command} OUT --tokenizer {base.name}`"
        )
    return loaded


def with_draft_options(config: DrafterConfig, options: Mapping[str, Any]) -> DrafterConfig:
    """The configuration of a trained drafter with other options of decoding; raises ValueError if one does not fit."""
    draft = {**config.init_args.get(recipe.DRAFT, {}), **options}
    config = replace(config, init_args={**config.init_args, recipe.DRAFT: draft})
    with torch.device("meta"):
        config.build()  # so that an option that does not fit is not taken for a damaged file
    return config


def load_learned(folder: str | Path, config: DrafterConfig, base: Base) -> LearnedDrafter:
    """Load a trained drafter with this configuration, which shares the base's embedding and LM head."""
    drafter, _ = checkpoint.load(folder, base.model.dtype, config)
    base.lend_weights_to(drafter)
    return drafter


def model_runner(folder: str, base: Base) -> Runner:
    """A runner of a draft model, with a KV cache of its own; raises ValueError if it has not the base's tokenizer.

    It is packed, or in 8 bits, where learned drafters are.
    """
    dtype = "int8" if base.drafts_in_int8 else str(base.model.dtype).removeprefix("torch.")
    model = _load_model(folder, cast("Dtype", dtype), str(base.model.device), base.is_packed)
    if tokenizer_hash(model.tokenizer) != tokenizer_hash(base.tokenizer):
        raise ValueError(
            f"the draft model {folder} has another tokenizer ({len(model.tokenizer)} tokens) than the base {base.name} "
            f"({len(base.tokenizer)} tokens): pass a model with the same tokenizer"
        )
    return make_runner(replace(model, graphed=base.graphed), vocab_size=base.config.vocab_size)


@lru_cache(maxsize=4)
def _load_model(folder: str, dtype: Dtype, device: str, packed: bool) -> Base:
    return load_base(folder, dtype, device, packed=packed, bitwise=False)  # drafts need not be bit-identical


# ---- drafters


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
            by 1, down to 1, as in transformers.
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
    return drafters.SelfSpeculative(inner, num_draft, threshold, adaptive)


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
    path = find_folder(folder, checkpoint.FILES)
    config = checkpoint.read_config(path)
    check_fit(config, runner.base)
    learned = load_learned(path, with_draft_options(config, {"num_nodes": 3 * num_nodes}), runner.base)
    table = load_index(CorpusTable.load, "corpus", corpus, runner.base) if corpus else None
    ngrams = drafters.Joint(order=order, history=history, runner_up=runner_up, corpus=table)
    return drafters.Merged(learned, ngrams, num_nodes, min_probability)
