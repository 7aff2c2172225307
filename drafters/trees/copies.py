"""Draft trees of a drafter that may copy: its own paths, and an earlier passage of the text."""

from collections.abc import Sequence

from drafters.tree import ROOT, DraftTree, Growth
from drafters.trees.search import SearchLimits


def with_passage(tree: DraftTree, passage: Sequence[float], share: float, limits: SearchLimits) -> DraftTree:
    """The most probable nodes if the draft is the passage with probability ``share``, and otherwise as in the tree.

    The probability of a path is (1 - share) times that in the tree, plus the share if the passage begins with it. So a
    path that the tree lacks has the share alone, although the drafter may also write it without copying. Of a
    single path, a ``chain``, the one with more expected tokens is taken: the tree's own or the passage.
    """
    if not (share and tree.probabilities):
        return tree
    grown, probs = Growth(), [(1 - share) * probability for probability in tree.probabilities]
    for parent, token in zip(tree.parents, tree.tokens, strict=True):
        grown.child(parent, token)
    node, path = ROOT, list[int]()
    for token in map(int, passage[: limits.max_depth]):
        node = grown.child(node, token)
        path.append(node)
        probs += [0.0] * (len(grown.tokens) - len(probs))
        probs[node] += share
        if token in limits.eos:
            break
    kept = sorted(range(len(probs)), key=lambda node: -probs[node])  # parents stay before their children
    if limits.is_chain:
        kept = max([*range(len(tree))], path, key=lambda nodes: sum(probs[node] for node in nodes))
    kept = [node for node in kept if probs[node] >= limits.min_probability][: limits.num_nodes]
    place = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
    tokens, parents = [grown.tokens[node] for node in kept], [place[grown.parents[node]] for node in kept]
    return DraftTree(tokens, parents, probabilities=[probs[node] for node in kept])
