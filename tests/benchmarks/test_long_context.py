"""The benchmark of long contexts, on short ones."""

import json

import pytest

from benchmarks import long_context
from drafters import BaseShape, checkpoint
from drafters.checkpoint import DrafterConfig
from inference.reporting import plots
from inference.results.folders import read
from inference.verifier.base import load_base_info, tokenizer_hash

SHAPE = BaseShape(hidden_size=192, vocab_size=1024, num_layers=8, num_heads=6, head_dim=32, intermediate_size=512)
OPTIONS = {"trunk": {"num_frames": 4}, "loss": {"num_labels": 3}, "draft": {"num_nodes": 4}}


@pytest.mark.slow
def test_drafters_are_measured_by_length_on_a_stretched_base(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "applicable", lambda summaries: ["prompts"])  # to draw all of them takes longest
    monkeypatch.setattr(long_context, "call_in_new_process", lambda function, *arguments: function(*arguments))
    tokenizer = load_base_info("checkpoints/tiny-chat").tokenizer
    config = DrafterConfig("drafters.CTC", OPTIONS, SHAPE, "checkpoints/tiny-chat", tokenizer_hash(tokenizer))
    checkpoint.save(tmp_path / "ctc", config.build(), config)
    lengths, ctc = [120, 700], f"ctc={tmp_path / 'ctc'}:window=8"
    settings = {"drafter": [ctc], "factor": 2.0, "lengths": lengths, "per_length": 1, "max_new_tokens": 6}
    long_context.long_context(**settings, prefill_chunks=[0, 64], out=str(tmp_path / "out"))
    base = json.loads((tmp_path / "out" / "base" / "config.json").read_text())
    assert base["max_position_embeddings"] == 2048
    assert base["rope_parameters"] == {
        "rope_theta": 10000.0, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024,
    }  # fmt: skip
    with pytest.raises(ValueError, match="already has yarn scaling"):
        long_context.stretch(str(tmp_path / "out" / "base"), tmp_path / "twice", "yarn", 2.0)
    results = read(tmp_path / "out" / "results")
    _, drafted = results.summaries["long"].values()
    prompts = [turn.prompt_tokens for answer in results.answers["long"]["none"] for turn in answer.turns]
    assert all(length / 2 < prompt <= length for prompt, length in zip(prompts, lengths, strict=True))
    assert [own.start for own in drafted.lengths.by_prompt] == [0, 512] and drafted.identical == 2
    assert (tmp_path / "out" / "results" / "plots" / "long-prompts.png").stat().st_size > 10_000
    memory = (tmp_path / "out" / "memory.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in memory if line[:1] == "|"]
    short, long = rows[2], rows[3]
    assert [short[0], long[0]] == ["120", "700"]
    assert short[3] == long[3] == f"{2 * 6 * 32 * 4 * 72 * 2 / 2**20:.2f}", "72 positions fill the cache, with room"
    assert [row[0] for row in rows[-2:]] == ["none", "64"]
    long_context.long_context(**settings, prefill_chunks=[], out=str(tmp_path / "out"))  # decodes nothing again
    assert "prefill-chunk" not in (tmp_path / "out" / "memory.md").read_text()
