"""How a mistake of the user ends a command: one line on standard error, exit code 2, no traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def user_errors(command: str) -> Iterator[None]:
    """Turn ValueError, and files that are missing or not ours to read, into one line; DRAFTERS_DEBUG=1 shows it all."""
    try:
        yield
    except (ValueError, FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError) as error:
        if os.environ.get("DRAFTERS_DEBUG") == "1":
            raise
        print(f"{command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
