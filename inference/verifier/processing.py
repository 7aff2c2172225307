"""Logits processors of transformers, applied to the base's logits at the nodes of a draft tree."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from drafters.tree import DraftTree

# Processors of transformers that read nothing but a row of scores, so a whole draft tree goes through them at once.
READ_ONE_ROW = {
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper",
    "EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization",
}  # fmt: skip


def is_one_of(names: set[str], processor: object) -> bool:
    """Whether a processor is of one of these classes of transformers, not of one derived from them."""
    kind = type(processor)
    return kind.__name__ in names and kind.__module__ == "transformers.generation.logits_process"


class ScoreProcessors:
    """A list of logits processors, in order, called as transformers' own decoding loop would call them.

    If one of them may read the text, a row of logits is processed only when the text has got there: once for each token
    of the text, in order, as a batch of one row, with the token ids of prompt and text before that token. Transformers
    makes the very same calls without a drafter, so even a processor that counts its calls or keeps a state is exact.
    ``read_text`` says whether any of them may.
    """

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._processors: Any = LogitsProcessorList(processors)
        self.read_text = any(not is_one_of(READ_ONE_ROW, processor) for processor in processors)

    def __len__(self) -> int:
        return len(self._processors)

    def at_all_rows(self, logits: Tensor) -> Tensor:
        """Process the rows (N, V) together, for processors that do not read the text."""
        assert not self.read_text, "these processors need the text before each row"
        return self._processors(None, logits.float()) if self._processors else logits.float()

    def at_nodes(self, logits: Tensor, tree: DraftTree, text: Sequence[int]) -> Callable[[int], Tensor]:
        """Return a function that processes the row of one node, or of `ROOT`, and returns its scores (1, V).

        ``logits`` (1 + M, V) and ``text``, the token ids up to the root, are those of `TreeLogits`.
        """

        def scores(node: int) -> Tensor:
            row = logits[1 + node : 2 + node]
            if not self.read_text:
                return self.at_all_rows(row)
            with torch.inference_mode(False), torch.no_grad():  # as `generate`: a processor may keep tensors
                token_ids = torch.tensor([[*text, *tree.path_tokens(node)]], device=logits.device)
                return self._processors(token_ids, row.to(torch.float32, copy=True))

        return scores
