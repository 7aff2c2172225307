"""Drafters found by the text that they follow, as vLLM hands over rows without the names of their requests."""

import random

import numpy as np
import pytest

import drafters
from drafters import Limits
from inference.verifier.session import Session
from inference.vllm.served_drafter import ChainDrafter
from inference.vllm.text_proposer import DrafterPool

LIMITS = Limits(max_depth=4, max_nodes=4)


class Counting(drafters.ANPD):
    """Counts the texts that it begins."""

    begun = 0

    def begin(self, prompt):
        Counting.begun += 1
        super().begin(prompt)


@pytest.mark.parametrize(
    ("build", "is_preempted"),
    [(drafters.ANPD, True), (drafters.PromptLookup, True), (lambda: drafters.Joint(runner_up=0), False)],
)
def test_rows_in_any_order_get_the_chains_of_a_drafter_of_their_own(build, is_preempted, pseudo_runner):
    """A preempted text may lose its drafter, and Joint, which scores its sources, then has less experience."""
    rng, runner, num_tokens = random.Random(0), pseudo_runner(vocab=6), 0
    texts = {name: [name, 1, 2] for name in range(4)}
    pool, own = DrafterPool(lambda: ChainDrafter(build(), 4)), {name: ChainDrafter(build(), 4) for name in texts}
    for name, text in texts.items():
        own[name].begin(text[:-1])
    for step in range(40):
        present = rng.sample(sorted(texts), rng.randrange(1, 5) if is_preempted else 4)
        found = pool.propose([np.array(texts[name]) for name in present], LIMITS)
        for name, chain in zip(present, found, strict=True):
            assert chain == list(own[name].propose(texts[name], LIMITS).tokens)
            num_tokens += len(chain)
            texts[name] += [*chain[:2], rng.randrange(6)] if step % 3 else [runner.next(texts[name])]
    assert len(pool._drafters) <= 4 and num_tokens > 100


def test_a_text_that_goes_on_is_not_begun_again_and_an_idle_drafter_takes_the_next_text():
    Counting.begun, pool = 0, DrafterPool(Counting)
    first, second = np.array([1, 2, 3]), np.array([4, 5])
    pool.propose([first, second], LIMITS)
    pool.propose([np.append(second, 6), np.append(first, 4)], LIMITS)
    assert (Counting.begun, len(pool._drafters)) == (2, 2)
    pool.propose([np.array([9, 9])], LIMITS)
    assert (Counting.begun, len(pool._drafters)) == (3, 2)


def test_texts_with_a_common_prompt_keep_their_own_drafters():
    pool = DrafterPool(Counting)
    prompt = np.array([1, 2, 3, 1, 2])
    pool.propose([prompt, prompt], LIMITS)
    pool.propose([np.append(prompt, 3), np.append(prompt, 4)], LIMITS)
    Counting.begun = 0
    chains = pool.propose([np.append(prompt, [4, 1, 2]), np.append(prompt, [3, 1, 2])], LIMITS)
    assert Counting.begun == 0
    assert [chain[0] for chain in chains] == [4, 3]


def test_a_chain_is_the_first_path_of_the_tree_and_decodes_as_such(pseudo_runner):
    runner = pseudo_runner(vocab=6)
    prompt = [1, 2, 3]
    result = Session(runner, ChainDrafter(drafters.Joint(runner_up=0), 3)).run(prompt, 80)
    assert result.tokens == runner.greedy(prompt, 80)
    assert max(step.fed_candidates for step in result.steps) == 3
    assert len(result.steps) < 60


def test_a_text_is_compared_in_full_with_its_own_drafter_only(monkeypatch):
    pool, compared, array_equal = DrafterPool(Counting), [], np.array_equal
    texts = [np.array([1, 2, 3, name]) for name in range(8)]
    pool.propose(texts, LIMITS)
    monkeypatch.setattr(np, "array_equal", lambda *pair: compared.append(pair) or array_equal(*pair))
    Counting.begun = 0
    pool.propose([np.append(text, 9) for text in reversed(texts)], LIMITS)
    assert len(compared) == len(texts) and Counting.begun == 0
