"""``drafters export --format vllm``: Medusa, EAGLE, EAGLE-3, and Block and CTC as DSpark, as vLLM reads them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from data.files import write_text
from data.safe_text import code_span, safe_line
from drafters import CTC, EAGLE, EAGLE3, Block, Medusa
from drafters.checkpoint import DrafterConfig
from drafters.protocol import BaseShape, LearnedDrafter
from inference.verifier.base import Base, check_fit, load_base
from train.formats.block import block_config, block_weights, check_block, check_mask_token, without_blank
from train.formats.eagle import eagle3_config, eagle3_weights, eagle_config, public_name
from train.formats.public import read_target
from train.model_card import card_header, described_base

TESTED_VERSION, TESTED_METHODS = "0.32.0", ("medusa", "eagle", "eagle3")
"""What `tests/engines/test_exports.py` runs in vLLM itself."""
NOTES = {
    "medusa": "the most probable token of each head. vLLM reads Medusa up to version 0.32; 0.33 has removed it.",
    "eagle": "the most probable token of each pass of its layer. The embedding and the LM head are the base's.",
    "eagle3": "the most probable token of each pass of its layer. The layout is speculators' EAGLE-3. The embedding "
    "is the base's, and so is the LM head unless the folder holds one.",
    "dspark": "the most probable token of each frame, given the one before where there is a Markov bias. The layout "
    "is speculators' DSpark with `sample_from_anchor`, which vLLM reads from its pull request 48639 (July 2026) on; "
    "earlier ones take frame 0 for the root, and reject the drafts. vLLM runs it on a GPU only. `embed_tokens` is the "
    "base's but for the mask token; the head is the base's own.",
}

BLANK_LOST = "the blank of CTC is left out: the frames draft one token each, also where they were trained to be blank"


def write(
    folder: Path, drafter: LearnedDrafter, config: DrafterConfig, mask_token_id: int | None, dtype: torch.dtype
) -> None:
    """Write config.json, model.safetensors and README.md in the format that vLLM reads.

    Raises ValueError if vLLM has no method that drafts in the same way. For a block drafter, ``mask_token_id`` is the
    token whose embedding becomes that of the masked frames.
    """
    method, num_tokens, values, weights = converted(drafter, config, mask_token_id, dtype, "vllm")
    values |= {"dtype": str(dtype).removeprefix("torch.")}
    write_text(folder / "config.json", json.dumps(values, indent=2) + "\n")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    options = {"method": method, "model": "THIS_FOLDER", "num_speculative_tokens": num_tokens}
    card = f"""{card_header(config, None, "vllm")}
The drafter in vLLM's format:

    vllm serve {safe_line(config.base_name)} --speculative-config '{json.dumps(options)}'

There it proposes one chain without a tree: {NOTES[method]}

Keys, shapes and meaning follow vLLM's and speculators' sources of 2026. This folder was not run in vLLM. Version
{TESTED_VERSION} was, on a CPU in float32, with one drafter each of {", ".join(TESTED_METHODS)}: the texts were those of
the base alone, and took as many steps as with the same chain here.

`drafters eval` reads the folder that `drafters export` makes without `--format vllm`, and drafts trees with it.

- Base: {described_base(config)}
- Command of the training: {code_span(config.training.get("command") or "not recorded")}
"""
    write_text(folder / "README.md", card)


def converted(
    drafter: LearnedDrafter, config: DrafterConfig, mask_token_id: int | None, dtype: torch.dtype, format: str
) -> tuple[str, int, dict[str, Any], dict[str, Tensor]]:
    """Return an engine's method, the tokens of a draft, config.json and the weights; ValueError if it has none."""
    shape, name = config.base, config.base_name
    if type(drafter) is CTC:
        drafter, config = without_blank(drafter, config)
        print(BLANK_LOST)
    if isinstance(drafter, EAGLE | EAGLE3 | Block) and (window := drafter.draft_options.window):
        raise ValueError(f"the {format} format has no window ({window}): train the drafter with window: 0")
    if type(drafter) is Medusa and format == "vllm":
        method, num_tokens = "medusa", drafter.num_heads
        values, weights = medusa_config(drafter, shape), drafter.state_dict()
    elif type(drafter) is EAGLE and format == "vllm":
        method, num_tokens = "eagle", drafter.draft_options.depth
        values = eagle_config(drafter, shape, read_target(name))
        weights = {public_name(part): weight for part, weight in drafter.state_dict().items()}
    elif type(drafter) is EAGLE3:
        method, num_tokens = "eagle3", drafter.draft_options.depth
        values = eagle3_config(drafter, shape, read_target(name))
        needs_rows = drafter.lm_head is None and drafter.draft_tokens is not None
        weights = eagle3_weights(drafter, base_of(config).base_weights.head if needs_rows else None)
    elif type(drafter) is Block:
        method, num_tokens = "dspark", drafter.num_labels
        check_block(drafter, config, format)
        target, base = read_target(name), base_of(config)
        token = check_mask_token(mask_token_id, base)
        values = block_config(drafter, shape, target, token)
        weights = block_weights(drafter, base, token, dtype)
        if format == "gguf":  # without one llama.cpp takes this embedding for the head, the mask's row included
            weights["lm_head.weight"] = base.base_weights.head
    else:
        kind = config.class_path.removeprefix("drafters.")
        kinds = "EAGLE3, Block and CTC" if format == "gguf" else "Medusa, EAGLE, EAGLE3, Block and CTC"
        remedy = "train a drafter as in configs/block.yaml" if format == "gguf" else "leave out --format"
        raise ValueError(f"{kind} has no {format} format (only {kinds} have one): {remedy}")
    weights = {
        part: (weight.to(dtype) if weight.is_floating_point() else weight).detach().cpu().contiguous().clone()
        for part, weight in weights.items()
    }
    return method, num_tokens, values, weights


def base_of(config: DrafterConfig) -> Base:
    """Load the base of a drafter in its own dtype, so that a large one is not widened just to read a few weights."""
    stored: Any = read_target(config.base_name).stored_dtype
    base = load_base(config.base_name, stored)
    check_fit(config, base)
    return base


def medusa_config(drafter: Medusa, shape: BaseShape) -> dict[str, Any]:
    """Return the config.json of vLLM's Medusa up to version 0.32, whose weights have the same names as ours.

    No other key may contain "num" together with "heads" or "layers": vLLM would take it for one of these two. Raises
    ValueError if the heads share the base's LM head.
    """
    if not drafter.own_heads:
        raise ValueError("the vllm format of Medusa has an output layer in each head: train with own_heads: true")
    head: Any = drafter.blocks[0]  # all heads have equally many layers
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "truncated_vocab_size": shape.vocab_size,
        "num_heads": drafter.num_heads,
        "num_hidden_layers": len(head.layers),
        "medusa_fc_bias": True,
        "original_lm_head": False,
    }
