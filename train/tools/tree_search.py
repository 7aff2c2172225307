"""``drafters tree-search``: the static tree that fits the measured accuracies of Medusa's heads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from data import sharegpt
from data.batch import collate
from data.files import SafeConsole, write_text
from drafters import Medusa
from drafters.losses import anchors as anchor_positions
from drafters.trees.static import RankPath, static_tree
from inference import drafter_specs
from inference.outputs import new_file
from inference.progress import progress_bars
from inference.verifier.base import Base, Dtype, load_base, resolve_device
from inference.verifier.runner import Runner
from train.validation.base_answers import Answers, with_own_answers


@dataclass(frozen=True)
class HeadAccuracies:
    """How often the token of each rank of each head is the base's own.

    Args:
        shares: (K, k) share of positions at which it is, by head and rank.
        num_positions: Number of positions of the first head.
    """

    shares: np.ndarray
    num_positions: int

    def expected_acceptance_length(self, static: list[RankPath]) -> float:
        """Tokens per step with a static tree, if the heads were right independently of each other."""
        return 1 + sum(prod(float(self.shares[head, rank]) for head, rank in enumerate(path)) for path in static)


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
    """Measure how often each rank of each Medusa head is right, and make the best static tree for these accuracies.

    It is the tree with the largest expected acceptance length if the heads are right independently of each other
    (Medusa, section 2.3.3). To decode with it, write medusa=FOLDER:static=OUT.

    Args:
        base: Folder or hub id of the base.
        drafter: Folder of the Medusa drafter, as medusa=FOLDER.
        data: File of conversations, as in training, or embedded[:COUNT[:SEED]]; may be repeated.
        out: JSON file to write the tree to.
        num_nodes: Number of nodes of the tree.
        top_k: Number of ranks that are measured for each head.
        answers: Text that is decoded: the base's own greedy answers to the first prompts, or the text of the files.
        limit: Maximum number of conversations.
        max_new_tokens: Maximum number of tokens of an answer.
        batch_size: Conversations per forward pass of the base.
        template: Chat template: vicuna_v1.1, llama2_chat, or tokenizer for the tokenizer's own, whose thinking switch
            tokenizer:thinking=on or tokenizer:thinking=off sets.
        dtype: Dtype of the base and the drafter.
        device: Device to run on; auto uses the GPU if there is one.
        overwrite: Replace the file if it exists.
    """
    if min(num_nodes, top_k, limit, max_new_tokens, batch_size) < 1:
        raise ValueError(
            "need num_nodes, top_k, limit, max_new_tokens and batch_size of at least 1, not "
            f"{num_nodes}, {top_k}, {limit}, {max_new_tokens} and {batch_size}"
        )
    if drafter_specs.split(drafter)[0] != "medusa":
        raise ValueError(f"a static tree is made of Medusa's heads: write medusa=FOLDER, not {drafter}")
    path = new_file(out, overwrite)
    conversations, _ = sharegpt.load_conversations(data, limit)
    loaded = load_base(base, dtype, resolve_device(device))
    medusa = drafter_specs.make(drafter, Runner(loaded))
    assert isinstance(medusa, Medusa)
    rows = sharegpt.tokenise(conversations, loaded.tokenizer, template, loaded.context_length)
    if not len(rows):
        raise ValueError(f"no conversation of {', '.join(data)} has an answer within the base's context: give others")
    batches = _batches(loaded, rows, batch_size, max_new_tokens if answers == "greedy" else None)
    accuracies = measure_accuracies(medusa, loaded, batches, min(top_k, medusa.vocab_size))
    static = static_tree(accuracies.shares, num_nodes)
    if not static:
        raise ValueError(
            f"no token of the first head was ever right at {accuracies.num_positions} positions: train {drafter} "
            "longer, or give more --data or a larger --top-k"
        )
    options = {"base": base, "drafter": drafter, "data": data, "answers": answers, "limit": limit}
    _write(path, accuracies, static, options | {"max_new_tokens": max_new_tokens, "template": template, "dtype": dtype})
    _show(accuracies, static, f"drafters eval --base {base} --drafter {drafter}:static={out} --benchmark mt_bench")


def _batches(base: Base, rows: Any, batch_size: int, max_new_tokens: int | None) -> Iterator[dict[str, Tensor]]:
    """Yield batches of the rows, with the base's own answers of at most ``max_new_tokens`` unless that is None."""
    with progress_bars(transient=True) as bars:
        for start in bars.track(range(0, len(rows), batch_size), description="heads"):
            some = [rows[row] for row in range(start, min(start + batch_size, len(rows)))]
            batch = collate(some, base.tokenizer.pad_token_id or 0)
            if max_new_tokens is not None:
                on_device = {name: value.to(base.model.device) for name, value in batch.items()}
                batch = with_own_answers(base, on_device, max_new_tokens)
            yield batch


def measure_accuracies(drafter: Medusa, base: Base, batches: Iterator[dict[str, Tensor]], top_k: int) -> HeadAccuracies:
    """Measure how often each of the ``top_k`` first ranks of each head is right over all batches."""
    hits = torch.zeros(drafter.num_heads, top_k, dtype=torch.long)
    num_positions = torch.zeros(drafter.num_heads, dtype=torch.long)
    for batch in batches:
        batch_hits, batch_positions = count_hits(drafter, base, batch, top_k)
        hits, num_positions = hits + batch_hits, num_positions + batch_positions
    shares = hits.double() / num_positions[:, None].clamp(min=1)
    return HeadAccuracies(shares.numpy(), int(num_positions[0]))


@torch.inference_mode()
def count_hits(drafter: Medusa, base: Base, batch: dict[str, Tensor], top_k: int) -> tuple[Tensor, Tensor]:
    """Count at how many roots within the answers the token of each rank is the one that the base chooses.

    Args:
        drafter: The Medusa drafter.
        base: The base.
        batch: ``input_ids`` (B, S) and ``loss_mask`` (B, S).
        top_k: Number of ranks k.

    Returns:
        The hits (K, k), and the number of positions of each head (K,).
    """
    hits = torch.zeros(drafter.num_heads, top_k, dtype=torch.long)
    num_positions = torch.zeros(drafter.num_heads, dtype=torch.long)
    device, head = base.model.device, base.base_weights.head
    for ids, mask in zip(batch["input_ids"].to(device), batch["loss_mask"].to(device), strict=True):
        hidden, last_hidden = base.hidden_states(ids[None], drafter.required_outputs.hidden_layers)
        labels = (last_hidden @ head.T).argmax(-1)  # (1, S)
        anchors = 1 + mask[1:-1].nonzero().T  # (1, A) roots within an answer, without its last token
        targets, valid = anchor_positions.following(labels, mask[None], anchors, drafter.num_heads)
        for start in range(0, anchors.shape[1], drafter.chunk_anchors):
            chunk = slice(start, start + drafter.chunk_anchors)
            states = drafter.encode(hidden)[0, anchors[0, chunk] - 1]
            _, tokens = drafter(states, base.base_weights, top_k)  # (a, K, k)
            is_hit = (tokens == targets[0, chunk, :, None]) & valid[0, chunk, :, None]
            hits += is_hit.sum(0).cpu()
            num_positions += valid[0, chunk].sum(0).cpu()
    return hits, num_positions


def _write(path: Path, accuracies: HeadAccuracies, static: list[RankPath], options: dict[str, Any]) -> None:
    """Write the tree with the measured accuracies and the options of the command."""
    result = {
        "static": static,
        "accuracies": accuracies.shares.tolist(),
        "expected_acceptance_length": accuracies.expected_acceptance_length(static),
        "num_positions": accuracies.num_positions,
        **options,
    }
    write_text(path, json.dumps(result) + "\n")


def _show(accuracies: HeadAccuracies, static: list[RankPath], eval_command: str) -> None:
    """Print the accuracies, the size of the tree, and the command that measures it."""
    shares = accuracies.shares[:, :5]
    table = Table("head", *(f"rank {rank}" for rank in range(shares.shape[1])), "nodes")
    for head, row in enumerate(shares.tolist()):
        num_nodes = sum(len(path) == head + 1 for path in static)
        table.add_row(str(head + 1), *(f"{share:.1%}" for share in row), str(num_nodes))
    console = SafeConsole(soft_wrap=True, highlight=False)
    console.print(table)
    console.print(
        f"{len(static)} nodes, measured at {accuracies.num_positions} positions; "
        f"{accuracies.expected_acceptance_length(static):.2f} tokens a step if the heads were right independently of "
        f"each other, which they are not. Measure it on other questions:\n  {eval_command}",
        markup=False,
    )
