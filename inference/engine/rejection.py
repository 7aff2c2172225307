"""Multi-round rejection: exact acceptance of children that were drawn at random."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drafters.tree import ChildDistribution, DraftTree


def multi_round_rejection(
    distribution: Tensor, children: ChildDistribution, tokens: DraftTree, uniform: Callable[[int], float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Try the drawn children of one node in turn; what is left if all are refused.

    With p_1 = ``distribution``: child y_j is taken with probability min(1, p_j(y_j) / q_j(y_j)); else p_{j+1} is
    the normed positive part of p_j - q_j. Draws with replacement keep q_{j+1} = q_j (SpecInfer, arXiv 2305.09781);
    without, y_j is taken out of it (arXiv 2402.14160). One draw is Leviathan et al. 2211.17192.
    Nothing waits for the host.

    Args:
        law: (V,) what the base draws from after this node.
        children: The draws and the law they came from.
        tokens: The tree they stand in.
        uniform: A number in [0, 1) for each round.

    Returns:
        Whether a child was taken (), its token (), and the residual law (V,) to draw from if none was.
    """
    drafted = children.probs.to(distribution)
    taken = torch.zeros((), dtype=torch.bool, device=distribution.device)
    choice = torch.zeros((), dtype=torch.long, device=distribution.device)
    for index, node in enumerate(children.draws):
        token = tokens.tokens[node]
        now = (uniform(index) * drafted[token] < distribution[token]) & ~taken
        choice = torch.where(now, token, choice)
        taken = taken | now
        rest = (distribution - drafted).clamp(min=0)
        mass = rest.sum()
        distribution = torch.where(mass > 0, rest / mass, distribution)
        if not children.replacement:
            drafted = drafted.index_fill(0, torch.tensor(token, device=distribution.device), 0)
            drafted = drafted / drafted.sum().clamp(min=torch.finfo(distribution.dtype).tiny)
    return taken, choice, distribution
