"""``drafters export``: turn a Lightning checkpoint into a folder that decoding loads without Lightning."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from data.files import code_span, escape_markdown, write_text, yaml_line
from data.tokenizer import load_tokenizer
from drafters import checkpoint, recipe
from drafters.checkpoint import DrafterConfig
from drafters.protocol import BaseShape, LearnedDrafter
from train.checkpointing.checkpoint_reader import hyper_parameters, read_checkpoint
from train.export import vllm
from train.export.folders import check_output_folder, new_folder

Format = Literal["drafters", "vllm"]
ExportedDtype = Literal["bfloat16", "float16", "float32"]


def export(
    ckpt: str,
    out: str,
    base: str | None = None,
    overwrite: bool = False,
    format: Format = "drafters",
    mask_token_id: int | None = None,
    dtype: ExportedDtype = "bfloat16",
    max_shard_size: str | None = None,
) -> None:
    """Turn a training checkpoint into a folder with config.json, model.safetensors, SHA256SUMS and README.md.

    The folder of a drafter is for `drafters eval --drafter ctc=OUT`. The folder of a pre-trained base is an ordinary
    transformers model.

    Args:
        ckpt: Checkpoint that `lightning fit` wrote: a file, or the folder that DeepSpeed writes. With ``--format vllm``
            also the folder of a drafter.
        out: Folder to write.
        base: Folder or hub id of the base, if it is not the one of the training. The model card names it, and
            ``vllm`` reads the embedding for a block drafter from it.
        overwrite: Replace a drafter or base in this folder.
        format: ``drafters``, which `drafters eval` reads, or ``vllm``, for Medusa, EAGLE, EAGLE-3, and for Block as
            speculators' DSpark.
        mask_token_id: For a block drafter in vLLM's format, a token that never occurs in text; its embedding becomes
            that of the mask.
        dtype: Dtype of the weights in vLLM's format; a drafter's own folder keeps that of the training.
        max_shard_size: For a base, the maximum size of a file of weights, such as 16MB; a single file if not given.
    """
    folder = Path(out)
    check_output_folder(folder, overwrite)
    if max_shard_size and not re.fullmatch(r"[1-9][0-9]*(KB|MB|GB)", max_shard_size):
        raise ValueError(f"max_shard_size must be a size such as 16MB or 2GB, not {max_shard_size!r}")
    if format == "vllm" and (Path(ckpt) / "config.json").is_file():
        _export_folder(Path(ckpt), folder, base, mask_token_id, dtype)
        return
    saved = read_checkpoint(Path(ckpt))
    arguments = hyper_parameters(saved)
    if "drafter" in arguments:
        drafter, config = drafter_of(saved, arguments, base)
        with new_folder(folder) as new:
            if format == "vllm":
                vllm.write(new, drafter, config, mask_token_id, getattr(torch, dtype))
            else:
                checkpoint.save(new, drafter, config)
                card = model_card(config, sum(weight.numel() for weight in drafter.parameters()))
                write_text(new / "README.md", card)
    elif "context_length" in arguments and format == "vllm":
        raise ValueError(f"{ckpt} holds a base, which vLLM reads as a transformers model: leave out --format")
    elif "context_length" in arguments:
        with new_folder(folder) as new:
            _export_base(saved, arguments, new, max_shard_size)
    else:
        raise ValueError(f"{ckpt} holds neither a drafter nor a base of this project")
    print(f"wrote {folder}")


def _export_folder(
    source: Path, folder: Path, base: str | None, mask_token_id: int | None, dtype: ExportedDtype
) -> None:
    """Write the drafter of a folder in vLLM's format."""
    drafter, config = checkpoint.load(source)
    with new_folder(folder) as new:
        config = replace(config, base_name=base or config.base_name)
        vllm.write(new, drafter, config, mask_token_id, getattr(torch, dtype))
    print(f"wrote {folder}")


def drafter_of(
    saved: dict[str, Any], arguments: dict[str, Any], base: str | None = None
) -> tuple[LearnedDrafter, DrafterConfig]:
    """Return the drafter of a checkpoint and the configuration of its folder.

    Args:
        saved: The checkpoint, as `read_checkpoint` returns it.
        arguments: Its hyper-parameters.
        base: Folder or hub id of the base, if it is not the one of the training.

    Raises:
        ValueError: Something is missing, or the weights do not fit the recipe.
    """
    try:
        recipe, trained_for = arguments["drafter"], saved["base"]
        config = DrafterConfig(
            class_path=recipe["class_path"],
            init_args=dict(recipe.get("init_args") or {}),
            base=BaseShape(**trained_for["shape"]),
            base_name=base or trained_for["name"],
            tokenizer_hash=trained_for["tokenizer_hash"],
            training=_describe_training(saved, arguments),
        )
        config = replace(config, init_args=config.nested_init_args())
        weights = {
            name.removeprefix("drafter."): weight
            for name, weight in saved["state_dict"].items()
            if name.startswith("drafter.")
        }
        config.check_weights({name: weight.shape for name, weight in weights.items()})
        drafter = config.build()
        drafter.load_state_dict(weights)
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        problem = (
            f"{type(error).__name__}: {str(error).splitlines()[-1].strip()}" if str(error) else type(error).__name__
        )
        raise ValueError(f"the checkpoint holds no complete drafter ({problem}): train or copy it again") from error
    return drafter, config


def _describe_training(saved: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what the exported configuration records about the training."""
    measured, data = saved.get("measured"), saved.get("datamodule_hyper_parameters", {})
    initial = arguments.get("initial_drafter")
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
        **({"initial_drafter": initial} if initial else {}),
    }


def _export_base(saved: dict[str, Any], arguments: dict[str, Any], folder: Path, max_shard_size: str | None) -> None:
    from train.base_training import BaseTraining

    try:
        weights = saved["state_dict"]
        if arguments["num_layers"] > len(weights):
            raise ValueError(f"num_layers is {arguments['num_layers']}, but the weights are {len(weights)} tensors")
        module = BaseTraining(**{name: value for name, value in arguments.items() if not name.startswith("_")})
        module.load_state_dict(weights)
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        problem = str(error).splitlines()[-1].strip() if str(error) else type(error).__name__
        raise ValueError(f"the checkpoint holds no complete base ({problem}): train or copy it again") from error
    sharded: dict[str, Any] = {"max_shard_size": max_shard_size} if max_shard_size else {}
    module.model.bfloat16().save_pretrained(folder, **sharded)
    load_tokenizer(arguments["tokenizer"]).save_pretrained(folder)


def model_card(config: DrafterConfig, num_parameters: int) -> str:
    """Return the README of an exported drafter."""
    training, name = config.training, config.class_path.removeprefix("drafters.").lower()
    length = training["val_acceptance_length"]
    decoded = (
        "the base's own greedy answers to held-out prompts" if training["val_answers"] == "greedy" else "held-out text"
    )
    measured = (
        f"{length:.2f} tokens per base forward at step {training['val_step']}, simulated on {decoded}"
        if length
        else "not measured in training"
    )
    arguments = "\n".join(
        f"| {escape_markdown(key)} | {escape_markdown(value)} |"
        for key, value in recipe.flattened(config.init_args).items()
    )
    steps = f"{training['steps']} steps"
    if "initial_drafter" in training:
        steps += f"\n- Trained on from {code_span(training['initial_drafter'])}"
    base = code_span(config.base_name)
    used = f"drafters eval --base {config.base_name} --drafter {name}=THIS_FOLDER --benchmark mt_bench"
    return f"""---
{yaml_line("base_model", config.base_name)}
library_name: drafters
tags: [speculative-decoding, {name}]
---
# {config.class_path} for {escape_markdown(config.base_name)}

A drafter for lossless speculative decoding: it proposes a tree of tokens, the base verifies it in one forward, and
the text stays the base's own. {num_parameters:,} parameters.

- Base: {base} (hidden size {config.base.hidden_size}, vocabulary {config.base.vocab_size}, tokenizer
  {escape_markdown(config.tokenizer_hash)}). It fits no other.
- Training data: {escape_markdown(", ".join(map(str, training["data"]))) or "not recorded"}, {steps}
- Acceptance length: {measured}
- Command: {code_span(training["command"] or "not recorded")}

Use it: {code_span(used)}

| argument | value |
|---|---|
{arguments}
"""
