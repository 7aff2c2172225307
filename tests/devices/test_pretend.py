"""The pretend accelerator is as strict as a GPU, counts copies, and computes what the CPU computes."""

import pytest
import torch
from torch.nn import functional as F

HOST = torch.tensor([[1.0, -2.0], [3.0, 4.0]])


@pytest.fixture
def device(accelerator):
    return accelerator.device


@pytest.fixture
def x(accelerator):
    moved = HOST.to(accelerator.device)
    accelerator.take_copies()
    return moved


MIXED = {
    "add": lambda x: x + HOST,
    "multiply a number on the device": lambda x: HOST * x.sum(),
    "where": lambda x: torch.where(x > 0, x, HOST),
    "linear layer": lambda x: torch.nn.Linear(2, 2)(x),
    "cat": lambda x: torch.cat([x, HOST]),
    "gather": lambda x: x.gather(1, torch.tensor([[0], [1]])),
    "embedding": lambda x: F.embedding(torch.tensor([1]), x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], HOST[None]),
    "indices on the device, values on the host": lambda x: HOST[torch.ones_like(x[0], dtype=torch.long)],
    "write a row of the host": lambda x: x.index_copy_(0, torch.tensor([0], device=x.device), HOST[:1]),
    "generator of the host": lambda x: torch.multinomial(x.abs(), 1, generator=torch.Generator()),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixing_devices_raises(x, name):
    with pytest.raises(RuntimeError, match=r"the same device|device type for generator"):
        MIXED[name](x)


# By operation: its copies to the host and to the device.
COPIES = {
    "numbers of Python": (lambda x: (2 * x + 1).clamp(min=0) ** 2, 0, 0),
    "a tensor without dimensions": (lambda x: x * torch.tensor(2.0) + torch.tensor(1.0), 0, 0),
    "made on the device": (lambda x: torch.arange(2, device=x.device) + torch.full((2,), 3, device=x.device), 0, 0),
    "views": (lambda x: x.T[1:].unsqueeze(0).expand(3, -1, -1).reshape(-1), 0, 0),
    "indices on the device": (lambda x: x[torch.arange(1, device=x.device)], 0, 0),
    "to": (lambda x: x + HOST.to(x.device), 0, 1),
    "tensor": (lambda x: torch.tensor([1.0, 2.0], device=x.device), 0, 1),
    "copy_ to the device": (lambda x: torch.zeros_like(x).copy_(HOST), 0, 1),
    "copy_ to the host": (lambda x: torch.zeros(2, 2).copy_(x), 1, 0),
    "list as index": (lambda x: x[[1, 0]], 0, 1),
    "indices on the host": (lambda x: x[torch.tensor([1])], 0, 1),
    "cpu": (lambda x: x.cpu(), 1, 0),
    "tolist": (lambda x: torch.tensor(x.tolist()), 1, 0),
    "item": (lambda x: torch.tensor(x.sum().item()), 1, 0),
    "if": (lambda x: torch.ones(()) if x.sum() > 0 else None, 1, 0),
    "mask as index": (lambda x: x[x > 0], 1, 0),
    "number on the device as index": (lambda x: x[torch.ones((), dtype=torch.long, device=x.device)], 1, 0),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_counted_and_values_are_the_hosts(x, accelerator, name):
    compute, *expected = COPIES[name]
    result = compute(x)
    assert [*map(len, accelerator.take_copies())] == expected
    assert torch.equal(result.cpu(), compute(HOST))
