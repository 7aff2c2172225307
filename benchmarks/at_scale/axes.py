"""Where the entries of a small model's weights lie in the weights of a larger one that computes the same function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from drafters.protocol import BaseShape

NOWHERE = -1


@dataclass(frozen=True)
class Axis:
    """One axis of a large weight.

    Args:
        source: (N,) the index in the small axis that each place of the large one copies, or `NOWHERE`.
        is_active: (N,) whether activations may differ from zero there. Weights that only read other places may have any
            value.
    """

    source: Tensor
    is_active: Tensor

    @classmethod
    def of(cls, source: Sequence[int], is_active: Sequence[bool] | None = None) -> Axis:
        """An axis whose active places are by default those with a source."""
        places = torch.tensor(list(source))
        return cls(places, places != NOWHERE if is_active is None else torch.tensor(list(is_active)))

    @classmethod
    def same(cls, size: int) -> Axis:
        """An axis that is as long in both models."""
        return cls.of(range(size))

    @property
    def places(self) -> Tensor:
        """(n,) the places that have a source."""
        return (self.source != NOWHERE).nonzero()[:, 0]

    def repeated(self, count: int) -> Axis:
        """The axis of several activations side by side."""
        size = len(set(self.source[self.places].tolist()))
        copies = [torch.where(self.source == NOWHERE, NOWHERE, self.source + size * copy) for copy in range(count)]
        return Axis(torch.cat(copies), self.is_active.repeat(count))


@dataclass(frozen=True)
class Attention:
    """The heads of an attention layer.

    Args:
        num_heads: Number of query heads.
        num_kv_heads: Number of key-value heads; as many as query heads, or one for each group of them.
        head_dim: Width of a head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Axes:
    """The axes of a large model, by what lies along them.

    Args:
        hidden: The residual stream. The place behind the small one's is reserved; see `widening`.
        vocabulary: Tokens; those beyond the small vocabulary copy its rows again.
        intermediate: Units of the feed-forward layers.
        queries: Query heads.
        keys: Key-value heads.
        attended: The results of all query heads, which the output projection reads.
        head_dim: One head.
        query_scale: Factor of the queries that makes up for the larger divisor of the attention scores.
    """

    hidden: Axis
    vocabulary: Axis
    intermediate: Axis
    queries: Axis
    keys: Axis
    attended: Axis
    head_dim: Axis
    query_scale: float

    @classmethod
    def between(cls, small: BaseShape, large: BaseShape, heads: Attention, large_heads: Attention) -> Axes:
        """The axes that lead from one shape to a larger one.

        Raises:
            ValueError: The larger shape has no room for the small one.
        """
        _check_room(small, large)
        hidden_size, dims = small.hidden_size, head_dims(heads.head_dim, large_heads.head_dim)
        query_heads, kv_heads = place_heads(heads, large_heads)
        group = large_heads.num_heads // large_heads.num_kv_heads
        is_attending = [kv_heads[head // group] != NOWHERE for head in range(large_heads.num_heads)]
        queries = _flat(query_heads, dims, heads.head_dim)
        hidden = _first(hidden_size, large.hidden_size)
        return cls(
            hidden=Axis.of(hidden, [place <= hidden_size for place in range(large.hidden_size)]),
            vocabulary=Axis.of([token % small.vocab_size for token in range(large.vocab_size)]),
            intermediate=Axis.of(_first(small.intermediate_size, large.intermediate_size)),
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

    A query head stays with its key-value head. If the larger groups are smaller, key-value heads are repeated.

    >>> place_heads(Attention(2, 2, 8), Attention(4, 2, 8))
    ([0, -1, 1, -1], [0, 1])
    >>> place_heads(Attention(4, 1, 8), Attention(4, 2, 8))
    ([0, 1, 2, 3], [0, 0])

    Raises:
        ValueError: There are too few key-value heads.
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


def _first(size: int, large_size: int) -> list[int]:
    return [*range(size), *[NOWHERE] * (large_size - size)]


def _flat(heads: Sequence[int], dims: Sequence[int], head_dim: int) -> list[int]:
    """The source of each dimension of all heads, one head after the other."""
    return [NOWHERE if NOWHERE in (head, dim) else head * head_dim + dim for head in heads for dim in dims]


def _check_room(small: BaseShape, large: BaseShape) -> None:
    for name, needed in (
        ("hidden_size", small.hidden_size + 1),  # one place is reserved
        ("vocab_size", small.vocab_size),
        ("num_layers", small.num_layers),
        ("intermediate_size", small.intermediate_size),
    ):
        if getattr(large, name) < needed:
            raise ValueError(
                f"the shape has {name} {getattr(large, name)}, and the base needs {needed}: take a larger one"
            )
