"""The command line that starts a program under bubblewrap, and the process that it starts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from typing import IO


def wrap(command: Sequence[str], readable: Sequence[str], box: str, box_bytes: int, info: int) -> list[str]:
    """Return a command that runs another one in namespaces of its own, where almost no file is there.

    It sees no other process, network, host name or System V and POSIX object, and can write only to the box.

    Args:
        command: The command to run.
        readable: Files and folders that it may read; those that are missing are left out.
        box: Path of its working directory, an empty file system in memory.
        box_bytes: Size of that file system in bytes, deleted files that are still open included.
        info: File descriptor to which bubblewrap writes what `first_process` reads.
    """
    options = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    for path in dict.fromkeys(path for path in readable if os.path.exists(path)):
        options += ["--dev-bind" if path.startswith("/dev/") else "--ro-bind", path, path]
    options += ["--size", str(box_bytes), "--tmpfs", box, "--remount-ro", "/", "--chdir", box]
    return [shutil.which("bwrap") or "bwrap", *options, "--info-fd", str(info), "--", *command]


def first_process(info_file: IO[bytes]) -> int | None:
    """The id of the first process in the namespaces, from the file that `wrap` named; None before it is there."""
    info_file.seek(0)
    try:
        return json.loads(info_file.read())["child-pid"]
    except ValueError:  # nothing or only a part was written yet
        return None
