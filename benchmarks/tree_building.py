"""Microseconds to build a draft tree on the host, from the copied candidates to the tree, and what the tree gains."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter as clock

import numpy as np
import torch

from benchmarks.harness import Measured, in_turn, main, show
from drafters import DraftTree
from drafters.learned.ctc import paper_tree, prefix_search
from drafters.learned.trees import best_first

OURS, LABELLED, PLAIN, PAPER, FRAMES = "prefix", "prefix, laws by token", "prefix beam, Python", "paper", "best-first"
Build = Callable[["Frames", int], DraftTree]


class Frames:
    """What comes from the device for one block: k candidates a frame and their probability in every frame.

    The frames are those of a drafter that is fairly sure: a text, stretched over the frames, with blanks.

    Args:
        num_frames: T.
        top_k: k.
        vocab_size: V.
        seed: Of the text and of the doubts.
    """

    def __init__(self, num_frames: int, top_k: int, vocab_size: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        logits = rng.normal(size=(num_frames, vocab_size + 1)) * 1.5 + rng.normal(size=vocab_size + 1) * 1.5
        heard = np.sort(rng.integers(0, num_frames, 8))  # the frame of each of eight tokens
        for frame, token in zip(heard, rng.integers(0, vocab_size, 8), strict=True):
            logits[frame, token] += 15.0
            logits[frame + 1 : frame + 2, token] += 13.0  # it may be heard late, or go on
        logits[:, -1] += 13.0  # the blank
        distribution = np.exp(logits - logits.max(1, keepdims=True))
        distribution /= distribution.sum(1, keepdims=True)
        own = np.argsort(-distribution[:, :-1], axis=1)[:, :top_k]  # (T, k)
        self.tokens = own.ravel()  # (T * k,), a token may stand more than once
        self.probs, self.blank = distribution[:, self.tokens].astype(np.float32), distribution[:, -1].astype(np.float32)
        self.own_probs, self.own = np.take_along_axis(distribution, own, 1).astype(np.float32), own
        self.distributions = (
            np.repeat(self.probs[None], len(self.tokens) + 1, 0),
            np.repeat(self.blank[None], len(self.tokens) + 1, 0),
        )


def prefix_beam(frames: Frames, num_nodes: int) -> DraftTree:
    """The plain route: CTC prefix beam search (Hannun et al., arXiv 1408.2873) over dictionaries, then the tree.

    The beam holds the ``num_nodes`` most probable texts of the frames read so far, and a frame adds only its own k
    tokens. A text is as probable as what the beam has seen enter it; the most probable ones are the tree.
    """
    place = {token: column for column, token in enumerate(frames.tokens.tolist())}
    rows = zip(frames.probs.tolist(), frames.blank.tolist(), frames.own.tolist(), strict=True)
    beam = {(): (1.0, 0.0)}  # text -> b_t, n_t
    entered: dict[tuple[int, ...], float] = {}
    for probs, blank, own in rows:
        after: dict[tuple[int, ...], tuple[float, float]] = {}
        for text, (blank_end, label_end) in beam.items():
            b, n = after.get(text, (0.0, 0.0))
            stay = label_end * probs[place[text[-1]]] if text else 0.0
            after[text] = b + (blank_end + label_end) * blank, n + stay
            for token in own:
                source = blank_end if text and token == text[-1] else blank_end + label_end
                child, enter = (*text, token), source * probs[place[token]]
                b, n = after.get(child, (0.0, 0.0))
                after[child] = b, n + enter
                entered[child] = entered.get(child, 0.0) + enter
        beam = dict(sorted(after.items(), key=lambda pair: -sum(pair[1]))[: num_nodes + 1])
    for text in sorted(entered, key=len):  # rounding must not lift a child above its parent
        entered[text] = min(entered[text], entered.get(text[:-1], 1.0))
    kept: set[tuple[int, ...]] = {()}
    for text in sorted(entered, key=lambda text: (-entered[text], len(text))):
        if len(kept) <= num_nodes and text[:-1] in kept and entered[text] > 0.0:
            kept.add(text)
    return DraftTree.from_paths(sorted(kept - {()}, key=len))


BUILDS: dict[str, Build] = {
    OURS: lambda f, n: prefix_search.search(f.probs, f.blank, f.tokens, n, len(f.blank))[0],
    LABELLED: lambda f, n: prefix_search.search(*f.distributions, f.tokens, n, len(f.blank))[0],
    PAPER: lambda f, n: paper_tree.search(f.own_probs, f.blank, f.own, n, len(f.blank))[0],
    FRAMES: lambda f, n: best_first.search(f.own_probs, f.own, n, len(f.blank))[0],
    PLAIN: prefix_beam,
}
OF_CTC = OURS, LABELLED, PAPER, PLAIN


def tree_building(
    nodes: list[int] = [16, 64, 256],  # noqa: B006
    num_frames: int = 12,
    top_k: int = 10,
    vocab_size: int = 32000,
    num_blocks: int = 10,
    repeats: int = 20,
    out: str | None = None,
) -> None:
    """Time of everything the host does of a draft, after the copy from the device: distinct candidates, search, tree.

    Args:
        nodes: Node budgets M.
        num_frames: T, frames of a block, and depths of the best-first tree.
        top_k: k, candidates of each frame.
        vocab_size: V, the tokens candidates are picked from.
        num_blocks: Blocks of frames, each built by every arm.
        repeats: Builds of every block, each cold and again at once; arms in turn, another one first each time.
        out: Markdown file for the tables.
    """
    if min(num_frames, top_k, num_blocks, *nodes) < 1 or repeats < 2 or vocab_size < top_k:
        raise ValueError("nodes and sizes must be at least 1, repeats at least 2, vocab_size at least top_k")
    blocks = [Frames(num_frames, top_k, vocab_size, seed) for seed in range(num_blocks)]
    elsewhere = np.ones(8 << 20)  # 64 MB; reading it takes a processor's caches away, as the base's forward does
    tables = []
    for num_nodes in nodes:
        seconds: dict[str, list[float]] = {name: [] for name in BUILDS}
        for build in BUILDS.values():
            build(blocks[0], num_nodes)
        title = f"T = {num_frames}, k = {top_k}, M = {num_nodes}"
        cold: dict[str, list[float]] = {name: [] for name in BUILDS}
        for _, item, name in in_turn(list(BUILDS), num_blocks, repeats, title):
            elsewhere.sum()
            for taken in (cold, seconds):
                started = clock()
                BUILDS[name](blocks[item], num_nodes)
                taken[name].append(clock() - started)
        tables.append(_table(title, seconds, cold, blocks, num_nodes))
    tables[-1].notes.append(f"{num_blocks} made-up blocks of frames, {repeats} builds of each, arms in turn. {NOTE}")
    show(tables, torch.device("cpu"), out)


NOTE = (
    f"us = median of all builds; ratio = median of the builds' ratios to {OURS!r} of the same block; IQR = middle half "
    "/ median; cold us = the same right after other memory was read, as after the base's forward; nodes = mean number "
    "of nodes; gain = mean sum of the nodes' prefix probabilities under the frames: the tokens that the drafter itself "
    "expects to be accepted. best-first reads frames as depths, so it has another law."
)


def _table(
    title: str, seconds: dict[str, list[float]], cold: dict[str, list[float]], blocks: list[Frames], num_nodes: int
) -> Measured:
    table = Measured(title, ["arm", "us", "ratio", "IQR", "cold us", "nodes", "gain"])
    for name, taken in seconds.items():
        ratio = median(mine / ours for mine, ours in zip(taken, seconds[OURS], strict=True))
        low, _, high = quantiles(taken, n=4)
        trees = [BUILDS[name](block, num_nodes) for block in blocks]
        gains = [gain(block, tree) for block, tree in zip(blocks, trees, strict=True)] if name in OF_CTC else None
        cells = [name, f"{1e6 * median(taken):.1f}", f"{ratio:.2f}×", f"{(high - low) / median(taken):.0%}"]
        cells += [f"{1e6 * median(cold[name]):.1f}", f"{sum(map(len, trees)) / len(trees):.1f}"]
        table.rows.append([*cells, f"{sum(gains) / len(gains):.3f}" if gains else ""])
    return table


def gain(frames: Frames, tree: DraftTree) -> float:
    """Sum over the nodes of their prefix probabilities, each by the recursion along its own path."""
    total = 0.0
    place = {token: column for column, token in enumerate(frames.tokens.tolist())}
    for node in range(len(tree)):
        path = [place[token] for token in tree.path_tokens(node)]
        blank_end = np.cumprod([1.0, *frames.blank.astype(float)])  # b_t of the root, t = 0..T
        label_end, last, entered = np.zeros_like(blank_end), None, 0.0
        for token in path:
            source = blank_end if token == last else blank_end + label_end
            enter = source[:-1] * frames.probs[:, token]
            blank_end, label_end = np.zeros_like(blank_end), np.zeros_like(blank_end)
            for t, (more, p, none) in enumerate(zip(enter, frames.probs[:, token], frames.blank, strict=True)):
                blank_end[t + 1] = (blank_end[t] + label_end[t]) * none
                label_end[t + 1] = label_end[t] * p + more
            last, entered = token, float(enter.sum())
        total += entered
    return total


if __name__ == "__main__":
    main(tree_building)
