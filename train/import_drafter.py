"""``drafters import``: turn a drafter in the format of another tool into a folder of this project."""

from functools import reduce
from pathlib import Path
from typing import Any

import torch

from data.files import write_text
from data.gguf import DRAFTER_FILE, is_gguf
from data.safe_text import safe_line
from data.tokenizer import tokenizer_hash
from drafters import checkpoint
from drafters.checkpoint import DrafterConfig
from drafters.protocol import LearnedDrafter
from inference.verifier.base import Base, load_base
from train.export import check_output_folder, check_written, new_folder
from train.formats import gguf
from train.formats.block import read_block
from train.formats.eagle import read_eagle, read_eagle3
from train.formats.public import PublicCheckpoint, PublicDrafter, read_public_checkpoint, read_target
from train.model_card import model_card

ARCHITECTURES = {
    "Eagle3LlamaForCausalLM": "eagle3",
    "LlamaForCausalLMEagle3": "eagle3",  # SpecForge
    "Qwen3Eagle3Model": "eagle3",  # DeepSpec
    "EagleLlamaForCausalLM": "eagle",
    "DFlashDraftModel": "dflash",  # DFlash itself and SpecForge
    "DSparkDraftModel": "dspark",  # SpecForge
    "Qwen3DSparkModel": "dspark",  # DeepSpec, with and without a Markov head
}


def import_drafter(folder: str, out: str, base: str | None, overwrite: bool) -> None:
    """Run `drafters import`, see `train.commands.import_drafter`."""
    place = Path(out)
    check_output_folder(place, overwrite)
    if place.exists() and place.samefile(folder):
        raise ValueError(f"{out} is the folder that is read: give another one")
    file = Path(folder) / DRAFTER_FILE
    path = file if file.is_file() else Path(folder)
    source = gguf.read(path) if is_gguf(path) else read_public_checkpoint(path)
    kind = method_of(source)
    name = base or source.speculators.verifier.name_or_path or source.config.get("target_model_name_or_path")
    if not isinstance(name, str):
        raise ValueError("--base is missing: this drafter's config.json does not name the base it was trained for")
    dtype: Any = read_target(name).stored_dtype  # the base's own, so that copies of its weights are equal
    loaded = load_base(name, dtype)
    if kind in ("eagle", "eagle3"):
        public = (read_eagle if kind == "eagle" else read_eagle3)(source, loaded.shape, loaded.base_weights)
    else:
        public = read_block(source, loaded.shape, loaded.base_weights, kind == "dspark")
    source.check_all_taken()
    drafter, config = build(public, loaded, Path(folder))
    with new_folder(place) as new:
        checkpoint.save(new, drafter, config)
        check_written(new, drafter, config)
        write_text(new / "README.md", model_card(drafter, config))
    print(f"wrote {place}: {config.class_path} for {safe_line(config.base_name)}")
    for part in public.left_out:
        print(f"left out: {part}")


def method_of(source: PublicCheckpoint) -> str:
    """The method of a checkpoint: ``eagle``, ``eagle3``, ``dflash`` or ``dspark``; raise ValueError for another."""
    algorithm = source.config.get("speculators_model_type")
    if algorithm is not None:
        if algorithm not in ("eagle3", "dflash", "dspark"):
            source.refuse(f"{algorithm} of speculators is not read; eagle3, dflash and dspark are")
        return algorithm
    architectures = source.config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if architecture == "LlamaForCausalLM" and "fc.weight" in source.weights:  # EAGLE names both of its kinds so
        return "eagle3" if any(name.startswith("midlayer.") for name in source.weights) else "eagle"
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        source.refuse(f"its architecture is {architecture}; read are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[architecture]


def build(public: PublicDrafter, base: Base, folder: Path) -> tuple[LearnedDrafter, DrafterConfig]:
    """The drafter in the dtype of the checkpoint, and its configuration.

    Raises ValueError if the weights do not have the shapes that the configuration asks for.
    """
    config = DrafterConfig(
        class_path=public.class_path,
        init_args=public.init_args,
        base=public.shape,
        base_name=base.name,
        tokenizer_hash=tokenizer_hash(base.tokenizer),
        training={"imported_from": folder.resolve().name, "left_out": list(public.left_out)},
    )
    try:
        drafter = config.build(public.weights)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise ValueError(f"the weights in {folder} do not fit its config.json ({reason})") from error
    dtypes = [weight.dtype for weight in public.weights.values() if weight.is_floating_point()]
    return drafter.to(reduce(torch.promote_types, dtypes)), config
