"""Acceptance: which part of a draft tree the base itself would have written."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drafters.tree import ROOT, ChildDistribution, DraftTree


def accept(tree: DraftTree, picks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Follow the base's picks down the tree until one of them was not drafted.

    Every emitted token is the pick given the text before it. So the text follows the base's own distribution whatever
    was drafted: with the argmax as pick it is the greedy text, with draws it is sampled text (sample-and-match, or
    `multi_round_rejection`).

    Of the 1 + M picks, picks[0] follows the root and picks[1 + i] node i. Returns the accepted nodes from the root
    down, and the emitted tokens: those of the nodes, then the bonus token.

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


def multi_round_rejection(
    distribution: Tensor, children: ChildDistribution, tree: DraftTree, uniform: Callable[[int], float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Try the drawn children of one node in turn, by multi-round rejection sampling.

    With p_1 = ``distribution``, child y_j is accepted with probability min(1, p_j(y_j) / q(y_j)). If it is rejected,
    p_{j+1} is the normalised positive part of p_j - q, where q is what all children were drawn from (SpecInfer, arXiv
    2305.09781). A single draw is the rejection sampling of Leviathan et al. (arXiv 2211.17192). No operation waits for
    the device.

    The base draws from ``distribution`` (V,) after this node; ``uniform`` returns the random number in [0, 1) of each
    round. Returns whether a child was accepted (), its token (), and the residual distribution (V,) to draw from if
    none was.
    """
    drafted = children.probs.to(distribution)
    accepted = torch.zeros((), dtype=torch.bool, device=distribution.device)
    accepted_token = torch.zeros((), dtype=torch.long, device=distribution.device)
    for index, node in enumerate(children.draws):
        token = tree.tokens[node]
        accepted_now = (uniform(index) * drafted[token] < distribution[token]) & ~accepted
        accepted_token = torch.where(accepted_now, token, accepted_token)
        accepted = accepted | accepted_now
        residual = (distribution - drafted).clamp(min=0)
        mass = residual.sum()
        distribution = torch.where(mass > 0, residual / mass, distribution)
    return accepted, accepted_token, distribution
