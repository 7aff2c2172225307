"""One command makes every table about the CTC drafter, part by part, and continues where it was stopped."""

import json
import shlex
import subprocess
import sys
import time

import pytest

from benchmarks import every_table, harness, learned_drafters
from benchmarks.every_table import Part
from benchmarks.learned_drafters import GROUPS
from train.cli import run_drafters

TABLES = ["tiny-compared", "tiny-curves", "tiny-table2", "tiny-live"]


def run_here(part, log, record):
    """Run a part in this process, which has imported everything already."""
    program, *words = shlex.split(part.command)
    if program == "drafters":
        run_drafters(words)
    else:
        assert words[:2] == ["-m", "benchmarks.learned_drafters"]
        harness.main(learned_drafters.learned_drafters, words[2:])
    record["is_done"] = True


@pytest.mark.slow
def test_all_parts_run_and_only_once(tmp_path, repository, monkeypatch):
    monkeypatch.chdir(repository)  # where checkpoints/tiny-chat is
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.setattr(every_table, "run_part", run_here)
    for place, key in ((GROUPS, "best_long"), (every_table.CURVES, "tiny")):
        monkeypatch.setitem(place, key, ["medusa", "ctc_10_8_muon"])
    folder = tmp_path / "tables"
    given = {"out": str(folder), "seeds": [0], "steps": 6, "curve_steps": [4, 6], "limit": 1, "conversations": 8}
    every_table.every_table(**given)
    page = (folder / "tables.md").read_text()
    assert page.startswith("5 of 5 parts are done.")
    assert [line[2:] for line in page.splitlines() if line.startswith("# tiny")] == ["tiny-features", *TABLES]
    assert "| ctc_10_8_muon | prefix |" in page and "python -m benchmarks.learned_drafters --base" in page
    assert "ctc_10_8_muon/seed0/drafter:num_nodes=16" in page, "the drafters that were trained are decoded with"
    assert "| ctc_paper | transformer + CTC | CTC |" in page and "| drafter | 4 steps | 6 steps |" in page
    assert (folder / "plots" / "tiny-curves.png").exists()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    every_table.every_table(**given)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    with pytest.raises(ValueError, match="tiny-compared was made by another command, see"):
        every_table.every_table(**given | {"limit": 2})


@pytest.fixture
def program(tmp_path):
    """A part that notes its name, waits, and fails if it is told so."""
    (tmp_path / "noting.py").write_text(
        "import sys, time\n"
        "name, seconds, code = sys.argv[1:]\n"
        f"with open('{tmp_path}/names.txt', 'a') as names:\n"
        "    print(name, file=names)\n"
        "time.sleep(float(seconds))\n"
        "sys.exit(int(code))\n"
    )
    return lambda name, seconds=0, code=0: Part(name, f"python {tmp_path}/noting.py {name} {seconds} {code}")


def test_a_failed_part_stops_the_run_and_is_tried_again(tmp_path, program):
    parts = [program("first"), program("failing", code=1), program("after")]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"failing failed, see .*failing\.log: run the same"):
            every_table.run(parts, tmp_path)
    assert (tmp_path / "names.txt").read_text().split() == ["first", "failing", "failing"]
    known = json.loads((tmp_path / "parts.json").read_text())["failing"]
    assert known["seconds"] > 0 and not known["is_done"]
    page = (tmp_path / "tables.md").read_text()
    assert page.startswith("1 of 3 parts are done. The time of all parts adds up to 0.0 hours.")


@pytest.mark.slow
def test_a_signal_stops_the_command_that_is_running_and_keeps_its_time(tmp_path, program, repository):
    part = program("long", 60)
    script = (
        f"from pathlib import Path; from benchmarks.every_table import Part, run; run([{part!r}], Path('{tmp_path}'))"
    )
    run = subprocess.Popen([sys.executable, "-c", script], cwd=repository)
    while not (tmp_path / "names.txt").exists():
        assert run.poll() is None
        time.sleep(0.1)
    run.terminate()
    assert run.wait(timeout=30) == 143
    known = json.loads((tmp_path / "parts.json").read_text())["long"]
    assert 0 < known["seconds"] < 60 and not known["is_done"], "it was waited for, so it has ended"
