"""CUDA graphs, emulated on a CPU: operators are recorded with their tensors, and replayed to the same addresses.

As in a CUDA graph, whatever the host put into the recorded function is fixed: only values of tensors change. It proves
nothing about kernels, streams or speed.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drafters.nn import graph
from tests.devices.pretend import INDEXING

aten = torch.ops.aten
# What no GPU captures: results, or shapes of results, that the host waits for; numbers that it brings; random numbers.
TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
OPERATORS = {aten.item.default, aten.lift_fresh.default}
ATTENTION = {aten.scaled_dot_product_attention.default}  # which draws numbers only for a dropout, and ours has none


def is_captured(func, args):
    """Whether a CUDA graph can hold an operator with these arguments."""
    if func in INDEXING:  # with masks the shape of the result depends on values
        return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])
    return func in ATTENTION or not (func in OPERATORS or TAGS & set(func.tags))


def addresses(args):
    return [each.data_ptr() for each in tree_leaves(args) if isinstance(each, Tensor)]


class Recorder(TorchDispatchMode):
    """Records the operators that run in its ``with`` block."""

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
    """

    def __init__(self):
        self.launches = {}

    @torch.inference_mode()
    def __call__(self, function, device):
        for _ in range(graph.NUM_WARM_UP):
            function()
        with Recorder() as recorder:
            results = function()
        name = getattr(function, "__qualname__", repr(function))

        @torch.inference_mode()
        def replay():
            self.launches[name] = self.launches.get(name, 0) + 1
            recorder.replay()
            return results

        return replay
