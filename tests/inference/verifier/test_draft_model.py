"""The session of a draft model: text, cache and distributions are those of fresh forwards, whatever was rejected."""

import random
from copy import deepcopy
from functools import cache

import pytest
import torch
from transformers.generation import AssistedCandidateGenerator, candidate_generator

from drafters import ANPD, Drafter, DraftModel, DraftTree
from inference.verifier.base import Base
from inference.verifier.draft_model import DraftModelSession, Lenient
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler
from inference.verifier.session import Session
from tests.inference.verifier.oracles import assert_cache_is_fresh, pearson, prompt_of, written_alone

PROMPTS = [1, 2, 3, 17]
SAMPLING = {"temperature": 0.7, "top_k": 9, "top_p": 0.9}


@cache
def similar_model(base, seed=1, spread=0.35):
    """A model that often agrees with the base: the base with a little noise on its weights."""
    model = deepcopy(base.model)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for weight in model.parameters():
            weight += spread * weight.std() * torch.randn_like(weight) if weight.dim() == 2 else 0.0
    return Base("similar model", model, base.tokenizer)


def assert_fresh(session):
    """Assert that the cache equals that of one forward over the session's own text."""
    assert 0 < session.runner.cached < len(session.seq)
    assert_cache_is_fresh(session.runner, session.seq[: session.runner.cached])


class Guesses(Drafter):
    """Random chains and branches; with a small vocabulary some of them are right."""

    def __init__(self, seed, vocab):
        self.rng, self.vocab, self.rewound = random.Random(seed), vocab, []

    def propose(self, seq, limits):
        paths = [[self.rng.randrange(self.vocab) for _ in range(3)] for _ in range(8)]
        return DraftTree.from_paths([path[: max(0, limits.max_depth)] for path in paths])

    def rewind(self, length):
        self.rewound.append(length)


# ---- drafting


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("guessing", [False, True])
def test_a_draft_is_the_draft_models_own_text_after_any_earlier_requests(pseudo_runner, seed, guessing):
    rng, runner, eos = random.Random(seed), pseudo_runner(seed, vocab=5), frozenset({3})
    inner = DraftModelSession(runner, Guesses(seed, 5) if guessing else None)
    for _ in range(2):
        seq = [rng.randrange(5) for _ in range(rng.choice(PROMPTS))]
        inner.begin(seq)
        for _ in range(25):
            asked, ends = rng.randrange(1, 9), rng.choice([eos, frozenset()])
            written = inner.write(seq, asked, ends)
            assert written.tokens == pseudo_runner(seed, vocab=5).greedy(seq, asked, ends)
            assert written.distributions == []
            assert inner.session.seq[: len(seq)] == seq
            assert runner.text == inner.session.seq[:-1], "the cache holds all but the last token"
            if rng.random() < 0.2:  # the text was a draft itself, and part of it is rejected
                length = rng.randrange(1, len(seq) + 1)
                inner.rewind(length)
                seq = seq[:length]
            taken = written.tokens[: rng.randrange(len(written.tokens) + 1)]
            seq = [*seq, *taken, *(rng.randrange(5) for _ in range(rng.randrange(1, 3)))]
    assert inner.forwards == runner.forwards


def test_the_draft_models_own_drafter_is_rewound_to_where_the_text_was_cut(pseudo_runner):
    drafter = Guesses(0, 12)
    inner = DraftModelSession(pseudo_runner(), drafter)
    inner.begin([5, 6])
    first, second, *_ = inner.write([5, 6], 4).tokens
    assert drafter.rewound == []
    inner.write([5, 6, first, (second + 1) % 12], 4)
    assert drafter.rewound == [3], "the first token was accepted, the second rejected"


def test_nothing_is_drafted_beyond_the_draft_models_own_context(pseudo_runner):
    inner = DraftModelSession(pseudo_runner(context=8))
    seq = [5, 6, 7, 5, 6]
    inner.begin(seq)
    assert inner.write(seq, 9).tokens == pseudo_runner().greedy(seq, 3)
    for length in (8, 9, 12):  # the base's context may be longer
        assert inner.write([*seq, *range(length - 5)], 5).tokens == []
    assert inner.forwards == 3


# ---- with a base


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 17])
def test_in_a_cascade_every_cache_is_that_of_a_fresh_forward(make_base, length):
    base, prompt = make_base(), prompt_of(length)
    lowest = DraftModelSession(Runner(similar_model(base, seed=2)), ANPD(order=3, num_draft=2))
    middle = DraftModelSession(Runner(similar_model(base)), DraftModel(lowest, num_draft=2))
    asked = []
    write = lowest.write
    lowest.write = lambda seq, *arguments: asked.append(list(seq)) or write(seq, *arguments)
    session = Session(Runner(base), DraftModel(middle, num_draft=5))
    tokens, refused = [], 0
    for emitted, cost in session.decode(prompt, 30):
        tokens += emitted
        refused += cost.accepted < cost.fed_candidates
        for one in (session, middle.session, lowest.session):
            assert_fresh(one)
        assert lowest.session.seq[: len(asked[-1])] == asked[-1]
    assert tokens == written_alone(base, prompt, 30)
    assert refused
    assert session.drafter.draft_forwards > lowest.forwards > 0


@pytest.mark.slow
@pytest.mark.parametrize("guessing", [False, True])
@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.95])
def test_a_draft_ends_after_the_first_token_below_the_threshold(make_base, threshold, guessing):
    base, ends = make_base(), 0
    inner = DraftModelSession(Runner(base), Guesses(0, 40) if guessing else None)
    if guessing:
        inner.session.drafter.propose = lambda seq, limits: DraftTree.from_paths(
            [written_alone(base, tuple(seq), min(3, limits.max_depth))]
        )
    for length in PROMPTS:
        prompt = prompt_of(length)
        inner.begin(prompt)
        for _ in range(3):
            expected, seq = [], list(prompt)
            while len(expected) < 6:
                distribution = base.model(torch.tensor([seq])).logits[0, -1].softmax(-1)
                expected.append(distribution.argmax().item())
                seq.append(expected[-1])
                if distribution.max() < threshold:
                    break
            assert inner.write(prompt, 6, threshold=threshold).tokens == expected
            ends += len(expected) < 6
            prompt = seq
    assert ends


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
@pytest.mark.parametrize("threshold", [0.0, 0.2])
def test_draft_lengths_are_those_of_assisted_generation(make_base, monkeypatch, schedule, threshold):
    base, expected, lengths = make_base(context=128, predictable=True), [], []
    other = similar_model(base, spread=0.1)
    update = AssistedCandidateGenerator.update_candidate_strategy

    def record(self, ids, scores, num_matches):
        expected.append(scores.shape[1] - 1)
        update(self, ids, scores, num_matches)

    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", record)
    monkeypatch.setattr(candidate_generator, "is_sklearn_available", lambda: False)  # it would change the threshold
    options = {"num_assistant_tokens_schedule": schedule, "assistant_confidence_threshold": threshold}
    other.model.generation_config.update(num_assistant_tokens=3, **options)
    session = Session(Runner(base), DraftModel(DraftModelSession(Runner(other)), 3, threshold, schedule))
    for prompt in (prompt_of(3), prompt_of(17)):
        base.model.generate(torch.tensor([prompt]), assistant_model=other.model, max_new_tokens=60, do_sample=False)
        steps = session.run(prompt, 60, frozenset([base.model.generation_config.eos_token_id])).steps
        lengths += [step.fed_candidates for step in steps]
    assert [*filter(None, lengths)] == [*filter(None, expected)]
    assert schedule == "constant" or len(set(lengths)) > 5


def test_a_lenient_model_keeps_drafted_tokens_that_it_finds_probable_enough(base):
    low, passed = similar_model(base, spread=0.6), 0
    middle = DraftModelSession(Runner(base), DraftModel(DraftModelSession(Runner(low)), num_draft=3), Lenient(20))
    for length in PROMPTS:
        seq, end = prompt_of(length), length + 12
        middle.begin(seq)
        written = middle.write(seq, 12).tokens
        while len(seq) < end:
            room = min(3, end - 1 - len(seq))
            for token in [*(written_alone(low, tuple(seq), room) if room else []), None]:
                distribution = base.model(torch.tensor([seq])).logits[0, -1].softmax(-1)
                best = distribution.argmax().item()
                seq = [*seq, token if token is not None and distribution[token] > 1 / 20 else best]
                passed += seq[-1] != best
                if seq[-1] != token:
                    break
        assert written == seq[length:]
    assert passed > 3 and not middle.samples_drafts


# ---- drawn drafts


@pytest.mark.slow
@pytest.mark.parametrize("guessing", [False, True])
@pytest.mark.parametrize("length", PROMPTS)
def test_drawn_tokens_come_with_the_distribution_they_were_drawn_from(make_base, length, guessing):
    base, seq = make_base(), [*prompt_of(length)]
    sampler = KeyedSampler(**SAMPLING, seed=3)
    inner = DraftModelSession(Runner(base), Guesses(1, 40) if guessing else None, sampler)
    inner.begin(seq)
    for _ in range(5):
        written = inner.write(seq, 5)
        assert len(written.distributions) == len(written.tokens) == 5
        whole = base.model(torch.tensor([seq + written.tokens])).logits[0, len(seq) - 1 : -1]
        torch.testing.assert_close(torch.stack(written.distributions), sampler.probabilities(whole), rtol=0, atol=1e-9)
        assert all(
            distribution[token] > 0 for distribution, token in zip(written.distributions, written.tokens, strict=True)
        )
        seq = [*seq, *written.tokens[:2], 7]


@pytest.mark.slow
def test_drawn_tokens_follow_their_distribution_when_another_model_drafts_them(make_base):
    """Two tokens drawn through a sampled draft of another model, against the product of their conditionals."""
    base, prompt, distribution = make_base(vocab=40), prompt_of(3), {"temperature": 1.0, "top_k": 3}
    lowest = DraftModelSession(Runner(similar_model(base)), sampler=KeyedSampler(**distribution, seed=1))
    inner = DraftModelSession(Runner(base), DraftModel(lowest, num_draft=2), KeyedSampler(**distribution, seed=2))
    counts, draws = torch.zeros(40, 40, dtype=torch.float64), 300
    for index in range(draws):
        inner.begin(prompt)
        counts[tuple(inner.write(prompt, 2, draft_seed=index).tokens)] += 1
    after = KeyedSampler(**distribution).probabilities(
        base.model(torch.tensor([[*prompt, t] for t in range(40)])).logits[:, -1]
    )
    first = KeyedSampler(**distribution).probabilities(base.model(torch.tensor([prompt])).logits[0, -1:])[0]
    assert pearson(counts, first[:, None] * after * draws) < 28, "one in a thousand, nine pairs"
