"""A complete learned drafter: one linear map per draft token, each reading the hidden state that decided the root."""

from collections.abc import Sequence

from torch import Tensor, inference_mode, nn

from drafters import BaseShape, BaseWeights, DraftTree, LearnedDrafter, Limits, RequiredOutputs, StepResult, register
from drafters.protocol import UNLIMITED, TrainingBatch


@register("linear_heads")
class LinearHeads(LearnedDrafter):
    """Predicts the next tokens independently of each other and drafts them as one chain.

    Args:
        base: Shape of the base; filled in by the trainer.
        num_heads: Draft tokens per step.
    """

    def __init__(self, base: BaseShape, num_heads: int = 3) -> None:
        super().__init__()
        self.required_outputs = RequiredOutputs(hidden_layers=(-1,))  # the state that the base's LM head reads
        self.heads = nn.ModuleList(nn.Linear(base.hidden_size, base.hidden_size) for _ in range(num_heads))
        self._states: list[Tensor] = []  # one per position that the base has committed

    def loss(self, batch: TrainingBatch, base_weights: BaseWeights) -> tuple[Tensor, dict[str, Tensor]]:
        total = batch.hidden.new_zeros(())
        for distance, head in enumerate(self.heads, 1):  # labels[p] is the base's own token after position p
            mask = batch.loss_mask[:, distance + 1 :]  # whether the token that a label stands for is the assistant's
            logits = head(batch.hidden[:, : -distance - 1])[mask] @ base_weights.head.T
            summed = nn.functional.cross_entropy(logits.float(), batch.labels[:, distance:-1][mask], reduction="sum")
            total = total + summed / batch.divisor(mask.sum())  # the divisor counts the terms of all processes
        return total, {}

    def begin(self, prompt: Sequence[int]) -> None:
        self._states = []

    @inference_mode()
    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        if not self._states or self.base_weights is None:  # before the prefill there is no state to read
            return DraftTree()
        self.draft_forwards += 1
        return self._draft(self._states[-1], self.base_weights, limits)

    def observe(self, step: StepResult) -> None:
        self._states.extend(step.committed_hidden().clone())

    def rewind(self, length: int) -> None:
        del self._states[max(length - 1, 0) :]

    @inference_mode()
    def draft_at(
        self, hidden: Tensor, input_ids: Tensor, anchors: Tensor, base_weights: BaseWeights, limits: Limits = UNLIMITED
    ) -> list[DraftTree]:
        return [self._draft(hidden[anchor - 1], base_weights, limits) for anchor in anchors.tolist()]

    def _draft(self, state: Tensor, base_weights: BaseWeights, limits: Limits) -> DraftTree:
        tokens = [int((base_weights.head @ head(state)).argmax()) for head in self.heads]
        return DraftTree.from_paths([tokens]).pruned(limits.max_depth, limits.max_nodes, limits.eos)
