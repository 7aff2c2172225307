"""EAGLE-3: one decoder layer over several fused base layers, trained on its own output as in drafting."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.checks import check_at_least
from drafters.eagle.eagle import AutoregressiveDrafter, AutoregressiveDraftOptions, DraftLayer, unroll_mask
from drafters.losses import gathered_logits
from drafters.losses.distillation import cross_entropy_of_states
from drafters.nn.draft_vocabulary import DraftVocabulary, add_draft_tokens, restricted
from drafters.nn.transformer import RMSNorm
from drafters.protocol import BaseShape, BaseWeights, TrainingBatch
from drafters.registry import register


@dataclass(frozen=True)
class EAGLE3LossOptions:
    """EAGLE-3's loss.

    Args:
        num_unroll: Number of draft depths that training runs through.
        decay: Weight of a depth's loss relative to the depth before.
    """

    num_unroll: int = 7
    decay: float = 0.8

    def __post_init__(self) -> None:
        check_at_least(1, num_unroll=self.num_unroll)


@dataclass(frozen=True)
class EAGLE3DraftOptions(AutoregressiveDraftOptions):
    """How EAGLE-3's layer builds a draft tree; decoding may change these options."""

    depth: int = 8


@dataclass(frozen=True)
class EAGLE3LayerOptions:
    """How EAGLE-3's layer computes, as public checkpoints differ in it.

    Args:
        norm_before_residual: Add the layer's output to the normed state instead of the state itself.
        has_qk_norm: Norm queries and keys per head, as Qwen3 does.
    """

    norm_before_residual: bool = False
    has_qk_norm: bool = False


@register("eagle3")
class EAGLE3(AutoregressiveDrafter):
    """EAGLE-3 (arXiv 2503.01840): trained on distributions alone, not on features, at every depth of a draft.

    A low, a middle and a high hidden state of the base are fused into one. One layer, whose attention reads it and the
    embedding of the next token side by side, predicts the next state. The LM head reads the norm of that state, and the
    next depth continues from the state itself. Training unrolls these steps ("training-time test", section 3.2).

    Args:
        hidden_layers: Base layers that are fused. By default layers 2, L / 2 and L - 3 of L; for a base of fewer than
            eight layers L / 4, L / 2 and the last hidden state.
        own_head: Train an LM head of the drafter's own, which starts as a copy of the base's rows. Otherwise the base's
            frozen ones are used.
        draft_vocab_size: Maximum number of tokens that can be drafted; null for the whole vocabulary. Training chooses
            the tokens that are most frequent in the assistant's text.
    """

    draft_tokens: Tensor | None
    _drafted: BaseWeights | None = None  # the attached base's, with the LM head's rows for the draft vocabulary

    def __init__(
        self,
        base: BaseShape,
        hidden_layers: Sequence[int] = (),
        own_head: bool = False,
        draft_vocab_size: int | None = None,
        layer: EAGLE3LayerOptions = EAGLE3LayerOptions(),
        loss: EAGLE3LossOptions = EAGLE3LossOptions(),
        draft: EAGLE3DraftOptions = EAGLE3DraftOptions(),
    ) -> None:
        if 0 < draft.window < loss.num_unroll:
            raise ValueError(f"window ({draft.window}) must be at least num_unroll ({loss.num_unroll}), or 0")
        draft_layer = DraftLayer(base, num_inputs=2, has_qk_norm=layer.has_qk_norm)
        layers = hidden_layers or low_middle_high(base.num_layers)
        super().__init__(base, draft_layer, hidden_layers=layers, draft=draft)
        self.loss_options = loss
        self.norm_before_residual, self.has_qk_norm = layer.norm_before_residual, layer.has_qk_norm
        self.vocab_size, size = base.vocab_size, base.hidden_size
        num_drafted = add_draft_tokens(self, draft_vocab_size, base.vocab_size)
        self.fc = nn.Linear(len(self.required_outputs.hidden_layers) * size, size, bias=False)
        self.input_layernorm = RMSNorm(size, eps=base.norm_eps)
        self.hidden_norm = RMSNorm(size, eps=base.norm_eps)
        self.norm = RMSNorm(size, eps=base.norm_eps)
        self.lm_head = nn.Linear(size, num_drafted, bias=False) if own_head else None

    @torch.no_grad()
    def initialise(self, base_weights: BaseWeights) -> None:
        if self.lm_head is not None:
            self.lm_head.weight.copy_(restricted(base_weights, self.draft_tokens)[0].head)

    def attach_base_weights(self, base_weights: BaseWeights) -> None:
        super().attach_base_weights(base_weights)
        if self.lm_head is None:
            self._drafted, _ = restricted(base_weights, self.draft_tokens)

    def project_hidden(self, hidden: Tensor) -> Tensor:
        return self.fc(hidden)

    def join_embedding(self, states: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(states)
        x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return (normed if self.norm_before_residual else states), x

    def logits(self, states: Tensor, base_weights: BaseWeights) -> Tensor:
        if self.draft_tokens is None:
            return self.draft_logits(states, base_weights)
        if self.lm_head is None:
            attached = self._drafted if base_weights is self.base_weights else None
            base_weights = attached or restricted(base_weights, self.draft_tokens)[0]
        logits = self.draft_logits(states, base_weights)
        return DraftVocabulary(self.draft_tokens, self.vocab_size).spread(logits, -torch.inf)

    def draft_logits(self, states: Tensor, drafted: BaseWeights) -> Tensor:
        """Logits of states (..., D) over the tokens that can be drafted, given the base's weights for these."""
        normed = self.norm(states)
        return self.lm_head(normed) if self.lm_head is not None else gathered_logits.base_logits(normed, drafted)

    def unroll(self, hidden: Tensor, tokens: Tensor, base_weights: BaseWeights, num_steps: int) -> Iterator[Tensor]:
        """Yield the predicted states (B, S, D) of the next positions at depths 0, 1, ..., each from the one before.

        At depth j pair p uses the state that depth j - 1 predicted for its position, and attends as `unroll_mask` says.
        The states are meaningful from position j on. Takes the base's hidden states (B, S, F * D) and the token after
        each position (B, S).
        """
        states, embedded = self.project_hidden(hidden.to(self.dtype)), self.embed(tokens, base_weights)
        num_positions = tokens.shape[1]
        positions = torch.arange(num_positions, device=tokens.device)[None]
        all_keys: list[Tensor] = []
        all_values: list[Tensor] = []
        for depth in range(num_steps):
            residual, x = self.join_embedding(states, embedded)
            queries, keys, values = self.layer.queries_keys_values(x, positions)
            all_keys.append(keys)
            all_values.append(values)
            mask = unroll_mask(num_positions, depth, self.window, tokens.device)
            keys, values = torch.cat(all_keys, dim=-2), torch.cat(all_values, dim=-2)
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            states = self.layer(residual, attended)
            yield states
            states = F.pad(states, (0, 0, 1, 0))[:, :-1]

    def loss(self, batch: TrainingBatch, base_weights: BaseWeights) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted mean over depths of the cross-entropy with the base's distribution.

        It counts paths within the assistant's text. With a draft vocabulary the base's distribution is that over its
        tokens, and a path ends before a position at which the base's most probable token is none of them.
        """
        options = self.loss_options
        drafted, vocabulary = restricted(base_weights, self.draft_tokens)
        is_assistant = batch.loss_mask[:, 2:]  # pair p predicts the token of p + 2
        if vocabulary is not None:
            is_assistant = is_assistant & vocabulary.can_draft(batch.labels[:, 1:-1])
        counts = is_assistant
        last_hidden = batch.required_last_hidden()[:, 1:-1]
        total, weights = torch.zeros((), device=counts.device), 0.0
        losses: list[Tensor] = []
        inputs = batch.hidden[:, :-2], batch.input_ids[:, 1:-1], base_weights
        draft_logits = partial(self.draft_logits, drafted=drafted)
        for depth, states in enumerate(self.unroll(*inputs, options.num_unroll)):
            if depth:
                counts = is_assistant & F.pad(counts, (1, 0))[:, :-1]
            counted = counts.nonzero(as_tuple=True)  # found once: the host waits for their number
            terms = cross_entropy_of_states(states[counted], draft_logits, last_hidden[counted], drafted.head)
            losses.append(terms.sum() / batch.divisor(counts.sum()))
            weight = options.decay**depth
            total, weights = total + weight * losses[-1], weights + weight
        return total / weights, {"first_loss": losses[0].detach(), "deepest_loss": losses[-1].detach()}


def low_middle_high(num_layers: int) -> tuple[int, ...]:
    """The base layers that EAGLE-3 fuses by default."""
    if num_layers < 8:
        return (num_layers // 4, num_layers // 2, -1)
    return (2, num_layers // 2, num_layers - 3)
