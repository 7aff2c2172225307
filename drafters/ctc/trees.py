"""The CTC drafter's other trees: the paper's own, and trees drawn from the frames for exact rejection sampling."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from drafters.ctc.reference import collapse
from drafters.tree import ROOT, ChildDistribution, DraftTree, Growth
from drafters.trees.search import Candidates, SearchLimits, search

# ---- the paper's tree

BLANK = -1  # in a tree over frames


def paper_trees(candidates: Candidates, limits: SearchLimits) -> list[DraftTree]:
    """The texts of the most probable frame sequences, as many as fit into ``num_nodes`` nodes (CTC-drafter, section 3).

    The probability of a frame sequence is the product of the tokens or blanks that it chooses. All of them have T
    frames, as "all the raw sequences keep the same length" (section 3.1); only the last one is cut where the tree is
    full. This tree over frames is collapsed and then pruned. Unlike in the original code the result is a tree of texts:
    neither blanks nor duplicates are fed, and a node's depth is its position in the text. Merged paths waste node
    budget, so usually fewer than ``num_nodes`` nodes are fed.
    """
    tokens, frames = with_blank(candidates)
    # A node then counts with the probability of its best completion, in units of the best sequence's.
    best_completions = Candidates(tokens, frames / frames.max(2, keepdims=True))
    raw_trees = search(best_completions, SearchLimits(limits.num_nodes, frames.shape[1]))
    trees = (ctc_transform(tree, BLANK) for tree in raw_trees)
    return [tree.pruned(limits.max_depth, limits.num_nodes, limits.eos) for tree in trees]


def with_blank(candidates: Candidates) -> tuple[np.ndarray, np.ndarray]:
    """The symbols (A, C + 1) of CTC frames, with `BLANK` as the last, and their probabilities (A, T, C + 1)."""
    tokens, probs, blank, _ = candidates
    assert blank is not None, "the paper's tree has blanks"
    symbols = np.append(tokens, np.full((len(tokens), 1), BLANK), axis=1)
    return symbols, np.concatenate([probs, blank[..., None]], axis=2)


def ctc_transform(tree: DraftTree, blank: int | None = None) -> DraftTree:
    """The CTC transform of a tree over frames: on every path, repeats are merged, then blanks dropped.

    Paths with the same text become one path. The root is no frame, so the first token may repeat it.

        the ─┬─ the ── cat        becomes        the ─┬─ cat
             └─ ε ──── the                            └─ the
    """
    texts = Growth()
    end_of_text = {ROOT: ROOT}  # for each node, the new node at which the text of its path ends
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        end_of_text[node] = end_of_text[parent]
        if token != blank and (parent == ROOT or token != tree.tokens[parent]):
            end_of_text[node] = texts.child(end_of_text[parent], token)
    return DraftTree(texts.tokens, texts.parents)


# ---- drawn trees

TokenBias = Callable[[Tensor], Tensor]
"""Maps tokens (N,) to B[l, :] (N, V + 1), which is added to a frame's logits if l is the last emitted token.

It is called while sampling and again for the distributions, in batches of other sizes: compute it in float32 at least.
"""


def draw(
    logits: Tensor,
    root: int,
    num_texts: int,
    limits: SearchLimits,
    generator: np.random.Generator,
    bias: TokenBias | None = None,
    temperature: float = 1.0,
) -> DraftTree:
    """Sample texts independently and merge them into one tree.

    A text whose frames are sampled one by one and then collapsed is an exact sample from the distribution q of
    `drafters.ctc.reference`. The texts that pass through a node and continue are independent samples from
    q(. | node) / (1 - stop(node)). That is the distribution of the node's children, drawn with replacement, for
    multi-round rejection. The texts are copied to the host once.

    The tree stays within its limits itself. Pruning it later (`DraftTree.pruned`) would keep or drop a sample by its
    value, which is not lossless.

    The logits of the frames (T, V + 1) have the blank last. The random generator must be independent of the one that
    acceptance uses; N texts take T * N numbers from it. The bias on a frame's logits depends on the last emitted token,
    which is the root at first. The temperature divides logits and biases.
    """
    logits = logits.double() / temperature
    tempered: TokenBias | None = None
    if bias is not None:
        tempered = lambda tokens: bias(tokens).double() / temperature  # noqa: E731
    uniforms = torch.from_numpy(generator.random((len(logits), num_texts))).to(logits.device)
    symbols = sample_alignments(logits, tempered, root, uniforms).cpu()
    texts = [collapse(frames, logits.shape[1] - 1) for frames in symbols]
    tree, draws = merge(texts, limits)
    if not draws:
        return DraftTree()
    index = {node: prefix for prefix, node in enumerate(draws)}  # nodes with children, the root first
    last = [root if node == ROOT else tree.tokens[node] for node in draws]
    above = [ROOT if node == ROOT else index[tree.parents[node]] for node in draws]
    last, above = torch.tensor([last, above]).to(logits.device)
    _, distribution = prefix_distributions(logits, last, above, tempered(last) if tempered else None)
    distribution = distribution / distribution.sum(-1, keepdim=True)  # given that the text continues
    pairs = zip(draws.items(), distribution, strict=True)
    distributions = (ChildDistribution(node, probs, tuple(children)) for (node, children), probs in pairs)
    return DraftTree(tree.tokens, tree.parents, distributions=tuple(distributions))


def sample_alignments(logits: Tensor, bias: TokenBias | None, root: int, uniforms: Tensor) -> Tensor:
    """Sample the frames of N texts by inverse CDF, each frame given the last emitted token.

    Takes logits (T, V + 1), the token of the root, and random numbers (T, N) in [0, 1). Returns symbols (N, T).
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


def merge(texts: Sequence[Sequence[int]], limits: SearchLimits) -> tuple[Growth, dict[int, list[int]]]:
    """Merge sampled texts into a tree, text by text.

    A sample is left out only for reasons known before it was drawn: its depth, an end-of-sequence token above it, or a
    full tree. In a full tree even a sample that is in the tree already no longer counts, because another token could
    not have counted. Beside the tree, returns the sampled children of each node that has any, the root first.
    """
    merged = Growth()
    draws: dict[int, list[int]] = {}
    for text in texts:
        node = ROOT
        for token in text[: max(limits.max_depth, 0)]:
            if len(merged.tokens) >= limits.num_nodes:
                return merged, draws
            child = merged.child(node, token)
            draws.setdefault(node, []).append(child)
            if token in limits.eos:
                break
            node = child
    return merged, draws


# ---- the exact distribution of drawn texts


def prefix_distributions(
    logits: Tensor, tokens: Tensor, parents: Tensor, biases: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """P(the text begins with g) (G,) and q(c | g) of every token c (G, V), for G texts g at once.

    This is the recursion of `drafters.ctc.reference`, in float64 as a probability is a product over all frames. The
    distributions softmax(z_t + B[l]) are products of two factors divided by their inner products, so that (G, T, V) is
    never stored.

    Args:
        logits: (T, V + 1) z_t, the blank last.
        tokens: (G,) the last token of each text. Text 0 is the empty one, and its token the root.
        parents: (G,) the index of each text without its last token; that of text 0 is ignored.
        biases: (G, V + 1) B[l] after each of these tokens; 0 by default.
    """
    logits = logits.double()
    biases = logits.new_zeros(1, logits.shape[1]) if biases is None else biases.double()
    frames, factors = ((x - x.amax(-1, keepdim=True)).exp() for x in (logits, biases))  # (T, V + 1), (G, V + 1)
    factors = factors.expand(len(tokens), -1)
    totals = factors @ frames.T  # (G, T)

    def at(texts: Tensor, symbols: Tensor) -> Tensor:
        """p_t(symbol | last token of the text) for N pairs of a text's index and a symbol: (N, T)."""
        return frames[:, symbols].T * factors[texts, symbols][:, None] / totals[texts]

    texts, parents = torch.arange(len(tokens), device=tokens.device), parents.clamp(min=0)
    enter, stay = at(parents, tokens), at(texts, tokens)  # p_t(c | l), p_t(c | c)
    enter[0] = 0.0
    blank = at(texts, torch.full_like(tokens, logits.shape[1] - 1))
    enters_from_label = (tokens != tokens[parents]).to(enter)
    blank_end, label_end = enter.new_zeros(2, len(frames) + 1, len(tokens))  # b_t and n_t, t = 0..T
    blank_end[0, 0] = 1.0
    begins = enter.new_zeros(len(tokens))
    for t in range(len(frames)):
        b, n = blank_end[t], label_end[t]
        entering = enter[:, t] * (b[parents] + enters_from_label * n[parents])
        begins = begins + entering
        label_end[t + 1] = stay[:, t] * n + entering
        blank_end[t + 1] = blank[:, t] * (b + n)
    begins[0] = 1.0
    blank_before, label_before = blank_end[:-1].T, label_end[:-1].T  # (G, T)
    continued = ((blank_before + label_before) / totals) @ frames * factors  # (G, V + 1): P(the text begins with g.c)
    continued[texts, tokens] = (stay * blank_before).sum(-1)  # a repetition enters from a blank alone
    return begins, continued[:, :-1] / begins[:, None]
