"""Lookahead decoding: the base guesses n-grams beside its text, and what it guessed before is verified."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from drafters.protocol import Drafter, Limits, RequiredOutputs, StepResult
from drafters.training_free.pool import NgramPool
from drafters.tree import ROOT, DraftTree


class Lookahead(Drafter):
    """Lookahead decoding (LADE; Fu et al., arXiv 2402.02057, section 3), for level N, window W, guesses G.

    The window is a comb of scratch nodes: a trunk below the root and, below the root and each trunk node, a tooth of
    N - 2 levels. It is W columns wide; the base's argmaxes below the teeth make the next level.

        root ─┬─ t1 ─┬─ t2 ── c1 ── c2      W = 3, N = 4: two trunk nodes, three teeth of two levels
              │      └─ b1 ── b2
              └─ a1 ── a2

    Each step moves the window by one column, whatever was accepted, and never back: a column is a trajectory of
    Jacobi iterations, and the n-gram that leads through it (key, levels, argmax) enters the pool. The first N - 2
    steps fill the levels one by one; from then on the n-grams that the pool knows of the root are the candidates,
    merged by common prefix.

    Where the whole comb does not fit, beyond the candidates, into the nodes or the context that are left, none of it
    is fed and the window rests. It is argmax that fills it under sampling too, end tokens stay in it as in the greedy
    code of the paper, and candidates end with theirs.

    Args:
        level: N, tokens of an n-gram with its key.
        window: W, columns of the window.
        guesses: G, n-grams kept and verified for a key; the newest. 0 sets no bound.
        pool_from_prompt: Whether the n-grams of the text itself enter the pool: the prompt's, and what is written.
        drop_last: Leave out the last token of each n-gram, as the authors' code does in effect: it never emits a
            bonus token after a whole n-gram.
        seed: Of the tokens that the window begins with, drawn anew from each prompt.
        pool: One to share, which lives as long as its owner wants. Without it each text begins with an empty one.
    """

    required_outputs = RequiredOutputs(top_k=1)

    def __init__(
        self,
        level: int = 5,
        window: int = 7,
        guesses: int = 7,
        pool_from_prompt: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        pool: NgramPool | None = None,
    ) -> None:
        if level < 3 or window < 1 or guesses < 0:
            raise ValueError(
                f"need level >= 3, window >= 1 and guesses >= 0 (0 for all), not {level}, {window} and {guesses}"
            )
        self.level, self.window, self.guesses = level, window, guesses
        self.pool_from_prompt, self.drop_last, self.seed = pool_from_prompt, drop_last, seed
        self.pool = NgramPool(guesses) if pool is None else pool
        self._owns_pool = pool is None
        self.remembers = not self._owns_pool
        # The layout depends on nothing but the levels filled, and its depth not even on those.
        self._depth = window + level - 3
        self._combs = [comb(self._depth - filled, filled) for filled in range(level - 1)]

    def begin(self, prompt: Sequence[int]) -> None:
        if self._owns_pool:
            self.pool.clear()
        draw = random.Random(self.seed).choice
        self._levels = [[draw(prompt) for _ in range(self._depth)]]  # the trunk, and the levels filled so far
        self._num_read = 0
        self._read(prompt)

    def _read(self, seq: Sequence[int]) -> None:
        if self.pool_from_prompt:
            for end in range(max(self._num_read + 1, self.level), len(seq) + 1):
                self.pool.insert(seq[end - self.level], seq[end - self.level + 1 : end])
            self._num_read = len(seq)

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        self._read(seq)
        self._root = seq[-1]
        tree = DraftTree.from_paths(list(self._guesses(limits)))
        if len(tree) > limits.max_nodes:
            tree = DraftTree(tree.tokens[: limits.max_nodes], tree.parents[: limits.max_nodes])
        parents = self._combs[len(self._levels) - 1]
        fits = len(tree) + len(parents) <= limits.max_nodes and self._depth <= limits.max_scratch_depth
        if fits:
            first = len(tree)
            tokens = [token for level in self._levels for token in level]
            tree = tree.with_scratch(tokens, [ROOT if node == ROOT else first + node for node in parents])
        self._num_fed = len(tree) if fits else None
        return tree

    def _guesses(self, limits: Limits) -> Iterator[Sequence[int]]:
        """The candidate chains, newest first: should nodes be short, the oldest lack them."""
        if len(self._levels) < self.level - 1:
            return
        most = min(limits.max_depth, self.level - 1 - self.drop_last)
        for gram in reversed(self.pool.newest(self._root, self.guesses or None)):
            gram = gram[:most]
            yield gram[: next((i + 1 for i, token in enumerate(gram) if token in limits.eos), most)]

    def observe(self, step: StepResult) -> None:
        if len(step.tree) != self._num_fed:  # the window rests, or was pruned
            return
        width = len(self._levels[-1])
        self._slide([row[0] for row in step.top[-width:]])

    def _slide(self, after: list[int]) -> None:
        """Move on by a column, with the argmaxes ``after`` the last level; they are the next one."""
        levels = self._levels
        if len(levels) == self.level - 1:
            keys = [self._root, *levels[0]]  # of the step that was: what is the root now came later
            for key, gram in zip(keys, zip(*levels[1:], after, strict=True), strict=True):
                self.pool.insert(key, gram)
            self._levels = [levels[1][1:], *levels[2:], after]
        else:
            self._levels = [level[1:] for level in levels] + [after if len(levels) == 1 else after[1:]]

    def rewind(self, length: int) -> None:
        """The window goes on sliding whatever becomes of the text (as in Ouroboros' code)."""
        self._num_read = min(self._num_read, length)

    def reset(self) -> None:
        """Forget the pool, a shared one too."""
        self.pool.clear()


def comb(trunk: int, levels: int) -> list[int]:
    """Parents of the window's nodes, counted from its first: the trunk, then level by level ``trunk + 1`` teeth.

    Node i of the first level hangs where its column branches off, those of the next below them: then the plain
    ancestor mask and the depths are the paper's attention mask and positions.

    >>> comb(2, 2)
    [-1, 0, -1, 0, 1, 2, 3, 4]
    """
    parents = list(range(ROOT, trunk - 1))
    if levels:
        parents += range(ROOT, trunk)
        parents += range(trunk, trunk + (levels - 1) * (trunk + 1))
    return parents
