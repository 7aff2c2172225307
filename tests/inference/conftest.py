"""Drafters for the tests: the real ones, an oracle, and one as adversarial as the rules of a draft tree allow."""

import random

import pytest
import torch

import drafters
from benchmarks import recipes
from drafters import DraftTree, RequiredOutputs
from drafters.protocol import TrainingBatch
from inference.verifier.base import load_base


class AdversarialTrees(drafters.Drafter):
    """Random trees: the true continuation among wrong tokens, wrong tokens below it, and the same path twice.

    Args:
        truth: Text that the base writes, prompt included.
        seed: Seed of the trees.
        most: Maximum number of nodes.
        vocab: Vocabulary size.
    """

    required_outputs = RequiredOutputs(hidden_layers=(0, -1))

    def __init__(self, truth, seed=0, most=14, vocab=40):
        self.truth, self.rng, self.most, self.vocab = truth, random.Random(seed), most, vocab

    def propose(self, seq, limits):
        rng = self.rng
        truth = self.truth[len(seq) : len(seq) + rng.randrange(6)]
        tokens, parents = [], []
        on_truth, depth = [(-1, 0)], {-1: 0}  # nodes that spell a beginning of the truth, and how long it is
        for node in range(rng.randrange(self.most)):
            if rng.random() < 0.5:
                parent, length = rng.choice(on_truth)
                token = truth[length] if length < len(truth) else rng.randrange(self.vocab)
            else:
                parent, token = rng.randrange(-1, node), rng.randrange(self.vocab)
            if (parent, depth[parent]) in on_truth and truth[depth[parent] : depth[parent] + 1] == [token]:
                on_truth.append((node, depth[parent] + 1))
            depth[node] = depth[parent] + 1
            tokens.append(token)
            parents.append(parent)
        return DraftTree(tokens, parents)

    def observe(self, step):
        assert step.committed_hidden().shape[0] == step.num_pending + len(step.path)


class Oracle(drafters.Drafter):
    """Drafts a given text, whatever the base writes."""

    def __init__(self, text, length=8):
        self.text, self.length = text, length

    def propose(self, seq, limits):
        return DraftTree.from_paths([self.text[len(seq) : len(seq) + self.length]])


def train_briefly(drafter, base, texts, num_steps=30, lr=0.03, mask=None):
    """Train a learned drafter until it often guesses what the base writes, prepare it, and return its losses.

    Args:
        drafter: An untrained drafter.
        base: Its base.
        texts: (B, S) texts that the base wrote.
        num_steps: Number of optimizer steps.
        lr: Learning rate.
        mask: (B, S) the loss mask; everything by default.
    """
    drafter.to(base.model.dtype).initialise(base.base_weights)
    with torch.no_grad():
        hidden, last_hidden = base.hidden_states(texts, drafter.required_outputs.hidden_layers)
        labels = base.model(texts).logits.argmax(-1)
    optimizer, losses = torch.optim.AdamW(drafter.parameters(), lr=lr, weight_decay=0), []
    mask = torch.ones_like(texts, dtype=torch.bool) if mask is None else mask
    batch = TrainingBatch(hidden, last_hidden, texts, labels, mask)
    for _ in range(num_steps):
        loss, _ = drafter.loss(batch, base.base_weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    drafter.eval().requires_grad_(False).attach_base_weights(base.base_weights)
    return losses


@pytest.fixture(scope="session")
def chat(repository):
    """The base that ships with the project."""
    return load_base(str(repository / "checkpoints" / "tiny-chat"))


@pytest.fixture(scope="session")
def train_drafter():
    return train_briefly


@pytest.fixture(scope="session")
def oracle():
    return Oracle


@pytest.fixture(scope="session")
def adversary():
    return AdversarialTrees


@pytest.fixture(scope="session")
def make_random_ctc():
    """Makes an untrained learned drafter for a base, by default a CTC drafter."""
    ctc = {"num_frames": 5, "num_nodes": 9, "top_k": 5}
    eagle = {"depth": 4, "width": 3, "top_k": 4, "num_nodes": 9}
    usual = {drafters.CTC: ctc | {"num_labels": 3}, drafters.Block: ctc, drafters.EAGLE: eagle, drafters.EAGLE3: eagle}

    def make(base, kind=drafters.CTC, **arguments):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            drafter = recipes.build(kind, base.shape, usual[kind] | arguments)
            for name, weight in drafter.named_parameters():
                if name == "markov.right":  # it starts as no bias
                    torch.nn.init.normal_(weight)
        drafter.to(base.model.dtype).eval().requires_grad_(False).attach_base_weights(base.base_weights)
        return drafter

    return make


RANDOM = {
    "ctc": (drafters.CTC, {}),
    "ctc, chain": (drafters.CTC, {"tree": "chain", "causal": True}),
    "ctc_deep": (drafters.CTC, {"num_layers": 2, "hidden_layers": [0, 1, -1]}),
    "block": (drafters.Block, {"num_frames": 4, "markov_rank": 2}),
    "eagle": (drafters.EAGLE, {}),
    "eagle3": (drafters.EAGLE3, {}),
}


@pytest.fixture(scope="session")
def make_drafter(make_random_ctc):
    """Makes one of these drafters by name, for a base and the text it writes, prompt included."""

    def make(name, base, truth):
        if name in RANDOM:
            kind, arguments = RANDOM[name]
            return make_random_ctc(base, kind, **arguments)
        vocab = base.model.config.vocab_size
        others = {
            "none": drafters.NoDrafter,
            "adversarial": lambda: AdversarialTrees(truth, vocab=vocab),
            "oracle": lambda: Oracle(truth),
        }
        return others[name]()

    return make
