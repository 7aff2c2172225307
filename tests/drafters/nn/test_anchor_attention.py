"""The attention mask between anchors, against hand-drawn ones, and equal results for every kind of mask."""

import pytest
import torch

from drafters.nn import anchor_attention
from drafters.nn.anchor_attention import BLOCK, AnchorMask, CacheMask, attend

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def drawn(picture):
    return [[letter == "#" for letter in line.replace(" ", "")] for line in picture.split("\n") if line.strip()]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "#... ##..\n#... ##..\n###. ..##\n###. ..##"),
        ({"causal": True}, "#... #...\n#... ##..\n###. ..#.\n###. ..##"),
        ({"window": 2}, "#... ##..\n#... ##..\n.##. ..##\n.##. ..##"),
    ],
    ids=str,
)
def test_the_mask_of_two_anchors_equals_one_drawn_by_hand(options, expected):
    """Anchors 1 and 3 with two frames each over four positions attend to earlier context, then to their own block."""
    mask = AnchorMask(torch.tensor([[1, 3]]), 2, 4, **options)
    assert mask.dense()[0, 0].tolist() == drawn(expected)
    if "window" in options:  # in pieces, the first position is left out
        (first, _), (second, part) = mask.pieces(1).parts
        assert (first, second) == (slice(0, 1), slice(1, 3)) and part.shape[-1] == 4


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("num_context", "num_frames", "anchors"), [(20, 3, [[4, 9], [1, 19]]), (150, 5, [[1, 80, 149]])]
)
def test_flex_attention_equals_attention_with_the_dense_mask(device, causal, num_context, num_frames, anchors):
    """On a GPU its gradient too; torch has no gradient for it on a CPU, where training uses the dense mask."""
    mask = AnchorMask(torch.tensor(anchors, device=device), num_frames, num_context, causal)
    num_queries = mask.anchors.shape[1] * num_frames
    shapes = [(len(anchors), 2, length, 16) for length in (num_queries, *[num_context + num_queries] * 2)]
    trains, results = device == "cuda", []
    inputs = [torch.randn(shape, device=device, requires_grad=trains) for shape in shapes]
    for kind in (mask.dense(), mask.sparse()):
        out = attend(*inputs, kind)
        results.append([out, *(torch.autograd.grad(out.square().sum(), inputs) if trains else [])])
    for dense, sparse in zip(*results, strict=True):
        torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (False, 5)])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_attention_in_pieces_equals_attention_with_the_dense_mask(causal, window, size):
    """Its gradient too; the last piece may be smaller, anchors may come early, and one may lie after the context."""
    mask = AnchorMask(torch.tensor([[4, 9, 9, 17, 20], [1, 2, 3, 4, 19]]), 3, 20, causal, window)
    inputs = [torch.randn(2, 2, length, 16, dtype=torch.float64, requires_grad=True) for length in (15, 35, 35)]
    results = []
    for kind in (mask.dense(), mask.pieces(size)):
        out = attend(*inputs, kind)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for whole, pieces in zip(*results, strict=True):
        torch.testing.assert_close(pieces, whole)


def test_pieces_contain_only_what_their_anchors_attend_to():
    """Four pieces of 25 sorted anchors have half the context on average, and a quarter of the blocks each."""
    mask = AnchorMask(torch.arange(1, 101)[None], 2, 100)
    held = [part.numel() for _, part in mask.pieces(25).parts]
    assert held == [50 * (25 * n + 50) for n in (1, 2, 3, 4)]
    assert sum(held) < mask.dense().numel() / 2


def test_a_sparse_mask_skips_blocks_that_no_query_attends_to():
    """Those are late context and the blocks of other anchors."""
    assert AnchorMask(torch.arange(10, 1000, 8)[None], 16, 1024).sparse().sparsity() > 60


@pytest.mark.slow
def test_flex_attention_uses_the_dtype_of_the_values():
    """Under autocast, queries and keys come from float32 norms and values from a bfloat16 projection."""
    mask = AnchorMask(torch.tensor([[4, 9]]), 3, 20)
    queries, keys = torch.randn(1, 2, 6, 16), torch.randn(1, 2, 26, 16)
    values = torch.randn(1, 2, 26, 16).bfloat16()
    mixed = attend(queries, keys, values, mask.sparse())
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), attend(queries, keys, values.float(), mask.dense()), rtol=0.05, atol=0.05)


# ---- in a cache of fixed size


def cache_mask(first, length, num_frames, num_keys, causal=False):
    return CacheMask(torch.tensor([first]), torch.tensor([length]), num_frames, num_keys, causal)


@pytest.mark.parametrize(("causal", "expected"), [(False, ".####.\n.####."), (True, ".###..\n.####.")])
def test_frames_in_a_cache_attend_to_the_text_from_its_first_position_and_to_each_other(causal, expected):
    assert cache_mask(1, 3, 2, 6, causal).dense().tolist() == drawn(expected)


TEXTS = [(0, 1), (0, 120), (0, 128), (0, 300), (100, 300), (128, 256), (255, 256), (0, 500)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("first", "length"), TEXTS)
def test_the_blocks_for_flex_attention_show_what_the_dense_mask_shows_and_are_no_more_than_needed(
    first, length, causal
):
    mask = cache_mask(first, length, 12, 5 * BLOCK, causal)
    dense, blocks, shown = mask.dense(), mask.sparse(), torch.zeros(12, 5 * BLOCK, dtype=torch.bool)
    masked = blocks.kv_indices[0, 0, 0, : blocks.kv_num_blocks.item()].tolist()
    whole = blocks.full_kv_indices[0, 0, 0, : blocks.full_kv_num_blocks.item()].tolist()
    places, zero = torch.arange(5 * BLOCK).unflatten(0, (5, BLOCK)), torch.tensor(0)
    for place in places[masked].flatten():
        shown[:, place] = blocks.mask_mod(zero, zero, torch.arange(12), place)
    shown[:, places[whole].flatten()] = True
    assert torch.equal(shown, dense)
    seen = dense.unflatten(1, (5, BLOCK))
    assert sorted([*masked, *whole]) == seen.any(-1).any(0).nonzero().flatten().tolist()
    assert sorted(whole) == [block for block in range(5) if (block + 1) * BLOCK <= length and seen[:, block].all()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, on the way to its compiler
def test_compiled_flex_attention_in_caches_of_several_sizes_equals_attention_with_the_dense_mask():
    for first, length, num_blocks, causal in (
        (0, 300, 5, False),
        (100, 517, 5, True),
        (0, 900, 10, False),
        (255, 256, 3, True),
    ):
        mask = cache_mask(first, length, 12, num_blocks * BLOCK, causal)
        inputs = [torch.randn(1, 2, size, 64) for size in (12, num_blocks * BLOCK, num_blocks * BLOCK)]
        with torch.inference_mode():
            compiled = anchor_attention._compiled()(*inputs, block_mask=mask.sparse())
        torch.testing.assert_close(compiled, attend(*inputs, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # as above
@pytest.mark.parametrize(("window", "causal"), [(0, False), (70, True)])
def test_compiled_flex_attention_of_several_batches_equals_attention_with_the_dense_mask(window, causal):
    for num_anchors, num_frames, num_context in ((3, 4, 130), (5, 4, 257), (4, 7, 300)):
        anchors = torch.randint(1, num_context, (2, num_anchors))
        mask = AnchorMask(anchors, num_frames, num_context, causal, window)
        num_queries = num_anchors * num_frames
        inputs = [torch.randn(2, 2, size, 64) for size in (num_queries, *[num_context + num_queries] * 2)]
        with torch.inference_mode():
            compiled = anchor_attention._compiled()(*inputs, block_mask=mask.sparse())
        torch.testing.assert_close(compiled, attend(*inputs, mask.dense()), rtol=1e-4, atol=1e-5)
