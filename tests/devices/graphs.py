"""CUDA graphs, emulated on a CPU: operators are recorded with their tensors, and replayed to the same addresses.

As in a CUDA graph, whatever the host put into the recorded function is fixed: only values of tensors change. It proves
nothing about kernels, streams or speed.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drafters.nn import graph
from tests.devices.pretend import INDEXING

aten = torch.ops.aten
# What no GPU captures: results, or shapes of results, that the host waits for, and numbers that it brings.
TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
OPERATORS = {aten.item.default, aten.lift_fresh.default}


def is_captured(func, args):
    """Whether a CUDA graph can hold an operator with these arguments."""
    if func in INDEXING:  # by masks, the number of results depends on values
        return not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return not (func in OPERATORS or TAGS & set(getattr(func, "tags", ())))


def addresses(args):
    return [each.data_ptr() for each in tree_leaves(args) if isinstance(each, Tensor)]


class Recorder(TorchDispatchMode):
    """Records the operators that run in its ``with`` block."""

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self):
        super().__init__()
        self.tape = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert is_captured(func, args), f"a CUDA graph cannot capture {func}"
        result = func(*args, **(kwargs or {}))
        self.tape.append((func, args, kwargs or {}, result, addresses(args)))
        return result

    def replay(self):
        for func, args, kwargs, result, recorded_at in self.tape:
            assert addresses(args) == recorded_at, f"an input of {func} has moved"
            for recorded, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(recorded, Tensor) and recorded.data_ptr() != new.data_ptr():
                    recorded.copy_(new)


class EmulatedGraphs:
    """Stands in for `graph.captured`; counts what a GPU would do.

    Attributes:
        launches: Replays of each function, by its name.
        num_captured: Functions that were captured.
    """

    def __init__(self):
        self.launches, self.num_captured = {}, 0

    @torch.inference_mode()
    def __call__(self, function, device):
        for _ in range(graph.NUM_WARM_UP):
            function()
        self.num_captured += 1
        with Recorder() as recorder:
            results = function()
        name = getattr(function, "__qualname__", repr(function))

        @torch.inference_mode()
        def replay():
            self.launches[name] = self.launches.get(name, 0) + 1
            recorder.replay()
            return results

        return replay


def use_flex_attention(patch):
    """Let graphed steps attend by FlexAttention on the CPU, as they do on a GPU, not compiled; returns its calls."""
    calls = []

    def uncompiled(query, key, value, training, **options):
        calls.append(query.shape)
        return flex_attention(query, key, value, **options)

    patch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    patch.setattr("transformers.integrations.flex_attention.compile_friendly_flex_attention", uncompiled)
    patch.setattr("inference.verifier.fixed_step.FLEX_ON", frozenset(["cpu"]))
    return calls
