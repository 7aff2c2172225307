"""A pretend accelerator: its tensors say that they are on ``ipu:0``, and the CPU computes them.

It refuses to mix devices as strictly as a GPU does, and counts the copies between host and device. It proves nothing
about kernels, streams, CUDA graphs or speed.

To autograd and to torch's own compositions of operators the tensors look like those on ``meta``, a device that every
build of torch has; so an operator that is asked for ``meta`` makes a pretend tensor, unless Python asks for it.
"""

import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, return_and_correct_aliasing

PRETEND = torch.device("ipu", 0)  # a device type that needs no registration and that nobody here has
ROOT = Path(__file__).parents[2]
PACKAGES = ("data", "drafters", "inference", "train")  # a virtual environment may lie beside them

aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXING = {aten.index.Tensor, aten._unsafe_index.Tensor}
INDEXING |= {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# Beside the pointwise operators these take a number from the host in a tensor without dimensions.
READ_A_VALUE = {aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.index_fill.int_Tensor}
READ_A_VALUE |= {aten.index_fill_.int_Tensor}  # if the value is on the device, they wait for it
TAKE_A_NUMBER = {*READ_A_VALUE, *INDEXING, aten.where.self, aten.fill.Tensor, aten.fill_.Tensor}

WHOLE = {aten.linear.default, aten.matmul.default}  # run as they are, which takes a third of the time


class PretendTensor(Tensor):
    """A tensor on the pretend device; ``host`` holds its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: PRETEND)
    is_meta = property(lambda self: False)

    @staticmethod
    def __new__(cls, host):
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        with torch.inference_mode(host.is_inference()):  # a view of a parameter is none, even in inference mode
            return Tensor._make_wrapper_subclass(cls, host.shape, **layout, device="meta")

    def __init__(self, host):
        assert type(host) is Tensor and host.is_cpu
        self.host = host

    def __repr__(self, *, tensor_contents=None):
        return f"PretendTensor({self.host})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} on a pretend tensor outside the `with` block of its accelerator")

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):  # `nn.Module.to` sets it
        Tensor.data.__set__(self, value)
        self.host = value.host

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, *args, **kwargs):
        raise TypeError(f"can't convert {PRETEND} device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy


class PretendGenerator(torch.Generator):
    """Random numbers for one device; the pretend one draws those that the CPU would draw."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls)

    def __init__(self, device="cpu"):
        self.of_pretend = _is_pretend(device)

    device = property(lambda self: PRETEND if self.of_pretend else torch.device("cpu"))


class Accelerator:
    """Inside its ``with`` block there is a pretend accelerator.

    Attributes:
        to_host: Where the program copied from the device to the host, or waited for a value: one entry per copy.
        to_device: Where it copied from the host to the device.
    """

    device = PRETEND

    def __init__(self):
        self.to_host, self.to_device = [], []

    def __enter__(self):
        with ExitStack() as stack:
            stack.callback(setattr, torch, "Generator", torch.Generator)
            torch.Generator = PretendGenerator
            stack.callback(delattr, torch, PRETEND.type)
            setattr(torch, PRETEND.type, ModuleType("ipu"))  # torch.utils.checkpoint looks for it
            stack.enter_context(_Functions())
            stack.enter_context(_Operators(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error):
        self._stack.close()

    def take_copies(self):
        """The places of the copies to the host and to the device since the last call."""
        copies = self.to_host, self.to_device
        self.to_host, self.to_device = [], []
        return copies


class _Operators(TorchDispatchMode):
    """Checks and counts the operators on pretend tensors, and lets the CPU run them."""

    def __init__(self, accelerator):
        super().__init__()
        self.accelerator = accelerator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        if not (_is_pretend(kwargs.get("device")) or any(isinstance(each, PretendTensor) for each in tensors)):
            return func(*args, **kwargs)
        assert all(isinstance(each, PretendTensor) or each.is_cpu for each in tensors), f"{func}: values were lost"
        traits = _traits(func)
        if traits.is_composite:
            with self:
                return func.decompose(*args, **kwargs)
        if func in COPIES:
            return self._copy(func, args, kwargs)
        if func is aten._fused_sdp_choice.default:
            return 0  # attention as a composition of operators
        self._check(func, args, tensors)
        self._count_waiting(func, args)
        on_host = {name: _on_host(value) for name, value in kwargs.items()}
        result = func(*_on_host(args), **(on_host | {"device": "cpu"} if "device" in on_host else on_host))
        result = _on_pretend(result)
        if traits.aliases:
            result = return_and_correct_aliasing(func, args, kwargs, result)
        assert all(each.shape == each.host.shape for each in _tensors((result,))), f"{func} changes a shape in place"
        return result

    def _copy(self, func, args, kwargs):
        source = args[0]
        if func is aten.copy_.default:
            source, to_pretend = args[1], isinstance(args[0], PretendTensor)
        else:
            device = kwargs.get("device")
            to_pretend = isinstance(source, PretendTensor) if device is None else _is_pretend(device)
        if isinstance(source, PretendTensor) != to_pretend:
            (self.accelerator.to_device if to_pretend else self.accelerator.to_host).append(_where())
        on_host = [each.host if isinstance(each, PretendTensor) else each for each in args]
        if func is aten.copy_.default:
            func(*on_host)
            return args[0]
        copied = func(*on_host, **{**kwargs, "device": "cpu"})
        return PretendTensor(copied) if to_pretend else copied

    def _check(self, func, args, tensors):
        """Raise what torch raises if an operator gets tensors of both devices, beside numbers and indices."""
        traits = _traits(func)
        for each in tensors:
            if isinstance(each, PretendTensor):
                continue
            if traits.takes_a_number and each.dim() == 0 and not any(args[place] is each for place in traits.written):
                continue
            if func in INDEXING and isinstance(args[0], PretendTensor) and any(each is index for index in args[1]):
                self.accelerator.to_device.append(_where())
                continue
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {PRETEND} and cpu! "
                f"(when checking the arguments of {func})"
            )

    def _count_waiting(self, func, args):
        """Count the copy of an operator whose result, or whose result's shape, depends on values on the device."""
        if func in INDEXING:
            waits = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        elif func in READ_A_VALUE:
            waits = isinstance(args[-1], PretendTensor)
        else:
            waits = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags)
        if waits:
            self.accelerator.to_host.append(_where())


class _Functions(TorchFunctionMode):
    """What does not reach the operators: values of Python that become tensors, and the device of generators."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and _is_pretend(kwargs.get("device")):
            return func(*args, **{**kwargs, "device": "cpu"}).to(PRETEND)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], PretendTensor):
            args = (args[0], _index(args[1]), *args[2:])
        if func is Tensor.new_tensor and isinstance(args[0], PretendTensor):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs, "device": "cpu"}).to(PRETEND)
        if any(isinstance(each, str | torch.device) and str(each) == "meta" for each in (*args, *kwargs.values())):
            with _disable_current_modes():  # transformers builds models on the real one before it loads weights
                return func(*args, **kwargs)
        if isinstance(generator := kwargs.get("generator"), torch.Generator):
            places = [each.device for each in args if isinstance(each, Tensor)]
            place = torch.device(places[0] if places else kwargs.get("device", "cpu"))
            if generator.device.type != place.type:
                raise RuntimeError(f"Expected a '{place.type}' device type for generator but found another device")
        return func(*args, **kwargs)


def _index(index):
    """An index whose lists of numbers are tensors on the device, to which they are copied."""
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    return torch.tensor(index).to(PRETEND) if isinstance(index, list | range | np.ndarray) else index


def _is_pretend(device):
    return device is not None and torch.device(device).type in (PRETEND.type, "meta")


def _tensors(values):
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _on_host(value):
    if isinstance(value, PretendTensor):
        return value.host
    return type(value)(map(_on_host, value)) if isinstance(value, list | tuple) else value


def _on_pretend(value):
    if isinstance(value, Tensor):
        return PretendTensor(value)
    return type(value)(map(_on_pretend, value)) if isinstance(value, list | tuple) else value


class _Traits(NamedTuple):
    """What is known of an operator.

    Attributes:
        is_composite: It is made of others, which then meet the same checks.
        takes_a_number: It reads a tensor without dimensions from the host as it reads a number.
        written: Its arguments that are written.
        aliases: Its result is one of its arguments, or a view of one.
    """

    is_composite: bool
    takes_a_number: bool
    written: list[int]
    aliases: bool


@cache
def _traits(func):
    arguments = [each.alias_info for each in func._schema.arguments]
    return _Traits(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd") and func not in WHOLE,
        func in TAKE_A_NUMBER or torch.Tag.pointwise in func.tags,
        [place for place, alias in enumerate(arguments) if alias and alias.is_write],
        any(each.alias_info for each in func._schema.returns),
    )


def _where():
    """The line of the project that is running, for messages."""
    frame = sys._getframe()
    while frame:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES:
            return f"{path.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "a test"
