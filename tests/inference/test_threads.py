"""Threads that decode with one model at the same time, each with a drafter of its own, write what they write alone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from inference import Speculation, generate

PROMPT, OTHER = [3, 4, 5, 3, 4], [9, 8, 7, 9, 8]
SELF_SPECULATIVE = "self_speculative:threshold=0,num_draft=4"


@pytest.fixture(scope="module")
def base(make_base):
    return make_base(layers=4, seed=2)


def plain(base, prompt):
    return base.model.generate(torch.tensor([prompt]), max_new_tokens=20, eos_token_id=None)[0, len(prompt) :].tolist()


def speculated(base, prompt):
    arguments = {"max_new_tokens": 20, "eos_token_id": None, "repetition_penalty": 1.2}
    ids = base.model.generate(torch.tensor([prompt]), custom_generate=Speculation("anpd"), **arguments)
    return ids[0, len(prompt) :].tolist()


def ours(drafter, **options):
    def write(base, prompt):
        (result,) = generate(base, prompt, drafter, max_new_tokens=20, eos=[], **options)
        return result.token_ids

    return write


def run_within(first, second, module, skipped=None):
    """Run one function in a thread, and another while the first is within a forward of the model.

    Args:
        first: Runs in a thread, which pauses at a call of ``module``.
        second: Runs meanwhile.
        module: A part of the model.
        skipped: If given, the thread pauses in a forward that leaves out this part, which comes before ``module``.

    Returns:
        What both return.
    """
    inside, done, ran, thread = threading.Event(), threading.Event(), [], []

    def note(*_):
        if threading.get_ident() in thread:
            ran.append(1)

    def pause(*_):
        if threading.get_ident() in thread and not ran and not inside.is_set():
            inside.set()
            assert done.wait(60)
        ran.clear()

    hooks = [module.register_forward_pre_hook(pause)]
    if skipped is not None:
        hooks.append(skipped.register_forward_pre_hook(note))
    try:
        with ThreadPoolExecutor(1, initializer=lambda: thread.append(threading.get_ident())) as pool:
            running = pool.submit(first)
            running.add_done_callback(lambda _: inside.set())
            assert inside.wait(60) and not running.done()
            try:
                result = second()
            finally:
                done.set()
            return running.result(), result
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.slow
@pytest.mark.parametrize(
    "second", [plain, ours("anpd"), ours(SELF_SPECULATIVE)], ids=["generate", "anpd", "self_speculative"]
)
def test_a_text_written_within_a_self_speculative_draft_is_the_one_written_alone(base, second):
    first, layers = ours(SELF_SPECULATIVE), base.model.model.layers
    alone = plain(base, PROMPT), plain(base, OTHER)
    skipped, module = layers[1].mlp.down_proj, layers[2].mlp.down_proj  # half of the layers are left out in drafts
    assert run_within(lambda: first(base, PROMPT), lambda: second(base, OTHER), module, skipped) == alone


@pytest.mark.slow
def test_texts_of_several_threads_are_those_written_alone(base, adversary, make_random_ctc):
    ways = [plain, speculated, ours("anpd"), ours(SELF_SPECULATIVE), ours("anpd", temperature=0.9)]
    ways += [ours(adversary([*PROMPT, *plain(base, PROMPT)])), ours(make_random_ctc(base, draws=2), temperature=1.1)]
    alone = [way(base, PROMPT) for way in ways]
    for _ in range(2):
        start = threading.Barrier(len(ways))

        def write(way, start=start):
            start.wait()
            return way(base, PROMPT)

        with ThreadPoolExecutor(len(ways)) as pool:
            assert list(pool.map(write, ways)) == alone


def test_hidden_states_of_another_thread_are_not_captured(base):
    layers, mine, theirs = (1, 2), torch.tensor([PROMPT]), torch.tensor([OTHER + OTHER])
    expected = base.hidden_states(mine, layers)
    (states, last), _ = run_within(
        lambda: base.hidden_states(mine, layers), lambda: base.model(theirs), base.model.model.layers[3].mlp
    )
    torch.testing.assert_close(states, expected[0])
    torch.testing.assert_close(last, expected[1])
