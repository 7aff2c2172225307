"""The folder of a trained drafter: it loads as it was saved, and damage is reported in one line."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch

from drafters import CTC, checkpoint
from drafters.checkpoint import DrafterConfig


@pytest.fixture
def config(shape):
    arguments = {
        "trunk": {"num_frames": 6, "hidden_layers": [1, -1]},
        "loss": {"num_labels": 4, "objective": "prefix"},
    }
    return DrafterConfig("drafters.CTC", arguments, shape, "toy", "0123456789abcdef", {"steps": 3})


@pytest.fixture
def folder(config, tmp_path):
    torch.manual_seed(0)
    drafter = config.build()
    torch.nn.init.normal_(drafter.blank_row)
    checkpoint.save(tmp_path / "a" / "drafter", drafter, config)
    return tmp_path / "a" / "drafter"


def refusal(folder):
    with pytest.raises(ValueError) as caught:
        checkpoint.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit(folder, **changes):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_drafter_loads_bit_for_bit(config, tmp_path, dtype):
    torch.manual_seed(1)
    saved = config.build().to(dtype)
    torch.nn.init.normal_(saved.blank_row)
    checkpoint.save(tmp_path, saved, config)
    loaded, read = checkpoint.load(str(tmp_path), dtype)
    assert read == config
    assert isinstance(loaded, CTC)
    assert loaded.state_dict().keys() == saved.state_dict().keys()
    for name, weight in loaded.state_dict().items():
        assert weight.dtype == dtype
        assert torch.equal(weight, saved.state_dict()[name])
    assert not loaded.training
    assert not any(weight.requires_grad for weight in loaded.parameters())


def test_the_folder_of_a_bias_from_the_base_holds_no_table_and_drafts_what_was_saved(config, base_weights, tmp_path):
    trunk = config.init_args["trunk"] | {"markov_rank": 3, "markov_factors": "base", "hidden_layers": [-1]}
    config = replace(config, init_args=config.init_args | {"trunk": trunk})
    saved = config.build()
    torch.nn.init.normal_(saved.markov.right)
    checkpoint.save(tmp_path, saved, config)
    loaded, _ = checkpoint.load(tmp_path)
    assert not any(base_weights.embedding.shape[0] in weight.shape for weight in loaded.state_dict().values())
    text = torch.randn(9, 16), torch.arange(9), torch.arange(1, 9), base_weights
    assert loaded.draft_at(*text) == saved.draft_at(*text)


def test_a_folder_from_before_the_choice_of_factors_has_tables_of_its_own(config, tmp_path):
    config = replace(config, init_args={"num_frames": 6, "num_labels": 4, "markov_rank": 3})
    saved = config.build()
    checkpoint.save(tmp_path, saved, config)
    assert "markov_factors" not in (tmp_path / "config.json").read_text()
    loaded, _ = checkpoint.load(tmp_path)
    assert torch.equal(loaded.markov.left, saved.markov.left) and loaded.markov.left.shape == (23, 3)


def test_file_permissions_follow_the_umask(config, tmp_path):
    before = os.umask(0o027)
    try:
        checkpoint.save(tmp_path, config.build(), config)
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "config.json": 0o640,
        "model.safetensors": 0o640,
    }


def test_a_failed_save_leaves_the_old_files(folder, config, monkeypatch):
    def full(weights, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left")

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(folder, config.build(), replace(config, base_name="another"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_recipe_reaches_the_drafter(folder):
    drafter, _ = checkpoint.load(folder)
    assert (drafter.num_frames, drafter.num_labels, drafter.required_outputs.hidden_layers) == (6, 4, (1, -1))


def test_a_missing_folder_or_file_is_named(folder, tmp_path):
    assert "config.json is missing" in refusal(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refusal(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, -1, -1000])
def test_truncated_weights_are_refused(folder, kept):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert "damaged or cut short" in refusal(folder)


def test_a_weights_file_of_another_format_is_refused(folder):
    (folder / "model.safetensors").write_bytes(b"\xff\xfenot tensors at all" * 50)
    assert "damaged or cut short" in refusal(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '"words"', "null", "{}", '{"format": 1}', '{"format": 2}', "\x00\x01"]
)
def test_a_garbled_configuration_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    assert "is not a drafter's configuration" in refusal(folder)


def test_a_folder_of_another_tool_is_refused_with_the_command_that_reads_it(folder):
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    assert "`drafters import` reads folders of other tools" in refusal(folder)


def test_a_binary_configuration_is_refused(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x80\x81")
    assert "is not a drafter's configuration" in refusal(folder)


def test_an_unknown_field_or_format_is_refused(folder):
    edit(folder, surprise=1)
    assert "surprise" in refusal(folder)
    edit(folder, format=99)
    assert "format" in refusal(folder)


@pytest.mark.parametrize(
    "class_path",
    ["os.system", "builtins.eval", "torch.nn.Linear", "drafters.ANPD", "drafters.torch", "drafters.nothing"],
)
def test_a_class_outside_the_project_is_refused(folder, class_path):
    edit(folder, class_path=class_path)
    assert "is not a registered learned drafter" in refusal(folder)


def test_arguments_that_do_not_fit_are_refused(folder, config):
    edit(folder, init_args=config.init_args | {"num_wings": 2})
    assert "num_wings" in refusal(folder)
    edit(folder, init_args=config.init_args | {"trunk": None})
    assert "the arguments of drafters.CTC do not fit" in refusal(folder)


def test_weights_of_another_recipe_are_refused(folder, config):
    edit(folder, init_args=config.init_args | {"trunk": {"num_frames": 8}})
    assert "does not fit its config.json" in refusal(folder)
    edit(folder, init_args=config.init_args | {"trunk": {"num_layers": 2}})
    assert "does not fit its config.json" in refusal(folder)


@pytest.mark.slow
def test_loading_needs_neither_lightning_nor_transformers(folder, repository):
    program = (
        "import sys; from drafters import checkpoint; drafter, _ = checkpoint.load(sys.argv[1]);"
        "found = {'lightning', 'transformers', 'pydantic', 'inference', 'train'} & set(sys.modules);"
        "found |= {name for name in sys.modules if name.startswith('data.') and name.split('.')[1] != 'files'};"
        "assert not found, found"
    )
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"init_args": {"trunk": {"num_layers": 900}}},
        {"init_args": {"trunk": {"num_layers": 10**8}}},
        {"init_args": {"draft": {"num_nodes": 10**12}}},
        {"base": {"hidden_size": 10**6, "intermediate_size": 10**6}},
        {"base": {"hidden_size": 10**9}},
        {"base": {"vocab_size": 2.5}},
        {"base": {"num_layers": None}},
        {"base_name": ["x"]},
    ],
    ids=str,
)
def test_a_configuration_that_asks_for_more_than_the_weights_is_refused_before_it_is_built(folder, config, changes):
    values = asdict(config)
    for name, change in changes.items():
        changes[name] = values[name] | change if isinstance(change, dict) else change
    edit(folder, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DrafterConfig, "build", only_on_meta(DrafterConfig.build))
        message = refusal(folder)
    assert "config.json" in message


def only_on_meta(build):
    """Build a drafter only where that allocates nothing."""

    def checked(config):
        assert torch.get_default_device().type == "meta"
        return build(config)

    return checked
