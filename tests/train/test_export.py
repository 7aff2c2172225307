"""Exported folders: equal to their checkpoint, never half replaced, and on the hub."""

import hashlib
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from drafters import checkpoint
from inference import drafter_specs
from inference.verifier.base import tokenizer_hash
from inference.verifier.runner import Runner
from train.cli import run_drafters


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


def test_a_drafter_is_replaced_only_with_overwrite_and_as_a_whole(call, trained, tmp_path):
    folder = shutil.copytree(trained.folder, tmp_path / "drafter")
    (folder / "model.safetensors").write_bytes(b"mine")
    assert "already holds a model" in call(run_drafters, "export", trained.ckpt, folder).one_line_error("drafters")
    assert (folder / "model.safetensors").read_bytes() == b"mine"
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(trained.ckpt)
    (folder / "notes.txt").write_text("of the user")
    moved = shutil.copy(trained.ckpt, tmp_path / "alone.ckpt")  # the checkpoint is all that it needs
    assert call(run_drafters, "export", moved, folder, "--overwrite").code == 0
    names = {"README.md", "SHA256SUMS", "config.json", "model.safetensors", "notes.txt"}
    assert {path.name for path in folder.iterdir()} == names and not (folder / "README.md").is_symlink()
    assert (folder / "model.safetensors").read_bytes() == (trained.folder / "model.safetensors").read_bytes()
    (folder / "config.json").unlink()
    refused = call(run_drafters, "export", trained.ckpt, folder, "--overwrite")
    assert "holds other files, and no drafter or base" in refused.one_line_error("drafters")


@pytest.mark.parametrize("part", ["model.safetensors", "config.json"])
def test_what_was_written_is_compared_with_the_checkpoint(part, call, trained, tmp_path, monkeypatch):
    save = checkpoint.save

    def damaging(folder, drafter, config):
        save(folder, drafter, config)
        if part == "config.json":
            text = (folder / part).read_text()
            (folder / part).write_text(text.replace('"steps": 8', '"steps": 9'))
        else:
            weights = load_file(folder / part)
            weights["blank_row"].view(torch.int32).bitwise_xor_(1)
            save_file(weights, folder / part)

    monkeypatch.setattr(checkpoint, "save", damaging)
    error = call(run_drafters, "export", trained.ckpt, tmp_path / "out").one_line_error("drafters")
    assert "was not written as it is in the checkpoint" in error and not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_not_exported(call, trained, tmp_path):
    saved = torch.load(trained.ckpt, weights_only=True)
    saved["state_dict"]["drafter.blank_row"][0] = torch.nan
    torch.save(saved, tmp_path / "nan.ckpt")
    error = call(run_drafters, "export", tmp_path / "nan.ckpt", tmp_path / "out").one_line_error("drafters")
    assert "blank_row of the checkpoint holds numbers that are not finite" in error


def test_a_folder_is_exported_again_with_another_base_and_evaluations(call, trained, tmp_path):
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "results.md").write_text("| drafter | tokens |\n|---|---|\n| ctc | 3.14 |\n")
    words = "--base", "someone/base-7b", "--results", tmp_path / "eval", "--license", "mit"
    assert call(run_drafters, "export", trained.folder, tmp_path / "a", *words).code == 0
    card = (tmp_path / "a" / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "someone/base-7b"
    assert "## Measured" in card and "| ctc | 3.14 |" in card and "license: mit" in card
    assert checkpoint.read_config(tmp_path / "a").base_name == "someone/base-7b"
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (trained.folder / "model.safetensors").read_bytes()


# ---- the hub


class Hub:
    """Stands for the hub's API. Its commits lie in the client's cache, as after a download."""

    def __init__(self, cache):
        self.cache, self.private, self.refusal = cache, {}, None

    def create_repo(self, repository, private, exist_ok):
        if self.refusal:
            raise self.refusal
        assert exist_ok
        self.private.setdefault(repository, private)
        return f"https://hub/{repository}"

    def upload_folder(self, repo_id, folder_path, commit_message, allow_patterns):
        oid = hashlib.sha1((folder_path / "README.md").read_bytes()).hexdigest()
        place = self.cache / f"models--{repo_id.replace('/', '--')}" / "snapshots" / oid
        shutil.copytree(folder_path, place, ignore=lambda _, names: set(names) - set(allow_patterns))
        return SimpleNamespace(oid=oid)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    hub = Hub(tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub.cache))
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_the_test")
    return hub


def test_a_pushed_drafter_is_private_and_loads_at_its_commit_whatever_comes_later(
    hub, trained, tiny_base, capsys, tmp_path
):
    def push(out, *more):
        run_drafters(["export", str(trained.ckpt), str(out), "--push", "ada/drafter", *more])
        return re.search(r"--drafter (ctc=ada/drafter@[0-9a-f]{40})\n", capsys.readouterr().out)[1]

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    (tmp_path / "a" / "secret.env").write_text("HF_TOKEN=x")  # which must stay here
    spec = push(tmp_path / "a", "--license", "apache-2.0")
    assert hub.private == {"ada/drafter": True}
    assert push(tmp_path / "b", "--public") != spec and hub.private == {"ada/drafter": True}, "as it was made"
    found = drafter_specs.drafter_folder(drafter_specs.split(spec)[1])
    assert {path.name for path in found.iterdir()} == set(checkpoint.FILES)
    card = (found / "README.md").read_text()
    assert "license: apache-2.0\nlibrary_name:" in card and "base_model" not in card, "the base is a folder"
    assert "--drafter ctc=ada/drafter@REVISION" in card
    runner = Runner(tiny_base)
    loaded, expected = drafter_specs.make(spec, runner), drafter_specs.make(f"ctc={trained.folder}", runner)
    torch.testing.assert_close(loaded.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_a_refused_token_and_no_token_take_one_line(hub, trained, monkeypatch, call, tmp_path):
    line = "export", trained.ckpt, tmp_path / "out", "--overwrite", "--push", "ada/drafter"
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN")
    assert "nobody is logged in to the hub" in call(run_drafters, *line).one_line_error("drafters")
    assert not hub.private and not (tmp_path / "out").exists()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong_token")
    hub.refusal = OSError("401 for hf_wrong_token")  # as the client's errors, which have the hub's words
    hub.refusal.server_message = "Invalid token"
    refused = call(run_drafters, *line)
    assert "cannot upload to ada/drafter: Invalid token" in refused.one_line_error("drafters")
    assert "hf_wrong_token" not in refused.err


def test_a_drafter_that_the_hub_does_not_have_or_that_cannot_be_reached_is_refused(tiny_base):
    for spec in ("ada/none@main", f"ada/none@{'0' * 40}"):
        with pytest.raises(ValueError, match=rf"cannot download {spec} .*check the name and the revision"):
            drafter_specs.make(f"ctc={spec}", Runner(tiny_base))
