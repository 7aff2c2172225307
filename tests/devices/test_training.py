"""Training steps and simulated decoding of every learned drafter on an accelerator equal those of the host."""

from dataclasses import replace

import pytest
import torch

import drafters
from benchmarks import recipes
from tests.inference.verifier import test_lossless as lossless
from train.divisor import SharedDivisor
from train.features import compute_features
from train.validation import simulate_answers, with_own_answers

NUM_STEPS = 2
SMALL = {"num_anchors": 6}
CTC = lossless.CTC | SMALL
RECIPES = {
    "ctc": (drafters.CTC, CTC),
    "ctc, the paper's loss": (drafters.CTC, CTC | {"objective": "ctc", "causal": True}),
    "ctc, bias": (
        drafters.CTC,
        CTC | {"markov_rank": 3, "num_layers": 2, "hidden_layers": [0, -1]},
    ),
    "ctc, reads tokens": (drafters.CTC, CTC | {"tokens_in_context": True}),
    "ctc, copies": (drafters.CTC, CTC | {"lookup": True, "copy": True}),
    "block": (drafters.Block, {"num_frames": 4, "top_k": 5, **SMALL}),
    "block, bias": (
        drafters.Block,
        {"num_frames": 4, "markov_rank": 2, "markov_factors": "base", **SMALL},
    ),
    "medusa": (drafters.Medusa, lossless.HEADS | SMALL),
    "hydra": (drafters.Hydra, lossless.HEADS | {"num_anchors": 0}),
    "hydra++": (drafters.Hydra, lossless.HEADS | lossless.HYDRA_PLUS_PLUS | SMALL),
    "eagle": (drafters.EAGLE, lossless.EAGLE),
    "eagle3": (drafters.EAGLE3, lossless.EAGLE | {"own_head": True}),
}
TEXTS = torch.tensor([lossless.prompt_of(17), [*lossless.prompt_of(12), *[0] * 5]])
MASK = torch.tensor([[0] * 6 + [1] * 11, [0] * 4 + [1] * 8 + [0] * 5]).bool()


def train(base, drafter_class, arguments, accelerator=None):
    """Some steps of a drafter, where they copied to the host, and the acceptance of simulated decoding after them."""
    device = base.model.device
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drafter = recipes.build(drafter_class, base.shape, arguments).to(base.model.dtype).to(device)
        drafter.initialise(base.base_weights)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.03)
        texts, mask = TEXTS.to(device), MASK.to(device)
        outputs = compute_features(base, drafter.required_outputs.hidden_layers, texts, mask)
        divisor, seen = SharedDivisor(lambda count: count, 1), []
        if accelerator:
            accelerator.take_copies()
        for _ in range(NUM_STEPS):
            batch = replace(outputs, divisor=divisor)
            loss, metrics = drafter.loss(batch, base.base_weights)
            optimizer.zero_grad()
            divisor.weighted(loss).backward()
            norm = torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            seen += [loss.detach(), norm, *metrics.values()]
    copies = accelerator.take_copies() if accelerator else ([], [])
    drafter.eval().requires_grad_(False)
    emitted = list(simulate_answers(drafter, base, outputs.hidden, texts, mask))
    return torch.stack([number.double().cpu() for number in seen]), drafter.state_dict(), emitted, copies


def copies_of_a_step(name):
    """Copies to the host in a training step, how many anchors or terms there are and how far masks reach on a CPU, and
    to the device; with a lookup the text and what is found in it, too."""
    if name == "ctc, copies":
        return 3, 1
    return {"eagle": 1, "eagle3": 7}.get(name, 2 if name.startswith(("ctc", "block")) else 1), 0


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_training_steps_equal_those_of_the_host(name, make_base, make_pretend_base, accelerator):
    expected, expected_weights, expected_emitted, _ = train(make_base(predictable=True), *RECIPES[name])
    numbers, weights, emitted, copies = train(make_pretend_base(predictable=True), *RECIPES[name], accelerator)
    torch.testing.assert_close(numbers, expected)
    for weight, expected_weight in zip(weights.values(), expected_weights.values(), strict=True):
        assert weight.device == accelerator.device
        torch.testing.assert_close(weight.cpu(), expected_weight)
    assert emitted == expected_emitted
    assert [len(each) / NUM_STEPS for each in copies] == [*copies_of_a_step(name)], copies


def test_the_bases_own_answers_are_those_of_the_host(make_base, make_pretend_base, accelerator):
    expected = with_own_answers(make_base(), {"input_ids": TEXTS, "loss_mask": MASK}, 6)
    device = accelerator.device
    batch = {"input_ids": TEXTS.to(device), "loss_mask": MASK.to(device)}
    for name, value in with_own_answers(make_pretend_base(), batch, 6).items():
        assert torch.equal(value, expected[name])
