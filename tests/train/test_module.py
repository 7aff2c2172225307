from functools import partial

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from data import embedded
from drafters import CTC, Block
from drafters.losses.anchors import following
from drafters.recipe import build, groups, nested
from inference.prompts import encode_messages
from train.module import DrafterTraining
from train.validation.base_answers import with_own_answers

SMALL = {"num_frames": 6, "num_labels": 4, "num_anchors": 16, "num_nodes": 8, "top_k": 4}
SMALL_CTC = partial(build, CTC, init_args=SMALL)
SMALL_BLOCK = partial(
    build, Block, init_args={name: value for name, value in SMALL.items() if name != "num_labels"}
)  # one frame per label


def make(tiny, drafter=SMALL_CTC, **arguments):
    return DrafterTraining(str(tiny), drafter, max_val_tokens=32, **arguments)


@pytest.fixture(scope="module")
def own_text(tiny_base):
    """A batch of the base's own greedy answers, which a drafter can learn to predict."""
    prompts = [
        encode_messages(tiny_base, [("user", row["turns"][0])], "tokenizer")[-24:] for row in embedded.questions(6)
    ]
    rows = torch.tensor([[*prompt, 7] for prompt in prompts])
    mask = torch.zeros_like(rows, dtype=torch.bool)
    mask[:, -1] = True
    return with_own_answers(tiny_base, {"input_ids": rows, "loss_mask": mask}, 32)


@pytest.mark.slow
def test_every_validation_takes_its_loss_at_the_same_anchors_and_draws_no_random_number(tiny, own_text):
    module = make(tiny, partial(build, CTC, init_args=SMALL | {"num_anchors": 2}))
    outputs = module.compute_batch(own_text["input_ids"], own_text["loss_mask"])
    losses = []
    with torch.random.fork_rng():
        for seed, batch_idx in ((1, 0), (2, 0), (2, 1)):
            torch.manual_seed(seed)
            losses.append(module.validation_loss(outputs, batch_idx).item())
            drawn = torch.rand(())
            assert drawn == torch.rand((), generator=torch.Generator().manual_seed(seed))
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [SMALL_CTC, SMALL_BLOCK], ids=["ctc", "block"])
def test_training_lowers_the_loss_raises_the_acceptance_length_and_does_not_change_the_base(
    tiny, own_text, tmp_path, drafter
):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make(tiny, drafter, learning_rate=1e-2)
        before = {name: weight.clone() for name, weight in module.base.model.named_parameters()}
        batches = DataLoader([own_text], batch_size=None)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=60,
            limit_val_batches=1,
            check_val_every_n_epoch=100,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        (start,) = trainer.validate(module, batches, verbose=False)
        trainer.fit(module, batches)
        (end,) = trainer.validate(module, batches, verbose=False)
    assert end["val/loss"] < 0.7 * start["val/loss"]
    assert end["val/acceptance_length"] > start["val/acceptance_length"] + 0.5
    assert end["val/acceptance_length"] <= SMALL["num_frames"] + 1
    shares = [end[f"val/accepted_{depth}_or_more"] for depth in range(1, 9)]
    assert shares == sorted(shares, reverse=True) and 0 < shares[0] <= 1
    assert 1 + sum(shares) == pytest.approx(end["val/acceptance_length"], abs=1e-4), "shares by depth add up to it"
    for name, weight in module.base.model.named_parameters():
        assert torch.equal(weight, before[name]) and weight.grad is None and not weight.requires_grad


def test_the_base_is_neither_a_parameter_nor_in_the_state_of_the_module(tiny):
    module = make(tiny)
    assert all(name.startswith("drafter.") for name in module.state_dict())
    assert {id(weight) for weight in module.parameters()} == {id(weight) for weight in module.drafter.parameters()}


def test_a_checkpoint_holds_only_the_drafter_and_is_read_without_running_code(trained):
    saved = torch.load(trained.ckpt, weights_only=True)
    assert saved["state_dict"]
    assert all(name.startswith("drafter.") for name in saved["state_dict"])
    assert trained.ckpt.stat().st_size < 1_000_000


def test_the_hyper_parameters_of_a_checkpoint_are_those_of_the_config(trained, tiny):
    import yaml

    node = yaml.safe_load(trained.config.read_text())["model"]["drafter"]
    recipe = torch.load(trained.ckpt, weights_only=True)["hyper_parameters"]["drafter"]
    assert recipe["class_path"] == node["class_path"]
    given = nested(node["init_args"], groups(CTC))
    assert given.keys() <= recipe["init_args"].keys()
    assert all(recipe["init_args"][group].items() >= options.items() for group, options in given.items())
    rebuilt = build(CTC, make(tiny).base.shape, recipe["init_args"])
    assert rebuilt.num_frames == node["init_args"]["num_frames"]


def test_a_checkpoint_records_its_base_its_command_and_its_acceptance_length(trained, tiny, tiny_base):
    saved = torch.load(trained.ckpt, weights_only=True)
    assert saved["base"]["name"] == str(tiny)
    assert saved["base"]["shape"] == vars(tiny_base.shape)
    assert saved["command"] == f"lightning fit --config {trained.config}"
    assert 1 <= saved["measured"]["acceptance_length"] <= 7


@pytest.mark.parametrize("layers", [(-1,), (0, 1, 2)])
def test_labels_are_the_argmax_of_the_base_at_every_position(tiny, own_text, layers):
    module = DrafterTraining(str(tiny), partial(build, CTC, init_args=SMALL | {"hidden_layers": layers}))
    seen = module.compute_batch(own_text["input_ids"], own_text["loss_mask"])
    hidden, labels = seen.hidden, seen.labels
    with torch.no_grad():
        plain = module.base.model(own_text["input_ids"], output_hidden_states=True)
    assert torch.equal(labels, plain.logits.argmax(-1))
    expected = torch.cat([plain.hidden_states[layer] for layer in layers], dim=-1)
    assert torch.allclose(hidden, expected, atol=1e-5)


def test_the_first_label_of_an_anchor_is_what_the_base_predicts_after_the_anchor(tiny, own_text):
    module = make(tiny)
    ids = torch.randint(3, 400, (2, 20), generator=torch.Generator().manual_seed(0))
    labels = module.compute_batch(ids, torch.ones_like(ids, dtype=torch.bool)).labels
    mask = torch.ones_like(ids, dtype=torch.bool)
    anchors = torch.tensor([[4, 9, 15], [1, 10, 17]])
    targets, valid = following(labels, mask, anchors, num_labels=3)
    for row in range(2):
        for column, anchor in enumerate(anchors[row].tolist()):
            for offset in range(3):
                if anchor + offset + 1 >= ids.shape[1]:
                    assert not valid[row, column, offset]
                    continue
                seen = ids[row : row + 1, : anchor + offset + 1]
                with torch.no_grad():
                    predicted = module.base.model(seen).logits[0, -1].argmax().item()
                assert targets[row, column, offset].item() == predicted


def test_labels_of_the_bases_own_greedy_text_are_the_text_itself(tiny, own_text):
    labels = make(tiny).compute_batch(own_text["input_ids"], own_text["loss_mask"]).labels
    inside = own_text["loss_mask"][:, 1:]
    assert torch.equal(labels[:, :-1][inside], own_text["input_ids"][:, 1:][inside])
