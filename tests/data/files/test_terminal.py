import io
import logging
import sys
import warnings

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from data.files import SafeConsole, print_traceback, safe_messages

HOSTILE = "\x1b]0;title\x0e \x9b2J \x7f \u202e [bold]b[/] [/] :smile:"
SHOWN = "␛]0;title␎ �2J ␡ � [bold]b[/] [/] :smile:"


def table(cell):
    made = Table(cell)
    made.add_row(cell)
    return made


@pytest.mark.parametrize("wrap", [str, Text, table], ids=["text", "rich text", "table"])
def test_a_console_shows_what_would_act_on_the_terminal(wrap):
    console = SafeConsole(file=io.StringIO(), width=80)
    console.print(wrap(HOSTILE))
    assert SHOWN in console.file.getvalue()


def test_a_rule_may_have_a_hostile_title():
    console = SafeConsole(file=io.StringIO(), width=80)
    console.rule(HOSTILE)
    assert SHOWN in console.file.getvalue()


def test_colours_and_live_displays_still_work_on_a_terminal():
    console = SafeConsole(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    with Live(Text("live"), console=console, auto_refresh=False) as live:
        console.print(Text(HOSTILE, style="green"))
        live.refresh()
    written = console.file.getvalue()
    assert f"\x1b[32m{SHOWN}\x1b[0m" in written and "\x1b[?25h" in written and "live" in written
    assert "\x0e" not in written and "\x9b" not in written


def test_warnings_and_log_records_are_safe_and_hold_no_secret(monkeypatch, caplog):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-123456")
    with safe_messages():
        text = warnings.formatwarning(f"{HOSTILE} sk-123456", UserWarning, "file.py", 1, "")
        try:
            raise KeyError(f"{HOSTILE} sk-123456")
        except KeyError:
            logging.getLogger("transformers").exception("%s and %s", HOSTILE, "sk-123456")
        logging.getLogger("transformers").warning("no argument %s")
    assert SHOWN in text and "sk-123456" not in text
    assert SHOWN in caplog.text and "sk-123456" not in caplog.text and "\x1b" not in caplog.text
    assert "\x1b" in warnings.formatwarning(HOSTILE, UserWarning, "file.py", 1, "")


def test_a_traceback_holds_no_secret(monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-123456")
    try:
        try:
            raise KeyError("Bearer sk-123456\x1b[2J")
        except KeyError as error:
            raise ValueError("refused") from error
    except ValueError:
        print_traceback(*sys.exc_info())
    said = capsys.readouterr().err
    assert "Bearer [OPENAI_API_KEY]" in said and "sk-123456" not in said and "\x1b" not in said
