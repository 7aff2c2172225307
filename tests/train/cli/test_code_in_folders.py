"""Code in the folder of a model is never run, even if standard input agrees to it."""

import ast
import io
import json
import shutil

import pytest
from transformers import AutoConfig

from data.tokenizer import load_pretrained, load_tokenizer
from inference.verifier.base import load_base, load_base_info
from train.cli import commands, lightning_command

CODE = """from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).touch()
class Config(LlamaConfig):
    model_type = "marker"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def folder(tiny, tmp_path, monkeypatch):
    """A base of a type that transformers does not know, with code for it; "yes" is all that standard input says."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n" * 50))
    folder = tmp_path / "base"
    shutil.copytree(tiny, folder)
    (folder / "own.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    change(folder / "config.json", model_type="marker", architectures=["Model"], auto_map=classes)
    yield folder
    assert not (tmp_path / "marker").exists()


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("load", [load_base, load_base_info, lambda name: load_pretrained(AutoConfig, name)])
def test_a_model_with_code_of_its_own_is_refused(load, folder):
    with pytest.raises(ValueError, match=r"code in its folder \(auto_map\), which is never run"):
        load(str(folder))


def test_a_tokenizer_with_code_of_its_own_is_refused(folder):
    change(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Tokenizer", None]})
    with pytest.raises(ValueError, match=r"code in its folder \(auto_map\), which is never run"):
        load_tokenizer(str(folder))


def test_every_model_configuration_and_tokenizer_is_loaded_without_its_code(repository):
    calls = {
        f"{path.relative_to(repository)}: {ast.unparse(node)}"
        for package in ("data", "drafters", "inference", "train", "benchmarks")
        for path in (repository / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("from_pretrained")
    }
    expected = "auto_class.from_pretrained(source, trust_remote_code=False, **options)"
    assert calls == {f"data/tokenizer.py: {expected}"}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["chat", "eval", "verify", "fit", "draft model"])
def test_no_command_runs_it(command, folder, tiny, call, write_recipe, tmp_path):
    if command == "fit":
        outcome = call(lightning_command.main, "fit", "--config", write_recipe(tmp_path), "--model.base", folder)
    elif command == "draft model":
        drafter = f"draft_model={folder}"
        outcome = call(commands.main, "verify", "--base", tiny, "--drafter", drafter, "--benchmark", "embedded")
    else:
        drafter = ["--drafter", "anpd"] if command == "verify" else []
        outcome = call(commands.main, command, "--base", folder, *drafter)
    error = outcome.one_line_error("lightning" if command == "fit" else "drafters")
    assert "code in its folder (auto_map), which is never run" in error
