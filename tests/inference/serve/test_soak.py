"""Many requests of several clients at once, some given up, some wrong: no text is wrong and nothing is left behind.

The number of requests is SOAK_REQUESTS, 80 by default.
"""

import gc
import os
import random
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import openai
import pytest

from inference import generate

NUM_CLIENTS = 8
NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", 80))
PROMPTS = ("w3 w4 w5", "w9 w8", "w30 w31 w30 w31", "w12", "w20 w21 w22 w20 w21")
SAMPLINGS = ({"temperature": 0}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "top_p": 0.8, "seed": 11})
MISTAKES = ({"temperature": 9}, {"nonsense": 1}, {"max_tokens": 10**6}, {"prompt": [999]}, {"model": "other"})
MAX_GROWTH = 32 << 20  # bytes


@pytest.fixture(scope="module")
def expected(long_base):
    """The text for each prompt and sampling, without a drafter."""
    return {
        (prompt, index): generate(long_base, prompt, "none", max_new_tokens=30, **{"temperature": 0.0} | sampling)[0]
        for prompt in PROMPTS
        for index, sampling in enumerate(SAMPLINGS)
    }


def request(server, client, rng, expected):
    """Make one random request, and return what became of it."""
    prompt, index = rng.choice(PROMPTS), rng.randrange(len(SAMPLINGS))
    asked = {"model": "toy", "prompt": prompt, "max_tokens": 30, **SAMPLINGS[index]}
    text, kind = expected[prompt, index].text, rng.random()
    if kind < 0.15:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
            client.completions.create(**asked | {"extra_body": rng.choice(MISTAKES)})
        return "refused"
    if kind < 0.3:
        stream = client.completions.create(stream=True, **asked | {"max_tokens": 4000})
        for _ in range(rng.randrange(1, 5)):
            next(stream, None)
        stream.close()
        return "aborted"
    if kind < 0.35:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.002).completions.create(**asked | {"max_tokens": 4000})
        return "aborted"
    if kind < 0.7:
        pieces = client.completions.create(stream=True, **asked)
        assert "".join(chunk.choices[0].text for chunk in pieces) == text
        return "streamed"
    assert client.completions.create(**asked).choices[0].text == text
    return "whole"


def resident():
    """Bytes of memory that this process uses."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
def test_many_clients_with_aborts_and_mistakes_leave_nothing_behind(long_base, serve_base, expected, capfd):
    with serve_base(long_base, "joint", max_waiting=NUM_CLIENTS * 4) as running:

        def ask_many(number, count):
            rng = random.Random(number)
            with running.client() as client:
                return [request(running, client, rng, expected) for _ in range(count)]

        def ask_all(first, total):
            with ThreadPoolExecutor(NUM_CLIENTS) as pool:
                each = pool.map(ask_many, range(first, first + NUM_CLIENTS), [total // NUM_CLIENTS] * NUM_CLIENTS)
                return list(chain.from_iterable(each))

        ask_all(1000, 48)  # buffers grow to their size
        running.wait_until_idle()
        gc.collect()
        threads, memory = threading.active_count(), resident()
        done = ask_all(0, NUM_REQUESTS)
        running.wait_until_idle()
        gc.collect()
        growth, counts = resident() - memory, {kind: done.count(kind) for kind in sorted(set(done))}
        with capfd.disabled():
            print(f"{counts}, memory {growth / (1 << 20):+.1f} MiB, threads {threads} -> {threading.active_count()}")
        assert len(done) == NUM_REQUESTS // NUM_CLIENTS * NUM_CLIENTS and len(counts) == 4
        assert threading.active_count() <= threads + 1
        assert growth < MAX_GROWTH
        assert running.decoding._runner.cached == 0
        assert running.metric('drafters_requests_total{outcome="failed"}') == 0
    assert "Traceback" not in capfd.readouterr().err
