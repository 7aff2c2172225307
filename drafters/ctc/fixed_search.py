"""CTC prefix search of fixed shape in torch: tensors in, tensors out, without a copy to the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from drafters.tree import ROOT, DraftTree


class PrefixTree(NamedTuple):
    """A draft tree on the device: its nodes, the most probable first, then empty places.

    Args:
        tokens: (M,) token of each node; 0 at empty places.
        parents: (M,) index of each node's parent, or `ROOT`.
        log_probs: (M,) log-probability of each prefix; -inf at empty places.
    """

    tokens: Tensor
    parents: Tensor
    log_probs: Tensor

    def on_host(self) -> DraftTree:
        """Copy the tree to the host."""
        table = torch.stack([self.tokens.double(), self.parents.double(), self.log_probs]).tolist()
        nodes = [node for node in zip(*table, strict=True) if node[2] > float("-inf")]
        return DraftTree([int(token) for token, _, _ in nodes], [int(parent) for _, parent, _ in nodes])


class _Beam(NamedTuple):
    """Prefixes of equal length, W of them.

    Args:
        tokens: (W,) the candidate that each ends with; C at the root.
        probs: (W,) prefix probabilities; 0 at empty places.
        blank_end: (W, T + 1) b_t of `prefix_search.search`, t = 0..T.
        label_end: (W, T + 1) n_t.
    """

    tokens: Tensor
    probs: Tensor
    blank_end: Tensor
    label_end: Tensor


def search(
    probs: Tensor,
    blank: Tensor,
    tokens: Tensor,
    num_nodes: int,
    max_depth: Tensor,
    eos: Tensor,
    min_probability: float = 0.0,
    factors: Tensor | None = None,
    scales: Tensor | None = None,
    is_chain: bool = False,
    merge_repeats: bool = True,
) -> PrefixTree:
    """The tree that `prefix_search.search` finds, or the path of `prefix_search.chain`, by operations of fixed shape.

    Level by level, the ``num_nodes`` most probable children of the prefixes kept at the level above are kept, and in
    the end the most probable prefixes of all levels: a prefix is at most as probable as its parent, so none of them is
    missed. Nothing depends on the values of a tensor, so the search can be compiled and captured by CUDA graphs, and
    `torch.vmap` runs it for several drafts. It computes the very numbers of the search on the host; only among exactly
    equal probabilities may the order differ, and with it which of them still enter the tree. It was not run on a GPU
    yet.

    Args:
        probs: (T, C) probability of each candidate in each frame, float32 or float64.
        blank: (T,) that of the blank.
        tokens: (C,) ids of the candidates; if a token occurs more than once, its first occurrence counts.
        num_nodes: Node budget M.
        max_depth: () largest depth of a node.
        eos: (E,) end-of-sequence tokens; nothing is drafted below them.
        min_probability: Prefixes less probable than this are left out.
        factors: (C + 1, C + 1) as in `best_first.Bias`, the blank last; given together with ``scales``.
        scales: (C + 1, T) as in `best_first.Bias`.
        is_chain: Whether to keep only the most probable child of each prefix.
        merge_repeats: As in `alignment.collapse`.
    """
    num_frames, num_candidates = probs.shape
    if factors is None or scales is None:
        factors = probs.new_ones(num_candidates + 1, num_candidates + 1)
        scales = probs.new_ones(num_candidates + 1, num_frames)
    repeated = (tokens == tokens[:, None]).tril(-1).any(1)
    ends = torch.cat([(tokens[:, None] == eos).any(1), eos.new_zeros(1, dtype=torch.bool)])  # the root ends nothing
    width = 1 if is_chain else num_nodes

    beam = _root(blank, factors, scales)
    first = 0  # index of the beam's first node among all nodes found
    places = torch.full_like(beam.tokens, ROOT)  # of the beam's nodes
    levels: list[tuple[Tensor, Tensor, Tensor]] = []
    for depth in range(num_frames):
        scores = _child_probs(beam, probs, factors, scales, merge_repeats).masked_fill(repeated, 0.0)
        scores = scores.masked_fill((ends[beam.tokens] | (depth >= max_depth))[:, None], 0.0)
        best, order = scores.flatten().sort(descending=True, stable=True)
        best, order = best[:width], order[:width]
        parents, children = order // num_candidates, order % num_candidates
        levels.append((children, places[parents], best))
        beam = _children(beam, parents, children, best, probs, blank, factors, scales, merge_repeats)
        places = first + torch.arange(len(best), device=probs.device)
        first += len(best)
    children, parents, found = (torch.cat(part) for part in zip(*levels, strict=True))
    return _best_nodes(tokens[children], parents, found, num_nodes, min_probability)


def _root(blank: Tensor, factors: Tensor, scales: Tensor) -> _Beam:
    """The empty prefix: all frames so far were blanks."""
    none = (blank * factors[-1, -1] * scales[-1]).double()
    blank_end = [none.new_ones(())]
    for probability in none:
        blank_end.append(blank_end[-1] * probability)
    row = torch.stack(blank_end)[None]
    token = torch.full((1,), len(factors) - 1, device=blank.device)
    return _Beam(token, row.new_ones(1), row, torch.zeros_like(row))


def _child_probs(beam: _Beam, probs: Tensor, factors: Tensor, scales: Tensor, merge_repeats: bool) -> Tensor:
    """Prefix probability (W, C) of each child: the sum over the frames in which it may be emitted first."""
    num_frames, num_candidates = probs.shape
    is_root = beam.tokens == num_candidates
    own = beam.tokens.clamp(max=num_candidates - 1)  # its column; the root has none
    before, blanks = (beam.blank_end + beam.label_end)[:, :-1], beam.blank_end[:, :-1]
    sources = before * scales[beam.tokens]  # (W, T)
    scores, repeat_scores = sources.new_zeros(len(own), num_candidates), sources.new_zeros(len(own), 1)
    for frame in range(num_frames):  # in this order, as the search on the host adds
        scores = scores + sources[:, frame : frame + 1] * probs[frame]
    if merge_repeats:  # then a repetition has to follow a blank
        repeats = blanks * scales[beam.tokens] * probs.T[own]
        for frame in range(num_frames):
            repeat_scores = repeat_scores + repeats[:, frame : frame + 1]
        is_repetition = (own[:, None] == torch.arange(num_candidates, device=own.device)) & ~is_root[:, None]
        scores = torch.where(is_repetition, repeat_scores, scores)
    scores = scores * factors[beam.tokens, :num_candidates]
    return scores.minimum(beam.probs[:, None])  # rounding must not lift a child above its parent


def _children(
    beam: _Beam,
    parents: Tensor,
    children: Tensor,
    found: Tensor,
    probs: Tensor,
    blank: Tensor,
    factors: Tensor,
    scales: Tensor,
    merge_repeats: bool,
) -> _Beam:
    """The beam (W) of some children of another beam, with their b_t and n_t."""
    above, own_probs = beam.tokens[parents], probs.T[children]  # (W,), (W, T)
    # Where equal neighbours are merged, a repetition has to enter from a blank.
    repeats = (above == children)[:, None] & merge_repeats
    source = beam.blank_end[parents] + beam.label_end[parents].masked_fill(repeats, 0.0)
    enter = source[:, :-1] * own_probs * factors[above, children][:, None] * scales[above]
    stay = (own_probs * factors[children, children][:, None] * scales[children]).double() * merge_repeats
    none = (blank * factors[children, -1][:, None] * scales[children]).double()
    blank_end = [torch.zeros_like(found)]
    label_end = [torch.zeros_like(found)]
    for frame in range(len(probs)):
        blank_end.append((blank_end[-1] + label_end[-1]) * none[:, frame])
        label_end.append(label_end[-1] * stay[:, frame] + enter[:, frame])
    return _Beam(children, found, torch.stack(blank_end, 1), torch.stack(label_end, 1))


def _best_nodes(tokens: Tensor, parents: Tensor, found: Tensor, num_nodes: int, min_probability: float) -> PrefixTree:
    """The most probable nodes of all levels (N,); parents are indices among the N nodes."""
    missing = num_nodes - len(found)
    if missing > 0:
        tokens, found = (torch.nn.functional.pad(each, (0, missing)) for each in (tokens, found))
        parents = torch.nn.functional.pad(parents, (0, missing), value=ROOT)
    best, order = found.sort(descending=True, stable=True)
    best, order = best[:num_nodes], order[:num_nodes]
    is_node = (best > 0) & (best >= min_probability)
    place = torch.full((len(found) + 1,), ROOT, device=found.device)  # the last entry is the root's, whose index is -1
    place = place.scatter(0, order, torch.arange(num_nodes, device=found.device))
    empty = torch.zeros_like(order)
    return PrefixTree(
        torch.where(is_node, tokens[order], empty),
        torch.where(is_node, place[parents[order]], empty + ROOT),
        torch.where(is_node, best, 0.0).log(),
    )
