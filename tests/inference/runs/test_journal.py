import json

import pytest

from inference.runs.journal import Journal

WORK = {"format": 1, "name": "näme"}
LINES = [[0, "a\nb"], {"x": [1, 2]}, 3]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "deep" / "journal"
    with Journal(path, WORK) as journal:
        for line in LINES:
            journal.append(line)
    return path


def test_what_was_appended_is_read_back(path):
    with Journal(path, WORK) as journal:
        assert list(journal) == LINES
        journal.append("more")
    with Journal(path, WORK) as journal:
        assert list(journal) == [*LINES, "more"]


def test_a_file_cut_at_any_byte_gives_its_whole_lines_and_goes_on(path):
    content = path.read_bytes()
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        num_whole = max(0, content[:length].count(b"\n") - 1)
        with Journal(path, WORK) as journal:
            assert list(journal) == LINES[:num_whole]
            for line in LINES[num_whole:]:
                journal.append(line)
        assert path.read_bytes() == content


def test_another_work_is_refused_in_one_line_or_begun_anew(path):
    with pytest.raises(ValueError, match=r"was begun with name 'näme', not 'other': repeat that command") as error:
        Journal(path, WORK | {"name": "other"})
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"was begun with other questions: repeat .* begin anew, or another --out$"):
        Journal(path, WORK | {"questions": {"embedded": "bc5f"}})
    with Journal(path, WORK, is_anew=True) as journal:
        assert list(journal) == LINES
    with Journal(path, WORK | {"name": "other"}, is_anew=True) as journal:
        assert list(journal) == []
    assert [json.loads(line) for line in path.read_text().splitlines()] == [WORK | {"name": "other"}]


def test_a_damaged_line_in_the_middle_is_named(path):
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"{oops", *lines[2:]]))
    with Journal(path, WORK) as journal, pytest.raises(ValueError, match="line 2 is damaged: delete the file"):
        list(journal)
