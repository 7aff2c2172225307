"""The two-sample test of sampled texts keeps its error rate and its stated power."""

from collections import Counter

import numpy as np
import torch

from inference.options import SamplingOptions
from inference.verifier.base import load_base
from inference.verify import cell_counts, compare_distributions, sample_base
from tests.inference.verifier.test_sampled_drafts import PROMPT, p_value, save_toy_base, text_distribution

SAMPLING, NUM_TOKENS = SamplingOptions(1.5, 2), 4


def test_the_base_is_sampled_from_its_own_distribution(shared_folder):
    base = load_base(str(shared_folder("sampled-drafts", save_toy_base)), "float32", torch.device("cpu"))
    counts = sample_base(base, PROMPT, SAMPLING, 2000, NUM_TOKENS)
    assert sum(counts.values()) == 2000
    expected = text_distribution(base, PROMPT, NUM_TOKENS, SAMPLING)
    assert p_value(Counter(counts).elements(), expected) > 1e-3


def test_error_rate_and_power_are_as_stated():
    """Over many pairs of samples of a known distribution, with and without the bias that is called detectable."""
    rng = np.random.default_rng(0)
    texts, level = [(a, b) for a in range(3) for b in range(3)], 0.05
    fair = rng.dirichlet(np.ones(len(texts)), 2)  # for two prompts

    def counts(share, number):
        return {text: int(n) for text, n in zip(texts, rng.multinomial(number, share), strict=True) if n}

    stated, is_found, is_rejected = [], [], []
    for _ in range(100):
        reference = [counts(share, 800) for share in fair]
        result = compare_distributions(reference, [counts(share, 200) for share in fair], level)
        is_rejected.append(result.p_value <= level)
        stated.append(result.detectable)
        bias = np.median(stated) / np.mean([1 - share.max() for share in fair])  # as a share of all texts
        biased = [(1 - bias) * share + bias * (np.arange(len(texts)) == share.argmax()) for share in fair]
        result = compare_distributions(reference, [counts(share, 200) for share in biased], level)
        is_found.append(result.p_value <= level)
    assert np.mean(is_rejected) <= 0.12
    assert 0.8 <= np.mean(is_found) <= 0.98, "the power is 0.9"


def test_rare_texts_count_for_their_beginnings():
    reference = {(1, 1): 80, (1, 2): 12, (1, 3): 4, (2, 1): 60, (3,): 4}
    drafted = {(1, 1): 18, (1, 3): 2, (1, 4): 1, (2, 2): 18, (4, 4): 1}
    table = cell_counts(reference, drafted)  # a fifth of the texts are drafted, so 25 of both make a cell
    assert table.tolist() == [[80, 60, 20], [18, 0, 22]]


def test_nothing_can_be_found_where_the_base_writes_one_text():
    result = compare_distributions([{(1, 2): 400}], [{(1, 2): 100}])
    assert (result.p_value, result.freedom, result.detectable) == (1.0, 0, None)
