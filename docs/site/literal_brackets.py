"""Keeps ``NAME[=FILE][:key=value]`` in a docstring from being read as a Markdown reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

CODE = re.compile(r"(`+[^`]*`+)")


class LiteralBrackets(griffe.Extension):
    """Escapes ``][`` outside code in every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            parts = CODE.split(obj.docstring.value)
            obj.docstring.value = "".join(
                part if index % 2 else part.replace("][", r"]\[") for index, part in enumerate(parts)
            )
