"""The CTC paper's tree, against a literal version: list the frame sequences, take the best, collapse them."""

from itertools import product

import numpy as np
import pytest

from drafters import DraftTree
from drafters.ctc import prefix_search
from drafters.ctc.paper_tree import search

BLANK = -1


def random_frames(num_frames, top_k, seed=0, vocab=5):
    """Probabilities (T, k), blank (T,) and top tokens (T, k) of each frame; and the full distribution (T, V + 1)."""
    logits = np.random.default_rng(seed).normal(size=(num_frames, vocab + 1)) * 1.5
    distribution = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    tokens = np.argsort(-distribution[:, :-1], axis=1)[:, :top_k]
    return np.take_along_axis(distribution, tokens, 1), distribution[:, -1], tokens, distribution


def literal(probs, blank, tokens, num_nodes, max_depth, eos):
    """Collapse and merge the ``num_nodes`` most probable frame sequences of any length."""
    choices = [[*zip(tokens[t].tolist(), probs[t], strict=True), (BLANK, blank[t])] for t in range(len(probs))]
    sequences = []
    for length in range(1, len(probs) + 1):
        for picks in product(*choices[:length]):
            sequences.append((np.prod([p for _, p in picks]), [symbol for symbol, _ in picks]))
    sequences.sort(key=lambda pair: -pair[0])
    texts, likeliest = [], {}
    for probability, symbols in sequences[:num_nodes]:
        text, last = [], BLANK
        for symbol in symbols:
            if symbol not in (last, BLANK):
                text.append(symbol)
            last = symbol
        end = next((place for place, token in enumerate(text) if token in eos), len(text))
        if len(text) <= min(max_depth, end + 1):
            texts.append(text)
            likeliest.setdefault(tuple(text), probability)
    return DraftTree.from_paths(texts), likeliest


@pytest.mark.parametrize("num_frames, top_k", [(1, 1), (2, 3), (4, 3), (5, 2), (6, 1)])
@pytest.mark.parametrize("num_nodes", [0, 1, 3, 10, 60, 100000])
@pytest.mark.parametrize("max_depth, eos", [(9, ()), (2, ()), (0, ()), (9, {0, 3})])
def test_the_tree_collapses_the_most_probable_frame_sequences(num_frames, top_k, num_nodes, max_depth, eos):
    for seed in range(3):
        frames = random_frames(num_frames, top_k, seed)[:3]
        expected, likeliest = literal(*frames, num_nodes, max_depth, eos)
        tree, probs = search(*frames, min(num_nodes, 5000), max_depth, eos)
        tree.validate(vocab_size=5)
        assert tree == expected
        paths = [tuple(tree.path_tokens(node)) for node in range(len(tree))]
        assert np.allclose(probs, [likeliest[path] for path in paths], rtol=1e-12, atol=0)
        assert len(tree) <= num_nodes and BLANK not in tree.tokens


def test_frame_sequences_that_collapse_to_the_same_text_share_a_node():
    """Both "a a" and "a" with a blank collapse to "a": two frame nodes each, but one node in the tree."""
    probs, blank, tokens = np.array([[0.9], [0.5]]), np.array([0.1, 0.5]), np.array([[7], [7]])
    tree, likeliest = search(probs, blank, tokens, 3, 9)
    assert tree == DraftTree([7], [-1]) and likeliest.tolist() == [0.9]


def test_no_frames_give_no_tree():
    assert len(search(np.zeros((0, 3)), np.zeros(0), np.zeros((0, 3), int), 5, 5)[0]) == 0


@pytest.mark.parametrize("num_nodes", [4, 16, 64])
@pytest.mark.parametrize("seed", range(5))
def test_the_prefix_tree_of_the_same_size_is_accepted_at_least_as_deep(num_nodes, seed):
    """Under the drafter's own distribution, the expected acceptance is the sum of the nodes' prefix probabilities."""
    probs, blank, tokens, distribution = random_frames(8, 5, seed)
    everything = np.arange(5)
    paper, _ = search(probs, blank, tokens, num_nodes, 8)
    best, found = prefix_search.search(distribution[:, :-1], distribution[:, -1], everything, len(paper), 8)
    every, probabilities = prefix_search.search(distribution[:, :-1], distribution[:, -1], everything, 5000, 8)
    of = {tuple(every.path_tokens(node)): probabilities[node] for node in range(len(every))}
    gain = sum(of.get(tuple(paper.path_tokens(node)), 0.0) for node in range(len(paper)))
    assert len(best) == len(paper) and gain <= found.sum() + 1e-12
