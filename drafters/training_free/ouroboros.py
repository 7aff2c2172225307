"""Ouroboros: a pool of phrases speeds up and lengthens the drafts of a draft model, and verification refills it."""

from collections.abc import Sequence

from drafters.checks import check_at_least
from drafters.protocol import Limits, RequiredOutputs, StepResult
from drafters.training_free.draft_model import DraftModel, DraftSession
from drafters.training_free.ngram import Gram, NgramPool
from drafters.tree import DraftTree, Growth, common_prefix


class Ouroboros(DraftModel):
    """Phrase by phrase drafting (Ouroboros, arXiv 2402.13720). A phrase is a key token and ``level - 1`` more tokens.

        root ── d1 ── … ── dγ ─┬─ phrase 1 of key dγ       the draft of the inner model, then phrases from the pool
                               ├─ phrase 2
                               └─ phrase K

    Its four parts, as in the ablation of the paper's Table 4:

    1. Phrases accelerate drafting (section 3.1): the drafter of ``inner`` is lookahead decoding over the same ``pool``.
       If the inner model drafts token by token instead, phrases come from verification only.
    2. Phrases lengthen drafts (section 3.2), see ``lengthen``.
    3. Verification generates phrases (section 3.3), see ``verify_phrases``. After a rejection, each segment of the
       rejected part of the draft that the base agrees with becomes a phrase, of 2 to ``level`` tokens with its key. The
       authors' code takes only phrases of ``level`` tokens, the last of them the base's own; there is none if
       ``num_draft`` is below ``level - 1``. After full acceptance, the candidate phrases that were not accepted are
       corrected in place. The authors' code also corrects them after a rejection, when the base has read them after a
       wrong draft, and corrects the accepted phrase; the paper does neither.
    4. Phrases are kept from text to text (section 3.4), see ``history``.

    Without phrases this is speculative decoding with a draft model. Every draft is an argmax, so under sampling a
    drafted token is accepted if it equals the token that is sampled.

    The pool is shared with the drafter of ``inner``, the session of the draft model. The other arguments are those of
    the command line (`inference.model_drafters.ouroboros`). The beta of the paper's Table 12 is ``level + 1``.
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
        check_at_least(1, num_phrases=num_phrases)
        check_at_least(3, level=level)
        super().__init__(inner, num_draft)
        self.pool, self.num_phrases, self.level, self.remembers = pool, num_phrases, level, True
        self.lengthen, self.verify_phrases, self.history, self.drop_last = lengthen, verify_phrases, history, drop_last

    def begin(self, prompt: Sequence[int]) -> None:
        if not self.history:
            self.pool.clear()
        super().begin(prompt)

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        room = min(self.num_draft, limits.max_depth, limits.max_nodes)
        draft = self.inner.write(seq, room, limits.eos).tokens if room > 0 else []
        self.draft_forwards = self.inner.forwards
        tree = Growth()
        for node, token in enumerate(draft):
            tree.child(node - 1, token)
        self._draft, self._tokens = draft, tree.tokens
        self._candidates: list[tuple[Gram, list[int]]] = []  # phrases and their nodes, the newest first
        if self.lengthen and draft and draft[-1] not in limits.eos:
            for phrase in reversed(self.pool.newest(draft[-1], self.num_phrases)):
                self._candidates.append((phrase, self._append(tree, phrase, limits)))
        return DraftTree(tree.tokens, tree.parents)

    def _append(self, tree: Growth, phrase: Gram, limits: Limits) -> list[int]:
        """Append a phrase to the last drafted token, as far as the limits allow, and return its nodes."""
        node = len(self._draft) - 1
        nodes: list[int] = []
        room = min(limits.max_depth - len(self._draft), len(phrase) - self.drop_last)
        for token in phrase[:room]:
            if len(tree.tokens) >= limits.max_nodes and (node, token) not in tree.index:
                break
            node = tree.child(node, token)
            nodes.append(node)
            if token in limits.eos:
                break
        return nodes

    def observe(self, step: StepResult) -> None:
        if not self.verify_phrases or len(step.tree) != len(self._tokens):  # pruned: the rows belong to other nodes
            return
        after = [row[0] for row in step.top_tokens[1:]]
        accepted = common_prefix(self._draft, step.emitted)
        if accepted < len(self._draft):
            self._learn_from_tail(accepted, after)
        elif self._candidates:
            self._correct(step.emitted[accepted:], after)

    def _learn_from_tail(self, first: int, after: list[int]) -> None:
        """Add phrases from the rejected part of the draft: segments that the base agrees with (Figure 4)."""
        draft = self._draft
        for key in range(first + 1, len(draft)):
            num_agreed = common_prefix(draft[key : key + self.level], after[key - 1 :])
            if num_agreed > 1:
                self.pool.insert(draft[key], draft[key + 1 : key + num_agreed])

    def _correct(self, emitted: list[int], after: list[int]) -> None:
        """Replace each candidate phrase by the base's tokens, except the accepted one: the oldest of the longest."""
        candidates = self._candidates[::-1]
        num_accepted = [common_prefix([self._tokens[node] for node in nodes], emitted) for _, nodes in candidates]
        longest = max(num_accepted)
        corrected: list[Sequence[int]] = []
        for index, (phrase, nodes) in enumerate(candidates):
            is_accepted = longest > 0 and index == num_accepted.index(longest)
            is_fed = len(nodes) >= len(phrase) - 1  # a phrase that was cut at a limit is not changed
            rows = [len(self._draft) - 1, *nodes][: len(phrase)]
            corrected.append([after[row] for row in rows] if is_fed and not is_accepted else phrase)
        self.pool.replace_newest(self._draft[-1], corrected)

    def reset(self) -> None:
        self.pool.clear()
        super().reset()
