"""Acceptance: the part of a draft tree that the base itself would have written."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.tree import ROOT, DraftTree


def accept(tree: DraftTree, picks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Follow the base's own picks down the tree as far as they are drafted.

    Every emitted token is the base's pick given the text before it, so the text is the base's own whatever was
    drafted: greedily with greedy picks, and in law with sampled ones (sample-and-match).

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
