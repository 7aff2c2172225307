"""The CTC drafter: T frames from one pass over the base's hidden states, collapsed into a draft tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from drafters.checks import check_at_least
from drafters.ctc.loss import CTCLossOptions, CTCOutput, ctc_loss
from drafters.ctc.trees import TokenBias, draw, paper_trees
from drafters.losses import gathered_logits
from drafters.parallel import ParallelDrafter, ParallelDraftOptions, TrunkOptions
from drafters.protocol import BaseShape, BaseWeights, Limits, TrainingBatch
from drafters.registry import register
from drafters.tree import DraftTree
from drafters.trees.search import Candidates, SearchLimits, search


@dataclass(frozen=True)
class CTCTrunkOptions(TrunkOptions):
    """The network of the CTC drafter.

    As in the paper, by default it is one layer over the last hidden state without a Markov bias. The learned frame
    embeddings, and the root's embedding in every frame, are ours: the paper does not say what its frames are made from.

    Args:
        blank_bias: Initial value of the blank's bias; a negative one keeps training away from all-blank frames.
    """

    num_frames: int = 12
    frames_differ: bool = True
    root_everywhere: bool = True
    blank_bias: float = -2.0


@dataclass(frozen=True)
class CTCDraftOptions(ParallelDraftOptions):
    """How the CTC drafter's frames become a draft tree; decoding may change these options.

    Args:
        tree: ``prefix``, the most probable collapsed prefixes; ``paper``, the most probable sequences of all frames,
            collapsed afterwards; or ``chain``, the most probable path.
        draws: Number of texts that decoding samples from the frames instead of building ``tree``, for exact rejection
            sampling; 0 for none. Of the other options only ``num_nodes`` applies then. Validation and simulation always
            use ``tree``.
        draw_temperature: Temperature of the sampled texts.
    """

    tree: Literal["prefix", "paper", "chain"] = "prefix"
    draws: int = 0
    draw_temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(0, draws=self.draws)
        if not self.draw_temperature > 0:
            raise ValueError(f"draw_temperature must be above 0, not {self.draw_temperature}")


@register("ctc")
class CTC(ParallelDrafter):
    """Attention draft module with a CTC output (CTC-drafter, section 3), drafting by exact prefix search.

    The queries are T frames: a learned frame embedding and the embedding of the root token. They attend to the base's
    hidden states strictly before the root. The base's frozen LM head and one trainable blank row give each frame a
    distribution over V + 1 symbols.
    """

    has_blank = True
    loss_options: CTCLossOptions

    def __init__(
        self,
        base: BaseShape,
        trunk: CTCTrunkOptions = CTCTrunkOptions(),
        loss: CTCLossOptions = CTCLossOptions(),
        draft: CTCDraftOptions = CTCDraftOptions(),
    ) -> None:
        if trunk.num_frames < loss.num_labels:
            raise ValueError(f"num_frames ({trunk.num_frames}) must be at least num_labels ({loss.num_labels})")
        if draft.tree == "paper" and (trunk.markov_rank or draft.min_probability):
            raise ValueError(
                "tree paper has no bias between tokens and no node probabilities: leave out markov_rank and "
                "min_probability, or set tree to prefix"
            )
        if trunk.copy and (loss.objective == "ctc" or draft.tree == "paper"):
            raise ValueError("objective ctc and tree paper know no copies: take prefix")
        super().__init__(base, trunk, loss.num_labels, loss, draft)
        self.draws, self.draw_temperature = draft.draws, draft.draw_temperature
        self.samples_drafts = draft.draws > 0
        self.blank_row = nn.Parameter(torch.zeros(base.hidden_size))
        self.blank_bias = nn.Parameter(torch.tensor([float(trunk.blank_bias)]))  # FSDP2 cannot shard scalars

    # ---- training

    def loss(self, batch: TrainingBatch, base_weights: BaseWeights) -> tuple[Tensor, dict[str, Tensor]]:
        anchored, head, right = self.loss_inputs(batch, base_weights)
        output = CTCOutput(self.blank_row, self.blank_bias[0], right)
        return ctc_loss(anchored, head, output, self.loss_options, batch.divisor)

    # ---- drafting

    def logits(self, frames: Tensor, base_weights: BaseWeights) -> Tensor:
        """Logits (..., V' + 1) of frame states (..., D), the blank last."""
        wide = gathered_logits.at_least_float32
        blank = (wide(frames) * wide(self.blank_row)).sum(-1) + wide(self.blank_bias)  # as precise as in the loss
        return torch.cat([super().logits(frames, base_weights), blank[..., None]], dim=-1)

    def search(self, candidates: Candidates, limits: SearchLimits) -> list[DraftTree]:
        return paper_trees(candidates, limits) if self.draft_options.tree == "paper" else search(candidates, limits)

    def draft(self, seq: Sequence[int], base_weights: BaseWeights, limits: Limits) -> DraftTree:
        if not self.draws:
            return super().draft(seq, base_weights, limits)
        self.draft_forwards += 1
        context = self._cache.read()
        frames, _ = self.frames_below(context, self.root(context, seq, limits), base_weights)
        weights, markov, vocabulary = self.output(base_weights)
        logits = self.logits(frames, weights)[0]  # (T, V' + 1)
        bias: TokenBias | None = markov
        if vocabulary is not None:
            logits = vocabulary.spread(logits, -torch.inf)  # (T, V + 1)
            bias = None if markov is None else lambda tokens: vocabulary.spread(markov(tokens), 0.0)
        num_nodes = min(self.draft_options.num_nodes, limits.max_nodes)
        within = SearchLimits(num_nodes, limits.max_depth, limits.eos)
        generator = np.random.default_rng((limits.draft_seed, 0))
        return draw(logits, seq[-1], self.draws, within, generator, bias, self.draw_temperature)
