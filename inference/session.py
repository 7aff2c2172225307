"""The decoding loop: propose, forward, accept, commit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from drafters.protocol import Drafter, Limits, StepResult
from inference.acceptance import accept
from inference.base import Base
from inference.runner import Runner
from inference.sampling import Greedy, Sampler

PHASES = ("propose", "forward", "accept", "commit", "observe")


@dataclass(frozen=True)
class StepCost:
    """What one step cost.

    Args:
        emitted: Tokens the text gained.
        accepted: Draft tokens among them.
        fed_pending: Decided tokens fed: the root, or the prompt in the first step.
        fed_candidates: Draft tokens fed.
        seconds: Wall time of each of `PHASES`; on a GPU the work of one phase may be waited for in ``accept``.
    """

    emitted: int
    accepted: int
    fed_pending: int
    fed_candidates: int
    seconds: tuple[float, ...]


@dataclass
class Generation:
    """A decoded text: its tokens and what each step cost; the first step is the prefill."""

    tokens: list[int] = field(default_factory=list)
    steps: list[StepCost] = field(default_factory=list)
    seconds: float = 0.0


class Session:
    """Decodes texts with one base and one drafter.

    Args:
        runner: The base and its cache.
        drafter: What proposes.
        sampler: How the base picks tokens; greedily unless said otherwise.
        max_nodes: Most draft tokens fed a step.
    """

    def __init__(self, runner: Runner, drafter: Drafter, sampler: Sampler | None = None, max_nodes: int = 1024) -> None:
        self.runner, self.drafter, self.sampler = runner, drafter, sampler or Greedy()
        self.max_nodes = max_nodes

    def decode(
        self, prompt: Sequence[int], max_new_tokens: int, eos: frozenset[int] = frozenset()
    ) -> Iterator[tuple[list[int], StepCost]]:
        """Yield what each step emits, the very tokens the base alone would emit, and its cost.

        Ends after an end-of-sequence token, after ``max_new_tokens``, or where the base's context ends.

        Raises:
            ValueError: The prompt is empty or does not fit into the context, or no token may be written.
        """
        runner, drafter, clock = self.runner, self.drafter, time.perf_counter
        check_prompt(runner.base, prompt, max_new_tokens)
        runner.reset()
        seq = list(prompt)
        end = min(len(seq) + max_new_tokens, runner.context_length)
        drafter.begin(seq)
        while len(seq) < end:
            started = clock()
            limits = Limits(end - len(seq) - 1, self.max_nodes, eos)
            tree = drafter.propose(seq, limits).pruned(limits.max_depth, limits.max_nodes, eos)
            proposed = clock()
            pending = seq[runner.cached :]
            rows = runner.forward(pending, tree, drafter.needs)
            forwarded = clock()
            picks = self.sampler.pick(rows.logits, [len(seq), *(len(seq) + depth for depth in tree.depths)])
            path, emitted = accept(tree, picks)
            emitted = _until_eos(emitted[: end - len(seq)], eos)
            kept = path[: len(emitted) - 1]  # the last token emitted is the next root and not yet cached
            accepted = clock()
            runner.commit(kept)
            committed = clock()
            seq += emitted
            drafter.observe(StepResult(len(pending), tree, rows.hidden, kept, emitted))
            observed = clock()
            marks = (started, proposed, forwarded, accepted, committed, observed)
            seconds = tuple(after - before for before, after in pairwise(marks))
            yield emitted, StepCost(len(emitted), len(path), len(pending), len(tree), seconds)
            if emitted[-1] in eos:
                return

    def run(self, prompt: Sequence[int], max_new_tokens: int, eos: frozenset[int] = frozenset()) -> Generation:
        """Decode to the end."""
        result, started = Generation(), time.perf_counter()
        for emitted, cost in self.decode(prompt, max_new_tokens, eos):
            result.tokens += emitted
            result.steps.append(cost)
        result.seconds = time.perf_counter() - started
        return result


def check_prompt(base: Base, prompt: Sequence[int], max_new_tokens: int) -> None:
    """Raise ValueError where nothing can be decoded: an empty prompt, one beyond the context, no token allowed."""
    if not prompt:
        raise ValueError("the prompt is empty: the base needs at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    if len(prompt) >= base.context_length:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and the context of {base.name} ends at {base.context_length}: "
            "shorten the prompt"
        )


def _until_eos(tokens: list[int], eos: frozenset[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in eos:
            return tokens[: index + 1]
    return tokens
