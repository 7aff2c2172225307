"""Of which number of rows the products of a model keep the bits of each row, measured on this machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from logging import getLogger
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from data.files import cause_of
from drafters.protocol import RequiredOutputs
from drafters.tree import ROOT, DraftTree, Growth
from inference.verifier.bitwise import BLOCK, MAX_DEPTH, use_own_attention, use_transformers_attention
from inference.verifier.check import model_state
from inference.verifier.packed import PackedLinear
from inference.verifier.runner import Runner

MULTIPLES = 4, 8, 16, 32  # with fewer rows, bits differ too rarely to be told by a few of them,
PACKED_MULTIPLE = 1  # but products in 8 bits are exact, and packed ones in half precision sum any number of rows alike
VECTORS = 32  # values that torch's elementwise functions compute at once, in float32 with AVX-512
PATH_LENGTH, TREE_SIZES, CHAINS = 6, (12, 18, 60), (1, 5)  # the trees and chains that are tried,
CUTS = 4, 12, 24, 28, 48, 56, 76  # and where the text is cut

# What was measured of models, by their states.
_measured: WeakKeyDictionary[Any, dict[int, int | None]] = WeakKeyDictionary()


def row_multiple(runner: Runner) -> int | None:
    """Return the smallest of `MULTIPLES` that a runner must feed its rows in to keep their bits, if there is one.

    It is measured once for each state of the runner's model, which then attends by `bitwise.attend`. Raises ValueError
    if the base must have bit-identical rows and its model cannot compute them.
    """
    model, config = runner.base.model, runner.causal_lm.config
    if any("expert" in name for name, _ in model.named_modules()):
        return None  # an expert multiplies few rows, however many are fed
    use_own_attention(config)
    measured, state = _measured.setdefault(model, {}), model_state(model)
    if state not in measured:
        try:
            measured[state] = _measure(runner)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # layers that do something else with the mask raise errors of many types
            if runner.base.bitwise:
                raise ValueError(f"{runner.base.name} has no bit-identical rows here ({cause_of(error)})") from error
            getLogger(__name__).debug("no bit-identical rows", exc_info=error)
            measured[state] = None
    if measured[state] is None:
        use_transformers_attention(config)
    return measured[state]


def _measure(runner: Runner) -> int | None:
    """Find the smallest multiple with which a runner keeps the bits of its rows, if there is one.

    Compared are the logits of a random text: token by token behind a prompt that is read in one piece, and in draft
    trees of several sizes behind a prompt that is read in two. The answer depends on the model, its dtype and device,
    on packed weights and on the number of threads.
    """
    length = min(2 * MAX_DEPTH + BLOCK - 4, runner.context_length - PATH_LENGTH - 1)  # the trees cross a border
    chance = random.Random(0)
    text = [chance.randrange(runner.vocab_size) for _ in range(max(length, 2) + PATH_LENGTH)]
    trees = [tree_around(text[-PATH_LENGTH:], num_nodes, runner.vocab_size, chance) for num_nodes in TREE_SIZES]
    trees += [(DraftTree.chain(text[-PATH_LENGTH:][:depth]), list(range(depth))) for depth in CHAINS]
    try:
        for multiple in (PACKED_MULTIPLE, *MULTIPLES) if _is_packed(runner.base.model) else MULTIPLES:
            runner.row_multiple = multiple
            # The last values of an activation are computed without vectors, which may round differently, but rarely.
            fills_vectors = multiple * getattr(runner.base.config, "intermediate_size", 0) % VECTORS == 0
            if fills_vectors and _rows_agree(runner, text, trees):
                return multiple
        return None
    finally:
        runner.row_multiple = None
        runner.reset()


def _is_packed(model: nn.Module) -> bool:
    """Whether all linear layers of a model multiply packed weights in half precision, or in 8 bits."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]  # those in 8 bits are none
    return all(isinstance(layer, PackedLinear) and layer.weight.dtype.itemsize == 2 for layer in layers)


def _rows_agree(runner: Runner, text: Sequence[int], trees: Sequence[tuple[DraftTree, list[int]]]) -> bool:
    """Whether each node of the trees that is in the text, and the root, has the logits of decoding token by token."""
    root = len(text) - PATH_LENGTH - 1
    required_outputs = RequiredOutputs((runner.base.config.num_hidden_layers,))

    def read(*pieces: Sequence[int]) -> Tensor:
        """Read a text from its beginning, and return the last states of all tokens, or the logits of each piece."""
        runner.reset()
        states = []
        for piece in pieces:
            output = runner.forward(piece, DraftTree(), required_outputs)
            states.append(output.logits if output.hidden is None else output.hidden)
            runner.commit([])
        return torch.cat(states)

    whole = read(text[:root])
    single = []
    for token in text[root:]:
        single.append(runner.forward([token], DraftTree(), RequiredOutputs()).logits[0])
        runner.commit([])
    cuts = [0, *(cut for cut in CUTS if cut < root), root]  # the last row of a piece may round differently
    if not torch.equal(read(*(text[start:end] for start, end in pairwise(cuts)))[-len(whole) :], whole):
        return False
    for tree, nodes in trees:
        logits = runner.forward(text[root : root + 1], tree, RequiredOutputs()).logits
        logits = logits[[0, *(1 + node for node in nodes)]]
        runner.truncate(runner.cached)
        if not torch.equal(logits, torch.stack(single[: 1 + len(nodes)])):
            return False
    return True


def tree_around(
    path: Sequence[int], num_nodes: int, vocab_size: int, chance: random.Random
) -> tuple[DraftTree, list[int]]:
    """A tree of about ``num_nodes`` nodes, of which all but the returned ones on the path are random."""
    grown, node, nodes = Growth(), ROOT, list[int]()
    for token in path:
        for _ in range((num_nodes - len(path)) // len(path)):
            grown.child(chance.choice([ROOT, *range(len(grown.tokens))]), chance.randrange(vocab_size))
        node = grown.child(node, token)
        nodes.append(node)
    return DraftTree(grown.tokens, grown.parents), nodes
