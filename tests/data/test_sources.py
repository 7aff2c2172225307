"""Rows and documents are read from every kind of file; what is broken is named in one line."""

import gzip
import json
import os
import re

import pyarrow as pa
import pytest
from datasets.packaged_modules.json.json import Json
from pyarrow import parquet

from data.conversations import load_conversations, read_texts
from data.sources import read_rows
from tests import conftest

HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}
GOOD = [{"id": f"good-{n}", "conversations": [HUMAN, GPT]} for n in range(3)]
LINES = [json.dumps(record).encode() for record in GOOD]
TABLE = pa.Table.from_pylist(GOOD)


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        content = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return str(path)

    return write


def refusal(source, read=read_rows):
    said = conftest.refusal(lambda: list(read(source)))
    assert len(said) < 600
    return said


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("list.json", json.dumps(GOOD)),
        ("list.json.gz", json.dumps(GOOD)),
        ("object.json", json.dumps({"version": 1, "data": GOOD})),
        ("marked.json", b"\xef\xbb\xbf" + json.dumps(GOOD).encode()),
        ("lines.jsonl", b"\n\n  \n" + b"\r\n".join(LINES) + b"\n"),
        ("marked.jsonl", b"\xef\xbb\xbf" + b"\n".join(LINES)),
        ("lines.jsonl.gz", b"\n".join(LINES)),
        ("another name", b"\n".join(LINES)),
    ],
)
def test_every_kind_of_file_is_read(write, name, content):
    rows = list(read_rows(write(name, content)))
    assert [row for _, row in rows] == GOOD and rows[1][0] in ("record 2", "line 2", "line 5")


def test_the_embedded_corpus_is_read_by_name():
    assert [row["id"] for _, row in read_rows("embedded:3:9")] == ["embedded-0-9", "embedded-0-10", "embedded-0-11"]
    assert list(read_rows("embedded:5")) == list(read_rows("embedded:9:0"))[:5]
    assert "has 4,000 conversations" in refusal("embedded:4001") and len(list(read_rows("embedded:1:3999"))) == 1
    assert "embedded:COUNT" in refusal("embedded:many") and "embedded:COUNT" in refusal("embedded:1:2:3")


def test_the_embedded_corpus_has_as_many_conversations_as_the_recipes_name():
    for config in (conftest.ROOT / "configs").glob("*.yaml"):
        for source in re.findall(r"embedded:\d+", config.read_text()):
            assert len(list(read_rows(source))) == int(source.partition(":")[2])


def test_json_lines_are_read_one_at_a_time(write, tmp_path):
    file = write("long.jsonl", b"\n".join(LINES) + b"\n" + b"x" * 1000)
    found = read_rows(file)
    assert next(found)[0] == "line 1"
    (tmp_path / "long.jsonl").write_bytes(b"")  # what is read ahead is a buffer, not the file
    assert len(list(found)) == 3


def test_a_data_set_of_the_hub_is_read_from_the_local_cache(tmp_path, monkeypatch):
    from datasets import config

    written = tmp_path / "talk.jsonl"
    written.write_bytes(b"\n".join(LINES))
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    builder = Json(dataset_name="talk", hash="0", data_files={"train": [str(written)]})
    builder.download_and_prepare()
    (tmp_path / "cache" / "someone___talk").mkdir()
    (tmp_path / "cache" / "talk" / builder.config_id).rename(tmp_path / "cache" / "someone___talk" / "default")
    for source in ("hub:someone/talk", "hub:someone/talk:train", "hub:someone/talk:default:train"):
        assert [row["id"] for _, row in read_rows(source)] == ["good-0", "good-1", "good-2"]
    assert 'cannot be loaded from the hub (Unknown split "test"' in refusal("hub:someone/talk:test")


def test_a_file_of_the_hub_is_read_from_the_local_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder, commit = tmp_path / "datasets--someone--talk", "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit / "raw").mkdir(parents=True)
    (folder / "snapshots" / commit / "raw" / "a.jsonl").write_bytes(LINES[0])
    for source in ("hub:someone/talk/raw/a.jsonl", f"hub:someone/talk@{commit}/raw/a.jsonl"):
        assert list(read_rows(source)) == [("line 1", GOOD[0])]


MALFORMED = ["hub:", "hub:talk", "hub:someone/", "hub:someone/talk:", "hub:someone/talk:a:b:c", "hub:a/b/c.json:train"]


@pytest.mark.parametrize("source", [*MALFORMED, "hub:someone/nothing", "hub:a/b:test", "hub:a/b@main/c.json"])
def test_a_source_missing_on_the_hub_is_refused_in_one_line(source):
    said = "expected hub:OWNER/NAME" if source in MALFORMED else f"{source}: cannot be loaded from the hub ("
    assert said in refusal(source)


ZIPPED = gzip.compress(b"\n".join(os.urandom(300).hex().encode() for _ in range(2000)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.json", b" \n", "empty.json line 2: invalid JSON"),
        ("empty.jsonl", b"", "empty.jsonl: the file is empty; fetch the file again"),
        ("cut.json", json.dumps(GOOD, indent=1).encode()[:-60], "cut.json line 34: invalid JSON"),
        ("lists.json", b'{"a": [], "b": []}', "lists.json: expected a list of records"),
        ("false.parquet", b"\n".join(LINES), "false.parquet: Parquet magic bytes not found"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(write, name, content, message):
    assert message in refusal(write(name, content))


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "damaged.jsonl.gz", "cut.json.gz", "cut.parquet", "damaged.parquet"])
def test_a_truncated_or_damaged_file_is_refused_by_name(tmp_path, name):
    whole = ZIPPED
    if "parquet" in name:
        parquet.write_table(TABLE, tmp_path / name, write_page_checksum=False)
        whole = (tmp_path / name).read_bytes()
    damaged = whole[: len(whole) // 2] if "cut" in name else whole[:10] + b"\xff" * 190 + whole[200:]
    (tmp_path / name).write_bytes(damaged)
    assert f"{tmp_path / name}: " in refusal(str(tmp_path / name))


def test_what_is_no_file_is_refused_with_advice(tmp_path):
    (tmp_path / "real.jsonl").write_bytes(b"\n".join(LINES))
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    assert len(list(read_rows(str(tmp_path / "link.jsonl")))) == 3
    assert "a folder; give the files in it" in refusal(str(tmp_path))
    assert "no such file; give the path of one" in refusal(str(tmp_path / "nowhere.jsonl"))
    assert "for a data set of the hub write hub:someone/talk" in refusal("someone/talk")


def test_a_broken_line_is_named_and_the_others_are_read(write):
    lines = [LINES[0], LINES[0][:40], *LINES[1:], b"[" * 100_000]
    conversations, dropped = load_conversations([write("mixed.jsonl", b"\n".join(lines))])
    assert [each.id for each in conversations] == ["good-0", "good-1", "good-2"]
    assert [line.partition(": ")[0] for line in dropped.examples] == ["mixed.jsonl line 2", "mixed.jsonl line 5"]


TURNS = [{"from": "human", "value": "w3 w4"}, {"from": "gpt", "value": "w5"}]
MESSAGES = [{"role": "user", "content": "w6"}, {"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("record", "texts"),
    [
        ({"text": "w3\n\nw4"}, ["w3\n\nw4"]),
        ({"text": " "}, []),
        ({"text": "w3", "id": 4, "meta": None}, ["w3"]),
        ({"conversations": TURNS}, ["w3 w4", "w5"]),
        ({"id": 1, "messages": MESSAGES}, ["w6"]),
        ({"question": "w7?", "answer": "w8\u2028w9"}, ["w7?", "w8\u2028w9"]),
        ({"instruction": "w3", "input": "", "output": "w4"}, ["w3", "w4"]),
        ({"prompt": MESSAGES[:1], "completion": "w4", "context": "w5"}, ["w6", "w4"]),
        ({"instruction": "w3", "input": "w4", "response": "w5", "history": []}, ["w3\n\nw4", "w5"]),
    ],
)
def test_the_documents_of_a_record_are_its_parts(write, tmp_path, record, texts):
    files = [write("a.jsonl", json.dumps(record)), write("b.json", json.dumps([record], indent=1))]
    files += [
        write("e.NDJSON", json.dumps(record)),
        write("c.jsonl.gz", "\n\n" + json.dumps(record) + "\n"),
        str(tmp_path / "d.parquet"),
    ]
    parquet.write_table(pa.Table.from_pylist([record]), files[-1])
    assert list(read_texts(files)) == 5 * texts


def test_blank_lines_separate_the_documents_of_a_text(write):
    files = [
        write("a.txt", "\ufeffw2\r\n\nw3 ünicode\nw4\u2028w5\n \n\nw6\r\n"),
        write("b.py", "w3"),
        write("c.txt.gz", ""),
    ]
    assert list(read_texts(files)) == ["w2\n", "w3 ünicode\nw4\u2028w5\n", "w6\n", "w3"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "invalid JSON"),
        ("[1]", "not a JSON object"),
        ('{"text": 3}', "`text` is not a text"),
        ('{"text": null}', "`text` is not a text"),
        ('{"text": "w4 \\ud83d"}', "a text holds half of a character"),
        ('{"conversations": "w3"}', "no turns"),
        ('{"messages": [{"role": "user"}]}', "a turn has no text"),
    ],
)
def test_a_record_without_text_is_counted_and_named_and_the_others_are_read(write, line, message, caplog):
    file = write("a.jsonl", f'{{"text": "w3"}}\n{line}\n{{"text": "w4"}}')
    assert list(read_texts([file])) == ["w3", "w4"]
    assert "dropped 1 records" in caplog.text and f"a.jsonl line 2: {message}" in caplog.text


def test_texts_that_cannot_be_read_are_refused_by_name(write, tmp_path):
    latin = write("a.txt", b"w3\nGr\xfc\xdfe\n")
    assert f"{latin} line 2: not UTF-8" in refusal([latin], read_texts)
    assert "no text file at" in refusal([str(tmp_path)], read_texts) and "no text file:" in refusal([], read_texts)
