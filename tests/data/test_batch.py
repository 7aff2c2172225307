from collections import Counter

import pytest
import torch

from data.batch import BucketSampler, collate

LENGTHS = [(37 * n) % 101 + 1 for n in range(103)]


def test_rows_are_padded_on_the_right():
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [8], "loss_mask": [1]}]
    batch = collate(rows, pad_id=9)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert batch["lengths"].tolist() == [3, 1]
    assert (batch["input_ids"].dtype, batch["loss_mask"].dtype) == (torch.int64, torch.bool)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_row_comes_once_an_epoch_over_all_ranks(world_size):
    ranks = [BucketSampler(LENGTHS, 4, rank=rank, world_size=world_size) for rank in range(world_size)]
    batches = [list(sampler) for sampler in ranks]
    assert {len(each) for each in batches} == {len(ranks[0])}
    seen = Counter(row for each in batches for batch in each for row in batch)
    assert set(seen) == set(range(len(LENGTHS)))
    assert seen.total() - len(LENGTHS) == -len(LENGTHS) % world_size
    for step in zip(*batches, strict=True):
        assert len({len(batch) for batch in step}) == 1


def test_fewer_rows_than_ranks_still_give_every_rank_a_batch():
    batches = [list(BucketSampler([3, 4], 2, rank=rank, world_size=5)) for rank in range(5)]
    assert all(len(each) == 1 and len(each[0]) == 1 for each in batches)


def test_the_order_depends_on_seed_and_epoch_only():
    def order(seed, epoch):
        sampler = BucketSampler(LENGTHS, 4, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0, 1) == order(0, 1)
    assert order(0, 0) != order(0, 1) != order(1, 1)


def test_an_unshuffled_order_is_the_same_in_every_epoch():
    sampler = BucketSampler(LENGTHS, 4, is_shuffled=False)
    first = list(sampler)
    sampler.set_epoch(3)
    assert list(sampler) == first


def test_batches_hold_rows_of_similar_length():
    def padding(batches):
        return sum(
            max(LENGTHS[row] for row in batch) * len(batch) - sum(LENGTHS[row] for row in batch) for batch in batches
        )

    in_file_order = [list(range(n, min(n + 4, len(LENGTHS)))) for n in range(0, len(LENGTHS), 4)]
    assert padding(BucketSampler(LENGTHS, 4)) < padding(in_file_order) / 5


def test_start_skips_batches_of_one_epoch_only():
    sampler = BucketSampler(LENGTHS, 4)
    whole = list(sampler)
    sampler.start = 10
    assert list(sampler) == whole[10:]
    assert list(sampler) == whole


def test_lightning_finds_set_epoch_where_it_looks():
    assert BucketSampler(LENGTHS, 4).sampler.set_epoch
