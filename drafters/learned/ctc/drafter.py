"""The CTC drafter: T frames from one pass over the base's hidden states, collapsed into a draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
import torch
from torch import Tensor, nn

from drafters.learned import anchors as anchor_positions
from drafters.learned.ctc import prefix
from drafters.learned.ctc.loss import Objective, anchor_loss, gathered_log_probs
from drafters.learned.draft_cache import DraftCache
from drafters.learned.layers import Trunk, block_mask
from drafters.protocol import UNLIMITED, BaseShape, Borrowed, LearnedDrafter, Limits, Needs, StepResult, TrainingBatch
from drafters.tree import DraftTree


class CTC(LearnedDrafter):
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
        objective: ``ctc``, the paper's sequence loss, or ``prefix``, the loss of what verification rewards.
        decay: Weight of label u against label u - 1 in the prefix objective.
        num_anchors: Anchors sampled from each training sequence.
        chunk_anchors: Anchors whose logits are held at once; lower it where memory is short.
        num_nodes: M, nodes of a draft tree at most.
        top_k: Tokens of each frame that may enter the tree.
        min_probability: Draft tokens less probable than this are not fed to the base.
        blank_bias: Where the blank's bias starts; below zero keeps training out of all-blank.
    """

    def __init__(
        self,
        base: BaseShape,
        num_frames: int = 12,
        num_labels: int = 8,
        num_layers: int = 1,
        root_everywhere: bool = True,
        hidden_layers: Sequence[int] = (-1,),
        objective: Objective = "prefix",
        decay: float = 0.9,
        num_anchors: int = 64,
        chunk_anchors: int = 64,
        num_nodes: int = 32,
        top_k: int = 8,
        min_probability: float = 0.0,
        blank_bias: float = -2.0,
    ) -> None:
        super().__init__()
        if objective not in get_args(Objective):
            raise ValueError(f"objective must be one of {', '.join(get_args(Objective))}, not {objective!r}")
        if num_frames < num_labels:
            raise ValueError(f"num_frames ({num_frames}) must be at least num_labels ({num_labels})")
        self.needs = Needs(tuple(hidden_layers))
        self.num_frames, self.num_labels = num_frames, num_labels
        self.root_everywhere = root_everywhere
        self.objective, self.decay = objective, decay
        self.num_anchors, self.chunk_anchors = num_anchors, chunk_anchors
        self.num_nodes, self.top_k, self.min_probability = num_nodes, top_k, min_probability
        self.vocab_size = base.vocab_size
        self.trunk = Trunk(base, num_layers, num_fused=len(self.needs.hidden_layers))
        self.frame_embedding = nn.Parameter(torch.randn(num_frames, base.hidden_size) * 0.02)
        self.blank_row = nn.Parameter(torch.zeros(base.hidden_size))
        self.blank_bias = nn.Parameter(torch.tensor(float(blank_bias)))
        self._cache: DraftCache | None = None

    # ---- the module: hidden states in, frames out

    def _block(self, roots: Tensor, anchors: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Input frames (B, A * T, D) and their positions (B, A * T) for roots (B, A) at anchors (B, A)."""
        root = embedding[roots][..., None, :].to(self.frame_embedding.dtype)  # (B, A, 1, D)
        if not self.root_everywhere:
            root = nn.functional.pad(root, (0, 0, 0, self.num_frames - 1))
        frames = self.frame_embedding + root  # (B, A, T, D)
        positions = anchors[..., None] + torch.arange(self.num_frames, device=anchors.device)
        return frames.flatten(1, 2), positions.flatten(1)

    def forward(self, hidden: Tensor, anchors: Tensor, roots: Tensor, embedding: Tensor) -> Tensor:
        """Frames of many anchors at once, as training sees them.

        Args:
            hidden: (B, S, F * D). anchors: (B, A). roots: (B, A) token ids. embedding: (V, D).

        Returns:
            (B, A, T, D) frame states, to be read by the head.
        """
        hidden = hidden.to(self.frame_embedding.dtype)
        positions = torch.arange(hidden.shape[1], device=hidden.device).expand(len(hidden), -1)
        context = self.trunk.context(hidden, positions)
        frames, frame_positions = self._block(roots, anchors, embedding)
        mask = block_mask(anchors, self.num_frames, hidden.shape[1])
        return self.trunk(frames, frame_positions, context, mask).unflatten(1, (anchors.shape[1], self.num_frames))

    # ---- training

    def loss(self, batch: TrainingBatch, borrowed: Borrowed) -> tuple[Tensor, dict[str, Tensor]]:
        anchors, kept = anchor_positions.sample(batch.loss_mask, self.num_anchors)
        targets, valid = anchor_positions.following(batch.labels, batch.loss_mask, anchors, self.num_labels)
        valid = valid & kept[..., None]
        roots = batch.input_ids.gather(1, anchors)
        frames = self(batch.hidden, anchors, roots, borrowed.embedding).flatten(0, 1)  # (B*A, T, D)
        targets, valid = targets.flatten(0, 1), valid.flatten(0, 1)
        label_log_probs, blank_log_probs = gathered_log_probs(
            frames, targets, borrowed.head, self.blank_row, self.blank_bias, self.chunk_anchors
        )
        losses = anchor_loss(label_log_probs, blank_log_probs, targets, valid, self.objective, self.decay)
        num_kept = valid[:, 0].sum().clamp(min=1)
        return losses.sum() / num_kept, {"blank_share": blank_log_probs.detach().exp().mean()}

    # ---- drafting

    def top_frames(self, frames: Tensor, head: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The candidates of each block and their probability in every frame, on the host after one copy.

        Args:
            frames: (A, T, D). head: (V, D).

        Returns:
            ``probs`` (A, T, T * k), ``blank`` (A, T) and ``tokens`` (A, T * k); a token may stand more than once.
        """
        blank = (frames @ self.blank_row).float() + self.blank_bias.float()
        logits = torch.cat([(frames.to(head.dtype) @ head.T).float(), blank[..., None]], dim=-1)
        probs = logits.softmax(-1)  # (A, T, V + 1)
        top = probs[..., :-1].topk(min(self.top_k, self.vocab_size), dim=-1).indices.flatten(-2)  # (A, T*k)
        picked = probs.gather(-1, top[:, None].expand(-1, frames.shape[1], -1))
        packed = torch.cat([torch.cat([picked, probs[..., -1:]], -1), nn.functional.pad(top, (0, 1))[:, None]], dim=1)
        host = packed.double().cpu().numpy()
        return host[:, :-1, :-1], host[:, :-1, -1], host[:, -1, :-1].astype(np.int64)

    def _tree(self, probs: np.ndarray, blank: np.ndarray, tokens: np.ndarray, limits: Limits) -> DraftTree:
        tokens, columns = np.unique(tokens, return_index=True)
        budget, depth = min(self.num_nodes, limits.max_nodes), min(limits.max_depth, self.num_frames)
        return prefix.search(probs[:, columns], blank, tokens, budget, depth, limits.eos, self.min_probability)[0]

    def begin(self, prompt: Sequence[int]) -> None:
        self._cache = DraftCache(len(self.trunk.layers))

    @torch.inference_mode()
    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        assert self.borrowed is not None and self._cache is not None, "borrow() and begin() come before propose()"
        if self._cache.length == 0 or limits.max_depth < 1:
            return DraftTree()
        device = self.frame_embedding.device
        anchor = torch.tensor([[self._cache.length]], device=device)
        root = torch.tensor([[seq[-1]]], device=device)
        frames, positions = self._block(root, anchor, self.borrowed.embedding)
        frames = self.trunk(frames, positions, self._cache.read())
        self.draft_forwards += 1
        probs, blank, tokens = self.top_frames(frames, self.borrowed.head)
        return self._tree(probs[0], blank[0], tokens[0], limits)

    @torch.inference_mode()
    def observe(self, step: StepResult) -> None:
        hidden = step.committed_hidden()[None].to(self.frame_embedding.dtype)
        start = self._cache.length
        positions = torch.arange(start, start + hidden.shape[1], device=hidden.device)[None]
        self._cache.append(self.trunk.context(hidden, positions))

    @torch.inference_mode()
    def draft_at(
        self, hidden: Tensor, input_ids: Tensor, anchors: Tensor, borrowed: Borrowed, limits: Limits = UNLIMITED
    ) -> list[DraftTree]:
        trees = []
        for part in anchors.split(self.chunk_anchors):
            frames = self(hidden[None], part[None], input_ids[part][None], borrowed.embedding)[0]
            trees += [self._tree(*block, limits) for block in zip(*self.top_frames(frames, borrowed.head), strict=True)]
        return trees
