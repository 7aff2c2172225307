"""Speculative decoding gives the base's own text, for any drafter, however bad."""

import random
from functools import cache

import pytest
import torch
from transformers import SuppressTokensLogitsProcessor

import drafters
from drafters import DraftTree
from drafters.protocol import RequiredOutputs
from inference.verifier import attention
from inference.verifier import sampling as sampling_module
from inference.verifier import session as session_module
from inference.verifier.attention import causal_tree_mask
from inference.verifier.base import load_base
from inference.verifier.runner import Runner
from inference.verifier.sampling import Greedy, KeyedSampler
from inference.verifier.session import Session, common_prefix
from inference.verify import generate_reference
from tests.conftest import fresh_cache

DRAFTERS = ["none", "anpd", "prompt_lookup", "ctc", "ctc_deep", "adversarial", "oracle"]
BASES = [("llama", "sdpa"), ("llama", "eager"), ("qwen2", "sdpa"), ("gpt2", "sdpa")]
NO_EOS = frozenset()
# The trees that try the loop hardest; test_lossless.py has the same properties for every drafter.
each_drafter = pytest.mark.parametrize("name", ["adversarial", "oracle"])


def prompt_of(length):
    rng = random.Random(length)
    return tuple(rng.randrange(3, 40) for _ in range(length))


@cache
@torch.inference_mode()
def naive(base, prompt, max_new_tokens, eos=NO_EOS, sampler=None):
    """The base's text without cache and engine: one full forward per token."""
    seq = list(prompt)
    while len(seq) < min(len(prompt) + max_new_tokens, base.context_length):
        logits = base.model(torch.tensor([seq])).logits[0, -1:]
        seq.append(sampler.pick(logits, [len(seq)]).item() if sampler else logits.argmax().item())
        if seq[-1] in eos:
            break
    return seq[len(prompt) :]


@torch.inference_mode()
def assert_cache_is_fresh(runner, committed, tolerance):
    fresh = fresh_cache(runner.base, committed)
    for held, expected in zip(runner._cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(held.keys, expected.keys, rtol=0, atol=tolerance)
        torch.testing.assert_close(held.values, expected.values, rtol=0, atol=tolerance)


# ---- greedy


@pytest.mark.slow
@each_drafter
@pytest.mark.parametrize(("kind", "attention"), BASES)
def test_greedy_text_is_the_bases_own(make_base, make_drafter, kind, attention, name):
    base = make_base(kind, attention)
    for length in (1, 2, 3, 17):
        prompt = prompt_of(length)
        expected = naive(base, prompt, 30)
        drafter = make_drafter(name, base, [*prompt, *expected])
        assert Session(Runner(base), drafter).run(prompt, 30).tokens == expected
        written = generate_reference(base, list(prompt), 30, Greedy())  # transformers' own generate, which ends at EOS
        assert Session(Runner(base), drafter).run(prompt, 30, base.eos).tokens == written


@each_drafter
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_short_answers_have_the_requested_number_of_tokens(base, make_drafter, name, max_new_tokens):
    prompt = prompt_of(3)
    truth = [*prompt, *naive(base, prompt, 30)]
    result = Session(Runner(base), make_drafter(name, base, truth)).run(prompt, max_new_tokens)
    assert result.tokens == truth[3 : 3 + max_new_tokens]


@each_drafter
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("length", [1, 22, 23])
def test_text_ends_where_the_context_ends(make_base, make_drafter, name, kind, length):
    base, prompt = make_base(kind, context=24), prompt_of(length)
    expected = naive(base, prompt, 100)
    assert len(prompt) + len(expected) == 24
    drafter = make_drafter(name, base, [*prompt, *expected, *prompt_of(9)])
    assert Session(Runner(base), drafter).run(prompt, 100).tokens == expected


@each_drafter
@pytest.mark.parametrize("index", range(9))
def test_text_ends_with_an_end_of_sequence_token_at_any_position_of_a_draft(base, make_drafter, name, index):
    prompt = prompt_of(17)
    truth = naive(base, prompt, 30)
    eos = frozenset({truth[index]})
    expected = naive(base, prompt, 30, eos)
    assert expected == truth[: truth.index(truth[index]) + 1]
    drafter = make_drafter(name, base, [*prompt, *truth])
    session = Session(Runner(base), drafter)
    result = session.run(prompt, 30, eos)
    assert result.tokens == expected
    assert session.runner.cached == len(prompt) + len(expected) - 1
    assert sum(step.num_pending + len(step.path) for step in drafter.steps) == session.runner.cached
    if name == "oracle":  # all in one step, whose last token is drafted, or else, after eight of them, the bonus
        assert [(step.emitted, step.accepted) for step in result.steps] == [(len(expected), min(len(expected), 8))]


def test_the_texts_above_have_end_of_sequence_tokens_at_most_positions_of_a_draft(base):
    truth = naive(base, prompt_of(17), 30)
    assert len({truth.index(token) for token in truth[:9]}) >= 6


@pytest.mark.slow
def test_transformers_ends_at_the_same_end_of_sequence_token(base):
    prompt = prompt_of(17)
    for token in naive(base, prompt, 30)[:9]:
        ids = torch.tensor([prompt])
        written = base.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, pad_token_id=0,
            eos_token_id=token,
        )  # fmt: skip
        assert written[0, 17:].tolist() == naive(base, prompt, 30, frozenset({token}))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_adversarial_trees_do_not_change_the_text(base, adversary, seed):
    prompt = prompt_of(1 + seed)
    expected = naive(base, prompt, 40)
    drafter = adversary([*prompt, *expected], seed, most=25)
    assert Session(Runner(base), drafter).run(prompt, 40).tokens == expected
    # the trees must have been what they claim to be
    assert any(step.path and step.path != list(range(len(step.path))) for step in drafter.steps), "no gather"
    assert any(len(step.path) > 1 for step in drafter.steps)
    assert any(len(step.tree._children) < len(step.tree) for step in drafter.steps), "no sibling twice"


@pytest.mark.parametrize("nodes", [0, 1, 3])
def test_a_node_budget_is_respected_and_does_not_change_the_text(base, adversary, nodes):
    prompt = prompt_of(3)
    expected = naive(base, prompt, 30)
    result = Session(Runner(base), adversary([*prompt, *expected]), max_nodes=nodes).run(prompt, 30)
    assert result.tokens == expected
    assert max(step.fed_candidates for step in result.steps) == nodes


@pytest.mark.slow
def test_a_session_gives_the_same_text_again_after_another_one(base, make_drafter):
    prompt, other = prompt_of(3), prompt_of(17)
    for name in DRAFTERS:
        session = Session(Runner(base), make_drafter(name, base, [*prompt, *naive(base, prompt, 30)]))
        for asked in (prompt, other, prompt):
            assert session.run(asked, 30).tokens == naive(base, asked, 30)


# ---- the state after every step


@each_drafter
@pytest.mark.parametrize(("attention", "tolerance"), [("sdpa", 1e-9), ("eager", 1e-4)])
def test_after_every_step_the_cache_is_that_of_the_text_without_its_last_token(
    make_base, make_drafter, name, attention, tolerance
):
    base, prompt = make_base("llama", attention), prompt_of(3)
    runner = Runner(base)
    session = Session(runner, make_drafter(name, base, [*prompt, *naive(base, prompt, 25)]))
    seq = list(prompt)
    for emitted, _ in session.decode(prompt, 25):
        seq += emitted
        assert runner.cached == len(seq) - 1
        assert_cache_is_fresh(runner, seq[:-1], tolerance)


@each_drafter
def test_a_step_is_one_base_forward(base, make_drafter, name):
    prompt, calls, runner = prompt_of(3), [], Runner(base)
    drafter = make_drafter(name, base, [*prompt, *naive(base, prompt, 30)])
    hook = base.model.base_model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    try:
        for count, _ in enumerate(Session(runner, drafter).decode(prompt, 30), start=1):
            assert len(calls) == count
    finally:
        hook.remove()


@each_drafter
def test_the_costs_add_up(base, make_drafter, name):
    prompt = prompt_of(17)
    result = Session(Runner(base), make_drafter(name, base, [*prompt, *naive(base, prompt, 30)])).run(prompt, 30)
    assert sum(step.emitted for step in result.steps) == len(result.tokens) == 30
    assert [step.fed_pending for step in result.steps] == [17] + [1] * (len(result.steps) - 1)
    for step in result.steps:
        assert step.accepted <= step.fed_candidates
        assert step.emitted == step.accepted + 1
        assert len(step.seconds) == len(session_module.PHASES)
        assert min(step.seconds) >= 0
    assert sum(sum(step.seconds) for step in result.steps) <= result.seconds


def test_a_perfect_drafter_of_eight_tokens_emits_nine_per_step(base, oracle):
    prompt = prompt_of(3)
    truth = [*prompt, *naive(base, prompt, 30)]
    result = Session(Runner(base), oracle(truth, length=8)).run(prompt, 30)
    assert [step.emitted for step in result.steps] == [9, 9, 9, 3]


def test_without_a_drafter_a_step_emits_one_token(base):
    result = Session(Runner(base), drafters.NoDrafter()).run(prompt_of(3), 10)
    assert [(step.emitted, step.fed_candidates) for step in result.steps] == [(1, 0)] * 10


# ---- resuming a text


class TopTokens(drafters.NoDrafter):
    """Drafts some nodes and keeps the base's top tokens that it is shown, with the paths that lead there."""

    def __init__(self, top_k):
        self.required_outputs, self.shown = RequiredOutputs(top_k=top_k), []

    def propose(self, seq, limits):
        self._seq = list(seq)
        return DraftTree([5, 6, 7, 8], [-1, 0, -1, 2]).pruned(limits.max_depth, limits.max_nodes, limits.eos)

    def observe(self, step):
        paths = [[], *(step.tree.path_tokens(node) for node in range(len(step.tree)))]
        self.shown += [(self._seq + path, row) for path, row in zip(paths, step.top_tokens, strict=True)]


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("sampler", ["greedy", "processed", "sampled"])
def test_top_tokens_are_those_of_the_base_alone_however_tokens_are_picked(base, top_k, sampler):
    banned = SuppressTokensLogitsProcessor(list(range(20)), device="cpu")  # half of the tokens
    samplers = {"greedy": Greedy(), "processed": Greedy([banned]), "sampled": KeyedSampler(temperature=2.0, seed=3)}
    drafter = TopTokens(top_k)
    Session(Runner(base), drafter, samplers[sampler]).run(prompt_of(6), 12)
    assert len(drafter.shown) > 12
    for text, row in drafter.shown:
        logits = base.model(torch.tensor([text])).logits[0, -1]
        assert row == logits.topk(top_k).indices.tolist()


class Rewinds(drafters.NoDrafter):
    """Drafts nothing and notes where the text was cut."""

    def begin(self, prompt):
        self.lengths = []

    def rewind(self, length):
        self.lengths.append(length)


@pytest.mark.parametrize("num_same", [1, 4, 9, 12])
def test_a_resumed_text_keeps_the_cache_of_all_shared_tokens_but_the_last(pseudo_runner, num_same):
    runner, drafter = pseudo_runner(), Rewinds()
    session = Session(runner, drafter)
    text = [5, 6, 7, *session.run([5, 6, 7], 9).tokens]
    other = [*text[:num_same], *([(text[num_same] + 1) % 12] if num_same < len(text) else []), 3]
    assert common_prefix(text, other) == num_same
    session.resume(other, num_same)
    assert session.seq == other and runner.cached == min(num_same, len(text)) - 1
    assert drafter.lengths == ([num_same] if num_same < len(text) else [])
    written = [token for emitted, _ in session.steps(len(other) + 10) for token in emitted]
    assert written == pseudo_runner().greedy(other, 10)


def test_the_comparison_of_two_texts_starts_after_the_known_prefix():
    assert common_prefix([1, 2, 3], [9, 9, 3, 4], num_known=2) == 3
    assert common_prefix([1, 2], [1, 2, 3]) == common_prefix([1, 2, 3], [1, 2]) == 2
    assert common_prefix([], [1]) == common_prefix([2], [1]) == 0


def test_a_step_may_have_a_node_budget_of_its_own(pseudo_runner, oracle):
    session = Session(pseudo_runner(), oracle([5, 6, *pseudo_runner().greedy([5, 6], 30)], length=4), max_nodes=3)
    session.begin([5, 6])
    budgets = [None, 0, 1, 8]
    assert [session.step(32, max_nodes=budget)[1].fed_candidates for budget in budgets] == [3, 0, 1, 4]


def test_a_session_forgets_a_text_whose_step_was_interrupted(pseudo_runner):
    session = Session(pseudo_runner(), Rewinds())
    session.begin([5, 6])
    steps = session.steps(20)
    next(steps)
    session.drafter.observe = lambda step: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert session.seq == []


# ---- sampled


@pytest.mark.slow
@each_drafter
@pytest.mark.parametrize("setting", [{}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}, {"temperature": 1.5}])
def test_sampled_text_is_the_one_sampled_without_a_drafter(make_base, make_drafter, name, setting):
    base = make_base()
    for length, seed in [(1, 0), (3, 1), (17, 2)]:
        prompt, sampler = prompt_of(length), KeyedSampler(**setting, seed=seed)
        expected = naive(base, prompt, 25, base.eos, sampler)
        drafter = make_drafter(name, base, [*prompt, *expected])
        assert Session(Runner(base), drafter, sampler).run(prompt, 25, base.eos).tokens == expected


@pytest.mark.slow
def test_another_seed_gives_another_text(base):
    texts = {tuple(Session(Runner(base), drafters.ANPD(), KeyedSampler(seed=s)).run([5], 20).tokens) for s in range(5)}
    assert len(texts) == 5


# ---- what the caller can get wrong


@pytest.mark.parametrize("name", ["none", "ctc"])
def test_an_empty_prompt_is_refused(base, make_drafter, name):
    with pytest.raises(ValueError, match="empty"):
        Session(Runner(base), make_drafter(name, base, [])).run([], 5)


@pytest.mark.parametrize("length", [24, 25, 100])
def test_a_prompt_that_fills_the_context_is_refused(make_base, length):
    with pytest.raises(ValueError, match=f"the prompt has {length} tokens and the context of toy-llama ends at 24"):
        Session(Runner(make_base(context=24)), drafters.NoDrafter()).run(prompt_of(length), 5)


# ---- negative controls: an engine that is wrong must not pass


def accept_unchecked(tree, picks):
    """Accept the first drafted child whatever the base picks, as REST does."""
    path, emitted, node = [], [], -1
    while node in tree.parents:
        node = list(tree.parents).index(node)
        path.append(node)
        emitted.append(tree.tokens[node])
    return path, [*emitted, picks[1 + node]]


def accept_by_the_parents_row(tree, picks):
    """Read the pick of a child one row too early."""
    path, emitted, node, token = [], [picks[0]], -1, picks[0]
    while (child := tree.child(node, token)) is not None:
        path.append(child)
        node, token = child, picks[child]
        emitted.append(token)
    return path, emitted


BROKEN = {
    "unchecked accept": lambda patch: patch.setattr(sampling_module, "accept", accept_unchecked),
    "row off by one": lambda patch: patch.setattr(sampling_module, "accept", accept_by_the_parents_row),
    "positions without depth": lambda patch: patch.setattr(DraftTree, "depths", property(lambda t: [1] * len(t))),
    "siblings in sight": lambda patch: patch.setattr(
        attention, "_kept_mask", lambda pending, parents, *to: causal_tree_mask(pending + len(parents), (), *to)
    ),
    "no gather": lambda patch: patch.setattr(
        Runner, "commit", lambda r, path, whole=Runner.commit: whole(r, range(len(path)))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", [None, *BROKEN])
def test_a_broken_engine_does_not_give_the_bases_text(base, adversary, monkeypatch, broken):
    prompts = [prompt_of(length) for length in range(1, 9)]
    expected = [naive(base, prompt, 30) for prompt in prompts]
    if broken:
        BROKEN[broken](monkeypatch)
    written = [
        Session(Runner(base), adversary([*prompt, *text])).run(prompt, 30).tokens
        for prompt, text in zip(prompts, expected, strict=True)
    ]
    assert (written == expected) == (broken is None)


# ---- a real base


@pytest.mark.slow
def test_all_drafters_give_the_text_of_a_pretrained_base(shared, make_drafter):
    base = load_base(str(shared("models/stories260K")))
    for text in ("Once upon a time", "Lily and Ben like to play in the park. One day"):
        prompt = base.tokenizer(text).input_ids
        expected = generate_reference(base, prompt, 48, Greedy())
        for name in DRAFTERS:
            drafter = make_drafter(name, base, [*prompt, *expected])
            assert Session(Runner(base), drafter).run(prompt, 48, base.eos).tokens == expected


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_draft_outside_the_vocabulary_is_refused_in_one_line(base, token):
    """As a damaged corpus or datastore makes a drafter draft."""

    class Outside(drafters.NoDrafter):
        def propose(self, seq, limits):
            return DraftTree.from_paths([[token]])

    with pytest.raises(ValueError, match=f"proposes token {token}, but the base has tokens 0 to"):
        Session(Runner(base), Outside()).run(list(prompt_of(5)), 9, NO_EOS)
