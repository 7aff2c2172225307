"""EAGLE and EAGLE-3 in public formats.

EAGLE is written and read as the EAGLE project's own checkpoints, which vLLM reads too. EAGLE-3 is written as
speculators' checkpoint, and read in the formats of speculators, SpecForge, DeepSpec and EAGLE itself.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafters import EAGLE, EAGLE3
from drafters.protocol import BaseShape, BaseWeights
from drafters.public_formats import SpecForgeLayers
from train.formats.layers import layer_config, read_layers
from train.formats.public import PublicCheckpoint, PublicDrafter, Target, by_depth, check_layers, speculators_config

LAYERS = "layers.0.", "midlayer."
"""The names of the layer in speculators, DeepSpec and EAGLE's first version, and in EAGLE-3's and SpecForge's."""
NORMS = "input_layernorm.weight", "hidden_norm.weight"
"""Weights that the public formats of EAGLE-3 count to the layer."""


def eagle_config(drafter: EAGLE, shape: BaseShape, target: Target) -> dict[str, Any]:
    """Return the config.json of vLLM's EAGLE for LLaMA; ValueError if the drafter has a bias, which vLLM's has not."""
    if drafter.fc.bias is not None:
        raise ValueError("vLLM's EAGLE has no bias behind its first projection: train with fc_bias: false")
    layers = layer_config(shape, 1, target.context_length, "llama")
    return {"architectures": ["LlamaForCausalLM"], **layers, "mlp_bias": False, "bias": False}


def eagle3_config(drafter: EAGLE3, shape: BaseShape, target: Target) -> dict[str, Any]:
    """Return the config.json of speculators' EAGLE-3.

    Raises ValueError if the drafter reads layers that engines do not hand to it.
    """
    check_layers(drafter.required_outputs.hidden_layers, shape)
    layers = sorted(drafter.required_outputs.hidden_layers)
    # vLLM's LLaMA expects three layers unless the layer itself names another number.
    more = {} if len(layers) == 3 else {"num_aux_hidden_states": len(layers)}
    num_tokens, kind = drafter.draft_options.depth, "qwen3" if drafter.has_qk_norm else "llama"
    return speculators_config("eagle3", "Eagle3Speculator", num_tokens, target) | {
        "transformer_layer_config": layer_config(shape, 1, target.context_length, kind) | more,
        "draft_vocab_size": shape.vocab_size if drafter.draft_tokens is None else len(drafter.draft_tokens),
        "target_hidden_size": shape.hidden_size,
        "norm_before_residual": drafter.norm_before_residual,
        "norm_before_fc": False,
        # Speculators counts layers as we do: i is the output of layer i, which layer i + 1 reads.
        "eagle_aux_hidden_state_layer_ids": layers,
    }


def eagle3_weights(drafter: EAGLE3, base_head: Tensor | None = None) -> dict[str, Tensor]:
    """Return the weights by the names of speculators, without the embedding, which is the base's.

    A draft vocabulary whose rows are the base's needs the base's LM head (V, D): the formats have them in the drafter.
    """
    weights = dict(drafter.state_dict())
    weights["fc.weight"] = by_depth(weights["fc.weight"], drafter.required_outputs.hidden_layers)
    tokens = weights.pop("draft_tokens", None)
    if tokens is not None and base_head is not None:
        weights["lm_head.weight"] = base_head[tokens]
    maps: dict[str, Tensor] = {}
    if tokens is not None and len(tokens) == drafter.vocab_size:  # the formats have maps for smaller vocabularies only
        weights["lm_head.weight"] = weights["lm_head.weight"][tokens.argsort()]
    elif tokens is not None:  # d2t is the difference of a draft token's id to its place, t2d whether a token is one
        is_drafted = torch.zeros(drafter.vocab_size, dtype=torch.bool)
        is_drafted[tokens.cpu()] = True
        maps = {"d2t": tokens.cpu() - torch.arange(len(tokens)), "t2d": is_drafted}
    return {public_name(name): weight for name, weight in weights.items()} | maps


def public_name(name: str) -> str:
    """The name of a weight in the public formats."""
    if name in NORMS:
        return LAYERS[0] + name
    return LAYERS[0] + name.removeprefix("layer.") if name.startswith("layer.") else name


# ---- reading


def read_eagle(checkpoint: PublicCheckpoint, base: BaseShape, base_weights: BaseWeights) -> PublicDrafter:
    """Read an EAGLE drafter.

    Raises ValueError if a setting or a weight is missing or wrong, or EAGLE here cannot compute the same.
    """
    layers = read_layers(checkpoint, checkpoint.config, base, "llama")
    if layers.num_layers != 1:
        checkpoint.refuse(f"it has {layers.num_layers} layers, and EAGLE here has one")
    checkpoint.drop_copy("embed_tokens.weight", base_weights.embedding, "an embedding")
    checkpoint.drop_copy("lm_head.weight", base_weights.head, "an LM head")
    layer = layers.expand(checkpoint.take_all(LAYERS[0]))
    weights = {f"layer.{name}": weight for name, weight in layer.items()}
    weights |= {f"fc.{name}": weight for name, weight in checkpoint.take_all("fc.").items()}
    return PublicDrafter("drafters.EAGLE", {"fc_bias": "fc.bias" in weights}, layers.shape, weights)


@dataclass(frozen=True)
class EAGLE3Settings:
    """The settings of EAGLE-3 in the four formats; None where a format leaves them out."""

    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None  # counted as here
    target_layer_ids: tuple[int, ...] | None = None  # DeepSpec's, counted from 0
    eagle_config: SpecForgeLayers | None = None  # SpecForge's, counted from 0


def read_eagle3(checkpoint: PublicCheckpoint, base: BaseShape, base_weights: BaseWeights) -> PublicDrafter:
    """Read an EAGLE-3 drafter.

    Raises ValueError if a setting or a weight is missing or wrong, or EAGLE-3 here cannot compute the same.
    """
    settings: EAGLE3Settings = checkpoint.settings(EAGLE3Settings)
    is_speculators = "speculators_model_type" in checkpoint.config
    _check_computation(checkpoint, settings, base, is_speculators)
    described = (checkpoint.config.get("transformer_layer_config") or {}) if is_speculators else checkpoint.config
    layers = read_layers(checkpoint, described, base, "qwen3" if is_speculators else "llama")
    if layers.num_layers != 1:
        checkpoint.refuse(f"it has {layers.num_layers} layers, and EAGLE-3 here has one")
    checkpoint.drop_copy("embed_tokens.weight", base_weights.embedding, "an embedding")
    weights = {name: checkpoint.take(name) for name in ("fc.weight", "norm.weight")}
    prefix = LAYERS[1] if any(name.startswith(LAYERS[1]) for name in checkpoint.weights) else LAYERS[0]
    weights |= {name: checkpoint.take(prefix + name) for name in NORMS}
    layer = layers.expand(checkpoint.take_all(prefix))
    weights |= {f"layer.{name}": weight for name, weight in layer.items()}
    init_args: dict[str, Any] = {
        "hidden_layers": checkpoint.check_hidden_layers(_fused_layers(settings, base), base),
        "layer": {
            "norm_before_residual": bool(settings.norm_before_residual),
            "has_qk_norm": "self_attn.q_norm.weight" in layer,
        },
    }
    tokens = _draft_tokens(checkpoint, settings.draft_vocab_size or base.vocab_size, base.vocab_size)
    if tokens is not None or "lm_head.weight" in checkpoint.weights:
        weights["lm_head.weight"] = checkpoint.take("lm_head.weight")
        init_args["own_head"] = True
    if tokens is not None:
        weights["draft_tokens"], init_args["draft_vocab_size"] = tokens, len(tokens)
    if depth := checkpoint.speculators.num_tokens:
        init_args["draft"] = {"depth": depth}
    return PublicDrafter("drafters.EAGLE3", init_args, layers.shape, weights)


def _check_computation(
    checkpoint: PublicCheckpoint, settings: EAGLE3Settings, base: BaseShape, is_speculators: bool
) -> None:
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if getattr(settings, name):
            checkpoint.refuse(f"EAGLE-3 here has no {name}")
    if is_speculators and settings.norm_before_residual is None:
        checkpoint.refuse("config.json leaves out norm_before_residual, whose default differs between its readers")
    checkpoint.check_hidden_size(settings.target_hidden_size, base)
    if settings.eagle_config and not settings.eagle_config.use_aux_hidden_state:
        checkpoint.refuse("it fuses no layers of the base (use_aux_hidden_state: false)")


def _fused_layers(settings: EAGLE3Settings, base: BaseShape) -> tuple[int, ...]:
    if settings.eagle_aux_hidden_state_layer_ids:
        return settings.eagle_aux_hidden_state_layer_ids
    named = settings.eagle_config.eagle_aux_hidden_state_layer_ids if settings.eagle_config else None
    if from_zero := settings.target_layer_ids or named:
        return tuple(layer + 1 for layer in from_zero)
    return (2, base.num_layers // 2, base.num_layers - 3)


def _draft_tokens(checkpoint: PublicCheckpoint, num_tokens: int, vocab_size: int) -> Tensor | None:
    """The ids of the draft vocabulary, or None if that is the whole one."""
    d2t, t2d = checkpoint.weights.pop("d2t", None), checkpoint.weights.pop("t2d", None)
    if d2t is None and num_tokens != vocab_size:
        checkpoint.refuse(f"it has no weights d2t, which say what its {num_tokens} draft tokens are")
    if d2t is None:
        return None
    if d2t.shape != (num_tokens,) or d2t.dtype not in (torch.int64, torch.int32):
        checkpoint.refuse(f"d2t is {tuple(d2t.shape)} of {d2t.dtype}, not ({num_tokens},) of torch.int64")
    tokens = d2t.long() + torch.arange(num_tokens)
    if tokens.min() < 0 or tokens.max() >= vocab_size or len(tokens.unique()) < num_tokens:
        checkpoint.refuse(f"d2t names tokens twice, or tokens outside the vocabulary of {vocab_size}")
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], tokens.sort().values):
        checkpoint.refuse("d2t and t2d name different tokens")
    return None if torch.equal(tokens, torch.arange(vocab_size)) else tokens
