"""Ouroboros: a draft model drafts with phrases, phrases lengthen its drafts, and verification makes new ones."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.protocol import Drafter, DraftSession, Limits, RequiredOutputs, StepResult
from drafters.training_free.pool import NgramPool
from drafters.tree import DraftTree


class Ouroboros(Drafter):
    """Phrase by phrase drafting (Ouroboros, EMNLP 2024). A phrase is a key token and the ``level - 1`` tokens after it.

        root ── d1 ── … ── dγ ─┬─ phrase 1 of key dγ       the draft of the inner model, then tails from the pool
                               ├─ phrase 2
                               └─ phrase K

    The four parts of the paper's Table 4:

    1. Phrases accelerate drafting (section 3.1): the drafter of ``inner`` is lookahead over the same ``pool``. With
       an inner model that drafts token by token this part is off, and phrases come from verification alone.
    2. Phrases lengthen drafts (3.2): ``lengthen``.
    3. Phrases from verification (3.3): ``verify_phrases``. After a rejection every stretch of the discarded tail that
       the base agrees with becomes a phrase, if it is a complete one; after full acceptance the tried phrases that were
       not taken are corrected in place. (The authors' code corrects them after a rejection too, though the base has
       read them behind a wrong draft, and the taken phrase as well; the paper does neither.)
    4. Phrases live on from text to text (3.4): ``history``.

    Without phrases this is draft-model speculation. As every draft is an argmax, sampled text is matched draw by draw.

    Args:
        inner: Session of the draft model; its own drafter may put phrases into ``pool``.
        pool: Phrases, shared with the drafter of ``inner``.
        num_draft: Gamma, tokens the draft model writes a step.
        num_phrases: K, phrases hung on the draft's last token; the newest.
        level: Tokens of a phrase with its key, as of lookahead decoding; the paper's beta is one more (Table 12).
        lengthen: Part 2.
        verify_phrases: Part 3.
        history: Part 4; off, each text begins with an empty pool.
        drop_last: Leave out the last token of each tail, as the authors' code does in effect: it never emits a bonus
            token after a whole phrase.
    """

    required_outputs = RequiredOutputs(top_k=1)

    def __init__(
        self,
        inner: DraftSession,
        pool: NgramPool,
        num_draft: int = 12,
        num_phrases: int = 3,
        level: int = 7,
        lengthen: bool = True,
        verify_phrases: bool = True,
        history: bool = True,
        drop_last: bool = False,
    ) -> None:
        if num_draft < 1 or num_phrases < 1 or level < 3:
            raise ValueError(
                f"need num_draft >= 1, num_phrases >= 1 and level >= 3, not {num_draft}, {num_phrases} and {level}"
            )
        self.inner, self.pool = inner, pool
        self.num_draft, self.num_phrases, self.level = num_draft, num_phrases, level
        self.lengthen, self.verify_phrases, self.history = lengthen, verify_phrases, history
        self.drop_last = drop_last

    @property
    def draft_forwards(self) -> int:
        return self.inner.forwards

    def begin(self, prompt: Sequence[int]) -> None:
        if not self.history:
            self.pool.clear()
        self.inner.begin(prompt)

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        room = min(self.num_draft, limits.max_depth, limits.max_nodes)
        draft = self.inner.write(seq, room, limits.eos).tokens if room > 0 else []
        self._draft, self._tokens, self._parents = draft, list(draft), list(range(-1, len(draft) - 1))
        self._tried: list[tuple[tuple[int, ...], list[int]]] = []  # phrases and their nodes, the newest first
        if self.lengthen and draft and draft[-1] not in limits.eos:
            children: dict[tuple[int, int], int] = {}
            for phrase in reversed(self.pool.newest(draft[-1], self.num_phrases)):
                self._tried.append((phrase, self._hang(phrase, children, limits)))
        return DraftTree(self._tokens, self._parents)

    def _hang(self, phrase: tuple[int, ...], children: dict[tuple[int, int], int], limits: Limits) -> list[int]:
        """Hang a phrase on the draft's last token as far as the limits allow, along what hangs there already."""
        node, nodes = len(self._draft) - 1, []
        room = min(limits.max_depth - len(self._draft), len(phrase) - self.drop_last)
        for token in phrase[:room]:
            child = children.get((node, token))
            if child is None:
                if len(self._tokens) >= limits.max_nodes:
                    break
                child = children[node, token] = len(self._tokens)
                self._tokens.append(token)
                self._parents.append(node)
            nodes.append(child)
            node = child
            if token in limits.eos:
                break
        return nodes

    def observe(self, step: StepResult) -> None:
        if not self.verify_phrases or len(step.tree) != len(self._tokens):  # pruned: its rows are not those proposed
            return
        after = [row[0] for row in step.top[1:]]
        accepted = _common(self._draft, step.emitted)
        if accepted < len(self._draft):
            self._learn_from_tail(accepted, after)
        elif self._tried:
            self._correct(step.emitted[accepted:], after)

    def _learn_from_tail(self, first: int, after: list[int]) -> None:
        """Phrases of the discarded tail: ``level - 1`` tokens of the base that the draft goes along with (Figure 4)."""
        draft, width = self._draft, self.level - 1
        for key in range(first, len(draft) - width + 1):
            if draft[key + 1 : key + width] == after[key : key + width - 1]:
                self.pool.insert(draft[key], after[key : key + width])

    def _correct(self, emitted: list[int], after: list[int]) -> None:
        """Put what the base says in the place of the tried phrases, but for the one taken: of equals the oldest."""
        tried = self._tried[::-1]
        taken = [_common([self._tokens[node] for node in nodes], emitted) for _, nodes in tried]
        most = max(taken)
        corrected = []
        for index, (phrase, nodes) in enumerate(tried):
            is_taken = most > 0 and index == taken.index(most)
            is_seen = len(nodes) >= len(phrase) - 1  # a phrase cut at a limit stays as it is
            rows = [len(self._draft) - 1, *nodes][: len(phrase)]
            corrected.append([after[row] for row in rows] if is_seen and not is_taken else phrase)
        self.pool.replace_newest(self._draft[-1], corrected)

    def rewind(self, length: int) -> None:
        self.inner.rewind(length)

    def reset(self) -> None:
        self.pool.clear()
        self.inner.reset()


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count
