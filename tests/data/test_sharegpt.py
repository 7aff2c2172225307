import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from datasets.packaged_modules.json.json import Json
from pyarrow import parquet

from data import sharegpt, sources
from data.conversation import TEMPLATES, encode
from data.sharegpt import Statistics, load_conversations, tokenise

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
def test_every_kind_of_file_is_read(write, name, text):
    conversations, dropped = load_conversations([write(name, text)])
    assert [conversation.id for conversation in conversations] == ["good", "good"]
    assert dropped.total == 0


def test_the_embedded_corpus_is_read_by_name():
    assert [c.id for c in load_conversations(["embedded:3:9"])[0]] == ["embedded-9-0", "embedded-9-1", "embedded-9-2"]
    assert load_conversations(["embedded:5"])[0] == load_conversations(["embedded:9:0"], limit=5)[0]
    with pytest.raises(ValueError, match="embedded:COUNT"):
        load_conversations(["embedded:many"])


def test_broken_records_are_counted_by_reason_and_named(write):
    file = write("mixed.json", json.dumps([GOOD, MUTE, "text", MUTE, GOOD, MUTE, MUTE]))
    conversations, dropped = load_conversations([file])
    assert len(conversations) == 2
    assert sorted(dropped.counts.values()) == [1, 4]
    lines = str(dropped).splitlines()
    assert lines[0].startswith("dropped 5 records (4 x no assistant turn")
    assert "  mixed.json record 3: not a JSON object" in lines
    assert sum("no assistant turn" in line for line in lines[1:]) == 3


FORMS = [
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]},
    {"conversation": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]},
    {"question": "Hi", "answer": "Hello!"},
    {"instruction": "Hi", "input": "", "output": "Hello!"},
    {"instruction": "Hi", "response": "Hello!"},
    {"history": [{"user": "Hi", "bot": "Hello!"}]},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(reversed(form)))
@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_every_record_format_is_read_from_every_kind_of_file(tmp_path, form, kind):
    file, message = tmp_path / f"talk.{kind}", [form | {"id": "a", "score": 1.5}, form | {"id": "b", "score": None}]
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(message), file)
    else:
        file.write_text(json.dumps(message) if kind == "json" else "\n".join(map(json.dumps, message)))
    conversations, dropped = load_conversations([str(file)])
    assert [conversation.id for conversation in conversations] == ["a", "b"] and not dropped.total
    assert {conversation.messages for conversation in conversations} == {(("user", "Hi"), ("assistant", "Hello!"))}


def test_a_parquet_file_may_mix_record_formats_with_null_columns(tmp_path):
    turns = [message for form in FORMS[:2] for messages in form.values() for message in messages]
    every_key = {key for form in FORMS for key in form} | {"input_ids", "id"}
    both = [{"conversations": turns[:2]}, {"conversations": turns[2:]}, *FORMS[2:]]
    parquet.write_table(
        pa.Table.from_pylist([dict.fromkeys(every_key) | record for record in both]), tmp_path / "mixed.parquet"
    )
    conversations, dropped = load_conversations([str(tmp_path / "mixed.parquet")])
    assert [conversation.id for conversation in conversations] == [*map(str, range(1, 8))] and not dropped.total
    assert {conversation.messages for conversation in conversations} == {(("user", "Hi"), ("assistant", "Hello!"))}


def test_files_of_different_kinds_are_read_as_one_set(write, tmp_path):
    parquet.write_table(pa.Table.from_pylist([GOOD] * 600), tmp_path / "many.parquet")
    files = [write("a.json", json.dumps([GOOD])), str(tmp_path / "many.parquet"), write("b.jsonl.gz", json.dumps(GOOD))]
    assert len(load_conversations([*files, "embedded:3"])[0]) == 1 + 600 + 1 + 3
    assert len(load_conversations([*files, "embedded:3"], limit=500)[0]) == 500


def test_json_lines_are_read_one_at_a_time(tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_text("\n".join([json.dumps(GOOD)] * 3) + "\n" + "x" * 1000)
    found = sources.read_records(str(file))
    assert next(found)[0] == "line 1"
    file.write_bytes(b"")  # what is read ahead is a buffer, not the file
    assert len(list(found)) == 3


def test_a_data_set_of_the_hub_is_read_from_the_local_cache(tmp_path, monkeypatch):
    from datasets import config

    written = tmp_path / "talk.jsonl"
    written.write_text("\n".join(map(json.dumps, [GOOD, MUTE, GOOD])))
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    builder = Json(dataset_name="talk", hash="0", data_files={"train": [str(written)]})
    builder.download_and_prepare()
    (tmp_path / "cache" / "someone___talk").mkdir()
    (tmp_path / "cache" / "talk" / builder.config_id).rename(tmp_path / "cache" / "someone___talk" / "default")
    for source in ("hub:someone/talk", "hub:someone/talk:train", "hub:someone/talk:default:train"):
        conversations, dropped = load_conversations([source])
        assert [conversation.id for conversation in conversations] == ["good", "good"]
        assert dropped.total == 1 and dropped.examples[0].endswith(" record 2: no assistant turn after a user turn")
    with pytest.raises(ValueError, match=r'cannot be loaded from the hub \(Unknown split "test"'):
        load_conversations(["hub:someone/talk:test"])


def test_a_file_of_the_hub_is_read_from_the_local_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "datasets--someone--talk"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40) / "raw").mkdir(parents=True)
    (folder / "snapshots" / ("0" * 40) / "raw" / "a.jsonl").write_text(json.dumps(GOOD))
    assert load_conversations(["hub:someone/talk/raw/a.jsonl"])[0][0].id == "good"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hub:someone/nothing", "hub:someone/nothing: cannot be loaded from the hub (Couldn't reach"),
        ("hub:someone/nothing:test", "cannot be loaded from the hub"),
        ("hub:someone/nothing/a.json", "hub:someone/nothing/a.json: cannot be loaded from the hub"),
        ("hub:", "expected hub:OWNER/NAME"),
        ("hub:talk", "expected hub:OWNER/NAME"),
        ("hub:someone/", "expected hub:OWNER/NAME"),
        ("hub:someone/talk:", "expected hub:OWNER/NAME"),
        ("hub:someone/talk:a:b:c", "expected hub:OWNER/NAME"),
        ("hub:someone/talk/a.json:train", "expected hub:OWNER/NAME"),
    ],
)
def test_a_source_missing_on_the_hub_is_refused_in_one_line(source, message):
    with pytest.raises(ValueError) as error:
        load_conversations([source])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_rows_hold_the_tokens_and_the_mask_of_encode(tokenizer, tmp_path):
    conversations, _ = load_conversations(["embedded:6"])
    rows = tokenise(conversations, tokenizer, "vicuna_v1.1", 200, str(tmp_path))
    assert {name: str(rows.features[name].feature.dtype) for name in ("input_ids", "loss_mask")} == {
        "input_ids": "int32",
        "loss_mask": "int8",
    }
    for conversation, row in zip(conversations, rows, strict=True):
        assert (row["input_ids"], row["loss_mask"]) == encode(conversation, tokenizer, "vicuna_v1.1", 200)
        assert row["id"] == conversation.id


@pytest.mark.slow
def test_a_second_call_reads_the_cache_and_a_changed_one_does_not(tokenizer, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(sharegpt, "encode", lambda *arguments: calls.append(1) or encode(*arguments))
    conversations, _ = load_conversations(["embedded:4"])

    def num_calls(template="vicuna_v1.1", max_length=300, message=conversations, tokenizer=tokenizer):
        calls.clear()
        tokenise(message, tokenizer, template, max_length, str(tmp_path))
        return len(calls)

    assert num_calls() == 4
    assert num_calls() == 0
    assert num_calls(template="llama2_chat") == 4
    assert num_calls(max_length=301) == 4
    assert num_calls(message=conversations[:3]) == 3
    monkeypatch.setitem(TEMPLATES, "vicuna_v1.1", TEMPLATES["vicuna_v1.1"].replace("curious", "careful"))
    assert num_calls() == 4
    monkeypatch.setattr(sharegpt, "FORMAT_VERSION", -1)
    assert num_calls() == 4
    assert not list(tmp_path.glob("writing-*"))


def test_the_cache_folder_can_be_set_in_the_environment(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path / "cache"))
    tokenise(load_conversations(["embedded:2"])[0], tokenizer, "tokenizer", 300)
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.slow
def test_conversations_with_an_empty_loss_mask_are_left_out_and_an_empty_set_is_refused(tokenizer, tmp_path):
    conversations, _ = load_conversations(["embedded:30"])
    first_seen = [encode(c, tokenizer, "vicuna_v1.1", None)[1].index(1) for c in conversations]
    longest = sorted(first_seen)[10]
    rows = tokenise(conversations, tokenizer, "vicuna_v1.1", longest, str(tmp_path))
    assert len(rows) == sum(place < longest for place in first_seen) < 30
    with pytest.raises(ValueError, match=r"the loss mask is zero everywhere: .*raise max_length"):
        tokenise(conversations, tokenizer, "vicuna_v1.1", 10, str(tmp_path))


def test_tokenising_prints_nothing_outside_a_terminal(tokenizer, tmp_path, capfd):
    tokenise(load_conversations(["embedded:5"])[0], tokenizer, "tokenizer", 300, str(tmp_path))
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_statistics_count_the_tokens(tokenizer, tmp_path):
    rows = tokenise(load_conversations(["embedded:7"])[0], tokenizer, "vicuna_v1.1", 300, str(tmp_path))
    statistics = Statistics.of(rows)
    assert statistics.num_tokens == sum(len(ids) for ids in rows["input_ids"]) == sum(sharegpt.lengths(rows))
    assert statistics.num_assistant_tokens == sum(sum(mask) for mask in rows["loss_mask"])
    sizes = sorted(map(len, rows["input_ids"]))
    assert (statistics.median_length, statistics.longest) == (sizes[3], sizes[6])
    assert str(statistics).startswith("7 conversations, ") and "\n" not in str(statistics)


@pytest.mark.slow
@pytest.mark.skipif(not SAMPLE.is_file(), reason="the ShareGPT sample is not in the folder `shared`")
def test_every_answer_of_the_real_sharegpt_is_inside_the_mask(llama_tokenizer, tmp_path):
    conversations, dropped = load_conversations([str(SAMPLE)])
    assert len(conversations) + dropped.total == 50 and len(conversations) >= 45
    ends = 0
    for row in tokenise(conversations, llama_tokenizer, "vicuna_v1.1", None, str(tmp_path)):
        pairs = list(zip(row["input_ids"], row["loss_mask"], strict=True))
        ends += sum(seen for token, seen in pairs if token == llama_tokenizer.eos_token_id)
    assert ends == sum(role == "assistant" for conversation in conversations for role, _ in conversation.messages)
