"""CTC prefix search: the most probable collapsed prefixes of T frames are the draft tree."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from drafters.tree import ROOT, DraftTree


def search(
    probs: np.ndarray,
    blank: np.ndarray,
    tokens: np.ndarray,
    num_nodes: int,
    max_depth: int,
    eos: Collection[int] = (),
    min_probability: float = 0.0,
) -> tuple[DraftTree, np.ndarray]:
    """The ``num_nodes`` most probable prefixes, as a tree whose every node is one of them.

    Prefix probability never grows along a path, so a most probable node has most probable ancestors; going down
    level by level and keeping what still beats the worst of the best ``num_nodes`` found so far is exact.
    The recursion is `alignment.prefix_log_probs`, for all children of a level at once.

    Args:
        probs: (T, C) p_t of each candidate token.
        blank: (T,) p_t of the blank.
        tokens: (C,) ids of the candidates, distinct.
        num_nodes: Node budget M.
        max_depth: Deepest node.
        eos: Tokens below which nothing is drafted.
        min_probability: Prefixes less probable than this are not fed.

    Returns:
        The tree, parents before children, and the (M,) prefix probabilities of its nodes.
    """
    num_frames, num_candidates = probs.shape
    probs, blank = probs.astype(np.float64), blank.astype(np.float64)
    num_nodes = max(num_nodes, 0)
    # through[c, s, t]: frames s..t all hold c;  silent[s, t]: frames s+1..t are all blank
    through = _runs(probs.T)
    silent = np.eye(num_frames + 1)
    silent[:-1, 1:] = _runs(blank)
    np.fill_diagonal(silent, 1.0)

    blank_end = silent[:1]  # (G, T+1) b_t of each open prefix, t = 0..T
    label_end = np.zeros_like(blank_end)  # (G, T+1) n_t
    last = np.full(1, -1)  # (G,) candidate index of the last token
    nodes = np.full(1, ROOT)  # (G,) node of each open prefix
    reached = np.ones(1)  # (G,) its prefix probability
    ends = np.isin(tokens, list(eos))

    found_tokens, found_parents, found_probs = [], [], np.empty(0)
    for _ in range(max_depth):
        before = blank_end[:, :-1] + label_end[:, :-1]
        score = before @ probs  # (G, C) prefix probability of every child
        opened = np.flatnonzero(last >= 0)
        score[opened, last[opened]] = np.einsum("gt,tg->g", blank_end[opened, :-1], probs[:, last[opened]])
        flat = np.minimum(score, reached[:, None]).ravel()  # rounding must not lift a child above its parent
        floor = min_probability
        if len(found_probs) + flat.size > num_nodes:
            everything = np.concatenate([found_probs, flat])
            floor = max(floor, np.partition(everything, everything.size - num_nodes)[-num_nodes] if num_nodes else 2.0)
        chosen = np.flatnonzero((flat >= floor) & (flat > 0.0))
        if not chosen.size:
            break
        chosen = chosen[np.argsort(-flat[chosen], kind="stable")][:num_nodes]
        group, token = np.divmod(chosen, num_candidates)

        first = len(found_tokens)
        found_tokens += tokens[token].tolist()
        found_parents += nodes[group].tolist()
        found_probs = np.concatenate([found_probs, flat[chosen]])

        alive = ~ends[token]
        group, token = group[alive], token[alive]
        nodes, reached = first + np.flatnonzero(alive), flat[chosen][alive]
        repeats = (last[group] == token)[:, None]
        source = blank_end[group, :-1] + np.where(repeats, 0.0, label_end[group, :-1])
        entered = np.matmul(source[:, None, :], through[token])[:, 0]  # (G, T) n_t for t = 1..T
        label_end = np.concatenate([np.zeros((len(token), 1)), entered], axis=1)
        blank_end = label_end @ silent - label_end
        last = token
    return _best(found_tokens, found_parents, found_probs, num_nodes)


def _runs(p: np.ndarray) -> np.ndarray:
    """(..., T) -> (..., T, T): the product of p_s..p_t, zero where t < s."""
    num_frames = p.shape[-1]
    upper = np.triu(np.ones((num_frames, num_frames), dtype=bool))
    return np.cumprod(np.where(upper, p[..., None, :], 1.0), axis=-1) * upper


def _best(tokens: list[int], parents: list[int], probs: np.ndarray, num_nodes: int) -> tuple[DraftTree, np.ndarray]:
    """Cut to the ``num_nodes`` most probable; ties go to the shallower node, so a parent always stays."""
    if len(tokens) <= num_nodes:
        return DraftTree(tokens, parents), probs
    kept = np.sort(np.argsort(-probs, kind="stable")[:num_nodes])
    index = {int(old): new for new, old in enumerate(kept)} | {ROOT: ROOT}
    tree = DraftTree([tokens[node] for node in kept], [index[parents[node]] for node in kept])
    return tree, probs[kept]
