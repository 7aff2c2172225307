import math
import random
from collections import Counter

import pytest
import torch

from data.batches import BucketSampler, collate

LENGTHS = [(37 * n) % 101 + 1 for n in range(103)]


def test_rows_are_padded_on_the_right():
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [8], "loss_mask": [1]}]
    batch = collate(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert batch["lengths"].tolist() == [3, 1]
    assert (batch["input_ids"].dtype, batch["loss_mask"].dtype) == (torch.int64, torch.bool)


def sharded(lengths, world_size=1, epoch=0, **arguments):
    """Return the sampler of each rank, and the batches of each rank in one epoch."""
    samplers = [BucketSampler(lengths, rank=rank, world_size=world_size, **arguments) for rank in range(world_size)]
    for sampler in samplers:
        sampler.sampler.set_epoch(epoch)  # as Lightning calls it
    return samplers, [list(sampler) for sampler in samplers]


SETS = {
    "one": [17],
    "alike": [64] * 41,
    "mixed": LENGTHS,
    "skewed": [int(2 ** random.Random(n).uniform(0, 11)) for n in range(500)],
    "longest": [*range(1, 30), 2048, 2048, 2048],
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("spare", [None, 1, 1.7, 16])  # the budget over the longest row
@pytest.mark.parametrize("batch_size", [1, 4, 1000])
def test_every_row_occurs_once_per_epoch_and_no_batch_exceeds_the_budget(name, world_size, spare, batch_size):
    lengths = SETS[name]
    max_tokens = int(spare * max(lengths)) if spare else None
    for epoch in range(3):
        samplers, batches = sharded(lengths, world_size, epoch, batch_size=batch_size, max_tokens=max_tokens, seed=3)
        assert {len(each) for each in batches} == {len(samplers[0])}, "every rank has as many batches as len() says"
        seen = Counter(row for each in batches for batch in each for row in batch)
        assert set(seen) == set(range(len(lengths)))
        assert seen.total() - len(lengths) == -len(lengths) % world_size, "only the rows that pad the order occur twice"
        for step in zip(*batches, strict=True):
            assert len({len(batch) for batch in step}) == 1, "all ranks have equally many rows in a step"
            for batch in step:
                assert len(batch) <= batch_size
                assert len(batch) * max(lengths[row] for row in batch) <= (max_tokens or math.inf)


def test_every_epoch_under_a_budget_has_the_same_number_of_different_batches():
    sampler = BucketSampler(SETS["skewed"], 1000, max_tokens=4096)
    epochs = []
    for epoch in range(6):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    assert {len(batches) for batches in epochs} == {len(sampler)}
    as_sets = [{frozenset(batch) for batch in batches} for batches in epochs]
    assert len(as_sets[0] & as_sets[1]) < len(sampler) / 2, "batches have other rows in every epoch"
    firsts = [max(SETS["skewed"][row] for row in batches[0]) for batches in epochs]
    assert len(set(firsts)) > 3, "batches of short and of long rows are mixed"


def test_batches_under_a_budget_hold_little_padding():
    lengths = [int(2 ** random.Random(n).uniform(5, 11)) for n in range(2000)]
    sampler = BucketSampler(lengths, 1000, max_tokens=8192)
    assert sampler.padding_share() < 0.06
    assert len(sampler) < 1.15 * sum(lengths) / 8192, "batches are nearly full"


def test_batches_hold_rows_of_similar_length():
    in_file_order = [list(range(n, min(n + 4, len(LENGTHS)))) for n in range(0, len(LENGTHS), 4)]
    held = sum(len(batch) * max(LENGTHS[row] for row in batch) for batch in in_file_order)
    assert BucketSampler(LENGTHS, 4).padding_share() < (1 - sum(LENGTHS) / held) / 5


@pytest.mark.parametrize("max_tokens", [None, 400])
def test_the_order_depends_on_seed_and_epoch_only_if_it_is_shuffled(max_tokens):
    def order(seed, epoch, is_shuffled=True):
        options = {"batch_size": 50, "seed": seed, "is_shuffled": is_shuffled, "max_tokens": max_tokens}
        return sharded(LENGTHS, epoch=epoch, **options)[1][0]

    assert order(0, 1) == order(0, 1)
    assert order(0, 0) != order(0, 1) != order(1, 1)
    assert order(0, 0, is_shuffled=False) == order(5, 7, is_shuffled=False)
    longest = [max(LENGTHS[row] for row in batch) for batch in order(0, 0, is_shuffled=False)]
    assert longest == sorted(longest)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("max_tokens", [None, 400])
def test_padding_share_is_that_of_the_collated_batches(world_size, max_tokens):
    samplers, batches = sharded(LENGTHS, world_size, batch_size=4, max_tokens=max_tokens)
    held = [
        collate([{"input_ids": [1] * LENGTHS[n], "loss_mask": [1] * LENGTHS[n]} for n in batch])
        for each in batches
        for batch in each
    ]
    num_tokens = sum(int(batch["lengths"].sum()) for batch in held)
    num_padded = sum(batch["input_ids"].numel() for batch in held)
    assert samplers[0].padding_share() == samplers[-1].padding_share() == pytest.approx(1 - num_tokens / num_padded)


def test_a_budget_below_the_longest_row_or_an_empty_batch_is_refused():
    with pytest.raises(
        ValueError, match=r"data\.max_tokens is 100, but the longest conversation has 101 tokens: raise it"
    ):
        BucketSampler(LENGTHS, 4, max_tokens=100)
    with pytest.raises(ValueError, match=r"data\.batch_size is 0: a batch has at least 1 conversation"):
        BucketSampler(LENGTHS, 0)
