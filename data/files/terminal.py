"""Terminal output in which nothing that was read from files, models or servers can act on the terminal."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.control import Control
from rich.segment import Segment

from data.files.safe_text import safe_text


class SafeConsole(Console):
    """A rich console that prints `safe_text`, and takes square brackets for themselves instead of markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False} | options)
        self.push_render_hook(_SafeText())


class _SafeText(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [each if isinstance(each, Control) else _Safe(each) for each in renderables]


class _Safe:
    def __init__(self, content: ConsoleRenderable) -> None:
        self.content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.content, options):
            yield segment if segment.control else Segment(safe_text(segment.text), segment.style)


@contextmanager
def safe_messages() -> Iterator[None]:
    """Make the text of warnings and log records safe, whichever library writes them."""
    format_warning, make_record = warnings.formatwarning, logging.getLogRecordFactory()

    def format_safely(*args: Any, **options: Any) -> str:
        return safe_text(format_warning(*args, **options))

    def make_safe_record(*args: Any, **options: Any) -> logging.LogRecord:
        record = make_record(*args, **options)
        with suppress(TypeError, ValueError):  # arguments that do not fit the message, which logging reports later
            record.msg, record.args = safe_text(record.getMessage()), None
        if record.exc_info and record.exc_info[0]:
            record.exc_text = safe_text("".join(traceback.format_exception(*record.exc_info)))
        return record

    warnings.formatwarning = format_safely
    logging.setLogRecordFactory(make_safe_record)
    try:
        yield
    finally:
        warnings.formatwarning = format_warning
        logging.setLogRecordFactory(make_record)


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error and its traceback as safe text, as `sys.excepthook` does."""
    sys.stderr.write(safe_text("".join(traceback.format_exception(kind, error, trace))))
