"""Which drafters vLLM can serve, and what of the base they are checked against."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from data.files import safe_line
from drafters import checkpoint, recipe
from drafters.checkpoint import DrafterConfig
from drafters.parallel import ParallelDrafter
from drafters.protocol import Drafter, Limits
from drafters.tree import DraftTree
from inference import drafter_specs
from inference.verifier.base import BaseConfig
from inference.vllm.own_methods import spec_of_folder

SUPPORTED = "0.32", "0.33"
"""Versions of vLLM whose hook the plugin knows: tested in the first, compared with the source of the second."""
REQUIREMENT = "vllm>=0.32,<0.34"


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
    found = drafter_specs.drafter_folder(drafter)
    if not found.is_dir():
        if "/" in drafter.partition("=")[0]:
            raise ValueError(f"no folder {drafter}: pass a folder that `drafters export` wrote")
        return drafter
    return spec_of_folder(found) or f"{drafter_specs.name_of(checkpoint.read_config(found))}={drafter}"


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
