"""One command makes every table about the CTC drafter, part by part, and continues where it was stopped."""

import json

import pytest

from benchmarks.ctc import every_table
from benchmarks.ctc.every_table import Part


def arguments(folder, **others):
    return {
        "out": str(folder),
        "seeds": [0],
        "steps": 10,
        "limit": 1,
        "conversations": 8,
        "groups": ["bias"],
        "only": ["tiny-features", "tiny-bias", "tiny-live"],
        **others,
    }


@pytest.mark.slow
def test_the_parts_run_one_after_another_and_only_once(tmp_path, repository, monkeypatch, capfd):
    monkeypatch.chdir(repository)  # where checkpoints/tiny-chat is
    folder = tmp_path / "tables"
    every_table.every_table(**arguments(folder))
    page = (folder / "tables.md").read_text()
    assert page.startswith("All parts took 0.0 hours, with OMP_NUM_THREADS=1.")
    assert [line[2:] for line in page.splitlines() if line.startswith("# tiny")] == [
        "tiny-features",
        "tiny-bias",
        "tiny-live",
    ]
    assert "| ctc_fused_base | prefix |" in page and "python -m benchmarks.learned_drafters --base" in page
    assert "ctc_fused_base/seed0/drafter:num_nodes=16" in page, "the drafters that were trained are decoded with"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    every_table.every_table(**arguments(folder))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    with pytest.raises(ValueError, match="tiny-bias was made by another command, see"):
        every_table.every_table(**arguments(folder, steps=11))


def test_a_part_that_fails_keeps_its_time_and_runs_again(tmp_path):
    part = Part("missing", "benchmarks.no_such_module", [])
    for _ in range(2):
        with pytest.raises(ValueError, match="missing failed with exit code 1: see above, then run the same command"):
            every_table.run(part, tmp_path, 1)
    known = json.loads((tmp_path / "parts" / "missing.json").read_text())
    assert known["seconds"] > 0 and not known["is_done"]
    assert every_table.page([part], tmp_path, 1) == "All parts took 0.0 hours, with OMP_NUM_THREADS=1.\n"


def test_commands_are_shown_as_a_user_types_them():
    assert Part("a", "drafters", ["eval", "--base", "a b"]).command == "drafters eval --base 'a b'"
    assert Part("a", "benchmarks.ctc.loss_memory", []).command == "python -m benchmarks.ctc.loss_memory"


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"groups": ["nonsense"]}, "unknown groups nonsense: known are drafters"),
        ({"only": ["nonsense"]}, "unknown parts nonsense: known are loss_memory"),
        ({"gsm_base": "gsm-chat-7m"}, "give both --gsm_base and --gsm8k, or neither"),
    ],
)
def test_mistakes_are_named(tmp_path, others, message):
    with pytest.raises(ValueError, match=message):
        every_table.every_table(**arguments(tmp_path, **others))
