"""What the commands that read plain text share."""

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
def test_what_is_made_follows_the_umask_and_so_does_what_replaces_it(command, mask, tokenizer, text, tmp_path):
    arguments = [command, str(tmp_path / "new" / "out"), "--tokenizer", tokenizer, "--files", text]
    before = os.umask(mask)
    try:
        for more in ([], ["--overwrite"]):
            main([*arguments, *more])
            assert stat.S_IMODE((tmp_path / "new" / "out").stat().st_mode) == 0o666 & ~mask
    finally:
        os.umask(before)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_all_characters_of_all_documents_are_told_of(toy_tokenizer, text, monkeypatch):
    monkeypatch.setattr("inference.indexes.documents.BATCH", 40)
    told = []
    found = list(encoded([text, text], toy_tokenizer, told.append))
    assert found == [[3, 4, 5, 6, 7]] * 18
    assert told == [45] * 6  # three paragraphs of fifteen characters, where two do not fill a batch


def test_the_first_bar_is_full_once_the_work_begins(text, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress([text], "sort", 4) as (read, done):
        read(10)
        done(2)
    shown = capsys.readouterr().err
    assert "100%" in shown and "50%" in shown
