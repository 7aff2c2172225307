"""How the drafters that need more than numbers are put together: a draft model, a file, the base itself.

Each function takes the base's runner and what ``NAME=...`` names, and then the flat arguments of the command line.
"""

from __future__ import annotations

from functools import lru_cache

import drafters
from drafters.protocol import Drafter
from inference.base import Base, load_base, tokenizer_hash
from inference.inner import ModelSession
from inference.runner import Runner
from inference.sampling import RunningSampler


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
    """Draft-model speculation: greedy chains at temperature 0, drawn ones with exact rejection above it."""
    sampler = RunningSampler(temperature, top_k, top_p, seed) if temperature > 0 else None
    return drafters.DraftModel(ModelSession(model_runner(folder, runner.base), sampler=sampler), num_draft, threshold)


def cascade(runner: Runner, folder: str, num_draft: int = 5, inner_ngram: int = 3, inner_draft: int = 5) -> Drafter:
    """Vertical cascade: prompt lookup drafts for the draft model, which drafts for the base."""
    lowest = drafters.PromptLookup(inner_ngram, inner_draft)
    return drafters.DraftModel(ModelSession(model_runner(folder, runner.base), lowest), num_draft)


def model_runner(folder: str, base: Base) -> Runner:
    """A draft model of the base's vocabulary, with a cache of its own.

    Raises:
        ValueError: It is not there, or has another vocabulary.
    """
    dtype = str(base.model.dtype).removeprefix("torch.")
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
def _load(folder: str, dtype: str, device: str) -> Base:
    return load_base(folder, dtype, device)
