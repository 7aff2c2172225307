"""The folder of a trained drafter: it loads as it was saved, and damage is reported in one line."""

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch

from drafters import CTC, checkpoint
from drafters.checkpoint import DrafterConfig
from tests.conftest import refusal


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


def test_a_missing_folder_or_file_is_named(folder, tmp_path):
    assert "config.json is missing" in refusal(checkpoint.load, tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refusal(checkpoint.load, folder)


def test_a_folder_of_another_tool_is_refused_with_the_command_that_reads_it(folder):
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    assert "`drafters import` reads folders of other tools" in refusal(checkpoint.load, folder)


@pytest.mark.parametrize(
    "class_path",
    ["os.system", "builtins.eval", "torch.nn.Linear", "drafters.ANPD", "drafters.torch", "drafters.nothing"],
)
def test_a_class_outside_the_project_is_refused(folder, class_path):
    edit(folder, class_path=class_path)
    assert "is not a registered learned drafter" in refusal(checkpoint.load, folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"init_args": {"num_wings": 2}}, "num_wings"),
        ({"init_args": {"trunk": None}}, "the arguments of drafters.CTC do not fit"),
        ({"init_args": {"trunk": {"num_frames": 8}}}, "frame_embedding is"),
        ({"init_args": {"trunk": {"num_layers": 2}}}, "does not fit its config.json"),
        ({"init_args": {"trunk": {"num_layers": 10**8}}}, "num_layers must be at most 1000"),
        ({"base": {"hidden_size": 10**9}}, "does not fit its config.json"),
        ({"base": {"vocab_size": 2.5}}, "vocab_size"),
        ({"base": {"num_layers": None}}, "num_layers"),
        ({"base_name": ["x"]}, "base_name"),
    ],
    ids=str,
)
def test_a_configuration_of_other_weights_is_refused_and_nothing_is_allocated_for_it(folder, config, changes, said):
    values = asdict(config)
    edit(folder, **{k: values[k] | change if isinstance(change, dict) else change for k, change in changes.items()})
    assert said in refusal(checkpoint.load, folder)


def test_options_of_decoding_and_of_the_loss_that_are_no_longer_there_are_left_out(folder, config):
    """Folders written before an option went away keep loading; what the weights depend on is never left out."""
    loss = {"weights": "decay", "num_labels": 4}
    edit(folder, init_args=config.init_args | {"draft": {"num_nodes": 5, "step_costs": ""}, "loss": loss})
    assert checkpoint.load(folder)[0].draft_options.num_nodes == 5
    edit(folder, init_args=config.init_args | {"trunk": {"gone": 1}})
    assert "gone" in refusal(checkpoint.load, folder)


@pytest.mark.slow
def test_loading_needs_neither_lightning_nor_transformers(folder, repository):
    program = (
        "import sys; from drafters import checkpoint; drafter, _ = checkpoint.load(sys.argv[1]);"
        "found = {'lightning', 'transformers', 'inference', 'train'} & set(sys.modules);"
        "found |= {name for name in sys.modules if name.startswith('data.')} - {'data.files', 'data.safe_text'};"
        "assert not found, found"
    )
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
