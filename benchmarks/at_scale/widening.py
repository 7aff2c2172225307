"""A trained base and its drafters in a larger shape: the same function at the larger shape's cost.

Of each large weight a small block is the trained one, and the activations of all other dimensions are exactly zero. So
texts, draft trees and acceptance lengths are those of the small models up to the rounding of sums, while a step reads
and multiplies as much as a base of that shape does:

- RMS norms average over D dimensions of which d live: their weights are multiplied by sqrt(d / D), eps by d / D.
- Attention scores are divided by the root of the larger head width, for which the queries are scaled.
- Rotary pairs and heads are placed as `axes` says. Layers behind the trained ones read the stream and add zero to it.
- Weights that only multiply zeros are noise: pages of zeros may be read faster than a model's.

The tokens beyond the small vocabulary must never win, and must take no probability from the others, whatever the
hidden state. One dimension of the residual stream, `RESERVED` behind the live ones, therefore carries a positive number
so small that no norm notices it. The head's row of such a token copies a live row, and subtracts the carried number
many times over: its logit is `PADDING_PENALTY` / RMS(x) below that of the token it copies. A greedy choice can thus
never fall on it. Its probability is exactly zero in float32 as long as the root mean square of the last residual stream
stays below 5,000, so sampled text has the small base's distribution too; the random draws of a seed may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.at_scale.axes import Attention, Axes, Axis
from drafters import recipe
from drafters.nn.markov import BaseMarkov
from drafters.protocol import BaseShape, LearnedDrafter
from inference.verifier.base import Base, shape_of
from inference.verifier.layers import PLAIN_MODEL_TYPES

CARRIED = 2.0**-40  # in the reserved dimension; its square vanishes in every sum of squares
PADDING_PENALTY = 2.0**20
NOISE_LENGTH = 1 << 20  # drawn once and copied, as drawing billions of numbers takes minutes
KEPT_ROPE_TYPES = ("default", "linear", "llama3")  # scale each frequency for itself, whatever the width of a head

Shape = tuple[int, int, int, int, int]  # as in `harness.SHAPES`


def widen_base(base: Base, name: str, shape: Shape, vocab_size: int, dtype: torch.dtype) -> Base:
    """Return a base of a larger shape that computes the same logits.

    Args:
        base: The small base, best in float32.
        name: Name of the new base.
        shape: Hidden size, intermediate size, layers, heads and key-value heads.
        vocab_size: Vocabulary of the new base, at least that of the small one.
        dtype: Dtype of the new weights.

    Raises:
        ValueError: The base is not of the LLaMA family, or the shape has no room for it.
    """
    from transformers.initialization import no_init_weights

    config = _larger_config(base, shape, vocab_size)
    small: Any = base.model
    with torch.device(small.device), no_init_weights():
        model = type(small)._from_config(config, dtype=dtype, attn_implementation=small.config._attn_implementation)
    axes = Axes.between(base.shape, shape_of(config), _heads(small.config), _heads(config))
    _write_weights(model, small, axes)
    model.generation_config = small.generation_config
    return Base(name, model.eval().requires_grad_(False), base.tokenizer, base.check)


def widen_drafter(
    drafter: LearnedDrafter, init_args: Mapping[str, Any], small_base: BaseShape, base: Base
) -> LearnedDrafter:
    """Return a drafter of the size that it has for a wider base, which drafts the same trees.

    Args:
        drafter: The drafter of the small base, best in float32.
        init_args: Its constructor's arguments, nested or flat; its present draft options replace those in there.
        small_base: Dimensions of the small base.
        base: The base that `widen_base` returned.

    Raises:
        ValueError: The drafter has weights for which there is no rule.
    """
    kind, shape = type(drafter), base.shape
    arguments = recipe.nested(init_args, recipe.groups(kind)) | {recipe.DRAFT: drafter.draft_options}
    if "hidden_layers" in recipe.training_defaults(kind):  # the default may depend on the number of layers
        layers = drafter.required_outputs.hidden_layers
        arguments["hidden_layers"] = [-1 if layer == small_base.num_layers else layer for layer in layers]
        arguments = recipe.nested(arguments, recipe.groups(kind))
    with torch.device("meta"):
        wide = recipe.build(kind, shape, arguments)
    wide = wide.to(base.model.dtype).to_empty(device=base.model.device)
    heads, wide_heads = (Attention(each.num_heads, each.num_heads, each.head_dim) for each in (small_base, shape))
    _write_weights(wide, drafter, Axes.between(small_base, shape, heads, wide_heads))
    base.lend_weights_to(wide.eval().requires_grad_(False))
    return wide


def _larger_config(base: Base, shape: Shape, vocab_size: int) -> Any:
    """The configuration of a base with other sizes.

    Raises:
        ValueError: It cannot be widened.
    """
    config = base.model.config
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type not in PLAIN_MODEL_TYPES or rope_type not in KEPT_ROPE_TYPES:
        raise ValueError(
            f"{base.name} cannot be widened: it is {config.model_type} with {rope_type} rotary embeddings; supported "
            f"are {', '.join(sorted(PLAIN_MODEL_TYPES))} with {', '.join(KEPT_ROPE_TYPES)} ones"
        )
    hidden, intermediate, layers, heads, kv_heads = shape
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "tie_word_embeddings": False,  # the rows of the padding differ
    }
    if kinds := getattr(config, "layer_types", None):
        sizes["layer_types"] = [*kinds, *kinds[-1:] * (layers - len(kinds))]
    return type(config)(**config.to_dict() | sizes)


def _heads(config: Any) -> Attention:
    return Attention(config.num_attention_heads, config.num_key_value_heads, shape_of(config).head_dim)


@torch.no_grad()
def _write_weights(large: nn.Module, small: nn.Module, axes: Axes) -> None:
    """Fill all weights of a large model from those of a small one; layers that the small one lacks change nothing.

    Raises:
        ValueError: There is no rule for a weight.
    """
    originals, weights = small.state_dict(), large.state_dict()
    noise = torch.empty(
        NOISE_LENGTH, dtype=next(iter(weights.values())).dtype, device=next(iter(weights.values())).device
    )
    noise.normal_(0, 0.02, generator=torch.Generator(noise.device).manual_seed(0))
    linear = axes.of_linear
    for name, weight in weights.items():
        original = originals.get(name)
        *path, last = (part for part in name.split(".") if not part.isdigit())
        kind = path[-1] if last in ("weight", "bias") else last
        scale = 1.0
        if kind == "q_norm" or (kind == "q_proj" and name.replace("q_proj", "q_norm") not in weights):
            scale = axes.query_scale
        if kind.endswith("norm"):
            _write_norm(large, small, name, axes.head_dim if kind in ("q_norm", "k_norm") else axes.hidden, scale)
        elif kind in linear and last == "bias":
            _write_entries(weight.zero_(), original, [linear[kind][0]], scale)
        elif kind in linear:
            _fill(weight, noise)
            outputs, inputs = linear[kind]
            inputs = inputs.repeated(weight.shape[-1] // len(inputs.source))
            weight.index_fill_(-1, inputs.is_active.nonzero()[:, 0].to(weight.device), 0)
            _write_entries(weight, original, [outputs, inputs][-weight.dim() :], scale)
        elif kind in ("embed_tokens", "frame_embedding"):
            rows = axes.vocabulary if kind == "embed_tokens" else Axis.same(len(weight))
            _write_entries(weight.zero_(), original, [rows, axes.hidden])
        elif isinstance(bias := large.get_submodule(name.rpartition(".")[0]), BaseMarkov):
            share = len(axes.hidden.places) / len(axes.hidden.source)
            original_bias: Any = small.get_submodule(name.rpartition(".")[0])
            bias.norm_eps = original_bias.norm_eps * share
            columns = Axis.same(weight.shape[1]) if last == "blank" else axes.hidden
            scale = sqrt(share) if last == "left" else 1.0  # the left factor reads a normed embedding
            _write_entries(weight.zero_(), original, [Axis.same(len(weight)), columns], scale)
        elif last in ("left", "right"):  # of a Markov bias; right may have a row for the blank
            tokens = axes.vocabulary.source.tolist()
            blank = [1 + max(tokens)] * (len(weight) - len(tokens))
            _write_entries(weight, original, [Axis.of(tokens + blank), Axis.same(weight.shape[1])])
        elif last == "blank_bias":
            weight.copy_(originals[name])
        else:
            raise ValueError(f"there is no rule that widens the weight {name}")
        _write_reserved(weight, kind, axes)


def _write_reserved(weight: Tensor, kind: str, axes: Axes) -> None:
    """Let the reserved dimension carry its number, and the head's rows of the padding read it."""
    hidden, tokens = axes.hidden, axes.vocabulary.source
    reserved = len(hidden.places)
    if kind in ("embed_tokens", "frame_embedding"):
        weight[:, reserved] = CARRIED
    elif kind == "fc" and weight.dim() == 2:
        weight[reserved, reserved :: len(hidden.source)] = 1
    elif kind in ("lm_head", "lm_heads"):
        weight[int(tokens.max()) + 1 :, reserved] = -PADDING_PENALTY / CARRIED


def _write_norm(large: nn.Module, small: nn.Module, name: str, axis: Axis, scale: float) -> None:
    """Write a norm's weight and eps. Where the small model has no such norm, it may stay any."""
    path = name.rpartition(".")[0]
    norm: Any = large.get_submodule(path)
    norm.weight.fill_(1)
    if f"{path}.weight" not in small.state_dict():
        return
    original: Any = small.get_submodule(path)
    share = len(axis.places) / len(axis.source)
    _write_entries(norm.weight, original.weight, [axis], scale * sqrt(share))
    eps = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
    setattr(norm, eps, getattr(original, eps) * share)


def _write_entries(weight: Tensor, original: Tensor | None, axes: list[Axis], scale: float = 1.0) -> None:
    """Copy the entries of the small weight, scaled, to their places."""
    if original is None:
        return
    places, sources = [axis.places for axis in axes], [axis.source[axis.places] for axis in axes]
    entries = original.detach()[_grid(sources, original.device)] * scale
    weight[_grid(places, weight.device)] = entries.to(weight.dtype)


def _grid(indices: list[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    return torch.meshgrid(*(index.to(device) for index in indices), indexing="ij")


def _fill(weight: Tensor, noise: Tensor) -> None:
    """Fill a weight with copies of the noise."""
    flat = weight.view(-1)
    whole = len(flat) // len(noise) * len(noise)
    flat[:whole].view(-1, len(noise)).copy_(noise.expand(whole // len(noise), -1))
    flat[whole:] = noise[: len(flat) - whole]
