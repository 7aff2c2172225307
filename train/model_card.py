"""The model card, README.md, of a drafter's folder."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from data.hub import find_base, split_revision
from data.safe_text import code_span, escape_markdown, yaml_line
from drafters import recipe
from drafters.checkpoint import DrafterConfig

REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
ABOUT = """A drafter for lossless speculative decoding: it proposes a tree of tokens, the base verifies it in one
forward, and the text stays the base's own."""


def model_card(
    config: DrafterConfig,
    about: str,
    facts: Mapping[str, str],
    license: str | None = None,
    results: Sequence[str] = (),
) -> str:
    """Return the README of a drafter: the paragraph ``about``, lines of ``facts`` in Markdown, and its arguments.

    The licence is for the header. The tables of the ``results``, folders that `drafters eval --out` wrote, are added.
    """
    name = config.class_path.removeprefix("drafters.").lower()
    used = f"drafters eval --base {config.base_name} --drafter {name}=THIS_FOLDER --benchmark mt_bench"
    arguments = recipe.flattened(config.init_args).items()
    sections = [
        f"{card_header(config, license)}\n{about}",
        "\n".join(f"- {key}: {value}" for key, value in {"Base": described_base(config), **facts}.items()),
        f"Use it: {code_span(used)}",
        "\n".join(
            ["| argument | value |", "|---|---|"]
            + [f"| {escape_markdown(key)} | {escape_markdown(value)} |" for key, value in arguments]
        ),
        *(f"## Measured\n\n{(Path(folder) / 'results.md').read_text(encoding='utf-8').strip()}" for folder in results),
    ]
    return "\n\n".join(sections) + "\n"


def card_header(config: DrafterConfig, license: str | None = None, *tags: str) -> str:
    """The header of a card and its title. The hub refuses folders and revisions as the name of a base."""
    base, _ = split_revision(config.base_name)
    is_of_hub = REPOSITORY.fullmatch(base) and not Path(find_base(config.base_name)).exists()
    name = config.class_path.removeprefix("drafters.").lower()
    lines = [
        "---",
        *([yaml_line("license", license)] if license else []),
        *([yaml_line("base_model", base)] if is_of_hub else []),
        "library_name: drafters",
        f"tags: [{', '.join(['speculative-decoding', name, *tags])}]",
        "---",
        f"# {config.class_path} for {escape_markdown(config.base_name)}",
    ]
    return "\n".join(lines) + "\n"


def described_base(config: DrafterConfig) -> str:
    """The base's name and sizes."""
    return (
        f"{code_span(config.base_name)} (hidden size {config.base.hidden_size}, vocabulary {config.base.vocab_size}, "
        f"tokenizer {escape_markdown(config.tokenizer_hash)}). It fits no other."
    )
