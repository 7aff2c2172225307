"""How the base picks its tokens: greedily, or by random draws keyed by seed and position."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from drafters.checks import check_at_least
from drafters.tree import ROOT, DraftTree
from inference.arguments import LOWEST_TEMPERATURE
from inference.verifier.acceptance import accept, multi_round_rejection
from inference.verifier.processing import ScoreProcessors


@dataclass(frozen=True)
class TreeLogits:
    """The base's logits at the root and at the nodes of a draft tree, and the text before them."""

    logits: Tensor  # (1 + M, V); row 0 belongs to the root, row 1 + i to node i
    tree: DraftTree  # M nodes
    text: Sequence[int] = ()  # token ids up to the root, which logits processors may read
    eos: frozenset[int] = frozenset()  # tokens that end the text; nothing is decided after a node with one

    @property
    def positions(self) -> list[int]:
        """Position of the token that each row decides."""
        return [len(self.text), *(len(self.text) + depth for depth in self.tree.depths)]


def derived_seed(*keys: int) -> int:
    """Derive the seed of the random numbers of drafts, in [0, 2^64).

    The text follows the base's distribution only if drafts are independent of the numbers that accept them. Those are
    seeded by the seed of the request itself (`KeyedSampler.uniform`), the drafts of each step by a hash of that seed
    and of the length of the text, and a drafter's own numbers by one of the proposal's seed and of its own.
    """
    text = ",".join(str(key) for key in keys)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"draft seed").digest(), "little")


def most_probable(logits: Tensor) -> Tensor:
    """Return the index (N,) of the largest entry of each row of (N, V), the first one if several are equal."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return torch.from_numpy(logits.numpy().argmax(-1))  # up to forty times faster than torch


def draw_tokens(distributions: Tensor, numbers: Sequence[float]) -> Tensor:
    """Draw one token (N,) from each of the distributions (N, V) by inverse CDF, with N random numbers in [0, 1)."""
    draws = torch.tensor(numbers, dtype=torch.float64)[:, None]
    cumulative = distributions.cumsum(-1)
    index = torch.searchsorted(cumulative, draws.to(distributions.device) * cumulative[:, -1:], right=True)
    return index.clamp(max=distributions.shape[-1] - 1)[:, 0]


class Sampler(ABC):
    """Decides which draft tokens are accepted and which tokens are emitted.

    A step makes a single copy from the device to the host, so the work is split around it: `decide` runs where the
    logits are and puts all that acceptance needs into a small tensor of integers; that tensor is copied; `accept`
    follows it down the tree on the host. Logits processors change the base's logits before a token is picked.
    """

    seed = 0
    """Seed of the request; the seeds of its drafts are derived from it (`derived_seed`)."""

    decides_argmaxes = False
    """Whether the decisions are the argmaxes of the base's own logits."""

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._processors = ScoreProcessors(processors)

    @abstractmethod
    def decide(self, rows: TreeLogits) -> Tensor:
        """Return what `accept` needs, (1 + M, C) integers, on the device of the logits or already on the host."""

    def accept(self, tree: DraftTree, decisions: list[list[int]]) -> tuple[list[int], list[int]]:
        """Return the accepted nodes from the root down, which follow the picks, and the emitted tokens."""
        return accept(tree, [row[0] for row in decisions])

    def _decide_along_path(self, rows: TreeLogits, pick: Callable[[int], int]) -> Tensor:
        """Decide along the accepted path only, up to an end-of-sequence token; the other rows hold -1.

        ``pick`` returns the token after a node or after `ROOT`, and is called from the root down. Each token of the
        path is copied to the host on its own, and so the decisions are on the host.
        """
        decisions = torch.full((1 + len(rows.tree), 1), -1)
        node: int | None = ROOT
        while node is not None:
            token = pick(node)
            decisions[1 + node] = token
            node = None if token in rows.eos else rows.tree.child(node, token)
        return decisions


class Greedy(Sampler):
    """Picks the most probable token, the first one if several are equally probable."""

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        super().__init__(processors)
        self.decides_argmaxes = not processors

    def decide(self, rows: TreeLogits) -> Tensor:
        processors = self._processors
        if processors.read_text:
            scores = processors.at_nodes(rows.logits, rows.tree, rows.text)
            return self._decide_along_path(rows, lambda node: int(most_probable(scores(node))))
        return most_probable(processors.at_all_rows(rows.logits) if processors else rows.logits)[:, None]


class KeyedSampler(Sampler):
    """Draws from the processed distribution by inverse CDF, with a random number keyed by (seed, position).

    With drafters that do not draw their drafts, one seed gives one text: sample-and-match emits the very draw that the
    base would have made without a drafter. Draft tokens that were drawn at random (``tree.distributions``) go through
    multi-round rejection: the text is another one, from the same distribution.

    The options are those of `inference.options.SamplingOptions`, with a temperature above 0; values below
    `LOWEST_TEMPERATURE` count as this one. Logits processors come before temperature, top_k and top_p.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        if not 0 < temperature < inf:
            raise ValueError(f"temperature must be a number above 0, or 0 to decode greedily, not {temperature}")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {top_p}")
        check_at_least(0, top_k=top_k, seed=seed)
        self.seed = seed
        warpers: list[LogitsProcessor] = []
        if temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(max(float(temperature), LOWEST_TEMPERATURE)))
        if top_k:
            warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1.0:
            warpers.append(TopPLogitsWarper(top_p))
        super().__init__([*processors, *warpers])

    def for_proposal(self, draft_seed: int) -> KeyedSampler:
        """Return a sampler from the same distributions for the drafts of one proposal, see `Limits.draft_seed`."""
        sampler = copy.copy(self)
        sampler.seed = derived_seed(draft_seed, self.seed)
        return sampler

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the distributions (N, V) that tokens are drawn from; not for processors that read the text."""
        return self._processors.at_all_rows(logits).double().softmax(-1)

    def pick(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Draw one token (N,) for each row of (N, V)."""
        return self._draws(self.probabilities(logits), positions)

    def decide(self, rows: TreeLogits) -> Tensor:
        """Draw along the accepted path only, up to an end-of-sequence token; the other rows hold -1.

        On a GPU, a tree without random drafts is drawn for all nodes at once, unless a logits processor reads the text:
        that is faster than waiting for the device at every node of the path.
        """
        tree, positions = rows.tree, rows.positions
        if rows.logits.device.type != "cpu" and not tree.distributions and not self._processors.read_text:
            return self.pick(rows.logits, positions)[:, None]
        drawn_children = {children.parent: children for children in tree.distributions}
        scores = self._processors.at_nodes(rows.logits, tree, rows.text)

        def pick(node: int) -> int:
            position = positions[1 + node]
            distribution = scores(node).double().softmax(-1)
            if node in drawn_children:
                accepted, accepted_token, residual = multi_round_rejection(
                    distribution[0], drawn_children[node], tree, lambda index: self.uniform(position, 1 + index)
                )
                if (token := int(torch.where(accepted, accepted_token, -1))) >= 0:
                    return token
                distribution = residual.view(1, -1)
            return int(self._draws(distribution, [position]))

        return self._decide_along_path(rows, pick)

    def _draws(self, distributions: Tensor, positions: Sequence[int]) -> Tensor:
        numbers = {position: self.uniform(position) for position in dict.fromkeys(positions)}  # one per depth
        return draw_tokens(distributions, [numbers[position] for position in positions])

    def uniform(self, position: int, stream: int = 0) -> float:
        """Return a random number in [0, 1), for the draw at a position or, with j > 0, its j-th round of rejection."""
        return np.random.default_rng((self.seed, position, stream) if stream else (self.seed, position)).random()
