"""The decoding loop: texts of bases that are hard to guess, resuming, refusals, and engines that are wrong.

`test_lossless` has the properties that hold for every drafter, on bases whose texts drafters can guess.
"""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import SuppressTokensLogitsProcessor

import drafters
from drafters import DraftTree
from drafters.protocol import RequiredOutputs
from drafters.tree import common_prefix
from inference import Speculation, drafter_specs, generate, stream
from inference.chat import ChatSession
from inference.verifier import sampling as sampling_module
from inference.verifier.runner import Runner
from inference.verifier.sampling import Greedy, KeyedSampler
from inference.verifier.session import Session
from tests.inference.verifier.oracles import prompt_of, written_alone


@pytest.mark.parametrize("index", range(9))
def test_a_draft_beyond_the_end_is_accepted_up_to_the_end_in_one_step(base, oracle, index):
    prompt = prompt_of(17)
    truth = written_alone(base, prompt, 30)
    session = Session(Runner(base), oracle([*prompt, *truth]))
    result = session.run(prompt, 30, frozenset({truth[index]}))
    length = 1 + truth.index(truth[index])
    assert result.tokens == truth[:length]
    assert [(step.emitted, step.accepted) for step in result.steps] == [(length, min(length, 8))]


# ---- what a step shows its drafter


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


# ---- resuming a text


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
    assert common_prefix([1, 2, 3], [9, 9, 3, 4], num_shared=2) == 3
    assert common_prefix([1, 2], [1, 2, 3]) == common_prefix([1, 2, 3], [1, 2]) == 2
    assert common_prefix([], [1]) == common_prefix([2], [1]) == 0


def test_a_session_forgets_a_text_whose_step_was_interrupted(pseudo_runner):
    session = Session(pseudo_runner(), Rewinds())
    session.begin([5, 6])
    steps = session.steps(20)
    next(steps)
    session.drafter.observe = lambda step: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert session.seq == []


# ---- what the caller can get wrong


def test_an_empty_prompt_is_refused(base):
    with pytest.raises(ValueError, match="empty"):
        Session(Runner(base), drafters.NoDrafter()).run([], 5)


def by_chat(base, prompt, drafter):
    runner = Runner(base)
    session = ChatSession(runner, drafter_specs.make(drafter, runner))
    for _ in range(2):  # the second time on the cache of the first
        tokens = [token for emitted, _ in session.decode(prompt, 99) for token in emitted]
    return tokens


def by_speculation(base, prompt, drafter):
    ids, room = torch.tensor([prompt]), base.context_length - len(prompt)
    options = {"custom_generate": Speculation(drafter), "eos_token_id": None, "pad_token_id": 0}
    with pytest.raises(ValueError, match=f"{len(prompt)} tokens and {room + 1} more do not fit into the context of"):
        base.model.generate(ids, max_new_tokens=room + 1, **options)
    return base.model.generate(ids, max_new_tokens=room, **options)[0, len(prompt) :].tolist()


def by_stream(base, prompt, drafter):
    return base.tokenizer("".join(stream(base, prompt, drafter, max_new_tokens=99, eos=[]))).input_ids


def by_generate(base, prompt, drafter):
    return generate(base, prompt, drafter, max_new_tokens=99, eos=[])[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "token_recycling"])
@pytest.mark.parametrize("door", [by_generate, by_stream, by_chat, by_speculation])
def test_a_text_ends_at_the_last_position_of_the_context_by_every_door(make_base, door, drafter):
    base = replace(make_base(), model=copy.deepcopy(make_base().model))
    for context in (24, 32, 16):  # also after the model was used with another context
        base.model.config.max_position_embeddings = context
        for length in (3, context - 2, context - 1):
            expected = written_alone(make_base(), prompt_of(length), context - length)
            if door is by_stream:
                expected = [token for token in expected if token > 2]  # special tokens are no text
            assert door(base, list(prompt_of(length)), drafter) == expected


@pytest.mark.parametrize("length", [24, 25, 100])
def test_a_prompt_that_fills_the_context_is_refused(make_base, length):
    with pytest.raises(ValueError, match=f"the prompt has {length} tokens and the context of toy-llama ends at 24"):
        Session(Runner(make_base(context=24)), drafters.NoDrafter()).run(prompt_of(length), 5)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_draft_outside_the_vocabulary_is_refused_in_one_line(base, token):
    """As a damaged corpus or datastore makes a drafter draft."""

    class Outside(drafters.NoDrafter):
        def propose(self, seq, limits):
            return DraftTree.from_paths([[token]])

    with pytest.raises(ValueError, match=f"proposes token {token}, but the base has tokens 0 to"):
        Session(Runner(base), Outside()).run(list(prompt_of(5)), 9)


# ---- negative controls: an engine that accepts wrongly must not pass; `test_check` has wrong masks and caches


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
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", [None, *BROKEN])
def test_a_broken_engine_does_not_give_the_bases_text(base, adversary, monkeypatch, broken):
    prompts = [prompt_of(length) for length in range(1, 9)]
    expected = [written_alone(base, prompt, 30) for prompt in prompts]
    if broken:
        BROKEN[broken](monkeypatch)
    written = [
        Session(Runner(base), adversary([*prompt, *text])).run(prompt, 30).tokens
        for prompt, text in zip(prompts, expected, strict=True)
    ]
    assert (written == expected) == (broken is None)
