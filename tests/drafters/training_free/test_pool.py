"""The n-gram pool, against plain lists."""

import random

import pytest

from drafters import NgramPool
from tests.drafters.training_free.oracles import PlainPool


@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_pool_is_a_list_for_each_key_without_duplicates(most, seed):
    rng, pool, lists = random.Random(seed), NgramPool(most), PlainPool(most)

    def gram():
        return (rng.randrange(2), rng.randrange(3))

    for _ in range(300):
        key, what = rng.randrange(3), rng.random()
        if what < 0.85:
            call = ("insert", key, gram())
        elif what < 0.97:
            call = ("replace_newest", key, [gram() for _ in range(rng.randrange(4))])
        else:
            call = ("keep_newest", rng.randrange(3))
        for each in (pool, lists):
            getattr(each, call[0])(*call[1:])
        for key in range(4):
            held = lists.grams.get(key, [])
            assert pool.newest(key) == held
            assert len(held) == len(set(held))
            for count in range(5):
                assert pool.newest(key, count) == (held[-count:] if count else [])
        assert len(pool) == sum(map(len, lists.grams.values()))
