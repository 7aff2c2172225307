"""A journal holds every completed entry, however its run was interrupted."""

import json

import pytest

from inference.journal import Journal
from tests.conftest import full_disk

SETTINGS = {"format": 1, "name": "näme"}
OTHER = SETTINGS | {"name": "other"}
ENTRIES = [[0, "a\nb"], {"x": [1, 2]}, 3]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "deep" / "journal"
    with Journal(path, SETTINGS) as journal:
        for entry in ENTRIES:
            journal.append(entry)
    return path


def test_a_file_cut_at_any_byte_keeps_its_complete_lines_and_continues(path):
    content = path.read_bytes()
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        num_complete = max(0, content[:length].count(b"\n") - 1)
        with Journal(path, SETTINGS) as journal:
            assert list(journal) == ENTRIES[:num_complete]
            for entry in ENTRIES[num_complete:]:
                journal.append(entry)
        assert path.read_bytes() == content


def test_other_settings_are_refused_in_one_line(path):
    with pytest.raises(
        ValueError, match=r"was started with name 'näme' instead of 'other': repeat that command"
    ) as error:
        Journal(path, OTHER)
    assert "\n" not in str(error.value)
    with pytest.raises(
        ValueError, match=r"was started with different questions: repeat .* start over, or choose another --out$"
    ):
        Journal(path, SETTINGS | {"questions": {"embedded": "bc5f"}})


def test_entries_are_replaced_on_request_by_the_first_new_entry_and_kept_where_it_cannot_be_written(path):
    before = path.read_bytes()
    with Journal(path, SETTINGS, is_replaced=True) as journal:
        assert list(journal) == ENTRIES
    with Journal(path, OTHER, is_replaced=True) as journal:
        assert list(journal) == []
        for num_bytes in (0, 20, len(json.dumps(OTHER)) + 3):  # nothing, half of the settings, the settings alone
            with full_disk(num_bytes), pytest.raises(ValueError, match="what was there before is kept"):
                journal.append("new and long")
            assert path.read_bytes() == before
        journal.append("new")
        journal.append("newer")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [OTHER, "new", "newer"]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_nothing_is_written_before_the_first_entry_and_a_deleted_journal_leaves_no_file(tmp_path):
    with Journal(tmp_path / "deep" / "journal", SETTINGS) as journal:
        assert list(journal) == []
        assert not (tmp_path / "deep").exists()
        journal.append(1)
        assert journal.path.exists()
        journal.delete()
        assert not journal.path.exists() and list(journal) == []


@pytest.mark.parametrize("damaged", ["{oops", '{"n": "x"}'])
def test_a_damaged_line_is_named(path, damaged):
    path.write_text(f'{{"base": "b"}}\n{{"n": 1}}\n{damaged}\n{{"n": 2}}\n')
    entries = Journal(path, {"base": "b"}).entries(lambda entry: entry["n"] + 1)
    assert next(entries) == 2
    with pytest.raises(ValueError, match=r"line 3: .*; delete the file and start over"):
        next(entries)
