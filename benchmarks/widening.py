"""A trained base and its drafters in a larger shape: the same function at the larger shape's cost.

Of each large weight a small block is the trained one, and the activations of all other dimensions are exactly zero. So
texts, draft trees and acceptance lengths are those of the small models up to the rounding of sums, while a step reads
and multiplies as much as a base of that shape does:

- RMS norms average over D dimensions of which d live: their weights are multiplied by sqrt(d / D), eps by d / D.
- Attention scores are divided by the root of the larger head width, for which the queries are scaled.
- Rotary pairs and heads are placed as `head_dims` and `place_heads` say. Layers behind the trained ones read the
  stream and add zero to it.
- Weights that only multiply zeros are noise: pages of zeros may be read faster than a model's.

The tokens beyond the small vocabulary must never win, and must take no probability from the others, whatever the
hidden state. One dimension of the residual stream, `RESERVED` behind the live ones, therefore carries a positive number
so small that no norm notices it. The head's row of such a token copies a live row, and subtracts the carried number
many times over: its logit is `PADDING_PENALTY` / RMS(x) below that of the token it copies. A greedy choice can thus
never fall on it. Its probability is exactly zero in float32 as long as the root mean square of the last residual stream
stays below 5,000, so sampled text has the small base's distribution too; the random draws of a seed may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness import SIZES
from benchmarks.recipes import grouped
from drafters import recipe
from drafters.nn.markov import BaseMarkov
from drafters.protocol import BaseShape, LearnedDrafter
from inference.verifier.base import Base, shape_of
from inference.verifier.layers import PLAIN_MODEL_TYPES

CARRIED = 2.0**-40  # in the reserved dimension; its square vanishes in every sum of squares
PADDING_PENALTY = 2.0**20
NOISE_LENGTH = 1 << 20  # drawn once and copied, as drawing billions of numbers takes minutes
KEPT_ROPE_TYPES = ("default", "linear", "llama3")  # scale each frequency for itself, whatever the width of a head
NOWHERE = -1  # source of a place that copies nothing

Shape = tuple[int, int, int, int, int]  # `SIZES`


def widen_base(base: Base, name: str, shape: Shape, vocab_size: int, dtype: torch.dtype) -> Base:
    """Return a base of a larger shape that computes the same logits.

    Args:
        base: The small base, best in float32.
        name: Name of the new base.
        shape: Its `SIZES`: hidden size, intermediate size, layers, heads and key-value heads.
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
        init_args: Its constructor's arguments; its present draft options replace those in there.
        small_base: Dimensions of the small base.
        base: The base that `widen_base` returned.

    Raises:
        ValueError: The drafter has weights for which there is no rule.
    """
    kind, shape = type(drafter), base.shape
    arguments = {**init_args, recipe.DRAFT: drafter.draft_options}
    if "hidden_layers" in recipe.training_defaults(kind):  # the default may depend on the number of layers
        layers = drafter.required_outputs.hidden_layers
        moved = [-1 if layer == small_base.num_layers else layer for layer in layers]
        arguments = grouped(kind, {"hidden_layers": moved}, arguments)
    with torch.device("meta"):
        wide = recipe.build(kind, shape, arguments)
    wide = wide.to(base.model.dtype).to_empty(device=base.model.device)
    heads, wide_heads = (Attention(each.num_heads, each.num_heads, each.head_dim) for each in (small_base, shape))
    _write_weights(wide, drafter, Axes.between(small_base, shape, heads, wide_heads))
    base.lend_weights_to(wide.eval().requires_grad_(False))
    return wide


def _larger_config(base: Base, shape: Shape, vocab_size: int) -> Any:
    """The configuration of a base with other sizes; raises ValueError if it cannot be widened."""
    config = base.model.config
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type not in PLAIN_MODEL_TYPES or rope_type not in KEPT_ROPE_TYPES:
        raise ValueError(
            f"{base.name} cannot be widened: it is {config.model_type} with {rope_type} rotary embeddings; supported "
            f"are {', '.join(sorted(PLAIN_MODEL_TYPES))} with {', '.join(KEPT_ROPE_TYPES)} ones"
        )
    hidden, _, layers, heads, _ = shape
    sizes: dict[str, Any] = dict(zip(SIZES, shape, strict=True))
    sizes |= {"vocab_size": vocab_size, "head_dim": hidden // heads}
    sizes["tie_word_embeddings"] = False  # the rows of the padding differ
    if kinds := getattr(config, "layer_types", None):
        sizes["layer_types"] = [*kinds, *kinds[-1:] * (layers - len(kinds))]
    return type(config)(**config.to_dict() | sizes)


def _heads(config: Any) -> Attention:
    return Attention(config.num_attention_heads, config.num_key_value_heads, shape_of(config).head_dim)


@torch.no_grad()
def _write_weights(large: nn.Module, small: nn.Module, axes: Axes) -> None:
    """Fill all weights of a large model from those of a small one; layers that the small one lacks change nothing."""
    originals, weights = small.state_dict(), large.state_dict()
    noise = next(iter(weights.values())).new_empty(NOISE_LENGTH)
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
            rows = axes.vocabulary if kind == "embed_tokens" else Axis.of(range(len(weight)))
            _write_entries(weight.zero_(), original, [rows, axes.hidden])
        elif isinstance(bias := large.get_submodule(name.rpartition(".")[0]), BaseMarkov):
            share = len(axes.hidden.places) / len(axes.hidden.source)
            original_bias: Any = small.get_submodule(name.rpartition(".")[0])
            bias.norm_eps = original_bias.norm_eps * share
            columns = Axis.of(range(weight.shape[1])) if last == "blank" else axes.hidden
            scale = sqrt(share) if last == "left" else 1.0  # the left factor reads a normed embedding
            _write_entries(weight.zero_(), original, [Axis.of(range(len(weight))), columns], scale)
        elif last in ("left", "right"):  # of a Markov bias; right may have a row for the blank
            tokens = axes.vocabulary.source.tolist()
            blank = [1 + max(tokens)] * (len(weight) - len(tokens))
            _write_entries(weight, original, [Axis.of(tokens + blank), Axis.of(range(weight.shape[1]))])
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
    elif kind in ("fc", "residual") and weight.dim() == 2:
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
    places = torch.meshgrid(*(axis.places.to(weight.device) for axis in axes), indexing="ij")
    sources = torch.meshgrid(*(axis.source[axis.places].to(original.device) for axis in axes), indexing="ij")
    weight[places] = (original.detach()[sources] * scale).to(weight.dtype)


def _fill(weight: Tensor, noise: Tensor) -> None:
    """Fill a weight with copies of the noise."""
    flat = weight.view(-1)
    whole = len(flat) // len(noise) * len(noise)
    flat[:whole].view(-1, len(noise)).copy_(noise.expand(whole // len(noise), -1))
    flat[whole:] = noise[: len(flat) - whole]


# ---- where the entries of a small weight lie in a large one


@dataclass(frozen=True)
class Axis:
    """One axis of a large weight, of N places."""

    source: Tensor  # (N,) the index in the small axis that each place copies, or `NOWHERE`
    is_active: Tensor  # (N,) whether activations may differ from zero there; weights that only read others may be any

    @classmethod
    def of(cls, source: Sequence[int], is_active: Sequence[bool] | None = None) -> Axis:
        """An axis whose active places are by default those with a source."""
        places = torch.tensor(list(source))
        return cls(places, places != NOWHERE if is_active is None else torch.tensor(list(is_active)))

    @property
    def places(self) -> Tensor:
        """(n,) the places that have a source."""
        return (self.source != NOWHERE).nonzero()[:, 0]

    def repeated(self, count: int) -> Axis:
        """The axis of several activations side by side."""
        size = len(set(self.source[self.places].tolist()))
        copies = [torch.where(self.source == NOWHERE, NOWHERE, self.source + size * copy) for copy in range(count)]
        return Axis(torch.cat(copies), self.is_active.repeat(count))


class Attention(NamedTuple):
    """The heads of an attention layer; there is a key-value head for each query head, or for each group of them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Axes:
    """The axes of a large model, by what lies along them."""

    hidden: Axis  # the residual stream; the place behind the small one's is reserved, see above
    vocabulary: Axis  # tokens beyond the small vocabulary copy its rows again
    intermediate: Axis  # units of the feed-forward layers
    queries: Axis
    keys: Axis  # key-value heads
    attended: Axis  # the results of all query heads, which the output projection reads
    head_dim: Axis  # one head
    query_scale: float  # makes up for the larger divisor of the attention scores

    @classmethod
    def between(cls, small: BaseShape, large: BaseShape, heads: Attention, large_heads: Attention) -> Axes:
        """The axes that lead from one shape to a larger one; raises ValueError if it has no room."""
        for name in ("hidden_size", "vocab_size", "num_layers", "intermediate_size"):
            needed = getattr(small, name) + (name == "hidden_size")  # one place is reserved
            if (size := getattr(large, name)) < needed:
                raise ValueError(f"the shape has {name} {size}, and the base needs {needed}: take a larger one")
        hidden_size, dims = small.hidden_size, head_dims(heads.head_dim, large_heads.head_dim)
        query_heads, kv_heads = place_heads(heads, large_heads)
        group = large_heads.num_heads // large_heads.num_kv_heads
        is_attending = [kv_heads[head // group] != NOWHERE for head in range(large_heads.num_heads)]
        queries = _flat(query_heads, dims, heads.head_dim)
        hidden = [*range(hidden_size), *[NOWHERE] * (large.hidden_size - hidden_size)]
        units = [*range(small.intermediate_size), *[NOWHERE] * (large.intermediate_size - small.intermediate_size)]
        return cls(
            hidden=Axis.of(hidden, [place <= hidden_size for place in range(large.hidden_size)]),
            vocabulary=Axis.of([token % small.vocab_size for token in range(large.vocab_size)]),
            intermediate=Axis.of(units),
            queries=Axis.of(queries),
            keys=Axis.of(_flat(kv_heads, dims, heads.head_dim)),
            attended=Axis.of(queries, [attends and dim != NOWHERE for attends in is_attending for dim in dims]),
            head_dim=Axis.of(dims),
            query_scale=sqrt(large_heads.head_dim / heads.head_dim),
        )

    @property
    def of_linear(self) -> Mapping[str, tuple[Axis, Axis]]:
        """The axes of the outputs and inputs of each linear layer, by the layer's name."""
        return {
            "q_proj": (self.queries, self.hidden),
            "k_proj": (self.keys, self.hidden),
            "v_proj": (self.keys, self.hidden),
            "o_proj": (self.hidden, self.attended),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
            "fc": (self.hidden, self.hidden),  # reads one or several states
            "layers": (self.hidden, self.hidden),  # of a residual block of Medusa and Hydra, which reads several states
            "residual": (self.hidden, self.hidden),
            "lm_head": (self.vocabulary, self.hidden),
            "lm_heads": (self.vocabulary, self.hidden),
            "blank_row": (Axis.of([0]), self.hidden),
        }


def head_dims(head_dim: int, large_head_dim: int) -> list[int]:
    """The source of each dimension of a wider head: a rotary pair goes to the pair that turns equally fast.

    Pair i of h turns by theta^(-i / h) per position, which is what pair i * r of h * r does; theta stays as it is.

    >>> head_dims(4, 8)
    [0, -1, 1, -1, 2, -1, 3, -1]
    """
    if large_head_dim % head_dim:
        raise ValueError(
            f"a head of {large_head_dim} dimensions is no multiple of one of {head_dim}: other frequencies"
        )
    ratio = large_head_dim // head_dim
    return [NOWHERE if place % ratio else place // ratio for place in range(large_head_dim)]


def place_heads(small: Attention, large: Attention) -> tuple[list[int], list[int]]:
    """The source of each query head and of each key-value head of a larger attention layer.

    A query head stays with its key-value head. If the larger groups are smaller, key-value heads are repeated. Raises
    ValueError if there are too few.

    >>> place_heads(Attention(2, 2, 8), Attention(4, 2, 8))
    ([0, -1, 1, -1], [0, 1])
    >>> place_heads(Attention(4, 1, 8), Attention(4, 2, 8))
    ([0, 1, 2, 3], [0, 0])
    """
    group, large_group = small.num_heads // small.num_kv_heads, large.num_heads // large.num_kv_heads
    repeats = -(-group // large_group)
    if small.num_kv_heads * repeats > large.num_kv_heads:
        raise ValueError(
            f"{small.num_kv_heads} key-value heads of {group} queries each do not fit into {large.num_kv_heads} heads "
            f"of {large_group} queries: take another shape"
        )
    query_heads, kv_heads = [NOWHERE] * large.num_heads, [NOWHERE] * large.num_kv_heads
    for head in range(small.num_heads):
        kv_head, place = divmod(head, group)
        large_kv_head = kv_head * repeats + place // large_group
        kv_heads[large_kv_head] = kv_head
        query_heads[large_kv_head * large_group + place % large_group] = head
    return query_heads, kv_heads


def _flat(heads: Sequence[int], dims: Sequence[int], head_dim: int) -> list[int]:
    """The source of each dimension of all heads, one head after the other."""
    return [NOWHERE if NOWHERE in (head, dim) else head * head_dim + dim for head in heads for dim in dims]
