"""Draft trees drawn from a CTC's own law, with the laws that exact rejection needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from drafters.learned.ctc.alignment import collapse
from drafters.learned.ctc.distributions import FrameDistributions, next_token_distribution, reach
from drafters.tree import ROOT, ChildDistribution, DraftTree

Bias = Callable[[Tensor], Tensor]
"""Maps tokens (N,) to B[l, :] (N, V + 1), what is added to a frame's logits where l is the last token emitted.

It is asked while drawing and again for the laws, in batches of other sizes: compute it in float32 at least.
"""


def draw(
    logits: Tensor,
    bias: Bias | None,
    root: int,
    num_texts: int,
    max_nodes: int,
    max_depth: int,
    eos: Collection[int],
    generator: np.random.Generator,
    temperature: float = 1.0,
) -> DraftTree:
    """Draw texts independently and merge them into one tree.

    Frame by frame and then collapsed, a text is an exact draw from the
    distribution of `distributions.next_token_distribution`. The texts that
    pass through a node and go on hold independent draws from q(. | node) / (1 - stop(node)): that is the law of its
    children, with replacement, for multi-round rejection. The texts are copied to the host once.

    The tree keeps to its limits itself. `DraftTree.pruned` with fewer nodes would keep or drop a draw by its value,
    which is not lossless.

    Args:
        logits: (T, V + 1) of the frames, the blank last.
        bias: Of each frame's logits, given the last token emitted before it, the root at first.
        root: Token of the root.
        num_texts: Texts drawn, N.
        max_nodes, max_depth: Limits of the tree.
        eos: Tokens below which nothing is drafted.
        generator: Owes nothing to the base's own numbers. Takes T * N of them.
        temperature: Divides logits and biases.

    Raises:
        ValueError: No text, or a temperature of zero or less.
    """
    if num_texts < 1 or not temperature > 0:
        raise ValueError(f"need num_texts >= 1 and temperature > 0, not {num_texts} and {temperature}")
    logits = logits.double() / temperature

    def tempered(tokens: Tensor) -> Tensor:
        return bias(tokens).double() / temperature

    uniforms = torch.from_numpy(generator.random((len(logits), num_texts))).to(logits.device)
    symbols = alignments(logits, tempered if bias else None, root, uniforms).cpu()
    texts = [collapse(frames, blank=logits.shape[1] - 1) for frames in symbols]
    tokens, parents, draws = merge(texts, max_nodes, max_depth, eos)
    if not draws:
        return DraftTree()
    index = {node: prefix for prefix, node in enumerate(draws)}  # nodes with children; the root is first
    last = [root if node == ROOT else tokens[node] for node in draws]
    above = [ROOT if node == ROOT else index[parents[node]] for node in draws]
    last, above = torch.tensor([last, above]).to(logits.device)
    frames = FrameDistributions(logits, tempered(last) if bias else None)
    distribution = next_token_distribution(frames, reach(frames, last, above))
    distribution = distribution / distribution.sum(-1, keepdim=True)  # those that go on
    distributions = (
        ChildDistribution(node, probs, tuple(children))
        for (node, children), probs in zip(draws.items(), distribution, strict=True)
    )
    return DraftTree(tokens, parents, distributions=tuple(distributions))


def alignments(logits: Tensor, bias: Bias | None, root: int, uniforms: Tensor) -> Tensor:
    """Draw the frames of N texts by inverse CDF, each frame given the last token emitted before it.

    Args:
        logits: (T, V + 1). bias: As in `draw`. root: Last token while nothing is emitted.
        uniforms: (T, N) numbers in [0, 1).

    Returns:
        (N, T) symbols, V is the blank.
    """
    blank = logits.shape[1] - 1
    if bias is None:
        return _inverse(logits.softmax(-1), uniforms).T
    last = torch.full_like(uniforms[0], root, dtype=torch.long)  # (N,)
    symbols = []
    for frame, uniform in zip(logits, uniforms, strict=True):
        symbols.append(_inverse((frame + bias(last)).softmax(-1), uniform[:, None])[:, 0])
        last = torch.where(symbols[-1] == blank, last, symbols[-1])
    return torch.stack(symbols, dim=1)


def _inverse(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The symbols (R, N) at numbers (R, N) of the distributions (R, V + 1)."""
    cumulative = probs.cumsum(-1)
    symbols = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return symbols.clamp(max=probs.shape[-1] - 1)


def merge(
    texts: Sequence[Sequence[int]], max_nodes: int, max_depth: int, eos: Collection[int]
) -> tuple[list[int], list[int], dict[int, list[int]]]:
    """Merge drawn texts into a tree, text by text.

    A draw is left out only for what was known before it: its depth, an end token above it, a full tree. In a full
    tree even a draw that is there already counts no more: had it been another token it could not have counted.

    Returns:
        Tokens and parents of the nodes, and the draws at each node that has some, the root first.
    """
    tokens: list[int] = []
    parents: list[int] = []
    draws: dict[int, list[int]] = {}
    index: dict[tuple[int, int], int] = {}
    for text in texts:
        node = ROOT
        for token in text[: max(max_depth, 0)]:
            if len(tokens) >= max_nodes:
                return tokens, parents, draws
            child = index.setdefault((node, token), len(tokens))
            if child == len(tokens):
                tokens.append(token)
                parents.append(node)
            draws.setdefault(node, []).append(child)
            if token in eos:
                break
            node = child
    return tokens, parents, draws
