"""Progress bars on terminals, and lines in logs."""

import pytest

from inference import progress
from inference.progress import progress_bars, throughput_bar


@pytest.mark.parametrize("unit", ["items", "percent"])
def test_without_a_terminal_nothing_is_shown(capsys, unit):
    with progress_bars(unit) as bars:
        assert list(bars.track([1, 2, 3], description="decode")) == [1, 2, 3]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("unit, shown", [("items", "3/3"), ("percent", "100%")])
def test_on_a_terminal_a_bar_shows_what_is_done(capsys, monkeypatch, unit, shown):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_bars(unit) as bars:
        list(bars.track([1, 2, 3], description="decode"))
    captured = capsys.readouterr()
    assert "decode" in captured.err and shown in captured.err and captured.out == ""


def test_a_log_has_a_line_with_the_rate_once_a_minute(capsys, monkeypatch):
    clock = iter([0.0, 30.0, 60.0, 90.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with throughput_bar("regenerate", 10) as advance:
        for _ in range(3):
            advance(1, 1, 600)
    assert capsys.readouterr().err == "regenerate: 2 of 10, 20 tokens/s, 0:04:00 left\n"
