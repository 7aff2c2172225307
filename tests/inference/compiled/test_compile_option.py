"""The commands that decode compile their steps with ``--compile``, and give the texts they give without it."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from inference.evaluation.evaluate import evaluate

from inference.chat import Chat
from inference.compiled.runner import make_runner
from inference.verifier import layers
from inference.verifier.options import ModelOptions, SamplingOptions
from inference.verify import DistributionOptions, PromptOptions, verify
from train.cli import grouped

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(make_base, toy_tokenizer, tmp_path):
    """A toy base, and a file with a question."""
    make_base(dtype=torch.float32, context=256, layers=1, predictable=True).model.save_pretrained(tmp_path / "base")
    toy_tokenizer.save_pretrained(tmp_path / "base")
    question = {"question_id": 1, "category": "toy", "turns": ["w5 w6 w7 w5", "w9 w8"]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question) + "\n")
    return tmp_path


def test_verify_compares_compiled_steps_with_generate(folder, graphs, few_shapes, capsys):
    selection = PromptOptions(questions=str(folder / "questions.jsonl"), max_new_tokens=12, template="vicuna_v1.1")
    arguments = ModelOptions(str(folder / "base")), selection, SamplingOptions(), DistributionOptions(texts=0)
    verify(*arguments, ["prompt_lookup"], compile=True)
    assert "Nothing is lost" in capsys.readouterr().out
    assert graphs


def test_eval_with_compiled_steps_gives_the_same_texts_and_says_so(folder, graphs, few_shapes):
    arguments = {"base": str(folder / "base"), "questions": [str(folder / "questions.jsonl")], "repeats": 1}
    arguments |= {"benchmark": ["mt_bench"], "drafter": ["prompt_lookup"], "max_new_tokens": 10, "device": "cpu"}
    arguments |= {"template": "vicuna_v1.1"}
    answers, devices = [], []
    for name, compile in (("eager", False), ("compiled", True)):
        assert not graphs
        evaluate(**grouped(evaluate, arguments | {"compile": compile, "out": str(folder / name)}))
        lines = [path.read_text() for path in sorted((folder / name / "answers").rglob("*.jsonl"))]
        answers.append([json.loads(each)["choices"][0]["token_ids"] for each in lines])
        devices.append(json.loads((folder / name / "results.json").read_text())["context"]["device"])
    assert graphs
    assert answers[0] == answers[1] and len(answers[0]) == 2
    assert ["compiled steps" in device for device in devices] == [False, True]


def test_a_chat_and_its_comparison_are_compiled(folder, graphs, few_shapes):
    from rich.console import Console

    base = ModelOptions(str(folder / "base")).load()
    with (folder / "shown").open("w") as file:
        chat = Chat(base, Console(file=file, width=200), "prompt_lookup", "vicuna_v1.1", max_new_tokens=8, compile=True)
        chat.handle_line("w5 w6 w5")
        assert graphs
        num_graphs = len(graphs)
        chat.handle_line("/compare")
        assert len(graphs) > num_graphs
    shown = (folder / "shown").read_text()
    assert "same" in shown and "includes its compilation" in shown


def test_packed_weights_and_compiled_steps_exclude_each_other(make_base, monkeypatch):
    plain = make_base(dtype=torch.float32)
    base = replace(plain, model=copy.deepcopy(plain.model))
    monkeypatch.setattr(layers, "MIN_PACKED_ELEMENTS", 1)
    layers.pack_weights(base.model)
    with pytest.raises(ValueError, match=r"has packed weights, .* leave out compile or packed"):
        make_runner(base, compile=True)
