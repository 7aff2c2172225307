"""Acceptance: the part of a draft tree that the base itself would have written."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.tree import ROOT, DraftTree


def accept(tree: DraftTree, picks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Follow the picks down the tree as far as they are drafted.

    Every emitted token is the sampler's pick given the text before it, so the text follows the base's own law
    whatever was drafted: greedily with argmaxes, and with draws (sample-and-match, or those of `rejection`).

    Args:
        tree: M nodes.
        picks: 1 + M tokens; picks[0] follows the root, picks[1 + i] follows node i.

    Returns:
        The accepted nodes from the root down, and the emitted tokens: theirs and the bonus token.
    """
    path: list[int] = []
    node, token = ROOT, picks[0]
    emitted = [token]
    while (child := tree.child(node, token)) is not None:
        path.append(child)
        node, token = child, picks[1 + child]
        emitted.append(token)
    return path, emitted


def accept_deepest(
    tree: DraftTree, acceptable: Sequence[bool | int], picks: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The longest path all of whose nodes are acceptable, and the pick after it; of equals the first.

    Args:
        tree: M nodes.
        acceptable: 1 + M, the first unused; whether node i may follow its parent.
        picks: 1 + M tokens.
    """
    best = ROOT
    fine = {ROOT}
    for node in range(tree.num_candidates):
        if tree.parents[node] in fine and acceptable[1 + node]:
            fine.add(node)
            if best == ROOT or tree.depths[node] > tree.depths[best]:
                best = node
    path: list[int] = []
    node = best
    while node != ROOT:
        path.append(node)
        node = tree.parents[node]
    return path[::-1], [*tree.path_tokens(best), picks[1 + best]]
