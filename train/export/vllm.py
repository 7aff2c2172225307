"""``drafters export --format vllm``: Medusa for vLLM, and a block drafter as a speculators DSpark checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from data.files.atomic_write import write_text
from data.files.safe_text import code_span, escape_markdown, safe_line, yaml_line
from data.tokenizer import load_pretrained, load_tokenizer
from drafters import Block, Medusa
from drafters.checkpoint import DrafterConfig
from drafters.protocol import LearnedDrafter
from inference.engine.base import Base, Dtype, check_fit, load_base


def write(folder: Path, drafter: LearnedDrafter, config: DrafterConfig, mask_token_id: int | None) -> None:
    """Write config.json, model.safetensors and README.md in the format that vLLM reads.

    Args:
        folder: Folder to write to, which replaces the exported one when it is whole.
        drafter: The trained drafter.
        config: Its configuration.
        mask_token_id: For a block drafter, the token whose embedding becomes that of the masked frames.

    Raises:
        ValueError: vLLM has no method that drafts in the same way.
    """
    if type(drafter) is Medusa:
        values, weights = medusa_config(drafter, config), dict(drafter.state_dict())
        method, num_tokens, notes = "medusa", drafter.num_heads, MEDUSA_NOTES
    elif type(drafter) is Block:
        values, weights = _block(drafter, config, mask_token_id)
        method, num_tokens, notes = "dspark", drafter.num_frames, BLOCK_NOTES
    else:
        name = config.class_path.removeprefix("drafters.")
        reason = "no engine applies a CTC collapse" if name == "CTC" else "only Medusa and Block have one there"
        raise ValueError(f"{name} has no vllm format ({reason}): leave out --format")
    weights = {name: weight.detach().cpu().contiguous().clone() for name, weight in weights.items()}
    write_text(folder / "config.json", json.dumps(values, indent=2) + "\n")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_text(folder / "README.md", _card(config, method, num_tokens, notes))


# ---- Medusa


def medusa_config(drafter: Medusa, config: DrafterConfig) -> dict[str, Any]:
    """Return the config.json of vLLM's Medusa, whose weights have the same names as ours.

    No other key may contain "num" together with "heads" or "layers": vLLM would take it for one of these two.
    """
    if not drafter.own_heads:
        raise ValueError("the vllm format of Medusa has an output layer in each head: train with own_heads: true")
    head: Any = drafter.blocks[0]  # all heads have equally many layers
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.base.hidden_size,
        "vocab_size": config.base.vocab_size,
        "truncated_vocab_size": config.base.vocab_size,
        "num_heads": drafter.num_heads,
        "num_hidden_layers": len(head.layers),
        "medusa_fc_bias": True,
        "original_lm_head": False,
        "dtype": "float32",
    }


# ---- Block


def _block(
    drafter: Block, config: DrafterConfig, mask_token_id: int | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    check_block(drafter, config)
    base = load_base(config.base_name, _stored_dtype(config.base_name))
    check_fit(config, base)
    token = check_mask_token(mask_token_id, base)
    return block_config(drafter, config, base, token), block_weights(drafter, base, token)


def check_block(drafter: Block, config: DrafterConfig) -> None:
    """Raise ValueError if a block drafter has properties that the DSpark format cannot describe."""
    has_own_frames = len(drafter.frame_embedding) > 1
    claims = {"root_everywhere": drafter.root_everywhere, "frames_differ": has_own_frames, "causal": drafter.causal}
    for argument, is_true in claims.items():
        if is_true:
            raise ValueError(f"the vllm format has no {argument}: train the block drafter with {argument}: false")
    num_layers = config.base.num_layers
    if not all(0 < layer < num_layers for layer in drafter.required_outputs.hidden_layers):
        raise ValueError(
            f"vLLM fuses the outputs of layers 1 to {num_layers - 1} of this base, not hidden_layers "
            f"{list(drafter.required_outputs.hidden_layers)} (-1 is the normed last state): "
            "train the block drafter on such layers"
        )


def check_mask_token(mask_token_id: int | None, base: Base) -> int:
    """Return the mask token if the base never writes it, so that its embedding is free; else raise ValueError."""
    names = dict(zip(base.tokenizer.all_special_ids, base.tokenizer.all_special_tokens, strict=True))
    free = {token: name for token, name in names.items() if token not in base.eos}
    free |= {token: "unused" for token in range(len(base.tokenizer), base.shape.vocab_size)}
    if mask_token_id is None or mask_token_id not in free:
        examples = ", ".join(f"{token} ({name})" for token, name in sorted(free.items())[:4])
        problem = "is missing" if mask_token_id is None else f"{mask_token_id} is a token of texts or none at all"
        raise ValueError(
            f"--mask-token-id {problem}: masked frames take the embedding of a token that {base.name} never writes, "
            f"such as {examples or 'none of this tokenizer'}"
        )
    return mask_token_id


def block_config(drafter: Block, config: DrafterConfig, base: Base, mask_token_id: int) -> dict[str, Any]:
    """Return the config.json of speculators' DSpark.

    The format is not ``dflash``, in which vLLM's frame 0 repeats the root. Frame 0 of our block drafter predicts the
    next token, as DSpark's does with ``sample_from_anchor``.
    """
    shape, num_layers = config.base, len(drafter.trunk.layers)
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafter.num_frames, "verifier_accept_k": 1}
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"accept_tolerance": 0.0}],
            "verifier": {"name_or_path": config.base_name, "architectures": base.model.config.architectures},
        },
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_heads,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": base.context_length,
            "rms_norm_eps": shape.norm_eps,
            "rope_theta": shape.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "layer_types": ["full_attention"] * num_layers,
        },
        "draft_vocab_size": shape.vocab_size,
        "target_hidden_size": shape.hidden_size,
        "block_size": drafter.num_frames,
        # Speculators counts layers as we do: i is the output of layer i, which layer i + 1 reads.
        "aux_hidden_state_layer_ids": list(drafter.required_outputs.hidden_layers),
        "mask_token_id": mask_token_id,
        "sample_from_anchor": True,
        "sliding_window_non_causal": True,  # no layer slides, but for vLLM false means that all layers are causal
        "markov_rank": drafter.markov.rank if drafter.markov else 1,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
        "dtype": "float32",
    }


def block_weights(drafter: Block, base: Base, mask_token_id: int) -> dict[str, Tensor]:
    """Return the weights of the trunk, the base's embedding with the mask's in it, and the Markov bias.

    vLLM's DSpark always adds a bias: a drafter without one gets a zero bias of rank 1. The LM head is the base's.
    """
    trunk = drafter.trunk.state_dict()
    embedding = base.base_weights.embedding.detach().clone()
    embedding[mask_token_id] = drafter.frame_embedding.detach()[0].to(embedding)
    zero = torch.zeros(drafter.vocab_size, 1)
    bias = drafter.markov and drafter.markov.folded(base.base_weights)
    left, right = (bias.left, bias.right) if bias else (zero, zero)
    markov = {"markov_head.markov_w1.weight": left, "markov_head.markov_w2.weight": right.contiguous()}
    return {**trunk, "embed_tokens.weight": embedding, **markov}


def _stored_dtype(name: str) -> Dtype:
    """Return the dtype that a base is stored in, so that a large one is not widened just to read its embedding."""
    from transformers import AutoConfig

    load_tokenizer(name)  # its errors say what to do if there is no base of this name
    stored = load_pretrained(AutoConfig, name).dtype
    if stored in (torch.bfloat16, "bfloat16"):
        return "bfloat16"
    return "float16" if stored in (torch.float16, "float16") else "float32"


# ---- model card

MEDUSA_NOTES = "There it proposes one chain without a tree: the most probable token of each head."
BLOCK_NOTES = """There it proposes one chain without a tree: the most probable token of each frame, given the one before
where there is a Markov bias. The layout is speculators' DSpark with `sample_from_anchor`, which vLLM reads from its
pull request 48639 (July 2026) on; earlier ones take frame 0 for the root, and reject the drafts. `embed_tokens` is the
base's but for the mask token; the head is the base's own."""


def _card(config: DrafterConfig, method: str, num_tokens: int, notes: str) -> str:
    served = json.dumps({"method": method, "model": "THIS_FOLDER", "num_speculative_tokens": num_tokens})
    name, base = config.class_path.removeprefix("drafters.").lower(), code_span(config.base_name)
    return f"""---
{yaml_line("base_model", config.base_name)}
tags: [speculative-decoding, {name}, vllm]
---
# {config.class_path} for {escape_markdown(config.base_name)}, in vLLM's format

    vllm serve {safe_line(config.base_name)} --speculative-config '{served}'

Keys, shapes and meaning follow vLLM's and speculators' sources of 2026 and are tested; the folder was not run in vLLM.

{notes}

`drafters eval` reads the folder that `drafters export` makes without `--format vllm`, and drafts trees with it.

- Base: {base} (hidden size {config.base.hidden_size}, vocabulary {config.base.vocab_size}, tokenizer
  {escape_markdown(config.tokenizer_hash)}). It fits no other.
- Command of the training: {code_span(config.training.get("command") or "not recorded")}
"""
