from dataclasses import replace

import numpy as np
import pytest

from data import rows as module
from data.conversations import load_conversations
from data.rows import assistant_token_counts, describe, lengths, tokenise
from data.templates import TEMPLATES, encode


def test_rows_hold_the_tokens_and_the_mask_of_encode_and_are_counted(tokenizer, tmp_path, capfd):
    conversations, _ = load_conversations(["embedded:7"])
    rows = tokenise(conversations, tokenizer, "vicuna_v1.1", 200, str(tmp_path))
    captured = capfd.readouterr()
    assert captured.out + captured.err == "", "nothing is printed outside a terminal"
    types = {name: str(rows.features[name].feature.dtype) for name in ("input_ids", "loss_mask")}
    assert types == {"input_ids": "int32", "loss_mask": "int8"}
    for conversation, row in zip(conversations, rows, strict=True):
        assert (row["input_ids"], row["loss_mask"]) == encode(conversation, tokenizer, "vicuna_v1.1", 200)
        assert row["id"] == conversation.id
    sizes = [len(ids) for ids in rows["input_ids"]]
    learned = [token for row in rows for token, seen in zip(row["input_ids"], row["loss_mask"], strict=True) if seen]
    assert lengths(rows) == sizes
    said = (
        f"7 conversations, {sum(sizes):,} tokens, {len(learned)} of the assistant ({len(learned) / sum(sizes):.0%}), "
    )
    assert describe(rows) == said + f"median length {sorted(sizes)[3]}, longest {max(sizes)}"
    assert (assistant_token_counts(rows, 600) == np.bincount(learned, minlength=600)).all()


@pytest.mark.slow
def test_a_second_call_reads_the_cache_and_a_changed_one_does_not(tokenizer, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "encode", lambda *arguments: calls.append(1) or encode(*arguments))
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path / "cache"))
    conversations, _ = load_conversations(["embedded:4"])

    def num_calls(template="vicuna_v1.1", max_length=300, message=conversations):
        calls.clear()
        tokenise(message, tokenizer, template, max_length)
        return len(calls)

    assert num_calls() == 4
    assert num_calls() == 0
    assert num_calls(template="llama2_chat") == 4
    assert num_calls(max_length=301) == 4
    assert num_calls(message=conversations[:3]) == 3
    question, answer, *_ = conversations[0].messages
    for reasoning in ("Hm.", "Ah."):
        assert (
            num_calls(message=[replace(conversations[0], messages=(question, answer | {"thinking": reasoning}))]) == 1
        )
    monkeypatch.setitem(TEMPLATES, "vicuna_v1.1", TEMPLATES["vicuna_v1.1"].replace("curious", "careful"))
    assert num_calls() == 4
    monkeypatch.setattr(module, "FORMAT_VERSION", -1)
    assert num_calls() == 4
    assert all(path.name.startswith("tokens-") for path in (tmp_path / "cache").iterdir())


@pytest.mark.slow
def test_conversations_with_an_empty_loss_mask_are_left_out_and_an_empty_set_is_refused(tokenizer, tmp_path, caplog):
    conversations, _ = load_conversations(["embedded:30"])
    first_seen = [encode(c, tokenizer, "vicuna_v1.1", None)[1].index(1) for c in conversations]
    longest = sorted(first_seen)[10]
    rows = tokenise(conversations, tokenizer, "vicuna_v1.1", longest, str(tmp_path))
    assert len(rows) == sum(place < longest for place in first_seen) < 30
    with pytest.raises(ValueError, match=r"the loss mask is zero everywhere: .*raise max_length"):
        tokenise(conversations, tokenizer, "vicuna_v1.1", 10, str(tmp_path))
    question, answer, *_ = conversations[0].messages
    calling = replace(
        conversations[0], id="tools", messages=(question, answer | {"tool_calls": [{"function": {"name": "f"}}]})
    )
    kept = tokenise([*conversations[:1], calling], tokenizer, "vicuna_v1.1", 300, str(tmp_path))
    assert kept["id"] == ["embedded-0-0"]
    assert "dropped 1 records (1 x the chat template has no place for tool calls)" in caplog.text
    with pytest.raises(ValueError, match=r"template 'vicuna_v1.1' refuses every conversation: .*no place for tool"):
        tokenise([calling], tokenizer, "vicuna_v1.1", 300, str(tmp_path))


@pytest.mark.slow
def test_every_answer_of_the_real_sharegpt_is_inside_the_mask(llama_tokenizer, shared, tmp_path):
    conversations, dropped = load_conversations([str(shared("data/sharegpt/sharegpt_sample.json"))])
    assert len(conversations) + dropped.counts.total() == 50 and len(conversations) >= 45
    ends = 0
    for row in tokenise(conversations, llama_tokenizer, "vicuna_v1.1", None, str(tmp_path)):
        pairs = list(zip(row["input_ids"], row["loss_mask"], strict=True))
        ends += sum(seen for token, seen in pairs if token == llama_tokenizer.eos_token_id)
    assert ends == sum(
        message["role"] == "assistant" for conversation in conversations for message in conversation.messages
    )
