"""How the base chooses tokens: greedily, by draws that only the seed and the position decide, or by a lossy rule."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from drafters.tree import ROOT, DraftTree
from inference.engine.acceptance import accept, accept_deepest
from inference.engine.rejection import multi_round_rejection


class Sampler(Protocol):
    """Decides what is emitted: ``decide`` looks at the logits where they are, ``walk`` follows its verdict on the host.

    Between the two lies the one copy to the host that a step makes.

    Args:
        lossless: Whether the text follows the base's own law.
    """

    lossless: bool

    def decide(self, logits: Tensor, tree: DraftTree, positions: Sequence[int]) -> Tensor:
        """A verdict (1 + M, C) of integers for each row of (1 + M, V); row i decides the token at ``positions[i]``."""

    def accept(self, tree: DraftTree, decisions: list[list[int]]) -> tuple[list[int], list[int]]:
        """The accepted path and the emitted tokens."""


def most_probable(logits: Tensor) -> Tensor:
    """The index (N,) of the largest entry of each row of (N, V); of equals the first, as in torch.

    On a CPU numpy finds it up to forty times faster.
    """
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return torch.from_numpy(logits.numpy().argmax(-1))


class _Matching:
    """One pick a row; the path is what the picks follow."""

    lossless = True

    def accept(self, tree: DraftTree, decisions: list[list[int]]) -> tuple[list[int], list[int]]:
        return accept(tree, [row[0] for row in decisions])


class Greedy(_Matching):
    """The most probable token; of equals the first."""

    def decide(self, logits: Tensor, tree: DraftTree, positions: Sequence[int]) -> Tensor:
        return most_probable(logits)[:, None]


class KeyedSampler(_Matching):
    """Draws from the processed distribution by inverse CDF, with a number keyed by (seed, position).

    Two runs with one seed give one text, whatever the drafter, as long as it drafts without chance: sample-and-match
    emits the very draw the base alone would have made. Children that were drawn at random (``tree.distributions``) go
    through multi-round rejection: the same law, another text.

    Args:
        temperature: Above zero.
        top_k: Keep the k most probable tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens with this probability; 1 keeps all.
        seed: Key of the draws.
    """

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> None:
        from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        for is_right, needed, value in (
            (0 < temperature < inf, "temperature must be a number above 0, or 0 to decode greedily", temperature),
            (top_k >= 0, "top_k must be at least 0", top_k),
            (0 < top_p <= 1, "top_p must be above 0 and at most 1", top_p),
            (seed >= 0, "seed must be at least 0", seed),
        ):
            if not is_right:
                raise ValueError(f"{needed}, not {value}")
        self.seed = seed
        self._warpers = LogitsProcessorList()
        if temperature != 1.0:
            self._warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_k:
            self._warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(top_p))

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distributions (N, V) that tokens are drawn from."""
        return self._warpers(None, logits.float()).double().softmax(-1)

    def pick(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """One draw (N,) for each row of (N, V)."""
        return self._draws(self.probabilities(logits), positions)

    def decide(self, logits: Tensor, tree: DraftTree, positions: Sequence[int]) -> Tensor:
        """Draw along the accepted path only: -1 stands where `walk` never comes.

        A GPU draws for all nodes at once where it can, rather than wait for the host at each.
        """
        if logits.is_cuda and not tree.distributions:
            return self.pick(logits, positions)[:, None]
        drawn = {children.parent: children for children in tree.distributions}
        decisions = torch.full((len(logits), 1), -1)
        node: int | None = ROOT
        while node is not None:
            row, at = 1 + node, positions[1 + node]
            distribution, taken = self.probabilities(logits[row : row + 1]), False
            if node in drawn:
                taken, token, distribution = multi_round_rejection(
                    distribution[0], drawn[node], tree, lambda index, at=at: self.uniform(at, 1 + index)
                )
            decisions[row] = token = int(token if taken else self._draws(distribution.view(1, -1), [at]))
            node = tree.child(node, token)
        return decisions.to(logits.device)

    def _draws(self, distributions: Tensor, positions: Sequence[int]) -> Tensor:
        at = {position: self.uniform(position) for position in dict.fromkeys(positions)}  # nodes of one depth share it
        draws = torch.tensor([[at[position]] for position in positions], dtype=torch.float64)
        cumulative = distributions.cumsum(-1)
        index = torch.searchsorted(cumulative, draws.to(distributions.device) * cumulative[:, -1:], right=True)
        return index.clamp(max=distributions.shape[-1] - 1)[:, 0]

    def uniform(self, position: int, stream: int = 0) -> float:
        """A number in [0, 1): stream 0 decides the draw at a position, stream j the j-th round of rejection there."""
        return np.random.default_rng((self.seed, position, stream) if stream else (self.seed, position)).random()


def make_sampler(temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> Greedy | KeyedSampler:
    """Greedy at temperature 0, else draws keyed by seed and position.

    Raises:
        ValueError: A value is out of its range, or narrows a law that greedy decoding does not draw from.
    """
    if not temperature and (top_k or top_p != 1):
        given = f"top_k {top_k}" if top_k else f"top_p {top_p}"
        raise ValueError(f"{given} is for sampling, and temperature 0 decodes greedily: give a temperature above 0")
    return KeyedSampler(temperature, top_k, top_p, seed) if temperature else Greedy()


class RunningSampler(KeyedSampler):
    """Draws with the next numbers of one generator: for drafts, which must owe nothing to the base's own numbers."""

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> None:
        super().__init__(temperature, top_k, top_p, seed)
        self.reset()

    def reset(self) -> None:
        """Begin with the first number again."""
        self._generator = np.random.default_rng((self.seed, 0x0D4AF7))

    def uniform(self, position: int, stream: int = 0) -> float:
        return self._generator.random()


class Typical(KeyedSampler):
    """Typical acceptance (Medusa, section 2.3.1): a lossy rule, kept for comparison.

    A node is acceptable where its probability exceeds min(threshold, alpha * exp(-entropy)); the longest acceptable
    path is taken, and the token after it drawn from the base. The text does not follow the base's law.

    Args:
        threshold: Hard bound; Medusa's delta.
        alpha: Entropy-dependent bound; Medusa's epsilon.
        temperature, top_k, top_p, seed: As in `KeyedSampler`.
    """

    lossless = False

    def __init__(
        self,
        threshold: float = 0.09,
        alpha: float = 0.3,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(temperature, top_k, top_p, seed)
        if not 0 < threshold <= 1 or alpha <= 0:
            raise ValueError(f"need 0 < threshold <= 1 and alpha > 0, not {threshold} and {alpha}")
        self.threshold, self.alpha = threshold, alpha

    def decide(self, logits: Tensor, tree: DraftTree, positions: Sequence[int]) -> Tensor:
        distributions = self.probabilities(logits)
        entropy = -torch.special.xlogy(distributions, distributions).sum(-1)  # (1 + M,)
        bound = (self.alpha * (-entropy).exp()).clamp(max=self.threshold)
        parents = torch.tensor([0, *(1 + parent for parent in tree.parents)], device=distributions.device)
        tokens = torch.tensor([0, *tree.tokens], device=distributions.device)
        acceptable = distributions[parents, tokens] > bound[parents]
        return torch.stack([acceptable.long(), self._draws(distributions, positions)], dim=-1)

    def accept(self, tree: DraftTree, decisions: list[list[int]]) -> tuple[list[int], list[int]]:
        return accept_deepest(tree, [row[0] for row in decisions], [row[1] for row in decisions])
