"""A limit on what a library computes, for templates and formulas that would keep it busy for hours."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def computing_limit(seconds: float, error: BaseException) -> Iterator[None]:
    """Raise an error in the block once the process has computed for this long.

    Time that a busy machine gives to others does not count. Only the main thread receives signals; a block in another
    thread has no limit.
    """

    def stop(*_: object) -> NoReturn:
        raise error

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
