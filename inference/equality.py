"""A two-sample test that texts written with a drafter follow the base's own distribution, and its power."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy import optimize, stats

from inference.verifier.base import Base
from inference.verifier.check import unwrap
from inference.verifier.layers import takes_argument
from inference.verifier.options import SamplingOptions
from inference.verifier.sampling import KeyedSampler
from inference.verifier.session import Session

Text = tuple[int, ...]
Counts = Mapping[Text, int]  # how often each text was written

ERROR_RATE = 0.01  # probability that a command finds a difference where there is none
POWER = 0.9  # the probability for which the detectable bias is stated
REFERENCE_FACTOR = 4  # texts of the base for each of a drafter: they cost far less
MIN_EXPECTED = 5  # texts of the drafter expected in a cell of the table
NUM_PERMUTATIONS = 9999
BATCH_SIZE = 32


@dataclass(frozen=True)
class EqualityResult:
    """The outcome of `compare_distributions`.

    Args:
        p_value: Probability of a chi-squared at least as large if both distributions are equal, by permutation.
        chi_squared: Pearson's statistic of the tables of texts, added up over the prompts.
        freedom: Its degrees of freedom.
        detectable: Smallest bias that is found with probability 0.9: the share of texts in place of which the drafter
            writes the base's most frequent text, a total variation distance. None if no such bias is found so often.
    """

    p_value: float
    chi_squared: float
    freedom: int
    detectable: float | None


@torch.inference_mode()
def next_probabilities(
    base: Base, prompt: Sequence[int], texts: Sequence[Text], sampler: KeyedSampler
) -> Iterator[np.ndarray]:
    """The distribution (V,) of the token after each text, by the model's own forward without a cache.

    Args:
        base: The base.
        prompt: Token ids of the prompt.
        texts: Continuations of the prompt, all of one length.
        sampler: Makes the distribution of the logits.
    """
    keep = {"logits_to_keep": 1} if takes_argument(unwrap(base.model).__class__, "logits_to_keep") else {}
    for start in range(0, len(texts), BATCH_SIZE):
        ids = torch.tensor([[*prompt, *text] for text in texts[start : start + BATCH_SIZE]], device=base.model.device)
        logits = base.model(ids, use_cache=False, **keep).logits[:, -1]
        yield from sampler.probabilities(logits).cpu().numpy()


def sample_base(
    base: Base, prompt: Sequence[int], num_tokens: int, sampling: SamplingOptions, num_texts: int
) -> Counts:
    """Sample texts of the base alone, by the model's own forward: no code of the decoding loop takes part.

    Equal beginnings are read once, and how often each token follows is drawn for all texts that share one.

    Args:
        base: The base.
        prompt: Token ids of the prompt.
        num_tokens: Tokens of a text; texts that end with an end-of-sequence token are shorter.
        sampling: How tokens are drawn.
        num_texts: Number of texts.
    """
    rng = np.random.default_rng((sampling.seed, num_texts, *prompt))
    sampler = KeyedSampler(sampling.temperature, sampling.top_k, sampling.top_p)
    ended: dict[Text, int] = {}
    growing: dict[Text, int] = {(): num_texts}
    for _ in range(num_tokens):
        longer: dict[Text, int] = {}
        rows = next_probabilities(base, prompt, list(growing), sampler)
        for (text, count), probabilities in zip(growing.items(), rows, strict=True):
            drawn = rng.multinomial(count, probabilities / probabilities.sum())
            for token in np.flatnonzero(drawn).tolist():
                extended = (*text, token)
                (ended if token in base.eos else longer)[extended] = int(drawn[token])
        growing = longer
    return ended | growing


def sample_drafted(
    session: Session, prompt: Sequence[int], num_tokens: int, sampling: SamplingOptions, num_texts: int
) -> Counts:
    """Sample texts with the drafter of a session; each is a request with a seed of its own.

    Args:
        session: Decodes with the drafter.
        prompt: Token ids of the prompt.
        num_tokens: Tokens of a text; texts that end with an end-of-sequence token are shorter.
        sampling: How tokens are drawn; its seed is that of the first text.
        num_texts: Number of texts.
    """
    counts: Counter[Text] = Counter()
    sampler, eos = session.sampler, session.runner.base.eos
    for seed in range(sampling.seed, sampling.seed + num_texts):
        session.sampler = replace(sampling, seed=seed).sampler()
        counts[tuple(session.run(prompt, num_tokens, eos).tokens)] += 1
    session.sampler = sampler
    return counts


def compare_distributions(
    reference: Sequence[Counts], drafted: Sequence[Counts], level: float = ERROR_RATE
) -> EqualityResult:
    """Test whether two samples of texts come from the same distribution, prompt by prompt.

    A text counts for its longest beginning of which at least `MIN_EXPECTED` are expected among the drafter's. As these
    cells depend on both samples together only, the permutation test is exact: with probability ``level`` its p-value is
    at most ``level`` if the distributions are equal.

    Args:
        reference: Texts of the base alone, for each prompt.
        drafted: Texts with the drafter, for each prompt.
        level: Error rate for which the detectable bias is computed.
    """
    tables = [cell_counts(*both) for both in zip(reference, drafted, strict=True)]
    rng = np.random.default_rng(0)
    observed, permuted = 0.0, np.zeros(NUM_PERMUTATIONS)
    for table in tables:
        totals, num_drafted = table.sum(axis=0), int(table[1].sum())
        observed += float(_chi_squared(table[1:], totals)[0])
        permuted += _chi_squared(rng.multivariate_hypergeometric(totals, num_drafted, size=NUM_PERMUTATIONS), totals)
    num_larger = int((permuted >= observed * (1 - 1e-9)).sum())
    freedom = sum(table.shape[1] - 1 for table in tables)
    p_value = (1 + num_larger) / (1 + NUM_PERMUTATIONS)
    return EqualityResult(p_value, observed, freedom, detectable_bias(tables, level))


def cell_counts(reference: Counts, drafted: Counts) -> np.ndarray:
    """The counts (2, C) of the base's and the drafter's texts in C cells, each a beginning that is frequent enough."""
    beginnings: Counter[Text] = Counter()
    for counts in (reference, drafted):
        for text, count in counts.items():
            beginnings.update({text[:length]: count for length in range(len(text) + 1)})
    enough = MIN_EXPECTED * beginnings[()] / sum(drafted.values())
    table: dict[Text, list[int]] = {}
    for row, counts in enumerate((reference, drafted)):
        for text, count in counts.items():
            length = next((n for n in range(len(text), 0, -1) if beginnings[text[:n]] >= enough), 0)
            table.setdefault(text[:length], [0, 0])[row] += count
    return np.array(list(table.values())).T


def detectable_bias(tables: Sequence[np.ndarray], level: float) -> float | None:
    """The smallest bias that the chi-squared test finds with probability `POWER`; see `EqualityResult`.

    Args:
        tables: The counts (2, C) of the base's and the drafter's texts, for each prompt.
        level: Error rate of the test.
    """
    if bias_power(tables, level, 1.0) < POWER:
        return None
    bias = float(optimize.brentq(lambda bias: bias_power(tables, level, bias) - POWER, 0.0, 1.0, xtol=1e-4))
    return bias * float(np.mean([1 - table[0].max() / table[0].sum() for table in tables]))


def bias_power(tables: Sequence[np.ndarray], level: float, bias: float) -> float:
    """Probability that a bias is found, by the noncentral chi-squared distribution.

    Args:
        tables: The counts (2, C) of the base's and the drafter's texts, for each prompt; the base's are the truth.
        level: Error rate of the test.
        bias: Share of all texts that are the most frequent one, besides those that should be.
    """
    freedom, noncentrality = sum(table.shape[1] - 1 for table in tables), 0.0
    if freedom == 0:
        return 0.0
    for table in tables:
        num_base, num_drafted = table.sum(axis=1)
        fair = (table[0] + 0.5) / (table[0] + 0.5).sum()  # no cell is impossible
        biased = (1 - bias) * fair
        biased[fair.argmax()] += bias
        pooled = (num_base * fair + num_drafted * biased) / (num_base + num_drafted)
        weight = num_base * num_drafted / (num_base + num_drafted)
        noncentrality += float(weight * ((biased - fair) ** 2 / pooled).sum())
    critical = stats.chi2.isf(level, freedom)
    return float(stats.ncx2.sf(critical, freedom, noncentrality) if noncentrality else level)


def _chi_squared(drafted: np.ndarray, totals: Any) -> np.ndarray:
    """Pearson's statistic (N,) of N two-row tables with these column totals (C,), from their second rows (N, C)."""
    total, num_drafted = totals.sum(), drafted.sum(axis=1, keepdims=True)
    excess = drafted - num_drafted * totals / total
    return (excess**2 / totals).sum(axis=1) * total**2 / (num_drafted * (total - num_drafted))[:, 0]
