"""Medusa: heads that guess the next tokens independently of each other, and trees of their combinations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from drafters.learned.heads.heads import Block, HeadDrafter
from drafters.learned.parallel.drafter import check_at_least
from drafters.learned.trees import best_first
from drafters.protocol import BaseShape, BaseWeights, Limits
from drafters.tree import DraftTree

Tree = Literal["best_first", "chain"]


class Medusa(HeadDrafter):
    """Medusa-1 (arXiv 2401.10774, section 2): K residual heads on a frozen base.

    Head k gives the law of the k-th token after the root, which the base's own head has decided. Output layers begin
    as the base's head. A draft is one forward.

    Args:
        base: Numbers of the base; filled in by the trainer.
        num_heads: K, draft tokens after the root.
        num_layers: Residual layers of each head; 1 is the paper's.
        own_heads: Each head has an output layer of its own, as in the paper; off, all use the base's, frozen.
        decay: Head k weighs decay^k in the loss.
        num_anchors: Anchors sampled from each training sequence; 0 takes every assistant position.
        chunk_anchors: Anchors whose logits are held at once; lower it where memory is short.
        tree: ``best_first``, the most probable combinations, or ``chain``, the most probable token of each head.
        num_nodes: M, nodes of a draft tree at most.
        top_k: Tokens of each head that may enter the tree.
        static: A fixed tree in place of ``tree``: paths of ranks, parents first, as `drafters tree-search` writes them.
    """

    decoding = frozenset({"tree", "num_nodes", "top_k", "static"})

    def __init__(
        self,
        base: BaseShape,
        num_heads: int = 5,
        num_layers: int = 1,
        own_heads: bool = True,
        decay: float = 0.8,
        num_anchors: int = 64,
        chunk_anchors: int = 512,
        tree: Tree = "best_first",
        num_nodes: int = 32,
        top_k: int = 10,
        static: Sequence[Sequence[int]] = (),
    ) -> None:
        blocks = [Block(base.hidden_size, num_layers) for _ in range(num_heads)]
        super().__init__(base, blocks, own_heads, decay, num_anchors, chunk_anchors)
        if tree not in get_args(Tree):
            raise ValueError(f"tree must be one of {', '.join(get_args(Tree))}, not {tree!r}")
        check_at_least(1, top_k=top_k)
        check_at_least(0, num_nodes=num_nodes)
        self.tree, self.num_nodes, self.top_k = tree, num_nodes, min(top_k, base.vocab_size)
        self.static = _checked(static, num_heads, base.vocab_size)
        if self.static:
            self.top_k = 1 + max(path[-1] for path in self.static)

    def head_states(self, states: Tensor, path: Tensor, embedding: Tensor) -> list[Tensor]:
        return [block(states) for block in self.blocks]

    def forward(self, states: Tensor, base_weights: BaseWeights, top_k: int) -> tuple[Tensor, Tensor]:
        """The most probable tokens of every head.

        Args:
            states: (A, D) the base's last states before the roots.

        Returns:
            Probabilities and tokens, both (A, K, k), the most probable first.
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
        grow = best_first.chain if self.tree == "chain" else best_first.search
        num_nodes = min(self.num_nodes, limits.max_nodes)
        tree, reached = grow(probs, tokens, num_nodes, limits.max_depth, limits.eos)
        return DraftTree(tree.tokens, tree.parents, probabilities=reached)


def _checked(static: Sequence[Sequence[int]], num_heads: int, vocab_size: int) -> list[best_first.RankPath]:
    """The rank paths as tuples; ValueError where they are no tree of these heads."""
    try:
        paths = [tuple(int(rank) for rank in path) for path in static]
    except (TypeError, ValueError):
        raise ValueError("static must be a list of rank paths such as [[0], [0, 0], [1]]") from None
    most = min(vocab_size, 1 + max((path[-1] for path in paths if path), default=0))
    best_first.fill(paths, np.zeros((num_heads, most), dtype=np.int64))
    return paths
