"""What was read from files, models and servers as text that does no harm in a terminal, in Markdown or in HTML."""

from __future__ import annotations

import os
import re

import yaml

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


def well_formed(text: str) -> str:
    r"""Join surrogate pairs, and replace halves of a pair by U+FFFD: no file in UTF-8 can hold either.

    >>> well_formed("\ud83d\ude00 \ud83d")
    '😀 �'
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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


def yaml_line(key: str, value: str) -> str:
    """A line of YAML, with the value in quotes if it would mean something else without them."""
    return yaml.safe_dump({key: safe_line(value)}, allow_unicode=True, width=float("inf")).strip()


def escape_markdown(text: object) -> str:
    r"""`safe_line` with the characters escaped that Markdown interprets.

    >>> escape_markdown("a|b\r\n<i>")
    'a\\|b \\<i\\>'
    """
    return MARKDOWN.sub(r"\\\1", safe_line(text))
