"""The decoding loop: propose, forward, accept, commit, observe. The file to read first.

One step extends the text by at least one token and runs the base once:

    propose   the drafter guesses continuations: a draft tree below the last token of the text, the root
    forward   the base reads the tokens that are not cached yet, the root last, and the whole tree
    accept    the base picks a token after the root and after each node; the path that follows these picks down the
              tree is accepted, and the pick after its last node is the bonus token
    commit    the KV cache keeps the pending tokens and the accepted path, and drops the rejected nodes
    observe   the drafter learns from what the step showed

The bonus token has not been fed to the base: it is the root of the next step.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from drafters.protocol import Drafter, Limits, StepResult
from drafters.tree import DraftTree
from inference.verifier.base import Base, BaseConfig
from inference.verifier.runner import Runner
from inference.verifier.sampling import Greedy, Sampler, TreeLogits, derived_seed, most_probable

PHASES = ("propose", "forward", "accept", "commit", "observe")
RESERVED_FOR_DRAFTS = 64  # cache positions allocated beyond the end of a text, for the draft trees near it


@dataclass(frozen=True)
class Step:
    """What one step, which is one base forward, emitted and cost."""

    emitted: int  # tokens that the text gained
    accepted: int  # draft tokens among them
    fed_pending: int  # decided tokens fed to the base: the root, or the whole prompt in the first step
    fed_candidates: int  # draft tokens fed that could have been accepted
    fed_scratch: int  # scratch tokens fed: the drafter reads the base's outputs there, they are never accepted
    draft_forwards: int  # forwards of the draft module or draft model
    # Wall time of each of `PHASES`. On a GPU, ``accept`` may include waiting for work of earlier phases.
    seconds: tuple[float, ...]

    @property
    def fed(self) -> int:
        """Tokens fed to the base."""
        return self.fed_pending + self.fed_candidates + self.fed_scratch


class StepRecord:
    """Measures a step while it runs: `phase_done` is called after each of `PHASES`, then `complete`."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self._forwards_before = drafter, drafter.draft_forwards
        self._marks = [time.perf_counter()]

    def phase_done(self) -> None:
        self._marks.append(time.perf_counter())

    def complete(self, num_pending: int, tree: DraftTree, logits: Tensor, path: list[int], emitted: list[int]) -> None:
        """Keep what the step fed, the base's logits (1 + M, V), the accepted nodes and the emitted tokens."""
        self.tree, self.logits, self.path, self.emitted = tree, logits, path[: len(emitted)], emitted
        self.step = Step(
            emitted=len(emitted),
            accepted=len(self.path),
            fed_pending=num_pending,
            fed_candidates=tree.num_candidates,
            fed_scratch=tree.num_scratch,
            draft_forwards=self._drafter.draft_forwards - self._forwards_before,
            seconds=tuple(after - before for before, after in pairwise(self._marks)),
        )

    def emitted_logits(self) -> Tensor:
        """Logits (N, V) that decided the N emitted tokens."""
        return self.logits[[0, *(1 + node for node in self.path)][: len(self.emitted)]]


@dataclass
class Generation:
    """A decoded text: its new tokens and the cost of each step; the first step is the prefill."""

    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0


def acceptance_length(texts: Iterable[Sequence[Step]]) -> float | None:
    """Tokens per base forward over texts, given by their steps, prefills excluded; None if there is no other step."""
    steps = [step for text in texts for step in text[1:]]
    return sum(step.emitted for step in steps) / len(steps) if steps else None


class Session:
    """Decodes one text at a time with one base and one drafter.

    `run` and `decode` write the continuation of a prompt. Callers that need more control call `begin` or `resume`,
    then iterate over `steps`. The record of the last step is in ``last``. Without a sampler, decoding is greedy. At
    most ``max_nodes`` draft tokens are fed per step.
    """

    last: StepRecord

    def __init__(self, runner: Runner, drafter: Drafter, sampler: Sampler | None = None, max_nodes: int = 1024) -> None:
        self.runner, self.drafter, self.sampler, self.max_nodes = runner, drafter, sampler or Greedy(), max_nodes
        self.seq: list[int] = []  # prompt and emitted tokens; the first `runner.cached` of them are in the cache

    # ---- the loop

    def step(self, end: int, eos: frozenset[int] = frozenset(), max_nodes: int | None = None) -> tuple[list[int], Step]:
        """Run one step, and return the tokens that the text gained and the cost.

        ``end`` is the maximum length of the text after the step, prompt included, and ``eos`` are the tokens that end
        it. At most ``max_nodes`` draft tokens are fed, by default the session's own limit.
        """
        runner, drafter, seq, record = self.runner, self.drafter, self.seq, StepRecord(self.drafter)

        limits = self._limits(end, eos, self.max_nodes if max_nodes is None else max_nodes)
        tree = drafter.propose(seq, limits)
        tree = tree.pruned(limits.max_depth, limits.max_nodes, eos, limits.max_scratch_depth)
        _check_tokens(tree, runner.vocab_size)
        record.phase_done()

        pending = seq[runner.cached :]
        outputs = runner.forward(pending, tree, drafter.required_outputs)
        record.phase_done()

        path, emitted, top_tokens = self._accept(outputs.logits, tree, eos)
        ends = [index + 1 for index, token in enumerate(emitted) if token in eos]
        emitted = emitted[: min([end - len(seq), *ends])]
        committed = path[: len(emitted) - 1]  # the last emitted token is the next root: not cached, even if drafted
        record.phase_done()

        runner.commit(committed)
        record.phase_done()

        seq += emitted
        drafter.observe(StepResult(len(pending), tree, outputs.hidden, committed, emitted, top_tokens))
        record.phase_done()

        record.complete(len(pending), tree, outputs.logits, path, emitted)
        self.last = record
        return emitted, record.step

    def _limits(self, end: int, eos: frozenset[int], max_nodes: int) -> Limits:
        """The limits of the next proposal: those of the text's length, the base's context and the request."""
        length, num_cached = len(self.seq), self.runner.cached
        seed, positions = derived_seed(self.sampler.seed, length), self.runner.prepare(length)
        if self.runner.cached < num_cached:  # the drafter will observe again what is fed again
            self.drafter.rewind(self.runner.cached + 1)
        max_nodes = min(max_nodes, self.runner.most_nodes(length))
        return Limits(min(end - 1, positions) - length, max_nodes, eos, positions - length, seed)

    @torch.inference_mode()
    def _accept(
        self, logits: Tensor, tree: DraftTree, eos: frozenset[int]
    ) -> tuple[list[int], list[int], list[list[int]]]:
        """Decide on the device, copy the decisions to the host once, and accept there.

        Returns the accepted path, the emitted tokens, and the base's most probable tokens after the root and each node
        if the drafter requires them.
        """
        decisions = self.sampler.decide(TreeLogits(logits, tree, self.seq, eos))
        top_k, width = self.drafter.required_outputs.top_k, decisions.shape[1]
        if top_k == 1 and self.sampler.decides_argmaxes:
            width = 0  # the decisions are the top tokens, too
        elif top_k:
            top = most_probable(logits)[:, None] if top_k == 1 else logits.topk(min(top_k, logits.shape[1])).indices
            decisions = torch.cat([decisions.to(top.device), top], dim=1)
        on_host = decisions.tolist()
        path, emitted = self.sampler.accept(tree, on_host)
        return path, emitted, [row[width:] for row in on_host] if top_k else []

    def steps(
        self, end: int, eos: frozenset[int] = frozenset(), drafts_at_once: bool = True
    ) -> Iterator[tuple[list[int], Step]]:
        """Run steps until the text has ``end`` tokens or gains an end-of-sequence token; see `step`.

        The caller may stop between two steps and resume the text later. If a step is interrupted (by Ctrl-C, say),
        text, cache and drafter no longer agree, so the session forgets the text. ``drafts_at_once`` says whether the
        first step may feed draft tokens.
        """
        max_nodes = None if drafts_at_once else 0
        while len(self.seq) < end:
            try:
                emitted, step = self.step(end, eos, max_nodes)
            except BaseException:
                self.forget()
                raise
            max_nodes = None
            yield emitted, step
            if emitted[-1] in eos:
                return

    # ---- the text

    def begin(self, prompt: Sequence[int], reserve: int = 0) -> None:
        """Start a new text with an empty cache that has room for at least ``reserve`` positions."""
        self._prepare(reserve)
        self.seq = list(prompt)
        self.drafter.begin(self.seq)

    def prepare(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Capture what such a text needs, which is no part of its time; raises ValueError as `check_prompt`."""
        self._prepare(self.end_of(prompt, max_new_tokens) + RESERVED_FOR_DRAFTS)

    def _prepare(self, reserve: int) -> None:
        """Empty the cache, and capture the graphs that are missing, if steps are graphed."""
        self.runner.reset(reserve)
        self.runner.capture(self.drafter)

    def resume(self, seq: Sequence[int], num_shared: int) -> None:
        """Continue with a text of which the first ``num_shared`` tokens, at least 1, are those of the current one.

        The cache keeps what they share, except for the last shared token, which becomes the root again. If the current
        text is cut, the drafter is rewound.
        """
        assert 0 < num_shared <= min(len(self.seq), len(seq)), "a text is resumed from a prefix that both share"
        self.runner.truncate(min(self.runner.cached, num_shared - 1))
        if num_shared < len(self.seq):
            self.drafter.rewind(num_shared)
            del self.seq[num_shared:]
        self.seq += seq[num_shared:]

    def forget(self) -> None:
        """Drop the text, so that the next one cannot resume from it."""
        self.seq = []

    # ---- whole continuations

    def decode(
        self, prompt: Sequence[int], max_new_tokens: int, eos: frozenset[int] = frozenset()
    ) -> Iterator[tuple[list[int], Step]]:
        """Yield the tokens that each step emits and its cost. Without the drafter the base would write the same text.

        Ends after an end-of-sequence token, after ``max_new_tokens`` tokens, or where the base's context ends. Raises
        ValueError as `check_prompt` does.
        """
        end = self.end_of(prompt, max_new_tokens)
        self.begin(prompt, reserve=end + RESERVED_FOR_DRAFTS)
        yield from self.steps(end, eos)

    def run(self, prompt: Sequence[int], max_new_tokens: int, eos: frozenset[int] = frozenset()) -> Generation:
        """Decode to the end; see `decode`."""
        self.prepare(prompt, max_new_tokens)
        result, started = Generation(), time.perf_counter()
        for emitted, cost in self.decode(prompt, max_new_tokens, eos):
            result.tokens += emitted
            result.steps.append(cost)
        result.seconds = time.perf_counter() - started
        return result

    def end_of(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """Return the maximum length of prompt and answer together; raises ValueError as `check_prompt` does."""
        check_prompt(self.runner.base, prompt, max_new_tokens)
        return min(len(prompt) + max_new_tokens, self.runner.context_length)


def check_prompt(base: Base | BaseConfig, prompt: Sequence[int], max_new_tokens: int) -> None:
    """Raise ValueError if a prompt is empty, too long or has a token unknown to the base, or asks for no new token."""
    if not prompt:
        raise ValueError("the prompt is empty: the base needs at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    if len(prompt) >= base.context_length:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and the context of {base.name} ends at {base.context_length}: "
            "shorten the prompt"
        )
    num_rows = getattr(base.config, "vocab_size", sys.maxsize)  # a recording has no base
    if outside := [token for token in prompt if not 0 <= token < num_rows]:
        raise ValueError(
            f"the prompt has the token {outside[0]}, but {base.name} has an embedding for 0 to {num_rows - 1} only: "
            "leave it out"
        )


def _check_tokens(tree: DraftTree, vocab_size: int) -> None:
    """Raise ValueError if a token lies outside the vocabulary, as from a damaged corpus or datastore."""
    if (token := next((token for token in tree.tokens if not 0 <= token < vocab_size), None)) is not None:
        message = f"the drafter proposes token {token}, but the base has tokens 0 to {vocab_size - 1}"
        raise ValueError(f"{message}: build its file without it")
