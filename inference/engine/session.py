"""The decoding loop: propose, forward, accept, commit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from drafters.protocol import Drafter, Limits, StepResult
from drafters.tree import DraftTree
from inference.engine.base import BaseInfo
from inference.engine.runner import ForwardOutput, Runner
from inference.engine.sampling import Greedy, Sampler, most_probable

PHASES = ("propose", "forward", "accept", "commit", "observe")


@dataclass(frozen=True)
class StepCost:
    """What one step cost; a step is one base forward.

    Args:
        emitted: Tokens the text gained.
        accepted: Draft tokens among them.
        fed_pending: Decided tokens fed: the root, or the prompt in the first step.
        fed_candidates: Draft tokens fed.
        fed_scratch: Tokens fed only to be looked at.
        draft_forwards: Forwards of a draft module or model.
        seconds: Wall time of each of `PHASES`; on a GPU the work of one phase may be waited for in ``accept``.
    """

    emitted: int
    accepted: int
    fed_pending: int
    fed_candidates: int
    fed_scratch: int
    draft_forwards: int
    seconds: tuple[float, ...]

    @property
    def fed(self) -> int:
        """Tokens fed to the base."""
        return self.fed_pending + self.fed_candidates + self.fed_scratch


@dataclass
class Generation:
    """A decoded text: its tokens and what each step cost; the first step is the prefill."""

    tokens: list[int] = field(default_factory=list)
    steps: list[StepCost] = field(default_factory=list)
    seconds: float = 0.0


class Session:
    """Decodes one text at a time with one base and one drafter; between steps it can be taken back and gone on with.

    Args:
        runner: The base and its cache.
        drafter: What proposes.
        sampler: How the base picks tokens; greedily unless said otherwise.
        max_nodes: Most draft tokens fed a step.
    """

    def __init__(self, runner: Runner, drafter: Drafter, sampler: Sampler | None = None, max_nodes: int = 1024) -> None:
        self.runner, self.drafter, self.sampler = runner, drafter, sampler or Greedy()
        self.max_nodes = max_nodes
        self.seq: list[int] = []
        self.rows: ForwardOutput | None = None  # of the last step, and the path accepted there
        self.path: list[int] = []

    def begin(self, prompt: Sequence[int], reserve: int = 0) -> None:
        """Forget the last text; ``reserve`` positions are made ready for the new one."""
        self.runner.reset(reserve)
        self.seq = list(prompt)
        self.drafter.begin(self.seq)

    def step(self, end: int, eos: frozenset[int] = frozenset()) -> tuple[list[int], StepCost]:
        """One base forward: what it adds to the text, which shall not grow beyond ``end`` tokens, and its cost."""
        runner, drafter, seq, clock = self.runner, self.drafter, self.seq, time.perf_counter
        length, draft_forwards = len(seq), drafter.draft_forwards
        started = clock()
        limits = Limits(end - length - 1, self.max_nodes, eos, runner.context_length - length)
        tree = drafter.propose(seq, limits)
        tree = tree.pruned(limits.max_depth, limits.max_nodes, eos, limits.max_scratch_depth)
        proposed = clock()
        num_pending = length - runner.cached
        rows = runner.forward(seq[runner.cached :], tree, drafter.required_outputs)
        forwarded = clock()
        path, emitted, top = self._accept(rows.logits, tree)
        emitted = _until_eos(emitted[: end - length], eos)
        num_accepted = len(path)
        path = path[: len(emitted) - 1]  # the last token emitted is the next root and not yet cached
        accepted = clock()
        runner.commit(path)
        committed = clock()
        seq += emitted
        drafter.observe(StepResult(num_pending, tree, rows.hidden, path, emitted, top))
        observed = clock()
        self.rows, self.path = rows, path
        marks = (started, proposed, forwarded, accepted, committed, observed)
        return emitted, StepCost(
            emitted=len(emitted),
            accepted=min(num_accepted, len(emitted)),
            fed_pending=num_pending,
            fed_candidates=tree.num_candidates,
            fed_scratch=tree.num_scratch,
            draft_forwards=drafter.draft_forwards - draft_forwards,
            seconds=tuple(after - before for before, after in pairwise(marks)),
        )

    @torch.inference_mode()
    def _accept(self, logits: Tensor, tree: DraftTree) -> tuple[list[int], list[int], list[list[int]]]:
        """Path, emitted tokens, and the most probable tokens of each row if the drafter needs them: one host copy."""
        length = len(self.seq)
        decisions = self.sampler.decide(logits, tree, [length, *(length + depth for depth in tree.depths)])
        top_k, width = self.drafter.required_outputs.top_k, decisions.shape[1]
        if top_k == 1:
            decisions = torch.cat([decisions, most_probable(logits)[:, None]], dim=1)
        elif top_k:
            decisions = torch.cat([decisions, logits.topk(min(top_k, logits.shape[1])).indices], dim=1)
        host = decisions.tolist()
        path, emitted = self.sampler.accept(tree, host)
        return path, emitted, [row[width:] for row in host] if top_k else []

    def decode(
        self, prompt: Sequence[int], max_new_tokens: int, eos: frozenset[int] = frozenset()
    ) -> Iterator[tuple[list[int], StepCost]]:
        """Yield what each step emits, the very tokens the base alone would emit, and its cost.

        Ends after an end-of-sequence token, after ``max_new_tokens``, or where the base's context ends.

        Raises:
            ValueError: The prompt is empty or does not fit into the context, or no token may be written.
        """
        check_prompt(self.runner.base, prompt, max_new_tokens)
        end = min(len(prompt) + max_new_tokens, self.runner.context_length)
        self.begin(prompt, reserve=end + 64)
        while len(self.seq) < end:
            emitted, cost = self.step(end, eos)
            yield emitted, cost
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


def check_prompt(base: BaseInfo, prompt: Sequence[int], max_new_tokens: int) -> None:
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
