"""Linear layers of a CPU in 8 bits, whose products are exact: a row has the same bits beside any other rows.

oneDNN multiplies uint8 rows by int8 weights and adds up integers (AVX-512 VNNI), in any order the same. A weight has
one scale for each output, and a token one for its activations, which are integers of 16 bits, as two rows of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import numpy as np
import torch
from numba import njit
from torch import Tensor, nn

from inference.verifier.packed import PackedLinear, large_layers, least_rows, linear_of

ZERO = 128  # what stands for 0 in the uint8 rows
TOGETHER = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # names of layers that read the same states
ROWS_AT_ONCE = 4096  # of a weight, that are widened to float32 while it is quantised
LARGEST, LOW = 127, 254  # the largest value of a row, and the steps of the low row in one of the high row


class Int8Linear(nn.Module):
    """A linear layer in 8 bits, from one in any dtype, for inference.

    Args:
        linear: The layer; its bias is kept as it is.
        is_head: Whether the weights themselves are needed beside their packed copy, as drafters need those of an LM
            head; then they are kept, too.
    """

    def __init__(self, linear: nn.Linear, is_head: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias, self.dtype = linear.bias, linear.weight.dtype
        quantised, scale = quantise_weight(linear.weight.detach())
        self.scale, self.quantised = scale, quantised if is_head else None
        self._zeros = torch.zeros(self.out_features, dtype=torch.int32)
        bias = torch.zeros(self.out_features) if linear.bias is None else linear.bias.detach()
        self._bias = bias.float().numpy()
        self._packed = torch.ops.onednn.qlinear_prepack(quantised, None)

    @property
    def weight(self) -> Tensor:
        """The weights (out, in) of an LM head as they are multiplied, in the dtype of the layer."""
        if self.quantised is None:
            raise AttributeError("weight")
        return (self.quantised * self.scale[:, None]).to(self.dtype)

    def rows(self, tokens: Tensor) -> Int8Linear:
        """A layer of the outputs for these tokens alone, without the bias."""
        assert self.quantised is not None, "only the weights of an LM head are kept"
        return Int8Linear(linear_of((self.quantised[tokens] * self.scale[tokens, None]).to(self.dtype)))

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a layer in 8 bits cannot be copied or pickled: load the base again")

    def forward(self, input: Tensor) -> Tensor:
        """Multiply tokens (..., in) by the weights: (..., out)."""
        activations = input.reshape(-1, self.in_features)
        rows, scale = quantise(activations)
        products = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, ZERO, self._packed, self.scale, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        result = np.empty((len(activations), self.out_features), np.float32)
        _combine(products.numpy(), scale, self._bias, result)
        return torch.from_numpy(result).to(input.dtype).unflatten(0, input.shape[:-1])


class DraftHead:
    """The packed LM head of a base in half precision, of which drafters multiply rows in 8 bits: they only guess."""

    def __init__(self, head: PackedLinear) -> None:
        self.head = head

    def __call__(self, states: Tensor) -> Tensor:
        return self.head(states)

    def rows(self, tokens: Tensor) -> Int8Linear:
        """A layer of the outputs for these tokens alone, without the bias."""
        return Int8Linear(linear_of(self.head.weight.detach()[tokens]))


class JoinedLinear(nn.Module):
    """One of several layers that read the same states one after the other, and are multiplied with them together."""

    def __init__(self, joined: Int8Linear, columns: slice, results: dict[str, Any]) -> None:
        super().__init__()
        self.in_features, self.out_features = joined.in_features, columns.stop - columns.start
        self._joined, self._columns = [joined], columns  # a list, as this layer does not own it
        self._results = results  # of the latest states, of all these layers

    def forward(self, input: Tensor) -> Tensor:
        """Multiply tokens (..., in) by the weights: (..., out)."""
        latest, result = self._results.get("latest", (None, None))
        if latest is None or latest() is not input:  # another thread may run the model with other states
            result = self._joined[0](input)
            self._results["latest"] = ref(input), result
        is_last = self._columns.stop == self._joined[0].out_features
        if is_last:  # nobody reads them again, and those of a long prompt take much memory
            self._results.pop("latest", None)
        return result[..., self._columns]


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (out, in) in int8, and the scale of each output (out,) in float32."""
    scale = weight.abs().amax(1).float().clamp(min=1e-8) / LARGEST
    parts = zip(weight.split(ROWS_AT_ONCE), scale.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([(part / each[:, None]).round_().to(torch.int8) for part, each in parts]), scale


def quantise(activations: Tensor) -> tuple[Tensor, np.ndarray]:
    """Activations of N tokens (N, in) as uint8 rows (2 N, in), high parts before low ones, and a scale of each (N,).

    Further rows of any values follow where so few take longer, see `least_rows`.
    """
    num_rows, width = activations.shape
    rows = np.empty((max(2 * num_rows, least_rows()), width), np.uint8)
    scale = np.empty(num_rows, np.float32)
    _quantise(activations.float().numpy(), rows, scale)
    return torch.from_numpy(rows), scale


@njit(cache=True, nogil=True)
def _quantise(activations, rows, scale):
    """Fill the rows and scales of `quantise`."""
    num_rows, width = activations.shape
    steps = np.float32(LARGEST * LOW)
    for row in range(num_rows):
        largest = np.float32(1e-8)
        for place in range(width):
            largest = max(largest, abs(activations[row, place]))
        scale[row] = largest / steps
        inverse = steps / largest
        for place in range(width):
            whole = np.rint(activations[row, place] * inverse)
            high = np.rint(whole * np.float32(1 / LOW))
            rows[row, place] = np.uint8(high + np.float32(ZERO))
            rows[num_rows + row, place] = np.uint8(whole - high * np.float32(LOW) + np.float32(ZERO))


@njit(cache=True, nogil=True)
def _combine(products, scale, bias, result):
    """Fill the results (N, out) with the sums of high and low products, times the scale of each token."""
    num_rows, num_outputs = result.shape
    for row in range(num_rows):
        for output in range(num_outputs):
            product = products[row, output] * np.float32(LOW) + products[num_rows + row, output]
            result[row, output] = product * scale[row] + bias[output]


def can_multiply_int8() -> bool:
    """Whether this processor adds up integers of 8 bits without saturating."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


def quantise_layers(model: nn.Module, smallest: int = 0) -> int:
    """Replace the linear layers of a base or a drafter that have at least so many weights; return how many there were.

    Raises ValueError if this processor cannot multiply them exactly.
    """
    if not can_multiply_int8():
        raise ValueError("this processor has no exact products of integers (AVX-512 VNNI or AVX-VNNI): take bfloat16")
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    layers = large_layers(model, smallest)
    for parent in dict.fromkeys(parent for parent, _ in layers):
        names = [name for each, name in layers if each is parent]
        for together in TOGETHER:
            if set(together) <= {*names}:
                _join(parent, together)
        for name in names:
            if type(linear := getattr(parent, name)) is nn.Linear:
                setattr(parent, name, Int8Linear(linear, is_head=linear is head))
    return len(layers)


def _join(parent: nn.Module, names: Sequence[str]) -> None:
    """Multiply layers with these names together."""
    linears = [getattr(parent, name) for name in names]
    biases = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears
    ]
    joined = linear_of(torch.cat([linear.weight.detach() for linear in linears]), torch.cat(biases).detach())
    layer, results, start = Int8Linear(joined), dict[str, Any](), 0
    for name, linear in zip(names, linears, strict=True):
        end = start + linear.out_features
        setattr(parent, name, JoinedLinear(layer, slice(start, end), results))
        start = end
