"""What Medusa and Hydra share: one small head for each draft token, all on the state that decided the root."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafters.learned.losses import anchors as anchor_positions
from drafters.learned.losses import gathered_logits
from drafters.learned.parallel.drafter import check_at_least
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


class Block(nn.Module):
    """Residual layers x + SiLU(W x + b), the identity before training (Medusa, section 2.1.1).

    Args:
        hidden_size: D.
        num_layers: Layers.
        num_read: Embeddings that the first layer reads beside x (Hydra, section 3): its W is (D, (1 + n) * D).
    """

    def __init__(self, hidden_size: int, num_layers: int, num_read: int = 0) -> None:
        super().__init__()
        check_at_least(1, num_layers=num_layers)
        widths = [(1 + num_read) * hidden_size, *[hidden_size] * (num_layers - 1)]
        self.layers = nn.ModuleList(nn.Linear(width, hidden_size) for width in widths)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, read: Tensor | None = None) -> Tensor:
        """(..., D), with what is read beside it (..., n * D), to (..., D)."""
        first, *others = self.layers
        x = x + F.silu(first(x if read is None else torch.cat([x, read.to(x.dtype)], dim=-1)))
        for layer in others:
            x = x + F.silu(layer(x))
        return x


class HeadDrafter(LearnedDrafter):
    """K heads, each a `Block` and an output layer; head k guesses the k-th token after the root.

    At an anchor a the heads read the base's last state at position a - 1, which decided the root. The modules bear
    the names of vLLM's Medusa: ``blocks.{i}.layers.{j}``, ``lm_heads.{i}``.

    Args:
        base: Numbers of the base.
        blocks: One a head.
        own_heads: Whether each head has an output layer of its own, or all use the base's, frozen.
        decay: Head k weighs decay^k in the loss.
        num_anchors: Anchors sampled from each training sequence; 0 takes every assistant position.
        chunk_anchors: Rows whose logits are held at once.
        distillation: Whether the base's whole law is learned, not only its argmax.
    """

    rows_per_anchor = 1  # rows of one draft that go through an output layer together

    def __init__(
        self,
        base: BaseShape,
        blocks: Sequence[Block],
        own_heads: bool,
        decay: float,
        num_anchors: int,
        chunk_anchors: int,
        distillation: bool = False,
    ) -> None:
        super().__init__()
        check_at_least(1, num_heads=len(blocks), chunk_anchors=chunk_anchors)
        check_at_least(0, decay=decay, num_anchors=num_anchors)
        self.required_outputs = RequiredOutputs((-1,))
        self.vocab_size, self.num_heads, self.own_heads = base.vocab_size, len(blocks), own_heads
        self.decay, self.distillation = decay, distillation
        self.num_anchors, self.chunk_anchors = num_anchors, chunk_anchors
        self.blocks = nn.ModuleList(blocks)
        outputs = self.num_heads if own_heads else 0
        self.lm_heads = nn.ModuleList(nn.Linear(base.hidden_size, base.vocab_size, bias=False) for _ in range(outputs))
        for head in self.lm_heads:
            nn.init.normal_(head.weight, std=0.02)
        self._states: list[Tensor] = []  # the base's last state at every committed position

    @torch.no_grad()
    def initialise(self, base_weights: BaseWeights) -> None:
        for head in self.lm_heads:
            head.weight.copy_(base_weights.head)

    def encode(self, hidden: Tensor) -> Tensor:
        """The states that heads read, at every position (B, S, D) of whole texts."""
        return hidden.to(self.blocks[0].layers[0].weight.dtype)

    @abstractmethod
    def head_states(self, states: Tensor, path: Tensor, embedding: Tensor) -> list[Tensor]:
        """What the output layers read: K of (N, D).

        Args:
            states: (N, D), as `encode` gives them.
            path: (N, K) the root and the K - 1 tokens after it.
            embedding: (V, D) of the base.
        """

    @abstractmethod
    def trees(self, states: Tensor, roots: Tensor, base_weights: BaseWeights, limits: Limits) -> list[DraftTree]:
        """The draft trees below roots (A,), drafted from states (A, D); one copy to the host."""

    def logits(self, head: int, x: Tensor, base_weights: BaseWeights) -> Tensor:
        """(..., D) to (..., V), in float32 at least."""
        return (
            gathered_logits.wide(self.lm_heads[head](x))
            if self.own_heads
            else gathered_logits.logits(x, base_weights.head)
        )

    # ---- training

    def loss(self, batch: TrainingBatch, base_weights: BaseWeights) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum over heads of decay^k times the mean cross-entropy of head k (Medusa, equation 1).

        Where a head reads draft tokens, it reads those of the text, and its label is the base's own token after
        them: a path and its continuation, whether or not the base would have taken that path.
        """
        anchors, kept = anchor_positions.sample(batch.loss_mask, self.num_anchors or batch.loss_mask.shape[1])
        targets, valid = anchor_positions.following(batch.labels, batch.loss_mask, anchors, self.num_heads)
        valid = (valid & kept[..., None]).flatten(0, 1)  # (N, K)
        rows = torch.arange(len(anchors), device=anchors.device)[:, None]
        decided = anchors[..., None] + torch.arange(self.num_heads, device=anchors.device)  # (B, A, K)
        decided = decided.clamp(max=batch.labels.shape[1] - 1)
        states = self.encode(batch.hidden)[rows, (anchors - 1).clamp(min=0)].flatten(0, 1)  # (N, D)
        path = batch.input_ids[rows[..., None], decided].flatten(0, 1)
        teacher = batch.last[rows[..., None], decided].flatten(0, 1) if self.distillation else None  # (N, K, D)
        targets = targets.flatten(0, 1)
        total, seen = states.new_zeros(()), {}
        for head, x in enumerate(self.head_states(states, path, base_weights.embedding)):
            summed, right = 0.0, 0.0
            for at in range(0, len(x), self.chunk_anchors):
                part = slice(at, at + self.chunk_anchors)
                given = None if teacher is None else teacher[part, head]
                chunk = (head, x[part], targets[part, head], valid[part, head], given, base_weights)
                one, hits = checkpoint(self._chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
                summed, right = summed + one, right + hits
            count = batch.divisor(valid[:, head].sum())
            total = total + self.decay ** (head + 1) * summed / count
            seen[f"accuracy_{head + 1}"] = right / count
        return total, seen

    def _chunk(
        self, head: int, x: Tensor, targets: Tensor, valid: Tensor, teacher: Tensor | None, base_weights: BaseWeights
    ) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy of one head on some anchors, and how often its most probable token is the label."""
        logits = self.logits(head, x, base_weights)  # (n, V)
        goal = targets if teacher is None else gathered_logits.logits(teacher, base_weights.head).softmax(-1)
        losses = F.cross_entropy(logits, goal.to(logits.dtype) if goal.is_floating_point() else goal, reduction="none")
        right = (logits.detach().argmax(-1) == targets) & valid
        return torch.where(valid, losses, 0.0).sum(), right.sum()

    # ---- drafting

    def begin(self, prompt: Sequence[int]) -> None:
        self._states = []

    def state(self) -> Tensor:
        """What the heads read below the root: (1, D)."""
        return self._states[-1][None]

    @torch.inference_mode()
    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        assert self.base_weights is not None, "borrow() comes before propose()"
        if not self._states or min(limits.max_depth, limits.max_nodes) < 1:
            return DraftTree()
        self.draft_forwards += 1
        state = self.state()
        return self.trees(state, torch.tensor(seq[-1:], device=state.device), self.base_weights, limits)[0]

    @torch.inference_mode()
    def observe(self, step: StepResult) -> None:
        hidden = step.committed_hidden().to(self.blocks[0].layers[0].weight.dtype)
        self._states.extend(hidden.clone())  # without the clone, rows of rejected nodes would be kept alive

    def rewind(self, length: int) -> None:
        del self._states[max(length - 1, 0) :]

    @torch.inference_mode()
    def draft_at(
        self, hidden: Tensor, input_ids: Tensor, anchors: Tensor, base_weights: BaseWeights, limits: Limits = UNLIMITED
    ) -> list[DraftTree]:
        if min(limits.max_depth, limits.max_nodes) < 1:
            return [DraftTree()] * len(anchors)
        states, trees = self.encode(hidden[None])[0], []
        for part in anchors.split(max(1, self.chunk_anchors // self.rows_per_anchor)):
            trees += self.trees(states[(part - 1).clamp(min=0)], input_ids[part], base_weights, limits)
        return [tree if anchor else DraftTree() for tree, anchor in zip(trees, anchors.tolist(), strict=True)]
