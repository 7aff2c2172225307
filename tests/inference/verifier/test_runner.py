"""The runner: in the forward over a tree, the logits of each node are those of a plain forward over its path."""

import random

import pytest
import torch

from drafters import DraftTree, RequiredOutputs
from inference.verifier.base import Base
from inference.verifier.cache import BufferCache
from inference.verifier.runner import Runner
from tests.inference.verifier.oracles import assert_cache_is_fresh, random_tree

NOTHING = RequiredOutputs()
BASES = [("llama", "sdpa"), ("llama", "eager"), ("qwen2", "sdpa"), ("gpt2", "sdpa"), ("gpt2", "eager")]
TOLERANCE = {"sdpa": 1e-9, "eager": 1e-4}  # eager takes its softmax in float32


@torch.inference_mode()
def flat_logits(base, tokens):
    return base.model(torch.tensor([tokens])).logits[0, -1]


@pytest.mark.parametrize(("kind", "attention"), BASES)
@pytest.mark.parametrize(("cached", "pending"), [(0, 1), (0, 4), (6, 1), (6, 3)])
def test_the_logits_of_a_node_are_those_of_a_plain_forward_over_its_path(make_base, kind, attention, cached, pending):
    base, rng = make_base(kind, attention), random.Random(cached + pending)
    for size in (0, 1, 5, 12):
        runner, seq = Runner(base), [rng.randrange(3, 40) for _ in range(cached + pending)]
        tree = random_tree(rng, size)
        if cached:
            runner.forward(seq[:cached], DraftTree(), NOTHING)
            runner.commit([])
        rows = runner.forward(seq[cached:], tree, NOTHING)
        assert rows.logits.shape == (1 + size, 40)
        assert rows.hidden is None
        for row, path in enumerate([[], *(tree.path_tokens(node) for node in range(size))]):
            expected = flat_logits(base, seq + path)
            torch.testing.assert_close(rows.logits[row], expected, rtol=0, atol=TOLERANCE[attention])


@pytest.mark.parametrize(("kind", "attention"), BASES)
def test_hidden_states_are_those_of_the_requested_layers(make_base, kind, attention):
    base, tolerance = make_base(kind, attention, layers=3), TOLERANCE[attention]
    seq, tree, layers = [5, 6, 7], DraftTree([8, 9, 10], [-1, 0, -1]), (0, 2, 3, -1)
    hidden = Runner(base).forward(seq, tree, RequiredOutputs(layers)).hidden
    assert hidden.shape == (6, 4 * 32)
    for node, path in enumerate(([8], [8, 9], [10])):
        expected = base.hidden_states(torch.tensor([seq + path]), layers)[0][0]
        torch.testing.assert_close(hidden[:3], expected[:3], rtol=0, atol=tolerance)
        torch.testing.assert_close(hidden[3 + node], expected[-1], rtol=0, atol=tolerance)


def test_after_truncation_the_rest_of_the_text_has_no_effect(make_base):
    runner = Runner(make_base())
    runner.forward([5, 6, 7, 8, 9], DraftTree(), NOTHING)
    runner.commit([])
    runner.truncate(5)
    assert runner.cached == 5
    runner.truncate(2)
    assert_cache_is_fresh(runner, [5, 6])
    rows = runner.forward([30], DraftTree([31], [-1]), NOTHING)
    torch.testing.assert_close(rows.logits[1], flat_logits(runner.base, [5, 6, 30, 31]), rtol=0, atol=1e-9)
    runner.commit([0])
    assert_cache_is_fresh(runner, [5, 6, 30, 31])
    runner.truncate(0)
    assert runner.cached == 0
    with pytest.raises(AssertionError, match="more than it holds"):
        runner.truncate(1)


@pytest.mark.parametrize("seed", range(5))
def test_a_cache_behaves_like_a_list_of_positions(seed):
    rng, cache, held = random.Random(seed), BufferCache(2), torch.empty(2, 1, 2, 0, 4)
    for turn in range(25):
        if turn == 15:
            cache.keep(0, [])
            held = held[..., :0, :]
        new = torch.randn(2, 1, 2, rng.choice([1, 2, 9, 200]), 4)
        start = held.shape[-2]
        held = torch.cat([held, new], -2)
        for layer in range(2):
            for got, expected in zip(cache.update(new[layer], -new[layer], layer), (held, -held), strict=True):
                assert torch.equal(got, expected[layer])
        length = rng.randrange(start, held.shape[-2] + 1)
        moved = sorted(rng.sample(range(length, held.shape[-2]), rng.randrange(held.shape[-2] - length + 1)))
        cache.keep(length, moved)
        held = held[..., [*range(length), *moved], :]
        for layer in range(2):
            assert torch.equal(cache.layers[layer].keys, held[layer])
            assert torch.equal(cache.layers[layer].values, -held[layer])
        assert cache.get_seq_length() == held.shape[-2]


def test_a_cache_holds_keys_and_values_of_different_widths_and_layers_of_different_sizes():
    sizes = [(2, 6, 4), (2, 6, 4), (1, 3, 5)]  # heads, width of keys, width of values
    keys, values = ([torch.randn(1, each[0], 40, each[side]) for each in sizes] for side in (1, 2))
    cache = BufferCache(3, capacity=8)
    for start, end in ((0, 3), (3, 5), (5, 40)):
        for layer in range(3):
            found = cache.update(keys[layer][:, :, start:end], values[layer][:, :, start:end], layer)
            assert torch.equal(found[0], keys[layer][:, :, :end]) and torch.equal(found[1], values[layer][:, :, :end])
    cache.keep(2, [4, 39])
    for layer, own_keys, own_values in zip(cache.layers, keys, values, strict=True):
        assert torch.equal(layer.keys, own_keys[:, :, [0, 1, 4, 39]])
        assert torch.equal(layer.values, own_values[:, :, [0, 1, 4, 39]])


def test_accepted_nodes_that_are_in_place_are_not_copied(base, monkeypatch):
    runner, asked = Runner(base), []
    tree = DraftTree([5, 6, 7, 8, 9], [-1, 0, 1, 1, -1])
    for path in ([], [0, 1], [0, 1, 3], [4]):
        runner.reset()
        runner.forward([3, 4], tree, NOTHING)
        with monkeypatch.context() as patch:
            patch.setattr(runner.cache, "keep", lambda length, moved: asked.append((length, moved)))
            runner.commit(path)
    assert asked == [(2, []), (4, []), (4, [5]), (2, [6])]


def test_the_static_cache_is_one_buffer_that_is_reused_for_the_next_text(base):
    runner = Runner(base)
    runner.reset(reserve=600)
    for _ in range(2):
        runner.forward([3, 4, 5], DraftTree(), NOTHING)
        runner.commit([])
        buffer = runner.cache.buffer
        runner.reset()
    assert buffer is runner.cache.buffer and buffer.is_contiguous()
    assert buffer.shape[:2] == (2, 2) and buffer.shape[-2] == 600


@pytest.mark.slow
@pytest.mark.parametrize("label", ["Mistral, sliding window", "Gemma 2", "gpt-oss", "Llama 4 (text)", "DeepSeek-V3"])
def test_windows_chunks_and_narrow_values_hold_at_every_node_and_after_commits(make_model, toy_tokenizer, label):
    base, rng = Base(label, make_model(label), toy_tokenizer), random.Random(3)
    runner, seq, path = Runner(base), [5, 6, 7], []
    for size in (6, 9, 1, 12, 7, 10):  # beyond the windows of 8 positions
        tree = random_tree(rng, size)
        rows = runner.forward(seq[runner.cached :], tree, NOTHING)
        for row, nodes in enumerate([[], *(tree.path_tokens(node) for node in range(size))]):
            torch.testing.assert_close(rows.logits[row], flat_logits(base, seq + nodes), rtol=0, atol=1e-3)
        path = max(map(tree.path_tokens, range(size)), key=len)
        node = next(node for node in range(size) if tree.path_tokens(node) == path)
        runner.commit([above for above in range(size) if tree.ancestor_mask()[node, above]])
        seq += [*path, rng.randrange(3, 40)]
    assert len(seq) > 20
