"""Keeps ``NAME[=FILE][:key=value]`` and doctests in a docstring from being read as Markdown references."""

from __future__ import annotations

import re
from typing import Any

import griffe

CODE = re.compile(r"(`+[^`]*`+)")
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class LiteralBrackets(griffe.Extension):
    """Fences doctests as code, and escapes ``][`` outside code, in every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            parts = CODE.split(DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value))
            obj.docstring.value = "".join(
                part if index % 2 else part.replace("][", r"]\[") for index, part in enumerate(parts)
            )
