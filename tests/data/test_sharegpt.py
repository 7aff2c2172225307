import gzip
import json
from pathlib import Path

import pytest

from data import sharegpt
from data.conversation import TEMPLATES, encode
from data.sharegpt import Statistics, load, tokenise

SHARED = Path(__file__).parents[2].parent / "shared"
SAMPLE = SHARED / "data" / "sharegpt" / "sharegpt_sample.json"
GOOD = {"id": "good", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}
MUTE = {"conversations": [{"from": "human", "value": "Hi"}]}


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return str(path)

    return write


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.json", json.dumps([GOOD, GOOD])),
        ("dict.json", json.dumps({"version": 1, "data": [GOOD, GOOD]})),
        ("lines.jsonl", json.dumps(GOOD) + "\n\n" + json.dumps(GOOD) + "\n"),
        ("lines.jsonl.gz", json.dumps(GOOD) + "\n" + json.dumps(GOOD)),
    ],
)
def test_all_kinds_of_files_are_read(write, name, text):
    conversations, dropped = load([write(name, text)])
    assert [conversation.id for conversation in conversations] == ["good", "good"]
    assert dropped.total == 0


def test_the_embedded_corpus_is_a_file_name():
    assert [c.id for c in load(["embedded:3:9"])[0]] == ["embedded-9-0", "embedded-9-1", "embedded-9-2"]
    assert load(["embedded:5"])[0] == load(["embedded:9:0"], limit=5)[0]
    with pytest.raises(ValueError, match="embedded:COUNT"):
        load(["embedded:many"])


def test_broken_records_are_counted_by_reason_and_named(write):
    file = write("mixed.json", json.dumps([GOOD, MUTE, "text", MUTE, GOOD, MUTE, MUTE]))
    conversations, dropped = load([file])
    assert len(conversations) == 2
    assert sorted(dropped.counts.values()) == [1, 4]
    lines = str(dropped).splitlines()
    assert lines[0].startswith("dropped 5 records (4 x no assistant turn")
    assert "  mixed.json record 3: not a JSON object" in lines
    assert sum("no assistant turn" in line for line in lines[1:]) == 3


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("empty.json", " ", "the file is empty; fetch it again"),
        ("cut.json", '[{"id": 1,', "line 1: invalid JSON"),
        ("cut.jsonl", json.dumps(GOOD) + "\n{", "line 2: invalid JSON"),
        ("two.json", '{"a": [], "b": []}', "expected a list of conversations"),
        ("none.json", "[]", "no usable conversation"),
        ("broken.json", json.dumps([MUTE, MUTE]), r"no usable conversation \(no assistant turn.*expected records like"),
        ("data.parquet", "x", "unknown kind of file; convert"),
    ],
)
def test_a_bad_file_gives_one_line_with_its_name(write, name, text, reason):
    with pytest.raises(ValueError, match=reason) as error:
        load([write(name, text)])
    assert name in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_and_a_false_gzip_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.json: no such file"):
        load([str(tmp_path / "nowhere.json")])
    (tmp_path / "false.jsonl.gz").write_text("plain")
    with pytest.raises(ValueError, match=r"false.jsonl.gz: cannot be read"):
        load([str(tmp_path / "false.jsonl.gz")])


def test_rows_hold_what_encode_gives(tokenizer, tmp_path):
    conversations, _ = load(["embedded:6"])
    rows = tokenise(conversations, tokenizer, "vicuna_v1.1", 200, str(tmp_path))
    assert {name: str(rows.features[name].feature.dtype) for name in ("input_ids", "loss_mask")} == {
        "input_ids": "int32",
        "loss_mask": "int8",
    }
    for conversation, row in zip(conversations, rows, strict=True):
        assert (row["input_ids"], row["loss_mask"]) == encode(conversation, tokenizer, "vicuna_v1.1", 200)
        assert row["id"] == conversation.id


def test_the_second_call_reads_the_cache_and_a_change_does_not(tokenizer, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(sharegpt, "encode", lambda *arguments: calls.append(1) or encode(*arguments))
    conversations, _ = load(["embedded:4"])

    def num_calls(template="vicuna_v1.1", max_length=300, said=conversations, tokenizer=tokenizer):
        calls.clear()
        tokenise(said, tokenizer, template, max_length, str(tmp_path))
        return len(calls)

    assert num_calls() == 4
    assert num_calls() == 0
    assert num_calls(template="llama2_chat") == 4
    assert num_calls(max_length=301) == 4
    assert num_calls(said=conversations[:3]) == 3
    monkeypatch.setitem(TEMPLATES, "vicuna_v1.1", TEMPLATES["vicuna_v1.1"].replace("curious", "careful"))
    assert num_calls() == 4
    monkeypatch.setattr(sharegpt, "FORMAT_VERSION", -1)
    assert num_calls() == 4
    assert not list(tmp_path.glob("writing-*"))


def test_the_cache_folder_may_be_named_by_the_environment(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path / "cache"))
    tokenise(load(["embedded:2"])[0], tokenizer, "tokenizer", 300)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_conversations_without_a_seen_token_are_left_out_and_none_left_is_an_error(tokenizer, tmp_path):
    conversations, _ = load(["embedded:30"])
    first_seen = [encode(c, tokenizer, "vicuna_v1.1", None)[1].index(1) for c in conversations]
    longest = sorted(first_seen)[10]
    rows = tokenise(conversations, tokenizer, "vicuna_v1.1", longest, str(tmp_path))
    assert len(rows) == sum(place < longest for place in first_seen) < 30
    with pytest.raises(ValueError, match=r"the loss mask is zero everywhere: .*raise max_length"):
        tokenise(conversations, tokenizer, "vicuna_v1.1", 10, str(tmp_path))


def test_tokenising_is_silent_where_nobody_watches(tokenizer, tmp_path, capfd):
    tokenise(load(["embedded:5"])[0], tokenizer, "tokenizer", 300, str(tmp_path))
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_statistics_count_the_tokens(tokenizer, tmp_path):
    rows = tokenise(load(["embedded:7"])[0], tokenizer, "vicuna_v1.1", 300, str(tmp_path))
    statistics = Statistics.of(rows)
    assert statistics.num_tokens == sum(len(ids) for ids in rows["input_ids"]) == sum(sharegpt.lengths(rows))
    assert statistics.num_assistant_tokens == sum(sum(mask) for mask in rows["loss_mask"])
    assert str(statistics).startswith("7 conversations, ") and "\n" not in str(statistics)


@pytest.mark.skipif(not SAMPLE.is_file(), reason="the ShareGPT sample does not stand beside the project")
def test_real_sharegpt_is_read_and_every_answer_is_found(llama_tokenizer, tmp_path):
    conversations, dropped = load([str(SAMPLE)])
    assert len(conversations) + dropped.total == 50 and len(conversations) >= 45
    ends = 0
    for row in tokenise(conversations, llama_tokenizer, "vicuna_v1.1", None, str(tmp_path)):
        pairs = list(zip(row["input_ids"], row["loss_mask"], strict=True))
        ends += sum(seen for token, seen in pairs if token == llama_tokenizer.eos_token_id)
    assert ends == sum(role == "assistant" for conversation in conversations for role, _ in conversation.messages)
