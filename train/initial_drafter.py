"""What a training starts from: the weights of another drafter, and the draft vocabulary chosen from the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from data.rows import assistant_token_counts
from drafters import checkpoint, recipe
from drafters.nn.draft_vocabulary import most_frequent
from drafters.protocol import BaseShape, LearnedDrafter
from inference.drafter_specs import drafter_folder
from inference.verifier.base import Base, check_fit

if TYPE_CHECKING:
    from datasets import Dataset

FREE = "loss", recipe.DRAFT
"""Groups of options that decide no weight: a further training may have others."""
ADDED = "lookup", "copy"
"""Options of the trunk that a further training may set."""


def load_initial(
    folder: str, build: Callable[[BaseShape], LearnedDrafter], recipe_node: Any, base: Base
) -> tuple[LearnedDrafter, BaseShape]:
    """Build a drafter with the weights of a folder.

    The folder, or ``OWNER/NAME@REVISION`` on the hub, is that of an exported or imported drafter, whose layers may have
    sizes of their own: the shape is returned too. Raises ValueError if it holds no drafter, one for another base, or
    one that computes something else than ``build`` and its class_path and init_args, ``recipe_node``, describe. Only a
    ``lookup``, which changes nothing until it is trained, and the ``copy`` of what it finds may be added.
    """
    loaded, config = checkpoint.load(drafter_folder(folder))
    check_fit(config, base)
    drafter = build(config.base)
    names = type(drafter).__name__, type(loaded).__name__
    if type(drafter) is not type(loaded):
        raise ValueError(f"the drafter in {folder} is {names[1]}, and model.drafter is {names[0]}")
    differing: dict[str, Any] = {}
    if isinstance(recipe_node, Mapping):
        given, stored = (
            _fixed_options(type(loaded), args) for args in (recipe_node["init_args"] or {}, config.init_args)
        )
        stored = {name: value for name, value in stored.items() if value or name not in ADDED}
        differing = {name: value for name, value in stored.items() if given.get(name) != value}
    if drafter.required_outputs.hidden_layers != loaded.required_outputs.hidden_layers:
        differing["hidden_layers"] = list(loaded.required_outputs.hidden_layers)
    if differing:
        stated = ", ".join(f"{name}: {value}" for name, value in differing.items())
        raise ValueError(f"the drafter in {folder} has other options than model.drafter; give it {stated}")
    fresh = {name: weight for name, weight in drafter.state_dict().items() if name.startswith("lookup.")}
    weights = fresh | loaded.state_dict()
    shapes, expected = ({name: weight.shape for name, weight in w.items()} for w in (weights, drafter.state_dict()))
    if other := dict(shapes.items() ^ expected.items()):
        raise ValueError(f"the drafter in {folder} has other weights than model.drafter: {min(other)} differs")
    drafter.load_state_dict(weights)
    rank_zero_info(f"initial drafter: {folder}, trained for {config.base_name}")
    return drafter, config.base


def _fixed_options(drafter_class: type[LearnedDrafter], init_args: Mapping[str, Any]) -> dict[str, Any]:
    """The options that decide what the weights compute, with their defaults, by their flat names.

    Without the fused layers, whose default depends on the base.
    """
    groups = recipe.groups(drafter_class)
    free = {"hidden_layers", *(name for group in FREE if group in groups for name in recipe.defaults(groups[group]))}
    flat = recipe.flattened(init_args)  # a free group may hold options that are no longer there
    given = {key.rpartition(".")[2]: value for key, value in flat.items() if key.partition(".")[0] not in FREE}
    values = recipe.training_defaults(drafter_class) | given
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if name not in free
    }


def choose_draft_tokens(drafter: LearnedDrafter, base: Base, rows: Dataset | None, is_initial: bool = False) -> None:
    """Let a drafter with a draft vocabulary draft the assistant's most frequent tokens in the training text.

    End-of-sequence tokens are always among them, and so are the special tokens that the assistant writes, such as the
    end marks of a chat template. An LM head of the drafter's own starts as the base's rows for these tokens. A drafter
    for the whole vocabulary stays as it is. An initial one keeps its tokens if it has weights for each of them; else it
    drafts those of the new text, and of its own as many as there is room for. All processes choose the same, and the
    first prints the share of the text that they cover. Raises ValueError if there are no ``rows``, the tokenised
    training set, or not enough room for the tokens that are always kept.
    """
    tokens: torch.Tensor | None = getattr(drafter, "draft_tokens", None)
    if tokens is None or (is_initial and rows is None):
        return
    if rows is None:
        raise ValueError("draft_vocab_size needs the training set of ShareGPTData, and there is none: leave it out")
    counts = torch.from_numpy(assistant_token_counts(rows, base.shape.vocab_size))
    ranked = counts
    if is_initial:
        ranked = 2 * counts
        ranked[tokens.cpu()] += 1  # of equally frequent tokens, its own come first
    own = (weight for name, weight in drafter.named_parameters() if name.startswith(("lm_head.", "markov.")))
    sizes = {size for weight in own for size in weight.shape}
    if not is_initial or not sizes & {len(tokens), len(tokens) + 1}:  # with the blank of CTC
        special = {token for token, added in base.tokenizer.added_tokens_decoder.items() if added.special}
        kept = base.eos | {token for token in special if token < len(counts) and counts[token] > 0}
        tokens.copy_(most_frequent(ranked, len(tokens), kept))
    if not is_initial:
        drafter.initialise(base.base_weights)
    share = counts[tokens.cpu()].sum() / counts.sum()
    rank_zero_info(
        f"draft vocabulary: {len(tokens):,} of {len(counts):,} tokens, {share:.2%} of the assistant's training text"
    )
