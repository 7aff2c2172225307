"""A loss summed chunk by chunk, against the same loss computed at once."""

import gc
import weakref
from typing import NamedTuple

import pytest
import torch

from drafters.losses.chunks import anchors_per_chunk, chunked, chunks

A, D = 7, 3


class Anchors(NamedTuple):
    frames: torch.Tensor
    bias: torch.Tensor
    kept: torch.Tensor
    absent: None = None


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    frames, bias, weight = (
        torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((A, D), (A,), (D,))
    )
    return Anchors(frames, bias, torch.arange(A) % 3 > 0), (weight, None)


def sums(x, weight, idle):
    assert x.absent is None and idle is None
    scores = (x.frames @ weight + x.bias).sigmoid() * x.kept
    return scores.square().sum(), torch.stack([scores.sum(), x.kept.sum().float()])


@pytest.mark.parametrize("size", [1, 2, 3, A, 100])
def test_value_metrics_and_gradients_equal_those_computed_at_once(tensors, size):
    per_anchor, shared = tensors
    loss, numbers = chunked(sums, per_anchor, shared, size)
    expected, expected_numbers = sums(per_anchor, *shared)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(numbers, expected_numbers.detach())
    assert not numbers.requires_grad
    leaves = [per_anchor.frames, per_anchor.bias, shared[0]]
    gradients = [torch.autograd.grad(-2.5 * x, leaves, retain_graph=True) for x in (loss, loss, expected)]
    torch.testing.assert_close(gradients[0], gradients[2])
    torch.testing.assert_close(gradients[1], gradients[2])  # the backward pass may run twice


@pytest.mark.slow
def test_each_chunk_is_computed_once_and_then_freed(tensors):
    """Only one chunk's intermediate tensor is alive at a time, and the forward function runs once per chunk."""
    seen, alive = [], []

    def watched(x, weight, idle):
        scores = (x.frames @ weight + x.bias).sigmoid() * x.kept
        gc.collect()
        alive.append(sum(reference() is not None for reference in seen))
        seen.append(weakref.ref(scores))
        return scores.square().sum(), scores.sum()

    loss, _ = chunked(watched, *tensors, 2)
    assert alive == [0, 0, 0, 0]
    loss.backward()
    assert len(seen) == 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_value_is_the_same_and_no_gradient_is_computed(tensors, mode):
    per_anchor, shared = tensors
    with mode():
        loss, expected = chunked(sums, per_anchor, shared, 2)[0], sums(per_anchor, *shared)[0]
    assert not loss.requires_grad
    torch.testing.assert_close(loss.clone(), expected.clone())


def test_tensors_that_need_no_gradient_get_none(tensors):
    per_anchor, shared = tensors
    shared[0].requires_grad_(False)
    loss, _ = chunked(sums, per_anchor, shared, 2)
    loss.backward()
    assert shared[0].grad is None
    assert per_anchor.frames.grad is not None


def test_autocast_is_off_inside_a_chunk(tensors):
    per_anchor, shared = tensors
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = chunked(sums, per_anchor, shared, 2)
    torch.testing.assert_close(loss, sums(per_anchor, *shared)[0])


@pytest.mark.slow
def test_gradients_of_half_precision_weights_are_summed_in_float32():
    """A thousand chunks each have a gradient of one; a sum in bfloat16 would stop growing at 256."""
    weight = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    none = Anchors(torch.ones(1000), torch.zeros(1000), torch.ones(1000))
    loss, _ = chunked(lambda x, weight: ((x.frames * weight).sum(),) * 2, none, [weight], 1)
    loss.backward()
    assert weight.grad.item() == 1000


def test_a_chunk_is_as_large_as_its_memory_allows_and_never_empty():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert anchors_per_chunk(5, 100, cpu) == 2**26 // 4000
    assert anchors_per_chunk(5, 100, cuda) == 2**28 // 4000
    assert anchors_per_chunk(5, 100, cuda, num_calls=300) == 300 * 2**22 // 4000, "as long as its launches take"
    assert anchors_per_chunk(5, 2**25 // 40, cpu) == 2
    assert anchors_per_chunk(5, 2**26, cpu) == 1


@pytest.mark.parametrize("length", [0, 1, 7, 2048])
@pytest.mark.parametrize("size", [1, 3, 100, 5000])
def test_chunks_are_as_few_as_their_memory_allows_and_of_one_size(length, size):
    parts = [range(length)[part] for part in chunks(length, size)]
    assert [item for part in parts for item in part] == list(range(length))
    assert len(parts) == max(1, -(-length // size)) and len(parts[0]) <= size
    assert all(len(part) == len(parts[0]) for part in parts[:-1]) and len(parts[-1]) <= len(parts[0])
