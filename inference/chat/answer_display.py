"""A growing answer on the screen, with what the drafter guessed in colour."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

ACCEPTED = "green"
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}  # a model may write escape codes


class AnswerDisplay:
    """Shows a text as it grows.

    On a terminal its last line, and a line of figures below, are drawn anew at every step, and lines that are full
    stay as they are. Elsewhere the pieces are written one behind the other.

    Args:
        console: Where to.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._line = Text()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> AnswerDisplay:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        self.console.print(self._line, soft_wrap=True)

    def add(self, piece: str, is_accepted: bool) -> None:
        """Show a piece of the text; it was drafted and accepted, or it is the base's own."""
        text = Text(piece.translate(CONTROLS), style=ACCEPTED if is_accepted else "")
        if not self._live:
            self.console.print(text, end="", soft_wrap=True)
            return
        *full, self._line = (self._line + text).wrap(self.console, self.console.width)
        for line in full:
            self.console.print(line, soft_wrap=True)

    def draw(self, figures: str) -> None:
        """Bring a terminal up to date, with these figures below the text."""
        if self._live:
            self._live.update(Group(self._line, Text(figures, style="dim")), refresh=True)
