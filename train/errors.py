"""How a mistake of the user ends a command: one line on standard error, exit code 2, no traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def user_errors(command: str) -> Iterator[None]:
    """Turn what a user can mend into one line; DRAFTERS_DEBUG=1 shows it all.

    That is ValueError, files that are missing or not ours to read, a full disk, and what Lightning calls a
    misconfiguration.
    """
    try:
        yield
    except Exception as error:
        files = FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        is_users = isinstance(error, (ValueError, *files)) or type(error).__name__ == "MisconfigurationException"
        if os.environ.get("DRAFTERS_DEBUG") == "1" or not (is_users or is_full):
            raise
        print(f"{command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
