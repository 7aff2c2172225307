"""Formulas as MathML, which browsers draw without any script."""

from __future__ import annotations

import re

from latex2mathml.converter import convert


def to_mathml(formula: str) -> str:
    """Turn a displayed LaTeX formula into MathML; the lines of an ``aligned`` block go below each other."""
    inner = re.sub(r"\\(begin|end)\{aligned\}", "", formula).replace("&", "")
    lines = (" ".join(line.split()) for line in inner.split(r"\\"))
    return "".join(f'<div class="formula">{convert(line, display="block")}</div>' for line in lines)
