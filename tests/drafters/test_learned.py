"""What holds for every learned drafter: its training computes the same function as its drafting, and a text is its own.

`tests/drafters/ctc`, `eagle` and the tests of each module prove what is particular to a drafter.
"""

import pytest
import torch

from drafters import (
    CTC,
    EAGLE,
    EAGLE3,
    BaseWeights,
    Block,
    DraftTree,
    Hydra,
    Limits,
    Medusa,
    StepResult,
    TrainingBatch,
)
from tests.conftest import check_tree
from tests.drafters.conftest import batch_for, committed, in_float64, random_drafter, ready, text_for

S, D, V = 20, 16, 23
PARALLEL = {"num_frames": 6, "top_k": 4, "num_nodes": 12}
HEADS = {"num_heads": 4, "top_k": 4, "num_nodes": 12}
STEPS = {"depth": 4, "width": 3, "top_k": 3, "num_nodes": 12}
OPTIONS = {
    CTC: PARALLEL | {"num_labels": 4},
    Block: PARALLEL,
    Medusa: HEADS,
    Hydra: HEADS,
    EAGLE: STEPS,
    EAGLE3: STEPS | {"num_unroll": 4},
}
KINDS = {
    "ctc": (CTC, {}),
    "ctc, bias and chain": (CTC, {"tree": "chain", "markov_rank": 3, "markov_factors": "base"}),
    "ctc, paper's tree": (CTC, {"tree": "paper", "root_everywhere": False, "objective": "ctc"}),
    "ctc, causal window": (CTC, {"window": 4, "causal": True, "num_layers": 2}),
    "ctc, three fused layers": (CTC, {"tokens_in_context": True, "hidden_layers": [0, -1], "num_layers": 3}),
    "ctc, llama layer": (CTC, {"llama_layer": True, "window": 4}),
    "ctc, lookup": (CTC, {"lookup": True, "markov_rank": 3}),
    "block": (Block, {}),
    "block, bias and chain": (Block, {"tree": "chain", "markov_rank": 3, "markov_factors": "base"}),
    "block, causal": (Block, {"causal": True, "num_layers": 2, "tokens_in_context": True, "lookup": True}),
    "block, dflash": (Block, {"sample_from_anchor": False}),
    "block, own frames": (Block, {"frames_differ": True, "root_everywhere": True}),
    "medusa": (Medusa, {}),
    "medusa, three layers": (Medusa, {"num_layers": 3}),
    "medusa, the base's head": (Medusa, {"own_heads": False}),
    "medusa, static tree": (Medusa, {"static": [[0], [1], [0, 0], [0, 2], [0, 0, 0], [2]]}),
    "hydra": (Hydra, {}),
    "hydra, the base's head": (Hydra, {"own_heads": False}),
    "hydra++": (Hydra, {"prefix_attention": True, "distillation": True, "num_layers": 4}),
    "eagle": (EAGLE, {}),
    "eagle, chain": (EAGLE, {"tree": "chain"}),
    "eagle, wide": (EAGLE, {"depth": 6, "width": 8, "num_nodes": 50, "window": 9}),
    "eagle3": (EAGLE3, {}),
    "eagle3, one level": (EAGLE3, {"depth": 1}),
    "eagle3, draft vocabulary": (EAGLE3, {"own_head": True, "draft_vocab_size": 9}),
    "eagle3, the base's rows": (EAGLE3, {"draft_vocab_size": 9}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_class = pytest.mark.parametrize(
    "kind", ["ctc, bias and chain", "ctc, lookup", "block", "medusa", "hydra++", "eagle", "eagle3"]
)


@pytest.fixture
def base_weights(base_weights):
    return in_float64(base_weights)


@pytest.fixture
def make(shape, base_weights):
    """Build a random drafter in float64."""

    def make(kind, **arguments):
        build, usual = KINDS[kind]
        drafter = random_drafter(build, shape, OPTIONS[build] | usual | arguments)
        drafter.attach_base_weights(base_weights)
        return drafter.eval()

    return make


# ---- drafting


@each_kind
def test_trees_of_a_known_text_equal_those_of_decoding_in_chunks_of_any_size(make, base_weights, monkeypatch, kind):
    drafter = make(kind)
    (hidden, ids), limits = text_for(drafter), Limits(max_depth=100, eos=frozenset({4}))
    drafter.begin(ids[:1].tolist())
    anchors, live, done = [1, 2, 5, 6, 11, 19], [], 0
    for anchor in anchors:
        drafter.observe(committed(hidden[done:anchor]))
        done = anchor
        live.append(drafter.propose(ids[: anchor + 1].tolist(), limits))
        check_tree(live[-1], V)
    assert len({tuple(tree.tokens) for tree in live}) > 1
    assert drafter.draft_at(hidden, ids, torch.tensor(anchors), base_weights, limits) == live
    monkeypatch.setattr(drafter, "anchors_at_once", 2)
    anchors = torch.tensor([0, *anchors])  # before the first token nothing is observed
    assert drafter.draft_at(hidden, ids, anchors, base_weights, limits) == [DraftTree(), *live]


@each_class
def test_accepted_nodes_are_read_and_rejected_ones_are_not(make, kind):
    """Two pending tokens, then a tree of three whose nodes 0 and 2 are accepted."""
    through_tree, plainly = make(kind), make(kind)
    hidden, ids = text_for(plainly)
    fed = torch.stack([hidden[0], hidden[1], hidden[2], torch.full_like(hidden[0], 50.0), hidden[3]])
    through_tree.begin([])
    tree = DraftTree([4, 5, 6], [-1, -1, 0])
    through_tree.observe(StepResult(num_pending=2, tree=tree, hidden=fed, path=[0, 2], emitted=[4, 6, 9]))
    expected = ready(plainly, hidden, ids, 4).propose(ids[:5].tolist(), Limits(9))
    assert through_tree.propose(ids[:5].tolist(), Limits(9)) == expected


@each_class
@pytest.mark.parametrize("proposed_between", [True, False])
@pytest.mark.parametrize("length", [1, 2, 6, 10])
def test_rewound_tokens_are_forgotten(make, base_weights, kind, length, proposed_between):
    """After a rewind the last remaining token is the root, and another text continues from it."""
    drafter, limits = make(kind), Limits(9)
    hidden, ids = text_for(drafter)
    other_hidden, other_ids = text_for(drafter, seed=8)
    ready(drafter, hidden, ids, 9)
    if proposed_between:
        drafter.propose(ids[:10].tolist(), limits)
    drafter.rewind(length)
    hidden = torch.cat([hidden[: length - 1], other_hidden[length - 1 :]])
    ids = torch.cat([ids[:length], other_ids[length:]])
    if length > 1:
        expected = drafter.draft_at(hidden, ids, torch.tensor([length - 1]), base_weights)
        assert [drafter.propose(ids[:length].tolist(), limits)] == expected
    drafter.observe(committed(hidden[length - 1 : length + 3]))
    expected = drafter.draft_at(hidden, ids, torch.tensor([length + 3]), base_weights)
    assert [drafter.propose(ids[: length + 4].tolist(), limits)] == expected


@each_class
def test_a_new_text_starts_with_nothing_of_the_one_before(make, kind):
    fresh, used = make(kind), make(kind)
    hidden, ids = text_for(fresh)
    ready(used, hidden[9:17], torch.full_like(ids, 5), 8).propose([5] * 9, Limits(9))
    used.begin([1, 2])
    assert len(used.propose([1, 2], Limits(9))) == 0, "no step was observed yet"
    trees = [ready(drafter, hidden, ids, 4).propose(ids[:5].tolist(), Limits(9)) for drafter in (fresh, used)]
    assert trees[0] == trees[1] and len(trees[0])


@each_kind
def test_drafts_stay_within_their_limits(make, base_weights, kind):
    drafter = make(kind)
    hidden, ids = text_for(drafter)
    free = ready(drafter, hidden, ids, 6).propose(ids[:7].tolist(), Limits(99))
    eos = frozenset({free.tokens[0]})
    for depth, nodes in ((0, 99), (1, 99), (2, 5), (99, 0), (99, 1), (99, 7)):
        limits = Limits(depth, nodes, eos)
        tree = drafter.propose(ids[:7].tolist(), limits)
        check_tree(tree, V)
        assert tree.pruned(depth, nodes, eos) is tree
        (at_once,) = drafter.draft_at(hidden, ids, torch.tensor([6]), base_weights, limits)
        assert ([*at_once.tokens], [*at_once.parents]) == ([*tree.tokens], [*tree.parents])


def test_drawn_drafts_depend_on_the_seed_of_the_proposal_alone_and_stay_within_their_limits(make):
    drafter = make("ctc", draws=5, markov_rank=2)
    hidden, ids = text_for(drafter)
    ready(drafter, hidden, ids, 6)
    first, again = (
        [drafter.propose(ids[:7].tolist(), Limits(3, 6, draft_seed=seed)) for seed in range(4)] for _ in range(2)
    )
    assert [tree.tokens for tree in first] == [tree.tokens for tree in again]
    assert len({tuple(tree.tokens) for tree in first}) > 1
    for tree in first:
        check_tree(tree, V)
        assert tree.pruned(3, 6, ()) is tree
        assert {distribution.parent for distribution in tree.distributions} == set(tree.parents)


# ---- training


@each_kind
@pytest.mark.parametrize("length", [2, 12])
def test_a_batch_without_an_answer_has_zero_loss_with_a_gradient_for_every_weight(make, base_weights, kind, length):
    """Data-parallel training would wait for a weight without one."""
    drafter = make(kind).train()
    batch = batch_for(drafter, length=length, mask=torch.zeros(2, length, dtype=torch.bool))
    loss, metrics = drafter.loss(batch, base_weights)
    loss.backward()
    assert loss == 0 and all(value.isfinite() for value in metrics.values())
    for name, weight in drafter.named_parameters():
        assert weight.grad is not None and not weight.grad.any(), name


@pytest.mark.parametrize("kind", ["ctc, bias and chain", "block", "medusa", "hydra"])
def test_zero_anchors_are_every_position_of_the_assistant(make, base_weights, kind):
    batch = batch_for(every := make(kind, num_anchors=0), rows=2, length=12)
    loss, seen = every.loss(batch, base_weights)
    expected, also_seen = make(kind, num_anchors=12).loss(batch, base_weights)
    assert loss == expected and seen == also_seen
    assert loss != make(kind, num_anchors=1).loss(batch, base_weights)[0]


@each_kind
def test_an_answer_gives_every_weight_a_nonzero_gradient(make, base_weights, kind):
    drafter = make(kind).train()
    loss, metrics = drafter.loss(batch_for(drafter), base_weights)
    loss.backward()
    assert not any(value.requires_grad for value in metrics.values())
    unused = {"token_norm"} if kind != "ctc, three fused layers" else set()
    for name, weight in drafter.named_parameters():
        assert weight.grad.isfinite().all() and (weight.grad.any() or unused & set(name.split("."))), name


@each_kind
def test_weights_of_the_base_are_not_in_the_state_dict(make, base_weights, kind):
    drafter = make(kind)
    drafter.initialise(base_weights)
    assert all(weight.data_ptr() != base_weights.head.data_ptr() for weight in drafter.state_dict().values())
    head_names = {f"lm_heads.{head}.weight" for head in range(4)} if getattr(drafter, "own_heads", False) else set()
    assert {name for name, weight in drafter.state_dict().items() if tuple(weight.shape) == (V, D)} == head_names


@each_class
def test_it_trains_and_drafts_in_mixed_precision(make, base_weights, kind):
    """Validation in bfloat16 training does this, with a bfloat16 base whose states stay in bfloat16."""
    drafter = make(kind).float().train()
    batch = batch_for(drafter)
    hidden, last = batch.hidden.bfloat16(), batch.last_hidden.bfloat16()
    half = BaseWeights(base_weights.embedding.bfloat16(), base_weights.head.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = drafter.loss(TrainingBatch(hidden, last, batch.input_ids, batch.labels, batch.loss_mask), half)
        trees = drafter.draft_at(hidden[0], batch.input_ids[0], torch.arange(1, S), half)
    loss.backward()
    assert loss.isfinite() and all(weight.grad.isfinite().all() for weight in drafter.parameters())
    drafter.bfloat16().eval().attach_base_weights(half)
    trees.append(ready(drafter, hidden[0], batch.input_ids[0], 7).propose(batch.input_ids[0, :8].tolist(), Limits(9)))
    assert all(len(tree) == (6 if "chain" in kind else 12) for tree in trees)


WRONG = {
    "ctc": [
        *({"num_frames": 0, "num_labels": 0}, {"num_labels": 0}, {"num_layers": 0}, {"num_anchors": -1}, {"top_k": 0}),
        *({"num_nodes": -1}, {"markov_rank": -1}, {"decay": -0.5}, {"decay": float("nan")}),
        *({"min_probability": -0.1}, {"draws": -1}, {"draw_temperature": 0.0}),
        *({"hidden_layers": [-2]}, {"hidden_layers": [4]}, {"num_frames": 3}),
        *({"objective": "rnn"}, {"tree": "best_first"}, {"markov_factors": "head"}),
        {"num_columns": -1},
    ],
    "ctc, llama layer": [{"num_layers": 2}, {"tokens_in_context": True}, {"hidden_layers": [0, -1]}],
    "ctc, paper's tree": [{"markov_rank": 2}, {"min_probability": 0.1}],
    "block": [{"num_frames": 0}, {"num_frames": 1, "sample_from_anchor": False}, {"tree": "paper"}],
    "medusa": [{"num_heads": 0}, {"num_layers": 0}, {"top_k": 0}, {"num_nodes": -1}, {"tree": "bush"}],
    "hydra": [{"width": 0}, {"num_anchors": -1}, {"decay": -0.5}],
    "eagle": [{"tree": "star"}, {"depth": 0}, {"window": 4, "depth": 4}],
    "eagle3": [
        *({"num_unroll": 0}, {"window": 6, "num_unroll": 7, "depth": 4}, {"hidden_layers": [2, 16, 29]}),
        {"draft_vocab_size": -1},
    ],
}


@pytest.mark.parametrize(
    ("kind", "arguments"), [(kind, arguments) for kind, every in WRONG.items() for arguments in every], ids=str
)
def test_a_wrong_option_is_refused_by_its_name_in_one_line(make, kind, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))) as error:
        make(kind, **arguments)
    assert "\n" not in str(error.value)
