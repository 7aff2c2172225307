"""Servers that really run, asked in turns; and files of servers that name none."""

import json
import sys
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree

import pytest

from benchmarks import engines
from benchmarks.engines import Timed

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "checkpoints" / "tiny-chat")
SERVE = f"exec {sys.executable} -c 'from train.cli import run_drafters as run; run()' serve --base {BASE} --port $PORT"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A folder with the comparison of two servers, and what was printed."""
    folder, printed = tmp_path_factory.mktemp("compared"), StringIO()
    lines = "# two", f"here: {SERVE} --drafter none", f"here + joint: {SERVE} --drafter joint", "other: $NOT_SET $PORT"
    (folder / "servers.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setattr(engines, "REST_SECONDS", 0)
        engines.engines(BASE, "servers.txt", limit=2, max_new_tokens=16, out="out.md")
    return folder, printed.getvalue()


def test_two_servers_write_the_same_answers(compared):
    folder, printed = compared
    assert "other is left out: NOT_SET is not set" in printed
    rows = [line.split(" | ") for line in (folder / "out.md").read_text().splitlines() if line.startswith("| here")]
    assert [row[0] for row in rows] == ["| here", "| here + joint"]
    assert rows[0][2] == "1.00" and rows[1][-1] == "2 of 2 |"


def test_a_comparison_that_was_cut_off_starts_only_the_server_whose_answers_are_missing(
    compared, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    copytree(compared[0], tmp_path, dirs_exist_ok=True, ignore=ignore_patterns("runs"))
    file, again = tmp_path / "out.md.jsonl", partial(engines.engines, BASE, "servers.txt", limit=2, out="out.md")
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])  # within the last answer, which `here` wrote, as arms take turns in being first
    again(max_new_tokens=16)
    assert [log.name for log in Path("runs/engines").iterdir()] == ["here.log"]
    before, after = ([json.loads(line) for line in text.splitlines()] for text in (whole, file.read_bytes()))
    assert after[:-1] == before[:-1] and after[-1] != before[-1]
    assert after[-1][:3] == ["embedded", "here", 1] and after[-1][3][0] == before[-1][3][0]  # the text is the same

    rmtree("runs")
    again(max_new_tokens=16)
    assert not Path("runs").exists() and json.loads(file.read_bytes().splitlines()[-1]) == after[-1]
    with pytest.raises(ValueError, match="started with max_new_tokens 16 instead of 8: repeat that command"):
        again(max_new_tokens=8)


def test_a_server_is_another_one_with_another_variable_or_file(tmp_path, monkeypatch):
    command, found = "serve $DRAFTER:num_nodes=7 --port $PORT", []
    for name, content in ("a", "1"), ("b", "1"), ("b", "2"), ("b", "2"):
        (tmp_path / name).write_text(content)
        monkeypatch.setenv("DRAFTER", f"ctc={tmp_path / name}")
        found.append(engines.identity(command))
    assert len({*found}) == 3 and found[2] == found[3]


def test_speeds_are_ratios_of_sums_and_texts_are_compared_within_an_engine():
    answers = {("a", 0): Timed([1, 2], 1.0, 0.5), ("a", 1): Timed([1, 2, 3, 4], 2.0, 0.7)}
    answers |= {("a + b", 0): Timed([1, 2], 0.5, 0.1), ("a + b", 1): Timed([1, 2, 3, 5], 1.0, 0.3)}
    first, second = engines.comparison("t", ["a", "a + b"], answers, 2).rows
    assert first == ["a", "2.0", "1.00", "1.00-1.00", "0.60", ""]
    assert second == ["a + b", "4.0", "2.00", "2.00-2.00", "0.20", "1 of 2"]


@pytest.mark.parametrize(
    ("text", "only", "message"),
    [
        ("here drafters serve", [], "a line is NAME: COMMAND with $PORT in it"),
        ("here: serve --port 80", [], "a line is NAME: COMMAND with $PORT in it"),
        ("here: serve $PORT", ["there"], "knows here"),
        ("here: serve $NOT_SET $PORT", [], "has no server to start"),
    ],
)
def test_a_file_that_starts_nothing_is_refused(text, only, message, tmp_path):
    (tmp_path / "servers.txt").write_text(text)
    with pytest.raises(ValueError, match=message.replace("$", r"\$")):
        engines.read_servers(str(tmp_path / "servers.txt"), only)


def test_a_server_that_ends_at_once_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "servers.txt").write_text("broken: exit 3 # $PORT")
    with pytest.raises(ValueError, match="broken ended with code 3: it names no error; see runs/engines/broken"):
        engines.engines(BASE, "servers.txt", limit=1)
