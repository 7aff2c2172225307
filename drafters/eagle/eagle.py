"""EAGLE: one decoder layer that predicts the base's last hidden states, one after another."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.eagle.drafter import AutoregressiveDrafter, AutoregressiveDraftOptions, DraftLayer
from drafters.losses import gathered_logits
from drafters.losses.distillation import cross_entropy_of_states
from drafters.protocol import BaseShape, BaseWeights, TrainingBatch
from drafters.registry import register


@dataclass(frozen=True)
class EAGLELossOptions:
    """EAGLE's loss.

    Args:
        feature_weight: Weight of the smooth L1 distance between predicted and actual features.
        token_weight: Weight of the cross-entropy between the distributions of predicted and actual features.
        noise: Width of the uniform noise added to features in training, times 512 / S.
    """

    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.2


@register("eagle")
class EAGLE(AutoregressiveDrafter):
    """EAGLE (arXiv 2401.15077) with the dynamic draft tree of EAGLE-2 (arXiv 2406.16858).

    A feature is a last hidden state of the base, which its LM head reads. The feature of position p is joined with the
    embedding of token p + 1; one LLaMA layer predicts the feature of position p + 1 from it, and the frozen LM head
    reads the distribution of token p + 2. Training uses the features of the text; below the root the layer uses its
    own.

    Args:
        fc_bias: Whether the projection of feature and embedding has a bias, as in the paper's code. vLLM's EAGLE has
            none.
    """

    def __init__(
        self,
        base: BaseShape,
        fc_bias: bool = True,
        loss: EAGLELossOptions = EAGLELossOptions(),
        draft: AutoregressiveDraftOptions = AutoregressiveDraftOptions(),
    ) -> None:
        layer = DraftLayer(base)
        super().__init__(base, layer, hidden_layers=(-1,), draft=draft)
        self.loss_options = loss
        self.fc = nn.Linear(2 * base.hidden_size, base.hidden_size, bias=fc_bias)

    def project_hidden(self, hidden: Tensor) -> Tensor:
        return hidden

    def join_embedding(self, states: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, states], dim=-1))
        return x, x  # EAGLE's layer has no norm before attention

    def logits(self, states: Tensor, base_weights: BaseWeights) -> Tensor:
        return gathered_logits.base_logits(states, base_weights)

    def loss(self, batch: TrainingBatch, base_weights: BaseWeights) -> tuple[Tensor, dict[str, Tensor]]:
        """Section 3.2: features and distributions at every position whose next token is the assistant's."""
        options = self.loss_options
        inputs = batch.hidden[:, :-2].to(self.dtype)  # pair p predicts the feature of p + 1 and the token of p + 2
        if self.training and options.noise:
            inputs = inputs + (torch.rand_like(inputs) - 0.5) * (options.noise * 512 / batch.hidden.shape[1])
        predicted = self(inputs, batch.input_ids[:, 1:-1], base_weights)
        counts = batch.loss_mask[:, 2:]
        counted = counts.nonzero(as_tuple=True)  # found once: the host waits for their number
        predicted, features = predicted[counted], batch.hidden[:, 1:-1][counted]  # (N, D)
        num_terms = batch.divisor(counts.sum())
        distances = F.smooth_l1_loss(predicted, features.to(predicted.dtype), reduction="none").mean(-1)
        feature_loss = distances.sum() / num_terms
        token_losses = cross_entropy_of_states(
            predicted, lambda states: self.logits(states, base_weights), features, base_weights.head
        )
        token_loss = token_losses.sum() / num_terms
        loss = options.feature_weight * feature_loss + options.token_weight * token_loss
        return loss, {"feature_loss": feature_loss.detach(), "token_loss": token_loss.detach()}
