"""A training that starts from the weights of an exported or imported drafter."""

from dataclasses import replace

import pytest
import torch
import yaml

from drafters import checkpoint
from drafters.checkpoint import DrafterConfig
from inference.verifier.base import tokenizer_hash
from train.cli import commands, lightning_command

EAGLE3 = {
    "class_path": "drafters.EAGLE3",
    "init_args": {"hidden_layers": [0, 1, -1], "own_head": True, "draft_vocab_size": 50, "loss": {"num_unroll": 2}},
}


@pytest.fixture
def fit(write_recipe, tmp_path, call):
    """Runs `lightning fit`, or another subcommand, from a drafter's folder."""

    def run(folder, *options, drafter=None, subcommand="fit", runs=tmp_path, **model):
        runs.mkdir(exist_ok=True)
        config = write_recipe(runs, max_steps=1, val_check_interval=1)
        values = yaml.safe_load(config.read_text())
        values["model"] |= {
            "initial_drafter": folder and str(folder),
            "drafter": drafter or values["model"]["drafter"],
        } | model
        values["trainer"]["callbacks"][0]["init_args"]["every_n_train_steps"] = 1
        config.write_text(yaml.safe_dump(values))
        return call(lightning_command.main, subcommand, "--config", config, *options)

    return run


@pytest.fixture
def export(tmp_path, call):
    """Exports the last checkpoint; returns the folder's drafter and configuration."""

    def run():
        done = call(commands.main, "export", tmp_path / "checkpoints" / "last.ckpt", tmp_path / "out")
        assert done.code == 0, done.err
        return checkpoint.load(tmp_path / "out")

    return run


@pytest.fixture(scope="module")
def imported(tiny_base, tmp_path_factory):
    """An EAGLE-3 drafter as `drafters import` writes it: random weights, and sizes of its layer that are its own."""
    folder, shape = (
        tmp_path_factory.mktemp("imported"),
        replace(tiny_base.shape, intermediate_size=24, rope_theta=300.0),
    )
    vocabulary = tokenizer_hash(tiny_base.tokenizer)
    init_args = {"hidden_layers": [0, 1, -1], "own_head": True, "draft_vocab_size": 50}
    config = DrafterConfig(EAGLE3["class_path"], init_args, shape, tiny_base.name, vocabulary)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        drafter = config.build()
        drafter.draft_tokens.copy_(torch.randperm(shape.vocab_size)[:50].sort().values)
    checkpoint.save(folder, drafter, config)
    return folder


def assert_same_weights(drafter, folder):
    before = checkpoint.load(folder)[0].state_dict()
    torch.testing.assert_close(drafter.state_dict(), before, rtol=0, atol=0)


@pytest.mark.slow
def test_without_a_learning_rate_the_weights_are_still_those_of_the_folder(fit, export, trained, tmp_path):
    done = fit(trained.folder, learning_rate=0.0)
    assert done.code == 0, done.err
    drafter, config = export()
    assert_same_weights(drafter, trained.folder)
    assert config.training["initial_drafter"] == str(trained.folder)
    assert f"Trained on from `{trained.folder}`" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_an_imported_drafter_keeps_its_draft_vocabulary_and_the_sizes_of_its_layer(fit, export, imported):
    done = fit(imported, drafter=EAGLE3, learning_rate=0.0)
    assert done.code == 0, done.err
    drafter, config = export()
    assert_same_weights(drafter, imported)
    assert config.base == checkpoint.read_config(imported).base


@pytest.mark.slow
def test_training_goes_on_from_the_folder_and_resumes_from_its_own_checkpoint(fit, imported, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert fit(imported, "--trainer.max_steps", "2", drafter=EAGLE3, runs=whole).code == 0
    assert fit(imported, drafter=EAGLE3, runs=parts).code == 0
    done = fit(imported, "--trainer.max_steps", "2", "--ckpt_path", "last", drafter=EAGLE3, runs=parts)
    assert done.code == 0, done.err
    ends = [torch.load(runs / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for runs in (whole, parts)]
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)
    first = checkpoint.load(imported)[0].state_dict()
    change = max((ends[0][f"drafter.{name}"] - weight).abs().max().item() for name, weight in first.items())
    assert 0 < change < 0.05  # two steps of AdamW move a weight by little more than twice the learning rate


@pytest.mark.slow
def test_validation_measures_the_folder_as_it_measures_its_checkpoint(fit, trained):
    of_folder, of_checkpoint = (
        fit(trained.folder, subcommand="validate"),
        fit(None, "--ckpt_path", trained.ckpt, subcommand="validate"),
    )
    assert "val/acceptance_length" in of_folder.out
    assert of_folder.out == of_checkpoint.out


@pytest.mark.slow
@pytest.mark.parametrize("subcommand", ["fit", "validate"])
def test_a_checkpoint_of_other_rotations_is_refused_without_the_initial_drafter_that_had_them(
    fit, trained, tmp_path, subcommand
):
    path, saved = tmp_path / "scaled.ckpt", torch.load(trained.ckpt, weights_only=True)
    saved["base"]["shape"]["rope_factor"] = 8.0
    del saved["base"]["shape"]["rope_original_length"]  # as in a checkpoint that is older than the field
    torch.save(saved, path)
    error = fit(None, "--ckpt_path", path, subcommand=subcommand).one_line_error("lightning")
    assert "built with rope_factor 8.0, and this one with 1.0: give model.base and model.initial_drafter" in error


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"class_path": "drafters.Medusa"}, "is CTC, and model.drafter is Medusa"),
        (
            {"class_path": "drafters.CTC", "init_args": {"num_frames": 6, "num_labels": 4, "causal": True}},
            "has other options than model.drafter; give it causal: False",
        ),
        (
            {"class_path": "drafters.CTC", "init_args": {"num_frames": 6, "num_labels": 4, "hidden_layers": [1, -1]}},
            "has other options than model.drafter; give it hidden_layers: [-1]",
        ),
        (
            {"class_path": "drafters.CTC", "init_args": {"num_frames": 5, "num_labels": 4, "markov_rank": 4}},
            "has other options than model.drafter; give it num_frames: 6, markov_rank: 0",
        ),
    ],
)
def test_a_drafter_that_computes_something_else_is_refused_in_one_line(fit, trained, drafter, message):
    error = fit(trained.folder, drafter=drafter).one_line_error("lightning")
    assert f"the drafter in {trained.folder} {message}" in error


def test_no_folder_and_a_drafter_for_another_base_are_refused_in_one_line(fit, trained, make_tiny, tmp_path):
    assert "no drafter at" in fit(tmp_path / "none").one_line_error("lightning")
    other = make_tiny("larger", hidden_size=48)
    error = fit(trained.folder, base=str(other)).one_line_error("lightning")
    assert "with hidden_size 32, but" in error


def test_loss_and_draft_tree_may_be_others(fit, trained):
    node = {
        "class_path": "drafters.CTC",
        "init_args": {"num_frames": 6, "num_labels": 3, "objective": "ctc", "num_nodes": 3},
    }
    assert fit(trained.folder, drafter=node, subcommand="validate").code == 0
