"""Text that is safe to show: no control characters in a terminal or in Markdown, and no secrets of the environment."""

import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

SECRETS = ("OPENAI_API_KEY", "DRAFTERS_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # environment variables
MIN_SECRET_LENGTH = 6  # a shorter value, such as "none", is not a secret, and would be found in any text

C0 = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}  # shown as the symbols for them
C1 = range(0x80, 0xA0)
BIDIRECTIONAL = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
SURROGATES = range(0xD800, 0xE000)
VISIBLE = C0 | {0x7F: 0x2421} | dict.fromkeys((*C1, *BIDIRECTIONAL, *SURROGATES, 0x2028, 0x2029), 0xFFFD)
MARKDOWN = re.compile(r"([\\`*|<>\[\]])")


def safe_text(text: object) -> str:
    r"""Make everything visible that would change a terminal or the order of a text, except tabs and line breaks.

    These are the control characters of C0 and C1, DEL, the marks of bidirectional text, line separators, and halves of
    surrogate pairs, which no file can hold. The secrets of the environment are replaced by their names.

    >>> safe_text("\x1b[2Jno\x9b0m\u202e")
    '␛[2Jno�0m�'
    """
    return redacted(str(text)).translate(VISIBLE)


def safe_line(text: object) -> str:
    """`safe_text` on one line."""
    return safe_text(" ".join(str(text).splitlines()))


def redacted(text: str) -> str:
    """Replace the API keys and tokens of the environment by their names, as in ``[OPENAI_API_KEY]``."""
    for name in SECRETS:
        secret = os.environ.get(name, "")
        for form in dict.fromkeys((secret, secret.strip(), repr(secret)[1:-1])):
            if len(form) >= MIN_SECRET_LENGTH:
                text = text.replace(form, f"[{name}]")
    return text


def code_span(text: object) -> str:
    """`safe_line` between the backticks of Markdown, which it cannot leave."""
    return f"`{safe_line(text).replace('`', '´')}`"


def escape_markdown(text: object) -> str:
    r"""`safe_line` with the characters escaped that Markdown interprets.

    >>> escape_markdown("a|b\r\n<i>")
    'a\\|b \\<i\\>'
    """
    return MARKDOWN.sub(r"\\\1", safe_line(text))


class SafeConsole(Console):
    """A rich console that prints `safe_text`, and takes square brackets for themselves instead of markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False} | options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
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
