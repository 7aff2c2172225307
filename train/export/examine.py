"""What can be wrong with an exported drafter: its files, configuration, weights, base, drafts, acceptance length."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from drafters.checkpoint import DrafterConfig
from drafters.protocol import LearnedDrafter, Limits
from drafters.tree import DraftTree
from inference.engine.base import Base, base_hash, check_fit

FILES = {"config.json", "model.safetensors", "README.md"}
NEAR = 0.02  # share of the recorded acceptance length: training may have run in another precision, on another device


@dataclass(frozen=True)
class Finding:
    """What one examination found.

    Args:
        what: Was examined.
        is_right: None where it could not be examined.
        said: One line.
    """

    what: str
    is_right: bool | None
    said: str


def examine_files(folder: Path) -> Finding:
    """Whether the folder holds what an exported drafter is, and nothing else."""
    found = {path.name for path in folder.iterdir()}
    missing, extra = sorted(FILES - found), sorted(found - FILES)
    said = [f"{name} is missing" for name in missing] + [f"{name} does not belong there" for name in extra]
    return Finding("files", not said, ", ".join(said) or ", ".join(sorted(FILES)))


def examine_config(config: DrafterConfig, expected: DrafterConfig) -> Finding:
    """Whether config.json says what the checkpoint says of class, arguments and base."""
    wrong = [
        f"{name} is {getattr(config, name)!r}, in the checkpoint {getattr(expected, name)!r}"
        for name in ("class_path", "base", "tokenizer_hash")
        if getattr(config, name) != getattr(expected, name)
    ]
    ours, theirs = config.init_args, expected.init_args
    wrong += [
        f"{name} is {ours.get(name, 'missing')!r}, in the checkpoint {theirs.get(name, 'missing')!r}"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    return Finding("configuration", not wrong, "; ".join(wrong) or f"{config.class_path} with the same arguments")


def examine_weights(folder: Path, expected: dict[str, torch.Tensor]) -> Finding:
    """Whether each weight is the checkpoint's, bit for bit; else which one differs the most, and by how much."""
    try:
        found = load_file(folder / "model.safetensors")
    except (SafetensorError, OSError) as error:
        return Finding("weights", False, f"model.safetensors cannot be read ({error}): export the drafter again")
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    wrong += [f"{name} does not belong there" for name in sorted(found.keys() - expected.keys())]
    apart: dict[str, float] = {}
    for name in sorted(expected.keys() & found.keys()):
        ours, theirs = found[name], expected[name]
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            kinds = (f"{str(w.dtype).removeprefix('torch.')} {tuple(w.shape)}" for w in (ours, theirs))
            wrong.append("{} is {}, in the checkpoint {}".format(name, *kinds))
        elif not torch.equal(ours, theirs):
            apart[name] = float((ours.double() - theirs.double()).abs().max())
    if apart:
        worst = max(apart, key=lambda name: apart[name] if apart[name] == apart[name] else float("inf"))  # NaN is worst
        others = f" ({len(apart)} of {len(expected)} differ)" if len(apart) > 1 else ""
        wrong.append(f"{worst} differs by up to {apart[worst]:.3g}{others}")
    if not wrong and (broken := [name for name, weight in found.items() if not weight.isfinite().all()]):
        wrong.append(f"{broken[0]} holds numbers that are not finite, in the checkpoint too")
    return Finding("weights", not wrong, "; ".join(wrong) or f"{len(expected)} equal, bit for bit")


def examine_base(config: DrafterConfig, base: Base, weights_hash: str | None) -> Finding:
    """Whether it is the base the drafter was trained for: its vocabulary, its numbers, and its weights, where a hash of
    them is recorded."""
    try:
        check_fit(config, base)
    except ValueError as error:
        return Finding("base", False, str(error))
    wanted, given = asdict(config.base), asdict(base.shape)
    wrong = [f"{name} is {given[name]}, the drafter's {wanted[name]}" for name in wanted if wanted[name] != given[name]]
    if not wrong and weights_hash and weights_hash != base_hash(base):
        wrong = [f"the weights of {base.name} are not those of {config.base_name}, which it was trained for"]
    same = "shape, vocabulary and weights" if weights_hash else "shape and vocabulary"
    return Finding("base", not wrong, "; ".join(wrong) or f"{base.name}, of the same {same}")


@torch.no_grad()
def examine_drafts(
    trained: LearnedDrafter,
    exported: LearnedDrafter,
    base: Base,
    files: list[str],
    template: str,
    num_texts: int,
    num_roots: int,
) -> Finding:
    """Whether both draft the same trees with the same probabilities, in the base's number format."""
    from data.conversation import encode
    from data.sharegpt import load

    num_trees, num_apart, largest, has_probabilities = 0, 0, 0.0, False
    for conversation in load(files, num_texts)[0]:
        ids, mask = encode(conversation, base.tokenizer, template, base.context_length)
        inside = [at for at in range(1, len(ids) - 1) if mask[at]]
        if not inside:
            continue
        roots = [inside[place * len(inside) // num_roots] for place in range(min(num_roots, len(inside)))]
        text = torch.tensor(ids, device=base.model.device)
        hidden = base.hidden_states(text[None], exported.required_outputs.hidden_layers)[0][0]
        asked = hidden, text, torch.tensor(roots, device=text.device), base.base_weights
        limits = Limits(max_depth=len(ids), eos=base.eos)
        for one, other in zip(exported.draft_at(*asked, limits), trained.draft_at(*asked, limits), strict=True):
            num_trees += 1
            has_probabilities |= len(other.probabilities) > 0
            apart = distance(one, other)
            num_apart += one != other or apart > 0
            largest = max(largest, apart)
    if not num_trees:
        return Finding("drafts", None, f"not compared: no assistant token in {', '.join(files)}")
    kind = str(base.model.dtype).removeprefix("torch.")
    if not num_apart:
        return Finding("drafts", True, f"the same trees at {num_trees} roots, in {kind}")
    by = f"; probabilities of the nodes they share differ by up to {largest:.3g}" if has_probabilities else ""
    return Finding("drafts", False, f"other trees at {num_apart} of {num_trees} roots, in {kind}{by}")


def distance(one: DraftTree, other: DraftTree) -> float:
    """Largest difference between the probabilities of nodes that stand in both trees; 0 where they say none."""
    sides = [
        {tuple(tree.path_tokens(node)): float(p) for node, p in enumerate(tree.probabilities)} for tree in (one, other)
    ]
    return max((abs(sides[0][path] - sides[1][path]) for path in sides[0].keys() & sides[1].keys()), default=0.0)


@torch.no_grad()
def examine_acceptance(saved: dict[str, Any], drafter: LearnedDrafter, base: Base) -> Finding:
    """Whether the drafter reproduces the acceptance length of the checkpoint's last validation, on the same answers."""
    from data.module import ShareGPTData
    from train.feature_store.base_features import extract_features
    from train.modules.metrics import AcceptanceLength
    from train.validation.base_answers import with_own_answers
    from train.validation.simulate import answer_spans, simulate

    def not_run(reason: str) -> Finding:
        return Finding("acceptance length", None, f"not measured again: {reason}")

    recorded, arguments = saved.get("measured"), saved["hyper_parameters"]
    if not recorded:
        return not_run("the checkpoint records none")
    if recorded["step"] != saved["global_step"]:
        return not_run(f"the recorded one is of step {recorded['step']}, the checkpoint of step {saved['global_step']}")
    known = signature(ShareGPTData).parameters
    given = {name: value for name, value in saved.get("datamodule_hyper_parameters", {}).items() if name in known}
    data = ShareGPTData(**given | {"tokenizer": base.name, "features": None})
    try:
        data.setup("validate")
    except ValueError as error:
        return not_run(str(error))
    length = AcceptanceLength()
    for batch in data.val_dataloader():
        batch = {name: value.to(base.model.device) for name, value in batch.items()}
        if arguments["val_answers"] == "greedy":
            batch = with_own_answers(base, batch, arguments["max_val_tokens"])
        ids = batch["input_ids"].to(base.model.device)
        hidden, _, _ = extract_features(base, drafter.required_outputs.hidden_layers, ids)
        for states, tokens, mask in zip(hidden, ids, batch["loss_mask"].tolist(), strict=True):
            for span in answer_spans(mask):
                length.update(simulate(drafter, states, tokens, span, base.base_weights, base.eos))
    now, then = float(length.compute()), recorded["acceptance_length"]
    is_near = abs(now - then) <= NEAR * then
    hint = "" if is_near else ": was the validation limited, or are the data others?"
    return Finding("acceptance length", is_near, f"{now:.4f}, recorded {then:.4f} at step {recorded['step']}{hint}")
