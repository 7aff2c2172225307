"""Sampled drafts leave the distribution of the text unchanged over requests; drafts of a constant seed are detected.

Every text is a request of its own, as users make them: another seed, and a drafter that is built for it.
"""

from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch
from scipy.stats import chi2
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import drafters
from data.tokenizer import tokenizer_hash
from drafters import checkpoint
from drafters.checkpoint import DrafterConfig
from inference import Speculation, drafter_specs, generate, stream
from inference.chat import ChatSession
from inference.options import SamplingOptions
from inference.verifier.base import load_base
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler
from inference.verifier.session import Session
from inference.verify import next_probabilities
from tests.conftest import toy_base
from tests.inference.verifier.oracles import pearson

SAMPLING, NUM_TOKENS = SamplingOptions(1.5, 2), 4
NUM_SEEDS, IMPROBABLE = 100, 1e-3


PROMPT = [3, 4, 5]
TOY_VOCAB = 8
OPTIONS = {  # of the drafters that sample
    "ctc": "draws=2,num_nodes=8",
    "draft_model": "num_draft=2,temperature=1",
    "smaller draft_model": "num_draft=2,temperature=1",  # of the same tokenizer, with a smaller or larger embedding
    "larger draft_model": "num_draft=2,temperature=1",
}


def save_toy_base(folder, seed=0, vocab=TOY_VOCAB):
    """Write a random LLaMA of one layer with a tokenizer of eight words, and return its folder."""
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(TOY_VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    model = toy_base(vocab=vocab, layers=1, hidden=16, seed=seed, dtype=torch.float32).model
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


def save_toy_drafters(base, folder):
    """Write an untrained CTC drafter and draft models for a toy base, and return their specs by name."""
    sizes = {"draft_model": TOY_VOCAB, "smaller draft_model": 3, "larger draft_model": TOY_VOCAB + 3}
    folders = {name: save_toy_base(folder / name, 4, size) for name, size in sizes.items()}
    options = {"trunk": {"num_frames": 4}, "loss": {"num_labels": 3}}
    config = DrafterConfig("drafters.CTC", options, base.shape, base.name, tokenizer_hash(base.tokenizer))
    folders["ctc"] = folder / "ctc"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        checkpoint.save(folders["ctc"], config.build(), config)
    return {name: f"{name.split()[-1]}={folders[name]}:{options}" for name, options in OPTIONS.items()}


def by_generate(base, prompt, spec, num_tokens, sampling):
    """One call of `generate`, which builds the drafter."""
    return generate(base, prompt, spec, max_new_tokens=num_tokens, eos=[], **asdict(sampling))[0].token_ids


def by_eval(base, prompt, spec, num_tokens, sampling):
    """The objects that one process of `drafters eval` makes."""
    runner = Runner(base)
    return Session(runner, drafter_specs.make(spec, runner), sampling.sampler()).run(prompt, num_tokens).tokens


def text_distribution(base, prompt, num_tokens, sampling):
    """The probability of every text of ``num_tokens`` tokens that the base may sample, by the model's own forward."""
    sampler = KeyedSampler(sampling.temperature, sampling.top_k, sampling.top_p)
    texts = {(): 1.0}
    for _ in range(num_tokens):
        rows = next_probabilities(base, prompt, list(texts), sampler)
        texts = {
            (*text, token): weight * probability
            for (text, weight), row in zip(texts.items(), rows, strict=True)
            for token, probability in enumerate(row.tolist())
            if probability > 0
        }
    return texts


def p_value(texts, expected):
    """Probability of a Pearson's chi-squared at least as large if the texts follow the distribution."""
    counts = Counter(texts)
    if counts.keys() - expected.keys():
        return 0.0
    wanted = torch.tensor(list(expected.values()), dtype=torch.float64) * counts.total()
    seen = torch.tensor([counts[text] for text in expected], dtype=torch.float64)
    return chi2.sf(pearson(seen, wanted), (wanted >= 4).sum())  # the rare texts are one cell more


@pytest.fixture(scope="module")
def toy(shared_folder):
    """The toy base, and the specs of its drafters."""
    folder = shared_folder("sampled-drafts", save_toy_base)
    base = load_base(str(folder), "float32", torch.device("cpu"))
    return base, save_toy_drafters(base, folder)


@pytest.fixture(scope="module")
def expected(toy):
    return text_distribution(toy[0], PROMPT, NUM_TOKENS, SAMPLING)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_new_drafter_for_every_request_does_not_change_the_distribution(toy, expected, name):
    base, specs = toy
    requests = (replace(SAMPLING, seed=seed) for seed in range(NUM_SEEDS))
    texts = [tuple(by_generate(base, PROMPT, specs[name], NUM_TOKENS, request)) for request in requests]
    assert p_value(texts, expected) > IMPROBABLE


class ConstantSeed(drafters.Drafter):
    """Draws the same numbers for every request, as a drafter does that is built with one seed for each of them."""

    def __init__(self, drafter):
        self.drafter, self.required_outputs = drafter, drafter.required_outputs
        self.begin, self.observe = drafter.begin, drafter.observe

    def propose(self, seq, limits):
        return self.drafter.propose(seq, replace(limits, draft_seed=0))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "smaller draft_model"])  # which drafts too little
def test_drafts_from_a_constant_seed_are_detected(toy, expected, name):
    base, specs = toy
    runner = Runner(base)
    drafter = ConstantSeed(drafter_specs.make(specs[name], runner))
    sessions = [Session(runner, drafter, replace(SAMPLING, seed=seed).sampler()) for seed in range(NUM_SEEDS)]
    texts = [tuple(session.run(PROMPT, NUM_TOKENS).tokens) for session in sessions]
    assert p_value(texts, expected) < IMPROBABLE


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_seed_gives_one_text_by_every_door_with_a_new_drafter_or_a_used_one(toy, name):
    base, specs = toy
    runner, arguments = Runner(base), {"max_new_tokens": 12, "temperature": 1.5, "eos": []}
    used = drafter_specs.make(specs[name], runner)
    chat = ChatSession(runner, used)
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
        chat.sampler = sampling.sampler()
        chat.restart()
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
