"""How a mistake or Ctrl-C ends a command: one line on standard error, exit code 2 or 130, no traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE_OF_CTRL_C = 130


@contextmanager
def user_errors(command: str) -> Iterator[None]:
    """Turn what a user can mend into one line; DRAFTERS_DEBUG=1 shows it all.

    That is ValueError, files that are missing or not ours to read, a full disk, what Lightning calls a
    misconfiguration, and Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(f"\n{command}: stopped by Ctrl-C: what is kept in files goes on with the same command", file=sys.stderr)
        sys.exit(EXIT_CODE_OF_CTRL_C)
    except Exception as error:
        files = FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        is_users = isinstance(error, (ValueError, *files)) or type(error).__name__ == "MisconfigurationException"
        if os.environ.get("DRAFTERS_DEBUG") == "1" or not (is_users or is_full):
            raise
        is_barred = isinstance(error, PermissionError) and error.filename
        said = f"no permission to use {error.filename}: give another place" if is_barred else str(error)
        print(f"{command}: error: {' '.join(said.split())}", file=sys.stderr)
        sys.exit(2)
