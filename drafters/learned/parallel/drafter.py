"""Drafters that give T frames in one pass: a trunk over the base's hidden states, and its cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from drafters.learned.layers.anchor_attention import AnchorMask
from drafters.learned.layers.draft_cache import DraftCache
from drafters.learned.layers.transformer import Trunk
from drafters.learned.losses import anchors as anchor_positions
from drafters.learned.losses import gathered_logits
from drafters.learned.trees import budget
from drafters.protocol import (
    UNLIMITED,
    BaseShape,
    BaseWeights,
    LearnedDrafter,
    Limits,
    RequiredOutputs,
    StepResult,
    TrainingBatch,
)
from drafters.tree import DraftTree


def check_at_least(least: int, **arguments: float) -> None:
    """Refuse an argument that is smaller, or no number."""
    for name, value in arguments.items():
        if not value >= least:
            raise ValueError(f"{name} must be at least {least}, not {value}")


@dataclass(frozen=True)
class Anchored:
    """Anchors of a batch in one row, A of them.

    Args:
        frames: (A, T, D) states.
        labels: (A, U) the base's next tokens y_1..y_U.
        valid: (A, U) bool, a leading run: as far as the assistant's turn goes.
        roots: (A,) tokens at the anchors.
        positions: (B, A / B) of the anchors in their sequences.
    """

    frames: Tensor
    labels: Tensor
    valid: Tensor
    roots: Tensor
    positions: Tensor

    def teacher(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """The base's last states that decide the labels (A, U, D), and whether it has read the labels before (A, U)."""
        states, read = anchor_positions.deciding(
            batch.last, batch.input_ids, batch.labels, self.positions, self.num_labels
        )
        return states.flatten(0, 1), read.flatten(0, 1)

    @property
    def num_labels(self) -> int:
        return self.labels.shape[1]


class ParallelDrafter(LearnedDrafter):
    """One pass over T frames an anchor, each with a state that the base's head can read.

    The frames' input is an embedding of their own and that of the root token; they read keys and values projected
    from the base's hidden states strictly before the root (DFlash, arXiv 2602.06036). A subclass has a ``loss`` and
    says by `trees` what it makes of frame states.

    Args:
        base: Numbers of the base.
        num_frames: T.
        num_labels: U, next tokens a draft is trained to cover.
        num_layers: Layers of the trunk.
        hidden_layers: Base layers fused as context.
        root_everywhere: Whether every frame carries the root's embedding, not frame 0 alone.
        frames_differ: Whether each frame has its own input embedding; else all but frame 0 share one, as in DFlash.
        causal: Whether a frame sees only the frames before it in its block.
        num_anchors: Anchors sampled from each training sequence.
        num_nodes: M, nodes of a draft tree at most.
        top_k: The T * top_k tokens that are most probable in any frame may enter the tree.
        min_probability: Draft tokens less probable than this are not fed to the base.
        step_costs: File of `budget.read_costs`, or empty.
        chunk_anchors: Anchors drafted for at once on known text.
    """

    decoding = frozenset({"num_nodes", "top_k", "min_probability", "step_costs"})

    def __init__(
        self,
        base: BaseShape,
        num_frames: int,
        num_labels: int,
        num_layers: int,
        hidden_layers: Sequence[int],
        root_everywhere: bool,
        frames_differ: bool,
        causal: bool,
        num_anchors: int,
        num_nodes: int,
        top_k: int,
        min_probability: float,
        step_costs: str,
        chunk_anchors: int = 64,
    ) -> None:
        super().__init__()
        check_at_least(1, num_frames=num_frames, num_labels=num_labels, num_layers=num_layers, num_anchors=num_anchors)
        check_at_least(0, num_nodes=num_nodes, min_probability=min_probability)
        check_at_least(1, top_k=top_k)
        if not hidden_layers or not all(-1 <= layer <= base.num_layers for layer in hidden_layers):
            raise ValueError(
                f"hidden_layers are {[*hidden_layers]}, but the base has {base.num_layers} layers: name layers from 0, "
                f"the embedding, to {base.num_layers}, or -1, the normed last state"
            )
        self.required_outputs = RequiredOutputs(tuple(hidden_layers))
        self.num_frames, self.num_labels = num_frames, num_labels
        self.root_everywhere, self.causal = root_everywhere, causal
        self.num_anchors, self.chunk_anchors = num_anchors, chunk_anchors
        self.vocab_size = base.vocab_size
        self.num_nodes, self.num_candidates, self.min_probability = num_nodes, top_k * num_frames, min_probability
        self.step_seconds = budget.read_costs(step_costs) if step_costs else None
        self.trunk = Trunk(base, num_layers, num_fused=len(self.required_outputs.hidden_layers))
        self.frame_embedding = nn.Parameter(torch.randn(num_frames if frames_differ else 1, base.hidden_size) * 0.02)
        self._cache: DraftCache | None = None

    def logits(self, frames: Tensor, head: Tensor) -> Tensor:
        """(..., V) of frame states (..., D), in float32 at the least."""
        return gathered_logits.logits(frames, head)

    @abstractmethod
    def trees(self, frames: Tensor, roots: Tensor, base_weights: BaseWeights, limits: Limits) -> list[DraftTree]:
        """The draft trees of frame states (A, T, D) below the root tokens (A,)."""

    def worth_feeding(self, tree: DraftTree, reached: np.ndarray) -> DraftTree:
        """The beginning of a tree, its most probable nodes first, that pays for what the base's step costs."""
        size = len(tree)
        if self.step_seconds is not None:
            size = budget.best_size(reached[: len(self.step_seconds) - 1], self.step_seconds)
        return DraftTree(tree.tokens[:size], tree.parents[:size], probabilities=reached[:size])

    # ---- hidden states in, frames out

    def _block(self, roots: Tensor, anchors: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Input frames (B, A * T, D) and their positions (B, A * T) for roots (B, A) at anchors (B, A)."""
        root = embedding[roots][..., None, :].to(self.frame_embedding.dtype)  # (B, A, 1, D)
        if self.root_everywhere:
            frames = self.frame_embedding.expand(self.num_frames, -1) + root  # (B, A, T, D)
        elif len(self.frame_embedding) > 1:
            frames = self.frame_embedding + nn.functional.pad(root, (0, 0, 0, self.num_frames - 1))
        else:
            masked = self.frame_embedding.expand(*root.shape[:2], self.num_frames - 1, -1)
            frames = torch.cat([root, masked], dim=-2)
        positions = anchors[..., None] + torch.arange(self.num_frames, device=anchors.device)
        return frames.flatten(1, 2), positions.flatten(1)

    def forward(self, hidden: Tensor, anchors: Tensor, roots: Tensor, embedding: Tensor) -> Tensor:
        """Frames of many anchors at once, as training sees them; context keys and values once a sequence.

        Args:
            hidden: (B, S, F * D). anchors: (B, A). roots: (B, A) token ids. embedding: (V, D).

        Returns:
            (B, A, T, D) frame states, to be read by the head.
        """
        return self._frames(self._context(hidden), anchors, roots, embedding)

    def _context(self, hidden: Tensor, start: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Per layer, keys and values of hidden states (B, S, F * D) at the positions from ``start`` on."""
        positions = torch.arange(start, start + hidden.shape[1], device=hidden.device).expand(len(hidden), -1)
        return self.trunk.context(hidden.to(self.frame_embedding.dtype), positions)

    def _frames(
        self, context: list[tuple[Tensor, Tensor]], anchors: Tensor, roots: Tensor, embedding: Tensor
    ) -> Tensor:
        frames, positions = self._block(roots, anchors, embedding)
        mask = AnchorMask(anchors, self.num_frames, context[0][0].shape[-2], self.causal).best()
        return self.trunk(frames, positions, context, mask).unflatten(1, (anchors.shape[1], self.num_frames))

    def sampled_anchors(self, batch: TrainingBatch, base_weights: BaseWeights) -> Anchored:
        """Frames of sampled anchors and what they should become."""
        anchors, kept = anchor_positions.sample(batch.loss_mask, self.num_anchors)
        labels, valid = anchor_positions.following(batch.labels, batch.loss_mask, anchors, self.num_labels)
        roots = batch.input_ids.gather(1, anchors)
        frames = self(batch.hidden, anchors, roots, base_weights.embedding)
        valid = (valid & kept[..., None]).flatten(0, 1)
        return Anchored(frames.flatten(0, 1), labels.flatten(0, 1), valid, roots.flatten(), anchors)

    # ---- drafting

    def begin(self, prompt: Sequence[int]) -> None:
        self._cache = DraftCache(len(self.trunk.layers))

    @torch.inference_mode()
    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        assert self.base_weights is not None and self._cache is not None, "borrow() and begin() come before propose()"
        if self._cache.length == 0 or limits.max_depth < 1:
            return DraftTree()
        device = self.frame_embedding.device
        anchor, root = (  # filled there: a copy would wait for the device
            torch.full((1, 1), number, dtype=torch.long, device=device) for number in (self._cache.length, seq[-1])
        )
        frames, positions = self._block(root, anchor, self.base_weights.embedding)
        mask = AnchorMask(anchor, self.num_frames, self._cache.length, causal=True).dense() if self.causal else None
        frames = self.trunk(frames, positions, self._cache.read(), mask)
        self.draft_forwards += 1
        return self.draft(frames, seq[-1], self.base_weights, limits)

    def draft(self, frames: Tensor, root: int, base_weights: BaseWeights, limits: Limits) -> DraftTree:
        """What decoding proposes, of frame states (1, T, D) below a root token: the tree of `trees`, unless drawn."""
        return self.trees(frames, torch.full((1,), root, dtype=torch.long, device=frames.device), base_weights, limits)[
            0
        ]

    @torch.inference_mode()
    def observe(self, step: StepResult) -> None:
        self._cache.append(self._context(step.committed_hidden()[None], self._cache.length))

    def rewind(self, length: int) -> None:
        if self._cache is not None:
            self._cache.truncate(length - 1)

    @torch.inference_mode()
    def draft_at(
        self, hidden: Tensor, input_ids: Tensor, anchors: Tensor, base_weights: BaseWeights, limits: Limits = UNLIMITED
    ) -> list[DraftTree]:
        trees, context = [], self._context(hidden[None])
        for part in anchors.split(self.chunk_anchors):
            frames = self._frames(context, part[None], input_ids[part][None], base_weights.embedding)[0]
            trees += self.trees(frames, input_ids[part], base_weights, limits)
        return trees
