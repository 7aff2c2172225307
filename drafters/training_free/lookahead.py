"""Lookahead decoding: the base generates n-grams in addition to its text, and earlier ones are drafted."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drafters.checks import check_at_least
from drafters.protocol import Drafter, Limits, RequiredOutputs, StepResult
from drafters.registry import register
from drafters.training_free.ngram import NgramPool
from drafters.tree import ROOT, DraftTree


@register("lookahead")
@dataclass(eq=False)
class Lookahead(Drafter):
    """Lookahead decoding (Fu et al., arXiv 2402.02057, section 3) with n-grams of N tokens, window W and G guesses.

    The lookahead window consists of scratch nodes in the shape of a comb: a trunk below the root and, below the root
    and each node of the trunk, a tooth of N - 2 levels. It is W columns wide. The base's argmaxes at the ends of the
    teeth form the next level.

        root ─┬─ t1 ─┬─ t2 ── c1 ── c2      W = 3, N = 4: two trunk nodes, three teeth of two levels
              │      └─ b1 ── b2
              └─ a1 ── a2

    Each step moves the window forward by one column, no matter how many tokens were accepted. A column is a trajectory
    of Jacobi iterations, and its n-gram (key, levels, argmax) is added to the pool. The first N - 2 steps fill the
    levels one by one. After that, the pool's n-grams for the root are the candidates, merged by common prefix.

    If the whole comb does not fit into the nodes or the context that the candidates leave, none of it is fed and the
    window does not move. The window is filled with argmaxes under sampling too. As in the authors' greedy code, it may
    contain end-of-sequence tokens; candidates end with one.

    Args:
        level: N, number of tokens of an n-gram including its key.
        window: W, number of columns of the window.
        guesses: G, number of n-grams kept per key and drafted per step, the newest; 0 keeps and drafts all.
        pool_from_prompt: Whether the n-grams of the text itself, prompt and answer, are added to the pool.
        drop_last: Whether to leave out the last token of each n-gram. This matches the authors' code, which never emits
            a bonus token after a complete n-gram.
        seed: Seed of the random prompt tokens that fill the window at the start of a text.
        pool: Pool to share with another drafter. By default the drafter has its own and empties it before each text.
    """

    level: int = 5
    window: int = 7
    guesses: int = 7
    pool_from_prompt: bool = False
    drop_last: bool = False
    seed: int = 0
    pool: NgramPool | None = None
    required_outputs = RequiredOutputs(top_k=1)

    def __post_init__(self) -> None:
        check_at_least(3, level=self.level)
        check_at_least(1, window=self.window)
        check_at_least(0, guesses=self.guesses)
        self.remembers = self.pool is not None
        self._pool = NgramPool(self.guesses) if self.pool is None else self.pool
        # The layout of the window depends only on the number of filled levels, and its depth is always the same.
        self._depth = self.window + self.level - 3
        self._combs = [comb(self._depth - filled, filled) for filled in range(self.level - 1)]

    def begin(self, prompt: Sequence[int]) -> None:
        if self.pool is None:
            self._pool.clear()
        draw = random.Random(self.seed).choice
        self._levels = [[draw(prompt) for _ in range(self._depth)]]  # the trunk and the filled levels
        self._num_read = 0
        self._read(prompt)

    def _read(self, seq: Sequence[int]) -> None:
        if self.pool_from_prompt:
            for end in range(max(self._num_read + 1, self.level), len(seq) + 1):
                self._pool.insert(seq[end - self.level], seq[end - self.level + 1 : end])
            self._num_read = len(seq)

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        self._read(seq)
        self._root = seq[-1]
        tree = DraftTree.from_paths(list(self._guesses(limits))).first(max(limits.max_nodes, 0))
        parents = self._combs[len(self._levels) - 1]
        fits = len(tree) + len(parents) <= limits.max_nodes and self._depth <= limits.max_scratch_depth
        if fits:
            first = len(tree)
            tokens = [token for level in self._levels for token in level]
            tree = tree.with_scratch(tokens, [ROOT if node == ROOT else first + node for node in parents])
        self._num_fed = len(tree) if fits else None
        return tree

    def _guesses(self, limits: Limits) -> Iterator[Sequence[int]]:
        """Yield the candidate chains, the newest first, so that a limit on the nodes cuts the oldest."""
        if len(self._levels) < self.level - 1:
            return
        max_len = min(limits.max_depth, self.level - 1 - self.drop_last)
        for gram in reversed(self._pool.newest(self._root, self.guesses or None)):
            gram = gram[:max_len]
            yield gram[: next((i + 1 for i, token in enumerate(gram) if token in limits.eos), max_len)]

    def observe(self, step: StepResult) -> None:
        if len(step.tree) != self._num_fed:  # the window was not fed, or was pruned
            return
        width = len(self._levels[-1])
        self._slide([row[0] for row in step.top_tokens[-width:]])

    def _slide(self, after: list[int]) -> None:
        """Move the window by one column. The argmaxes ``after`` its last level form the next level."""
        levels = self._levels
        if len(levels) == self.level - 1:
            keys = [self._root, *levels[0]]  # `_root` is still the root of the observed step
            for key, gram in zip(keys, zip(*levels[1:], after, strict=True), strict=True):
                self._pool.insert(key, gram)
            self._levels = [levels[1][1:], *levels[2:], after]
        else:
            self._levels = [level[1:] for level in levels] + [after if len(levels) == 1 else after[1:]]

    def rewind(self, length: int) -> None:
        """Forget the rejected tokens; the window keeps moving, as in the code of Ouroboros."""
        self._num_read = min(self._num_read, length)

    def reset(self) -> None:
        """Empty the pool, even a shared one."""
        self._pool.clear()


def comb(trunk: int, levels: int) -> list[int]:
    """The parents of the window's nodes: the trunk, then the filled levels of ``trunk + 1`` teeth, one by one.

    With these parents, the ancestor mask and the depths of the tree are the attention mask and the relative positions
    of the paper.

    >>> comb(2, 2)
    [-1, 0, -1, 0, 1, 2, 3, 4]
    """
    parents = list(range(ROOT, trunk - 1))
    if levels:
        parents += range(ROOT, trunk)
        parents += range(trunk, trunk + (levels - 1) * (trunk + 1))
    return parents
