"""The CTC drafter's other trees: the paper's own, and trees drawn from the frames for exact rejection sampling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    trees = (collapsed(tree, BLANK) for tree in raw_trees)
    return [tree.pruned(limits.max_depth, limits.num_nodes, limits.eos) for tree in trees]


def with_blank(candidates: Candidates) -> tuple[np.ndarray, np.ndarray]:
    """The symbols (A, C + 1) of CTC frames, with `BLANK` as the last, and their probabilities (A, T, C + 1)."""
    tokens, probs, blank, _ = candidates
    assert blank is not None, "the paper's tree has blanks"
    symbols = np.append(tokens, np.full((len(tokens), 1), BLANK), axis=1)
    return symbols, np.concatenate([probs, blank[..., None]], axis=2)


def collapsed(tree: DraftTree, blank: int | None = None) -> DraftTree:
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
    frames = FrameDistributions(logits, tempered(last) if tempered else None)
    distribution = spell(frames, last, above).next_token_probs()
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


# ---- the exact distribution of drawn texts, by the recursion of `drafters.ctc.reference` for many texts at once


class FrameDistributions:
    """p_t(v | l) = softmax_v(z_t(v) + B[l, v]), the distribution of frame t given the last emitted token l.

    The logits z_t (T, V + 1) have the blank last; the biases B[l_g, :] (G, V + 1) are those after the last tokens of G
    texts, or None if B is 0. The softmax of a sum is the product of two factors divided by their inner product, so
    (G, T, V) is never stored. All is computed in float64: the probability of a text is a product over all frames.
    """

    def __init__(self, logits: Tensor, biases: Tensor | None = None) -> None:
        logits = logits.double()
        self._bias: Tensor | None = None
        if biases is None:
            self._frame = logits.softmax(-1)
            return
        biases = biases.double()
        self._frame = (logits - logits.amax(-1, keepdim=True)).exp()  # (T, V + 1)
        self._bias = (biases - biases.amax(-1, keepdim=True)).exp()  # (G, V + 1)
        self._total = self._bias @ self._frame.T  # (G, T)

    @property
    def num_frames(self) -> int:
        return len(self._frame)

    @property
    def blank(self) -> int:
        """Index of the blank, V."""
        return self._frame.shape[1] - 1

    def at(self, texts: Tensor, symbols: Tensor) -> Tensor:
        """p_t(symbol | last token of the text) for N pairs of a text's index and a symbol: (N, T)."""
        probs = self._frame[:, symbols].T
        if self._bias is None:
            return probs
        return probs * self._bias[texts, symbols][:, None] / self._total[texts]

    def mixed(self, weights: Tensor) -> Tensor:
        """sum_t w_t(g) p_t(v | last token of g) for weights (G, T): (G, V + 1), as one matrix product."""
        if self._bias is None:
            return weights @ self._frame
        return (weights / self._total) @ self._frame * self._bias


@dataclass(frozen=True)
class Spelling:
    """How the frames spell each of G texts."""

    frames: FrameDistributions
    tokens: Tensor  # (G,) last token of each text; that of the empty text is the root
    blank_end: Tensor  # (G, T + 1) b_t for t = 0..T
    label_end: Tensor  # (G, T + 1) n_t
    prefix: Tensor  # (G,) P(the text begins with g)

    def next_token_probs(self) -> Tensor:
        """q(c | g) of every token c, (G, V)."""
        blank_end, label_end = self.blank_end[:, :-1], self.label_end[:, :-1]
        begins = self.frames.mixed(blank_end + label_end)
        texts = torch.arange(len(begins), device=begins.device)
        begins[texts, self.tokens] = (self.frames.at(texts, self.tokens) * blank_end).sum(-1)  # only after a blank
        return begins[:, :-1] / self.prefix[:, None]


def spell(frames: FrameDistributions, tokens: Tensor, parents: Tensor) -> Spelling:
    """Run the recursion for G texts at once; the frames have the biases of these texts, if there are any.

    Takes the last token of each text (G,), and the index (G,) of each text without its last token. Text 0 is the empty
    one: its token is the root, and its parent is ignored.
    """
    texts = torch.arange(len(tokens), device=tokens.device)
    parents = parents.clamp(min=0)
    enter = frames.at(parents, tokens)  # (G, T): p_t(c | l)
    enter[0] = 0.0
    stay = frames.at(texts, tokens)  # p_t(c | c)
    blank = frames.at(texts, torch.full_like(tokens, frames.blank))
    enters_from_label = (tokens != tokens[parents]).to(enter)
    blank_end, label_end = enter.new_zeros(2, frames.num_frames + 1, len(tokens))
    blank_end[0, 0] = 1.0
    prefix = enter.new_zeros(len(tokens))
    for t in range(frames.num_frames):
        b, n = blank_end[t], label_end[t]
        entering = enter[:, t] * (b[parents] + enters_from_label * n[parents])
        prefix = prefix + entering
        label_end[t + 1] = stay[:, t] * n + entering
        blank_end[t + 1] = blank[:, t] * (b + n)
    prefix[0] = 1.0
    return Spelling(frames, tokens, blank_end.T, label_end.T, prefix)
