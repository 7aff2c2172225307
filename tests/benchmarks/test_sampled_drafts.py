"""Sampled drafts leave the distribution of the text unchanged over requests; drafts of a constant seed are detected."""

from dataclasses import replace

import pytest
import torch

from benchmarks import sampled_drafts
from benchmarks.sampled_drafts import OPTIONS, PROMPT, by_eval, by_generate, chi_squared, text_distribution
from inference import Speculation, drafter_specs, generate, stream
from inference.chat.chat_session import ChatSession
from inference.verifier.base import load_base
from inference.verifier.options import SamplingOptions
from inference.verifier.runner import Runner
from inference.verifier.session import Session

SAMPLING, NUM_TOKENS = SamplingOptions(1.5, 2), 4
NUM_SEEDS, IMPROBABLE = 100, 1e-3


@pytest.fixture(scope="module")
def toy(shared_folder):
    """The toy base, and the specs of its drafters."""
    folder = shared_folder("sampled-drafts", sampled_drafts.save_toy_base)
    base = load_base(str(folder), "float32", torch.device("cpu"))
    return base, sampled_drafts.save_toy_drafters(base, folder)


@pytest.fixture(scope="module")
def expected(toy):
    return text_distribution(toy[0], PROMPT, NUM_TOKENS, SAMPLING)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_new_drafter_for_every_request_does_not_change_the_distribution(toy, expected, name):
    base, specs = toy
    requests = (replace(SAMPLING, seed=seed) for seed in range(NUM_SEEDS))
    texts = [tuple(by_generate(base, PROMPT, specs[name], NUM_TOKENS, request)) for request in requests]
    assert chi_squared(texts, expected)[2] > IMPROBABLE


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_drafts_from_a_constant_seed_are_detected(toy, expected, name, constant_seed):
    base, specs = toy
    runner = Runner(base)
    drafter = constant_seed(drafter_specs.make(specs[name], runner))
    sessions = [Session(runner, drafter, replace(SAMPLING, seed=seed).sampler()) for seed in range(NUM_SEEDS)]
    texts = [tuple(session.run(PROMPT, NUM_TOKENS).tokens) for session in sessions]
    assert chi_squared(texts, expected)[2] < IMPROBABLE


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_seed_gives_one_text_by_every_door_with_a_new_drafter_or_a_used_one(toy, name):
    base, specs = toy
    runner, arguments = Runner(base), {"max_new_tokens": 12, "temperature": 1.5, "eos": []}
    used = drafter_specs.make(specs[name], runner)
    chat = ChatSession(Session(runner, used))
    speculation = Speculation(used, base.tokenizer)
    texts = []
    for number in range(2):
        torch.manual_seed(number)
        seed = int(torch.randint(2**62, ()))  # as `Speculation` takes it from torch's generator
        torch.manual_seed(number)
        answer = base.model.generate(
            torch.tensor([PROMPT]), do_sample=True, temperature=1.5, max_new_tokens=12, custom_generate=speculation
        )
        sampling = SamplingOptions(1.5, seed=seed)
        chat.session.sampler = sampling.sampler()
        chat.forget()
        given = [
            by_generate(base, PROMPT, specs[name], 12, sampling),
            by_eval(base, PROMPT, specs[name], 12, sampling),
            generate(base, PROMPT, used, seed=seed, **arguments)[0].token_ids,
            answer[0, len(PROMPT) :].tolist(),
            [token for emitted, _ in chat.decode(PROMPT, 12) for token in emitted],
        ]
        assert all(text == given[0] for text in given)
        streamed = "".join(stream(base, PROMPT, specs[name], seed=seed, **arguments))
        assert streamed == base.tokenizer.decode(given[0], skip_special_tokens=True)
        texts.append(given[0])
    assert texts[0] != texts[1]


@pytest.mark.slow
def test_a_trained_base_that_drafts_for_itself_keeps_its_distribution(constant_seed):
    base = load_base("checkpoints/tiny-chat", "float32", torch.device("cpu"))
    prompt, sampling = base.tokenizer("Name a colour.").input_ids, SamplingOptions(1.0, 3)
    expected = text_distribution(base, prompt, 2, sampling)
    runner = Runner(base)
    drafter = drafter_specs.make(f"draft_model={base.name}:num_draft=1,temperature=1.5,top_k=3", runner)
    for each, agrees in ((drafter, True), (constant_seed(drafter), False)):
        sessions = [Session(runner, each, replace(sampling, seed=seed).sampler()) for seed in range(60)]
        texts = [tuple(session.run(prompt, 2).tokens) for session in sessions]
        assert (chi_squared(texts, expected)[2] > IMPROBABLE) == agrees
