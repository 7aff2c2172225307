"""``drafters tree-search``: the static tree that suits the measured accuracies of Medusa's heads."""

from __future__ import annotations

import json
from typing import Literal

import torch
from torch import Tensor

from data import sharegpt
from data.batch import collate
from drafters import Medusa
from drafters.atomic_write import atomic_write
from drafters.learned.losses import anchors as anchor_positions
from drafters.learned.trees import best_first
from inference.engine.base import Base, Dtype, load_base, resolve_device
from inference.engine.runner import Runner
from inference.registry import catalogue
from inference.runs.outputs import new_file
from train.validation.base_answers import Answers, with_own_answers


@torch.inference_mode()
def count_hits(drafter: Medusa, base: Base, batch: dict[str, Tensor], top_k: int) -> tuple[Tensor, Tensor]:
    """How often the token of each rank is the one that the base takes, at every root in the answers of some texts.

    Args:
        batch: ``input_ids`` (B, S) and ``loss_mask`` (B, S).

    Returns:
        Hits (K, k) and, for each head, the number of positions looked at (K,).
    """
    hits = torch.zeros(drafter.num_heads, top_k, dtype=torch.long)
    seen = torch.zeros(drafter.num_heads, dtype=torch.long)
    device, head = base.model.device, base.base_weights.head
    for ids, mask in zip(batch["input_ids"].to(device), batch["loss_mask"].to(device), strict=True):
        hidden, last = base.hidden_states(ids[None], drafter.required_outputs.hidden_layers)
        labels = (last @ head.T).argmax(-1)  # (1, S)
        anchors = 1 + mask[1:-1].nonzero().T  # (1, A) roots within an answer, the last token left out
        targets, valid = anchor_positions.following(labels, mask[None], anchors, drafter.num_heads)
        for part in range(0, anchors.shape[1], drafter.chunk_anchors):
            at = slice(part, part + drafter.chunk_anchors)
            states = drafter.encode(hidden)[0, anchors[0, at] - 1]
            _, tokens = drafter(states, base.base_weights, top_k)  # (a, K, k)
            right = (tokens == targets[0, at, :, None]) & valid[0, at, :, None]
            hits += right.sum(0).cpu()
            seen += valid[0, at].sum(0).cpu()
    return hits, seen


def tree_search(
    base: str,
    drafter: str,
    data: list[str],
    out: str,
    num_nodes: int = 64,
    top_k: int = 10,
    answers: Answers = "greedy",
    limit: int = 100,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    template: str = "tokenizer",
    dtype: Dtype = "float32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    overwrite: bool = False,
) -> None:
    """Measure how often each rank of each Medusa head is right, and make the static tree of these accuracies.

    The tree is the one accepted deepest on average where the heads are right independently of each other (Medusa,
    section 2.3.3). Decode with it as medusa=FOLDER:static=OUT.

    Args:
        base: Folder or hub id of the base.
        drafter: Medusa's folder: medusa=FOLDER.
        data: A file of conversations, as in training, or embedded[:COUNT[:SEED]]; may be repeated.
        out: JSON file for the tree.
        num_nodes: Nodes of the tree.
        top_k: Ranks of each head that are looked at.
        answers: What is decoded, the base's own greedy answers to the first prompts, or the text as it is.
        limit: Conversations at most.
        max_new_tokens: Tokens of an answer at most.
        batch_size: Conversations at once.
        template: Chat template: the tokenizer's own, vicuna_v1.1 or llama2_chat.
        dtype: Number format of base and drafter.
        device: auto takes the GPU where there is one.
        overwrite: Replace a tree that is already there.
    """
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    if min(num_nodes, top_k, limit, max_new_tokens, batch_size) < 1:
        raise ValueError(
            "need num_nodes, top_k, limit, max_new_tokens and batch_size of at least 1, not "
            f"{num_nodes}, {top_k}, {limit}, {max_new_tokens} and {batch_size}"
        )
    if catalogue.split(drafter)[0] != "medusa":
        raise ValueError(f"a static tree is made of Medusa's heads: write medusa=FOLDER, not {drafter}")
    path = new_file(out, overwrite)
    conversations, _ = sharegpt.load(data, limit)
    loaded = load_base(base, dtype, resolve_device(device))
    made = catalogue.make(drafter, Runner(loaded))
    top_k = min(top_k, made.vocab_size)
    rows = sharegpt.tokenise(conversations, loaded.tokenizer, template, loaded.context_length)
    if not len(rows):
        raise ValueError(f"no conversation of {', '.join(data)} has an answer within the base's context: give others")
    hits, seen = torch.zeros(made.num_heads, top_k, dtype=torch.long), torch.zeros(made.num_heads, dtype=torch.long)
    console = Console(soft_wrap=True, highlight=False)
    starts = range(0, len(rows), batch_size)
    progress = Console(stderr=True)
    for at in track(starts, "heads", console=progress, transient=True, disable=not progress.is_terminal):
        batch = collate(
            [rows[i] for i in range(at, min(at + batch_size, len(rows)))], loaded.tokenizer.pad_token_id or 0
        )
        if answers == "greedy":
            moved = {name: value.to(loaded.model.device) for name, value in batch.items()}
            batch = with_own_answers(loaded, moved, max_new_tokens)
        counted = count_hits(made, loaded, batch, top_k)
        hits, seen = hits + counted[0], seen + counted[1]
    table = (hits.double() / seen[:, None].clamp(min=1)).numpy()
    accuracies, static = table.tolist(), best_first.static(table, num_nodes)
    if not static:
        raise ValueError(
            f"no token of the first head was ever right at {int(seen[0])} positions: train {drafter} longer, or give "
            "more --data or a larger --top-k"
        )
    expected = 1 + sum(_reached(accuracies, path) for path in static)
    found = {
        "static": static,
        "accuracies": accuracies,
        "expected_acceptance_length": expected,
        "num_positions": int(seen[0]),
        "base": base,
        "drafter": drafter,
        "data": data,
        "answers": answers,
        "limit": limit,
        "max_new_tokens": max_new_tokens,
        "template": template,
        "dtype": dtype,
    }
    with atomic_write(path) as new:
        new.write_text(json.dumps(found) + "\n", encoding="utf-8")
    shown = Table("head", *(f"rank {rank}" for rank in range(min(top_k, 5))), "nodes")
    for head, row in enumerate(accuracies):
        nodes = sum(len(path) == head + 1 for path in static)
        shown.add_row(str(head + 1), *(f"{share:.1%}" for share in row[:5]), str(nodes))
    console.print(shown)
    console.print(
        f"{len(static)} nodes, measured at {int(seen[0])} positions; {expected:.2f} tokens a step if the heads were "
        "right independently of each other, which they are not. Measure it on other questions:\n"
        f"  drafters eval --base {base} --drafter {drafter}:static={out} --benchmark mt_bench",
        markup=False,
    )


def _reached(accuracies: list[list[float]], path: best_first.RankPath) -> float:
    reached = 1.0
    for head, rank in enumerate(path):
        reached *= accuracies[head][rank]
    return reached
