"""``drafters export``: turn a Lightning checkpoint into a folder that decoding loads without Lightning."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from data.files import CHECKSUMS, atomic_folder, read_json, write_checksums, write_text
from data.gguf import DRAFTER_FILE
from drafters import checkpoint
from drafters.checkpoint import DrafterConfig
from drafters.protocol import BaseShape, LearnedDrafter
from train.checkpoints import read_checkpoint
from train.formats import gguf, vllm
from train.model_card import model_card

WEIGHTS = "model.safetensors", "model.safetensors.index.json", DRAFTER_FILE


def export(
    ckpt: str, out: str, base: str | None, overwrite: bool, format: str, mask_token_id: int | None,
    dtype: str | None, license: str | None, results: list[str] | None,
) -> None:  # fmt: skip
    """Run `drafters export`, see `train.commands.export`."""
    folder = Path(out)
    check_output_folder(folder, overwrite)
    if (Path(ckpt) / "config.json").is_file():
        drafter, config = checkpoint.load(ckpt)
        stored = load_file(Path(ckpt) / "model.safetensors").values()
        drafter.to(next(weight.dtype for weight in stored if weight.is_floating_point()))
        config = replace(config, base_name=base or config.base_name)
    else:
        drafter, config = drafter_of(read_checkpoint(Path(ckpt)), base)
    with new_folder(folder) as new:
        if format != "drafters":
            write = vllm.write if format == "vllm" else gguf.write
            write(new, drafter, config, mask_token_id, getattr(torch, dtype or "bfloat16"))
        else:
            if dtype:
                drafter.to(getattr(torch, dtype))
            checkpoint.save(new, drafter, config)
            check_written(new, drafter, config)
            write_text(new / "README.md", model_card(drafter, config, license, results or []))
    print(f"wrote {folder}")


def check_output_folder(folder: Path, overwrite: bool) -> None:
    """Raise ValueError if the folder holds other files, another model than a drafter, or one not to be replaced."""
    if any((folder / name).exists() for name in WEIGHTS) and not overwrite:
        raise ValueError(f"{folder} already holds a model: give another folder, or --overwrite to replace it")
    if folder.is_dir() and any(folder.iterdir()) and not holds_drafter(folder):
        raise ValueError(f"{folder} holds other files than those of a drafter: give another folder")


def holds_drafter(folder: Path) -> bool:
    """Whether a folder is one that `export` or `import` wrote, or a public drafter; a base must not be replaced."""
    if (folder / DRAFTER_FILE).exists():
        return True
    if not (folder / "config.json").is_file():
        return False
    config = read_json(folder / "config.json")
    is_public = "speculators_version" in config or config.get("model_type") in ("medusa", "eagle")
    return (folder / CHECKSUMS).exists() or is_public or "class_path" in config


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that gets checksums and replaces ``folder`` when it is whole."""
    with atomic_folder(folder, replaced=["model*.safetensors*", DRAFTER_FILE, "config.json"]) as new:
        yield new
        write_checksums(new)


def drafter_of(saved: Any, base: str | None) -> tuple[LearnedDrafter, DrafterConfig]:
    """Return the drafter of a checkpoint that `read_checkpoint` has read, and the configuration of its folder.

    The base is named if it is not the one of the training. Raises ValueError if the checkpoint is one of something
    else, a part is missing, or the weights do not fit the recipe.
    """
    arguments = saved.get("hyper_parameters") if isinstance(saved, dict) else None
    if not isinstance(arguments, dict) or "drafter" not in arguments:
        raise ValueError("the checkpoint holds no drafter: give the .ckpt that `lightning fit` wrote")
    try:
        node, trained_for = arguments["drafter"], saved["base"]
        config = DrafterConfig(
            class_path=node["class_path"],
            init_args=dict(node.get("init_args") or {}),
            base=BaseShape(**trained_for["shape"]),
            base_name=base or trained_for["name"],
            tokenizer_hash=trained_for["tokenizer_hash"],
            training=_describe_training(saved),
        )
        weights = {
            name.removeprefix("drafter."): weight
            for name, weight in saved["state_dict"].items()
            if name.startswith("drafter.")
        }
        drafter = config.build(weights)
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"
        raise ValueError(f"the checkpoint holds no complete drafter ({problem}): train or copy it again") from error
    return drafter, config


def _describe_training(saved: dict[str, Any]) -> dict[str, Any]:
    """Return what the exported configuration records about the training."""
    arguments, measured = saved["hyper_parameters"], saved.get("measured")
    data = saved.get("datamodule_hyper_parameters", {})
    return {
        "data": list(data.get("files", [])),
        "template": data.get("template"),
        "max_length": data.get("max_length"),
        "steps": saved["global_step"],
        "learning_rate": arguments["learning_rate"],
        "val_answers": arguments["val_answers"],
        "val_acceptance_length": measured and round(measured["acceptance_length"], 4),
        "val_step": measured and measured["step"],
        "command": saved.get("command"),
        "initial_drafter": arguments.get("initial_drafter"),
    }


def check_written(folder: Path, drafter: LearnedDrafter, config: DrafterConfig) -> None:
    """Raise ValueError if a folder does not hold a drafter's weights, bit by bit, and its configuration."""
    stored, weights = load_file(folder / "model.safetensors"), drafter.state_dict()
    if invalid := [name for name, weight in weights.items() if not weight.isfinite().all()]:
        raise ValueError(
            f"{invalid[0]} of the checkpoint holds numbers that are not finite: take an earlier checkpoint"
        )
    differing = stored.keys() ^ weights.keys()
    differing |= {name for name in stored.keys() - differing if not torch.equal(stored[name], weights[name].cpu())}
    if differing:
        raise ValueError(f"{min(differing)} was not written as it is in the checkpoint: the disk may be damaged")
    if json.dumps(asdict(checkpoint.read_config(folder))) != json.dumps(asdict(config)):
        raise ValueError("config.json was not written as it is in the checkpoint: the disk may be damaged")
