"""``drafters doctor``: check that an exported folder is the drafter that was trained, down to the trees it drafts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafters import checkpoint
from inference.verifier.base import Base, load_base, resolve_device
from train.checkpointing.checkpoint_reader import hyper_parameters, read_checkpoint
from train.export.examine import (
    DraftSample,
    Finding,
    examine_acceptance,
    examine_base,
    examine_config,
    examine_drafts,
    examine_files,
    examine_weights,
)
from train.export.export import drafter_of

MARKS = {True: ("right", "green"), False: ("WRONG", "bold red"), None: ("-----", "yellow")}


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
    """Compare an exported drafter with the checkpoint it was made from; exit code 1 if something is wrong.

    The checks cover the folder's files, its configuration, every weight, the base, the trees and probabilities that
    it drafts on known text, and whether it reproduces the acceptance length that the checkpoint recorded.

    Args:
        ckpt: Checkpoint that `lightning fit` wrote.
        export: Folder that `drafters export` made from it.
        base: Folder or hub id of the base, if it is not found under the name it was trained with.
        files: Conversations on whose text the drafts are compared; the embedded ones if not given.
        num_texts: Number of conversations.
        num_roots: Number of roots in each conversation, spread over the assistant's tokens.
        acceptance: Whether to repeat the recorded validation, if its data are found.
        device: Device to run on: cpu, cuda, or auto, which uses the GPU if there is one.
    """
    from rich.text import Text

    from data.files import SafeConsole

    saved = read_checkpoint(Path(ckpt))
    if "drafter" not in (arguments := hyper_parameters(saved)):
        raise ValueError(f"{ckpt} holds no drafter: give the checkpoint of a drafter's training")
    if not Path(export).is_dir():
        raise ValueError(f"no folder {export}: make it with `drafters export {ckpt} {export}`")
    if num_texts < 1 or num_roots < 1:
        raise ValueError(f"num_texts and num_roots must be at least 1, not {num_texts} and {num_roots}")
    drafter_of(saved, arguments)  # raises ValueError if anything is missing
    loaded = load_base(base or saved["base"]["name"], arguments.get("base_dtype", "float32"), resolve_device(device))
    template = saved.get("datamodule_hyper_parameters", {}).get("template") or "tokenizer"
    sample = DraftSample(files or ["embedded"], template, num_texts, num_roots)
    console, has_errors = SafeConsole(), False
    for finding in examine(saved, Path(export), loaded, sample, acceptance):
        line = Text.assemble(MARKS[finding.is_correct], f"  {finding.subject}: {finding.message}")
        console.print(line, soft_wrap=True)
        has_errors |= finding.is_correct is False
    if has_errors:
        sys.exit(1)


def examine(
    saved: dict[str, Any], folder: Path, base: Base, sample: DraftSample, acceptance: bool
) -> Iterator[Finding]:
    """Run all checks in order; a check that depends on a failed one is left out.

    Args:
        saved: The checkpoint.
        folder: The exported folder.
        base: The base.
        sample: Text on which the drafts are compared.
        acceptance: Whether the recorded validation is repeated.
    """
    trained, expected = drafter_of(saved, saved["hyper_parameters"])
    yield examine_files(folder)
    try:
        config = checkpoint.read_config(folder)
    except ValueError as error:
        yield Finding("configuration", False, str(error))
        return
    yield examine_config(config, expected)
    yield examine_weights(folder, {name: weight.cpu() for name, weight in trained.state_dict().items()})
    base_finding = examine_base(config, base, saved["base"].get("weights_hash"))
    yield base_finding
    try:
        exported, _ = checkpoint.load(folder, base.model.dtype)
    except ValueError as error:
        yield Finding("drafts", False, str(error))
        return
    if not base_finding.is_correct:
        yield Finding("drafts", None, "not compared: it is another base")
        return
    exported.to(base.model.device)
    trained.to(base.model.device, base.model.dtype).eval().requires_grad_(False)
    yield examine_drafts(trained, exported, base, sample)
    if acceptance:
        in_stored_dtype, _ = checkpoint.load(folder)
        yield examine_acceptance(saved, in_stored_dtype.to(base.model.device), base)
