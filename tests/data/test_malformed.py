"""Malformed input: a broken record is counted and named, a broken file is refused in one line, nothing crashes."""

import gzip
import json
import os
from array import array

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from data.conversation import RecordedTokens, encode, parse
from data.feature_store.shards import pack, write_shard
from data.feature_store.store import FeatureStore, Manifest
from data.sharegpt import Dropped, load_conversations, tokenise

HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}
GOOD = [{"id": f"good-{n}", "conversations": [HUMAN, GPT]} for n in range(3)]
LINES = [json.dumps(record).encode() for record in GOOD]


def turns(*messages):
    return json.dumps({"conversations": messages}).encode()


COUNTED = {
    # ---- not JSON
    "half a record": (LINES[0][:40], "invalid JSON (Unterminated string"),
    "plain text": (b"hello there", "invalid JSON (Expecting value)"),
    "two records in a line": (LINES[0] + LINES[1], "invalid JSON (Extra data)"),
    "single quotes": (b"{'id': 1}", "invalid JSON (Expecting property name"),
    "broken UTF-8": (LINES[0].replace(b"Hi", b"H\xff"), "not UTF-8 (invalid start byte)"),
    "UTF-16": (LINES[0].decode().encode("utf-16"), "not UTF-8"),
    "NUL bytes": (b"\x00" * 64, "invalid JSON (Expecting value)"),
    "a NUL byte in a text": (LINES[0].replace(b"Hi", b"H\x00"), "invalid JSON (Invalid control character at)"),
    # ---- not a record
    "a number": (b"5", "not a JSON object"),
    "NaN": (b"NaN", "not a JSON object"),
    "null": (b"null", "not a JSON object"),
    "a list of records": (b"[" + LINES[0] + b"]", "not a JSON object"),
    "nested lists": (b'{"conversations": [[["human", "Hi"]]]}', "a turn is not a JSON object"),
    "wrong keys": (b'{"text": "Hi"}', "no turns"),
    "no turns": (turns(), "no turns"),
    "turns that are a text": (b'{"conversations": "Hi"}', "no turns"),
    "turns that are one object": (b'{"conversations": {"from": "human", "value": "Hi"}}', "no turns"),
    "wrong keys in a turn": (turns({"speaker": "human", "said": "Hi"}, GPT), "unknown speaker None"),
    "an id that is half a surrogate pair": (b'{"id": "\\ud800", ' + LINES[0][1:].partition(b", ")[2], "its id is not"),
    # ---- not a conversation
    "an unknown speaker": (turns({"from": "narrator", "value": "Hi"}, GPT), "unknown speaker 'narrator'"),
    "a speaker that is a list": (turns({"from": ["human"], "value": "Hi"}, GPT), "unknown speaker ['human']"),
    "a text that is a number": (turns({"from": "human", "value": 5}, GPT), "a turn has no text"),
    "a text that is NaN": (turns({"from": "human", "value": float("nan")}, GPT), "a turn has no text"),
    "a text that is null": (turns(HUMAN, {"from": "gpt", "value": None}), "a turn has no text"),
    "half a surrogate pair": (turns({"from": "human", "value": "\ud800"}, GPT), "a turn is not valid Unicode"),
    "an empty answer": (turns(HUMAN, {"from": "gpt", "value": " \n"}), "an assistant turn is empty"),
    "no answer": (turns(HUMAN), "no assistant turn after a user turn"),
    "no question": (turns(GPT), "no assistant turn after a user turn"),
    "two humans in a row": (turns(HUMAN, HUMAN, GPT), "user and assistant do not alternate"),
    "two answers in a row": (turns(HUMAN, GPT, GPT), "user and assistant do not alternate"),
    "a system message in the middle": (
        turns(HUMAN, {"from": "system", "value": "Be brief."}, GPT),
        "user and assistant do not alternate",
    ),
    "an answer that is a list": (b'{"question": "Hi", "answer": ["Hello"]}', "a turn has no text"),
    # ---- recorded tokens
    "tokens as text": (
        LINES[0][:-1] + b', "input_ids": ["1"], "loss_mask": [1], "tokenizer": "a", "template": "b"}',
        "input_ids or loss_mask is not a list of whole numbers",
    ),
    "tokens of no tokenizer": (LINES[0][:-1] + b', "input_ids": [1], "loss_mask": [1]}', "input_ids without the"),
    "a mask that is too short": (
        LINES[0][:-1] + b', "input_ids": [1, 2], "loss_mask": [1], "tokenizer": "a", "template": "b"}',
        "input_ids and loss_mask differ in length",
    ),
    "a token beyond 32 bits": (
        LINES[0][:-1] + b', "input_ids": [4294967296], "loss_mask": [1], "tokenizer": "a", "template": "b"}',
        "input_ids or loss_mask is not a list of whole numbers",
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_broken_line_is_named_and_the_others_are_read(tmp_path, name):
    line, reason = COUNTED[name]
    file = tmp_path / "mixed.jsonl"
    file.write_bytes(b"\n".join([LINES[0], line, LINES[1], LINES[2]]))
    conversations, dropped = load_conversations([str(file)])
    assert [conversation.id for conversation in conversations] == ["good-0", "good-1", "good-2"]
    assert dropped.total == 1
    assert dropped.examples[0].startswith("mixed.jsonl line 2: ") and reason in dropped.examples[0]
    assert len(str(dropped)) < 400


@pytest.mark.parametrize("name", COUNTED)
def test_a_broken_record_of_a_list_is_named_or_the_file_is_refused(tmp_path, name):
    line, reason = COUNTED[name]
    file = tmp_path / "mixed.json"
    file.write_bytes(b"[" + b",\n".join([LINES[0], line, LINES[1], LINES[2]]) + b"]")
    if reason.startswith(("invalid JSON", "not UTF-8")):
        with pytest.raises(ValueError, match=r"mixed\.json.*; (fetch it again|convert the file)") as error:
            load_conversations([str(file)])
        assert "\n" not in str(error.value)
        return
    conversations, dropped = load_conversations([str(file)])
    kept = ["good-0", "good-1", "good-2"]
    assert [conversation.id for conversation in conversations] == kept
    assert dropped.examples[0].startswith("mixed.json record 2: ") and reason in dropped.examples[0]


ODD = {
    "a byte order mark": b"\xef\xbb\xbf" + b"\n".join(LINES),
    "line ends of Windows": b"\r\n".join(LINES) + b"\r\n",
    "blank lines": b"\n\n  \n" + b"\n\t\n".join(LINES) + b"\n\n",
    "a NUL character, escaped": b"\n".join([LINES[0].replace(b"Hi", rb"H\u0000i"), *LINES[1:]]),
    "separators of Unicode": b"\n".join([LINES[0].replace(b"Hi", "a\u2028b\x85c".encode()), *LINES[1:]]),
    "a whole surrogate pair": b"\n".join([LINES[0].replace(b"Hi", rb"\ud83d\ude00"), *LINES[1:]]),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json"])
def test_unusual_but_valid_records_are_read(tmp_path, tokenizer, name, kind):
    text = ODD[name]
    if kind == "json":
        mark = text[:3] if text.startswith(b"\xef") else b""
        records = [line.strip() for line in text.removeprefix(mark).split(b"\n") if line.strip()]
        text = mark + b"[" + b",\r\n".join(records) + b"]"
    file = tmp_path / f"odd.{kind}"
    file.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)
    conversations, dropped = load_conversations([str(file)])
    assert [conversation.id for conversation in conversations] == ["good-0", "good-1", "good-2"]
    assert dropped.total == 0
    assert all(sum(encode(conversation, tokenizer, "vicuna_v1.1")[1]) for conversation in conversations)


ZIPPED = gzip.compress(b"\n".join(os.urandom(300).hex().encode() for _ in range(2000)))
TABLE = pa.Table.from_pylist(GOOD)
REFUSED = {
    "empty.json": (b" \n", "empty.json line 2: invalid JSON (Expecting value); fetch it"),
    "empty.jsonl": (b"", "empty.jsonl: the file is empty; fetch the file again"),
    "blank.jsonl": (b"\n\n", "blank.jsonl: no usable conversation (no records)"),
    "broken.jsonl": (b"{\n{", "broken.jsonl: no usable conversation (invalid JSON"),
    "cut.json": (json.dumps(GOOD, indent=1).encode()[:-60], "cut.json line 34: invalid JSON"),
    "lines.json": (
        b"\n".join(LINES),
        "lines.json line 2: invalid JSON (Extra data); fetch it again, or name it .jsonl",
    ),
    "list.jsonl": (json.dumps(GOOD).encode(), "list.jsonl: no usable conversation (not a JSON object"),
    "latin.json": (
        b'[\n"caf\xe9"]',
        "latin.json: not UTF-8 (invalid continuation byte); fetch it again",
    ),
    "lists.json": (b'{"a": [], "b": []}', "lists.json: expected a list of conversations"),
    "text.json": (b'"Hi"', "text.json: expected a list of conversations"),
    "false.jsonl.gz": (LINES[0], "false.jsonl.gz: Not a gzipped file"),
    "cut.jsonl.gz": (ZIPPED[: len(ZIPPED) // 2], "Compressed file ended before the end-of-stream marker was reached"),
    "cut.json.gz": (ZIPPED[: len(ZIPPED) // 2], "cut.json.gz: Compressed file ended"),
    "damaged.jsonl.gz": (ZIPPED[:5000] + b"\xff" * 500 + ZIPPED[5500:], "; fetch the file again"),
    "talk.txt": (
        b"\n".join(LINES),
        "talk.txt: unknown kind of file; convert it to .json, .jsonl (also .gz) or .parquet",
    ),
    "talk": (b"\n".join(LINES), "talk: unknown kind of file"),
    "empty.parquet": (b"", "empty.parquet: cannot be read as parquet"),
    "false.parquet": (b"\n".join(LINES), "false.parquet: cannot be read as parquet"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_file_is_refused_in_one_line(tmp_path, name):
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    assert message in refusal(tmp_path / name)


def refusal(source):
    with pytest.raises(ValueError) as error:
        load_conversations([str(source)])
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    return str(error.value)


def test_links_are_followed_and_other_things_than_files_are_refused(tmp_path):
    (tmp_path / "real.jsonl").write_bytes(b"\n".join(LINES))
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    assert len(load_conversations([str(tmp_path / "link.jsonl")])[0]) == 3
    assert "a folder; give" in refusal(tmp_path / "folder.jsonl")
    assert "no such file" in refusal(tmp_path / "nowhere.jsonl")
    assert "for a data set of the hub write hub:someone/talk" in refusal("someone/talk")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_truncated_parquet_file_is_refused(tmp_path, share):
    parquet.write_table(TABLE, tmp_path / "cut.parquet")
    content = (tmp_path / "cut.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[: int(share * len(content))])
    assert "cut.parquet: cannot be read as parquet" in refusal(tmp_path / "cut.parquet")


def test_a_parquet_file_with_a_damaged_page_is_refused(tmp_path):
    parquet.write_table(TABLE, tmp_path / "damaged.parquet", write_page_checksum=False)
    content = bytearray((tmp_path / "damaged.parquet").read_bytes())
    content[10:200] = b"\xff" * 190
    (tmp_path / "damaged.parquet").write_bytes(content)
    assert "damaged.parquet: cannot be read as parquet" in refusal(tmp_path / "damaged.parquet")


def test_parquet_with_other_columns_is_refused_with_their_names(tmp_path):
    parquet.write_table(pa.table({"text": ["Hi"], "label": [1]}), tmp_path / "other.parquet")
    assert "none of its columns (text, label) holds conversations; expected conversations," in refusal(
        tmp_path / "other.parquet"
    )


def test_broken_rows_of_a_parquet_file_are_named_and_the_others_are_read(tmp_path):
    broken = [
        {"id": "null", "conversations": None},
        {"id": "mute", "conversations": [HUMAN]},
        {"id": "nobody", "conversations": [{"from": None, "value": "Hi"}]},
        {"id": "empty", "conversations": []},
    ]
    parquet.write_table(pa.Table.from_pylist([*GOOD[:1], *broken, *GOOD[1:]]), tmp_path / "mixed.parquet")
    conversations, dropped = load_conversations([str(tmp_path / "mixed.parquet")])
    assert [conversation.id for conversation in conversations] == ["good-0", "good-1", "good-2"]
    assert dropped.total == 4 and "mixed.parquet record 4: unknown speaker None" in dropped.examples


def test_tokens_of_another_tokenizer_or_template_are_named_or_refused(tokenizer, tmp_path):
    good, foreign = parse(GOOD[0], 1), parse(GOOD[1], 2)
    foreign = type(foreign)(
        foreign.id, foreign.messages, RecordedTokens(array("i", [1]), array("b", [1]), "other", "other")
    )
    assert tokenise([good, foreign], tokenizer, "vicuna_v1.1", 99, str(tmp_path))["id"] == ["good-0"]
    with pytest.raises(ValueError, match="its tokens were written with another tokenizer: use that one, or remove"):
        tokenise([foreign], tokenizer, "vicuna_v1.1", 99, str(tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_hidden_states_that_are_not_finite_are_refused(dtype, value):
    with pytest.raises(ValueError, match="hidden states are not finite"):
        pack(torch.tensor([[0.0, value]]), dtype)


def test_a_truncated_or_missing_shard_of_a_feature_store_is_refused(tmp_path):
    ids = torch.tensor([5, 6])
    row = {"id": "a", "input_ids": ids, "loss_mask": ids > 5, "labels": ids, "hidden": torch.zeros(2, 4)}
    shard = write_shard(tmp_path / "shard.safetensors", [b"k" * 16], [row], (-1,), "float32")
    named = dict.fromkeys(["base", "base_dtype", "base_hash", "tokenizer", "template", "template_name", "rows"], "")
    sizes = {"max_length": 9, "hidden_size": 4, "num_rows": 1, "num_tokens": 2, "shard_bytes": 99}
    manifest = Manifest(**named, **sizes, layers=(-1,), dtype="float32", shards=(shard,), is_complete=True)
    manifest.save(tmp_path)
    assert len(FeatureStore(tmp_path).manifest.shards) == 1
    whole = (tmp_path / "shard.safetensors").read_bytes()
    (tmp_path / "shard.safetensors").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"shard\.safetensors is not of the size in the manifest"):
        FeatureStore(tmp_path)
    (tmp_path / "shard.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard\.safetensors is missing"):
        FeatureStore(tmp_path)


def test_the_summary_of_dropped_records_is_short_however_many_they_are():
    dropped = Dropped()
    for number in range(5000):
        dropped.add(f"unknown speaker 'nobody-{number}'", f"record {number}")
    dropped.add("no turns", "record 5000")
    assert dropped.total == 5001
    assert "4989 for other reasons" in str(dropped) and len(str(dropped).splitlines()) < 50
