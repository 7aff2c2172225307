"""Anchors and their labels on hand-drawn masks."""

import pytest
import torch

from drafters.losses import anchors


def mask(text):
    """Return a loss mask: ``.`` is a token of the user, ``#`` one of the assistant."""
    return torch.tensor([[letter == "#" for letter in line] for line in text.split()])


@pytest.mark.parametrize("seed", range(5))
def test_anchors_are_distinct_and_the_next_token_is_the_assistants(seed):
    torch.manual_seed(seed)
    spoken = mask("..###..##. ..........  #########. .........#")
    positions, kept = anchors.sample(spoken, 4)
    assert positions.shape == kept.shape == (4, 4)
    assert (positions.diff(dim=1) > 0).all(), "sorted, without duplicates"
    allowed = [{1, 2, 3, 6, 7}, set(), {1, 2, 3, 4, 5, 6, 7}, {8}]
    for row, keep, valid in zip(positions.tolist(), kept.tolist(), allowed, strict=True):
        assert {p for p, k in zip(row, keep, strict=True) if k} <= valid
        assert sum(keep) == min(4, len(valid))


def test_every_valid_position_is_eventually_sampled():
    torch.manual_seed(0)
    seen = {p for _ in range(60) for p in anchors.sample(mask("..######.."), 2)[0].flatten().tolist()}
    assert seen == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("num_anchors", [100, 0])
def test_requesting_more_anchors_than_exist_or_zero_gives_all(num_anchors):
    positions, kept = anchors.sample(mask("..###. ....#."), num_anchors)
    assert positions[0].tolist() == [1, 2, 3]
    assert kept.sum(1).tolist() == [3, 1]
    assert positions[kept].tolist() == [1, 2, 3, 3]


def test_a_batch_without_assistant_tokens_gives_one_masked_anchor():
    positions, kept = anchors.sample(mask("..... ....."), 8)
    assert positions.shape == (2, 1)
    assert not kept.any()


def test_labels_are_the_bases_next_tokens_until_the_turn_ends():
    spoken = mask("..####.##.")
    labels = torch.arange(100, 110)[None]  # the base predicts 100 + p after position p
    targets, valid = anchors.following(labels, spoken, torch.tensor([[1, 4, 5, 6, 8]]), num_labels=3)
    said = [
        [t for t, v in zip(*row, strict=True) if v] for row in zip(targets[0].tolist(), valid[0].tolist(), strict=True)
    ]
    assert said == [[101, 102, 103], [104], [], [106, 107], []]


def test_labels_end_where_the_text_ends():
    spoken = mask("..####")
    targets, valid = anchors.following(torch.arange(6)[None], spoken, torch.tensor([[1, 3, 4, 5]]), num_labels=4)
    assert valid.sum(-1).tolist() == [[4, 2, 1, 0]]
    assert targets[valid].tolist() == [1, 2, 3, 4, 3, 4, 4]
