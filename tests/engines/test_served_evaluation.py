"""``drafters eval --server vllm``: real servers, the base's own texts, and the steps of our own chain."""

import json

import pytest

from data import benchmarks
from drafters import checkpoint
from inference.evaluate import results
from inference.verifier.base import BaseConfig
from inference.vllm.served_drafter import read_parallel, spec_of
from train.cli import run_drafters as main

NUM_TOKENS = 64


@pytest.fixture
def arguments(prompts, tmp_path, monkeypatch):
    """An evaluation of the first turns of the questions of the prompts."""
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)  # set for the engines inside the test process
    asked = benchmarks.load_questions("embedded")[: len(prompts)]
    rows = [{"question_id": each.question_id, "turns": each.turns[:1]} for each in asked]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval", "--server", "vllm", "--base", "checkpoints/tiny-chat", "--max-new-tokens", str(NUM_TOKENS)]
    return [*words, "--benchmark", f"file={tmp_path / 'questions.jsonl'}", "--out", str(tmp_path / "out")]


@pytest.fixture
def own_lengths(trained, tiny_chat, expected, count_own_steps):
    """The acceptance lengths of our own chains: of CTC, and of EAGLE-3 at the depth of its recipe."""

    def length(build):
        return (sum(map(len, expected)) - len(expected)) / count_own_steps(build)

    base = BaseConfig(tiny_chat.name, tiny_chat.tokenizer, tiny_chat.model.config)
    parallel = read_parallel(spec_of(str(trained("ctc"))), base, 6)
    config = checkpoint.read_config(trained("eagle3"))
    config.init_args["draft"] |= {"tree": "chain"}
    lengths = {}
    for name, (folder, own) in {"ctc": parallel, "eagle3": (trained("eagle3"), config)}.items():
        drafter, _ = checkpoint.load(folder, config=own)
        drafter.attach_base_weights(tiny_chat.base_weights)
        lengths[name] = length(lambda drafter=drafter: drafter)
    return lengths


def test_texts_are_the_base_s_own_and_the_acceptance_lengths_are_those_of_our_own_chains(
    arguments, trained, expected, own_lengths, tmp_path
):
    main(["export", str(trained("eagle3")), str(tmp_path / "eagle3"), "--format", "vllm", "--dtype", "float32"])
    drafters = ["--drafter", spec_of(str(trained("ctc"))), "--drafter", f"eagle3={tmp_path / 'eagle3'}"]
    main([*arguments, *drafters, "--concurrency", "1", "--concurrency", "4"])
    found = results.read(tmp_path / "out")
    for name, answers in found.answers["file"].items():
        assert [answer.turns[0].token_ids for answer in answers] == expected, name
    assert min(own_lengths.values()) > 1.25
    for name, summary in found.summaries["file"].items():
        assert summary.identical == summary.questions == len(expected)
        length = {"none": 1.0, **own_lengths}[summary.drafter]
        assert summary.acceptance.length.value == pytest.approx(length), name
        assert summary.latency.inter_token[0] > 0
        if not summary.is_baseline:
            rates = [rate.rate.value for rate in summary.acceptance.rates]
            assert 1 + sum(rates) == pytest.approx(length, rel=0.1)
