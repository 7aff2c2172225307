"""One command makes every table about the CTC drafter, part by part, and continues where it was stopped."""

import json
import subprocess
import sys
import time

import pytest

from benchmarks.ctc import every_table
from benchmarks.ctc.every_table import Part
from benchmarks.learned_drafters import GROUPS

TRAININGS = [f"tiny-10-{arm}-seed0" for arm in GROUPS["best_long"]]
TABLES = ["tiny-best_long", "tiny-curves", "tiny-alignments", "tiny-live", "tiny-table2"]


def arguments(folder, **others):
    return {
        "out": str(folder),
        "seeds": [0],
        "steps": 10,
        "curve_steps": [10],
        "limit": 1,
        "conversations": 8,
        "only": ["tiny-features", *TRAININGS, *TABLES],
        "processes": 2,
        **others,
    }


@pytest.mark.slow
def test_all_parts_run_and_only_once(tmp_path, repository, monkeypatch):
    monkeypatch.chdir(repository)  # where checkpoints/tiny-chat is
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # threads that wait leave the cores to the other tests
    folder = tmp_path / "tables"
    every_table.every_table(**arguments(folder))
    page = (folder / "tables.md").read_text()
    assert page.startswith("13 of 16 parts are done.")
    shown = [line[2:] for line in page.splitlines() if line.startswith("# tiny")]
    assert shown == ["tiny-features", *TABLES]
    assert "| ctc_10_8_muon | prefix |" in page and "python -m benchmarks.learned_drafters --base" in page
    assert "ctc_10_8_muon/seed0/drafter:num_nodes=16" in page, "the drafters that were trained are decoded with"
    assert (folder / "plots" / "tiny-curves.png").exists()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    every_table.every_table(**arguments(folder))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    with pytest.raises(ValueError, match="tiny-10-medusa-seed0 was made by another command, see"):
        every_table.every_table(**arguments(folder, limit=2))


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A module that notes when it began and ended, and fails if it is told so."""
    (tmp_path / "noting.py").write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "name, seconds, code = sys.argv[1:]\n"
        "with Path(__file__).with_name('times.txt').open('a') as times:\n"
        "    print(name, 'begins', file=times, flush=True)\n"
        "    time.sleep(float(seconds))\n"
        "    print(name, 'ends', file=times)\n"
        "sys.exit(int(code))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "parts").mkdir()

    def part(name, seconds=0.0, code=0, **others):
        return Part(name, "noting", [name, str(seconds), str(code)], **others)

    return part


def events(folder):
    return (folder / "times.txt").read_text().splitlines()


def test_a_part_waits_for_those_that_it_needs_and_what_measures_time_runs_alone(tmp_path, program):
    parts = [
        program("measures", runs_alone=True),
        program("first", 0.5),
        program("second", needs=["first"]),
        program("third", 4.0),
    ]
    every_table.run(parts, tmp_path, processes=2)
    order = events(tmp_path)
    assert sorted(order[:2]) == ["first begins", "third begins"]
    assert order.index("first ends") < order.index("second begins") < order.index("third ends")
    assert order[-2:] == ["measures begins", "measures ends"]
    (tmp_path / "times.txt").unlink()
    for part in parts:
        every_table.record_path(part.name, tmp_path).unlink()
    every_table.run(parts, tmp_path, processes=1)
    assert [line.split()[0] for line in events(tmp_path)[::2]] == ["first", "second", "third", "measures"]


def test_what_needs_a_failed_part_is_left_out_and_the_others_run(tmp_path, program):
    parts = [
        program("failing", code=1),
        program("after", needs=["failing"]),
        program("later", needs=["after"]),
        program("other", 0.5),
    ]
    for attempt in (1, 2):
        with pytest.raises(ValueError, match=r"these parts failed: failing \(see .*failing\.log\); run the same"):
            every_table.run(parts, tmp_path, processes=1)
        assert [line for line in events(tmp_path) if "begins" in line].count("failing begins") == attempt
    assert events(tmp_path).count("other ends") == 1 and not any("after" in line for line in events(tmp_path))
    known = json.loads((tmp_path / "parts" / "failing.json").read_text())
    assert known["seconds"] > 0 and not known["is_done"]
    assert every_table.page(parts, tmp_path).startswith("1 of 4 parts are done. The time of all parts adds up to 0.0 ")
    with pytest.raises(ValueError, match="later needs after, which is not done: add it to --only"):
        every_table.run(parts[2:], tmp_path, processes=1)


RUN_A_LONG_PART = """
import sys
from pathlib import Path
from benchmarks.ctc.every_table import Part, run
run([Part("long", "noting", ["long", "60", "0"])], Path(sys.argv[1]), 1)
"""


@pytest.mark.slow
def test_a_signal_stops_the_command_that_is_running_and_keeps_its_time(tmp_path, program, repository, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{repository}")
    run = subprocess.Popen([sys.executable, "-c", RUN_A_LONG_PART, str(tmp_path)])
    while not (tmp_path / "times.txt").exists():
        assert run.poll() is None
        time.sleep(0.1)
    run.terminate()
    assert run.wait(timeout=30) == 143
    known = json.loads((tmp_path / "parts" / "long.json").read_text())
    assert 0 < known["seconds"] < 60 and not known["is_done"], "it was waited for, so it has ended"
    assert events(tmp_path) == ["long begins"]


def test_commands_are_shown_as_a_user_types_them():
    assert Part("a", "drafters", ["eval", "--base", "a b"]).command == "drafters eval --base 'a b'"
    assert Part("a", "benchmarks.ctc.loss_memory", []).command == "python -m benchmarks.ctc.loss_memory"


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"ablations": ["nonsense"]}, "unknown groups nonsense: known are drafters"),
        ({"only": ["nonsense"]}, "unknown parts nonsense: known are tiny-features"),
        ({"processes": 0}, "--processes must be at least 1, and --seeds and --curve_steps must not be empty"),
        ({"seeds": []}, "--processes must be at least 1, and --seeds and --curve_steps must not be empty"),
        ({"gsm_base": "gsm-chat-7m"}, "give both --gsm_base and --gsm8k, or neither"),
    ],
)
def test_mistakes_are_named(tmp_path, others, message):
    with pytest.raises(ValueError, match=message):
        every_table.every_table(**arguments(tmp_path, **others))
