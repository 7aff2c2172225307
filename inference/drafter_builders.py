"""Builders of the drafters that need a second model or the base itself.

Each function takes the base's runner, the model or file that ``NAME=...`` names, and then its options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import drafters
from data.hub import find_folder
from drafters import checkpoint
from drafters.checkpoint import DrafterConfig
from drafters.protocol import Drafter, LearnedDrafter
from drafters.recipe import DRAFT
from drafters.registry import register
from drafters.training_free.corpus import CorpusTable
from drafters.training_free.ngram import NgramPool
from inference.verifier.base import Base, Dtype, check_fit, load_base, tokenizer_hash
from inference.verifier.draft_session import DraftModelSession
from inference.verifier.layer_skipping import LayerSkippingSession, default_skips, read_skips
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler


@register("draft_model", "MODEL")
def draft_model(
    runner: Runner,
    folder: str,
    num_draft: int = 5,
    threshold: float = 0.0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Drafter:
    """Draft-model speculation: greedy chains at temperature 0, above it sampled ones with exact rejection."""
    sampler = KeyedSampler(temperature, top_k, top_p, seed) if temperature else None
    return drafters.DraftModel(
        DraftModelSession(model_runner(folder, runner.base), sampler=sampler), num_draft, threshold
    )


@register("cascade", "MODEL")
def cascade(
    runner: Runner,
    folder: str,
    num_draft: int = 5,
    inner_ngram: int = 3,
    inner_draft: int = 5,
    extension: int = 0,
    corpus: str = "",
) -> Drafter:
    """Vertical cascade: prompt lookup drafts for the draft model, and the draft model for the base.

    With ``extension``, prompt lookup also appends up to that many tokens to the chain of the draft model (horizontal
    cascade). With the file ``corpus``, it drafts bigrams of that corpus where nothing matches, as in the paper.
    """
    table = load_index(CorpusTable.load, "corpus", corpus, runner.base) if corpus else None
    inner = DraftModelSession(model_runner(folder, runner.base), drafters.MaxGram(table, inner_ngram, inner_draft))
    if extension:
        return drafters.HorizontalCascade(inner, drafters.MaxGram(table, inner_ngram, extension), num_draft)
    return drafters.DraftModel(inner, num_draft)


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

    Without ``phrases_draft`` it decodes token by token. A key keeps as many phrases as the window is wide, as in the
    paper's code.
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
        corpus: File that ``drafters corpus`` wrote, for n-grams of a fixed text.
    """
    found = drafter_folder(folder)  # one commit for configuration and weights
    config = checkpoint.read_config(found)
    check_fit(config, runner.base)
    init_args = config.nested_init_args()
    init_args[DRAFT] = {**init_args.get(DRAFT, {}), "num_nodes": 3 * num_nodes}
    learned = load_learned(str(found), replace(config, init_args=init_args), runner.base)
    table = load_index(CorpusTable.load, "corpus", corpus, runner.base) if corpus else None
    ngrams = drafters.Joint(order=order, history=history, runner_up=runner_up, corpus=table)
    return drafters.Merged(learned, ngrams, num_nodes, min_probability)


def drafter_folder(name: str) -> Path:
    """Return the folder of an exported drafter; ``OWNER/NAME@REVISION`` is downloaded from the hub.

    Raises:
        ValueError: It cannot be downloaded.
    """
    return find_folder(name, checkpoint.FILES)


def load_learned(folder: str, config: DrafterConfig, base: Base) -> LearnedDrafter:
    """Load a trained drafter that is ready to decode with a base.

    Raises:
        ValueError: Its weights are missing or damaged, or do not fit the configuration.
    """
    drafter, _ = checkpoint.load(drafter_folder(folder), base.model.dtype, config)
    base.lend_weights_to(drafter)
    return drafter


def load_index(load: Callable[[str], Any], command: str, file: str, base: Base) -> Any:
    """Read a file that a command has built from texts.

    Raises:
        ValueError: The file is missing or damaged, or was built with another tokenizer.
    """
    loaded = load(file)
    if loaded.tokenizer_hash != tokenizer_hash(base.tokenizer):
        raise ValueError(
            f"the {command} {file} was built with another tokenizer than that of {base.name}: "
            f"build it again with `drafters {command} OUT --tokenizer {base.name}`"
        )
    return loaded


def model_runner(folder: str, base: Base) -> Runner:
    """A runner of a draft model, with a KV cache of its own.

    Raises:
        ValueError: The model cannot be loaded, or has another vocabulary than the base.
    """
    dtype = cast("Dtype", str(base.model.dtype).removeprefix("torch."))
    model = _load(folder, dtype, str(base.model.device))
    if model.model.config.vocab_size != base.model.config.vocab_size:
        raise ValueError(
            f"the draft model {folder} has {model.model.config.vocab_size} tokens and the base {base.name} "
            f"{base.model.config.vocab_size}: pass a model of the same vocabulary"
        )
    if tokenizer_hash(model.tokenizer) != tokenizer_hash(base.tokenizer):
        raise ValueError(
            f"the tokenizer of the draft model {folder} is not that of {base.name}: pass a model of the same vocabulary"
        )
    return Runner(model)


@lru_cache(maxsize=4)
def _load(folder: str, dtype: Dtype, device: str) -> Base:
    return load_base(folder, dtype, device)
