"""The CTC drafter: T frames from one pass over the base's hidden states, collapsed into a draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
import torch
from torch import Tensor, nn

from drafters.learned.ctc import prefix
from drafters.learned.ctc.loss import Objective, anchor_loss, gathered_log_probs
from drafters.learned.parallel import ParallelDrafter
from drafters.protocol import BaseShape, Borrowed, Limits, TrainingBatch
from drafters.tree import DraftTree


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
        causal: bool = False,
        objective: Objective = "prefix",
        decay: float = 0.9,
        num_anchors: int = 64,
        chunk_anchors: int = 64,
        num_nodes: int = 32,
        top_k: int = 8,
        min_probability: float = 0.0,
        blank_bias: float = -2.0,
    ) -> None:
        if objective not in get_args(Objective):
            raise ValueError(f"objective must be one of {', '.join(get_args(Objective))}, not {objective!r}")
        if num_frames < num_labels:
            raise ValueError(f"num_frames ({num_frames}) must be at least num_labels ({num_labels})")
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
            chunk_anchors=chunk_anchors,
        )
        self.objective, self.decay = objective, decay
        self.num_nodes, self.top_k, self.min_probability = num_nodes, top_k, min_probability
        self.blank_row = nn.Parameter(torch.zeros(base.hidden_size))
        self.blank_bias = nn.Parameter(torch.tensor(float(blank_bias)))

    def loss(self, batch: TrainingBatch, borrowed: Borrowed) -> tuple[Tensor, dict[str, Tensor]]:
        frames, _, targets, valid = self.sampled_anchors(batch, borrowed)
        label_log_probs, blank_log_probs = gathered_log_probs(
            frames, targets, borrowed.head, self.blank_row, self.blank_bias, self.chunk_anchors
        )
        losses = anchor_loss(label_log_probs, blank_log_probs, targets, valid, self.objective, self.decay)
        num_kept = valid[:, 0].sum().clamp(min=1)
        return losses.sum() / num_kept, {"blank_share": blank_log_probs.detach().exp().mean()}

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

    def trees(self, frames: Tensor, roots: Tensor, borrowed: Borrowed, limits: Limits) -> list[DraftTree]:
        return [self._tree(*block, limits) for block in zip(*self.top_frames(frames, borrowed.head), strict=True)]

    def _tree(self, probs: np.ndarray, blank: np.ndarray, tokens: np.ndarray, limits: Limits) -> DraftTree:
        tokens, columns = np.unique(tokens, return_index=True)
        budget, depth = min(self.num_nodes, limits.max_nodes), min(limits.max_depth, self.num_frames)
        return prefix.search(probs[:, columns], blank, tokens, budget, depth, limits.eos, self.min_probability)[0]
