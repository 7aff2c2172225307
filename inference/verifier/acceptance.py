"""Acceptance: which part of a draft tree the base itself would have written."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.tree import ROOT, DraftTree


def accept(tree: DraftTree, picks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Follow the base's picks down the tree until one of them was not drafted.

    Every emitted token is the pick given the text before it. So the text follows the base's own distribution whatever
    was drafted: with the argmax as pick it is the greedy text, with draws it is sampled text (sample-and-match, or
    multi-round rejection, see `rejection`).

    Args:
        tree: M nodes.
        picks: 1 + M tokens; picks[0] follows the root, picks[1 + i] follows node i.

    Returns:
        The accepted nodes from the root down, and the emitted tokens: those of the nodes, then the bonus token.

    >>> accept(DraftTree(tokens=[7, 8], parents=[-1, 0]), picks=[7, 5, 9])
    ([0], [7, 5])
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
    """Take the longest path of acceptable nodes, the first of them if several are equally long, and the pick after it.

    Args:
        tree: M nodes.
        acceptable: 1 + M values; acceptable[1 + i] says whether node i may follow its parent, acceptable[0] is unused.
        picks: 1 + M tokens; picks[0] follows the root, picks[1 + i] follows node i.

    Returns:
        The accepted nodes from the root down, and the emitted tokens: those of the nodes, then the bonus token.
    """
    deepest = ROOT
    reachable = {ROOT}
    for node in range(tree.num_candidates):
        if tree.parents[node] in reachable and acceptable[1 + node]:
            reachable.add(node)
            if deepest == ROOT or tree.depths[node] > tree.depths[deepest]:
                deepest = node
    path: list[int] = []
    node = deepest
    while node != ROOT:
        path.append(node)
        node = tree.parents[node]
    return path[::-1], [*tree.path_tokens(deepest), picks[1 + deepest]]
