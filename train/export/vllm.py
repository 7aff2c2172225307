"""``drafters export --format vllm``: Medusa, EAGLE, EAGLE-3, and a block drafter as DSpark, as vLLM reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from data.files import code_span, escape_markdown, safe_line, write_text, yaml_line
from drafters import EAGLE, EAGLE3, Block, Medusa
from drafters.checkpoint import DrafterConfig
from drafters.protocol import LearnedDrafter
from inference.verifier.base import check_fit, load_base
from train.export.formats.block import block_config, block_weights, check_block, check_mask_token
from train.export.formats.eagle import eagle_config, eagle_weights
from train.export.formats.eagle3 import eagle3_config, eagle3_weights
from train.export.formats.medusa import medusa_config
from train.export.formats.speculators import read_verifier


@dataclass(frozen=True)
class Served:
    """A drafter in vLLM's format.

    Args:
        config: Its config.json, without the dtype.
        weights: Its weights.
        method: What vLLM calls the method.
        num_tokens: Tokens of a draft.
        notes: Paragraph of the model card.
        tested: Paragraph of what was run in vLLM.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]
    method: str
    num_tokens: int
    notes: str
    tested: str = ""


def write(
    folder: Path,
    drafter: LearnedDrafter,
    config: DrafterConfig,
    mask_token_id: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write config.json, model.safetensors and README.md in the format that vLLM reads.

    Args:
        folder: Folder to write to, which replaces the exported one when it is whole.
        drafter: The trained drafter.
        config: Its configuration.
        mask_token_id: For a block drafter, the token whose embedding becomes that of the masked frames.
        dtype: Dtype of the weights.

    Raises:
        ValueError: vLLM has no method that drafts in the same way.
    """
    served = _served(drafter, config, mask_token_id, dtype)
    tested = TESTED if _is_tested_variant(drafter) else UNTESTED_VARIANT
    served = replace(served, tested=tested if served.method in TESTED_METHODS else UNTESTED)
    weights = {name: _cast(weight, dtype) for name, weight in served.weights.items()}
    values = served.config | {"dtype": str(dtype).removeprefix("torch.")}
    write_text(folder / "config.json", json.dumps(values, indent=2) + "\n")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_text(folder / "README.md", _card(config, served))


def _served(drafter: LearnedDrafter, config: DrafterConfig, mask_token_id: int | None, dtype: torch.dtype) -> Served:
    shape = config.base
    if isinstance(drafter, EAGLE | EAGLE3 | Block) and (window := drafter.draft_options.window):
        raise ValueError(f"the vllm format has no window ({window}): train the drafter with window: 0")
    if type(drafter) is Medusa:
        values = medusa_config(drafter, shape)
        return Served(values, drafter.state_dict(), "medusa", drafter.num_heads, MEDUSA_NOTES)
    if type(drafter) is EAGLE:
        values = eagle_config(drafter, shape, read_verifier(config.base_name))
        return Served(values, eagle_weights(drafter), "eagle", drafter.draft_options.depth, EAGLE_NOTES)
    if type(drafter) is EAGLE3:
        values = eagle3_config(drafter, shape, read_verifier(config.base_name))
        return Served(values, eagle3_weights(drafter), "eagle3", drafter.draft_options.depth, EAGLE3_NOTES)
    if type(drafter) is Block:
        check_block(drafter, config)
        verifier = read_verifier(config.base_name)
        stored: Any = verifier.stored_dtype  # so that a large base is not widened just to read its embedding
        base = load_base(config.base_name, stored)
        check_fit(config, base)
        token = check_mask_token(mask_token_id, base)
        values = block_config(drafter, shape, verifier, token)
        return Served(values, block_weights(drafter, base, token, dtype), "dspark", drafter.num_labels, BLOCK_NOTES)
    name = config.class_path.removeprefix("drafters.")
    reason = (
        "no engine applies a CTC collapse" if name == "CTC" else "only Medusa, EAGLE, EAGLE3 and Block have one there"
    )
    raise ValueError(f"{name} has no vllm format ({reason}): leave out --format")


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    weight = weight.detach().cpu()
    return (weight.to(dtype) if weight.is_floating_point() else weight).contiguous().clone()


# ---- model card

TESTED_VERSION, TESTED_METHODS = "0.32.0", ("medusa", "eagle", "eagle3")
"""What `tests/engines/test_exports.py` runs in vLLM itself."""
TESTED = f"""This format was run in vLLM {TESTED_VERSION} on a CPU, in float32, with another drafter of the same kind:
the texts were those of the base alone, and took as many steps as with the same chain in this project. This very folder
was not run in vLLM."""
CHECKED = "Keys, shapes and meaning follow vLLM's and speculators' sources of 2026 and are tested"
UNTESTED = f"{CHECKED}; the format was not run in vLLM, which needs a GPU for it."
UNTESTED_VARIANT = f"""{CHECKED}. Another variant of the format was run in vLLM {TESTED_VERSION}, but not this one:
Medusa with one layer in each head, and EAGLE-3 with a draft vocabulary and an LM head of its own, `has_qk_norm: false`
and `norm_before_residual: false`."""
CHAIN = "There it proposes one chain without a tree:"
MEDUSA_NOTES = f"""{CHAIN} the most probable token of each head. vLLM reads Medusa up to version 0.32; 0.33 has removed
it."""
EAGLE_NOTES = (
    f"{CHAIN} the most probable token of each pass of its layer. The embedding and the LM head are the base's."
)
EAGLE3_NOTES = f"""{CHAIN} the most probable token of each pass of its layer. The layout is speculators' EAGLE-3. The
embedding is the base's, and so is the LM head unless the folder holds one."""
BLOCK_NOTES = f"""{CHAIN} the most probable token of each frame, given the one before where there is a Markov bias. The
layout is speculators' DSpark with `sample_from_anchor`, which vLLM reads from its pull request 48639 (July 2026) on;
earlier ones take frame 0 for the root, and reject the drafts. vLLM runs it on a GPU only. `embed_tokens` is the base's
but for the mask token; the head is the base's own."""


def _is_tested_variant(drafter: LearnedDrafter) -> bool:
    """Whether the tests run a drafter of these options in vLLM."""
    if isinstance(drafter, EAGLE3):
        has_vocabulary = drafter.draft_tokens is not None and len(drafter.draft_tokens) < drafter.vocab_size
        return has_vocabulary and not (drafter.has_qk_norm or drafter.norm_before_residual)
    if isinstance(drafter, Medusa):
        head: Any = drafter.blocks[0]
        return len(head.layers) == 1
    return True


def _card(config: DrafterConfig, served: Served) -> str:
    options = {"method": served.method, "model": "THIS_FOLDER", "num_speculative_tokens": served.num_tokens}
    name, base = config.class_path.removeprefix("drafters.").lower(), code_span(config.base_name)
    return f"""---
{yaml_line("base_model", config.base_name)}
tags: [speculative-decoding, {name}, vllm]
---
# {config.class_path} for {escape_markdown(config.base_name)}, in vLLM's format

    vllm serve {safe_line(config.base_name)} --speculative-config '{json.dumps(options)}'

{served.tested}

{served.notes}

`drafters eval` reads the folder that `drafters export` makes without `--format vllm`, and drafts trees with it.

- Base: {base} (hidden size {config.base.hidden_size}, vocabulary {config.base.vocab_size}, tokenizer
  {escape_markdown(config.tokenizer_hash)}). It fits no other.
- Command of the training: {code_span(config.training.get("command") or "not recorded")}
"""
