"""Progress on terminals and in logs, fingerprints of files, and checks of output paths."""

import shutil

import pytest
from rich.progress import TaskProgressColumn

from inference.runs import fingerprint, new_file, progress_bars


@pytest.mark.parametrize("done, shown", [(None, "3/3"), (TaskProgressColumn(), "100%")])
def test_a_bar_shows_what_is_done_on_a_terminal_only(capsys, monkeypatch, done, shown):
    for is_terminal in (False, True):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setattr("sys.stderr.isatty", lambda is_terminal=is_terminal: is_terminal)
        with progress_bars(done) as bars:
            assert list(bars.track([1, 2, 3], description="decode")) == [1, 2, 3]
        captured = capsys.readouterr()
        assert ("decode" in captured.err and shown in captured.err) == bool(captured.err) == is_terminal
        assert captured.out == ""


@pytest.fixture
def tick(monkeypatch):
    """Let seconds pass for progress bars; the event loops of servers in this process keep the real clock."""
    now = 0.0

    def tick(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr("rich.console.monotonic", lambda: now)
    return tick


@pytest.mark.parametrize("is_terminal", [False, True])
def test_every_bar_is_a_line_once_a_minute_where_there_is_no_terminal(capsys, monkeypatch, tick, is_terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    with progress_bars(transient=True) as bars:
        task = bars.add_task("mt_bench\x1b", total=1200)
        for _ in range(1200):
            tick(0.125)
            bars.advance(task)
        rest = bars.add_task("others", total=4)
        for seconds in (30, 30, 30, 30):
            tick(seconds)
            bars.advance(rest)
    lines = [
        "mt_bench␛: 480 of 1,200, 0:01:30 left",
        "mt_bench␛: 960 of 1,200, 0:00:30 left",
        "others: 2 of 4, 0:01:00 left",
        "others: 4 of 4, 0:00:00 left",
    ]
    err = capsys.readouterr().err
    assert "480 of" not in err if is_terminal else err.splitlines() == lines


def test_a_copy_has_the_same_fingerprint_and_a_drafter_that_was_trained_again_another_one(tmp_path):
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(5_000_000))
    before = fingerprint(str(folder))
    shutil.copytree(folder, tmp_path / "copy")
    assert fingerprint(str(tmp_path / "copy")) == before
    (folder / "model.safetensors").write_bytes(b"\1" * 5_000_000)
    assert fingerprint(str(folder)) != before
    assert fingerprint("some/hub-id") == fingerprint(None) == ""


def test_an_output_that_is_also_an_input_is_refused_under_any_of_its_names(tmp_path):
    (path := tmp_path / "talk.json").write_text("[]")
    (tmp_path / "linked.json").symlink_to(path)
    (tmp_path / "same.json").hardlink_to(path)
    for out in (path, tmp_path / "linked.json", tmp_path / "same.json", tmp_path / "a" / ".." / "talk.json"):
        (tmp_path / "a").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match="is read by this command: give another name"):
            new_file(str(out), True, ["embedded:4", "hub:owner/name", str(path)])
    assert new_file(str(path), True, ["embedded:4", str(tmp_path / "nothing.json")]) == path
