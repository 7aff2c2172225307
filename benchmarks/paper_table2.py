"""The CTC paper's Table 2 (section 4.3): the effects of the draft module and of the CTC transform, separately.

Rows are draft modules: linear heads + cross-entropy (Medusa), transformer + CTC, and transformer + cross-entropy
(Block), which the paper lacks. Columns are two ways to read the distributions of the frames that a module predicts:

- plain tree verify: frame u is the u-th next token, and the most probable combinations form the tree. The paper leaves
  the blanks of a CTC module in the tree; the base never writes one, so they and the nodes below them are wasted
  (``blanks kept``). A milder reading gives the blank's probability to the tokens of its frame (``blanks dropped``).
- CTC verify: on every path of the tree, repeats are merged, then blanks dropped, and paths with the same text become
  one. For a module without a blank, this also removes the repeats of the text itself: "0 0" can no longer be drafted.

The last row of a CTC module, exact prefix search, spends the budget on texts from the start. The original code verifies
with the positions from before the transform and is not lossless. Here, all ways produce a tree of texts, so the same
verifier takes them all. ``benchmarks.learned_drafters --table2`` makes the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.experiment import Arm, GreedyAnswer, mean_and_range, remembered
from benchmarks.harness import ResultTable
from drafters import CTC, Block, Medusa, checkpoint
from drafters.ctc.trees import collapsed, paper_trees
from drafters.protocol import BaseWeights
from drafters.tree import DraftTree
from drafters.trees.candidates import choose
from drafters.trees.search import Candidates, SearchLimits, search
from inference.verifier.base import Base

BUDGETS = (16, 64)  # draft nodes, counted before the transform
MODULES = {
    "Medusa": "linear heads + cross-entropy",
    "Block": "transformer + cross-entropy",
    "CTC": "transformer + CTC",
}
NOTES = [
    "plain: frame u is token u; CTC: repeats of its paths are merged and blanks dropped; prefix: exact prefix search, "
    "which the paper lacks. Nodes are counted before the transform, as in the paper; fed counts those that are left.",
    "The paper (Vicuna-7B, MT-Bench, its own count of tokens per step): linear layers + cross-entropy 2.58 plain, 2.38 "
    "with CTC verify; transformer + CTC 3.02 plain, 3.56 with CTC verify.",
]


@dataclass(frozen=True)
class Frames:
    """The distributions of one draft's T frames on the host, restricted to the candidates for its tree."""

    probs: np.ndarray  # (T, C)
    tokens: np.ndarray  # (T, C), or (C,) if all frames have the same candidates
    blank: np.ndarray = field(default_factory=lambda: np.empty(0))  # (T,) probabilities, if the drafter has a blank
    blank_id: int = -1  # V, after the vocabulary


@torch.inference_mode()
def frames_at(
    drafter: Medusa | Block | CTC, hidden: Tensor, input_ids: Tensor, anchors: Tensor, base_weights: BaseWeights
) -> list[Frames]:
    """Return the frames that decoding would compute at several anchors of a known text.

    The arguments have the shapes of those of ``draft_at``; anchors are at least 1.
    """
    frames: list[Frames] = []
    for part in anchors.split(drafter.chunk_anchors):
        if isinstance(drafter, Medusa):
            states = drafter.encode(hidden[None])[0][part - 1]
            frames += map(Frames, *(each.cpu().numpy() for each in drafter(states, base_weights, drafter.top_k)))
            continue
        roots = input_ids[part]
        states = drafter(hidden[None], part[None], roots[None], base_weights.embedding, input_ids[None])[0]  # (A, T, D)
        weights, _, vocabulary = drafter.output(base_weights)
        logits, num_drafted = drafter.logits(states, weights), len(weights.head)
        found = choose(logits, roots, num_drafted, drafter.num_candidates, vocabulary=vocabulary)
        blanks = () if found.blank is None else (found.blank, [drafter.vocab_size] * len(part))
        frames += map(Frames, found.probs, found.tokens, *blanks)
    return frames


# ---- ways to make a draft tree from frames


def searched(probs: np.ndarray, tokens: np.ndarray, limits: SearchLimits, blank: np.ndarray | None = None) -> DraftTree:
    """The tree of one draft; with a blank, of CTC frames."""
    return search(Candidates(tokens[None], probs[None], None if blank is None else blank[None]), limits)[0]


def plain(frames: Frames, limits: SearchLimits) -> DraftTree:
    """Read frame u as the u-th token; the most probable paths form the tree."""
    return searched(frames.probs, frames.tokens, limits)


def transformed(frames: Frames, limits: SearchLimits) -> DraftTree:
    """Apply the CTC transform to `plain`, for frames without a blank."""
    return collapsed(plain(frames, limits))


def blanks_kept(frames: Frames, limits: SearchLimits) -> DraftTree:
    """Read frame u as the u-th token, where a blank is one of the tokens.

    The base never writes a blank, so blanks and the nodes below them are then left out; with them, as many tokens would
    be accepted.
    """
    symbols, ids = np.column_stack([frames.probs, frames.blank]), np.append(frames.tokens, frames.blank_id)
    tree = searched(symbols, ids, limits)
    paths = map(tree.path_tokens, range(len(tree)))
    return DraftTree.from_paths([path for path in paths if frames.blank_id not in path])


def blanks_dropped(frames: Frames, limits: SearchLimits) -> DraftTree:
    """Read frame u as the u-th token, given that it is not the blank."""
    written = np.maximum(1 - frames.blank, np.finfo(frames.blank.dtype).tiny)
    return searched(frames.probs / written[:, None], frames.tokens, limits)


def paper(frames: Frames, limits: SearchLimits) -> DraftTree:
    """Apply the CTC transform to the most probable frame sequences, including blanks (CTC-drafter, section 3.3).

    It transforms the same tree as `blanks_kept`, and equals the drafter's ``tree: paper`` without its limit ``top_k``
    on the candidates of each frame.
    """
    return paper_trees(Candidates(frames.tokens[None], frames.probs[None], frames.blank[None]), limits)[0]


def exact(frames: Frames, limits: SearchLimits) -> DraftTree:
    """Return the most probable texts, each summed over its frame sequences: the drafter's ``tree: prefix``."""
    return searched(frames.probs, frames.tokens, limits, frames.blank)


Build = Callable[[Frames, SearchLimits], DraftTree]
CROSS_ENTROPY: dict[str, Build] = {"plain": plain, "CTC": transformed}
WAYS: dict[str, dict[str, Build]] = {
    "Medusa": CROSS_ENTROPY,
    "Block": CROSS_ENTROPY,
    "CTC": {"plain, blanks kept": blanks_kept, "plain, blanks dropped": blanks_dropped, "CTC": paper, "prefix": exact},
}


# ---- the table


def fits(arm: Arm) -> bool:
    """Whether an arm has a place in the table: it has no bias between frames, and it merges repeats."""
    options = arm.arguments
    return arm.drafter in WAYS and not options.get("markov_rank") and options.get("merge_repeats", True)


def measure(folder: Path, base: Base, answers: Sequence[GreedyAnswer]) -> dict[str, Any]:
    """Simulate decoding of the base's own answers by an exported drafter, for every way of building the tree.

    The budgets are simulated separately because the transform of a smaller tree is not a part of the transform of a
    larger one. The frames are computed once.

    Returns:
        By way and budget: ``length``, the acceptance length (tokens per base forward, including the bonus token), and
        ``fed``, the number of draft tokens per step.
    """
    drafter: Any = checkpoint.load(folder, base.model.dtype)[0].to(base.model.device)
    ways = WAYS[type(drafter).__name__]
    sums = {(way, budget): np.zeros(3) for way in ways for budget in BUDGETS}  # emitted, steps, fed
    for answer in answers:
        tokens, start = answer.tokens.to(base.model.device), answer.start
        end = len(tokens)
        if end - start < 2:
            continue
        with torch.inference_mode():
            hidden = base.hidden_states(tokens[None], drafter.required_outputs.hidden_layers)[0][0]
        anchors = torch.arange(start, end - 1, device=tokens.device)
        frames, text = frames_at(drafter, hidden, tokens, anchors, base.base_weights), answer.tokens.tolist()
        for (way, budget), counts in sums.items():
            root, limits = start, SearchLimits(budget, end - start, base.eos)
            while root < end - 1:
                tree = ways[way](frames[root - start], limits)
                gained = min(len(tree.follow(text[root + 1 :])) + 1, end - 1 - root)
                counts += (gained, 1, len(tree))
                root += gained
    results: dict[str, Any] = {way: {} for way in ways}
    for (way, budget), (emitted, steps, fed) in sums.items():
        results[way][str(budget)] = {"length": emitted / max(1, steps), "fed": fed / max(1, steps)}
    return results


def repeats(answers: Sequence[GreedyAnswer]) -> float:
    """Return the share of the answers' tokens that repeat the token before, which no merged path can draft."""
    written = [answer.tokens[answer.start - 1 :] for answer in answers]
    return sum(int((text[1:] == text[:-1]).sum()) for text in written) / max(1, sum(len(text) - 1 for text in written))


def result_table(results: Sequence[tuple[Arm, list[Path]]], base: Base, answers: Sequence[GreedyAnswer]) -> ResultTable:
    """Return the acceptance length of every module and way by budget, also relative to the module's first way.

    Args:
        results: Arms that `fits`, and the exported drafters of each, one for each seed.
        base: The base.
        answers: Its own answers.
    """
    columns = [heading for budget in BUDGETS for heading in (f"{budget} nodes", f"fed, {budget}")]
    largest = str(max(BUDGETS))
    headings = ["arm", "draft module", "verify", *columns, f"to plain, {largest}"]
    notes = [f"{repeats(answers):.2%} of the answers' tokens repeat the token before them.", *NOTES]
    table = ResultTable("Acceptance length by draft module and verify", headings, notes=notes)
    for arm, exported in results:
        runs = [
            remembered(folder.parent / "table2.json", [BUDGETS], answers, partial(measure, folder, base, answers))
            for folder in exported
        ]
        first = mean(run[next(iter(run))][largest]["length"] for run in runs)
        for way in runs[0]:
            cells = []
            for size in map(str, BUDGETS):
                cells.append(mean_and_range([run[way][size]["length"] for run in runs]))
                cells.append(f"{mean(run[way][size]['fed'] for run in runs):.1f}")
            last = mean(run[way][largest]["length"] for run in runs)
            table.rows.append([arm.name, MODULES[arm.drafter], way, *cells, f"{last / first:.3f}"])
    return table
