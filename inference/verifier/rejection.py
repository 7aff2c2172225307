"""Multi-round rejection: exact acceptance of children that were drawn at random."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drafters.tree import ChildDistribution, DraftTree


def multi_round_rejection(
    distribution: Tensor, children: ChildDistribution, tree: DraftTree, uniform: Callable[[int], float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Try the drawn children of one node in turn, by multi-round rejection sampling.

    With p_1 = ``distribution``, child y_j is accepted with probability min(1, p_j(y_j) / q_j(y_j)). If it is rejected,
    p_{j+1} is the normalised positive part of p_j - q_j. For draws with replacement q_{j+1} = q_j (SpecInfer, arXiv
    2305.09781); for draws without, y_j is removed from q_j (arXiv 2402.14160). A single draw is the rejection sampling
    of Leviathan et al. (arXiv 2211.17192). No operation waits for the device.

    Args:
        distribution: (V,) probabilities that the base draws from after this node.
        children: The drawn children, and the distribution they were drawn from.
        tree: The tree that holds the children.
        uniform: Returns the random number in [0, 1) of each round.

    Returns:
        Whether a child was accepted (), its token (), and the residual distribution (V,) to draw from if none was.
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
        if not children.replacement:
            drafted = drafted.clone()
            drafted[token] = 0
            drafted = drafted / drafted.sum().clamp(min=torch.finfo(distribution.dtype).tiny)
    return accepted, accepted_token, distribution
