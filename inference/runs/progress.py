"""How far a long work is: a bar on a terminal, now and then a line in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

EVERY = 60.0  # seconds between two lines of a log


@contextmanager
def pace(work: str, total: int) -> Iterator[Callable[[int, int, int], None]]:
    """Shows answers done, tokens per second and the time left, on standard error.

    Args:
        work: What is done.
        total: Number of answers.

    Yields:
        What is told of answers that are done, how many of these were made now and not before, and of how many tokens.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
    is_terminal = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=not is_terminal) as bars:
        task = bars.add_task(work, total=total, rate="")
        start = shown = time.monotonic()
        done = new = tokens = 0

        def advance(num_done: int, num_new: int, num_tokens: int) -> None:
            nonlocal done, new, tokens, shown
            done, new, tokens = done + num_done, new + num_new, tokens + num_tokens
            now = time.monotonic()
            left = timedelta(seconds=round((total - done) * (now - start) / new)) if new else "?"
            rate = f"{tokens / max(now - start, 1e-9):,.0f} tokens/s, {left} left"
            bars.update(task, completed=done, rate=rate)
            if not is_terminal and now - shown >= EVERY:
                shown = now
                print(f"{work}: {done:,} of {total:,}, {rate}", file=sys.stderr, flush=True)

        yield advance
