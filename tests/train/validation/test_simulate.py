from itertools import accumulate

import pytest
import torch

from data import embedded
from drafters import CTC, EAGLE, EAGLE3, Block, DraftTree, NoDrafter, TrainingBatch, recipe
from inference.prompts import encode_messages
from inference.verifier.base import load_base
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from train.validation.base_answers import with_own_answers
from train.validation.simulate import answer_spans, simulate

FRAMES, NUM_TOKENS = 6, 32


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
    return [encode_messages(base, [("user", row["turns"][0])], "tokenizer") for row in embedded.questions(5)]


@pytest.fixture(scope="module")
def texts(base, prompts):
    """The base's own text after the prompts, the mask of the tokens it wrote, and its next token at every position."""
    session = Session(Runner(base), NoDrafter())
    starts = [prompt[-24:] for prompt in prompts]
    texts = torch.tensor([start + session.run(start, 40).tokens for start in starts])
    answers = torch.zeros_like(texts, dtype=torch.bool)
    answers[:, 24:] = True
    with torch.no_grad():
        labels = base.model(texts).logits.argmax(-1)
    return texts, answers, labels


@pytest.fixture(scope="module")
def drafters(base, texts):
    """CTC drafters on one and on three layers and a block drafter, untrained and trained on the base's own text."""
    texts, answers, labels = texts
    made = {}
    for name, layers in {1: (-1,), 3: (0, 1, -1), "block": (-1,)}.items():
        kind, arguments = (Block, {}) if name == "block" else (CTC, {"num_labels": 4})
        with torch.random.fork_rng():
            torch.manual_seed(len(layers))
            for steps in (0, 50):
                arguments |= {"hidden_layers": layers, "num_anchors": 24, "num_nodes": 8, "top_k": 4}
                drafter = recipe.build(kind, base.shape, {"num_frames": FRAMES, **arguments}).double()
                with torch.no_grad():
                    hidden, last = base.hidden_states(texts, layers)
                optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
                for _ in range(steps):
                    loss, _ = drafter.loss(TrainingBatch(hidden, last, texts, labels, answers), base.base_weights)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                drafter.eval().attach_base_weights(base.base_weights)
                made[name, steps] = drafter
    return made


@pytest.fixture(scope="module")
def eagles(base, texts):
    """EAGLE and EAGLE-3, untrained and after some steps on the base's own text, with the losses of these steps."""
    texts, answers, labels = texts
    made = {}
    for kind in (EAGLE, EAGLE3):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for steps in (0, 80):
                arguments = {"num_unroll": 4} if kind is EAGLE3 else {"noise": 0.0, "token_weight": 1.0}
                options = {"depth": 4, "width": 3, "top_k": 3, "num_nodes": 8, **arguments}
                drafter = recipe.build(kind, base.shape, options).double()
                with torch.no_grad():
                    hidden, last = base.hidden_states(texts, drafter.required_outputs.hidden_layers)
                optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
                losses = []
                for _ in range(steps):
                    loss, _ = drafter.loss(TrainingBatch(hidden, last, texts, labels, answers), base.base_weights)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                drafter.eval().attach_base_weights(base.base_weights)
                made[kind, steps] = drafter, losses
    return made


def live_and_simulated(base, drafter, prompt, max_new_tokens, eos=frozenset()):
    """Tokens that each step emits after the prefill, counted by the session and simulated on its text."""
    decoded = Session(Runner(base), drafter).run(prompt, max_new_tokens, eos)
    text = torch.tensor([*prompt, *decoded.tokens])
    with torch.no_grad():
        hidden = base.hidden_states(text[None], drafter.required_outputs.hidden_layers)[0][0]
    live = [step.emitted for step in decoded.steps[1:]]
    return live, simulate(drafter, hidden, text, (len(prompt), len(text)), base.base_weights, eos)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 50], ids=["random", "trained"])
@pytest.mark.parametrize("name", [1, 3, "block"])
def test_simulated_acceptance_equals_live_acceptance_step_for_step(base, drafters, prompts, name, steps):
    seen = []
    for prompt in prompts:
        live, simulated = live_and_simulated(base, drafters[name, steps], prompt, NUM_TOKENS)
        # Nearer the cap the session's trees are less deep.
        far = sum(done + FRAMES < NUM_TOKENS for done in accumulate(live))
        assert simulated[:far] == live[:far]
        seen += live
    if steps:
        assert sum(seen) / len(seen) > 1.5, "the comparison says little where hardly anything is accepted"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
def test_simulated_acceptance_of_eagle_equals_live_acceptance_and_rises_with_training(base, eagles, prompts, kind):
    lengths = {}
    for steps in (0, 80):
        seen = []
        for tree in ("dynamic", "chain"):
            drafter, _ = eagles[kind, steps]
            drafter.width, drafter.top_k = (1, 1) if tree == "chain" else (3, 3)
            for prompt in prompts:
                live, simulated = live_and_simulated(base, drafter, prompt, NUM_TOKENS)
                assert simulated == live
                seen += live
        lengths[steps] = sum(seen) / len(seen)
    assert lengths[80] > lengths[0] + 0.5 and lengths[80] > 1.5
    losses = eagles[kind, 80][1]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7, 16])
def test_the_simulation_stops_where_the_session_reaches_its_limit(base, drafters, prompts, max_new_tokens):
    for prompt in prompts:
        live, simulated = live_and_simulated(base, drafters[1, 50], prompt, max_new_tokens)
        assert simulated == live
        assert sum(simulated) == max_new_tokens - 1


@pytest.mark.slow
def test_simulated_acceptance_equals_live_acceptance_on_answers_that_end_with_eos(drafters, prompts, ends_at):
    base = ends_at(None)
    written = [Session(Runner(base), NoDrafter()).run(prompt, 30).tokens for prompt in prompts]
    ended = 0
    for token in {tokens[12] for tokens in written}:
        for prompt in prompts:
            live, simulated = live_and_simulated(base, drafters[1, 50], prompt, 48, frozenset([token]))
            assert simulated == live
            ended += sum(live) < 47
    assert ended


def test_the_tree_drafted_at_an_anchor_is_the_one_that_the_session_proposes(base, drafters, prompts):
    drafter, proposed = drafters[3, 50], []
    honest = drafter.propose
    drafter.propose = lambda seq, limits: proposed.append((len(seq) - 1, tree := honest(seq, limits))) or tree
    try:
        decoded = Session(Runner(base), drafter).run(prompts[0], 40)
    finally:
        del drafter.propose
    text = torch.tensor([*prompts[0], *decoded.tokens])
    with torch.no_grad():
        hidden = base.hidden_states(text[None], drafter.required_outputs.hidden_layers)[0][0]
    inside = [(anchor, tree) for anchor, tree in proposed[1:] if len(text) - 1 - anchor > FRAMES]
    assert len(inside) > 5
    simulated = drafter.draft_at(hidden, text, torch.tensor([anchor for anchor, _ in inside]), base.base_weights)
    for (_, live), other in zip(inside, simulated, strict=True):
        assert list(live.tokens) == list(other.tokens) and list(live.parents) == list(other.parents)


def test_a_verifier_accepts_the_longest_drafted_prefix_of_the_text():
    tree = DraftTree.from_paths([[5, 6, 7], [5, 8], [9]])
    assert len(tree.follow([5, 8, 7])) == 2
    assert len(tree.follow([5, 6, 7, 1])) == 3
    assert tree.follow([6]) == tree.follow([]) == DraftTree().follow([5]) == []


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


def test_an_answer_of_one_token_has_no_step_after_its_prefill(base, drafters):
    text = torch.tensor([3, 4, 5, 6])
    hidden = torch.zeros(4, base.shape.hidden_size, dtype=torch.float64)
    assert simulate(drafters[1, 0], hidden, text, (3, 4), base.base_weights) == []


def batch_of(prompts):
    """Prompts of several lengths, right-padded, each with an answer of two tokens that is not the base's."""
    rows = [torch.tensor([*prompt, 7, 8]) for prompt in prompts]
    masks = [torch.arange(len(row)) >= len(row) - 2 for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return {"input_ids": pad(rows, batch_first=True), "loss_mask": pad(masks, batch_first=True)}


def alone(base, prompt, max_new_tokens):
    ids = torch.tensor([prompt])
    return base.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
    )[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("cut", [None, 10], ids=["to-the-cap", "to-an-end-token"])
def test_own_answers_equal_those_to_each_prompt_without_a_batch(prompts, ends_at, cut):
    base = ends_at(None)
    prompts = [prompts[0][:20], prompts[1], prompts[2][:40], prompts[3]]
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


def test_own_answers_end_at_the_end_of_the_context(prompts, ends_at):
    base = ends_at(None)
    prompt = (prompts[0] * 8)[: base.context_length - 5]
    answered = with_own_answers(base, batch_of([prompt]), 24)
    assert answered["lengths"].tolist() == [base.context_length]


def test_own_answers_do_not_depend_on_the_other_prompts_of_the_batch(prompts, ends_at, capsys):
    base = ends_at(None)
    short, long = prompts[0][:6], (prompts[0] * 8)[: base.context_length - 3]
    answered = with_own_answers(base, batch_of([short, long]), 4)
    assert answered["input_ids"].tolist() == [alone(base, short, 4)]
    assert "leaves out 1 of 2 prompts of a batch: they leave less than 4 tokens" in capsys.readouterr().out
