"""What frames read of earlier passages: compared with a literal search, and no token behind an anchor."""

import numpy as np
import pytest
import torch

from drafters.nn.lookup import MAX_NGRAM, Lookup


def passage(text, anchor, num_tokens):
    """The tokens behind the longest match and its length, by the largest of all ends of a match."""
    matches = [(0, anchor - 1)]
    for end in range(anchor):
        lengths = range(1, min(MAX_NGRAM, end + 1) + 1)
        matches += [(n, end) for n in lengths if text[end - n + 1 : end + 1] == text[anchor - n + 1 : anchor + 1]]
    length, end = max(matches)
    return (text[end + 1 : anchor + 1] * num_tokens)[:num_tokens] if length else [0] * num_tokens, length


@pytest.mark.parametrize("alphabet", [1, 2, 4, 12])
def test_the_longest_and_latest_match_is_found_and_the_text_behind_it_repeated(shape, alphabet):
    texts = torch.randint(0, alphabet, (2, 60), generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([[1, 2, 30, 59], [5, 20, 21, 58]])
    passages = Lookup(shape, 5).find(texts, anchors)
    for at in np.ndindex(anchors.shape):
        expected = passage(texts[at[0]].tolist(), anchors[at].item(), 5)
        assert (passages.tokens[at].tolist(), passages.lengths[at].item()) == expected


def test_nothing_behind_an_anchor_is_read(shape):
    texts, anchors = torch.randint(0, 3, (1, 40)), torch.arange(1, 20)[None]
    changed = texts.clone()
    changed[:, 20:] = 7
    one, other = (Lookup(shape, 4).find(tokens, anchors) for tokens in (texts, changed))
    assert one.tokens.equal(other.tokens) and one.lengths.equal(other.lengths)


def test_only_frames_with_a_match_are_changed_and_none_before_training(shape, base_weights):
    lookup = Lookup(shape, 3)
    passages = lookup.find(torch.tensor([[4, 5, 6, 4]]), torch.tensor([[2, 3]]))
    assert passages.tokens[0, 1].tolist() == [5, 6, 4] and passages.lengths[0].tolist() == [0, 1]
    assert not passages.additions(base_weights.embedding).any()
    torch.nn.init.eye_(lookup.proj.weight)
    embedded = base_weights.embedding[[5, 6, 4]]
    normed = embedded / (embedded.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt()
    added = passages.additions(base_weights.embedding)
    torch.testing.assert_close(added[0], torch.stack([torch.zeros(3, 16), 0.2 * normed]))
