"""The cascades of CS Drafting: cheaper drafters draft for, and behind, the draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from drafters.protocol import Drafter, Limits
from drafters.training_free.corpus import CorpusTable
from drafters.training_free.draft_model import DraftModel
from drafters.training_free.draft_session import DraftSession
from drafters.training_free.ngram import PromptLookup
from drafters.tree import DraftTree


class MaxGram(PromptLookup):
    """Max-Gram (CS Drafting, arXiv 2312.11462): prompt lookup, and bigrams of a large text where nothing matches.

    Args:
        table: N-grams of a text, of which the most frequent token after each token is used; None for no bigrams.
        max_ngram: Number of tokens of the longest suffix to match; shorter ones are tried next.
        num_draft: Largest number of tokens to draft.
    """

    def __init__(self, table: CorpusTable | None = None, max_ngram: int = 3, num_draft: int = 10) -> None:
        super().__init__(max_ngram, num_draft)
        self.table = table

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        tree = super().propose(seq, limits)
        if len(tree) or self.table is None:
            return tree
        tokens = [seq[-1]]
        for _ in range(min(self.num_draft, limits.max_depth, limits.max_nodes)):
            grams = self.table.after(tokens[-1:])
            if not grams:
                break
            tokens.append(grams[0][0])
            if tokens[-1] in limits.eos:
                break
        return DraftTree(tokens[1:], range(-1, len(tokens) - 2))


class HorizontalCascade(DraftModel):
    """The draft model writes the first tokens of a chain, and a cheaper drafter the last ones (CS Drafting).

        root ── d1 ── d2 ── d3 ── m1 ── m2 ── m3        three tokens of the draft model, then those of Max-Gram

    The first tokens of a draft are accepted most often, so the better drafter writes them.

    Args:
        inner: Session of the draft model.
        extension: Continues the draft model's chain by a chain of its own.
        num_draft: Largest number of tokens of the draft model per step.
        threshold: The draft model stops after a token whose probability is below this; 0 never stops it.
    """

    def __init__(self, inner: DraftSession, extension: Drafter, num_draft: int = 5, threshold: float = 0.0) -> None:
        super().__init__(inner, num_draft, threshold)
        self.extension, self.remembers = extension, inner.remembers or extension.remembers

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self.extension.begin(prompt)

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        tree = super().propose(seq, limits)
        depth = len(tree)
        if not depth or tree.tokens[-1] in limits.eos:
            return tree
        left = replace(limits, max_depth=limits.max_depth - depth, max_nodes=limits.max_nodes - depth)
        chain = self.extension.propose([*seq, *tree.tokens], left)
        self.extension.rewind(len(seq))
        return replace(tree, tokens=[*tree.tokens, *chain.tokens], parents=range(-1, depth + len(chain) - 1))

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self.extension.rewind(length)

    def reset(self) -> None:
        super().reset()
        self.extension.reset()
