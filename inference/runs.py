"""What long commands share: checks of output paths, fingerprints of files, and progress on standard error."""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from data.files import SafeConsole

SECONDS_PER_LOG_LINE = 60.0
BLOCK_BYTES, NUM_BLOCKS = 1 << 16, 16  # what is hashed of each file, spread evenly from its beginning to its end


# ---- output paths


def new_file(out: str, overwrite: bool) -> Path:
    """Return the path of a file to write; its folder need not exist yet.

    Raises ValueError if the file exists and must not be replaced, or cannot be created.
    """
    path = Path(out)
    if path.is_dir() or (path.exists() and not overwrite):
        raise ValueError(f"{out} is already there: give another name{'' if path.is_dir() else ', or --overwrite'}")
    folder_above(path)
    return path


def folder_above(path: Path) -> Path:
    """Return the nearest parent folder that exists; raises ValueError if nothing can be created in it."""
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        problem = "is not writable" if parent.is_dir() else "is a file"
        raise ValueError(f"{path} cannot be made: {parent} {problem}; give another name")
    return parent


# ---- identity


def fingerprint(name: str | Path | None) -> str:
    """Hash the names, sizes and samples of the content of a folder's files, or of one file.

    Copies have the same fingerprint; a drafter that was trained again has another one, even under the same name. What
    is no file or folder, such as a hub id or None, has the empty fingerprint.
    """
    path = Path(name or "").expanduser()
    if not name or not path.exists():
        return ""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)} {size}".encode())
        with file.open("rb") as stream:
            for block in range(NUM_BLOCKS):
                stream.seek(max(0, size - BLOCK_BYTES) * block // (NUM_BLOCKS - 1))
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]


# ---- progress


def progress_bars(
    done: ProgressColumn | None = None, rest: ProgressColumn | None = None, transient: bool = False
) -> Progress:
    """Rich progress bars with a description, the amount done and the time left; nothing if stderr is no terminal.

    To be used as a context manager, with `Progress.track` or `Progress.add_task` and `Progress.advance`. Other columns
    may show the amount done, by default items of a total, and the rest; transient bars disappear when they are done.
    """
    title = TextColumn("{task.description}", markup=False)
    columns = title, BarColumn(), done or MofNCompleteColumn(), rest or TimeRemainingColumn()
    is_hidden = not sys.stderr.isatty()
    return Progress(*columns, console=SafeConsole(stderr=True), transient=transient, disable=is_hidden)


@contextmanager
def throughput_bar(title: str, total: int) -> Iterator[Callable[[int, int, int], None]]:
    """Show how many answers are done, the tokens per second and the time left; in a log, as a line once a minute.

    Yields a function to call with the number of answers that are done, how many of these were written now rather than
    read from a journal, and the number of tokens that were written now. There are ``total`` answers.
    """
    is_terminal = sys.stderr.isatty()
    with progress_bars(rest=TextColumn("{task.fields[rate]}", markup=False)) as bars:
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
