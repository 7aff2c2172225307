"""The checks of `drafters doctor`: files, configuration, weights, base, drafts and acceptance length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from inspect import signature
from math import isnan
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from data.conversations import load_conversations
from data.files import CHECKSUMS
from data.module import ShareGPTData
from data.templates import encode
from drafters import recipe
from drafters.checkpoint import DrafterConfig
from drafters.protocol import LearnedDrafter, Limits
from drafters.tree import DraftTree
from inference.verifier.base import Base, base_hash, check_fit
from train.feature_store.base_features import compute_features
from train.metrics import AcceptanceLength
from train.validation.base_answers import with_own_answers
from train.validation.simulate import simulate_answers

FILES = {"config.json", "model.safetensors", "README.md"}
# Relative difference of acceptance lengths that is accepted: the training may have used another precision or device.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        subject: What was checked.
        is_correct: The result, or None if it could not be checked.
        message: One line that explains the result.
    """

    subject: str
    is_correct: bool | None
    message: str


@dataclass(frozen=True)
class DraftSample:
    """The text on which the drafts of two drafters are compared.

    Args:
        files: Conversations.
        template: Chat template.
        num_texts: Number of conversations.
        num_roots: Number of roots in each of them, spread over the assistant's tokens.
    """

    files: list[str]
    template: str
    num_texts: int
    num_roots: int


def examine_files(folder: Path) -> Finding:
    """Check that the folder holds the files of an exported drafter and no others."""
    names = {path.name for path in folder.iterdir()}
    missing, extra = sorted(FILES - names), sorted(names - FILES - {CHECKSUMS})
    wrong = [f"{name} is missing" for name in missing] + [f"{name} does not belong there" for name in extra]
    return Finding("files", not wrong, ", ".join(wrong) or ", ".join(sorted(FILES)))


def examine_config(config: DrafterConfig, expected: DrafterConfig) -> Finding:
    """Check that config.json has the same class, arguments and base as the checkpoint."""
    wrong = [
        f"{name} is {getattr(config, name)!r}, in the checkpoint {getattr(expected, name)!r}"
        for name in ("class_path", "base", "tokenizer_hash")
        if getattr(config, name) != getattr(expected, name)
    ]
    ours, theirs = (
        recipe.flattened(replace(each, class_path=expected.class_path).nested_init_args())
        for each in (config, expected)
    )
    wrong += [
        f"{name} is {ours.get(name, 'missing')!r}, in the checkpoint {theirs.get(name, 'missing')!r}"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    return Finding("configuration", not wrong, "; ".join(wrong) or f"{config.class_path} with the same arguments")


def examine_weights(folder: Path, expected: dict[str, torch.Tensor]) -> Finding:
    """Check that each weight equals the checkpoint's bit for bit; else name the one that differs most."""
    try:
        exported = load_file(folder / "model.safetensors")
    except (SafetensorError, OSError) as error:
        return Finding("weights", False, f"model.safetensors cannot be read ({error}): export the drafter again")
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - exported.keys())]
    wrong += [f"{name} does not belong there" for name in sorted(exported.keys() - expected.keys())]
    differences: dict[str, float] = {}
    for name in sorted(expected.keys() & exported.keys()):
        ours, theirs = exported[name], expected[name]
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            kinds = (f"{str(w.dtype).removeprefix('torch.')} {tuple(w.shape)}" for w in (ours, theirs))
            wrong.append("{} is {}, in the checkpoint {}".format(name, *kinds))
        elif not torch.equal(ours, theirs):
            differences[name] = float((ours.double() - theirs.double()).abs().max())
    if differences:
        worst = max(differences, key=lambda name: float("inf") if isnan(differences[name]) else differences[name])
        others = f" ({len(differences)} of {len(expected)} differ)" if len(differences) > 1 else ""
        wrong.append(f"{worst} differs by up to {differences[worst]:.3g}{others}")
    if not wrong and (not_finite := [name for name, weight in exported.items() if not weight.isfinite().all()]):
        wrong.append(f"{not_finite[0]} holds numbers that are not finite, in the checkpoint too")
    return Finding("weights", not wrong, "; ".join(wrong) or f"{len(expected)} equal, bit for bit")


def examine_base(config: DrafterConfig, base: Base, weights_hash: str | None) -> Finding:
    """Check that the drafter was trained for this base.

    Args:
        config: The drafter's configuration.
        base: The base.
        weights_hash: Hash of the weights of the base that it was trained for, or None if it was not recorded.
    """
    try:
        check_fit(config, base)
    except ValueError as error:
        return Finding("base", False, str(error))
    expected, shape = asdict(config.base), asdict(base.shape)
    wrong = [
        f"{name} is {shape[name]}, the drafter's {expected[name]}" for name in expected if expected[name] != shape[name]
    ]
    if not wrong and weights_hash and weights_hash != base_hash(base):
        wrong = [f"the weights of {base.name} are not those of {config.base_name}, which it was trained for"]
    same = "shape, vocabulary and weights" if weights_hash else "shape and vocabulary"
    return Finding("base", not wrong, "; ".join(wrong) or f"{base.name}, of the same {same}")


@torch.no_grad()
def examine_drafts(trained: LearnedDrafter, exported: LearnedDrafter, base: Base, sample: DraftSample) -> Finding:
    """Check that both drafters draft the same trees with the same probabilities, in the dtype of the base."""
    num_trees, num_different, largest, has_probabilities = 0, 0, 0.0, False
    for text, roots in _texts_with_roots(base, sample):
        hidden = base.hidden_states(text[None], exported.required_outputs.hidden_layers)[0][0]
        arguments = hidden, text, roots, base.base_weights, Limits(max_depth=len(text), eos=base.eos)
        for one, other in zip(exported.draft_at(*arguments), trained.draft_at(*arguments), strict=True):
            difference = probability_difference(one, other)
            num_trees += 1
            has_probabilities |= len(other.probabilities) > 0
            num_different += one != other or difference > 0
            largest = max(largest, difference)
    if not num_trees:
        return Finding("drafts", None, f"not compared: no assistant token in {', '.join(sample.files)}")
    dtype = str(base.model.dtype).removeprefix("torch.")
    if not num_different:
        return Finding("drafts", True, f"the same trees at {num_trees} roots, in {dtype}")
    by = f"; probabilities of the nodes they share differ by up to {largest:.3g}" if has_probabilities else ""
    return Finding("drafts", False, f"other trees at {num_different} of {num_trees} roots, in {dtype}{by}")


def _texts_with_roots(base: Base, sample: DraftSample) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the tokens (S,) of each text that has an answer, and positions in its answers."""
    for conversation in load_conversations(sample.files, sample.num_texts)[0]:
        ids, mask = encode(conversation, base.tokenizer, sample.template, base.context_length)
        positions = [position for position in range(1, len(ids) - 1) if mask[position]]
        num_roots = min(sample.num_roots, len(positions))
        if positions:
            roots = [positions[place * len(positions) // num_roots] for place in range(num_roots)]
            yield torch.tensor(ids, device=base.model.device), torch.tensor(roots, device=base.model.device)


def probability_difference(one: DraftTree, other: DraftTree) -> float:
    """Return the largest difference between the probabilities of nodes in both trees, or 0 if they have none."""
    sides = [
        {tuple(tree.path_tokens(node)): float(p) for node, p in enumerate(tree.probabilities)} for tree in (one, other)
    ]
    return max((abs(sides[0][path] - sides[1][path]) for path in sides[0].keys() & sides[1].keys()), default=0.0)


@torch.no_grad()
def examine_acceptance(saved: dict[str, Any], drafter: LearnedDrafter, base: Base) -> Finding:
    """Check that the drafter reproduces the acceptance length of the checkpoint's last validation."""
    recorded, arguments = saved.get("measured"), saved["hyper_parameters"]
    if not recorded:
        return _not_measured("the checkpoint records none")
    if recorded["step"] != saved["global_step"]:
        return _not_measured(
            f"the recorded one is of step {recorded['step']}, the checkpoint of step {saved['global_step']}"
        )
    options = {
        name: value
        for name, value in saved.get("datamodule_hyper_parameters", {}).items()
        if name in signature(ShareGPTData).parameters
    }
    data = ShareGPTData(**options | {"tokenizer": base.name, "features": None})
    try:
        data.setup("validate")
    except ValueError as error:
        return _not_measured(str(error))
    length = AcceptanceLength()
    for batch in data.val_dataloader():
        texts = {name: value.to(base.model.device) for name, value in batch.items()}
        if arguments["val_answers"] == "greedy":
            texts = with_own_answers(base, texts, arguments["max_val_tokens"])
        ids = texts["input_ids"].to(base.model.device)
        hidden = compute_features(base, drafter.required_outputs.hidden_layers, ids).hidden
        for emitted in simulate_answers(drafter, base, hidden, ids, texts["loss_mask"]):
            length.update(emitted)
    now, before = float(length.compute()), recorded["acceptance_length"]
    is_close = abs(now - before) <= TOLERANCE * before
    hint = "" if is_close else ": was the validation limited, or are the data others?"
    message = f"{now:.4f}, recorded {before:.4f} at step {recorded['step']}{hint}"
    return Finding("acceptance length", is_close, message)


def _not_measured(reason: str) -> Finding:
    return Finding("acceptance length", None, f"not measured again: {reason}")
