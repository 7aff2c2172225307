"""Medusa and its base class, which Hydra shares: one head per draft token, reading the state that decided the root."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafters.checks import MAX_LAYERS, check_at_least, check_at_most, check_choices
from drafters.losses import anchors as anchor_positions
from drafters.losses import distillation, gathered_logits
from drafters.losses.chunks import anchors_per_chunk, chunks
from drafters.nn.draft_cache import CachingDrafter, Context, Root
from drafters.nn.table import Table
from drafters.protocol import BaseShape, BaseWeights, Limits, RequiredOutputs, TrainingBatch
from drafters.registry import register
from drafters.tree import DraftTree
from drafters.trees.search import Candidates, SearchLimits, search


@dataclass(frozen=True)
class HeadOptions:
    """The heads.

    Args:
        num_heads: K, number of heads, one per draft token after the root.
        num_layers: Residual layers of each head; 1 is Medusa's and Hydra's, 4 that of Hydra++.
        own_heads: Give each head an output layer of its own, as in the papers. Otherwise all use the base's frozen LM
            head.
    """

    num_heads: int = 5
    num_layers: int = 1
    own_heads: bool = True

    def __post_init__(self) -> None:
        check_at_least(1, num_heads=self.num_heads, num_layers=self.num_layers)
        check_at_most(MAX_LAYERS, num_heads=self.num_heads, num_layers=self.num_layers)


@dataclass(frozen=True)
class HeadLossOptions:
    """The loss of the heads.

    Args:
        decay: Head k is weighted by decay^k; 0.8 is Medusa's, 1 that of Hydra's code.
        distillation: Train the heads on the base's full distribution instead of its argmax (Hydra++).
        num_anchors: Anchors sampled from each training sequence; 0 takes every assistant position.
    """

    decay: float = 0.8
    distillation: bool = False
    num_anchors: int = 64

    def __post_init__(self) -> None:
        check_at_least(0, decay=self.decay, num_anchors=self.num_anchors)


class ResidualBlock(nn.Module):
    """Residual layers x + SiLU(W x + b), the identity before training (Medusa, section 2.1.1).

    The first layer may read n embeddings with x (Hydra, section 3); its W is then (D, (1 + n) * D), and instead of x it
    passes on a second linear map of all that it reads, as in Hydra's code, which starts as x.
    """

    def __init__(self, hidden_size: int, num_layers: int, num_embeddings: int = 0) -> None:
        super().__init__()
        widths = [(1 + num_embeddings) * hidden_size, *[hidden_size] * (num_layers - 1)]
        self.layers = nn.ModuleList(nn.Linear(width, hidden_size) for width in widths)
        self.residual = nn.Linear(widths[0], hidden_size) if num_embeddings else None
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        if self.residual is not None:
            nn.init.eye_(self.residual.weight)

    def forward(self, x: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """Return states (..., D) computed from states (..., D) and embeddings (..., n * D)."""
        first, *others = self.layers
        read = x if embeddings is None else torch.cat([x, embeddings.to(x.dtype)], dim=-1)
        x = (x if self.residual is None else self.residual(read)) + F.silu(first(read))
        for layer in others:
            x = x + F.silu(layer(x))
        return x


class HeadDrafter(CachingDrafter):
    """K heads, each a `ResidualBlock` and an output layer; head k predicts the k-th token after the root.

    At an anchor a the heads read the base's last hidden state at position a - 1, which decided the root. The modules
    have the names of vLLM's Medusa: ``blocks.{i}.layers.{j}``, ``lm_heads.{i}``.
    """

    anchors_at_once = 512

    def __init__(
        self, base: BaseShape, blocks: Sequence[ResidualBlock], heads: HeadOptions, loss: HeadLossOptions
    ) -> None:
        super().__init__()
        self.required_outputs = RequiredOutputs((-1,))
        self.vocab_size, self.num_heads, self.own_heads = base.vocab_size, heads.num_heads, heads.own_heads
        self.decay, self.distillation, self.num_anchors = loss.decay, loss.distillation, loss.num_anchors
        self.blocks = nn.ModuleList(blocks)
        num_outputs = heads.num_heads if heads.own_heads else 0
        self.lm_heads = nn.ModuleList(
            nn.Linear(base.hidden_size, base.vocab_size, bias=False) for _ in range(num_outputs)
        )
        for weight in self.lm_heads.parameters():
            nn.init.normal_(weight, std=0.02)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.blocks.parameters()).dtype

    @torch.no_grad()
    def initialise(self, base_weights: BaseWeights) -> None:
        for weight in self.lm_heads.parameters():
            weight.copy_(base_weights.head)

    def encode(self, hidden: Tensor) -> Tensor:
        """The states that the heads read, at every position (B, S, D) of complete texts."""
        return hidden.to(self.dtype)

    @abstractmethod
    def head_states(self, states: Tensor, path: Tensor, embedding: Tensor) -> list[Tensor]:
        """The states that the output layers read: K tensors of (N, D).

        Takes states (N, D) from `encode`, the root and the K - 1 tokens after it (N, K), and the base's embedding.
        """

    @abstractmethod
    def table(self, states: Tensor, roots: Tensor, base_weights: BaseWeights, limits: Limits | Root) -> Table:
        """What the heads predict below roots (A,), from states (A, D)."""

    def logits(self, head: int, x: Tensor, base_weights: BaseWeights) -> Tensor:
        """Logits (..., V) of a head's states (..., D), in float32 at least."""
        if self.own_heads:
            return gathered_logits.at_least_float32(self.lm_heads[head](x))
        return gathered_logits.base_logits(x, base_weights)

    # ---- training

    def loss(self, batch: TrainingBatch, base_weights: BaseWeights) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum over heads of decay^k times the mean loss of head k.

        That is the cross-entropy with the labels (Medusa, equation 1) or, with distillation, with the base's
        distributions. A head that reads draft tokens reads those of the text, and its label is the base's own token
        after them, whether or not the base would have written the text itself.
        """
        anchors, is_valid = anchor_positions.sample(batch.loss_mask, self.num_anchors)
        targets, valid = anchor_positions.following(batch.labels, batch.loss_mask, anchors, self.num_heads)
        valid = (valid & is_valid[..., None]).flatten(0, 1)  # (N, K)
        rows = torch.arange(len(anchors), device=anchors.device)[:, None]
        deciding = anchors[..., None] + torch.arange(self.num_heads, device=anchors.device)  # (B, A, K)
        deciding = deciding.clamp(max=batch.labels.shape[1] - 1)
        states = self.encode(batch.hidden)[rows, (anchors - 1).clamp(min=0)].flatten(0, 1)  # (N, D)
        path = batch.input_ids[rows[..., None], deciding].flatten(0, 1)
        teacher: Tensor | None = None
        if self.distillation:
            teacher = batch.required_last_hidden()[rows[..., None], deciding].flatten(0, 1)  # (N, K, D)
        targets = targets.flatten(0, 1)
        total = states.new_zeros(())
        metrics: dict[str, Tensor] = {}
        size = anchors_per_chunk(1 + self.distillation, self.vocab_size, states.device)
        for head, x in enumerate(self.head_states(states, path, base_weights.embedding)):
            head_loss = num_right = torch.zeros((), device=states.device)
            for part in chunks(len(x), size):
                part_teacher = None if teacher is None else teacher[part, head]
                chunk = (head, x[part], targets[part, head], valid[part, head], part_teacher, base_weights)
                part_loss, part_right = checkpoint(self._chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
                head_loss, num_right = head_loss + part_loss, num_right + part_right
            count = batch.divisor(valid[:, head].sum())
            total = total + self.decay ** (head + 1) * head_loss / count
            metrics[f"accuracy_{head + 1}"] = num_right / count
        return total, metrics

    def _chunk(
        self, head: int, x: Tensor, targets: Tensor, valid: Tensor, teacher: Tensor | None, base_weights: BaseWeights
    ) -> tuple[Tensor, Tensor]:
        """Summed loss of one head on some anchors, and how often its most probable token is the label."""
        logits = self.logits(head, x, base_weights)  # (n, V)
        if teacher is None:
            losses = F.cross_entropy(logits, targets, reduction="none")
        else:
            losses = distillation.cross_entropy(logits, teacher, base_weights.head)
        is_right = (logits.detach().argmax(-1) == targets) & valid
        return torch.where(valid, losses, 0.0).sum(), is_right.sum()

    # ---- drafting

    def cached(self, hidden: Tensor, positions: Tensor, tokens: Tensor | None, base_weights: BaseWeights) -> Context:
        return [(hidden[:, None].to(self.dtype),)]

    def state(self, context: Context, root: Root) -> Tensor:
        """The state (1, D) that the heads read below a root."""
        return root.last(context[0][0])[:, 0, 0]

    def drafted(self, context: Context, root: Root, base_weights: BaseWeights) -> Table:
        return self.table(self.state(context, root), root.token[0], base_weights, root)

    def known_text(
        self, hidden: Tensor, input_ids: Tensor, base_weights: BaseWeights, limits: Limits
    ) -> Callable[[Tensor], Table]:
        states = self.encode(hidden[None])[0]
        return lambda anchors: self.table(states[anchors - 1], input_ids[anchors], base_weights, limits)


@dataclass(frozen=True)
class MedusaDraftOptions:
    """How Medusa's heads become a draft tree; decoding may change these options.

    Args:
        tree: ``best_first``, the most probable combinations, or ``chain``, the most probable token of each head.
        num_nodes: M, largest number of nodes in a draft tree.
        top_k: Most probable tokens of each head that may enter the tree.
        static: A fixed tree instead of ``tree``: paths of ranks, parents first; a JSON file has them under ``static``.
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
        self.static = check_static(draft.static, heads.num_heads, base.vocab_size)
        if self.static:
            self.top_k = 1 + max(path[-1] for path in self.static)

    def head_states(self, states: Tensor, path: Tensor, embedding: Tensor) -> list[Tensor]:
        return [block(states) for block in self.blocks]

    def table(self, states: Tensor, roots: Tensor, base_weights: BaseWeights, limits: Limits | Root) -> Table:
        """The ``top_k`` most probable tokens of every head, and behind them their probabilities, both (A, K, k)."""
        distributions = (
            self.logits(head, block(states), base_weights).softmax(-1) for head, block in enumerate(self.blocks)
        )
        probs, tokens = zip(*(distribution.topk(self.top_k) for distribution in distributions), strict=True)
        return Table.of((torch.stack(tokens, dim=1), torch.stack(probs, dim=1)), probs[0].dtype)

    def trees_from(self, parts: list[np.ndarray], limits: Limits) -> list[DraftTree]:
        token_ids, probabilities = parts
        candidates = Candidates(token_ids.astype(np.int64), probabilities)
        if self.static:
            trees = (fill_static(self.static, ranked) for ranked in candidates.tokens)
            return [tree.pruned(limits.max_depth, limits.max_nodes, limits.eos) for tree in trees]
        num_nodes, is_chain = min(self.draft_options.num_nodes, limits.max_nodes), self.draft_options.tree == "chain"
        search_limits = SearchLimits(num_nodes, limits.max_depth, limits.eos, is_chain=is_chain)
        return search(candidates, search_limits)


# ---- static trees: paths of ranks, filled with the most probable tokens of each draft


def check_static(static: Sequence[Sequence[int]], max_depth: int, num_ranks: int) -> list[tuple[int, ...]]:
    """The rank paths as tuples; ValueError if they are no tree of this depth, parents first."""
    try:
        paths = [tuple(int(rank) for rank in path) for path in static]
    except (TypeError, ValueError):
        raise ValueError("static must be a list of rank paths such as [[0], [0, 0], [1]]") from None
    earlier: set[tuple[int, ...]] = {()}
    for path in paths:
        has_place = path not in earlier and path[:-1] in earlier and len(path) <= max_depth
        if not has_place or not 0 <= path[-1] < num_ranks:
            reason = f"it repeats a path, comes before its parent, or leaves {max_depth} levels or {num_ranks} ranks"
            raise ValueError(f"rank path {path} does not fit: {reason}")
        earlier.add(path)
    return paths


def fill_static(paths: Sequence[tuple[int, ...]], tokens: np.ndarray) -> DraftTree:
    """Fill a static tree with the most probable tokens (K, k) of each depth, distinct within one."""
    rows = tokens.tolist()
    return DraftTree.from_paths([[row[rank] for row, rank in zip(rows, path, strict=False)] for path in paths])
