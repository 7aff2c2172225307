"""The block drafter: training matches drafting, and its trees have the most probable paths."""

from itertools import product

import pytest
import torch

from drafters import BaseShape, BaseWeights, Block, DraftTree, Limits, StepResult, TrainingBatch, recipe

SHAPE = BaseShape(hidden_size=16, vocab_size=23, num_layers=3, num_heads=2, head_dim=8, intermediate_size=24)
S = 20


@pytest.fixture
def make():
    def made(**arguments):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drafter = recipe.build(Block, SHAPE, {"num_frames": 4, "num_nodes": 12, "top_k": 6} | arguments)
            for weight in drafter.parameters():
                if weight.dim() == 2:
                    torch.nn.init.normal_(weight, std=0.3)
        return drafter

    return made


@pytest.fixture
def text():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(S, 16, generator=generator), torch.randint(0, 23, (S,), generator=generator)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"markov_rank": 3},
        {"tree": "chain", "markov_rank": 3, "markov_factors": "base"},
        {"causal": True, "num_layers": 2},
        {"frames_differ": True},
        {"sample_from_anchor": False},
        {"root_everywhere": True},
        {"root_everywhere": True, "frames_differ": True},
        {"tokens_in_context": True},
    ],
)
def test_trees_of_a_known_text_equal_those_of_decoding(make, base_weights, text, arguments):
    drafter, (hidden, ids), anchors, trees, done = make(**arguments).double(), text, [1, 2, 5, 11, 19], [], 0
    hidden, base_weights = hidden.double(), BaseWeights(base_weights.embedding.double(), base_weights.head.double())
    drafter.attach_base_weights(base_weights)
    drafter.begin([])
    for anchor in anchors:
        drafter.observe(StepResult(anchor - done, DraftTree(), hidden[done:anchor], [], [0]))
        done = anchor
        trees.append(drafter.propose(ids[: anchor + 1].tolist(), Limits(max_depth=100)))
    assert trees == drafter.draft_at(hidden, ids, torch.tensor(anchors), base_weights)
    assert all(len(tree) == (4 if arguments.get("tree") == "chain" else 12) for tree in trees)


def test_without_sampling_from_the_anchor_the_frames_after_the_first_predict(make, base_weights, text):
    """As in DFlash: of the same network the first frame's state is not read."""
    dspark, dflash, (hidden, ids) = make(), make(sample_from_anchor=False), text
    at = torch.tensor([[3, 9]])
    whole, fewer = (drafter(hidden[None], at, ids[at], base_weights.embedding) for drafter in (dspark, dflash))
    assert fewer.shape[2] == dflash.num_labels == 3 and torch.equal(fewer, whole[:, :, 1:])
    (tree,) = dflash.draft_at(hidden, ids, torch.tensor([9]), base_weights)
    best = (fewer[0, 1] @ base_weights.head.T).argmax(-1).tolist()
    chain = make(sample_from_anchor=False, tree="chain", top_k=23)
    assert list(chain.draft_at(hidden, ids, torch.tensor([9]), base_weights)[0].tokens) == best
    assert max(tree.depths) <= 3 and len(tree) == 12


@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window": 4}])
def test_a_batch_of_texts_gets_the_trees_that_each_gets_alone(make, base_weights, text, arguments):
    drafter, (hidden, ids), anchors = make(markov_rank=3, **arguments).double(), text, [1, 5, 19]
    base_weights = BaseWeights(base_weights.embedding.double(), base_weights.head.double())
    context = drafter.trunk.context(hidden.double().expand(3, -1, -1), torch.arange(S).expand(3, -1))
    at = torch.tensor(anchors)
    trees = drafter.draft_batch(context, at, ids[at], base_weights, Limits(max_depth=100))
    assert trees == drafter.draft_at(hidden.double(), ids, at, base_weights)
    alone = [[(keys[:1, :, :anchor], values[:1, :, :anchor]) for keys, values in context] for anchor in anchors]
    for tree, own, anchor in zip(trees, alone, anchors, strict=True):
        root = ids[anchor : anchor + 1]
        assert drafter.draft_batch(own, torch.tensor([anchor]), root, base_weights, Limits(max_depth=100)) == [tree]


@pytest.mark.parametrize(("rank", "factors"), [(0, "own"), (3, "own"), (3, "base")])
def test_the_tree_has_the_most_probable_paths(make, base_weights, text, rank, factors):
    """The reference scores all paths over the full vocabulary by the product of the frames' probabilities."""
    drafter, (hidden, ids) = make(markov_rank=rank, markov_factors=factors, num_frames=2, top_k=23).double(), text
    base_weights = BaseWeights(base_weights.embedding.double(), base_weights.head.double())
    at = torch.tensor([[7]])
    with torch.no_grad():
        frames = drafter(hidden[None].double(), at, ids[at], base_weights.embedding)[0, 0]
        logits = frames @ base_weights.head.T  # (2, V)
        bias = torch.zeros(23, 23, dtype=torch.float64)
        if rank:
            left, right = drafter.markov.factors(torch.arange(23), base_weights)
            bias = left @ right.T
        first = (logits[0] + bias[ids[7]]).softmax(-1)
        second = (logits[1] + bias).softmax(-1)  # (V, V): after each token
    paths = {(a,): first[a].item() for a in range(23)}
    paths |= {(a, b): (first[a] * second[a, b]).item() for a, b in product(range(23), repeat=2)}
    best = sorted(paths, key=paths.get, reverse=True)[:12]
    (tree,) = drafter.draft_at(hidden.double(), ids, at[0], base_weights)
    assert {tuple(tree.path_tokens(node)) for node in range(12)} == set(best)


@pytest.mark.slow
def test_it_learns_a_text_that_repeats(make, base_weights):
    torch.manual_seed(0)
    ids = torch.tensor([3, 8, 8, 14, 20]).repeat(8)[None].expand(4, -1)
    hidden = torch.randn(5, 16).repeat(8, 1).expand(4, -1, -1)
    batch = TrainingBatch(hidden, hidden, ids, ids.roll(-1, 1), torch.ones_like(ids, dtype=torch.bool))
    drafter = make(num_anchors=12)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    losses = []
    for _ in range(120):
        loss, _ = drafter.loss(batch, base_weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    trees = drafter.draft_at(hidden[0], ids[0], torch.arange(10, 30), base_weights)
    expected = [ids[0, a + 1 : a + 5].tolist() for a in range(10, 30)]
    drafted = [[tree.path_tokens(node) for node in range(len(tree))] for tree in trees]
    assert sum(path in paths for path, paths in zip(expected, drafted, strict=True)) >= 18


@pytest.mark.parametrize("arguments", [{}, {"markov_rank": 3, "distillation": 1.0, "weights": "survival"}])
def test_a_batch_without_anchors_has_a_finite_loss_with_a_gradient_for_every_weight(make, base_weights, arguments):
    drafter = make(num_layers=2, hidden_layers=[1, -1], **arguments)
    hidden, ids = torch.randn(2, 8, 32), torch.randint(0, 23, (2, 8))
    nothing = torch.zeros(2, 8, dtype=torch.bool)
    loss, _ = drafter.loss(TrainingBatch(hidden, hidden[..., :16], ids, ids, nothing), base_weights)
    loss.backward()
    assert loss.item() == 0
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in drafter.parameters())


def test_wrong_arguments_are_refused(make):
    with pytest.raises(ValueError, match="tree must be one of"):
        make(tree="paper")
    with pytest.raises(ValueError, match="weights must be one of"):
        make(weights="none")


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_frames": 0},
        {"num_frames": 1, "sample_from_anchor": False},
        {"num_layers": 0},
        {"num_anchors": 0},
        {"num_nodes": -1},
        {"top_k": 0},
        {"markov_rank": -1},
        {"decay": -0.5},
        {"distillation": -1.0},
        {"teacher_temperature": -0.5},
        {"distillation_steps": -1},
        {"min_probability": -0.1},
        {"hidden_layers": [4]},
    ],
)
def test_meaningless_arguments_are_refused_by_name(make, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        make(**arguments)


def test_one_frame_drafts_one_token_and_trains_every_weight(make, base_weights, text):
    (hidden, ids), drafter = text, make(num_frames=1, top_k=99, num_nodes=99)
    mask = torch.ones(1, S, dtype=torch.bool)
    loss, _ = drafter.loss(
        TrainingBatch(hidden[None], hidden[None], ids[None], ids[None].roll(-1, 1), mask), base_weights
    )
    loss.backward()
    assert loss.isfinite() and all(weight.grad is not None for weight in drafter.parameters())
    for tree in drafter.draft_at(hidden, ids, torch.arange(1, S), base_weights):
        assert sorted(tree.tokens) == list(range(23))
