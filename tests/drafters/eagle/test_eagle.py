"""EAGLE and EAGLE-3: their training computes the same function as their drafting."""

from dataclasses import replace

import pytest
import torch

from drafters import EAGLE, EAGLE3, DraftTree, Limits, StepResult, TrainingBatch, checkpoint, recipe
from drafters.checkpoint import DrafterConfig
from drafters.eagle.drafter import window_mask
from drafters.eagle.eagle3 import low_middle_high, unroll_mask
from drafters.losses.distillation import distillation_loss
from drafters.nn import draft_cache
from drafters.protocol import UNLIMITED

S, D, V = 20, 16, 23
both = pytest.mark.parametrize("kind", [EAGLE, EAGLE3])


@pytest.fixture
def make(shape):
    """Build a float64 drafter with weights large enough that context matters; equal arguments give equal weights."""

    def make(kind, **arguments):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            options = {"depth": 4, "width": 3, "top_k": 3, "num_nodes": 12} | arguments
            drafter = recipe.build(kind, shape, options).double()
            for weight in drafter.parameters():
                if weight.dim() == 2:
                    torch.nn.init.normal_(weight, std=0.3)
        return drafter.eval()

    return make


@pytest.fixture
def base_weights(base_weights):
    return type(base_weights)(base_weights.embedding.double(), base_weights.head.double())


def text_for(drafter, seed=3, length=S):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(
        length, D * len(drafter.required_outputs.hidden_layers), generator=generator, dtype=torch.float64
    )
    return hidden, torch.randint(0, V, (length,), generator=generator)


def committed(hidden):
    """Return a step result that cached these positions of the base and accepted no node."""
    return StepResult(num_pending=len(hidden), tree=DraftTree(), hidden=hidden, path=[], emitted=[0])


def ready(drafter, base_weights, hidden, ids, anchor):
    """Return the drafter ready to draft at a root, with all earlier positions observed in one step."""
    drafter.attach_base_weights(base_weights)
    drafter.begin(ids[:anchor].tolist())
    drafter.observe(committed(hidden[:anchor]))
    return drafter


def distribution_after(drafter, base_weights, hidden, ids, anchor, path):
    """Log-probabilities after a path below a root, by uncached forward passes that feed its own states back."""
    states, tokens = drafter.enter(hidden[None, :anchor]), [*ids[1 : anchor + 1].tolist(), *path]
    for count in range(anchor, len(tokens) + 1):
        made = drafter(states, torch.tensor([tokens[:count]]), base_weights)[:, -1:]
        states = torch.cat([states, made], dim=1)
    return drafter.read(made[0, 0], base_weights).log_softmax(-1)


# ---- drafting


@both
def test_the_tree_equals_one_from_uncached_forwards_over_every_path(make, base_weights, kind):
    """Without limits the tree has the most probable of all paths; each path is scored by uncached forward passes."""
    drafter = make(kind, depth=2, width=V, top_k=V, num_nodes=40)
    hidden, ids = text_for(drafter)
    tree = ready(drafter, base_weights, hidden, ids, 7).propose(ids[:8].tolist(), UNLIMITED)
    first = distribution_after(drafter, base_weights, hidden, ids, 7, [])
    second = torch.stack(
        [first[token] + distribution_after(drafter, base_weights, hidden, ids, 7, [token]) for token in range(V)]
    )
    scores = {(token,): first[token].item() for token in range(V)}
    scores |= {(one, two): second[one, two].item() for one in range(V) for two in range(V)}
    best = sorted(scores, key=lambda path: -scores[path])[:40]
    assert [tuple(tree.path_tokens(node)) for node in range(len(tree))] == best
    assert max(tree.depths) == 2


OF_OTHERS = {  # options that public checkpoints have
    "normed residual": (EAGLE3, {"norm_before_residual": True}),
    "norms of queries and keys": (EAGLE3, {"has_qk_norm": True}),
    "draft vocabulary": (EAGLE3, {"own_head": True, "draft_vocab_size": 9}),
    "no bias": (EAGLE, {"fc_bias": False}),
}


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [(EAGLE, {}), (EAGLE3, {}), (EAGLE, {"window": 7}), (EAGLE3, {"window": 7}), *OF_OTHERS.values()],
)
def test_a_chain_is_the_greedy_text_of_uncached_forwards(make, base_weights, kind, arguments):
    drafter = make(kind, depth=6, tree="chain", **arguments)
    hidden, ids = text_for(drafter)
    tree = ready(drafter, base_weights, hidden, ids, 9).propose(ids[:10].tolist(), UNLIMITED)
    path = []
    for _ in range(6):
        path.append(distribution_after(drafter, base_weights, hidden, ids, 9, path).argmax().item())
    assert tree == DraftTree(path, list(range(-1, 5)))
    assert drafter.draft_forwards == 6


@both
@pytest.mark.parametrize("arguments", [{}, {"tree": "chain"}, {"depth": 1}, {"depth": 6, "width": 8, "num_nodes": 50}])
def test_trees_of_a_known_text_equal_those_of_decoding(make, base_weights, kind, arguments):
    drafter = make(kind, **arguments)
    hidden, ids = text_for(drafter)
    anchors = [1, 2, 5, 6, 11, 19]
    drafter.attach_base_weights(base_weights)
    drafter.begin(ids[:1].tolist())
    live, done = [], 0
    for anchor in anchors:
        drafter.observe(committed(hidden[done:anchor]))
        done = anchor
        live.append(drafter.propose(ids[: anchor + 1].tolist(), Limits(max_depth=100, eos=frozenset({4}))))
    for tree in live:
        tree.validate(V)
    limits = Limits(max_depth=100, eos=frozenset({4}))
    assert drafter.draft_at(hidden, ids, torch.tensor(anchors), base_weights, limits) == live
    drafter.chunk_anchors = 2
    assert drafter.draft_at(hidden, ids, torch.tensor([0, *anchors]), base_weights, limits) == [DraftTree(), *live]


@both
def test_accepted_nodes_are_cached_and_rejected_ones_are_not(make, base_weights, kind):
    """Two pending tokens, then a tree of three whose nodes 0 and 2 are accepted."""
    through_tree, plainly = make(kind), make(kind)
    hidden, ids = text_for(plainly)
    for drafter in (through_tree, plainly):
        drafter.attach_base_weights(base_weights)
        drafter.begin([])
    fed = torch.stack([hidden[0], hidden[1], hidden[2], torch.full_like(hidden[0], 50.0), hidden[3]])
    tree = DraftTree([4, 5, 6], [-1, -1, 0])
    through_tree.observe(StepResult(num_pending=2, tree=tree, hidden=fed, path=[0, 2], emitted=[4, 6, 9]))
    plainly.observe(committed(hidden[:4]))
    assert through_tree.propose(ids[:5].tolist(), Limits(9)) == plainly.propose(ids[:5].tolist(), Limits(9))


@both
@pytest.mark.parametrize("proposed_between", [True, False])
@pytest.mark.parametrize("length", [1, 2, 6, 9, 10])
def test_rewound_tokens_are_forgotten(make, base_weights, kind, length, proposed_between):
    """After a rewind the last remaining token is the root, and another text continues from it."""
    drafter = make(kind)
    hidden, ids = text_for(drafter)
    other_hidden, other_ids = text_for(drafter, seed=8)
    ready(drafter, base_weights, hidden, ids, 9)
    if proposed_between:
        drafter.propose(ids[:10].tolist(), Limits(9))
    drafter.rewind(length)
    mixed_hidden = torch.cat([hidden[: length - 1], other_hidden[length - 1 :]])
    mixed_ids = torch.cat([ids[:length], other_ids[length:]])
    limits = Limits(9)
    assert [drafter.propose(mixed_ids[:length].tolist(), limits)] == drafter.draft_at(
        mixed_hidden, mixed_ids, torch.tensor([length - 1]), base_weights
    )
    drafter.observe(committed(mixed_hidden[length - 1 : length + 3]))
    assert [drafter.propose(mixed_ids[: length + 4].tolist(), limits)] == drafter.draft_at(
        mixed_hidden, mixed_ids, torch.tensor([length + 3]), base_weights
    )


@both
def test_accepted_tokens_without_base_states_are_read_with_the_drafters_own_states(make, base_weights, kind):
    drafter = make(kind, depth=3, tree="chain")
    hidden, ids = text_for(drafter)
    ready(drafter, base_weights, hidden, ids, 9).rewind(5)
    seq = [*ids[:5].tolist(), 3, 14]
    tree = drafter.propose(seq, UNLIMITED)
    path = []
    for _ in range(3):
        path.append(distribution_after(drafter, base_weights, hidden, ids, 4, [3, 14, *path]).argmax().item())
    assert list(tree.tokens) == path


@both
def test_a_drafter_that_has_observed_no_step_drafts_nothing(make, base_weights, kind):
    drafter = make(kind)
    drafter.attach_base_weights(base_weights)
    drafter.begin([1, 2])
    assert len(drafter.propose([1, 2], Limits(9))) == 0


@both
def test_begin_forgets_the_previous_text(make, base_weights, kind):
    fresh, used = make(kind), make(kind)
    hidden, ids = text_for(fresh)
    used.attach_base_weights(base_weights)
    used.begin([1])
    used.observe(committed(hidden[9:17]))
    trees = [
        ready(drafter, base_weights, hidden, ids, 4).propose(ids[:5].tolist(), Limits(9)) for drafter in (fresh, used)
    ]
    assert trees[0] == trees[1]


@both
@pytest.mark.parametrize("arguments", [{}, {"tree": "chain"}, {"tree": "chain", "draws": 2}])
@pytest.mark.parametrize(("depth", "nodes"), [(0, 99), (1, 99), (2, 5), (99, 0), (99, 1), (99, 7)])
def test_drafts_stay_within_their_limits(make, base_weights, kind, arguments, depth, nodes):
    drafter = make(kind, **arguments)
    hidden, ids = text_for(drafter)
    free = ready(drafter, base_weights, hidden, ids, 6).propose(ids[:7].tolist(), Limits(99))
    limits = Limits(depth, nodes, frozenset({free.tokens[0]}))
    tree = drafter.propose(ids[:7].tolist(), limits)
    tree.validate(V)
    assert tree.pruned(depth, nodes, limits.eos) is tree
    (known,) = drafter.draft_at(hidden, ids, torch.tensor([6]), base_weights, limits)
    assert known.pruned(depth, nodes, limits.eos) is known
    if not arguments:
        assert tree == known


@both
def test_forward_passes_are_counted(make, base_weights, kind):
    drafter = make(kind, depth=4)
    hidden, ids = text_for(drafter)
    ready(drafter, base_weights, hidden, ids, 6).propose(ids[:7].tolist(), Limits(99))
    assert drafter.draft_forwards == 4
    drafter.propose(ids[:7].tolist(), Limits(2))
    assert drafter.draft_forwards == 6


@both
def test_sampled_tokens_follow_the_distribution_of_uncached_forwards(make, base_weights, kind):
    drafter = make(kind, depth=3, tree="chain", draws=2, temperature=0.7)
    hidden, ids = text_for(drafter)
    tree = ready(drafter, base_weights, hidden, ids, 6).propose(ids[:7].tolist(), UNLIMITED)
    assert len(tree.distributions) == 3
    for distribution in tree.distributions:
        path = [] if distribution.parent == -1 else tree.path_tokens(distribution.parent)
        expected = (distribution_after(drafter, base_weights, hidden, ids, 6, path) / 0.7).softmax(-1)
        torch.testing.assert_close(distribution.probs, expected)


@both
def test_sampled_drafts_depend_on_the_seed_of_the_proposal_alone(make, base_weights, kind):
    drafter = make(kind, depth=3, tree="chain", draws=2)
    hidden, ids = text_for(drafter)
    ready(drafter, base_weights, hidden, ids, 6)
    first, again = (
        [drafter.propose(ids[:7].tolist(), Limits(99, draft_seed=seed)).tokens for seed in range(4)] for _ in range(2)
    )
    assert first == again and len({tuple(tokens) for tokens in first}) > 1


# ---- training


@pytest.mark.parametrize("window", [0, 5])
def test_eagle_trains_on_the_same_outputs_as_its_first_draft_depth(make, base_weights, window):
    drafter = make(EAGLE, window=window)
    hidden, ids = text_for(drafter)
    trained = drafter.read(drafter(hidden[None, :-1], ids[None, 1:], base_weights), base_weights)[0].log_softmax(-1)
    for anchor in range(1, S):
        expected = distribution_after(drafter, base_weights, hidden, ids, anchor, [])
        torch.testing.assert_close(trained[anchor - 1], expected)


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 8])
def test_eagle3_trains_every_depth_on_the_same_outputs_as_drafting(make, base_weights, window):
    drafter = make(EAGLE3, hidden_layers=(0, 1, -1), window=window)
    hidden, ids = text_for(drafter)
    unrolled = drafter.unroll(hidden[None, :-1], ids[None, 1:], base_weights, num_steps=5)
    for depth, states in enumerate(unrolled):
        trained = drafter.read(states, base_weights)[0].log_softmax(-1)
        for pair in range(depth, S - 1):
            anchor = pair - depth + 1
            path = ids[anchor + 1 : anchor + 1 + depth].tolist()
            torch.testing.assert_close(
                trained[pair], distribution_after(drafter, base_weights, hidden, ids, anchor, path)
            )
    assert depth == 4


def test_the_unrolled_mask_equals_one_drawn_by_hand():
    """At depth 2 a pair attends to the base's pairs up to two before, and to one pair each of depths 1 and 2."""
    drawn = """
        .... .... #...
        .... #... .#..
        #... .#.. ..#.
        ##.. ..#. ...#
    """
    expected = [[letter == "#" for letter in line.replace(" ", "")] for line in drawn.split("\n") if line.strip()]
    assert unroll_mask(4, 2).tolist() == expected
    expected[3][0] = False
    assert unroll_mask(4, 2, window=3).tolist() == expected, "three back is too far"
    first = [[query - 3 < key <= query for key in range(5)] for query in range(5)]
    assert window_mask(5, 3).tolist() == unroll_mask(5, 0, window=3).tolist() == first


@both
@pytest.mark.parametrize("gap", [4, 30])
def test_with_a_window_decoding_drafts_the_trees_of_training_from_a_bounded_cache(
    make, base_weights, kind, gap, monkeypatch
):
    """Of a text of 60 positions, positions observed a few or many at once."""
    monkeypatch.setattr(draft_cache, "SLACK", 0)
    drafter, whole = make(kind, window=8), make(kind)
    hidden, ids = text_for(drafter, length=60)
    anchors = list(range(1, 60, gap))
    ready(drafter, base_weights, hidden, ids, 0)
    live, done = [], 0
    for anchor in anchors:
        drafter.observe(committed(hidden[done:anchor]))
        done = anchor
        live.append(drafter.propose(ids[: anchor + 1].tolist(), UNLIMITED))
    at = torch.tensor(anchors)
    assert live == drafter.draft_at(hidden, ids, at, base_weights) != whole.draft_at(hidden, ids, at, base_weights)
    assert drafter._cache.length == done and max(keys.shape[-2] for keys, _ in drafter._cache._buffers) <= 16
    path = []
    for token in live[-1].path_tokens(len(live[-1]) - 1):
        expected = distribution_after(drafter, base_weights, hidden, ids, done, path)
        path.append(token)
        assert token in expected.topk(3).indices, "which has no cache"


@both
@pytest.mark.parametrize("pair", [1, 7, 12])
def test_training_never_attends_to_later_positions(make, base_weights, kind, pair):
    """A pair depends neither on later states nor on tokens after its next one."""
    drafter = make(kind)
    hidden, ids = text_for(drafter)
    later_hidden, later_ids = hidden.clone(), ids.clone()
    later_hidden[pair + 1 :] += 9.0
    later_ids[pair + 2 :] = (later_ids[pair + 2 :] + 1) % V
    made = []
    for states, tokens in ((hidden, ids), (later_hidden, later_ids)):
        made.append(
            torch.cat(list(drafter.unroll(states[None, :-1], tokens[None, 1:], base_weights, 3)))
            if kind is EAGLE3
            else drafter(states[None, :-1], tokens[None, 1:], base_weights)
        )
    torch.testing.assert_close(made[0][:, : pair + 1], made[1][:, : pair + 1])
    assert not torch.allclose(made[0][:, pair + 1], made[1][:, pair + 1])


def batch_for(drafter, rows=2, length=S, mask=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = D * len(drafter.required_outputs.hidden_layers)
    hidden = torch.randn(rows, length, size, generator=generator, dtype=torch.float64)
    last = hidden if size == D else torch.randn(rows, length, D, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, V, (rows, length), generator=generator)
    mask = torch.rand(rows, length, generator=generator) < 0.7 if mask is None else mask
    return TrainingBatch(hidden, last, ids, ids.roll(-1, 1), mask)


def literal_divergence(kind, base, log_draft):
    return -(base * log_draft).sum() if kind == "kl" else (base - log_draft.exp()).abs().sum() / 2


@pytest.mark.parametrize("divergence", ["kl", "tv"])
def test_the_eagle_loss_equals_a_literal_version_of_the_paper(make, base_weights, divergence):
    """With total variation as an option."""
    drafter = make(EAGLE, chunk_positions=3, divergence=divergence)
    batch = batch_for(drafter)
    distances, crossed = [], []
    for row in range(2):
        foreseen = drafter(batch.hidden[row : row + 1], batch.input_ids[row : row + 1].roll(-1, 1), base_weights)[0]
        for pair in range(S - 2):
            if batch.loss_mask[row, pair + 2]:
                feature = batch.hidden[row, pair + 1]
                distances.append(torch.nn.functional.smooth_l1_loss(foreseen[pair], feature))
                distribution = (base_weights.head @ feature).softmax(-1)
                log_draft = (base_weights.head @ foreseen[pair]).log_softmax(-1)
                crossed.append(literal_divergence(divergence, distribution, log_draft))
    loss, seen = drafter.loss(batch, base_weights)
    torch.testing.assert_close(loss, torch.stack(distances).mean() + 0.1 * torch.stack(crossed).mean())
    torch.testing.assert_close(seen["token_loss"], torch.stack(crossed).mean())


@pytest.mark.parametrize(("num_tokens", "divergence"), [(0, "kl"), (18, "kl"), (18, "tv")])
def test_the_eagle3_loss_equals_a_literal_version_of_the_paper(make, base_weights, num_tokens, divergence):
    """The reference uses uncached forward passes, one anchor and one depth at a time.

    With a draft vocabulary the base's distribution and the drafter's are those over its tokens, and no path passes a
    label that is none of them.
    """
    own = {"own_head": True, "draft_vocab_size": num_tokens} if num_tokens else {}
    drafter, covered = make(EAGLE3, num_unroll=3, chunk_positions=3, divergence=divergence, **own), torch.arange(V)
    if num_tokens:
        covered = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:num_tokens]
        drafter.draft_tokens.copy_(covered)
    batch, drafted_tokens = batch_for(drafter, length=9), set(covered.tolist())
    total, weights = 0.0, 0.0
    for depth in range(3):
        crossed = []
        for row in range(2):
            ids = batch.input_ids[row]
            for anchor in range(1, 9):
                target = anchor + 1 + depth  # the position of the predicted token
                labels = set(batch.labels[row, anchor:target].tolist())
                if target < 9 and batch.loss_mask[row, anchor + 1 : target + 1].all() and labels <= drafted_tokens:
                    path = ids[anchor + 1 : target].tolist()
                    distribution = (base_weights.head[covered] @ batch.last_hidden[row, target - 1]).softmax(-1)
                    drafted = distribution_after(drafter, base_weights, batch.hidden[row], ids, anchor, path)
                    assert drafted.isfinite().sum() == len(covered)
                    crossed.append(literal_divergence(divergence, distribution, drafted[covered]))
        total, weights = total + 0.8**depth * torch.stack(crossed).mean(), weights + 0.8**depth
    torch.testing.assert_close(drafter.loss(batch, base_weights)[0], total / weights)


def test_soft_cross_entropy_and_its_gradient_equal_those_over_the_full_vocabulary(base_weights):
    states, last = (torch.randn(11, D, dtype=torch.float64) for _ in range(2))
    chunked, whole = states.clone().requires_grad_(), states.clone().requires_grad_()
    got = distillation_loss("kl", chunked, lambda x: x @ base_weights.head.T, last, base_weights.head, 4)
    expected = torch.nn.functional.cross_entropy(
        whole @ base_weights.head.T, (last @ base_weights.head.T).softmax(-1), reduction="none"
    )
    torch.testing.assert_close(got, expected)
    for losses in (got, expected):
        (losses * torch.arange(11)).sum().backward()
    torch.testing.assert_close(chunked.grad, whole.grad)


@both
@pytest.mark.parametrize("length", [1, 2, 3, 12])
def test_a_batch_without_an_answer_has_a_finite_loss_with_a_gradient_for_every_weight(make, base_weights, kind, length):
    drafter = make(kind).train()
    batch = batch_for(drafter, length=length, mask=torch.zeros(2, length, dtype=torch.bool))
    loss, seen = drafter.loss(batch, base_weights)
    loss.backward()
    assert loss == 0 and all(value.isfinite() for value in seen.values())
    assert all(weight.grad is not None and not weight.grad.any() for weight in drafter.parameters())


@both
def test_an_answer_gives_every_weight_a_nonzero_gradient(make, base_weights, kind):
    drafter = make(kind).train()
    drafter.loss(batch_for(drafter), base_weights)[0].backward()
    assert all(weight.grad.isfinite().all() and weight.grad.any() for weight in drafter.parameters())


def test_noise_is_added_only_in_training_and_has_the_configured_width(make, base_weights, monkeypatch):
    drafter = make(EAGLE, noise=0.2)
    batch = batch_for(drafter)
    plain = drafter.loss(batch, base_weights)[0]
    assert torch.equal(plain, drafter.loss(batch, base_weights)[0])
    drafter.train()
    given = []
    honest = EAGLE.forward
    monkeypatch.setattr(
        EAGLE, "forward", lambda self, states, *rest: given.append(states) or honest(self, states, *rest)
    )
    assert not torch.equal(plain, drafter.loss(batch, base_weights)[0])
    noise = (given[0] - batch.hidden[:, :-2]).abs().max().item()
    assert 0.09 < noise / (512 / S) <= 0.1


def test_a_separate_lm_head_is_trained_and_used(make, base_weights):
    drafter = make(EAGLE3, own_head=True)
    assert {name for name in drafter.state_dict() if "head" in name} == {"lm_head.weight"}
    drafter.loss(batch_for(drafter), base_weights)[0].backward()
    assert drafter.lm_head.weight.grad.any()
    assert not any("head" in name for name in make(EAGLE3).state_dict())


@both
def test_weights_of_the_base_are_not_in_the_state_dict(make, base_weights, kind):
    drafter = make(kind)
    before = set(drafter.state_dict())
    drafter.attach_base_weights(base_weights)
    assert set(drafter.state_dict()) == before


@both
def test_a_drafter_loaded_from_its_folder_drafts_the_same(make, shape, base_weights, kind, tmp_path):
    arguments = {"depth": 4, "width": 3, "top_k": 3, "num_nodes": 12}
    saved, config = make(kind), DrafterConfig(f"drafters.{kind.__name__}", arguments, shape, "toy", "0123456789abcdef")
    checkpoint.save(tmp_path, saved, config)
    loaded, _ = checkpoint.load(tmp_path, torch.float64)
    hidden, ids = text_for(saved)
    anchors = torch.arange(1, S)
    assert loaded.draft_at(hidden, ids, anchors, base_weights) == saved.draft_at(hidden, ids, anchors, base_weights)


@both
def test_it_trains_and_drafts_in_mixed_precision(make, base_weights, kind):
    """Validation in bfloat16 training does this, with a bfloat16 base whose states stay in bfloat16."""
    drafter = make(kind).float().train()
    batch = batch_for(drafter)
    batch = replace(batch, hidden=batch.hidden.bfloat16(), last_hidden=batch.last_hidden.bfloat16())
    half = type(base_weights)(base_weights.embedding.bfloat16(), base_weights.head.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = drafter.loss(batch, half)
        trees = drafter.draft_at(batch.hidden[0], batch.input_ids[0], torch.arange(1, S), half)
    loss.backward()
    assert loss.isfinite() and all(weight.grad.isfinite().all() for weight in drafter.parameters())
    assert all(len(tree) == 12 for tree in trees)
    drafter.bfloat16().eval()
    tree = ready(drafter, half, batch.hidden[0], batch.input_ids[0], 7).propose(
        batch.input_ids[0, :8].tolist(), Limits(9)
    )
    assert len(tree) == 12


def test_fused_layers_are_chosen_for_bases_of_several_depths():
    assert [low_middle_high(n) for n in (2, 6, 8, 32, 40)] == [
        (0, 1, -1),
        (1, 3, -1),
        (2, 4, 5),
        (2, 16, 29),
        (2, 20, 37),
    ]


@both
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tree": "star"}, "dynamic, chain"),
        ({"draws": 2}, "needs tree: chain"),
        ({"depth": 0}, "depth"),
        ({"temperature": 0.0, "tree": "chain", "draws": 1}, "temperature"),
        ({"depth": 4, "window": 4}, r"window \(4\) must exceed depth \(4\)"),
    ],
)
def test_invalid_arguments_are_refused(make, kind, arguments, said):
    with pytest.raises(ValueError, match=said):
        make(kind, **arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_unroll": 0}, "num_unroll must be at least 1, not 0"),
        ({"num_unroll": 7, "window": 6}, r"window \(6\) must be at least num_unroll \(7\)"),
        ({"hidden_layers": [2, 16, 29]}, "but the base has 3 layers"),
        ({"hidden_layers": [-2]}, "but the base has 3 layers"),
        ({"draft_vocab_size": 9}, "needs a head of the drafter's own: own_head: true"),
        ({"draft_vocab_size": V + 1, "own_head": True}, "draft_vocab_size must be at most 23, not 24"),
    ],
)
def test_invalid_arguments_of_eagle3_are_refused(make, arguments, said):
    with pytest.raises(ValueError, match=said):
        make(EAGLE3, **arguments)


def train_on_a_text_that_repeats(drafter, base_weights):
    """Train on a text of period five, whose final hidden states give its next tokens.

    Returns:
        The losses, and how many of the next one, two, three and four tokens at twenty roots were drafted.
    """
    ids = torch.tensor([3, 8, 11, 14, 20]).repeat(8)[None].expand(4, -1)
    labels = ids.roll(-1, 1)
    last = base_weights.head[labels]
    assert torch.equal((last @ base_weights.head.T).argmax(-1), labels)
    hidden = torch.cat([last * (i + 1) for i in range(len(drafter.required_outputs.hidden_layers))], -1)
    batch = TrainingBatch(hidden, last, ids, labels, torch.ones_like(ids, dtype=torch.bool))
    optimizer = torch.optim.AdamW(drafter.train().parameters(), lr=3e-3)
    losses = []
    for _ in range(120):
        loss, _ = drafter.loss(batch, base_weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    trees = drafter.eval().draft_at(hidden[0], ids[0], torch.arange(10, 30), base_weights)
    drafted = [[tree.path_tokens(node) for node in range(len(tree))] for tree in trees]
    return losses, [
        sum(ids[0, root + 1 : root + 1 + length].tolist() in paths for root, paths in enumerate(drafted, start=10))
        for length in range(1, 5)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "arguments"), [(EAGLE, {}), (EAGLE3, {"num_unroll": 4})])
def test_drafts_are_accepted_after_training(make, base_weights, kind, arguments):
    losses, drafted = train_on_a_text_that_repeats(make(kind, num_nodes=8, **arguments), base_weights)
    assert losses[-1] < 0.5 * losses[0]
    assert min(drafted) >= 18


@pytest.mark.slow
def test_eagle3_trained_without_its_own_states_drafts_only_one_token_well(make, base_weights):
    """Training-time test is what lets the drafter continue from its own states."""
    _, drafted = train_on_a_text_that_repeats(make(EAGLE3, num_nodes=8, num_unroll=1), base_weights)
    assert drafted[0] == 20 and drafted[2] <= 5
