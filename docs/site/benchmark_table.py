"""The table of benchmarks with their prompt styles, read from `data.benchmarks.BENCHMARKS`."""

from __future__ import annotations

from data.benchmarks import BENCHMARKS, Style


def table() -> str:
    """A Markdown table with a row for each benchmark: its longest answer in tokens, and its styles, the default first.

    Benchmarks with the same length and styles, such as those of AIME, share a row.
    """
    rows: dict[tuple[int, str], list[str]] = {}
    for name, benchmark in BENCHMARKS.items():
        styles = "<br>".join(f"{style}: {describe(own)}" for style, own in benchmark.styles.items())
        rows.setdefault((benchmark.max_new_tokens, styles), []).append(name)
    lines = [f"| {', '.join(names)} | {tokens} | {styles} |" for (tokens, styles), names in rows.items()]
    return "\n".join(["| benchmark | longest answer | styles |", "|---|---|---|", *lines])


def describe(style: Style) -> str:
    """The prompt of a style as code, with its number of examples, whether it is raw, and its own longest answer."""
    shots = f", behind {style.num_shots} example{'s' if style.num_shots > 1 else ''}" if style.num_shots else ""
    prompt = " ↵ ".join(line for line in style.prompt.split("\n") if line).replace("|", "\\|")
    length = f", {style.max_new_tokens} tokens" if style.max_new_tokens else ""
    return f"```` {prompt} ````{shots}{', raw' if style.is_raw else ''}{length}"
