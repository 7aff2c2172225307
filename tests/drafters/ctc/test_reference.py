"""The recursion over CTC frames, for one text in plain form and for many at once, against the sum over alignments."""

import pytest
import torch

from drafters.ctc.reference import collapse, text_probabilities
from drafters.ctc.trees import prefix_distributions

V, ROOT = 3, 1


@pytest.mark.parametrize(
    ("frames", "merged"),
    [([7, 7, 0, 7, 5], [7, 7, 5]), ([0, 0], []), ([7, 0, 0, 7], [7, 7]), ([7, 7, 7], [7]), ([0, 5, 5, 6, 0], [5, 6])],
)
def test_collapse_merges_repeats_then_drops_blanks(frames, merged):
    assert collapse(torch.tensor(frames), blank=0) == merged


def random_frames(num_frames, biased, scale=1.5):
    """Logits (T, V + 1), and biases (V, V + 1) or None."""
    generator = torch.Generator().manual_seed(0)
    logits, table = (torch.randn(n, V + 1, generator=generator, dtype=torch.float64) for n in (num_frames, V))
    return logits * scale, table * scale if biased else None


def distributions(texts, logits, table):
    """`prefix_distributions` of a prefix-closed list of texts, the empty one first."""
    tokens = torch.tensor([text[-1] if text else ROOT for text in texts])
    parents = torch.tensor([texts.index(text[:-1]) if text else -1 for text in texts])
    return prefix_distributions(logits, tokens, parents, None if table is None else table[tokens])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("num_frames", "scale"), [(1, 1.5), (2, 8.0), (5, 1.5), (5, 8.0)])
def test_all_probabilities_of_a_text_are_sums_over_alignments(literal_texts, num_frames, scale, biased):
    logits, table = random_frames(num_frames, biased, scale)
    probs = (logits[:, None] + (torch.zeros(V, V + 1) if table is None else table)).softmax(-1)
    expected = literal_texts(probs, ROOT)
    begins = expected.every()
    texts = [text for text in begins if begins[text] > 0]
    assert num_frames < 3 or (ROOT, ROOT) in texts
    prefix, next_token = distributions(texts, logits, table)
    every = torch.tensor([begins[text] for text in texts], dtype=torch.float64)
    whole = torch.stack([expected.whole(text) for text in texts])
    nexts = [[begins.get((*text, token), 0.0) for token in range(V)] for text in texts]
    after = torch.tensor(nexts, dtype=torch.float64)
    torch.testing.assert_close(prefix, every, rtol=1e-10, atol=0)
    plain = [text_probabilities(probs, ROOT, text) for text in texts]
    torch.testing.assert_close(
        torch.tensor(plain, dtype=torch.float64), torch.stack([every, whole], 1), rtol=1e-9, atol=0
    )
    torch.testing.assert_close(next_token, after / every[:, None], rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(whole / every, 1 - next_token.sum(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
def test_the_order_of_the_texts_does_not_matter(biased):
    logits, table = random_frames(4, biased)
    texts = [(), (0,), (1,), (0, 1), (1, 1), (1, 1, 2)]
    backwards = [(), *texts[:0:-1]]
    one, two = (distributions(order, logits, table)[1] for order in (texts, backwards))
    torch.testing.assert_close(two, one[[texts.index(text) for text in backwards]], rtol=0, atol=1e-14)
