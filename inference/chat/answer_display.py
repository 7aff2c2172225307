"""An answer in the terminal as it is generated, with accepted draft tokens in colour."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from data.files import safe_text

ACCEPTED = "green"


class AnswerDisplay:
    """Shows a text as it grows.

    On a terminal, its last line and a line of figures below it are redrawn in every step, and complete lines stay as
    they are. If the output is not a terminal, the pieces are written one after the other.

    Args:
        console: Console to write to.
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
        """Append a piece of the text.

        Args:
            piece: The text.
            is_accepted: Whether it was drafted and accepted; otherwise it is the base's own token.
        """
        text = Text(safe_text(piece), style=ACCEPTED if is_accepted else "")
        if not self._live:
            self.console.print(text, end="", soft_wrap=True)
            return
        *complete, self._line = (self._line + text).wrap(self.console, self.console.width)
        for line in complete:
            self.console.print(line, soft_wrap=True)

    def refresh(self, figures: str) -> None:
        """Redraw the last line on a terminal, with these figures below it."""
        if self._live:
            self._live.update(Group(self._line, Text(figures, style="dim")), refresh=True)
