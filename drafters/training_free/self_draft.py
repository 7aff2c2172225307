"""Self-Draft: the base itself writes noisy branches beside the text, and their n-grams are drafted later."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

from drafters.protocol import Drafter, Limits, RequiredOutputs, StepResult
from drafters.training_free.corpus import CorpusTable
from drafters.training_free.pool import NgramPool
from drafters.tree import ROOT, DraftTree

KEPT_GRAMS, KEPT_EVERY = 2, 2  # keep the newest two of each key, every two texts
CORPUS_CHAINS, CORPUS_CHAINS_BESIDE_A_FULL_CACHE = 3, 2


class SelfDraft(Drafter):
    """Multi-branch self-drafting (Self-Draft paper, Algorithm 1; timing and orders of its public code).

    Branches are scratch chains below the root. All but the first begin with pads, random words of the prompt; each
    step the base's argmax at a branch's end is appended to it and its first token dropped, whatever was accepted.
    Until the branches have grown to their lengths (``branch_len - 2`` steps) nothing else is fed:

        root ─┬─ a1 ─ a2 ─ a3 ─ a4             branch 0: what follows the root if nothing is refused
              ├─ pad ─ b1 ─ b2 ─ b3 ─ b4       branches 1..N-1: one to max_pad pads, then branch_len - 2 tokens
              └─ pad ─ pad ─ c1 ─ c2 ─ c3 ─ c4

    Every ``gram`` tokens in a row and the argmax after them enter the context cache: the first is the key, the rest
    an n-gram. What the cache holds for the root is drafted, oldest first, and then what the corpus cache holds.
    The context cache outlives a text; after every two texts the newest two n-grams of each key stay.

    Other than the code, which this follows where it and the paper differ: candidates share their common prefixes; a
    draft that is accepted whole gains the bonus token too (``drop_last`` gives the code's counts); an n-gram that ends
    in the next token holds that token, not another branch's; each n-gram of a step is inserted once, in the order of
    the text. In the paper the cache is fed by branches alone (``text_ngrams`` off), and branches are ``branch_len``
    long, pads included.

    Where the branches do not fit into the limits they stand still, and the caches draft alone.

    Args:
        branch_len: L; branches have L - 2 tokens behind their pads.
        num_branches: N, the first one included.
        gram: G, tokens of an n-gram behind its key; less than branch_len.
        max_pad: Pads of a branch at most.
        cache_size: N-grams of a key that the context cache holds; the least recently inserted goes first.
        text_ngrams: Whether the n-grams of prompt and answer enter the context cache too.
        drop_last: Whether the last token of each n-gram is left out of the draft.
        seed: Of the pads; every text starts with it anew.
        corpus: The corpus cache, if any.
    """

    required_outputs = RequiredOutputs(top_k=1)

    def __init__(
        self,
        branch_len: int = 6,
        num_branches: int = 6,
        gram: int = 4,
        max_pad: int = 2,
        cache_size: int = 10,
        text_ngrams: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        corpus: CorpusTable | None = None,
    ) -> None:
        if branch_len < 3 or not 1 <= gram < branch_len or min(num_branches, max_pad, cache_size) < 1:
            raise ValueError(
                "need branch_len >= 3, 1 <= gram < branch_len, and num_branches, max_pad and cache_size >= 1, not "
                f"{branch_len}, {gram}, {num_branches}, {max_pad}, {cache_size}"
            )
        self.branch_len, self.num_branches, self.gram = branch_len, num_branches, gram
        self.max_pad, self.cache_size, self.seed = max_pad, cache_size, seed
        self.text_ngrams, self.drop_last, self.corpus = text_ngrams, drop_last, corpus
        self.cache = NgramPool(cache_size)
        self.reset()

    def reset(self) -> None:
        self.cache.clear()
        self._texts = 0

    def begin(self, prompt: Sequence[int]) -> None:
        if self._texts and self._texts % KEPT_EVERY == 0:
            self.cache.keep_newest(KEPT_GRAMS)
        self._texts += 1
        rng = random.Random(self.seed)
        self._warm_up = self.branch_len - 2  # steps until the branches are full; each uses up one branch of one pad
        self._branches = [
            rng.choices(prompt, k=1 if index < self._warm_up else rng.randint(1, self.max_pad))
            for index in range(self._warm_up + self.num_branches - 1)
        ]
        self._learned = 0  # tokens of the text whose n-grams are in the cache

    def rewind(self, length: int) -> None:
        self._learned = min(self._learned, length)

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        depth, size = max(map(len, self._branches)), sum(map(len, self._branches))
        fits = depth <= limits.max_scratch_depth and size <= limits.max_nodes
        if fits and self._warm_up:
            return self._with_branches(DraftTree())
        tree = DraftTree.from_paths(self._candidates(seq))
        tree = tree.pruned(limits.max_depth, limits.max_nodes - size if fits else limits.max_nodes, limits.eos)
        if not fits:
            return tree
        self._tail = list(seq[max(0, self._learned - self.gram) if self.text_ngrams else -1 :])
        self._length = len(seq)
        return self._with_branches(tree)

    def _candidates(self, seq: Sequence[int]) -> list[tuple[int, ...]]:
        grams = self.cache.newest(seq[-1])
        if self.corpus is not None:
            free = self.cache_size - len(grams)
            most = min(CORPUS_CHAINS, free) if free else CORPUS_CHAINS_BESIDE_A_FULL_CACHE
            grams += self.corpus.retrieve(seq, most, grams)
        return [gram[:-1] for gram in grams] if self.drop_last else grams

    def _with_branches(self, tree: DraftTree) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        for branch in self._branches:
            first = len(tree) + len(tokens)
            parents.append(ROOT)
            parents.extend(range(first, first + len(branch) - 1))
            tokens += branch
        return tree.with_scratch(tokens, parents)

    def observe(self, step: StepResult) -> None:
        branches, size = self._branches, sum(map(len, self._branches))
        if step.tree.num_scratch != size:  # they did not fit
            return
        picks = (row[0] for row in step.top[len(step.top) - size :])
        after = [list(islice(picks, len(branch))) for branch in branches]  # the argmax at every token of every branch
        if not self._warm_up:
            self._learn(after, step.emitted[0])
            self._branches = [[*branch[1:], picked[-1]] for branch, picked in zip(branches, after, strict=True)]
            return
        grown = [[*branch, picked[-1]] for branch, picked in zip(branches, after, strict=True)]
        if self._warm_up < self.branch_len - 2:
            del grown[0]  # only the first step finds no branch 0
        grown[0] = grown[0][1:]  # branch 0 has no pad: the text itself has grown by one token in its place
        self._branches = grown
        self._warm_up -= 1

    def _learn(self, after: list[list[int]], next_token: int) -> None:
        branches = self._branches
        for width in range(max(map(len, branches)), self.gram - 1, -1):
            for branch, picked in zip(branches[1:], after[1:], strict=True):
                if len(branch) >= width:
                    self._insert(branch, picked, len(branch) - width)
        line = self._tail + branches[0]
        following = [*self._tail[1:], next_token, *after[0]]
        for start in range(len(line) - self.gram + 1):
            self._insert(line, following, start)
        self._learned = self._length

    def _insert(self, line: list[int], after: list[int], start: int) -> None:
        end = start + self.gram
        self.cache.insert(line[start], (*line[start + 1 : end], after[end - 1]))
