"""Servers that really run, asked in turns; and files of servers that name none."""

import sys
from pathlib import Path

import pytest

from benchmarks import engines
from benchmarks.engines import Timed

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "checkpoints" / "tiny-chat")
SERVE = f"exec {sys.executable} -c 'from train.cli import run_drafters as run; run()' serve --base {BASE} --port $PORT"


def test_two_servers_write_the_same_answers(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    lines = "# two", f"here: {SERVE} --drafter none", f"here + joint: {SERVE} --drafter joint", "other: $NOT_SET $PORT"
    (tmp_path / "servers.txt").write_text("\n".join(lines))
    engines.engines(BASE, "servers.txt", limit=2, max_new_tokens=16, out="out.md")
    assert "other is left out: NOT_SET is not set" in capsys.readouterr().out
    rows = [line.split(" | ") for line in (tmp_path / "out.md").read_text().splitlines() if line.startswith("| here")]
    assert [row[0] for row in rows] == ["| here", "| here + joint"]
    assert rows[0][2] == "1.00" and rows[1][-1] == "2 of 2 |"


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
