"""Properties that Medusa and Hydra share: training matches drafting, and untrained heads copy the base."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks import recipes
from drafters import Hydra, Limits, Medusa, TrainingBatch
from tests.drafters.conftest import committed, in_float64, random_drafter

S, V, K = 18, 23, 3
KINDS = {
    "medusa": (Medusa, {}),
    "medusa, three layers": (Medusa, {"num_layers": 3}),
    "medusa, the base's head": (Medusa, {"own_heads": False}),
    "medusa, distillation": (Medusa, {"distillation": True}),
    "hydra": (Hydra, {}),
    "hydra, the base's head": (Hydra, {"own_heads": False}),
    "hydra, prefix attention": (Hydra, {"prefix_attention": True}),
    "hydra++": (Hydra, {"prefix_attention": True, "distillation": True, "num_layers": 4}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def make(shape, base_weights):
    """Build a float64 drafter in which every weight matters; equal arguments give equal weights."""

    def make(kind, **arguments):
        build, usual = KINDS[kind]
        options = {"num_heads": K, "num_nodes": 9, "top_k": 4} | usual | arguments
        drafter = random_drafter(build, shape, options, is_random=lambda weight: True)
        drafter.attach_base_weights(in_float64(base_weights))
        return drafter

    return make


@pytest.fixture
def batch():
    """Two texts whose labels differ from their next tokens and whose answers start and end inside them."""
    generator = torch.Generator().manual_seed(3)
    hidden, last = torch.randn(2, 2, S, 16, generator=generator, dtype=torch.float64)
    ids, labels = torch.randint(0, V, (2, 2, S), generator=generator)
    mask = torch.zeros(2, S, dtype=torch.bool)
    mask[0, 5:11] = mask[1, 2:4] = mask[1, 9:] = True
    return TrainingBatch(hidden, last, ids, labels, mask)


def live_states(drafter, hidden):
    """Return the state that the heads read at every root from 1 on, in token-by-token decoding."""
    drafter.begin([0])
    states = {}
    for root in range(1, len(hidden)):
        drafter.observe(committed(hidden[root - 1 : root]))
        drafter.propose([0] * (root + 1), Limits(1))
        states[root] = drafter.state(context := drafter._cache.read(), drafter.root(context, [0], Limits(1)))
    return states


def distribution(drafter, state, path):
    """Logits (V,) after a path that starts with the root, from the head of that depth."""
    head = len(path) - 1
    read = torch.cat([drafter.base_weights.embedding[token] for token in path])[None]
    x = drafter.blocks[head](state, read) if isinstance(drafter, Hydra) else drafter.blocks[head](state)
    return drafter.logits(head, x, drafter.base_weights)[0]


@each_kind
@torch.no_grad()
def test_the_loss_equals_that_of_decoding_every_root_one_by_one(make, batch, kind, small_chunks):
    drafter = make(kind, num_anchors=0, decay=0.7)
    losses = [[] for _ in range(K)]
    loss, seen = drafter.loss(batch, drafter.base_weights)
    for row in range(2):
        states, mask = live_states(drafter, batch.hidden[row]), batch.loss_mask[row]
        for root in range(1, S - 1):
            for head in range(K):
                at = root + head  # the position whose distribution head + 1 predicts
                if at + 1 >= S or not mask[root + 1 : at + 2].all():
                    break
                logits = distribution(drafter, states[root], batch.input_ids[row, root : at + 1].tolist())
                goal = batch.labels[row, at]
                if drafter.distillation:
                    goal = (batch.last_hidden[row, at] @ drafter.base_weights.head.T).softmax(-1)
                losses[head].append(F.cross_entropy(logits[None], goal[None]))
    expected = sum(0.7 ** (head + 1) * torch.stack(head_losses).mean() for head, head_losses in enumerate(losses))
    torch.testing.assert_close(loss, expected)
    assert seen.keys() == {f"accuracy_{head + 1}" for head in range(K)}
    assert all(0 <= value <= 1 for value in seen.values())


@each_kind
def test_before_training_every_head_predicts_what_the_base_predicted_for_the_root(shape, base_weights, kind):
    build, arguments = KINDS[kind]
    drafter = recipes.build(build, shape, arguments)
    drafter.initialise(base_weights)
    hidden = torch.randn(1, S, 16)
    states, path = drafter.encode(hidden)[0], torch.randint(0, V, (S, drafter.num_heads))
    expected = hidden[0] @ base_weights.head.T
    for head, x in enumerate(drafter.head_states(states, path, base_weights.embedding)):
        torch.testing.assert_close(drafter.logits(head, x, base_weights), expected)
