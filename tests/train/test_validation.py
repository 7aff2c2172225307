"""Simulated acceptance equals live acceptance, for every learned drafter, before and after some training."""

from functools import cache
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from benchmarks import recipes
from data.benchmarks import load_questions
from data.conversations import user_message
from drafters import CTC, EAGLE, EAGLE3, Block, Hydra, Medusa, NoDrafter
from inference.prompts import encode_messages
from inference.verifier.base import load_base
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from tests.inference.conftest import train_briefly
from train.validation import answer_spans, simulate_answers, with_own_answers

FRAMES, NUM_TOKENS = 6, 32
TREE = {"num_nodes": 8, "top_k": 4, "num_anchors": 24}
CTC_ARGS = TREE | {"num_frames": FRAMES, "num_labels": 4}
EAGLE_ARGS = {"depth": 4, "width": 3, "top_k": 3, "num_nodes": 8}
HEADS = TREE | {"num_heads": 4}
KINDS = {
    "ctc": (CTC, CTC_ARGS),
    "ctc, fused layers": (CTC, CTC_ARGS | {"hidden_layers": (0, 1, -1)}),
    "block": (Block, TREE | {"num_frames": FRAMES}),
    "eagle": (EAGLE, EAGLE_ARGS | {"noise": 0.0, "token_weight": 1.0}),
    "eagle, chain": (EAGLE, EAGLE_ARGS | {"noise": 0.0, "token_weight": 1.0, "width": 1, "top_k": 1}),
    "eagle3": (EAGLE3, EAGLE_ARGS | {"num_unroll": 4}),
    "medusa": (Medusa, HEADS),
    "medusa, static": (Medusa, HEADS | {"static": [[0], [1], [0, 0], [0, 1], [0, 0, 0], [2]]}),
    "medusa, the base's head": (Medusa, HEADS | {"own_heads": False}),
    "hydra": (Hydra, HEADS),
    "hydra++": (Hydra, HEADS | {"num_layers": 4, "prefix_attention": True, "distillation": True, "width": 4}),
}


@pytest.fixture(scope="module")
def base(tiny):
    """The tiny base in float64, where the session's cache and one plain forward agree to the last bit that matters."""
    loaded = load_base(str(tiny))
    loaded.model.double()
    return loaded


@pytest.fixture
def ends_at(base, monkeypatch):
    """Gives the base another end-of-sequence token, because its random text never contains the real one."""

    def change(token):
        monkeypatch.setattr(base.model.generation_config, "eos_token_id", token)
        return base

    return change


@pytest.fixture(scope="module")
def prompts(base):
    return [
        encode_messages(base, [user_message(question.turns[0])], "tokenizer")[-24:]
        for question in load_questions("embedded")[:5]
    ]


@pytest.fixture(scope="module")
def trained(base, prompts):
    """A drafter after some steps on the base's own text, and the losses of these steps."""
    with torch.no_grad():
        texts = torch.tensor([alone(base, prompt, 40) for prompt in prompts])
    answers = torch.arange(64).expand_as(texts) >= 24

    @cache
    def train(kind, steps):
        drafter_class, init_args = KINDS[kind]
        with torch.random.fork_rng():
            torch.manual_seed(3)
            drafter = recipes.build(drafter_class, base.shape, init_args)
            losses = train_briefly(drafter, base, texts, steps, lr=1e-2, mask=answers)
        return drafter, losses

    return train


def live_and_simulated(base, drafter, prompt, max_new_tokens, eos=frozenset()):
    """Tokens that each step emits after the prefill, counted by the session and simulated on its text."""
    decoded = Session(Runner(base), drafter).run(prompt, max_new_tokens, eos)
    text = torch.tensor([[*prompt, *decoded.tokens]])
    with torch.no_grad():
        hidden = base.hidden_states(text, drafter.required_outputs.hidden_layers)[0]
    ending = SimpleNamespace(base_weights=base.base_weights, eos=eos)
    (simulated,) = simulate_answers(drafter, ending, hidden, text, torch.arange(text.shape[1])[None] >= len(prompt))
    return [step.emitted for step in decoded.steps[1:]], simulated


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_simulated_acceptance_equals_live_acceptance_step_for_step_and_rises_with_training(
    base, trained, prompts, kind
):
    lengths = []
    for steps in (0, 60):
        drafter, losses = trained(kind, steps)
        seen = []
        for prompt in prompts:
            live, others = live_and_simulated(base, drafter, prompt, NUM_TOKENS)
            far = sum(done + FRAMES < NUM_TOKENS for done in accumulate(live))  # nearer the cap, trees are less deep
            assert others[:far] == live[:far]
            seen += live
        lengths.append(sum(seen) / len(seen))
    assert lengths[1] > max(lengths[0] + 0.3, 1.5), "the comparison says little where hardly anything is accepted"
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7, 16])
def test_the_simulation_stops_where_the_session_reaches_its_limit(base, trained, prompts, max_new_tokens):
    for prompt in prompts:
        live, others = live_and_simulated(base, trained("ctc", 60)[0], prompt, max_new_tokens)
        assert others == live
        assert sum(others) == max_new_tokens - 1


@pytest.mark.slow
def test_simulated_acceptance_equals_live_acceptance_on_answers_that_end_with_eos(trained, prompts, ends_at):
    base = ends_at(None)
    written = [Session(Runner(base), NoDrafter()).run(prompt, 30).tokens for prompt in prompts]
    ended = 0
    for token in {tokens[12] for tokens in written}:
        for prompt in prompts:
            live, others = live_and_simulated(base, trained("ctc", 60)[0], prompt, 48, frozenset([token]))
            assert others == live or sum(live) == 47  # at the cap, trees are less deep
            ended += sum(live) < 47
    assert ended > 3


@pytest.mark.parametrize(
    "mask, spans",
    [
        ([0, 0, 1, 1, 0, 1], [(2, 4), (5, 6)]),
        ([1, 1], [(0, 2)]),
        ([0, 0], []),
        ([], []),
        ([0, 1, 0], [(1, 2)]),
        ([False, True, True, False], [(1, 3)]),
    ],
)
def test_answer_spans_are_the_ranges_of_consecutive_true_values_in_the_loss_mask(mask, spans):
    assert answer_spans(mask) == spans


def batch_of(prompts):
    """Prompts of several lengths, right-padded, each with an answer of two tokens that is not the base's."""
    rows = [torch.tensor([*prompt, 7, 8]) for prompt in prompts]
    masks = [torch.arange(len(row)) >= len(row) - 2 for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return {"input_ids": pad(rows, batch_first=True), "loss_mask": pad(masks, batch_first=True)}


def alone(base, prompt, max_new_tokens):
    """A prompt with the base's answer to it, without a batch."""
    ids = torch.tensor([prompt])
    return [*prompt, *base.greedy(ids, torch.ones_like(ids), max_new_tokens)[0].tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [None, 10], ids=["to-the-cap", "to-an-end-token"])
def test_own_answers_equal_those_to_each_prompt_without_a_batch(prompts, ends_at, cut):
    base = ends_at(None)
    prompts = [prompts[0][:20], prompts[1], prompts[2][:10], prompts[3]]
    if cut is not None:
        base = ends_at(alone(base, prompts[1], 24)[len(prompts[1]) + cut])
    expected = [alone(base, prompt, 24) for prompt in prompts]
    if cut is not None:
        assert expected[1][-1] in base.eos and len(expected[1]) < len(prompts[1]) + 24
    answered = with_own_answers(base, batch_of(prompts), 24)
    assert answered["lengths"].tolist() == list(map(len, expected))
    for row, length, text in zip(answered["input_ids"], answered["lengths"], expected, strict=True):
        assert row[:length].tolist() == text
    for mask, prompt, text in zip(answered["loss_mask"].tolist(), prompts, expected, strict=True):
        assert answer_spans(mask) == [(len(prompt), len(text))]


def test_the_base_answers_the_first_prompt_of_a_conversation_with_several_turns(prompts, ends_at):
    base = ends_at(None)
    prompt = prompts[0]
    later = torch.tensor([[*prompt, 7, 8, 9, 10, 11, 12]])
    mask = torch.zeros_like(later, dtype=torch.bool)
    mask[0, len(prompt) : len(prompt) + 2] = mask[0, -2:] = True
    answered = with_own_answers(base, {"input_ids": later, "loss_mask": mask}, 12)
    assert answered["input_ids"][0].tolist() == alone(base, prompt, 12)


def test_own_answers_do_not_depend_on_the_other_prompts_of_the_batch(prompts, ends_at, capsys):
    base = ends_at(None)
    short, long = prompts[0][:6], (prompts[0] * 30)[: base.context_length - 3]
    answered = with_own_answers(base, batch_of([short, long]), 4)
    assert answered["input_ids"].tolist() == [alone(base, short, 4)]
    assert "leaves out 1 of 2 prompts of a batch: they leave less than 4 tokens" in capsys.readouterr().out
