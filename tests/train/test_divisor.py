"""An optimizer step over several processes or batches equals that of one large batch."""

from dataclasses import replace
from functools import partial
from itertools import zip_longest

import lightning as L
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import drafters
from benchmarks import recipes
from tests.train.conftest import QUIET
from train.divisor import SharedDivisor
from train.module import DrafterTraining

ALL_ANCHORS = {"num_anchors": 64}
KINDS = {
    "CTC": {"num_frames": 5, "num_labels": 3, "markov_rank": 4, **ALL_ANCHORS},
    "Block": {"num_frames": 3, "markov_rank": 4, **ALL_ANCHORS},
    "Medusa": {"num_heads": 3, **ALL_ANCHORS},
    "Hydra": {"num_heads": 3, "prefix_attention": True, **ALL_ANCHORS},
    "EAGLE": {"noise": 0.0},
    "EAGLE3": {"hidden_layers": (0, 1, -1), "num_unroll": 3},
}
ONE_COUNT = "CTC", "Block", "EAGLE"  # the other losses have terms of which each counts for itself


def texts(lengths, first_answers, seed=0):
    """Rows whose answers start at very different positions, so that their numbers of anchors differ widely."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, 400, (length,), generator=generator) for length in lengths]
    masks = [torch.arange(length) >= first for length, first in zip(lengths, first_answers, strict=True)]
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "loss_mask": pad_sequence(masks, batch_first=True),
        "lengths": torch.tensor(lengths),
    }


FEW, MANY = texts([20, 16], [17, 12]), texts([24, 30], [1, 2], seed=1)
BOTH = {
    name: pad_sequence([*FEW[name], *MANY[name]], batch_first=True) if name != "lengths" else torch.tensor([0])
    for name in FEW
}


def make(tiny, kind, **arguments):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return DrafterTraining(
            str(tiny), partial(recipes.build, getattr(drafters, kind), init_args=KINDS[kind]), **arguments
        )


def gradients(module):
    return {name: weight.grad.clone() for name, weight in module.drafter.named_parameters() if weight.grad is not None}


def loss_and_gradients(module, batch, divisor=None):
    seen = module.training_batch(batch)
    module.zero_grad()
    loss, _ = module.drafter.loss(replace(seen, divisor=divisor) if divisor else seen, module.base.base_weights)
    loss.backward()
    return loss.item(), gradients(module)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_over_two_processes_is_the_loss_and_gradient_of_the_doubled_batch(tiny, kind):
    module = make(tiny, kind)
    counts = []  # of each process, in the order in which its loss asks
    for batch in (FEW, MANY):
        counts.append([])
        loss_and_gradients(module, batch, lambda count: counts[-1].append(count) or count.clamp(min=1))
    totals = [sum(pair) for pair in zip_longest(*counts)]
    assert counts[0][0] < counts[1][0] / 4, "the processes have very unlike numbers of anchors"

    parts = []
    for batch in (FEW, MANY):
        each = iter(totals)
        parts.append(loss_and_gradients(module, batch, SharedDivisor(lambda count, each=each: next(each).float(), 2)))
    whole, expected = loss_and_gradients(module, BOTH)
    assert (parts[0][0] + parts[1][0]) / 2 == pytest.approx(whole, abs=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close((parts[0][1][name] + parts[1][1][name]) / 2, gradient, atol=1e-6, rtol=1e-4)
    alone = [loss_and_gradients(module, batch)[0] for batch in (FEW, MANY)]
    assert abs(sum(alone) / 2 - whole) > 1e-3, "the mean of the processes' own means is another number"


@pytest.mark.parametrize("counts", [[0, 2000], [0, 0, 7], [2000, 0], [3, 5], [0, 0]])
def test_batches_without_anchors_neither_enlarge_the_losses_nor_change_the_mean(counts):
    """Each anchor's gradient is 1, so that the mean over all anchors is 1 too."""
    weight, divisor = torch.nn.Parameter(torch.zeros(())), SharedDivisor(lambda count: count, 1)
    weights = []
    for count in map(torch.tensor, counts):
        loss = weight * count / divisor(count)
        weights.append(float(divisor.weighted(torch.ones(()))))
        (loss * weights[-1] / len(counts)).backward()
    assert max(weights) <= 2, "float16 overflows at large weights"
    divisor.correct([weight], len(counts))
    assert float(weight.grad) == pytest.approx(float(any(counts)))


def fitted(module, batches, folder, accumulated):
    options = {"enable_checkpointing": False, "default_root_dir": folder, "accumulate_grad_batches": accumulated}
    trainer = L.Trainer(**QUIET, **options, max_epochs=1)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return trainer.global_step


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE_COUNT)
def test_accumulated_gradients_equal_those_of_one_large_batch(tiny, kind, tmp_path):
    """Two steps of two batches each, and a last one of a single batch at the end of the epoch."""
    found = {}
    for accumulated, batches in ((2, [FEW, MANY, MANY, FEW, MANY]), (1, [BOTH, BOTH, MANY])):
        module = make(tiny, kind, learning_rate=1e-3)
        each = found[accumulated] = []
        module.on_before_optimizer_step = lambda optimizer, m=module, each=each: each.append(gradients(m))
        assert fitted(module, batches, tmp_path, accumulated) == 3
    for step, (ours, expected) in enumerate(zip(found[2], found[1], strict=True)):
        for name, gradient in expected.items():
            torch.testing.assert_close(ours[name], gradient, atol=1e-5, rtol=1e-3, msg=f"step {step}, {name}")
