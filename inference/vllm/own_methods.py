"""Drafters in the formats of vLLM's own methods, as `drafters export --format vllm` writes them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from data.files import check_files, read_json, reading, validated
from drafters.protocol import BaseShape
from inference import drafter_specs

METHODS = "medusa", "eagle", "eagle3", "dspark"
NAMES_OF_OTHERS = "eagle-", "eagle3", "dflash", "dspark"
"""Parts of a path by which vLLM takes a Medusa drafter for one of another method, whatever the configuration says."""


# ---- what is read of config.json; None where a format leaves it out


@dataclass(frozen=True)
class Proposal:
    """How many tokens a checkpoint of speculators drafts."""

    speculative_tokens: int | None = None


@dataclass(frozen=True)
class Verifier:
    """The base that a checkpoint of speculators names."""

    name_or_path: str | None = None


@dataclass(frozen=True)
class Algorithm:
    """The part ``speculators_config``."""

    verifier: Verifier = Verifier()
    proposal_methods: tuple[Proposal, ...] = ()


@dataclass(frozen=True)
class FusedLayers:
    """The part ``eagle_config`` of SpecForge."""

    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    use_aux_hidden_state: bool = True


# ---- the drafters


@dataclass(frozen=True)
class OwnMethod:
    """A drafter that vLLM reads itself."""

    method: str  # as vLLM calls it
    folder: Path
    num_tokens: int | None  # of a draft, if the folder says so
    base_name: str | None  # if the folder names it
    sizes: dict[str, int]  # of the base that it was trained for
    last_fused_layer: int = 0  # the last layer of the base that it reads; 0 if the folder does not name its layers

    def check_chain(self, num_tokens: int) -> None:
        """Raise ValueError if vLLM could not start the drafter with chains of this length, or under this path."""
        if self.method != "medusa":
            return
        if self.num_tokens and num_tokens > self.num_tokens:  # vLLM makes as many heads as tokens
            raise ValueError(
                f"{self.folder} has {self.num_tokens} heads, which draft at most as many tokens, not {num_tokens}"
            )
        if found := [part for part in NAMES_OF_OTHERS if part in str(self.folder).lower()]:
            raise ValueError(f"vLLM takes a path with {found[0]!r} for another method: rename or move {self.folder}")

    def check_fit(self, name: str, shape: BaseShape) -> None:
        """Raise ValueError if a base has other sizes; these formats do not tell the tokenizer."""
        problems = [
            f"was trained for a base with {size} {own}, but {name} has {getattr(shape, size)}"
            for size, own in self.sizes.items()
            if own != getattr(shape, size)
        ]
        if self.last_fused_layer > shape.num_layers:
            problems.append(f"reads layer {self.last_fused_layer} of its base, but {name} has {shape.num_layers}")
        if problems:
            raise ValueError(f"{self.folder} {problems[0]}: pass the base it was trained for")


def spec_of_folder(folder: Path) -> str | None:
    """Return the spec of a folder in such a format; None for another one."""
    found = _read(folder)
    return f"{found.method}={folder}" if found else None


def read_own_method(spec: str) -> OwnMethod | None:
    """Return the drafter of a spec whose folder is in the format of one of vLLM's own methods; else None.

    Raises ValueError if it is another method than the spec names, the spec has options, or a file is damaged.
    """
    name, folder, options = drafter_specs.split(spec)
    if name not in METHODS or not folder or (found := _read(drafter_specs.drafter_folder(folder))) is None:
        return None
    if found.method != name:
        raise ValueError(f"{folder} holds a drafter for vLLM's method {found.method}, not {name}")
    if options:
        raise ValueError(f"{folder} is in vLLM's own format, which has no options: leave out {options}")
    check_files(found.folder)
    return found


def _read(folder: Path) -> OwnMethod | None:
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else None
    if not isinstance(config, dict) or "class_path" in config or (method := _method_of(config, folder)) is None:
        return None
    with reading(path, "export the drafter again"):
        part = config.get("transformer_layer_config") or config
        sizes = validated(dict[str, int], {size: part[size] for size in ("hidden_size", "vocab_size")})
        algorithm = validated(Algorithm, config.get("speculators_config") or {})
        fused = validated(FusedLayers, config.get("eagle_config") or {}).eagle_aux_hidden_state_layer_ids
        layers = validated(tuple[int, ...], config.get("eagle_aux_hidden_state_layer_ids") or fused or (0,))
        proposed = [proposal.speculative_tokens for proposal in algorithm.proposal_methods]
        own = config.get("num_heads") if method == "medusa" else next(iter(proposed), None)
        num_tokens = validated(int | None, own)
    last_layer = max(layers) if method == "eagle3" else 0
    return OwnMethod(method, folder, num_tokens, algorithm.verifier.name_or_path, sizes, last_layer)


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
