"""Time to build a draft tree on the host from the candidates' probabilities, and the expected gain of the tree."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter as clock

import numpy as np
import torch

from benchmarks.harness import ResultTable, alternate, main, show
from drafters import DraftTree
from drafters.ctc import paper_tree, prefix_search
from drafters.trees import best_first

OURS, BY_TOKEN, PLAIN, PAPER = "prefix", "prefix, distributions by token", "prefix beam, Python", "paper"
BEST_FIRST = "best-first"
Build = Callable[["RandomFrames", int], DraftTree]


class RandomFrames:
    """The data that a device returns for one block: k candidates per frame and their probabilities in every frame.

    They imitate a fairly certain drafter: a text stretched over the frames, with blanks.

    Args:
        num_frames: Number of frames T.
        top_k: Candidates per frame k.
        vocab_size: Vocabulary size V.
        seed: Seed of the text and of the probabilities.
    """

    def __init__(self, num_frames: int, top_k: int, vocab_size: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        logits = rng.normal(size=(num_frames, vocab_size + 1)) * 1.5 + rng.normal(size=vocab_size + 1) * 1.5
        frames = np.sort(rng.integers(0, num_frames, 8))  # the frame of each of eight tokens
        for frame, token in zip(frames, rng.integers(0, vocab_size, 8), strict=True):
            logits[frame, token] += 15.0
            logits[frame + 1 : frame + 2, token] += 13.0  # the token may appear a frame later, or continue
        logits[:, -1] += 13.0  # the blank
        distribution = np.exp(logits - logits.max(1, keepdims=True))
        distribution /= distribution.sum(1, keepdims=True)
        own = np.argsort(-distribution[:, :-1], axis=1)[:, :top_k]  # (T, k)
        self.tokens = own.ravel()  # (T * k,), with duplicates
        self.probs, self.blank = distribution[:, self.tokens].astype(np.float32), distribution[:, -1].astype(np.float32)
        self.own_probs, self.own = np.take_along_axis(distribution, own, 1).astype(np.float32), own
        num_rows = len(self.tokens) + 1  # a bias of zero, in the factors that decoding gets
        self.bias = best_first.Bias(*(np.ones((num_rows, n), np.float32) for n in (num_rows, num_frames)))


def prefix_beam(frames: RandomFrames, num_nodes: int) -> DraftTree:
    """Build the tree by plain CTC prefix beam search (Hannun et al., arXiv 1408.2873) with dictionaries.

    The beam holds the ``num_nodes`` most probable texts of the frames read so far, and a frame can add only its own k
    tokens. The probability of a text is the sum of what has entered it within the beam; the most probable texts form
    the tree.
    """
    place = {token: column for column, token in enumerate(frames.tokens.tolist())}
    rows = zip(frames.probs.tolist(), frames.blank.tolist(), frames.own.tolist(), strict=True)
    beam: dict[tuple[int, ...], tuple[float, float]] = {(): (1.0, 0.0)}  # text -> b_t, n_t
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
    chosen: set[tuple[int, ...]] = {()}
    for text in sorted(entered, key=lambda text: (-entered[text], len(text))):
        if len(chosen) <= num_nodes and text[:-1] in chosen and entered[text] > 0.0:
            chosen.add(text)
    return DraftTree.from_paths(sorted(chosen - {()}, key=len))


BUILDS: dict[str, Build] = {
    OURS: lambda f, n: prefix_search.search(f.probs, f.blank, f.tokens, n, len(f.blank))[0],
    BY_TOKEN: lambda f, n: prefix_search.search(f.probs, f.blank, f.tokens, n, len(f.blank), bias=f.bias)[0],
    PAPER: lambda f, n: paper_tree.search(f.own_probs, f.blank, f.own, n, len(f.blank))[0],
    BEST_FIRST: lambda f, n: best_first.search(f.own_probs, f.own, n, len(f.blank))[0],
    PLAIN: prefix_beam,
}
OF_CTC = OURS, BY_TOKEN, PAPER, PLAIN


def tree_building(
    nodes: list[int] = [16, 64, 256],  # noqa: B006
    num_frames: int = 12,
    top_k: int = 10,
    vocab_size: int = 32000,
    num_blocks: int = 10,
    repeats: int = 20,
    out: str | None = None,
) -> None:
    """Measure the host's part of a draft, after the copy from the device: distinct candidates, search, tree.

    Args:
        nodes: Numbers of nodes M.
        num_frames: Number of frames T of a block, and maximum depth of the best-first tree.
        top_k: Number of candidates k of each frame.
        vocab_size: Vocabulary size V, from which the candidates are chosen.
        num_blocks: Number of blocks of frames; every arm builds each of them.
        repeats: Builds of every block, each with cold caches and then again; the arms alternate.
        out: Markdown file to write the tables to.
    """
    if min(num_frames, top_k, num_blocks, *nodes) < 1 or repeats < 2 or vocab_size < top_k:
        raise ValueError("nodes and sizes must be at least 1, repeats at least 2, vocab_size at least top_k")
    blocks = [RandomFrames(num_frames, top_k, vocab_size, seed) for seed in range(num_blocks)]
    other_memory = np.ones(8 << 20)  # 64 MB; reading it evicts the processor's caches, as the base's forward does
    tables = []
    for num_nodes in nodes:
        seconds: dict[str, list[float]] = {name: [] for name in BUILDS}
        for build in BUILDS.values():
            build(blocks[0], num_nodes)
        title = f"T = {num_frames}, k = {top_k}, M = {num_nodes}"
        cold: dict[str, list[float]] = {name: [] for name in BUILDS}
        for _, item, name in alternate(list(BUILDS), num_blocks, repeats, title):
            other_memory.sum()
            for times in (cold, seconds):
                started = clock()
                BUILDS[name](blocks[item], num_nodes)
                times[name].append(clock() - started)
        tables.append(_table(title, seconds, cold, blocks, num_nodes))
    tables[-1].notes.append(f"{num_blocks} random blocks, {repeats} builds of each, arms alternate. {NOTE}")
    show(tables, torch.device("cpu"), out)


NOTE = (
    f"us = median of all builds; ratio = median of the builds' ratios to {OURS!r} of the same block; IQR = "
    "interquartile range / median; cold us = the same right after other memory was read, as after the base's forward; "
    "nodes = mean number of nodes; gain = mean sum of the nodes' prefix probabilities under the frames: the number of "
    "tokens that the drafter itself expects to be accepted. best-first reads frames as depths, so it has another "
    "distribution."
)


def _table(
    title: str,
    seconds: dict[str, list[float]],
    cold: dict[str, list[float]],
    blocks: list[RandomFrames],
    num_nodes: int,
) -> ResultTable:
    table = ResultTable(title, ["arm", "us", "ratio", "IQR", "cold us", "nodes", "gain"])
    for name, times in seconds.items():
        ratio = median(mine / ours for mine, ours in zip(times, seconds[OURS], strict=True))
        low, _, high = quantiles(times, n=4)
        trees = [BUILDS[name](block, num_nodes) for block in blocks]
        gains = [gain(block, tree) for block, tree in zip(blocks, trees, strict=True)] if name in OF_CTC else None
        cells = [name, f"{1e6 * median(times):.1f}", f"{ratio:.2f}×", f"{(high - low) / median(times):.0%}"]
        cells += [f"{1e6 * median(cold[name]):.1f}", f"{sum(map(len, trees)) / len(trees):.1f}"]
        table.rows.append([*cells, f"{sum(gains) / len(gains):.3f}" if gains else ""])
    return table


def gain(frames: RandomFrames, tree: DraftTree) -> float:
    """Return the sum of the nodes' prefix probabilities, each computed by the recursion along its path."""
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
