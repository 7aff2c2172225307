"""What long commands share: checks of output paths, fingerprints of files, and progress on standard error."""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rich import progress

from data.safe_text import SafeConsole, safe_line

SECONDS_PER_LOG_LINE = 60.0
BLOCK_BYTES, NUM_BLOCKS = 1 << 16, 16  # what is hashed of each file, spread evenly from its beginning to its end


# ---- output paths


def new_file(out: str, overwrite: bool, inputs: Iterable[str] = ()) -> Path:
    """Return the path of a file to write; its folder need not exist yet.

    Raises ValueError if the file exists and must not be replaced, is one of the inputs, or cannot be created.
    """
    path = Path(out)
    if path.exists() and any(Path(input_path).exists() and path.samefile(input_path) for input_path in inputs):
        raise ValueError(f"{out} is read by this command: give another name")
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


class LoggedProgress(progress.Progress):
    """Rich progress bars; where no terminal shows them, as in a pipe, a line on standard error once a minute."""

    def advance(self, task_id: progress.TaskID, advance: float = 1) -> None:
        """Advance a task. The line ends with its field ``rate``, if it has one, instead of the time left."""
        super().advance(task_id, advance)
        task, now = self._tasks[task_id], self.get_time()
        if self.disable and now - task.fields.get("logged", task.start_time or 0) >= SECONDS_PER_LOG_LINE:
            task.fields["logged"] = now
            left = "?" if task.time_remaining is None else timedelta(seconds=task.time_remaining)
            line = f"{task.description}: {task.completed:,.0f} of {task.total or 0:,.0f}, "
            print(safe_line(line + task.fields.get("rate", f"{left} left")), file=sys.stderr, flush=True)


def progress_bars(
    done: progress.ProgressColumn | None = None, rest: progress.ProgressColumn | None = None, transient: bool = False
) -> LoggedProgress:
    """Progress bars with a description, the amount done and the time left; in a pipe, a line once a minute.

    To be used as a context manager, with `Progress.track` or `Progress.add_task` and `Progress.advance`. Other columns
    may show the amount done, by default items of a total, and the rest; transient bars disappear when they are done.
    """
    title = progress.TextColumn("{task.description}", markup=False)
    columns = title, progress.BarColumn(), done or progress.MofNCompleteColumn(), rest or progress.TimeRemainingColumn()
    console, is_hidden = SafeConsole(stderr=True), not sys.stderr.isatty()
    return LoggedProgress(*columns, console=console, transient=transient, disable=is_hidden, speed_estimate_period=600)


@contextmanager
def throughput_bar(title: str, total: int) -> Iterator[Callable[[int, int, int], None]]:
    """Show how many answers are done, the tokens per second and the time left.

    Yields a function to call with the number of answers that are done, how many of these were written now rather than
    read from a journal, and the number of tokens that were written now. There are ``total`` answers.
    """
    with progress_bars(rest=progress.TextColumn("{task.fields[rate]}", markup=False)) as bars:
        task, start = bars.add_task(title, total=total, rate=""), time.monotonic()
        done = new = tokens = 0

        def advance(num_done: int, num_new: int, num_tokens: int) -> None:
            nonlocal done, new, tokens
            done, new, tokens = done + num_done, new + num_new, tokens + num_tokens
            seconds = time.monotonic() - start
            left = timedelta(seconds=round((total - done) * seconds / new)) if new else "?"
            bars.update(task, rate=f"{tokens / max(seconds, 1e-9):,.0f} tokens/s, {left} left")
            bars.advance(task, num_done)

        yield advance
