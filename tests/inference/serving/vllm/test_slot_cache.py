"""Keys and values at vLLM's physical slots."""

import torch

from drafters import BaseShape, Block
from inference.serving.vllm.slot_cache import FedBatch, SlotCache

SHAPE = BaseShape(hidden_size=16, vocab_size=23, num_layers=3, num_heads=2, head_dim=8, intermediate_size=24)


def test_what_was_written_block_by_block_is_read_as_one_text():
    drafter, table = Block(SHAPE), torch.tensor([[3, 1, 0], [2, 4, 5]])
    cache, fed = SlotCache(drafter, num_slots=24), FedBatch(table, block_size=4)
    lengths = torch.tensor([6, 9])
    positions = torch.arange(9)
    texts = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        context = drafter.trunk.context(texts, positions.expand(2, -1))
        order = torch.randperm(15, generator=torch.Generator().manual_seed(1))  # both texts, in any order
        row = torch.tensor([0] * 6 + [1] * 9)[order]
        at = torch.cat([positions[:6], positions])[order]
        slots = table[row, at // 4] * 4 + at % 4
        cache.write(
            slots,
            [
                (keys[row, :, at][None].transpose(1, 2), values[row, :, at][None].transpose(1, 2))
                for keys, values in context
            ],
        )
    read = cache.read(fed.slots([0, 1], lengths))
    for (keys, values), (own_keys, own_values) in zip(read, context, strict=True):
        for text, length in enumerate(lengths):
            assert torch.equal(keys[text, :, :length], own_keys[text, :, :length])
            assert torch.equal(values[text, :, :length], own_values[text, :, :length])
    assert fed.slots([1], torch.tensor([2])).tolist() == [[8, 9]]


def test_slots_behind_the_end_of_a_text_are_not_those_of_another():
    fed = FedBatch(torch.tensor([[3, 1], [2, 4]]), block_size=4)
    assert fed.slots([0, 1], torch.tensor([1, 5])).tolist() == [[12, 0, 0, 0, 0], [8, 9, 10, 11, 16]]


def test_the_memory_is_that_of_all_slots():
    drafter = Block(SHAPE)
    assert SlotCache(drafter, num_slots=24).num_bytes == 24 * len(drafter.trunk.layers) * 2 * 2 * 8 * 4
