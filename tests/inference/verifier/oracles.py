"""What tests of the verifier compare it with: full forwards without a cache, and distributions by enumeration."""

import random
from functools import cache
from math import inf

import torch

from drafters import DraftTree
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler
from inference.verifier.session import Session
from tests.conftest import fresh_cache


def prompt_of(length):
    """A prompt of tokens that are no special tokens; the same for the same length."""
    rng = random.Random(length)
    return tuple(rng.randrange(3, 40) for _ in range(length))


def random_tree(rng, size):
    return DraftTree(rng.sample(range(40), size), [rng.randrange(-1, node) for node in range(size)])


@cache
@torch.inference_mode()
def written_alone(base, prompt, max_new_tokens, eos=frozenset(), sampler=None):
    """The base's text without cache and verifier: one full forward per token; greedy without a `KeyedSampler`."""
    seq = list(prompt)
    while len(seq) < min(len(prompt) + max_new_tokens, base.context_length):
        logits = base.model(torch.tensor([seq])).logits[0, -1:]
        seq.append((sampler.pick(logits, [len(seq)]) if sampler else logits.argmax(-1)).item())
        if seq[-1] in eos:
            break
    return seq[len(prompt) :]


@torch.inference_mode()
def assert_cache_is_fresh(runner, tokens, tolerance=1e-9):
    """Assert that a runner caches what one plain forward over these tokens does."""
    assert runner.cached == len(tokens)
    for held, expected in zip(runner.cache.layers, fresh_cache(runner.base, tokens).layers, strict=True):
        assert held.get_seq_length() == len(tokens)
        torch.testing.assert_close(held.keys, expected.keys, rtol=0, atol=tolerance)
        torch.testing.assert_close(held.values, expected.values, rtol=0, atol=tolerance)


def pearson(counts, expected):
    """Pearson's chi-square of counts; cells in which fewer than four are expected count as one."""
    if counts[expected == 0].any():
        return inf
    often, rare = expected >= 4, expected < 4
    pooled = (counts[rare].sum() - expected[rare].sum()) ** 2 / expected[rare].sum().clamp(min=4)
    return (((counts - expected) ** 2)[often] / expected[often]).sum().item() + pooled.item()


@torch.inference_mode()
def chi_square_of_pairs(base, drafter, runs, length, first=0, prompt=(3, 4, 5), **setting):
    """Run many texts and compare two tokens of them with their joint distribution under the base alone.

    Args:
        base: A base with a small vocabulary V: there are V * V cells.
        drafter: The drafter of every text.
        runs: Number of texts, with the seeds 0, 1, 2, ...
        length: Number of tokens of each text.
        first: Index of the first of the two tokens; from 1 on, the tokens before it are summed over.
        prompt: Prompt of every text.
        **setting: Temperature, top_k and top_p of the sampler.

    Returns:
        The statistic, and the number of accepted nodes per text.
    """
    sampler, vocab = KeyedSampler(**setting), base.model.config.vocab_size

    def after(*tokens):
        return sampler.probabilities(base.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1:])[0]

    def pairs(*before):  # (V, V)
        if len(before) < first:
            return sum(weight * pairs(*before, token) for token, weight in enumerate(after(*before)))
        return torch.stack([weight * after(*before, token) for token, weight in enumerate(after(*before))])

    counts, accepted, runner = torch.zeros(vocab, vocab, dtype=torch.float64), 0, Runner(base)
    for seed in range(runs):
        sampler = KeyedSampler(**setting, seed=seed)
        result = Session(runner, drafter, sampler).run(prompt, length)
        counts[result.tokens[first], result.tokens[first + 1]] += 1
        accepted += sum(step.accepted for step in result.steps)
    return pearson(counts, pairs() * runs), accepted / runs


def threshold(accepted, guess):
    """Find the number below which a uniform draw is accepted, by bisection unless it is within 1e-9 of a guess."""
    if (guess < 1e-9 or accepted(guess - 1e-9)) and (guess > 1 - 1e-9 or not accepted(guess + 1e-9)):
        return guess
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted(middle) else (low, middle)
    return low
