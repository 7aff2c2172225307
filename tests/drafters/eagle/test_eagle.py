"""EAGLE and EAGLE-3: their training computes the same function as their drafting."""

import pytest
import torch

from drafters import EAGLE, EAGLE3, DraftTree
from drafters.eagle.eagle3 import low_middle_high
from drafters.nn import draft_cache
from drafters.protocol import UNLIMITED
from tests.drafters.conftest import batch_for, committed, in_float64, random_drafter, ready, text_for

S, V = 20, 23
both = pytest.mark.parametrize("kind", [EAGLE, EAGLE3])


@pytest.fixture
def make(shape, base_weights):
    """Build a random drafter in float64."""

    def make(kind, **arguments):
        options = {"depth": 4, "width": 3, "top_k": 3, "num_nodes": 12} | arguments
        drafter = random_drafter(kind, shape, options)
        drafter.attach_base_weights(base_weights)
        return drafter.eval()

    return make


@pytest.fixture
def base_weights(base_weights):
    return in_float64(base_weights)


def distribution_after(drafter, base_weights, hidden, ids, anchor, path):
    """Log-probabilities after a path below a root, by uncached forward passes that feed its own states back."""
    states, tokens = drafter.project_hidden(hidden[None, :anchor]), [*ids[1 : anchor + 1].tolist(), *path]
    for count in range(anchor, len(tokens) + 1):
        made = drafter(states, torch.tensor([tokens[:count]]), base_weights)[:, -1:]
        states = torch.cat([states, made], dim=1)
    return drafter.logits(made[0, 0], base_weights).log_softmax(-1)


# ---- drafting


@both
def test_the_tree_equals_one_from_uncached_forwards_over_every_path(make, base_weights, kind):
    """Without limits the tree has the most probable of all paths; each path is scored by uncached forward passes."""
    drafter = make(kind, depth=2, width=V, top_k=V, num_nodes=40)
    hidden, ids = text_for(drafter)
    tree = ready(drafter, hidden, ids, 7).propose(ids[:8].tolist(), UNLIMITED)
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
    "the base's rows": (EAGLE3, {"draft_vocab_size": 9}),
    "no bias": (EAGLE, {"fc_bias": False}),
}


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [(EAGLE, {}), (EAGLE3, {}), (EAGLE, {"window": 7}), (EAGLE3, {"window": 7}), *OF_OTHERS.values()],
)
def test_a_chain_is_the_greedy_text_of_uncached_forwards(make, base_weights, kind, arguments):
    drafter = make(kind, depth=6, tree="chain", **arguments)
    hidden, ids = text_for(drafter)
    tree = ready(drafter, hidden, ids, 9).propose(ids[:10].tolist(), UNLIMITED)
    path = []
    for _ in range(6):
        path.append(distribution_after(drafter, base_weights, hidden, ids, 9, path).argmax().item())
    assert tree == DraftTree(path, list(range(-1, 5)))
    assert drafter.draft_forwards == 6


@both
def test_accepted_tokens_without_base_states_are_read_with_the_drafters_own_states(make, base_weights, kind):
    drafter = make(kind, depth=3, tree="chain")
    hidden, ids = text_for(drafter)
    ready(drafter, hidden, ids, 9).rewind(5)
    seq = [*ids[:5].tolist(), 3, 14]
    tree = drafter.propose(seq, UNLIMITED)
    path = []
    for _ in range(3):
        path.append(distribution_after(drafter, base_weights, hidden, ids, 4, [3, 14, *path]).argmax().item())
    assert list(tree.tokens) == path


# ---- training


@pytest.mark.parametrize("window", [0, 5])
def test_eagle_trains_on_the_same_outputs_as_its_first_draft_depth(make, base_weights, window):
    drafter = make(EAGLE, window=window)
    hidden, ids = text_for(drafter)
    trained = drafter.logits(drafter(hidden[None, :-1], ids[None, 1:], base_weights), base_weights)[0].log_softmax(-1)
    for anchor in range(1, S):
        expected = distribution_after(drafter, base_weights, hidden, ids, anchor, [])
        torch.testing.assert_close(trained[anchor - 1], expected)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, {"window": 8}, {"draft_vocab_size": 9}])
def test_eagle3_trains_every_depth_on_the_same_outputs_as_drafting(make, base_weights, arguments):
    drafter = make(EAGLE3, hidden_layers=(0, 1, -1), **arguments)
    hidden, ids = text_for(drafter)
    unrolled = drafter.unroll(hidden[None, :-1], ids[None, 1:], base_weights, num_steps=5)
    for depth, states in enumerate(unrolled):
        trained = drafter.logits(states, base_weights)[0].log_softmax(-1)
        for pair in range(depth, S - 1):
            anchor = pair - depth + 1
            path = ids[anchor + 1 : anchor + 1 + depth].tolist()
            torch.testing.assert_close(
                trained[pair], distribution_after(drafter, base_weights, hidden, ids, anchor, path)
            )
    assert depth == 4


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
    ready(drafter, hidden, ids, 0)
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


def test_the_eagle_loss_equals_a_literal_version_of_the_paper(make, base_weights, small_chunks):
    drafter = make(EAGLE)
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
                crossed.append(-(distribution * log_draft).sum())
    loss, seen = drafter.loss(batch, base_weights)
    torch.testing.assert_close(loss, torch.stack(distances).mean() + 0.1 * torch.stack(crossed).mean())
    torch.testing.assert_close(seen["token_loss"], torch.stack(crossed).mean())


@pytest.mark.parametrize(("num_tokens", "own_head"), [(0, False), (18, True), (18, False)])
def test_the_eagle3_loss_equals_a_literal_version_of_the_paper(make, base_weights, num_tokens, own_head, small_chunks):
    """The reference uses uncached forward passes, one anchor and one depth at a time.

    With a draft vocabulary the base's distribution and the drafter's are those over its tokens, and no path passes a
    label that is none of them.
    """
    drafter = make(EAGLE3, num_unroll=3, own_head=own_head, draft_vocab_size=num_tokens or None)
    covered = torch.arange(V)
    if num_tokens:
        covered = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:num_tokens]
        drafter.draft_tokens.copy_(covered)
        drafter.attach_base_weights(base_weights)
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
                    crossed.append(-(distribution * drafted[covered]).sum())
        total, weights = total + 0.8**depth * torch.stack(crossed).mean(), weights + 0.8**depth
    torch.testing.assert_close(drafter.loss(batch, base_weights)[0], total / weights)


def test_eagle3_drafts_with_the_bases_rows_or_trains_a_copy_of_them(make, base_weights):
    """With a draft vocabulary, whose tokens training chooses: those of other tokens cannot be drafted."""
    (frozen, trained), covered = (make(EAGLE3, own_head=own, draft_vocab_size=9) for own in (False, True)), [2, 11, 17]
    for drafter in (frozen, trained):
        drafter.draft_tokens[:3] = torch.tensor(covered)
        drafter.draft_tokens[3:] = torch.tensor([0, 1, 3, 4, 5, 6])
    trained.initialise(base_weights)
    states = torch.randn(5, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    whole = frozen.norm(states) @ base_weights.head.T
    expected = torch.full_like(whole, -torch.inf)
    expected[:, frozen.draft_tokens] = whole[:, frozen.draft_tokens]
    frozen.attach_base_weights(base_weights)  # as decoding does, after the weights and the tokens were loaded
    for weights in (base_weights, in_float64(base_weights)):  # the attached one, and another in training
        torch.testing.assert_close(frozen.logits(states, weights), expected)
        torch.testing.assert_close(trained.logits(states, weights), expected)
    assert not {name for name, _ in frozen.named_parameters() if "lm_head" in name}


def test_noise_is_added_only_in_training_and_has_the_configured_width(make, base_weights, monkeypatch):
    drafter = make(EAGLE, noise=0.2)
    batch = batch_for(drafter)
    plain = drafter.loss(batch, base_weights)[0]
    assert torch.equal(plain, drafter.loss(batch, base_weights)[0])
    drafter.train()
    noisy = []
    honest = EAGLE.forward
    monkeypatch.setattr(
        EAGLE, "forward", lambda self, states, *rest: noisy.append(states) or honest(self, states, *rest)
    )
    assert not torch.equal(plain, drafter.loss(batch, base_weights)[0])
    noise = (noisy[0] - batch.hidden[:, :-2]).abs().max().item()
    assert 0.09 < noise / (512 / S) <= 0.1


def test_fused_layers_are_chosen_for_bases_of_several_depths():
    assert [low_middle_high(n) for n in (2, 6, 8, 32, 40)] == [
        (0, 1, -1),
        (1, 3, -1),
        (2, 4, 5),
        (2, 16, 29),
        (2, 20, 37),
    ]
