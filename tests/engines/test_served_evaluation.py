"""``drafters eval --engine vllm``: real servers, the base's own texts, and the steps of our own chain."""

import json

import pytest

from data import benchmarks
from drafters import checkpoint
from inference.results import folders
from inference.verifier.base import BaseConfig
from inference.vllm.served_drafter import read_parallel, spec_of
from train.cli.commands import main

NUM_TOKENS = 64


@pytest.fixture
def arguments(prompts, tmp_path, monkeypatch):
    """An evaluation of the first turns of the questions of the prompts."""
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)  # set for the engines inside the test process
    asked = benchmarks.load_questions("embedded", limit=len(prompts))
    rows = [{"question_id": each.question_id, "turns": each.turns[:1]} for each in asked]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval", "--engine", "vllm", "--base", "checkpoints/tiny-chat", "--benchmark", "file"]
    words += ["--questions", str(tmp_path / "questions.jsonl"), "--max-new-tokens", str(NUM_TOKENS)]
    return [*words, "--out", str(tmp_path / "out")]


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
    options = ("--concurrency", "[1,4]", "--engine-args", "--max-model-len 512 --max-num-seqs 8")
    main([*arguments, *drafters, *options])
    summaries = folders.read(tmp_path / "out")
    for name, answers in summaries.answers["file"].items():
        assert [answer.turns[0].token_ids for answer in answers] == expected, name
    assert min(own_lengths.values()) > 1.25
    for name, summary in summaries.summaries["file"].items():
        assert summary.identical == summary.questions == len(expected)
        length = {"none": 1.0, **own_lengths}[name.partition(" ")[0]]
        assert summary.acceptance_length == pytest.approx(length), name
        assert summary.served.tokens_per_cpu_second > 0 and summary.served.inter_token[0] > 0
        if not summary.is_baseline:
            assert 1 + sum(summary.acceptance_by_depth) == pytest.approx(length, rel=0.1)


def test_a_server_that_does_not_start_is_explained_in_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--drafter", "none", "--concurrency", "1", "--engine-args", "--no-such-option"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2
    assert "vLLM ended with exit code 2: error: unrecognized arguments: --no-such-option" in error
