"""Muon against the singular value decomposition and PyTorch's own; with AdamW, against the two side by side."""

import math
from copy import deepcopy
from datetime import timedelta
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from drafters.nn.markov import BaseMarkov
from drafters.protocol import BaseShape
from train import optimizer as optimizers
from train.optimizer import JointOptimizer, Muon, adamw, muon, orthogonalised, with_schedule
from train.strategies import FSDP2


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner, self.lm_head = nn.Parameter(torch.randn(4, 3)), nn.Linear(3, 3), nn.Linear(3, 5)
        self.trainer = SimpleNamespace(estimated_stepping_batches=8, strategy=None)

    def backward_at(self, step):
        self.zero_grad()
        self.lm_head(self.inner(self.table * (1 + step)).tanh()).pow(2).mean().backward()


def both_after(module, schedule, num_steps, start=0):
    for step in range(start, start + num_steps):
        module.backward_at(step)
        schedule["optimizer"].step()
        schedule["lr_scheduler"]["scheduler"].step()
    return [weight.detach().clone() for weight in module.parameters()]


def made_by(optimizer, module, schedule="cosine"):
    return with_schedule(module, optimizer(module, 0.02, 0.1), 2, schedule)


class WeightOfAGPU(nn.Parameter):
    """It only says that it is there: torch fuses AdamW on the host as well."""

    is_cuda = True


def test_adamw_is_fused_on_a_gpu_alone_and_lightning_can_clip_its_gradients():
    weight = WeightOfAGPU(torch.ones(2, 2))
    weight.grad = torch.full((2, 2), 3.0)
    made = optimizers._adamw([weight], 0.1, 0.0)
    assert (
        made.param_groups[0]["fused"]
        and not optimizers._adamw([nn.Parameter(torch.ones(2))], 0.1, 0.0).defaults["fused"]
    )
    precision = MixedPrecision("bf16-mixed", "cpu")
    precision.clip_gradients(made, 1.0)
    assert weight.grad.norm() == pytest.approx(1.0)
    made.step()
    assert torch.allclose(weight, torch.full((2, 2), 0.9))


def test_linear_layers_follow_muon_and_all_else_adamw():
    ours, literal = Net(), Net()
    made = made_by(muon, ours)
    schedule = made["lr_scheduler"]["scheduler"].lr_lambdas[0]
    others = [{"params": [literal.table, literal.lm_head.weight], "weight_decay": 0.1}]
    others.append({"params": [literal.inner.bias, literal.lm_head.bias], "weight_decay": 0.0})
    by_adamw = torch.optim.AdamW(others, lr=0.02, betas=(0.9, 0.95))
    by_muon = Muon([literal.inner.weight], lr=0.02, weight_decay=0.1)
    for step in range(4):
        literal.backward_at(step)
        for group in (*by_adamw.param_groups, *by_muon.param_groups):
            group["lr"] = 0.02 * schedule(step)
        by_adamw.step()
        by_muon.step()
    torch.testing.assert_close(both_after(ours, made, 4), list(literal.parameters()), rtol=0, atol=0)


def test_maps_of_the_base_weights_in_a_bias_follow_muon():
    module = Net()
    module.bias = BaseMarkov(BaseShape(6, 4, 1, 2, 2, 8), rank=2, has_blank=True)
    by_muon, by_adamw = made_by(muon, module)["optimizer"].optimizers
    inner, others = (
        [id(weight) for group in each.param_groups for weight in group["params"]] for each in (by_muon, by_adamw)
    )
    assert inner == [id(weight) for weight in (module.inner.weight, module.bias.left, module.bias.right)]
    assert id(module.bias.blank) in others and len(others) == 5  # the blank's row, the table, lm_head and two biases


def test_a_restored_state_continues_as_the_saved_one():
    module = Net()
    made = made_by(muon, module)
    both_after(module, made, 3)
    again = Net()
    restored = made_by(muon, again)
    again.load_state_dict(module.state_dict())
    restored["optimizer"].load_state_dict(deepcopy(made["optimizer"].state_dict()))
    restored["lr_scheduler"]["scheduler"].load_state_dict(made["lr_scheduler"]["scheduler"].state_dict())
    ends = both_after(module, made, 2, start=3), both_after(again, restored, 2, start=3)
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_sharded_weights_are_refused():
    module = Net()
    module.trainer.strategy = FSDP2()
    with pytest.raises(ValueError, match="DDP"):
        made_by(muon, module)


def test_a_constant_rate_needs_no_end_of_the_training_and_a_cosine_does():
    module = Net()
    module.trainer.estimated_stepping_batches = torch.inf  # as Lightning says with max_epochs -1
    made = made_by(adamw, module, "constant")
    (rate,) = set(made["lr_scheduler"]["scheduler"].lr_lambdas)
    assert [rate(step) for step in (0, 1, 10**6)] == [0.5, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"give trainer\.max_steps, trainer\.max_epochs or trainer\.max_time"):
        made_by(adamw, module)


def test_a_linear_decay_is_that_of_torch():
    module = Net()
    made = with_schedule(module, adamw(module, 0.02, 0.1), 0, "linear")
    literal = torch.optim.AdamW(module.parameters(), lr=0.02)
    decay = torch.optim.lr_scheduler.LinearLR(literal, start_factor=1.0, end_factor=0.0, total_iters=8)
    for _ in range(10):
        literal.step()
        assert made["optimizer"].param_groups[0]["lr"] == pytest.approx(literal.param_groups[0]["lr"])
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()
        decay.step()
    assert literal.param_groups[0]["lr"] == 0


def test_a_cosine_ends_with_the_time_or_the_last_step_whichever_is_nearer(monkeypatch):
    module, timer, seconds = Net(), Timer(timedelta(seconds=10)), [0.0]
    monkeypatch.setattr(timer, "time_elapsed", lambda stage="train": seconds[0])
    other, asked = 0.2, []  # how far another process is behind, and how often the processes were asked
    module.trainer.strategy = SimpleNamespace(
        root_device=torch.device("cpu"), reduce=lambda value, reduce_op: asked.append(value) or value - other / 2
    )
    vars(module.trainer).update(callbacks=[Timer(), timer], estimated_stepping_batches=100, world_size=2)
    rates = made_by(adamw, module)["lr_scheduler"]["scheduler"].lr_lambdas
    asked.clear()
    for step, seconds[0], progress in [(1, 1.0, 0.01), (20, 6.0, 0.5), (90, 6.0, 0.9), (99, 20.0, 1.0)]:
        for rate in rates:
            assert rate(step) == pytest.approx(0.5 * (1 + math.cos(math.pi * progress)))
    assert len(rates) == 2 and len(asked) == 4
    module.trainer.world_size = 1
    assert rates[0](21) == pytest.approx(0.0)  # no process was asked


# ---- Muon alone


def seeded(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_singular_values_come_close_to_one_and_directions_stay(monkeypatch, shape):
    monkeypatch.setattr(optimizers, "_working_dtype", lambda device: torch.float32)
    left, _, right = torch.linalg.svd(seeded(*shape), full_matrices=False)
    matrix = left @ torch.linspace(3.0, 0.1, min(shape)).diag() @ right
    values = left.T @ orthogonalised(matrix) @ right.T
    torch.testing.assert_close(values, values.diagonal().diag(), rtol=0, atol=1e-5)
    assert ((values.diagonal() > 0.6) & (values.diagonal() < 1.3)).all()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch has its own Muon from 2.9 on")
def test_in_bfloat16_steps_are_those_of_pytorch(monkeypatch):
    monkeypatch.setattr(optimizers, "_working_dtype", lambda device: torch.bfloat16)
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
    assert JointOptimizer(Muon([moved, kept], lr=0.1, weight_decay=0.1)).step(lambda: calls.append(1) or 7.0) == 7.0
    assert calls == [1]
    torch.testing.assert_close(kept.detach(), seeded(3, 2), rtol=0, atol=0)
    assert not torch.equal(moved.detach(), seeded(2, 3))
