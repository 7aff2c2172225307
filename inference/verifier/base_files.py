"""Checks of a base's folder before anything is allocated: sizes that the weights have room for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from data.files import read_json

# The names of sizes in the configurations of LLaMA, GPT-2 and OPT.
WIDTHS = "hidden_size", "n_embd", "d_model"
DEPTHS = "num_hidden_layers", "n_layer"
MLP_WIDTHS = "intermediate_size", "n_inner", "ffn_dim"
VOCABULARIES = ("vocab_size",)
MAX_SIZE = 1 << 24  # of any number of layers, heads, tokens or features, where the weights cannot be asked
SLACK = 4  # between the sizes of the configuration and the weights: tied and 4-bit weights take less room


def check_base_folder(folder: str | Path) -> None:
    """Raise ValueError if a folder asks in its config.json for more than its weights hold.

    transformers would allocate what the configuration says. A hub id is not checked.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return
    if not (folder / "config.json").exists():
        return
    config = read_json(folder / "config.json")
    shapes = dict(_shapes(folder))
    for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
        if isinstance(part, dict):
            _check_sizes(part, shapes, folder)


def _check_sizes(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    width, depth, mlp_width, vocabulary = (_size(config, names) for names in (WIDTHS, DEPTHS, MLP_WIDTHS, VOCABULARIES))
    needed = width * vocabulary + depth * width * mlp_width
    total = sum(map(prod, shapes.values()))
    if shapes and depth > len(shapes):
        problem = f"{depth:,} layers, but the weights are {len(shapes):,} tensors"
    elif max(width, depth, mlp_width, vocabulary) > MAX_SIZE:
        problem = f"a size of {max(width, depth, mlp_width, vocabulary):,}"
    elif shapes and needed > SLACK * total:
        problem = f"at least {needed:,} parameters, but the weights are {total:,}"
    else:
        return
    raise ValueError(f"{folder / 'config.json'} asks for {problem}: copy the base's folder again")


def _size(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = (config[name] for name in names if isinstance(config.get(name), int))
    return next(found, 0)


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and the shape of each tensor, from the headers of the files of weights."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  not a dictionary
                    yield name, tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or cut short ({error}): copy the base's folder again") from error
