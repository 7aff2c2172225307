"""Muon against the singular value decomposition, and against PyTorch's own."""

import pytest
import torch

from train import muon
from train.muon import Muon, orthogonalised


def seeded(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_singular_values_come_close_to_one_and_directions_stay(shape):
    left, _, right = torch.linalg.svd(seeded(*shape), full_matrices=False)
    matrix = left @ torch.linspace(3.0, 0.1, min(shape)).diag() @ right
    values = left.T @ orthogonalised(matrix) @ right.T
    torch.testing.assert_close(values, values.diagonal().diag(), rtol=0, atol=1e-5)
    assert ((values.diagonal() > 0.6) & (values.diagonal() < 1.3)).all()


def test_the_scale_of_a_gradient_does_not_matter_and_zero_stays_zero():
    torch.testing.assert_close(orthogonalised(1e4 * seeded(3, 5)), orthogonalised(seeded(3, 5)))
    assert not orthogonalised(torch.zeros(3, 5)).any()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch has its own Muon from 2.9 on")
def test_in_bfloat16_steps_are_those_of_pytorch(monkeypatch):
    monkeypatch.setattr(muon, "_working_dtype", lambda device: torch.bfloat16)
    shapes = [(6, 6), (4, 9), (9, 4)]

    def after(kind, **options):
        trained = [torch.nn.Parameter(seeded(*shape)) for shape in shapes]
        optimizer = kind(trained, lr=0.02, weight_decay=0.1, **options)
        for step in range(4):
            for weight in trained:
                weight.grad = seeded(*weight.shape, 1 + step)[..., step]
            optimizer.step()
        return [weight.detach() for weight in trained]

    theirs = after(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
    torch.testing.assert_close(after(Muon), theirs, rtol=0, atol=0)


def test_a_matrix_without_a_gradient_stays_and_the_closure_is_called_once():
    moved, kept, calls = torch.nn.Parameter(seeded(2, 3)), torch.nn.Parameter(seeded(3, 2)), []
    moved.grad = torch.ones(2, 3)
    assert Muon([moved, kept], lr=0.1).step(lambda: calls.append(1) or 7.0) == 7.0
    assert calls == [1]
    torch.testing.assert_close(kept.detach(), seeded(3, 2), rtol=0, atol=0)
    assert not torch.equal(moved.detach(), seeded(2, 3))
