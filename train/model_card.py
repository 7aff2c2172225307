"""The model card, README.md, of a drafter's folder."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from data.hub import find_base, split_revision
from data.safe_text import code_span, escape_markdown, safe_line
from drafters import recipe
from drafters.checkpoint import DrafterConfig
from drafters.protocol import LearnedDrafter

REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
TRAINED = """A drafter for lossless speculative decoding: it proposes a tree of tokens, the base verifies it in one
forward, and the text stays the base's own."""
IMPORTED = """A drafter for lossless speculative decoding that another tool trained, read by `drafters import`. See the
original for its training and its licence."""
DECODED = {"greedy": "the base's own greedy answers to held-out prompts", "text": "held-out text"}


def model_card(
    drafter: LearnedDrafter, config: DrafterConfig, license: str | None = None, results: Sequence[str] = ()
) -> str:
    """Return the README of a drafter: how it was trained, or what it was imported from, and its arguments.

    The licence is for the header. The tables of the ``results``, folders that `drafters eval --out` wrote, are added.
    """
    training = config.training
    facts = {"Base": described_base(config)}
    if "steps" in training:
        facts["Training data"] = f"{escape_markdown(', '.join(map(str, training['data'])))}, {training['steps']} steps"
    if initial := training.get("initial_drafter"):
        facts["Trained on from"] = code_span(initial)
    if length := training.get("val_acceptance_length"):
        facts["Acceptance length"] = (
            f"{length:.2f} tokens per base forward at step {training['val_step']}, simulated on "
            f"{DECODED[training['val_answers']]}"
        )
    if command := training.get("command"):
        facts["Command"] = code_span(command)
    if original := training.get("imported_from"):
        facts["Original"] = code_span(original)
    if left_out := training.get("left_out"):
        facts["Left out"] = escape_markdown(", ".join(map(str, left_out)))
    num_parameters = sum(weight.numel() for weight in drafter.parameters())
    name = config.class_path.removeprefix("drafters.").lower()
    used = f"drafters eval --base {config.base_name} --drafter {name}=THIS_FOLDER --benchmark mt_bench"
    arguments = recipe.flattened(config.init_args).items()
    sections = [
        f"{card_header(config, license)}\n{IMPORTED if original else TRAINED} {num_parameters:,} parameters.",
        "\n".join(f"- {key}: {value}" for key, value in facts.items()),
        f"Use it: {code_span(used)}",
        "\n".join(
            ["| argument | value |", "|---|---|"]
            + [f"| {escape_markdown(key)} | {escape_markdown(value)} |" for key, value in arguments]
        ),
        *(f"## Measured\n\n{(Path(folder) / 'results.md').read_text(encoding='utf-8').strip()}" for folder in results),
    ]
    return "\n\n".join(sections) + "\n"


def card_header(config: DrafterConfig, license: str | None, *tags: str) -> str:
    """The header of a card and its title. The hub refuses folders and revisions as the name of a base."""
    base, _ = split_revision(config.base_name)
    is_of_hub = REPOSITORY.fullmatch(base) and not Path(find_base(config.base_name)).exists()
    header: dict[str, Any] = {
        **({"license": safe_line(license)} if license else {}),
        **({"base_model": base} if is_of_hub else {}),
        "library_name": "drafters",
        "tags": ["speculative-decoding", config.class_path.removeprefix("drafters.").lower(), *tags],
    }
    text = yaml.safe_dump(header, allow_unicode=True, sort_keys=False, width=float("inf"))
    return f"---\n{text}---\n# {config.class_path} for {escape_markdown(config.base_name)}\n"


def described_base(config: DrafterConfig) -> str:
    """The base's name and sizes."""
    return (
        f"{code_span(config.base_name)} (hidden size {config.base.hidden_size}, vocabulary {config.base.vocab_size}, "
        f"tokenizer {escape_markdown(config.tokenizer_hash)}). It fits no other."
    )
