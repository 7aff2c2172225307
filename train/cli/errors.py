"""Ends a command with one line on standard error, and exit code 2 for a user's mistake or 130 for Ctrl-C."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from data.files import print_traceback, safe_line, safe_messages

EXIT_CODE_OF_CTRL_C = 130


@contextmanager
def user_errors(command: str) -> Iterator[None]:
    """Print errors that a user can fix as one line without a traceback; DRAFTERS_DEBUG=1 shows the traceback.

    These are ValueError, the system's errors about a named file, a full disk, Lightning's misconfigurations,
    and Ctrl-C. All other errors are raised.

    Args:
        command: Name of the command, with which the line begins.
    """
    try:
        with safe_messages():
            yield
    except KeyboardInterrupt:
        print(
            f"\n{command}: stopped by Ctrl-C: repeat the command to continue from its files",
            file=sys.stderr,
        )
        sys.exit(EXIT_CODE_OF_CTRL_C)
    except Exception as error:
        if os.environ.get("DRAFTERS_DEBUG") == "1" or not _can_be_fixed_by_the_user(error):
            sys.excepthook = print_traceback  # which runs after this function
            raise
        message = str(error)
        if isinstance(error, PermissionError) and error.filename:
            message = f"no permission to use {error.filename}: give another place"
        print(safe_line(f"{command}: error: {' '.join(message.split())}"), file=sys.stderr)
        sys.exit(2)


def _can_be_fixed_by_the_user(error: Exception) -> bool:
    is_full_disk = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    # By name, because importing Lightning takes seconds and most commands do without it.
    is_misconfiguration = type(error).__name__ == "MisconfigurationException"
    is_about_a_file = isinstance(error, OSError) and error.filename is not None
    return isinstance(error, (ValueError, FileNotFoundError)) or is_about_a_file or is_full_disk or is_misconfiguration
