"""The CTC paper's Table 2 (section 4.3): the effects of the draft module and of the CTC transform, separately.

Rows are draft modules: linear heads + cross-entropy (Medusa), transformer + CTC, and transformer + cross-entropy
(Block), which the paper lacks. Columns are two ways to read the distributions of the frames that a module predicts:

- plain tree verify: frame u is the u-th next token, and the most probable combinations form the tree. The frames of a
  CTC module also contain blanks. The paper leaves them in the tree, although the base never writes a blank, so a blank
  and all nodes below it are wasted (``blanks kept``). A milder reading gives the blank's probability to the tokens of
  its frame (``blanks dropped``). In both, repeated frames remain errors.
- CTC verify: on every path of the tree, repeats are merged, then blanks dropped, and paths with the same text become
  one. For a module without a blank, this also removes the repeats of the text itself: "0 0" can no longer be drafted.

The last row of a CTC module, exact prefix search, spends the budget on texts from the start. The original code verifies
with the positions from before the transform and is not lossless. Here, all ways produce a tree of texts: without
blanks, with distinct siblings, and with each node's depth as its position in the text. So the same verifier takes them
all, and emits the text of plain decoding. ``benchmarks.learned_drafters --table2`` makes the table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
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
    "plain: frame u is token u. blanks kept: blanks are nodes, as in the paper; they and the nodes below them count in "
    "the budget and are not fed. blanks dropped: a blank's probability goes to the tokens of its frame. CTC: on every "
    "path of the plain tree, repeats are merged, then blanks dropped: the method of the paper for transformer + CTC. "
    "prefix: exact prefix search; the paper has no such row.",
    "Nodes are counted before the transform, as in the paper, whose removed nodes stay in the batch; fed counts the "
    "nodes that are left. Each budget is simulated separately.",
    "The paper (Vicuna-7B, MT-Bench, its own count of tokens per step): linear layers + cross-entropy 2.58 plain, 2.38 "
    "with CTC verify; transformer + CTC 3.02 plain, 3.56 with CTC verify.",
]


@dataclass(frozen=True)
class Frames:
    """The distributions of one draft's T frames on the host, restricted to the candidates for its tree.

    Args:
        probs: (T, C) probabilities.
        tokens: (T, C) token ids, or (C,) if all frames have the same candidates.
        blank: (T,) probability of the blank; empty if the drafter has no blank.
        blank_id: V, the id of the blank, after the vocabulary.
    """

    probs: np.ndarray
    tokens: np.ndarray
    blank: np.ndarray = field(default_factory=lambda: np.empty(0))
    blank_id: int = -1


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


# ---- ways to make a draft tree from frames, a node budget, a maximum depth and the EOS tokens


def searched(probs: np.ndarray, tokens: np.ndarray, limits: SearchLimits, blank: np.ndarray | None = None) -> DraftTree:
    """The tree of one draft; with a blank, of CTC frames."""
    return search(Candidates(tokens[None], probs[None], None if blank is None else blank[None]), limits)[0]


def plain(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """Read frame u as the u-th token; the most probable paths form the tree."""
    return searched(frames.probs, frames.tokens, SearchLimits(num_nodes, max_depth, eos))


def transformed(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """Apply the CTC transform to `plain`, for frames without a blank."""
    return collapsed(plain(frames, num_nodes, max_depth, eos))


def blanks_kept(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """Read frame u as the u-th token, where a blank is one of the tokens.

    The base never writes a blank, so blanks and the nodes below them are then left out; with them, as many tokens would
    be accepted.
    """
    symbols, ids = np.column_stack([frames.probs, frames.blank]), np.append(frames.tokens, frames.blank_id)
    tree = searched(symbols, ids, SearchLimits(num_nodes, max_depth, eos))
    paths = map(tree.path_tokens, range(len(tree)))
    return DraftTree.from_paths([path for path in paths if frames.blank_id not in path])


def blanks_dropped(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """Read frame u as the u-th token, given that it is not the blank."""
    written = np.maximum(1 - frames.blank, np.finfo(frames.blank.dtype).tiny)
    return searched(frames.probs / written[:, None], frames.tokens, SearchLimits(num_nodes, max_depth, eos))


def paper(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """Apply the CTC transform to the most probable frame sequences, including blanks (CTC-drafter, section 3.3).

    It transforms the same tree as `blanks_kept`, and equals the drafter's ``tree: paper`` without its limit ``top_k``
    on the candidates of each frame.
    """
    candidates = Candidates(frames.tokens[None], frames.probs[None], frames.blank[None])
    return paper_trees(candidates, SearchLimits(num_nodes, max_depth, eos))[0]


def exact(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """Return the most probable texts, each summed over its frame sequences: the drafter's ``tree: prefix``."""
    return searched(frames.probs, frames.tokens, SearchLimits(num_nodes, max_depth, eos), frames.blank)


Build = Callable[[Frames, int, int, Collection[int]], DraftTree]
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


def measure(
    drafter: Medusa | Block | CTC, base: Base, answers: Sequence[GreedyAnswer], budgets: Sequence[int]
) -> dict[str, dict[str, dict[str, float]]]:
    """Simulate decoding of the base's own answers for every way of building the tree and every budget.

    The budgets are simulated separately because the transform of a smaller tree is not a part of the transform of a
    larger one. The frames are computed once.

    Returns:
        By way and budget: ``length``, the acceptance length (tokens per base forward, including the bonus token), and
        ``fed``, the number of draft tokens per step.
    """
    ways = WAYS[type(drafter).__name__]
    sums = {(way, budget): np.zeros(3) for way in ways for budget in budgets}  # emitted, steps, fed
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
            root = start
            while root < end - 1:
                tree = ways[way](frames[root - start], budget, end - start, base.eos)
                gained = min(len(tree.follow(text[root + 1 :])) + 1, end - 1 - root)
                counts += (gained, 1, len(tree))
                root += gained
    results: dict[str, dict[str, dict[str, float]]] = {way: {} for way in ways}
    for (way, budget), (emitted, steps, fed) in sums.items():
        results[way][str(budget)] = {"length": emitted / max(1, steps), "fed": fed / max(1, steps)}
    return results


def measure_exported(
    folder: Path, base: Base, answers: Sequence[GreedyAnswer], budgets: Sequence[int]
) -> dict[str, Any]:
    """`measure` an exported drafter; the results are stored in ``table2.json`` next to it."""

    def load_and_measure() -> dict[str, Any]:
        drafter: Any = checkpoint.load(folder, base.model.dtype)[0].to(base.model.device)
        return measure(drafter, base, answers, budgets)

    return remembered(folder.parent / "table2.json", [list(budgets)], answers, load_and_measure)


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
        runs = [measure_exported(folder, base, answers, BUDGETS) for folder in exported]
        first = mean(run[next(iter(run))][largest]["length"] for run in runs)
        for way in runs[0]:
            cells = []
            for size in map(str, BUDGETS):
                cells.append(mean_and_range([run[way][size]["length"] for run in runs]))
                cells.append(f"{mean(run[way][size]['fed'] for run in runs):.1f}")
            last = mean(run[way][largest]["length"] for run in runs)
            table.rows.append([arm.name, MODULES[arm.drafter], way, *cells, f"{last / first:.3f}"])
    return table
