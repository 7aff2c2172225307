"""The training module: its labels, its training, and its checkpoints."""

import json
import shutil
from functools import partial

import lightning as L
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from benchmarks.recipes import build
from data.benchmarks import load_questions
from data.conversations import user_message
from drafters import CTC, EAGLE, Block, Medusa
from inference.prompts import encode_messages
from tests.conftest import refusal
from tests.train.conftest import QUIET
from train.module import DrafterTraining
from train.validation import with_own_answers

TREE = {"num_anchors": 16, "num_nodes": 8, "top_k": 4}
SMALL = TREE | {"num_frames": 6, "num_labels": 4}
SMALL_CTC = partial(build, CTC, init_args=SMALL)
SMALL_BLOCK = partial(build, Block, init_args=TREE | {"num_frames": 6})
SMALL_MEDUSA = partial(build, Medusa, init_args=TREE | {"num_heads": 4})


def make(tiny, drafter=SMALL_CTC, **arguments):
    return DrafterTraining(str(tiny), drafter, max_val_tokens=32, **arguments)


def trainer(folder, **settings):
    some = {"limit_val_batches": 1, "check_val_every_n_epoch": 100, "num_sanity_val_steps": 0}
    return L.Trainer(default_root_dir=folder, **QUIET | some | settings)


@pytest.fixture(scope="module")
def own_text(tiny_base):
    """A batch of the base's own greedy answers, which a drafter can learn to predict."""
    questions = ([user_message(question.turns[0])] for question in load_questions("embedded")[:6])
    rows = torch.tensor([[*encode_messages(tiny_base, each, "tokenizer")[-24:], 7] for each in questions])
    mask = torch.zeros_like(rows, dtype=torch.bool)
    mask[:, -1] = True
    return with_own_answers(tiny_base, {"input_ids": rows, "loss_mask": mask}, 32)


@pytest.fixture
def batches(own_text):
    return DataLoader([own_text], batch_size=None)


@pytest.mark.parametrize("layers", [(-1,), (0, 1, 2)])
def test_labels_are_the_argmax_of_the_base_at_every_position(tiny, own_text, layers):
    module = make(tiny, partial(build, CTC, init_args=SMALL | {"hidden_layers": layers}))
    seen = module.training_batch(own_text)
    with torch.no_grad():
        plain = module.base.model(own_text["input_ids"], output_hidden_states=True)
    assert torch.equal(seen.labels, plain.logits.argmax(-1))
    expected = torch.cat([plain.hidden_states[layer] for layer in layers], dim=-1)
    assert torch.allclose(seen.hidden, expected, atol=1e-5)
    inside = own_text["loss_mask"][:, 1:]
    assert torch.equal(seen.labels[:, :-1][inside], own_text["input_ids"][:, 1:][inside]), "on text of its own"


def test_distributions_that_the_head_alone_does_not_give_are_not_distilled(tiny, tmp_path):
    base = shutil.copytree(tiny, tmp_path / "scaled")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"logits_scaling": 8.0}))
    distilled = partial(build, Medusa, init_args=TREE | {"num_heads": 4, "distillation": True})
    for drafter in (distilled, partial(build, EAGLE, init_args={"depth": 3})):
        assert "changes its logits (logits_scaling 8.0): train ctc or block" in refusal(make, base, drafter)
        make(tiny, drafter)
    for drafter in (SMALL_CTC, SMALL_BLOCK, SMALL_MEDUSA):  # which learn the most probable tokens
        make(base, drafter)


@pytest.mark.slow
def test_every_validation_takes_its_loss_at_the_same_anchors_and_draws_no_random_number(tiny, own_text):
    module = make(tiny, partial(build, CTC, init_args=SMALL | {"num_anchors": 2}))
    outputs = module.training_batch(own_text)
    losses = []
    with torch.random.fork_rng():
        for seed, batch_idx in ((1, 0), (2, 0), (2, 1)):
            torch.manual_seed(seed)
            losses.append(module.validation_loss(outputs, batch_idx).item())
            assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(seed))
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.slow
def test_training_lowers_the_loss_raises_the_acceptance_length_and_does_not_change_the_base(tiny, batches, tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make(tiny, learning_rate=1e-2)
        before = {name: weight.clone() for name, weight in module.base.model.named_parameters()}
        run = trainer(tmp_path, max_steps=60, enable_checkpointing=False)
        (start,) = run.validate(module, batches, verbose=False)
        run.fit(module, batches)
        (end,) = run.validate(module, batches, verbose=False)
    assert end["val/loss"] < 0.7 * start["val/loss"]
    assert start["val/acceptance_length"] + 0.5 < end["val/acceptance_length"] <= SMALL["num_frames"] + 1
    shares = [end[f"val/accepted_{depth}_or_more"] for depth in range(1, 9)]
    assert shares == sorted(shares, reverse=True) and 0 < shares[0] <= 1
    assert 1 + sum(shares) == pytest.approx(end["val/acceptance_length"], abs=1e-4), "shares by depth add up to it"
    for name, weight in module.base.model.named_parameters():
        assert torch.equal(weight, before[name]) and weight.grad is None and not weight.requires_grad
    assert {id(weight) for weight in module.parameters()} == {id(weight) for weight in module.drafter.parameters()}


def heads_of(module):
    return [head.weight for head in module.drafter.lm_heads]


@pytest.mark.slow
def test_output_layers_start_once_as_the_bases_head_and_are_restored_from_a_checkpoint(tiny, batches, tmp_path):
    calls = []

    class Counted(Medusa):
        def initialise(self, base_weights):
            calls.append(base_weights.head)
            super().initialise(base_weights)

    make_one = partial(make, tiny, partial(build, Counted, init_args=TREE | {"num_heads": 4}), learning_rate=1e-2)
    module = make_one(val_answers="text")
    head = module.base.base_weights.head
    assert all(torch.equal(weight, head) for weight in heads_of(module))
    first = trainer(tmp_path, max_steps=3)
    first.fit(module, batches)
    trained = [weight.detach().clone() for weight in heads_of(module)]
    assert not any(torch.equal(weight, head) for weight in trained)
    first.save_checkpoint(tmp_path / "three.ckpt")
    trainer(tmp_path, max_steps=0).fit(module, batches)
    assert all(map(torch.equal, heads_of(module), trained)), "a second training of the same module continues the first"
    assert calls == [head]
    for method in ("validate", "fit"):
        again = make_one(val_answers="text")
        run = getattr(trainer(tmp_path, max_steps=3), method)
        run(again, batches, ckpt_path=tmp_path / "three.ckpt", weights_only=False)
        assert all(map(torch.equal, heads_of(again), trained))


def test_a_checkpoint_holds_the_drafter_and_what_it_was_made_from_and_no_code(trained, tiny, tiny_base):
    saved = torch.load(trained.ckpt, weights_only=True)
    assert saved["state_dict"] and all(name.startswith("drafter.") for name in saved["state_dict"])
    assert trained.ckpt.stat().st_size < 1_000_000
    assert saved["base"]["name"] == str(tiny) and saved["base"]["shape"] == vars(tiny_base.shape)
    assert saved["command"] == f"lightning fit --config {trained.config}"
    assert 1 <= saved["measured"]["acceptance_length"] <= 7
    given, stored = yaml.safe_load(trained.config.read_text())["model"], saved["hyper_parameters"]
    assert stored["drafter"]["class_path"] == given["drafter"]["class_path"]
    for group, options in given["drafter"]["init_args"].items():
        assert stored["drafter"]["init_args"][group].items() >= options.items()
