"""Self-Draft: the base continues noisy branches in addition to the text, and their n-grams are drafted later."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from drafters.checks import check_at_least
from drafters.protocol import Drafter, Limits, RequiredOutputs, StepResult
from drafters.registry import register
from drafters.training_free.corpus import CorpusTable
from drafters.training_free.ngram import NgramPool
from drafters.tree import ROOT, DraftTree

# Before every second text, all but the newest two n-grams of each key are dropped.
TEXTS_PER_CLEANUP, GRAMS_AFTER_CLEANUP = 2, 2
# N-grams drafted from the corpus cache, with free places in the context cache and without.
CORPUS_CHAINS, CORPUS_CHAINS_BESIDE_A_FULL_CACHE = 3, 2


@register("self_draft", "CORPUS", is_optional=True, load=CorpusTable.load, argument="corpus", command="corpus")
@dataclass(eq=False)
class SelfDraft(Drafter):
    """Multi-branch self-drafting (Self-Draft paper, Algorithm 1).

    Branches are chains of scratch nodes below the root. All but the first start with pads, random tokens of the prompt.
    In each step the base's argmax at the end of a branch is appended to it and its first token is dropped, no matter
    how many tokens were accepted. During the first ``branch_len - 2`` steps, while the branches grow to their full
    length, nothing is drafted.

        root ─┬─ a1 ─ a2 ─ a3 ─ a4             branch 0: continues the root
              ├─ pad ─ b1 ─ b2 ─ b3 ─ b4       branches 1 to N - 1: 1 to max_pad pads, then branch_len - 2 tokens
              └─ pad ─ pad ─ c1 ─ c2 ─ c3 ─ c4

    Every ``gram`` consecutive tokens of a branch and the argmax after them are added to the context cache: the first
    token is the key, the others an n-gram. The draft consists of the n-grams of the context cache for the root, the
    oldest first, and then of those of the corpus cache. The context cache is kept from text to text, except that before
    every second text all but the newest two n-grams of each key are dropped.

    Where the paper and its public code differ, this follows the code, with four exceptions: candidates are merged by
    common prefix; a draft that is accepted completely also gains the bonus token (``drop_last`` gives the code's
    counts); an n-gram that ends in the next token of the text holds that token and not one of another branch; and each
    n-gram of a step is inserted once, in the order of the text. In the paper, only branches feed the context cache
    (``text_ngrams=false``), and branches have ``branch_len`` tokens including pads.

    If the branches do not fit into the limits, they are not fed and do not change, and only the caches draft.

    Args:
        branch_len: L. Branches have L - 2 tokens after their pads.
        num_branches: N, number of branches including the first.
        gram: G, number of tokens of an n-gram without its key; with short branches ``branch_len - 1``, as in the code.
        max_pad: Largest number of pads of a branch.
        cache_size: Number of n-grams per key in the context cache; the least recently inserted is dropped first.
        text_ngrams: Whether the n-grams of the prompt and the answer are added to the context cache too.
        drop_last: Whether to leave out the last token of each n-gram from the draft.
        seed: Seed of the choice of pads, restarted for every text.
        corpus: The corpus cache, if any.
    """

    branch_len: int = 6
    num_branches: int = 6
    gram: int = 4
    max_pad: int = 2
    cache_size: int = 10
    text_ngrams: bool = True
    drop_last: bool = False
    seed: int = 0
    corpus: CorpusTable | None = None
    required_outputs = RequiredOutputs(top_k=1)

    def __post_init__(self) -> None:
        check_at_least(1, gram=self.gram, num_branches=self.num_branches, max_pad=self.max_pad)
        check_at_least(1, cache_size=self.cache_size)
        check_at_least(3, branch_len=self.branch_len)
        self.gram = min(self.gram, self.branch_len - 1)
        self.cache = NgramPool(self.cache_size)
        self.reset()

    def reset(self) -> None:
        self.cache.clear()
        self._num_texts = 0

    def begin(self, prompt: Sequence[int]) -> None:
        if self._num_texts and self._num_texts % TEXTS_PER_CLEANUP == 0:
            self.cache.keep_newest(GRAMS_AFTER_CLEANUP)
        self._num_texts += 1
        rng = random.Random(self.seed)
        # Steps until the branches have their full length. Each of them uses up one branch of a single pad.
        self._warm_up = self.branch_len - 2
        self._branches = [
            rng.choices(prompt, k=1 if index < self._warm_up else rng.randint(1, self.max_pad))
            for index in range(self._warm_up + self.num_branches - 1)
        ]
        self._num_learned = 0  # number of tokens of the text whose n-grams are in the cache

    def rewind(self, length: int) -> None:
        self._num_learned = min(self._num_learned, length)

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        depth, size = max(map(len, self._branches)), sum(map(len, self._branches))
        fits = depth <= limits.max_scratch_depth and size <= limits.max_nodes
        if fits and self._warm_up:
            return self._with_branches(DraftTree())
        tree = DraftTree.from_paths(self._candidates(seq))
        tree = tree.pruned(limits.max_depth, limits.max_nodes - size if fits else limits.max_nodes, limits.eos)
        if not fits:
            return tree
        self._tail = list(seq[max(0, self._num_learned - self.gram) if self.text_ngrams else -1 :])
        self._length = len(seq)
        return self._with_branches(tree)

    def _candidates(self, seq: Sequence[int]) -> list[tuple[int, ...]]:
        grams = self.cache.newest(seq[-1])
        if self.corpus is not None:
            free = self.cache_size - len(grams)
            max_grams = min(CORPUS_CHAINS, free) if free else CORPUS_CHAINS_BESIDE_A_FULL_CACHE
            grams += self.corpus.retrieve(seq, max_grams, grams)
        return [gram[:-1] for gram in grams] if self.drop_last else grams

    def _with_branches(self, tree: DraftTree) -> DraftTree:
        for branch in self._branches:
            tree = tree.with_scratch(branch, [ROOT, *range(len(tree), len(tree) + len(branch) - 1)])
        return tree

    def observe(self, step: StepResult) -> None:
        branches, size = self._branches, sum(map(len, self._branches))
        if step.tree.num_scratch != size:  # the branches were not fed
            return
        picks = (row[0] for row in step.top_tokens[len(step.top_tokens) - size :])
        after = [list(islice(picks, len(branch))) for branch in branches]  # the argmaxes of each branch
        if not self._warm_up:
            self._learn(after, step.emitted[0])
            self._branches = [[*branch[1:], picked[-1]] for branch, picked in zip(branches, after, strict=True)]
            return
        grown = [[*branch, picked[-1]] for branch, picked in zip(branches, after, strict=True)]
        if self._warm_up < self.branch_len - 2:
            del grown[0]  # there is no branch 0 yet in the first step
        grown[0] = grown[0][1:]  # branch 0 has no pad: the text has advanced by the token that is dropped
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
        self._num_learned = self._length

    def _insert(self, line: list[int], after: list[int], start: int) -> None:
        end = start + self.gram
        self.cache.insert(line[start], (*line[start + 1 : end], after[end - 1]))
