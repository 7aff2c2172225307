"""The CTC drafter: T frames from one pass over the base's hidden states, collapsed into a draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from drafters.learned.ctc import paper_tree, prefix_search
from drafters.learned.ctc.loss import Objective, ctc_loss
from drafters.learned.ctc.sampled_tree import draw
from drafters.learned.layers.markov import Markov
from drafters.learned.losses import gathered_logits
from drafters.learned.losses.label_weights import Weights
from drafters.learned.parallel.drafter import ParallelDrafter, check_at_least
from drafters.learned.trees.candidates import tables
from drafters.protocol import BaseShape, BaseWeights, Limits, TrainingBatch
from drafters.tree import DraftTree

Tree = Literal["prefix", "paper", "chain"]


class CTC(ParallelDrafter):
    """Attention draft module with a CTC output (CTC-drafter, section 3), drafting by exact prefix search.

    The queries are T frames: a learned frame embedding and the embedding of the root token. They read the base's
    hidden states strictly before the root. The base's frozen head and one trainable blank row give each frame a
    distribution over V + 1 symbols.

    Args:
        base: Numbers of the base; filled in by the trainer.
        num_frames: T, frames of one draft. At least ``num_labels``, more where tokens repeat.
        num_labels: U, next tokens a draft is trained to cover.
        num_layers: Layers of the draft module; 1 is the paper's.
        root_everywhere: Every frame carries the root's embedding, so that even a single layer can look for what
            followed that token before; off, only frame 0 does.
        hidden_layers: Base layers fused as context; [-1], the last hidden state, is the paper's.
        causal: Whether a frame sees only the frames before it; else all frames of its draft.
        markov_rank: Rank of a bias on each frame's logits given the last token emitted; 0 for none, as in the paper.
        objective: ``ctc``, the paper's sequence loss, or ``prefix``, the loss of what verification rewards.
        weights: How labels weigh in the prefix objective: by ``decay``, or by their own ``survival`` so far.
        decay: Weight of label u against label u - 1.
        warm_up_steps: Optimizer steps over which a share of plain cross-entropy, one at first, fades out; it keeps the
            blank from taking all frames.
        distillation: Factor of the divergence from the base's law of the next token to the draft's exact one.
        num_anchors: Anchors sampled from each training sequence.
        tree: ``prefix``, the most probable collapsed prefixes; ``paper``, the most probable frame sequences, collapsed
            after; or ``chain``, the most probable path.
        num_nodes: M, nodes of a draft tree at most.
        top_k: The T * top_k tokens that are most probable in any frame may enter the tree.
        min_probability: Draft tokens less probable than this are not fed to the base.
        step_costs: File that ``drafters step-cost`` wrote; with it a tree stops growing where it no longer pays.
        draws: Texts that decoding draws at random from the frames in place of the tree, for exact rejection; 0 for
            none. Of the tree's arguments only num_nodes counts then. Validation and simulation keep to the tree.
        draw_temperature: Of the draws.
        draw_seed: Of the draws.
        blank_bias: Where the blank's bias starts; below zero keeps training out of all-blank.
    """

    decoding = ParallelDrafter.decoding | {"tree", "draws", "draw_temperature", "draw_seed"}

    def __init__(
        self,
        base: BaseShape,
        num_frames: int = 12,
        num_labels: int = 8,
        num_layers: int = 1,
        root_everywhere: bool = True,
        hidden_layers: Sequence[int] = (-1,),
        causal: bool = False,
        markov_rank: int = 0,
        objective: Objective = "prefix",
        weights: Weights = "decay",
        decay: float = 0.9,
        warm_up_steps: int = 0,
        distillation: float = 0.0,
        num_anchors: int = 64,
        tree: Tree = "prefix",
        num_nodes: int = 32,
        top_k: int = 8,
        min_probability: float = 0.0,
        step_costs: str = "",
        draws: int = 0,
        draw_temperature: float = 1.0,
        draw_seed: int = 0,
        blank_bias: float = -2.0,
    ) -> None:
        for name, value, known in (
            ("objective", objective, Objective),
            ("weights", weights, Weights),
            ("tree", tree, Tree),
        ):
            if value not in get_args(known):
                raise ValueError(f"{name} must be one of {', '.join(get_args(known))}, not {value!r}")
        if num_frames < num_labels:
            raise ValueError(f"num_frames ({num_frames}) must be at least num_labels ({num_labels})")
        if tree == "paper" and (markov_rank or min_probability or step_costs):
            raise ValueError(
                "the paper's tree knows no bias between tokens, and no probability of a node: leave markov_rank, "
                "min_probability and step_costs away, or set tree to prefix"
            )
        check_at_least(0, warm_up_steps=warm_up_steps, draws=draws, draw_seed=draw_seed, markov_rank=markov_rank)
        check_at_least(0, decay=decay, distillation=distillation)
        if not draw_temperature > 0:
            raise ValueError(f"draw_temperature must be above 0, not {draw_temperature}")
        super().__init__(
            base,
            num_frames=num_frames,
            num_labels=num_labels,
            num_layers=num_layers,
            hidden_layers=hidden_layers,
            root_everywhere=root_everywhere,
            frames_differ=True,
            causal=causal,
            num_anchors=num_anchors,
            num_nodes=num_nodes,
            top_k=top_k,
            min_probability=min_probability,
            step_costs=step_costs,
        )
        self.objective, self.weights, self.decay = objective, weights, decay
        self.warm_up_steps, self.distillation = warm_up_steps, distillation
        self.tree = tree
        self.draws, self.draw_temperature = draws, draw_temperature
        self.draw_seed, self.remembers = draw_seed, draws > 0
        self.reset()
        self.blank_row = nn.Parameter(torch.zeros(base.hidden_size))
        self.blank_bias = nn.Parameter(torch.tensor([float(blank_bias)]))  # FSDP2 shards no scalars
        self.register_load_state_dict_pre_hook(_with_a_row_of_one)
        self.markov = Markov(base.vocab_size, markov_rank, base.vocab_size + 1) if markov_rank else None

    # ---- training

    def loss(self, batch: TrainingBatch, base_weights: BaseWeights) -> tuple[Tensor, dict[str, Tensor]]:
        anchored = self.sampled_anchors(batch, base_weights)
        teacher, read = anchored.teacher(batch) if self.distillation else (None, None)
        return ctc_loss(
            anchored.frames,
            anchored.labels,
            anchored.valid,
            anchored.roots,
            base_weights.head,
            self.blank_row,
            self.blank_bias[0],
            self.markov,
            objective=self.objective,
            weights=self.weights,
            decay=self.decay,
            warm_up=self._warm_up(batch.step),
            distillation=self.distillation,
            teacher=teacher,
            teacher_valid=read,
            divisor=batch.divisor,
        )

    def _warm_up(self, step: int) -> float:
        """The share of cross-entropy in the loss after so many optimizer steps."""
        if not (self.warm_up_steps and self.training):
            return 0.0
        return 1 - min(1.0, step / self.warm_up_steps)

    # ---- drafting

    def reset(self) -> None:
        """Begin the draws anew."""
        self._generator = np.random.default_rng((self.draw_seed, 0xC7C))  # owes nothing to the base's numbers

    def logits(self, frames: Tensor, head: Tensor) -> Tensor:
        """(..., V + 1) of frame states (..., D), the blank last."""
        blank = (gathered_logits.wide(frames) * gathered_logits.wide(self.blank_row)).sum(
            -1
        )  # as precise as the loss has it
        return torch.cat(
            [super().logits(frames, head), (blank + gathered_logits.wide(self.blank_bias))[..., None]], dim=-1
        )

    def trees(self, frames: Tensor, roots: Tensor, base_weights: BaseWeights, limits: Limits) -> list[DraftTree]:
        logits = self.logits(frames, base_weights.head)
        each = tables(logits, roots, self.vocab_size, self.num_candidates, self.markov)
        return [self._tree(table[..., :-1], table[..., -1], tokens, limits) for table, tokens in each]

    def _tree(self, probs: np.ndarray, blank: np.ndarray, tokens: np.ndarray, limits: Limits) -> DraftTree:
        num_nodes, depth = min(self.num_nodes, limits.max_nodes), min(limits.max_depth, self.num_frames)
        if self.tree == "paper":
            every = np.broadcast_to(tokens, probs[0].shape)  # the same candidates as for our own tree
            return paper_tree.search(probs[0], blank[0], every, num_nodes, depth, limits.eos)[0]
        grow = prefix_search.chain if self.tree == "chain" else prefix_search.search
        return self.worth_feeding(*grow(probs, blank, tokens, num_nodes, depth, limits.eos, self.min_probability))

    def draft(self, frames: Tensor, root: int, base_weights: BaseWeights, limits: Limits) -> DraftTree:
        if not self.draws:
            return super().draft(frames, root, base_weights, limits)
        logits, room = (
            self.logits(frames, base_weights.head)[0],
            (min(self.num_nodes, limits.max_nodes), limits.max_depth),
        )
        return draw(logits, self.markov, root, self.draws, *room, limits.eos, self._generator, self.draw_temperature)


def _with_a_row_of_one(drafter: CTC, weights: dict[str, Tensor], prefix: str, *_) -> None:
    """Read the blank's bias of drafters written when it was a scalar."""
    if (name := f"{prefix}blank_bias") in weights:
        weights[name] = torch.atleast_1d(weights[name])  # at stage 3 of DeepSpeed it is empty here
