"""The block drafter: the trunk of the CTC drafter, trained with cross-entropy, one frame a token (DFlash)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from torch import Tensor

from drafters.learned.layers.markov import Markov
from drafters.learned.losses.cross_entropy import cross_entropy
from drafters.learned.losses.label_weights import Weights
from drafters.learned.parallel.drafter import ParallelDrafter, check_at_least
from drafters.learned.trees import best_first
from drafters.learned.trees.candidates import tables
from drafters.protocol import BaseShape, BaseWeights, Limits, TrainingBatch
from drafters.tree import DraftTree

Tree = Literal["best_first", "chain"]


class Block(ParallelDrafter):
    """A block of masked frames filled in one pass (DFlash, arXiv 2602.06036); frame u guesses the u-th next token.

    Frame 0 carries the root's embedding, all others one mask embedding. Unlike DFlash's, frame 0 guesses too, as in
    DSpark (arXiv 2607.05147), whose Markov bias is an option.

    Args:
        base: Numbers of the base; filled in by the trainer.
        num_frames: Draft tokens at most.
        num_layers: Layers of the draft module.
        hidden_layers: Base layers fused as context.
        root_everywhere: Every frame carries the root's embedding; off, only frame 0 does.
        frames_differ: Each frame has an input embedding of its own; off, they share one and differ by position.
        causal: Whether a frame sees only the frames before it; else all frames of its draft.
        markov_rank: Rank of a bias on each frame's logits given the token before; 0 for none.
        weights: How labels weigh in the loss: by ``decay``, or by their own ``survival`` so far (D-PACE).
        decay: Weight of label u against label u - 1.
        distillation: Factor of the divergence from the base's law of the next token to the draft's.
        num_anchors: Anchors sampled from each training sequence.
        tree: ``best_first``, the most probable paths, or ``chain``, the most probable token of each frame.
        num_nodes: M, nodes of a draft tree at most.
        top_k: The T * top_k tokens that are most probable in any frame may enter the tree.
        min_probability: Draft tokens less probable than this are not fed to the base.
        step_costs: File that ``drafters step-cost`` wrote; with it a tree stops growing where it no longer pays.
    """

    decoding = ParallelDrafter.decoding | {"tree"}

    def __init__(
        self,
        base: BaseShape,
        num_frames: int = 8,
        num_layers: int = 1,
        hidden_layers: Sequence[int] = (-1,),
        root_everywhere: bool = False,
        frames_differ: bool = False,
        causal: bool = False,
        markov_rank: int = 0,
        weights: Weights = "decay",
        decay: float = 0.9,
        distillation: float = 0.0,
        num_anchors: int = 64,
        tree: Tree = "best_first",
        num_nodes: int = 32,
        top_k: int = 8,
        min_probability: float = 0.0,
        step_costs: str = "",
    ) -> None:
        if tree not in get_args(Tree):
            raise ValueError(f"tree must be one of {', '.join(get_args(Tree))}, not {tree!r}")
        if weights not in get_args(Weights):
            raise ValueError(f"weights must be one of {', '.join(get_args(Weights))}, not {weights!r}")
        check_at_least(0, markov_rank=markov_rank, decay=decay, distillation=distillation)
        super().__init__(
            base,
            num_frames=num_frames,
            num_labels=num_frames,
            num_layers=num_layers,
            hidden_layers=hidden_layers,
            root_everywhere=root_everywhere,
            frames_differ=frames_differ,
            causal=causal,
            num_anchors=num_anchors,
            num_nodes=num_nodes,
            top_k=top_k,
            min_probability=min_probability,
            step_costs=step_costs,
        )
        self.weights, self.decay, self.distillation = weights, decay, distillation
        self.tree = tree
        self.markov = Markov(base.vocab_size, markov_rank, base.vocab_size) if markov_rank else None

    def loss(self, batch: TrainingBatch, base_weights: BaseWeights) -> tuple[Tensor, dict[str, Tensor]]:
        anchored = self.sampled_anchors(batch, base_weights)
        teacher, read = anchored.teacher(batch) if self.distillation else (None, None)
        return cross_entropy(
            anchored.frames,
            anchored.labels,
            anchored.valid,
            anchored.roots,
            base_weights.head,
            self.markov,
            weights=self.weights,
            decay=self.decay,
            distillation=self.distillation,
            teacher=teacher,
            teacher_valid=read,
            divisor=batch.divisor,
        )

    def trees(self, frames: Tensor, roots: Tensor, base_weights: BaseWeights, limits: Limits) -> list[DraftTree]:
        logits = self.logits(frames, base_weights.head)
        each = tables(logits, roots, self.vocab_size, self.num_candidates, self.markov)
        return [self._tree(*draft, limits) for draft in each]

    def _tree(self, probs: np.ndarray, tokens: np.ndarray, limits: Limits) -> DraftTree:
        grow = best_first.chain if self.tree == "chain" else best_first.search
        num_nodes = min(self.num_nodes, limits.max_nodes)
        return self.worth_feeding(*grow(probs, tokens, num_nodes, limits.max_depth, limits.eos, self.min_probability))
