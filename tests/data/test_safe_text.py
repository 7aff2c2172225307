import io
import logging
import sys
import unicodedata
import warnings

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from data.safe_text import (
    SECRETS,
    SafeConsole,
    escape_markdown,
    print_traceback,
    redacted,
    safe_line,
    safe_messages,
    safe_text,
)

HOSTILE = "\x1b]0;title\x0e \x9b2J \x7f \u202e [bold]b[/] [/] :smile:"
SHOWN = "␛]0;title␎ �2J ␡ � [bold]b[/] [/] :smile:"
HARMFUL_BIDIRECTIONAL = ("LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI")


def test_no_control_character_no_mark_of_direction_and_no_half_of_a_pair_is_left():
    every = "".join(map(chr, range(0x10000)))  # no higher plane has any of them
    safe = safe_text(every)
    assert len(safe) == len(every)
    for character in set(safe):
        assert unicodedata.category(character) not in ("Cc", "Cs") or character in "\t\n"
        assert unicodedata.bidirectional(character) not in HARMFUL_BIDIRECTIONAL
    safe.encode("utf-8")
    assert safe_text(text := "Grüße, 你好, שלום, 👩‍👩‍👧 a\tb\n") == text


def test_a_line_is_one_line_and_a_cell_of_a_table_stays_one_cell():
    assert safe_line("a\r\nb\rc\x0bd\u2028e\x85f") == "a b c d e f"
    assert escape_markdown("a|b\r| c\n<b>`x`") == r"a\|b \| c \<b\>\`x\`"


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("secret", ["sk-123456", "sk-12\n3456", " sk-123456\n"])
def test_a_secret_is_replaced_by_its_name(name, secret, monkeypatch):
    monkeypatch.setenv(name, secret)
    for text in (secret, f"b'Bearer {secret!r}'", f"Bearer {secret.strip()}!"):
        assert "3456" not in redacted(text) and f"[{name}]" in redacted(text)
    monkeypatch.setenv(name, "none")
    assert redacted("none of them") == "none of them", "a value too short for a secret"


def table(cell):
    made = Table(cell)
    made.add_row(cell)
    return made


@pytest.mark.parametrize("wrap", [str, Text, table], ids=["text", "rich text", "table"])
def test_a_console_shows_what_would_act_on_the_terminal(wrap):
    console = SafeConsole(file=io.StringIO(), width=80)
    console.print(wrap(HOSTILE))
    console.rule(HOSTILE)
    assert console.file.getvalue().count(SHOWN[:-6]) == (3 if wrap is table else 2), "a table may cut it"


def test_colours_and_live_displays_still_work_on_a_terminal():
    console = SafeConsole(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    with Live(Text("live"), console=console, auto_refresh=False) as live:
        console.print(Text(HOSTILE, style="green"))
        live.refresh()
    written = console.file.getvalue()
    assert f"\x1b[32m{SHOWN}\x1b[0m" in written and "\x1b[?25h" in written and "live" in written
    assert "\x0e" not in written and "\x9b" not in written


def test_warnings_log_records_and_tracebacks_are_safe_and_hold_no_secret(monkeypatch, caplog, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-123456")
    with safe_messages():
        text = warnings.formatwarning(f"{HOSTILE} sk-123456", UserWarning, "file.py", 1, "")
        try:
            raise KeyError(f"{HOSTILE} sk-123456")
        except KeyError:
            logging.getLogger("transformers").exception("%s and %s", HOSTILE, "sk-123456")
            print_traceback(*sys.exc_info())
        logging.getLogger("transformers").warning("no argument %s")
    for said in (text, caplog.text, capsys.readouterr().err):
        assert "sk-123456" not in said and "\x1b" not in said and "[OPENAI_API_KEY]" in said
    assert SHOWN in text and SHOWN in caplog.text
    assert "\x1b" in warnings.formatwarning(HOSTILE, UserWarning, "file.py", 1, "")
