"""Which drafters vLLM can serve, and what of the base they are checked against."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from data.files import check_files, read_json, reading, validated
from data.safe_text import safe_line
from drafters import checkpoint, recipe
from drafters.checkpoint import DrafterConfig
from drafters.parallel import ParallelDrafter
from drafters.protocol import BaseShape, Drafter, Limits
from drafters.public_formats import SpecForgeLayers, SpeculatorsConfig
from drafters.tree import DraftTree
from inference import drafter_specs
from inference.verifier.base import BaseConfig

SUPPORTED = "0.32", "0.33"
"""Versions of vLLM whose hook the plugin knows: tested in the first, compared with the source of the second."""
REQUIREMENT = "vllm>=0.32,<0.34"
METHODS = "medusa", "eagle", "eagle3", "dspark"
NAMES_OF_OTHERS = "eagle-", "eagle3", "dflash", "dspark"
"""Parts of a path by which vLLM takes a Medusa drafter for one of another method, whatever the configuration says."""


def check_version(version: str) -> None:
    """Raise ValueError if this is not a version of vLLM that the plugin knows."""
    if ".".join(version.split("+")[0].split(".")[:2]) not in SUPPORTED:
        raise ValueError(
            f"vLLM {safe_line(version)} is not supported: its hook for drafters is experimental and changes; "
            f"install '{REQUIREMENT}'"
        )


def spec_of(drafter: str) -> str:
    """Return the spec ``NAME=FOLDER`` of an exported drafter's folder, in vLLM's format too; a spec stays as it is.

    Raises ValueError if it is a path without an exported drafter.
    """
    folder = drafter_specs.drafter_folder(drafter)
    if not folder.is_dir():
        if "/" in drafter.partition("=")[0]:
            raise ValueError(f"no folder {drafter}: pass a folder that `drafters export` wrote")
        return drafter
    if native := _read(folder):
        return f"{native.method}={folder}"
    return f"{drafter_specs.name_of(checkpoint.read_config(folder))}={drafter}"


def read_parallel(spec: str, base: BaseConfig, num_tokens: int) -> tuple[Path, DrafterConfig]:
    """Return the folder of a CTC or block drafter and its configuration, set to draft chains of ``num_tokens`` at most.

    Raises ValueError if vLLM cannot serve the drafter of this spec, or it was trained for another base.
    """
    name, folder, _ = parts = drafter_specs.split(spec)
    drafter_class = parts.registration.learned_class
    if drafter_class is None or not issubclass(drafter_class, ParallelDrafter):
        raise ValueError(
            f"vLLM cannot serve the drafter {name} through this plugin: it takes CTC, block, and drafters that read "
            "only tokens; of Medusa, EAGLE and EAGLE-3 pass the folder that `drafters export --format vllm` writes"
        )
    config = drafter_specs.learned_config(parts, base)
    draft = config.init_args.get(recipe.DRAFT, {})
    if draft.get("draws"):
        raise ValueError(f"{folder} samples its drafts (draws), which vLLM cannot verify: pass {name}={folder}:draws=0")
    if config.init_args.get("trunk", {}).get("llama_layer"):
        raise ValueError(f"{folder} was trained with llama_layer: true, whose last hidden states vLLM does not keep")
    chain = {"tree": "chain", "num_nodes": num_tokens}
    init_args = config.init_args | {recipe.DRAFT: draft | chain}
    return drafter_specs.drafter_folder(folder or ""), replace(config, init_args=init_args)


def chain_builder(spec: str, base: BaseConfig, num_tokens: int) -> Callable[[], Drafter]:
    """Return a function that builds independent drafters of chains of up to ``num_tokens``, each for one text.

    Raises ValueError if the drafter of this spec, such as ``joint:runner_up=0``, is unknown, reads more than tokens, or
    its file belongs to another tokenizer.
    """
    try:
        build = drafter_specs.builder_from_tokens(spec, base)
    except ValueError as error:
        raise ValueError(f"vLLM hands a drafter nothing but tokens: {error}") from error
    return lambda: ChainDrafter(build(), num_tokens)


class ChainDrafter(Drafter):
    """Proposes the first ``num_tokens`` of the first path of another drafter's tree, for engines that verify a path."""

    def __init__(self, drafter: Drafter, num_tokens: int) -> None:
        self.drafter, self.num_tokens = drafter, num_tokens
        self.required_outputs, self.remembers = drafter.required_outputs, drafter.remembers
        self.begin, self.observe = drafter.begin, drafter.observe  # type: ignore[method-assign]
        self.rewind, self.reset = drafter.rewind, drafter.reset  # type: ignore[method-assign]

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        tokens = self.drafter.propose(seq, limits).first_path(min(self.num_tokens, limits.max_depth, limits.max_nodes))
        return DraftTree.chain(tokens)


# ---- the formats of vLLM's own methods, as `drafters export --format vllm` writes them


@dataclass(frozen=True)
class NativeDrafter:
    """A drafter that vLLM reads itself."""

    method: str  # as vLLM calls it
    folder: Path
    num_tokens: int | None  # of a draft, if the folder says so
    base_name: str | None  # if the folder names it
    sizes: dict[str, int]  # of the base that it was trained for
    last_fused_layer: int = 0  # the last layer of the base that it reads; 0 if the folder does not name its layers

    def check_chain(self, num_tokens: int) -> None:
        """Raise ValueError if vLLM could not start the drafter with chains of this length, or under this path."""
        if self.method == "dspark" and self.num_tokens and num_tokens > self.num_tokens:
            raise ValueError(f"{self.folder} drafts at most the {self.num_tokens} tokens it was trained for")
        if self.method != "medusa":
            return
        if self.num_tokens and num_tokens > self.num_tokens:  # vLLM makes as many heads as tokens
            raise ValueError(
                f"{self.folder} has {self.num_tokens} heads, which draft at most as many tokens, not {num_tokens}"
            )
        if part := next((part for part in NAMES_OF_OTHERS if part in str(self.folder).lower()), None):
            raise ValueError(f"vLLM takes a path with {part!r} for another method: rename or move {self.folder}")

    def check_fit(self, name: str, shape: BaseShape) -> None:
        """Raise ValueError if a base has other sizes; these formats do not tell the tokenizer."""
        for size, number in self.sizes.items():
            if number != getattr(shape, size):
                problem = f"was trained for a base with {size} {number}, but {name} has {getattr(shape, size)}"
                raise ValueError(f"{self.folder} {problem}: pass the base it was trained for")
        if self.last_fused_layer > shape.num_layers:
            problem = f"reads layer {self.last_fused_layer} of its base, but {name} has {shape.num_layers}"
            raise ValueError(f"{self.folder} {problem}: pass the base it was trained for")


def read_native(spec: str) -> NativeDrafter | None:
    """Return the drafter of a spec whose folder is in the format of one of vLLM's own methods; else None.

    Raises ValueError if it is another method than the spec names, the spec has options, or a file is damaged.
    """
    name, folder, options = drafter_specs.split(spec)
    native = _read(drafter_specs.drafter_folder(folder)) if name in METHODS and folder else None
    if native is None:
        return None
    if native.method != name:
        raise ValueError(f"{folder} holds a drafter for vLLM's method {native.method}, not {name}")
    if options:
        raise ValueError(f"{folder} is in vLLM's own format, which has no options: leave out {options}")
    check_files(native.folder)
    return native


def _read(folder: Path) -> NativeDrafter | None:
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else None
    if not isinstance(config, dict) or "class_path" in config or (method := _method_of(config, folder)) is None:
        return None
    with reading(path, "export the drafter again"):
        part = config.get("transformer_layer_config") or config
        sizes = validated(dict[str, int], {size: part[size] for size in ("hidden_size", "vocab_size")})
        speculators = validated(SpeculatorsConfig, config.get("speculators_config") or {})
        fused = validated(SpecForgeLayers, config.get("eagle_config") or {}).eagle_aux_hidden_state_layer_ids
        layers = validated(tuple[int, ...], config.get("eagle_aux_hidden_state_layer_ids") or fused or (0,))
        num_tokens = validated(int | None, config.get("num_heads")) if method == "medusa" else speculators.num_tokens
    last_layer = max(layers) if method == "eagle3" else 0
    return NativeDrafter(method, folder, num_tokens, speculators.verifier.name_or_path, sizes, last_layer)


def _method_of(config: dict[str, Any], folder: Path) -> str | None:
    if config.get("speculators_model_type") in ("eagle3", "dspark"):
        return config["speculators_model_type"]
    if config.get("model_type") == "medusa":
        return "medusa"
    try:
        with safe_open(folder / "model.safetensors", "pt") as weights:
            names = set(weights.keys())
    except (SafetensorError, OSError):
        return None
    if "fc.weight" not in names or config.get("model_type") != "llama":
        return None
    # EAGLE and SpecForge write EAGLE-3 under the model type and the architecture of EAGLE.
    return "eagle3" if any(name == "d2t" or name.startswith("midlayer.") for name in names) else "eagle"
