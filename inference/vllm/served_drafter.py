"""Which drafters vLLM can serve, and what of the base they are checked against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from data.files import safe_line
from drafters import checkpoint, recipe
from drafters.checkpoint import DrafterConfig
from drafters.parallel import ParallelDrafter
from drafters.protocol import BaseShape, Drafter, RequiredOutputs
from drafters.registry import registered
from inference import drafter_builders, drafter_specs
from inference.verifier.runner import Runner
from inference.vllm.chains import ChainDrafter
from inference.vllm.own_methods import spec_of_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUPPORTED = "0.32"
"""Version of vLLM that the plugin is tested with; the hook is experimental there and may change in others."""


class NeedsTheBase(ValueError):
    """A drafter needs more of the base than vLLM hands to it."""


@dataclass(frozen=True)
class ServedBase:
    """What is known of the base that vLLM serves, in place of `inference.verifier.base.Base`.

    Args:
        name: Folder or hub id.
        tokenizer: Its tokenizer.
        shape: Its dimensions.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    shape: BaseShape

    @property
    def model(self) -> NoReturn:
        raise NeedsTheBase("the base's model")

    base_weights = context_length = model


@dataclass(frozen=True)
class ServedRunner:
    """Stands in for `inference.verifier.runner.Runner` while a drafter is built that only reads tokens."""

    base: ServedBase


def check_version(version: str) -> None:
    """Raise ValueError if this is not a version of vLLM that the plugin is tested with."""
    if version.split("+")[0].split(".")[:2] != SUPPORTED.split("."):
        raise ValueError(
            f"vLLM {safe_line(version)} is not supported: its hook for drafters is experimental and changes; "
            f"install vllm=={SUPPORTED}.*"
        )


def spec_of(drafter: str) -> str:
    """Return the spec ``NAME=FOLDER`` of an exported drafter's folder, in vLLM's format too; a spec stays as it is.

    Raises:
        ValueError: It is a path without an exported drafter.
    """
    found = drafter_builders.drafter_folder(drafter)
    if not found.is_dir():
        if "/" in drafter.partition("=")[0]:
            raise ValueError(f"no folder {drafter}: pass a folder that `drafters export` wrote")
        return drafter
    return spec_of_folder(found) or f"{drafter_specs.name_of(checkpoint.read_config(found))}={drafter}"


def is_learned(spec: str) -> bool:
    """Whether a spec names a drafter with weights."""
    registration = registered().get(drafter_specs.split(spec)[0])
    return registration is not None and registration.learned_class is not None


def read_parallel(spec: str, base: ServedBase, num_tokens: int) -> tuple[Path, DrafterConfig]:
    """Return the folder of a CTC or block drafter and its configuration, set to draft chains.

    Args:
        spec: ``NAME=FOLDER``, with options after a colon.
        base: The base that is served.
        num_tokens: Largest number of tokens of a chain.

    Raises:
        ValueError: vLLM cannot serve the drafter, or it was trained for another base.
    """
    name, folder, text = drafter_specs.split(spec)
    drafter_class = registered()[name].learned_class if name in registered() else None
    if drafter_class is None or not issubclass(drafter_class, ParallelDrafter):
        raise ValueError(
            f"vLLM cannot serve the drafter {name} through this plugin: it takes CTC, block, and drafters that read "
            "only tokens; of Medusa, EAGLE and EAGLE-3 pass the folder that `drafters export --format vllm` writes"
        )
    config = drafter_specs.learned_config(name, drafter_class, folder, text, base)
    draft = config.init_args.get(recipe.DRAFT, {})
    if draft.get("draws"):
        raise ValueError(f"{folder} samples its drafts (draws), which vLLM cannot verify: pass {name}={folder}:draws=0")
    chain = {"tree": "chain", "num_nodes": num_tokens}
    return drafter_builders.drafter_folder(folder or ""), replace(
        config, init_args=config.init_args | {recipe.DRAFT: draft | chain}
    )


def chain_builder(spec: str, base: ServedBase, num_tokens: int) -> Callable[[], Drafter]:
    """Return a function that builds independent drafters of chains, each for one text at a time.

    Args:
        spec: A drafter that reads nothing but tokens, such as ``joint:runner_up=0``.
        base: The base that is served.
        num_tokens: Largest number of tokens of a chain.

    Raises:
        ValueError: The drafter is unknown, needs more than tokens, or its file belongs to another tokenizer.
    """
    try:
        build = drafter_specs.builder(spec, cast("Runner", ServedRunner(base)))
        drafter = build()
    except NeedsTheBase:
        needs = "the base's model"
    else:
        if drafter.history_only and drafter.required_outputs == RequiredOutputs():
            return lambda: ChainDrafter(build(), num_tokens)
        needs = "the base's most probable tokens" if drafter.required_outputs.top_k else "more than the text"
    hint = ": pass joint:runner_up=0" if drafter_specs.split(spec)[0] == "joint" else ""
    raise ValueError(f"vLLM hands the drafter {spec} nothing but tokens, and it reads {needs}{hint}")
