"""Reading and encoding text files, with progress bars."""

import os
import stat

import pytest

from inference.indexes.documents import encoded, progress
from train.cli.commands import main


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("w3 w4 w5 w6 w7\n\n" * 9, encoding="utf-8")
    return str(tmp_path / "a.txt")


@pytest.fixture
def tokenizer(toy_tokenizer, tmp_path):
    toy_tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
@pytest.mark.parametrize("command", ["corpus", "datastore"])
def test_new_and_replaced_files_follow_the_umask(command, mask, tokenizer, text, tmp_path):
    arguments = [command, str(tmp_path / "new" / "out"), "--tokenizer", tokenizer, "--files", text]
    before = os.umask(mask)
    try:
        for more in ([], ["--overwrite"]):
            main([*arguments, *more])
            assert stat.S_IMODE((tmp_path / "new" / "out").stat().st_mode) == 0o666 & ~mask
    finally:
        os.umask(before)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_the_characters_of_all_documents_are_reported(toy_tokenizer, text, monkeypatch):
    monkeypatch.setattr("inference.indexes.documents.BATCH_CHARACTERS", 40)
    reported = []
    found = list(encoded([text, text], toy_tokenizer, reported.append))
    assert found == [[3, 4, 5, 6, 7]] * 18
    assert reported == [45] * 6  # three paragraphs of fifteen characters, where two do not fill a batch


def test_the_bar_for_reading_is_full_once_the_work_begins(text, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress([text], "sort", 4) as (advance, complete):
        advance(10)
        complete(2)
    shown = capsys.readouterr().err
    assert "100%" in shown and "50%" in shown
