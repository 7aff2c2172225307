"""Draft trees sampled from the CTC's own distribution, with the distributions that exact rejection needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from drafters.ctc.alignment import collapse
from drafters.ctc.distributions import FrameDistributions, next_token_distribution, spell
from drafters.tree import ROOT, ChildDistribution, DraftTree

Bias = Callable[[Tensor], Tensor]
"""Maps tokens (N,) to B[l, :] (N, V + 1), which is added to a frame's logits if l is the last emitted token.

It is called while sampling and again for the distributions, in batches of other sizes: compute it in float32 at least.
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
    merge_repeats: bool = True,
) -> DraftTree:
    """Sample texts independently and merge them into one tree.

    A text whose frames are sampled one by one and then collapsed is an exact sample from the distribution of
    `distributions.next_token_distribution`. The texts that pass through a node and continue are independent samples
    from q(. | node) / (1 - stop(node)). That is the distribution of the node's children, drawn with replacement, for
    multi-round rejection. The texts are copied to the host once.

    The tree stays within its limits itself. Pruning it later (`DraftTree.pruned`) would keep or drop a sample by its
    value, which is not lossless.

    Args:
        logits: (T, V + 1) logits of the frames, the blank last.
        bias: Bias on each frame's logits given the last emitted token, which is the root at first; None for none.
        root: Token of the root. The number of the blank stands for a root that cannot be drafted.
        num_texts: Number of texts N.
        max_nodes: Largest number of nodes.
        max_depth: Largest depth of a node.
        eos: End-of-sequence tokens; nothing is drafted below them.
        generator: Random generator, independent of the one that acceptance uses. T * N numbers are taken from it.
        temperature: Divides logits and biases.
        merge_repeats: As in `alignment.collapse`.

    Raises:
        ValueError: There is no text, or the temperature is not above 0.
    """
    if num_texts < 1 or not temperature > 0:
        raise ValueError(f"need num_texts >= 1 and temperature > 0, not {num_texts} and {temperature}")
    logits = logits.double() / temperature

    tempered: Bias | None = None
    if bias is not None:
        tempered = lambda tokens: bias(tokens).double() / temperature  # noqa: E731

    uniforms = torch.from_numpy(generator.random((len(logits), num_texts))).to(logits.device)
    symbols = sample_alignments(logits, tempered, root, uniforms).cpu()
    texts = [collapse(frames, logits.shape[1] - 1, merge_repeats) for frames in symbols]
    tokens, parents, draws = merge(texts, max_nodes, max_depth, eos)
    if not draws:
        return DraftTree()
    index = {node: prefix for prefix, node in enumerate(draws)}  # nodes with children, the root first
    last = [root if node == ROOT else tokens[node] for node in draws]
    above = [ROOT if node == ROOT else index[parents[node]] for node in draws]
    last, above = torch.tensor([last, above]).to(logits.device)
    frames = FrameDistributions(logits, tempered(last) if tempered else None)
    distribution = next_token_distribution(frames, spell(frames, last, above, merge_repeats))
    distribution = distribution / distribution.sum(-1, keepdim=True)  # given that the text continues
    distributions = (
        ChildDistribution(node, probs, tuple(children))
        for (node, children), probs in zip(draws.items(), distribution, strict=True)
    )
    return DraftTree(tokens, parents, distributions=tuple(distributions))


def sample_alignments(logits: Tensor, bias: Bias | None, root: int, uniforms: Tensor) -> Tensor:
    """Sample the frames of N texts by inverse CDF, each frame given the last emitted token.

    Args:
        logits: (T, V + 1) logits of the frames, the blank last.
        bias: As in `draw`.
        root: Last token while nothing is emitted.
        uniforms: (T, N) random numbers in [0, 1).

    Returns:
        (N, T) symbols; V is the blank.
    """
    blank = logits.shape[1] - 1
    if bias is None:
        return _inverse_cdf(logits.softmax(-1), uniforms).T
    last = torch.full_like(uniforms[0], root, dtype=torch.long)  # (N,)
    symbols = []
    for frame, uniform in zip(logits, uniforms, strict=True):
        symbols.append(_inverse_cdf((frame + bias(last)).softmax(-1), uniform[:, None])[:, 0])
        last = torch.where(symbols[-1] == blank, last, symbols[-1])
    return torch.stack(symbols, dim=1)


def _inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The symbols (R, N) at which the cumulative distributions (R, V + 1) exceed random numbers (R, N)."""
    cumulative = probs.cumsum(-1)
    symbols = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return symbols.clamp(max=probs.shape[-1] - 1)


def merge(
    texts: Sequence[Sequence[int]], max_nodes: int, max_depth: int, eos: Collection[int]
) -> tuple[list[int], list[int], dict[int, list[int]]]:
    """Merge sampled texts into a tree, text by text.

    A sample is left out only for reasons known before it was drawn: its depth, an end-of-sequence token above it, or a
    full tree. In a full tree even a sample that is in the tree already no longer counts, because another token could
    not have counted.

    Returns:
        Tokens and parents of the nodes, and the sampled children of each node that has any, the root first.
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
