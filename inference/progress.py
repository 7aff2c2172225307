"""Progress of long commands on standard error: bars on a terminal, or a line a minute in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from data.files import SafeConsole

SECONDS_PER_LOG_LINE = 60.0


def progress_bars(unit: Literal["items", "percent"] = "items", transient: bool = False) -> Progress:
    """Rich progress bars with a description, the amount done and the time left; nothing if stderr is no terminal.

    To be used as a context manager, with `Progress.track` or `Progress.add_task` and `Progress.advance`.

    Args:
        unit: Whether the amount done is shown as items of a total or in percent.
        transient: Whether the bars disappear when they are done.
    """
    done: ProgressColumn = MofNCompleteColumn() if unit == "items" else TaskProgressColumn()
    return _progress(done, TimeRemainingColumn(), transient=transient)


@contextmanager
def throughput_bar(title: str, total: int) -> Iterator[Callable[[int, int, int], None]]:
    """Show how many answers are done, the tokens per second and the time left.

    If standard error is not a terminal, a line with the same numbers is printed once a minute.

    Args:
        title: What is being done.
        total: Number of answers.

    Yields:
        A function to call with the number of answers that are done, how many of these were written now rather than
        read from a journal, and the number of tokens that were written now.
    """
    is_terminal = sys.stderr.isatty()
    with _progress(MofNCompleteColumn(), TextColumn("{task.fields[rate]}", markup=False)) as bars:
        task = bars.add_task(title, total=total, rate="")
        start = last_line = time.monotonic()
        done = new = tokens = 0

        def advance(num_done: int, num_new: int, num_tokens: int) -> None:
            nonlocal done, new, tokens, last_line
            done, new, tokens = done + num_done, new + num_new, tokens + num_tokens
            now = time.monotonic()
            left = timedelta(seconds=round((total - done) * (now - start) / new)) if new else "?"
            rate = f"{tokens / max(now - start, 1e-9):,.0f} tokens/s, {left} left"
            bars.update(task, completed=done, rate=rate)
            if not is_terminal and now - last_line >= SECONDS_PER_LOG_LINE:
                last_line = now
                print(f"{title}: {done:,} of {total:,}, {rate}", file=sys.stderr, flush=True)

        yield advance


def _progress(*columns: ProgressColumn, transient: bool = False) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *columns,
        console=SafeConsole(stderr=True),
        transient=transient,
        disable=not sys.stderr.isatty(),
    )
