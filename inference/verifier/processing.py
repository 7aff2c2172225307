"""Logits processors of transformers, applied to the base's logits at the nodes of a draft tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafters.tree import DraftTree

if TYPE_CHECKING:
    from transformers import LogitsProcessor


class ScoreProcessors:
    """A list of logits processors, called as transformers' own decoding loop would call them.

    If one of them may read the text, a row of logits is processed only when the text has got there: once for each token
    of the text, in order, as a batch of one row, with the token ids of prompt and text before that token. Transformers
    makes the very same calls without a drafter, so even a processor that counts its calls or keeps a state is exact.

    Args:
        processors: The processors; their order matters.

    Attributes:
        read_text: Whether any of them may read the text.
    """

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._processors: Any = ()
        if processors:
            from transformers import LogitsProcessorList

            self._processors = LogitsProcessorList(processors)
        self.read_text = any(not _reads_one_row_only(processor) for processor in processors)

    def __len__(self) -> int:
        return len(self._processors)

    def at_all_rows(self, logits: Tensor) -> Tensor:
        """Process the rows (N, V) together, for processors that do not read the text."""
        assert not self.read_text, "these processors need the text before each row"
        return self._processors(None, logits.float()) if self._processors else logits.float()

    def at_nodes(self, logits: Tensor, tree: DraftTree, text: Sequence[int]) -> Callable[[int], Tensor]:
        """Return a function that processes the row of one node, or of `ROOT`, and returns its scores (1, V).

        Args:
            logits: (1 + M, V); row 0 belongs to the root, row 1 + i to node i.
            tree: M nodes.
            text: Token ids up to the root.
        """

        def scores(node: int) -> Tensor:
            row = logits[1 + node : 2 + node]
            if not self.read_text:
                return self.at_all_rows(row)
            with (
                torch.inference_mode(False),
                torch.no_grad(),
            ):  # as `generate`: a processor may keep tensors
                token_ids = torch.tensor([[*text, *tree.path_tokens(node)]], device=logits.device)
                return self._processors(token_ids, row.to(torch.float32, copy=True))

        return scores


def _reads_one_row_only(processor: LogitsProcessor) -> bool:
    """Whether the processor reads nothing but a row of scores, so that a whole draft tree can go through it at once."""
    from transformers.generation import logits_process

    return type(processor) in {
        logits_process.TemperatureLogitsWarper,
        logits_process.TopKLogitsWarper,
        logits_process.TopPLogitsWarper,
        logits_process.MinPLogitsWarper,
        logits_process.TypicalLogitsWarper,
        logits_process.EpsilonLogitsWarper,
        logits_process.EtaLogitsWarper,
        logits_process.LogitNormalization,
    }
