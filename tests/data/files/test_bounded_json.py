"""JSON from files that may be damaged or hostile: read within bounds, or refused with the file and the line."""

import gzip
import json
import os

import pytest

from data import files as regular
from data.files import MAX_DEPTH, parse_json, read_json, read_json_lines, validated

REFUSED = {
    "half an object": (b'{"a": [1,', "invalid JSON"),
    "nesting that ends Python's recursion": (b"[" * 100_000, "nested too deeply"),
    "nesting that Python still reads": (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested too deeply"),
    "nesting of objects": (b'{"a":' * 200 + b"1" + b"}" * 200, "nested too deeply"),
    "a repeated key": (b'{"a": 1, "a": 2}', "the key 'a' occurs twice"),
    "half of a surrogate pair": (b'["\\ud800"]', "half of a surrogate pair"),
    "half of a surrogate pair in a key": (b'{"\\uDFFF": 1}', "half of a surrogate pair"),
    "a whole number beyond 64 bits": (b"[%d]" % (1 << 63), "a number beyond 64 bits"),
    "a number of 5000 digits": (b"7" * 5000, "a number of thousands of digits"),
    "a number beyond the floats": (b"[1e999]", "a number beyond 64 bits"),
    "bytes that are not UTF-8": (b'["\xff"]', "not UTF-8"),
    "nothing": (b"", "invalid JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_text_is_refused_with_its_file_and_line(tmp_path, name):
    text, reason = REFUSED[name]
    path = tmp_path / "hostile.jsonl"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=f"hostile.jsonl.*{reason}"):
        read_json(path)
    path.write_bytes(b"[1]\n\n" + text + b"\n")
    lines = read_json_lines(path)
    assert next(lines) == (f"{path} line 1", [1])
    if text:
        with pytest.raises(ValueError, match=f"hostile.jsonl line 3: .*{reason}"):
            next(lines)


VALUES = [
    *(None, 1, -(1 << 63), 1.5e300, "é\u2028\U0001f600", "\\ud800 is no escape", [[]] * 300, {"a": {"b": [1]}}),
    json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH),
    {"digits in a text": "1" * 5000},
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
@pytest.mark.parametrize("ascii_only", [True, False])
def test_what_python_writes_is_read_back(value, ascii_only):
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


def test_several_records_are_checked_by_their_reader():
    assert parse_json(b'["\\ud800", 12345678901234567890]', strict=False) == ["\ud800", 12345678901234567890]


def test_gzip_files_are_read_and_damaged_ones_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    whole = gzip.compress(
        b"".join(b'{"row": %d, "text": "%s"}\n' % (n, os.urandom(40).hex().encode()) for n in range(999))
    )
    path.write_bytes(whole)
    assert [row["row"] for _, row in read_json_lines(path)] == list(range(999))
    for damaged in (whole[:-9], whole[:9999] + b"\xff" * 99 + whole[9999:], b"[1]\n"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"rows.jsonl.gz"):
            list(read_json_lines(path))


def test_a_decompression_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(regular, "MIN_BOMB_BYTES", 1 << 20)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b"[" + b" " * (1 << 23) + b"]"))
    with pytest.raises(ValueError, match=r"bomb.jsonl.gz: a decompression bomb"):
        list(read_json_lines(path))
    with pytest.raises(ValueError, match=r"bomb.jsonl.gz: a decompression bomb"):
        read_json(path)


def test_long_lines_and_large_files_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "long.jsonl"
    path.write_text("[1]\n[" + "2, " * 1000 + "2]\n[3]\n")
    assert [line is None for line in regular.read_lines(path, 100)] == [False, True, False]
    with pytest.raises(ValueError, match=r"long.jsonl: more than"):
        read_json(path, max_bytes=1000)


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, problem in (
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path, "a folder"),
        ("/dev/zero", "not a regular"),
    ):
        for read in (read_json, lambda path: list(read_json_lines(path)), regular.read_document):
            with pytest.raises(ValueError, match=problem):
                read(path)
    with pytest.raises(ValueError, match="no such file"):
        read_json(tmp_path / ("x" * 300))
    with pytest.raises(ValueError, match="pipe is not a regular file"):
        regular.check_folder(tmp_path)


def test_the_types_of_values_are_checked():
    assert validated(tuple[int, ...], [1, 2]) == (1, 2)
    with pytest.raises(ValueError, match=r"^1: .*integer"):
        validated(list[int], [1, None])
