"""Keys and values at vLLM's physical slots."""

from types import SimpleNamespace

import numpy as np
import torch

from drafters import BaseShape, Block
from drafters.block import BlockTrunkOptions
from drafters.protocol import BaseWeights, Limits
from inference.vllm import parallel_proposer
from inference.vllm.parallel_proposer import FedBatch, ParallelProposer, SlotCache, groups

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


def test_groups_hold_every_text_once_and_no_more_positions_than_allowed():
    lengths = torch.randint(1, 300, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    found = groups(lengths, 1000)
    assert sorted(text for group in found for text in group) == list(range(40))
    assert all(len(group) * max(lengths[text] for text in group) <= 1000 for group in found)
    assert groups([2000, 5], 1000) == [[1], [0]], "a single text may be longer"


def test_drafts_in_groups_are_those_of_the_whole_batch(monkeypatch):
    torch.manual_seed(0)
    proposer, lengths = object.__new__(ParallelProposer), [5, 40, 6, 3]  # vLLM is needed only to start one
    drafter = proposer.drafter = Block(SHAPE).eval()
    proposer.weights = BaseWeights(torch.randn(23, 16), torch.randn(23, 16))
    proposer.num_tokens, proposer.limits = 4, Limits(4)
    proposer.cache = SlotCache(drafter, 64)
    proposer.fed = FedBatch(torch.stack([torch.randperm(16) for _ in lengths]), block_size=4)
    with torch.inference_mode():
        hidden = torch.randn(1, 64, 16)
        proposer.cache.write(torch.arange(64), drafter.trunk.context(hidden, torch.arange(64)[None]))
    texts = [np.arange(length + 1) % 23 for length in lengths]
    gathered, read = [], proposer.cache.read
    monkeypatch.setattr(proposer.cache, "read", lambda slots: gathered.append(slots.numel()) or read(slots))
    whole = proposer.draft([0, 1, 2, 3], texts)
    monkeypatch.setattr(parallel_proposer, "MAX_GATHERED_BYTES", 18 * proposer.cache.num_bytes // 64)
    assert proposer.draft([0, 1, 2, 3], texts) == whole
    assert gathered == [160, 18, 40]
    assert len({tuple(chain) for chain in whole}) > 1 and all(whole)


def test_a_forward_is_stored_at_its_slots_without_what_pads_it():
    """Three positions of one request, in blocks of four slots, fed in tensors of five rows."""
    torch.manual_seed(0)
    proposer = object.__new__(ParallelProposer)
    drafter = proposer.drafter = Block(SHAPE, BlockTrunkOptions(hidden_layers=(2, 1, -1), tokens_in_context=True))
    proposer.weights = BaseWeights(torch.randn(23, 16), torch.randn(23, 16))
    proposer.base, proposer.inner_layers = SimpleNamespace(shape=SHAPE), (1, 2)
    proposer.cache = SlotCache(drafter, 24)
    first, second, last = torch.full((3, 5, 16), torch.nan)
    for states in (first, second, last):
        states[:3] = torch.randn(3, 16)
    tokens, positions = torch.tensor([7, 8, 9, -1, -1]), torch.tensor([3, 4, 5, -1, -1])
    proposer.runner = SimpleNamespace(
        input_ids=SimpleNamespace(gpu=tokens),
        positions=positions,
        input_batch=SimpleNamespace(block_table=[SimpleNamespace(block_size=4)]),
        execute_model_state=SimpleNamespace(
            scheduler_output=SimpleNamespace(total_num_scheduled_tokens=3),
            hidden_states=last,
            aux_hidden_states=[first, second],
            spec_decode_common_attn_metadata=SimpleNamespace(
                block_table_tensor=torch.tensor([[5, 2]]), slot_mapping=torch.tensor([23, 8, 9, -1, -1])
            ),
        ),
    )
    proposer._observe()
    hidden = torch.cat([second, first, last], dim=-1)[None, :3]
    with torch.inference_mode():
        context = drafter.context(hidden, positions[None, :3], tokens[None, :3], proposer.weights.embedding)
    slots = proposer.fed.slots([0], torch.tensor([6]))
    assert slots.tolist() == [[20, 21, 22, 23, 8, 9]]
    for stored, own in zip(proposer.cache.read(slots), context, strict=True):
        for part, own_part in zip(stored, own, strict=True):
            assert torch.equal(part[:, :, 3:], own_part)
            assert not part[:, :, :3].any()
    proposer.runner.execute_model_state = None  # after a step without tokens
    proposer._observe()
