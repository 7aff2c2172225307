"""Memory that a training recipe needs on one device, estimated from the shape of its base, which is not downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DDPStrategy

import drafters
from benchmarks.harness import ResultTable, main, show
from data.files import read_yaml
from data.hub import split_revision
from drafters import recipe
from inference.verifier.base import Base
from train.callbacks.estimate import readable
from train.callbacks.memory import Setting, memory_parts, peak_memory
from train.callbacks.rehearsal import BatchSize
from train.cli.lightning_command import find_config
from train.strategies import FSDP2

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# What the hub's config.json of each base says of its shape.
LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-8B": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
    ),
    "meta-llama/Meta-Llama-3-8B-Instruct": (
        "llama",
        LLAMA_3
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 8192,
        },
    ),
    "meta-llama/Llama-3.3-70B-Instruct": (
        "llama",
        LLAMA_3
        | {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "max_position_embeddings": 131072,
        },
    ),
    "lmsys/vicuna-7b-v1.3": (
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
    ),
}


def recipe_memory(
    configs: list[str] = ["qwen3_8b.yaml", "llama3_8b.yaml", "vicuna_7b.yaml"],  # noqa: B006
    base: str | None = None,
    hidden_layers: list[int] | None = None,
    devices: int = 8,
    sharded_base: bool = False,
    sharded_drafter: bool = False,
    batch_size: int | None = None,
    out: str | None = None,
) -> None:
    """Estimate what `lightning fit` needs on each GPU for a full batch of texts of the greatest length.

    Args:
        configs: Training configurations.
        base: Train for this base instead of the configuration's.
        hidden_layers: Base layers that the drafter reads instead of the configuration's.
        devices: Number of GPUs.
        sharded_base: With strategy/sharded_base.yaml.
        sharded_drafter: With strategy/fsdp.yaml.
        batch_size: Texts per GPU instead of the configuration's.
        out: Markdown file to write the tables to.
    """
    tables = []
    for config in configs:
        settings = read_yaml(find_config(config))
        if base:
            settings["model"]["base"] = base
        if hidden_layers:
            settings["model"]["drafter"]["init_args"]["trunk"]["hidden_layers"] = hidden_layers
        if batch_size:
            settings["data"]["batch_size"] = batch_size
        parts = estimated_parts(settings, devices, sharded_base, sharded_drafter)
        table = ResultTable(f"{config}: {settings['model']['base']} on {devices} GPUs", ["purpose", "memory of a GPU"])
        table.rows = [[name, readable(size)] for name, size in parts.items()]
        table.rows.append(["at the worst moment", readable(peak_memory(parts))])
        sizes = settings["data"]
        table.notes.append(f"estimated, for {sizes['batch_size']} texts of {sizes['max_length']} tokens on each GPU")
        tables.append(table)
    show(tables, torch.device("cpu"), out)


def estimated_parts(
    settings: dict[str, Any], devices: int = 8, sharded_base: bool = False, sharded_drafter: bool = False
) -> dict[str, float]:
    """Return the bytes that a training configuration needs on each GPU, by purpose.

    Args:
        settings: The configuration.
        devices: Number of GPUs.
        sharded_base: Whether the layers of the base are sharded over them.
        sharded_drafter: Whether the drafter is.

    Raises:
        ValueError: The shape of the base is not known here.
    """
    base = base_without_weights(split_revision(settings["model"]["base"])[0], settings["model"]["base_dtype"])
    node = settings["model"]["drafter"]
    with torch.device("meta"):
        drafter = recipe.build(getattr(drafters, node["class_path"].split(".")[-1]), base.shape, node["init_args"])
    strategy = FSDP2() if sharded_drafter else DDPStrategy()
    setting = Setting("cuda", devices, strategy, torch.bfloat16, has_sharded_base=sharded_base)
    return memory_parts(
        base, drafter, BatchSize(settings["data"]["batch_size"], settings["data"]["max_length"]), setting
    )


def base_config(name: str) -> PretrainedConfig:
    """Return the configuration of a base of `BASES`; raises ValueError for any other."""
    from transformers import AutoConfig

    if name not in BASES:
        raise ValueError(f"the shape of {name} is not known here: known are {', '.join(BASES)}")
    kind, shape = BASES[name]
    return AutoConfig.for_model(kind, **shape)


def base_without_weights(name: str, dtype: str) -> Base:
    """Create a base of `BASES` on the meta device, without a tokenizer."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(base_config(name), dtype=getattr(torch, dtype))
    return Base(name, model, None)  # type: ignore[arg-type]  # only its shape is read


if __name__ == "__main__":
    main(recipe_memory)
