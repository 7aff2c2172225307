"""Medusa: heads that predict the next tokens independently of each other, and trees of their combinations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from drafters.checks import check_at_least, check_choices
from drafters.heads.heads import HeadDrafter, HeadLossOptions, HeadOptions, ResidualBlock
from drafters.protocol import BaseShape, BaseWeights, Limits
from drafters.registry import register
from drafters.tree import DraftTree
from drafters.trees import best_first


@dataclass(frozen=True)
class MedusaDraftOptions:
    """How Medusa's heads become a draft tree; decoding may change these options.

    Args:
        tree: ``best_first``, the most probable combinations, or ``chain``, the most probable token of each head.
        num_nodes: M, largest number of nodes in a draft tree.
        top_k: Most probable tokens of each head that may enter the tree.
        static: A fixed tree instead of ``tree``: paths of ranks, parents first, as `drafters tune` writes them.
    """

    tree: Literal["best_first", "chain"] = "best_first"
    num_nodes: int = 32
    top_k: int = 10
    static: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(1, top_k=self.top_k)
        check_at_least(0, num_nodes=self.num_nodes)


@register("medusa")
class Medusa(HeadDrafter):
    """Medusa-1 (arXiv 2401.10774, section 2): K residual heads on a frozen base.

    Head k predicts the k-th token after the root, which the base's own LM head has decided. The output layers start as
    copies of that LM head. A draft is one forward pass.

    Args:
        base: Dimensions of the base; filled in by the trainer.
        heads: The heads.
        loss: The loss.
        draft: The draft tree.
    """

    def __init__(
        self,
        base: BaseShape,
        heads: HeadOptions = HeadOptions(),
        loss: HeadLossOptions = HeadLossOptions(),
        draft: MedusaDraftOptions = MedusaDraftOptions(),
    ) -> None:
        blocks = [ResidualBlock(base.hidden_size, heads.num_layers) for _ in range(heads.num_heads)]
        super().__init__(base, blocks, heads, loss)
        self.draft_options, self.top_k = draft, min(draft.top_k, base.vocab_size)
        self.static = _checked(draft.static, heads.num_heads, base.vocab_size)
        if self.static:
            self.top_k = 1 + max(path[-1] for path in self.static)

    def head_states(self, states: Tensor, path: Tensor, embedding: Tensor) -> list[Tensor]:
        return [block(states) for block in self.blocks]

    def forward(self, states: Tensor, base_weights: BaseWeights, top_k: int) -> tuple[Tensor, Tensor]:
        """The most probable tokens of every head.

        Args:
            states: (A, D) the base's last hidden states before the roots.
            base_weights: The base's embedding and LM head.
            top_k: k, tokens per head.

        Returns:
            Probabilities and tokens, both (A, K, k), most probable first.
        """
        distributions = (
            self.logits(head, block(states), base_weights).softmax(-1) for head, block in enumerate(self.blocks)
        )
        probs, tokens = zip(*(distribution.topk(top_k) for distribution in distributions), strict=True)
        return torch.stack(probs, dim=1), torch.stack(tokens, dim=1)

    def trees(self, states: Tensor, roots: Tensor, base_weights: BaseWeights, limits: Limits) -> list[DraftTree]:
        probs, tokens = self(states, base_weights, self.top_k)
        host = torch.stack([probs.double(), tokens.double()], dim=1).cpu().numpy()  # (A, 2, K, k)
        return [self._tree(p, t.astype(np.int64), limits) for p, t in host]

    def _tree(self, probs: np.ndarray, tokens: np.ndarray, limits: Limits) -> DraftTree:
        if self.static:
            return best_first.fill(self.static, tokens).pruned(limits.max_depth, limits.max_nodes, limits.eos)
        grow = best_first.chain if self.draft_options.tree == "chain" else best_first.search
        num_nodes = min(self.draft_options.num_nodes, limits.max_nodes)
        tree, path_probs = grow(probs, tokens, num_nodes, limits.max_depth, limits.eos)
        return DraftTree(tree.tokens, tree.parents, probabilities=path_probs.tolist())


def _checked(static: Sequence[Sequence[int]], num_heads: int, vocab_size: int) -> list[best_first.RankPath]:
    """The rank paths as tuples.

    Raises:
        ValueError: They are not a tree of these heads.
    """
    try:
        paths = [tuple(int(rank) for rank in path) for path in static]
    except (TypeError, ValueError):
        raise ValueError("static must be a list of rank paths such as [[0], [0, 0], [1]]") from None
    num_ranks = min(vocab_size, 1 + max((path[-1] for path in paths if path), default=0))
    best_first.fill(paths, np.zeros((num_heads, num_ranks), dtype=np.int64))
    return paths
