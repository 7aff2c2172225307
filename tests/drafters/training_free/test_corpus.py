"""The corpus cache as a file and as a drafter, against counts from plain loops."""

import random

import numpy as np
import pytest
from safetensors.numpy import save_file

from drafters import CorpusCache, DraftTree, Limits
from drafters.training_free.corpus import CorpusTable
from inference.indexes import count
from tests.conftest import refusal
from tests.drafters.training_free.oracles import PlainCorpus

TEXT = [1, 2, 3, 4, 5, 6] * 3 + [9, 2, 3, 4, 5, 7] + [8, 2, 3, 4, 5, 7] * 2 + [5, 3, 6, 6, 6]


def table(text, min_count=1, top=20, **rest):
    return CorpusTable(*count(np.array(text, dtype=np.int32), min_count, top), min_count=min_count, **rest)


@pytest.mark.parametrize(("min_count", "top"), [(1, 20), (1, 2), (2, 20), (4, 1), (1, 1 << 63)])
@pytest.mark.parametrize("seed", range(6))
def test_retrieved_chains_equal_those_from_counting(seed, min_count, top):
    rng = random.Random(seed)
    vocab = rng.choice([2, 3])
    text = [rng.randrange(vocab) if rng.random() > 0.02 else -1 for _ in range(400)]
    text += range(40, 48)  # the end of a text counts too
    cache, plain, answers = table(text, min_count, top), PlainCorpus(text, min_count, top), 0
    for seq in [[40, 41, 42, 43], *([rng.randrange(vocab + 1) for _ in range(rng.randrange(1, 9))] for _ in range(60))]:
        excluded = plain.retrieve(seq, 1)[: rng.randrange(2)]
        most = rng.randrange(30)
        expected = plain.retrieve(seq, most, excluded)
        assert cache.retrieve(seq, most, excluded) == expected
        answers += bool(expected)
    assert answers > 10


def test_no_token_of_the_base_is_mistaken_for_another():
    """A base may have more tokens than the text; an overflowing context code would find another context."""
    cache = table(TEXT)
    assert all(cache.retrieve([token], 3) == [] for token in (0, 10, 2**20, 2**31 - 1))


def test_a_saved_cache_loads_completely(tmp_path):
    first = table(TEXT, 1, 3, tokenizer_hash="abc", num_tokens=len(TEXT), sources=("a.txt", "b.md"))

    first.save(tmp_path / "cache")
    again = CorpusTable.load(tmp_path / "cache")
    for name in ("keys", "offsets", "grams"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
        assert getattr(first, name).dtype == getattr(again, name).dtype
    for name in ("tokenizer_hash", "min_count", "num_tokens", "sources"):
        assert getattr(first, name) == getattr(again, name)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert again.retrieve([2, 3, 4], 3) == first.retrieve([2, 3, 4], 3) != []


def test_a_file_that_is_no_corpus_cache_is_refused_in_one_line(tmp_path):
    good = tmp_path / "good"
    table(TEXT).save(good)
    (tmp_path / "short").write_bytes(good.read_bytes()[:-7])
    (tmp_path / "text").write_text("hello")
    save_file({"weights": np.zeros(3)}, tmp_path / "model")
    for name, (keys, offsets) in {"broken": ([0, 1, 2], [0, 1, 2]), "turned": ([5, 4, 3], [0, 1, 3, 4])}.items():
        CorpusTable(np.array(keys), np.array(offsets), np.zeros((offsets[-1], 4), np.int32)).save(tmp_path / name)
    for name, said in {
        "absent": "make a corpus cache with `drafters index corpus OUT`",
        "short": "make a corpus cache",
        "text": "make a corpus cache",
        "model": "another kind of file",
        "broken": "do not fit each other",
        "turned": "its contexts are not in order",
    }.items():
        message = refusal(CorpusTable.load, tmp_path / name)
        assert said in message and name in message


def test_a_draft_has_the_retrieved_chains_within_the_limits():
    cache = table(TEXT)
    seq = [1, 2, 3, 4, 5]
    grams = cache.retrieve(seq, 3)
    assert len(grams) == 3
    drafter = CorpusCache(cache)
    assert drafter.propose(seq, Limits(9)) == DraftTree.from_paths(grams)
    assert CorpusCache(cache, num_chains=1).propose(seq, Limits(9)) == DraftTree.from_paths(grams[:1])
    assert drafter.propose(seq, Limits(2)) == DraftTree.from_paths([gram[:2] for gram in grams])
    assert len(drafter.propose(seq, Limits(9, max_nodes=3))) == 3
    assert list(drafter.propose(seq, Limits(0)).tokens) == []
    assert set(drafter.propose(seq, Limits(9, eos=frozenset({6}))).depths) == {1, 2, 3, 4}
    assert drafter.propose(seq, Limits(9, eos=frozenset({6}))).child(0, 1) is None, "nothing below an end token"
    with pytest.raises(ValueError, match="num_chains must be at least 1"):
        CorpusCache(cache, 0)
