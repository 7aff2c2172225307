"""Documents are read from text files and from records of JSON."""

import gzip
import json

import pytest

from data.texts import read_texts


def write(path, *lines):
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def records(path, *rows):
    return write(path, *map(json.dumps, rows))


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
        ({"instruction": "w3", "output": "w4"}, ["w3", "w4"]),
        ({"instruction": "w3", "input": "w4", "response": "w5", "history": []}, ["w3", "w4", "w5"]),
        ({"id": 1, "history": [{"user": "w3", "bot": "w4"}, {"user": "w5", "bot": "w6"}]}, ["w3", "w4", "w5", "w6"]),
    ],
)
def test_the_documents_of_a_record_are_its_parts(tmp_path, record, texts):
    lines = records(tmp_path / "a.jsonl", record, record)
    listed = write(tmp_path / "b.json", json.dumps([record], indent=1))
    with gzip.open(tmp_path / "c.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.write("\n\n" + json.dumps(record) + "\n")
    assert list(read_texts([lines])) == 2 * texts
    assert list(read_texts([listed, str(tmp_path / "c.jsonl.gz")])) == 2 * texts


def test_blank_lines_separate_the_documents_of_a_text(tmp_path):
    file = write(tmp_path / "a.txt", "", "w3 ünicode", "w4\u2028w5", " ", "", "w6", "")
    assert list(read_texts([file])) == ["w3 ünicode\nw4\u2028w5\n", "w6\n"]
    assert list(read_texts([write(tmp_path / "b.py", "w3")])) == ["w3"]
    assert list(read_texts([write(tmp_path / "c.txt", "")])) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: invalid JSON"),
        ("[1]", "line 2: not a JSON object"),
        ('{"txt": "w3"}', "line 2: no text; expected a field `text`"),
        ('{"text": 3}', "line 2: no text"),
        ('{"question": "w3"}', "line 2: no text"),
        ('{"question": "w3", "answer": null}', "line 2: no text"),
        ('{"conversations": ["w3"]}', "line 2: no text"),
        ('{"conversations": "w3"}', "line 2: no text"),
        ('{"messages": [{"role": "user"}]}', "line 2: no text"),
        ('{"text": "\\ud800"}', "line 2: not valid Unicode"),
    ],
)
def test_a_broken_record_is_refused_with_its_file_and_line(tmp_path, line, message):
    file = write(tmp_path / "a.jsonl", '{"text": "w3"}', line, '{"text": "w3"}')
    with pytest.raises(ValueError) as caught:
        list(read_texts([file]))
    assert str(caught.value).startswith(f"{file} {message}") and "\n" not in str(caught.value)


def test_broken_files_are_refused_by_name(tmp_path):
    latin, cut = tmp_path / "a.txt", tmp_path / "a.jsonl.gz"
    latin.write_bytes(b"w3\nGr\xfc\xdfe\n")
    cut.write_bytes(gzip.compress(b'{"text": "w3"}\n' * 99)[:-9])
    for file, message in [
        (str(latin), "line 2: not UTF-8"),
        (str(cut), "Compressed file ended"),
        (write(tmp_path / "a.json", '{"text": "w3"}'), "expected a list of records"),
        (write(tmp_path / "b.json", "[", "{]"), "line 2: invalid JSON"),
        (write(tmp_path / "c.json", '[{"text": "w3"}, {}]'), "record 2: no text"),
        (str(tmp_path), "no text file at"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            list(read_texts([file]))
        assert file in str(caught.value)
