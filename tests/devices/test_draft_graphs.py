"""Drafts in CUDA graphs, emulated on a CPU: the trees of eager drafts, from one launch and one copy to the host."""

import pytest
import torch

import drafters
from inference.verifier import attention
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from tests.conftest import recorded_trees
from tests.devices.test_decoding import CTC_OPTIONS, DRAWN, TakesDrafts, decode, each, make_drafter, most
from tests.inference.verifier import test_lossless as lossless

FURTHER = {
    "ctc, causal window": (drafters.CTC, lossless.CTC | {"causal": True, "num_layers": 2, "window": 5}, {}),
    "ctc, llama layer, window": (drafters.CTC, lossless.CTC | {"llama_layer": True, "window": 5}, {}),
    "block, window": (drafters.Block, lossless.LEARNED["block"][1] | {"window": 4}, {}),
    "block, dflash": (drafters.Block, {"num_frames": 4, "sample_from_anchor": False, "lookup": True}, {}),
    "eagle, window": (drafters.EAGLE, lossless.EAGLE | {"window": 6}, {}),
    "eagle3, window": (drafters.EAGLE3, lossless.EAGLE | {"window": 7, "own_head": True, "draft_vocab_size": 30}, {}),
    "eagle3, the base's rows": (drafters.EAGLE3, lossless.EAGLE | {"draft_vocab_size": 30}, {}),
}
GRAPHED = lossless.LEARNED | CTC_OPTIONS | FURTHER
each_drafter = pytest.mark.parametrize("name", GRAPHED)
some_drafters = pytest.mark.parametrize("name", ["ctc, copies", "ctc, reads tokens", "medusa", "hydra++", "eagle3"])
EOS = frozenset({2, 11})
# How many tokens the following steps may add, and draft.
LIMITS = [(2, 9), (9, 9), (9, 0), (9, 5), (9, 0), (9, 0), (3, 9), (9, 2), (9, 9)]
LENGTHS, NUM_REWINDS = (17, 3, 36), 3  # of the prompts: more than a graph takes over, and less
CONTEXT = 96


def random_drafter(base, drafter_class, arguments, draft):
    """A drafter whose weights are so large that context matters."""
    drafter, generator = make_drafter(base, drafter_class, arguments, draft), torch.Generator().manual_seed(2)
    for weight in drafter.parameters():
        if weight.dim() == 2:
            weight.normal_(std=0.3, generator=generator)
    drafter.attach_base_weights(base.base_weights)
    return drafter


@pytest.fixture
def make(make_base):
    """Makes a session of a drafter, in graphs for texts of a number of positions, or not."""

    def make(name, num_positions=0, spec=None, wrap=lambda drafter: drafter):
        base = make_base(context=CONTEXT, predictable=True)
        session = Session(Runner(base), wrap(random_drafter(base, *(spec or GRAPHED[name]))), TakesDrafts())
        if num_positions:
            session.drafter.draft_in_graph(num_positions)
            overwrite_hidden(session.drafter)
        return session

    return make


def overwrite_hidden(drafter):
    """Let the drafter's observations be overwritten, as the hidden states of a base in graphs are by its next step."""
    observe = drafter.observe

    @torch.inference_mode()
    def overwritten(step):
        observe(step)
        if step.hidden is not None:
            step.hidden.fill_(torch.nan)

    drafter.observe = overwritten


def write(session, eos=EOS):
    """Decode texts with limits that change, drafts left out and rewinds; return all trees and the texts."""
    trees, texts = recorded_trees(session.drafter), []
    for length in LENGTHS:
        session.begin(lossless.prompt_of(length))
        for num_tokens, max_nodes in LIMITS:
            session.step(len(session.seq) + num_tokens, eos, max_nodes)
        for num_shared in (len(session.seq) - 1, len(session.seq) - 6, 2):
            session.resume([*session.seq[:num_shared], 7, 9], num_shared)
            for num_tokens, max_nodes in LIMITS[:4]:
                session.step(len(session.seq) + num_tokens, eos, max_nodes)
        texts.append(list(session.seq))
    return trees, texts


def assert_equal_texts(graphed, eager, eos=EOS):
    """Both sessions write the same from the same drafts, of which the number is returned."""
    (trees, texts), (expected, expected_texts) = write(graphed, eos), write(eager, eos)
    assert texts == expected_texts
    for tree, other in zip(trees, expected, strict=True):
        assert (tree.tokens, tree.parents) == (other.tokens, other.parents)
        assert tree.probabilities == pytest.approx(other.probabilities, rel=1e-6)
    return sum(len(tree) > 0 for tree in trees)


def num_launches(emulated_graphs):
    return sum(emulated_graphs.launches.values())


@each_drafter
def test_a_draft_in_a_graph_is_the_eager_one_from_one_launch(make, name, emulated_graphs):
    num_drafts = assert_equal_texts(make(name, CONTEXT), make(name))
    num_after_rewinds = len(LENGTHS) * NUM_REWINDS  # of decided tokens that the base has not returned yet
    assert num_launches(emulated_graphs) == num_drafts - num_after_rewinds > 20
    assert len(emulated_graphs.launches) == 1


@some_drafters
def test_a_text_longer_than_the_cache_is_drafted_eagerly_from_there_on(make, name, emulated_graphs):
    num_drafts = assert_equal_texts(make(name, 24), make(name))
    assert 0 < num_launches(emulated_graphs) < num_drafts / 2


@some_drafters
def test_more_end_of_sequence_tokens_than_a_graph_takes_are_drafted_eagerly(make, name, emulated_graphs):
    assert_equal_texts(make(name, CONTEXT), make(name), eos=frozenset(range(20, 30)))
    assert num_launches(emulated_graphs) == 0


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_drafts_stay_eager(make, name, emulated_graphs):
    session = make(name, CONTEXT, DRAWN[name])
    assert session.run(lossless.prompt_of(5), 8).tokens and num_launches(emulated_graphs) == 0


def test_a_merged_drafters_learned_one_drafts_in_a_graph(make, emulated_graphs):
    merged = lambda learned: drafters.Merged(learned, drafters.Joint(), num_nodes=12)  # noqa: E731
    assert_equal_texts(make("ctc", CONTEXT, wrap=merged), make("ctc", wrap=merged))
    assert num_launches(emulated_graphs) > 20


@some_drafters
def test_weights_that_have_moved_or_changed_are_read_from_the_next_text_on(make, make_base, name, emulated_graphs):
    graphed, eager = make(name, CONTEXT), make(name)
    other = make_base(context=CONTEXT, predictable=True, seed=1).base_weights
    for session in (graphed, eager):
        session.run(lossless.prompt_of(5), 8)
        for weight in session.drafter.float().double().parameters():
            weight.mul_(-1.5)
    assert_equal_texts(graphed, eager)
    for session in (graphed, eager):
        session.drafter.attach_base_weights(other)
    assert_equal_texts(graphed, eager)
    assert num_launches(emulated_graphs) > 40


@each_drafter
def test_inputs_caches_and_results_stay_at_their_addresses(make, name, emulated_graphs):
    session = make(name, CONTEXT)
    session.begin(lossless.prompt_of(17))
    drafter, seen = session.drafter, set()
    graph = drafter._graph

    def replay():
        table = graph()
        tensors = [
            drafter._host.device,
            drafter._rows,
            table.numbers,
            *(x for layer in drafter._cache.read() for x in layer),
        ]
        seen.add(tuple(tensor.untyped_storage().data_ptr() for tensor in tensors))
        return table

    drafter._graph = replay
    for _ in range(50):
        session.step(CONTEXT, max_nodes=1) if len(session.seq) < CONTEXT - 9 else session.begin(session.seq[:20])
    assert len(seen) == 1 and num_launches(emulated_graphs) > 40


@pytest.mark.parametrize("name", each(["ctc", "ctc, copies", "block", "medusa", "hydra++", "eagle", "eagle3"]))
def test_a_draft_copies_a_table_to_the_host_and_to_the_device_one_buffer_and_the_accepted_rows(
    make_base, make_pretend_base, accelerator, name
):
    steps = []
    for make in (make_base, make_pretend_base):
        base = make(predictable=True)
        session = Session(Runner(base), make_drafter(base, *GRAPHED[name]), TakesDrafts())
        if make is make_pretend_base:
            session.drafter.draft_in_graph(64)
        attention.kept_mask.cache_clear()
        accelerator.take_copies()
        steps.append(decode(session, accelerator))
    (expected, *_), (decoded, costs, copies) = steps
    assert decoded == expected and any(cost.accepted for cost in costs)
    drafting = [[[place for place in side if place.startswith("drafters/")] for side in step] for step in copies]
    assert most(drafting) == (1, 2), copies


def test_a_draft_that_cannot_be_captured_stays_eager_and_says_so_once(make, monkeypatch, capsys):
    def refused(function, device):
        raise RuntimeError("called a synchronizing\nCUDA operation")

    eager = make("ctc")
    monkeypatch.setattr("drafters.nn.graph.captured", refused)
    assert assert_equal_texts(make("ctc", CONTEXT), eager) > 20
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["the draft of CTC is no CUDA graph, which takes longer: called a synchronizing CUDA operation"]
