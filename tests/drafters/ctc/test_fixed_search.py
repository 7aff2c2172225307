"""The prefix search of fixed shape, against the one on the host."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.ctc import fixed_search, prefix_search
from drafters.trees.best_first import Bias


def random_frames(rng, num_frames, num_candidates, dtype, sharpness):
    """Probabilities of candidates (T, C) and blank (T,), tokens of which one may repeat, and a bias in factors."""
    logits = rng.normal(size=(num_frames, num_candidates + 3)) * sharpness
    probs = (np.exp(logits - logits.max(1, keepdims=True))).astype(dtype)
    probs /= probs.sum(1, keepdims=True)
    tokens = rng.integers(0, 2 * num_candidates, num_candidates)
    factors = np.exp(rng.normal(size=(num_candidates + 1, num_candidates + 1))).astype(dtype)
    columns = [*range(num_candidates), -1]
    scales = (1 / (factors @ probs[:, columns].T + 0.5)).astype(dtype)
    return probs[:, :num_candidates], probs[:, -1], tokens, Bias(factors, scales)


def on_device(frames, num_nodes, depth, eos, floor, with_bias, is_chain):
    probs, blank, tokens, bias = frames
    factors, scales = (torch.from_numpy(part) for part in bias) if with_bias else (None, None)
    given = (torch.from_numpy(np.ascontiguousarray(part)) for part in (probs, blank, tokens))
    limits = num_nodes, torch.tensor(depth), torch.tensor(sorted(eos), dtype=torch.long), floor
    return fixed_search.search(*given, *limits, factors, scales, is_chain)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("is_chain", [False, True])
def test_the_tree_is_the_very_one_of_the_search_on_the_host(is_chain, data):
    seed, num_frames, num_candidates = (data.draw(st.integers(*ends)) for ends in ((0, 10**6), (1, 6), (1, 9)))
    num_nodes, depth = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 9))
    dtype, sharpness = data.draw(st.sampled_from([np.float32, np.float64])), data.draw(st.sampled_from([0.5, 2, 6]))
    floor, with_bias = data.draw(st.sampled_from([0.0, 1e-3, 0.1])), data.draw(st.booleans())
    frames = random_frames(np.random.default_rng(seed), num_frames, num_candidates, dtype, sharpness)
    probs, blank, tokens, bias = frames
    eos = set(tokens[: data.draw(st.integers(0, 2))].tolist())
    host = prefix_search.chain if is_chain else prefix_search.search
    tree, tree_probs = host(probs, blank, tokens, num_nodes, depth, eos, floor, bias if with_bias else None)
    found = on_device(frames, num_nodes, depth, eos, floor, with_bias, is_chain)
    assert found.on_host() == tree
    assert found.tokens.shape == found.parents.shape == found.log_probs.shape == (num_nodes,)
    num_empty = num_nodes - len(tree)
    np.testing.assert_allclose(found.log_probs[: len(tree)], np.log(tree_probs), rtol=0, atol=1e-12)
    assert found.log_probs[len(tree) :].tolist() == [-np.inf] * num_empty


def test_it_is_one_graph_that_serves_other_values_and_runs_over_several_drafts():
    rng, graphs = np.random.default_rng(0), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(fixed_search.search, fullgraph=True, dynamic=False, backend=backend)
    drafts = [random_frames(rng, 3, 5, np.float32, 2) for _ in range(2)]
    stacked = [torch.from_numpy(np.stack([draft[part] for draft in drafts])) for part in range(3)]
    eos = torch.tensor([3])
    for depth in (3, 2):
        limits = 10, torch.tensor(depth), eos
        together = torch.vmap(lambda *frames, limits=limits: fixed_search.search(*frames, *limits))(*stacked)
        for index, (probs, blank, tokens, _) in enumerate(drafts):
            tree, _ = prefix_search.search(probs, blank, tokens, 10, depth, {3})
            frames = [part[index] for part in stacked]
            assert compiled(*frames, *limits).on_host() == tree
            assert fixed_search.PrefixTree(*(part[index] for part in together)).on_host() == tree
    assert len(graphs) == 1
