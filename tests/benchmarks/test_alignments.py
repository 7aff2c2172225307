"""The expected acceptance by alignment is what enumerating all frame sequences gives."""

from itertools import product

import pytest
import torch

from benchmarks.ctc.alignments import KINDS, acceptance, alignment_table, check, kind_of
from drafters import CTC, BaseShape, BaseWeights, Block, Medusa, recipe
from drafters.ctc.alignment import collapse
from inference.verifier.base import load_base_info

V, D = 4, 16
SHAPE = BaseShape(hidden_size=D, vocab_size=V, num_layers=3, num_heads=2, head_dim=8, intermediate_size=24)


def random_drafter(kind, **arguments):
    torch.manual_seed(0)
    drafter = recipe.build(kind, SHAPE, {"num_frames": 4, **arguments})
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += 0.3 * torch.randn_like(weight)
    return drafter.eval()


@pytest.fixture
def text():
    generator = torch.Generator().manual_seed(1)
    weights = BaseWeights(*torch.randn(2, V, D, generator=generator))
    return weights, torch.randn(1, 12, D, generator=generator), torch.randint(0, V, (12,), generator=generator)


@torch.inference_mode()
def frame_probs(drafter, hidden, tokens, anchor, weights):
    """p_t(v | l) for T frames, V last tokens and all symbols: (T, V, W)."""
    root = int(tokens[anchor])
    frames = drafter(hidden, torch.tensor([[anchor]]), torch.tensor([[root]]), weights.embedding, tokens[None])[0, 0]
    bias = drafter.output(weights)[1]
    rows = torch.zeros(V, 1) if bias is None else bias(torch.arange(V))
    return (drafter.logits(frames, weights)[:, None] + rows).softmax(-1)


@pytest.mark.parametrize("merges", [True, False])
@pytest.mark.parametrize("reads_tokens", [True, False])
@pytest.mark.parametrize("rank", [0, 3])
def test_ctc_sums_over_all_frame_sequences(text, rank, reads_tokens, merges):
    weights, hidden, tokens = text
    options = {"markov_rank": rank, "tokens_in_context": reads_tokens, "merge_repeats": merges}
    drafter = random_drafter(CTC, num_labels=2, **options)
    anchors, labels = torch.tensor([3, 6]), torch.tensor([[1, 2], [2, 2]])
    found = acceptance(drafter, hidden, tokens, anchors, labels, weights)
    for anchor, wanted, (everywhere, own) in zip(anchors.tolist(), labels.tolist(), found.tolist(), strict=True):
        root = int(tokens[anchor])
        probs = frame_probs(drafter, hidden, tokens, anchor, weights).tolist()
        expected = expected_own = 0.0
        for symbols in product(range(V + 1), repeat=4):
            written, last, probability = [], root, 1.0
            for t, symbol in enumerate(symbols):
                probability *= probs[t][last][symbol]
                written = collapse(torch.tensor(symbols[: t + 1]), V, merges)
                last = written[-1] if written else root
            for length in (1, 2):
                if written[:length] == wanted[:length]:
                    expected += probability
                    own_text = collapse(torch.tensor(symbols[:length]), V, merges)
                    expected_own += probability * (own_text == wanted[:length])
        assert (everywhere, own) == pytest.approx((expected, expected_own), rel=1e-4)
        assert own < everywhere


@pytest.mark.parametrize("rank", [0, 3])
def test_block_has_one_alignment(text, rank):
    weights, hidden, tokens = text
    drafter = random_drafter(Block, markov_rank=rank)
    [[everywhere, own]] = acceptance(
        drafter, hidden, tokens, torch.tensor([5]), torch.tensor([[1, 1]]), weights
    ).tolist()
    root = int(tokens[5])
    probs = frame_probs(drafter, hidden, tokens, 5, weights)
    assert everywhere == own == pytest.approx(float(probs[0, root, 1] * (1 + probs[1, 1, 1])), rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (Medusa, {}, "neither a CTC nor a block drafter"),
        (Block, {}, "num_labels must be between 1 and the frames of FOLDER, not 5"),
        (Block, {"num_frames": 5, "draft_vocab_size": 3}, "has a draft vocabulary"),
    ],
)
def test_drafters_whose_alignments_cannot_be_split_are_refused(kind, arguments, message):
    drafter = recipe.build(Medusa, SHAPE, {}) if kind is Medusa else random_drafter(kind, **arguments)
    with pytest.raises(ValueError, match=message):
        check(drafter, "FOLDER", 5)


@pytest.mark.parametrize(("text", "kind"), [("There are 7", 1), ("ab\nc", 2), ("7\n", 1), ("plain words", 3)])
def test_kinds_of_text(text, kind):
    base = load_base_info("checkpoints/tiny-chat")
    tokens = base.tokenizer.encode(text, add_special_tokens=False)
    assert kind_of(tokens, base) == kind
    assert kind_of([*tokens, tokens[-1]], base) == 0


def test_every_kind_that_occurs_has_a_row_for_each_drafter():
    results = {"ctc": torch.tensor([[2.0, 1.0], [4.0, 4.0]]), "block": torch.tensor([[1.0, 1.0], [3.0, 3.0]])}
    rows = alignment_table(torch.tensor([0, 3]), results, []).rows
    assert rows == [
        [KINDS[0], "50.0%", "ctc", "2.000", "1.000", "50.0%", "1.000"],
        [KINDS[0], "50.0%", "block", "1.000", "1.000", "0.0%", "0.500"],
        [KINDS[3], "50.0%", "ctc", "4.000", "4.000", "0.0%", "1.000"],
        [KINDS[3], "50.0%", "block", "3.000", "3.000", "0.0%", "0.750"],
        ["all", "100.0%", "ctc", "3.000", "2.500", "16.7%", "1.000"],
        ["all", "100.0%", "block", "2.000", "2.000", "0.0%", "0.667"],
    ]
