"""The engine and every drafter on an accelerator: the steps of the host, and few copies between the two."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

import drafters
from benchmarks import recipes
from inference.verifier import attention
from inference.verifier.draft_model import DraftModelSession
from inference.verifier.layer_skipping import LayerSkippingSession
from inference.verifier.runner import Runner
from inference.verifier.sampling import Greedy, KeyedSampler
from inference.verifier.session import Session
from tests.inference.verifier import test_lossless as lossless

LENGTH, PROMPT = 8, lossless.prompt_of(17)
KNOWN = [*PROMPT, *lossless.prompt_of(LENGTH)]  # for the drafters that look up n-grams


class TakesDrafts(Greedy):
    """Takes the last child of every node for the base's pick, so that each step accepts a path."""

    def decide(self, rows):
        tree, picks = rows.tree, super().decide(rows)
        for node in range(tree.num_candidates):
            picks[1 + tree.parents[node]] = tree.tokens[node]
        return picks


SAMPLED = KeyedSampler(temperature=0.8, top_k=20, top_p=0.95, seed=5)
SAMPLERS = {
    "takes drafts": TakesDrafts(),
    "sampled": SAMPLED,
    "penalty": Greedy([RepetitionPenaltyLogitsProcessor(1.3)]),
    "sampled, penalty": KeyedSampler(seed=5, processors=[RepetitionPenaltyLogitsProcessor(1.3)]),
}
DRAWN = {  # drafters with weights that sample their drafts
    "ctc, drawn": (drafters.CTC, lossless.CTC | {"markov_rank": 3}, {"draws": 3}),
}
CTC_OPTIONS = {  # further options of the CTC drafter
    "ctc, draft vocabulary": (drafters.CTC, lossless.CTC | {"markov_rank": 3, "draft_vocab_size": 20}, {}),
    "ctc, reads tokens": (drafters.CTC, lossless.CTC | {"tokens_in_context": True}, {}),
    "ctc, copies": (drafters.CTC, lossless.CTC | {"lookup": True, "copy": True}, {}),
}
DRAFTING_MODELS = {  # by drafter: its copies to the host for each forward of its model
    "draft_model": 1,
    "draft_model, the base itself": 2,  # it stops below a threshold, and reads the probabilities for it
    "cascade": 1,
    "ouroboros": 1,
    "self_speculative": 1,
}


def copies_of(name):
    """Copies of a step to the host, and the most to the device; the table in docs/design.md says what they are."""
    if name == "none":
        return 1, 2
    if name.startswith("eagle") or name in ("ctc, reads tokens", "ctc, copies"):
        return 2, 5
    return (2, 4) if name in lossless.LEARNED | CTC_OPTIONS or name == "merged" else (1, 3)


QUICK = "none", "ctc", "eagle", "draft_model"  # the other drafters are left out by `make test-fast`


def each(names):
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]


OF_TOKENS = "anpd", "prompt_lookup", "corpus", "rest", "joint", "token_recycling", "lookahead", "self_draft, corpus"


def make_session(name, sampler, base, make_base):
    """A session of a drafter: one of `test_lossless`, untrained if it has weights, or one that draws its drafts."""
    runner = Runner(base)
    learned = lossless.LEARNED | DRAWN | CTC_OPTIONS
    if name in learned:
        drafter = make_drafter(base, *learned[name])
    elif name == "merged":
        drafter = drafters.Merged(make_drafter(base, *learned["ctc"]), drafters.Joint(), num_nodes=12)
    elif name == "draft_model, drawn":
        drafter = drafters.DraftModel(DraftModelSession(lossless.other_runner(runner, make_base), None, SAMPLED), 4)
    elif name == "self_speculative, drawn":
        drafter = drafters.SelfSpeculative(LayerSkippingSession(runner, (1,), (0,), SAMPLED), 4)
    else:
        drafter = lossless.DRAFTERS[name](runner, make_base, KNOWN)
    return Session(runner, drafter, SAMPLERS[sampler])


def make_drafter(base, drafter_class, arguments, draft):
    """An untrained drafter of the same weights for every device."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drafter = recipes.build(drafter_class, base.shape, arguments | draft).to(base.model.dtype)
    drafter.eval().requires_grad_(False).to(base.model.device)
    drafter.initialise(base.base_weights)
    drafter.attach_base_weights(base.base_weights)
    return drafter


def decode(session, accelerator=None):
    """Return each step's tree, path and tokens; its cost; and where it copied to the host and to the device."""
    steps, costs, copies, observe = [], [], [], session.drafter.observe

    def record(step):
        steps.append((list(step.tree.tokens), list(step.tree.parents), step.path, step.emitted))
        observe(step)

    session.drafter.observe = record
    for _, cost in session.decode(PROMPT, LENGTH, eos=frozenset({2})):
        costs.append(cost)
        copies.append(accelerator.take_copies() if accelerator else None)
    return steps, costs, copies


@pytest.fixture
def decode_on_both(make_base, make_pretend_base, accelerator):
    """Decodes on the host and on the accelerator, compares the steps, and returns the costs and copies of each step."""

    def run(name, sampler):
        expected, _, _ = decode(make_session(name, sampler, make_base(predictable=True), make_base))
        session = make_session(name, sampler, make_pretend_base(predictable=True), make_pretend_base)
        attention.kept_mask.cache_clear()  # the masks that an earlier test has copied
        accelerator.take_copies()
        steps, costs, copies = decode(session, accelerator)
        assert steps == expected
        return costs, copies

    return run


def most(copies):
    """The largest number of copies of a step to the host, and to the device."""
    return tuple(max(map(len, places)) for places in zip(*copies, strict=True))


@pytest.mark.parametrize("name", each(["none", *OF_TOKENS, *lossless.LEARNED, *CTC_OPTIONS, "merged"]))
def test_a_step_is_that_of_the_host_and_makes_the_stated_number_of_copies(decode_on_both, name):
    costs, copies = decode_on_both(name, "takes drafts")
    to_host, to_device = most(copies)
    assert to_host == copies_of(name)[0] and to_device <= copies_of(name)[1], copies
    assert all(places[-1].startswith("inference/verifier/session.py") for places, _ in copies)  # the accepted tokens
    assert name in ("none", "token_recycling", "lookahead") or any(cost.accepted for cost in costs)


@pytest.mark.parametrize("name", each(DRAFTING_MODELS))
def test_a_drafting_model_copies_what_each_of_its_forwards_decides(decode_on_both, name):
    costs, copies = decode_on_both(name, "takes drafts")
    for cost, (to_host, _) in zip(costs, copies, strict=True):
        assert len(to_host) <= 1 + DRAFTING_MODELS[name] * cost.draft_forwards, to_host
    assert any(cost.accepted for cost in costs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "ctc"])
def test_sampling_copies_random_numbers_to_the_device_and_no_more_to_the_host(decode_on_both, name):
    to_host, to_device = most(decode_on_both(name, "sampled")[1])
    assert to_host == copies_of(name)[0] and to_device <= copies_of(name)[1] + 1


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["penalty", "sampled, penalty"])
def test_processors_that_read_the_text_make_a_copy_for_each_token(decode_on_both, sampler):
    costs, copies = decode_on_both("ctc", sampler)
    for cost, (to_host, _) in zip(costs, copies, strict=True):
        assert len(to_host) <= 1 + cost.emitted, to_host


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DRAWN, "draft_model, drawn", "self_speculative, drawn"])
def test_drawn_drafts_make_a_copy_for_each_token_and_for_the_rejection(decode_on_both, name):
    costs, copies = decode_on_both(name, "sampled")
    for cost, (to_host, _) in zip(costs, copies, strict=True):
        drafting = 1 if name in DRAWN else cost.draft_forwards
        assert len(to_host) <= drafting + cost.emitted + 1, to_host


class PositionsOnTheHost(drafters.Block):
    """Builds positions without ``device=``, which no CPU notices."""

    def context(self, hidden, positions, tokens, embedding):
        positions = self._cache.length + torch.arange(hidden.shape[1])[None]
        return super().context(hidden, positions, tokens, embedding)


class ReadsEveryStep(drafters.Medusa):
    """Reads a number of every step, for which a GPU finishes all its work."""

    def observe(self, step):
        super().observe(step)
        assert step.hidden.isfinite().all()


def test_a_tensor_on_the_wrong_device_and_a_needless_copy_are_found(make_base, make_pretend_base, accelerator):
    host, device = make_base(predictable=True), make_pretend_base(predictable=True)
    arguments = lossless.LEARNED["block"][1]
    assert decode(Session(Runner(host), make_drafter(host, PositionsOnTheHost, arguments, {})))
    session = Session(Runner(device), make_drafter(device, PositionsOnTheHost, arguments, {}))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        decode(session)
    session = Session(Runner(device), make_drafter(device, ReadsEveryStep, lossless.HEADS, {}), TakesDrafts())
    accelerator.take_copies()
    assert most(decode(session, accelerator)[2])[0] == copies_of("medusa")[0] + 1
