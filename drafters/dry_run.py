"""Dry runs: losses of tensors without data, which show what memory a training step takes on some kind of device."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_device_type: ContextVar[str | None] = ContextVar("device type of the dry run", default=None)


@contextmanager
def dry_run(device_type: str) -> Iterator[None]:
    """Let losses hold the tensors that they hold on a device of this type, ``cuda`` or another, wherever they run.

    They compute only the first of their chunks, since no other needs more memory. For a GPU, frames attend without a
    mask, which stores as much: FlexAttention cannot run without data.
    """
    token = _device_type.set(device_type)
    try:
        yield
    finally:
        _device_type.reset(token)


def dry_run_device() -> str | None:
    """The type of the device that the running dry run stands for; None if the tensors have data."""
    return _device_type.get()
