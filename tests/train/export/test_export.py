import json

import pytest
import torch
import yaml

from drafters import CTC, checkpoint, recipe
from inference.verifier.base import load_base, tokenizer_hash
from train.checkpointing.checkpoint_reader import read_checkpoint
from train.cli import commands, lightning_command
from train.export.export import drafter_of


def test_an_exported_folder_holds_the_configuration_the_weights_and_a_model_card(trained, tiny, tiny_base):
    names = ["README.md", "SHA256SUMS", "config.json", "model.safetensors"]
    assert sorted(path.name for path in trained.folder.iterdir()) == names
    saved = torch.load(trained.ckpt, weights_only=True)
    config = json.loads((trained.folder / "config.json").read_text())
    assert config["class_path"] == "drafters.CTC"
    assert config["init_args"] == saved["hyper_parameters"]["drafter"]["init_args"]
    assert config["base_name"] == str(tiny)
    assert config["tokenizer_hash"] == tokenizer_hash(tiny_base.tokenizer)
    training = config["training"]
    assert training["steps"] == 8 and training["data"] == ["embedded:24"] and training["val_answers"] == "greedy"
    assert training["val_acceptance_length"] == pytest.approx(saved["measured"]["acceptance_length"], abs=1e-4)
    card = (trained.folder / "README.md").read_text()
    for said in (
        f"Base: `{tiny}`",
        "embedded:24, 8 steps",
        f"{saved['measured']['acceptance_length']:.2f} tokens per base forward",
        f"`lightning fit --config {trained.config}`",
        "| trunk.num_frames | 6 |",
    ):
        assert said in card


def test_an_exported_drafter_drafts_the_trees_of_the_training_module(trained, tiny_base):
    saved = torch.load(trained.ckpt, weights_only=True)
    module = recipe.build(CTC, tiny_base.shape, saved["hyper_parameters"]["drafter"]["init_args"])
    module.load_state_dict({name.removeprefix("drafter."): weight for name, weight in saved["state_dict"].items()})
    exported, config = checkpoint.load(trained.folder)
    assert config.base == tiny_base.shape
    text = torch.randint(3, 400, (40,), generator=torch.Generator().manual_seed(0))
    hidden, anchors = tiny_base.hidden_states(text[None], (-1,))[0][0], torch.arange(1, 39)
    with torch.no_grad():
        ours = module.eval().draft_at(hidden, text, anchors, tiny_base.base_weights)
        theirs = exported.draft_at(hidden, text, anchors, tiny_base.base_weights)
    assert any(len(tree) for tree in ours)
    for one, other in zip(ours, theirs, strict=True):
        assert list(one.tokens) == list(other.tokens) and list(one.parents) == list(other.parents)


def test_export_replaces_a_drafter_only_with_overwrite(call, trained, tmp_path):
    assert call(commands.main, "export", trained.ckpt, tmp_path / "a").code == 0
    weights = (tmp_path / "a" / "model.safetensors").read_bytes()
    (tmp_path / "a" / "model.safetensors").write_bytes(b"mine")
    refused = call(commands.main, "export", trained.ckpt, tmp_path / "a")
    assert "already holds a model" in refused.one_line_error("drafters")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == b"mine"
    assert call(commands.main, "export", trained.ckpt, tmp_path / "a", "--overwrite", "true").code == 0
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == weights


def test_export_refuses_a_folder_with_other_files(call, trained, tmp_path):
    (tmp_path / "results.json").write_text("{}")
    for options in ([], ["--overwrite"]):
        refused = call(commands.main, "export", trained.ckpt, tmp_path, *options)
        assert "holds other files, and no drafter or base" in refused.one_line_error("drafters")
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_bare_overwrite_option_is_true(call, trained, tmp_path):
    assert call(commands.main, "export", trained.ckpt, tmp_path / "a").code == 0
    assert call(commands.main, "export", trained.ckpt, tmp_path / "a", "--overwrite").code == 0


def test_the_model_card_names_the_given_base(call, trained, tmp_path):
    assert call(commands.main, "export", trained.ckpt, tmp_path / "a", "--base", "someone/base-7b").code == 0
    assert "base_model: someone/base-7b" in (tmp_path / "a" / "README.md").read_text()
    assert checkpoint.read_config(tmp_path / "a").base_name == "someone/base-7b"


def test_export_needs_only_the_checkpoint(call, trained, tmp_path):
    moved = tmp_path / "alone.ckpt"
    moved.write_bytes(trained.ckpt.read_bytes())
    assert call(commands.main, "export", moved, tmp_path / "a").code == 0
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (trained.folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_an_exported_base_is_a_transformers_model_with_the_trained_weights(call, tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 64, "context_length": 256}
    values = {
        "model": {
            "class_path": "train.BaseTraining",
            "init_args": {"tokenizer": str(tiny)} | sizes,
        },
        "data": {"files": ["embedded:16"], "val_size": 4, "max_length": 96, "batch_size": 4},
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 4,
            "default_root_dir": str(tmp_path),
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {"dirpath": str(tmp_path), "filename": "base", "every_n_train_steps": 4},
                }
            ],
        },
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    fitted = call(lightning_command.main, "fit", "--config", tmp_path / "base.yaml")
    assert fitted.code == 0, fitted.err
    exported = call(commands.main, "export", tmp_path / "base.ckpt", tmp_path / "base")
    assert exported.code == 0, exported.err

    trained = torch.load(tmp_path / "base.ckpt", weights_only=True)["state_dict"]
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    assert reloaded.dtype == torch.bfloat16
    weights = reloaded.state_dict()
    assert weights.keys() == {name.removeprefix("model.") for name in trained}
    for name, weight in trained.items():
        assert torch.equal(weights[name.removeprefix("model.")], weight.bfloat16())
    base = load_base(str(tmp_path / "base"))
    assert base.context_length == 256 and base.eos == {base.tokenizer.eos_token_id}
    assert tokenizer_hash(base.tokenizer) == tokenizer_hash(load_base(str(tiny)).tokenizer)


def test_a_checkpoint_whose_recipe_has_flat_keys_gives_the_same_drafter(trained):
    saved = read_checkpoint(trained.ckpt)
    expected, config = drafter_of(saved, saved["hyper_parameters"])
    node = saved["hyper_parameters"]["drafter"]
    flat = {key.rpartition(".")[2]: value for key, value in recipe.flattened(node["init_args"]).items()}
    arguments = saved["hyper_parameters"] | {"drafter": node | {"init_args": flat}}
    drafter, read = drafter_of(saved, arguments)
    assert read == config
    assert drafter.draft_options == expected.draft_options
    weights = expected.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in drafter.state_dict().items())
