"""``drafters doctor``: whether an exported folder is the drafter that was trained, down to the trees it drafts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafters import checkpoint
from inference.engine.base import Base, load_base, resolve_device
from train.checkpointing.saved import read_checkpoint
from train.export.examine import (
    Finding,
    examine_acceptance,
    examine_base,
    examine_config,
    examine_drafts,
    examine_files,
    examine_weights,
)
from train.export.export import drafter_of


def doctor(
    ckpt: str,
    export: str,
    base: str | None = None,
    files: list[str] | None = None,
    num_texts: int = 4,
    num_roots: int = 64,
    acceptance: bool = True,
    device: str = "auto",
) -> None:
    """Compare an exported drafter with the checkpoint it was made from; exit code 1 where something is wrong.

    Examined are the folder's files, its configuration, each weight, the base, the trees and probabilities it drafts on
    known text, and whether it reproduces the acceptance length that the checkpoint recorded.

    Args:
        ckpt: Checkpoint that `lightning fit` wrote.
        export: Folder that `drafters export` made of it.
        base: Base to draft for, where it is not found under the name it was trained with.
        files: Conversations whose text is drafted on; the embedded ones if not given.
        num_texts: How many of them.
        num_roots: Roots a text, spread over the assistant's tokens.
        acceptance: Whether the recorded validation is run again, where its data are found.
        device: auto takes the GPU where there is one.
    """
    from rich.console import Console
    from rich.text import Text

    saved = read_checkpoint(Path(ckpt))
    if "drafter" not in (saved.get("hyper_parameters", {}) if isinstance(saved, dict) else {}):
        raise ValueError(f"{ckpt} holds no drafter: give the checkpoint of a drafter's training")
    if not Path(export).is_dir():
        raise ValueError(f"no folder {export}: make it with `drafters export {ckpt} {export}`")
    if num_texts < 1 or num_roots < 1:
        raise ValueError(f"num_texts and num_roots must be at least 1, not {num_texts} and {num_roots}")
    marks = {True: ("right", "green"), False: ("WRONG", "bold red"), None: ("-----", "yellow")}
    console, findings = Console(), []
    loaded = load_base(base or saved["base"]["name"], saved["hyper_parameters"]["base_dtype"], resolve_device(device))
    for finding in examine(saved, Path(export), loaded, files or ["embedded"], num_texts, num_roots, acceptance):
        findings.append(finding)
        said = Text.assemble(marks[finding.is_right], f"  {finding.what}: {finding.said}")
        console.print(said, soft_wrap=True)
    if any(finding.is_right is False for finding in findings):
        sys.exit(1)


def examine(
    saved: dict[str, Any],
    folder: Path,
    base: Base,
    files: list[str],
    num_texts: int,
    num_roots: int,
    acceptance: bool,
) -> Iterator[Finding]:
    """Everything `doctor` looks at, in order; what stands on something wrong is not examined."""
    trained, expected = drafter_of(saved, saved["hyper_parameters"])
    yield examine_files(folder)
    try:
        config = checkpoint.read_config(folder)
    except ValueError as error:
        yield Finding("configuration", False, str(error))
        return
    yield examine_config(config, expected)
    yield examine_weights(folder, {name: weight.cpu() for name, weight in trained.state_dict().items()})
    fits = examine_base(config, base, saved["base"].get("weights_hash"))
    yield fits
    try:
        exported, _ = checkpoint.load(folder, base.model.dtype)
    except ValueError as error:
        yield Finding("drafts", False, str(error))
        return
    if not fits.is_right:
        yield Finding("drafts", None, "not compared: it is another base")
        return
    exported.to(base.model.device)
    trained.to(base.model.device, base.model.dtype).eval().requires_grad_(False)
    data = saved.get("datamodule_hyper_parameters", {})
    yield examine_drafts(trained, exported, base, files, data.get("template") or "tokenizer", num_texts, num_roots)
    if acceptance:
        exported, _ = checkpoint.load(folder)
        yield examine_acceptance(saved, exported.to(base.model.device), base)
