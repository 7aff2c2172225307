"""Linear layers with a packed copy of their weights, which a CPU multiplies faster by a few tokens."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inference.timing import processor_name

# Numbers of tokens from which on packed weights are faster: one token in float32 is a matrix-vector product.
PACKED_FROM = {torch.float32: 2, torch.bfloat16: 1}
MIN_PACKED_ELEMENTS = 2**20  # layers with fewer weights stay in the processor's cache, where packing costs little
LARGE_MODEL = 2**24  # with so many weights, layers down to a sixteenth of that size are out of the cache at each step


def has_packed_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies by packed weights of this type here: not every CPU has products in bfloat16."""
    return dtype is not torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def least_rows() -> int:
    """Return the number of rows that products in bfloat16 and in 8 bits have at least; others are added.

    One row of more than 1,024 values in bfloat16 sums in another order than two and more, and a second takes hardly any
    time on Intel's processors. On AMD's, two rows take longer than four; others were not tried.
    """
    return 4 if "AMD" in processor_name() else 2


class PackedLinear(nn.Linear):
    """A linear layer of a CPU that multiplies few tokens by a packed copy of its weights, in float32 or bfloat16.

    For a product of `PACKED_FROM` tokens or more, the matrix library copies all weights into blocks that fit its
    registers, which may take longer than the product. Here this is done once, or ``at_first_use``. The layer shares its
    weights with the given one. A token has the same bits alone and beside others, where `row_multiples` finds that.
    """

    def __init__(self, linear: nn.Linear, at_first_use: bool = False) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.training = linear.training
        self._packed: Tensor | None = None
        self._packed_from: tuple[int, int] | None = None
        if not at_first_use:
            self._packed_weight()

    def _packed_weight(self) -> Tensor:
        """The packed copy, made anew if other weights were loaded or the layer was moved since."""
        weight = self.weight.detach()
        origin = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        if self._packed is None or self._packed_from != origin:
            typical_rows = 16  # it decides about the size of the blocks; from 1 to 64 all sizes run
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, typical_rows)
            self._packed_from = origin
        return self._packed

    def rows(self, tokens: Tensor) -> PackedLinear:
        """A layer of the outputs for these tokens alone, packed on its own; without the bias."""
        return PackedLinear(linear_of(self.weight.detach()[tokens]))

    def __getstate__(self) -> dict[str, Any]:
        """The state without the packed copy, which can be neither copied nor pickled."""
        return {**self.__dict__, "_packed": None, "_packed_from": None}

    def forward(self, input: Tensor) -> Tensor:
        """Multiply tokens (..., in) by the weights: (..., out)."""
        dtype = self.weight.dtype
        num_rows = input.numel() // self.in_features
        is_packed = num_rows >= PACKED_FROM.get(dtype, sys.maxsize)
        if not (is_packed and has_packed_products(dtype)) or self.weight.device.type != "cpu":
            return F.linear(input, self.weight, self.bias)
        missing = least_rows() - num_rows if dtype is torch.bfloat16 else 0
        rows = input if missing <= 0 else F.pad(input.reshape(num_rows, -1), (0, 0, 0, missing))
        product = torch.ops.mkldnn._linear_pointwise(rows, self._packed_weight(), self.bias, "none", [], "")
        return product if missing <= 0 else product[:num_rows].view(*input.shape[:-1], -1)


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with these weights (out, in), for inference."""
    with torch.device("meta"):  # the weights follow
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def smallest_packed(model: nn.Module) -> int:
    """The number of weights from which on a layer of this model is packed, and of a drafter that runs beside it."""
    is_large = sum(weight.numel() for weight in model.parameters()) >= LARGE_MODEL
    return MIN_PACKED_ELEMENTS // 16 if is_large else MIN_PACKED_ELEMENTS


def large_layers(model: nn.Module, smallest: int) -> list[tuple[nn.Module, str]]:
    """The parent and the name of each linear layer with at least so many weights."""
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.numel() >= smallest
    ]


def pack_weights(model: nn.Module, at_first_use: bool = False, smallest: int | None = None) -> int:
    """Replace the large linear layers of a model by `PackedLinear`, and return how many there were.

    The model computes the same function up to rounding, in about twice the memory. Raises ValueError if the weights are
    not in float32 or bfloat16 on the CPU, or torch cannot pack them here.

    Args:
        model: A base or a drafter.
        at_first_use: Whether a layer is packed when it first multiplies a few tokens; one that only ever reads one
            token, such as Medusa's LM heads, then takes no more memory.
        smallest: Number of weights from which on a layer is packed; None for what `smallest_packed` says of the model.
    """
    weight = next(model.parameters())
    device, dtype = weight.device.type, str(weight.dtype).removeprefix("torch.")
    if device != "cpu" or weight.dtype not in PACKED_FROM:
        raise ValueError(
            f"packed weights need float32 or bfloat16 on a CPU, and these are {dtype} on {device}: do not pack them"
        )
    if not torch.backends.mkldnn.is_available():
        raise ValueError("this build of torch has no oneDNN, whose packed weights are used: do not pack them")
    if not has_packed_products(weight.dtype):
        raise ValueError("oneDNN has no products in bfloat16 for this CPU: do not pack the weights, or use float32")
    layers = large_layers(model, smallest_packed(model) if smallest is None else smallest)
    for parent, name in layers:
        try:
            setattr(parent, name, PackedLinear(getattr(parent, name), at_first_use))
        except (AttributeError, RuntimeError) as error:
            raise ValueError(f"torch cannot pack {dtype} weights here ({error}): do not pack them") from error
    return len(layers)
