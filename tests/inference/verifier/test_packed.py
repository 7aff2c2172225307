"""Packed weights give the logits and texts of the plain ones."""

import copy
import dataclasses

import pytest
import torch

from data.tokenizer import tokenizer_hash
from drafters import checkpoint
from drafters.checkpoint import DrafterConfig
from drafters.protocol import Limits
from inference import drafter_specs
from inference.options import ModelOptions
from inference.verifier import packed as module
from inference.verifier.packed import PackedLinear, pack_weights
from inference.verifier.runner import Runner

needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no products in bfloat16 for this CPU"
)


@pytest.fixture
def packed(make_base, monkeypatch):
    """A toy base in float32, and the same with all its linear layers packed."""
    monkeypatch.setattr(module, "MIN_PACKED_ELEMENTS", 1)
    plain = make_base(context=512, dtype=torch.float32)
    base = dataclasses.replace(plain, model=copy.deepcopy(plain.model))
    assert pack_weights(base.model) == 15  # seven in each of two layers, and the LM head
    return plain, base


@torch.inference_mode()
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 256, 257])
def test_the_logits_are_those_of_the_plain_weights(packed, num_tokens):
    plain, base = packed
    tokens = torch.randint(2, 40, (1, num_tokens), generator=torch.Generator().manual_seed(num_tokens))
    torch.testing.assert_close(base.model(tokens).logits, plain.model(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, [2, 16, 257]), pytest.param(torch.bfloat16, [1, 2, 16, 257], marks=needs_bfloat16)],
)
def test_the_packed_copy_is_used_from_a_few_tokens_on(dtype, expected):
    layer = PackedLinear(torch.nn.Linear(24, 40, bias=False, dtype=dtype))
    layer.weight.data.zero_()  # which no counter of changes sees, so the copy keeps the old ones
    used = [num for num in (1, 2, 16, 257) if layer(torch.ones(1, num, 24, dtype=dtype)).any()]
    assert used == expected


@torch.inference_mode()
@pytest.mark.parametrize("least", [2, 4])
@needs_bfloat16
def test_a_token_has_the_same_bits_beside_any_number_of_others(least, monkeypatch):
    monkeypatch.setattr(module, "least_rows", lambda: least)
    torch.manual_seed(0)
    layer = PackedLinear(torch.nn.Linear(4096, 1024, dtype=torch.bfloat16))
    for tokens in torch.randn(16, 1, 6, 4096, dtype=torch.bfloat16):
        together = layer(tokens)
        for number in (1, 2, 3, 5):
            assert torch.equal(layer(tokens[:, :number]), together[:, :number])
        assert torch.equal(layer(tokens[0, 0]), together[0, 0])


@torch.inference_mode()
@needs_bfloat16
def test_packed_weights_in_bfloat16_round_products_only(make_base, monkeypatch):
    monkeypatch.setattr(module, "MIN_PACKED_ELEMENTS", 1)
    exact = make_base(context=512, dtype=torch.float32).model
    exact.bfloat16().float()  # weights that bfloat16 holds exactly
    model = copy.deepcopy(exact).bfloat16()
    plain = copy.deepcopy(model)
    pack_weights(model)
    for num_tokens in (1, 2, 16, 300):
        tokens = torch.randint(2, 40, (1, num_tokens), generator=torch.Generator().manual_seed(num_tokens))
        expected = exact(tokens).logits
        errors = [(each(tokens).logits.float() - expected).abs().max().item() for each in (model, plain)]
        assert errors[0] < 2 * errors[1] + 1e-3 and errors[1] < 0.1 * expected.abs().max().item()


def test_weights_that_are_loaded_or_moved_later_are_packed_again():
    layer, other, tokens = PackedLinear(torch.nn.Linear(24, 40)), torch.nn.Linear(24, 40), torch.randn(2, 2, 24)
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close(layer(tokens), other(tokens), rtol=1e-5, atol=1e-5)
    copied = copy.deepcopy(layer)
    torch.testing.assert_close(copied(tokens), other(tokens), rtol=1e-5, atol=1e-5)
    halved = layer.bfloat16()(tokens.bfloat16())
    torch.testing.assert_close(halved.float(), other(tokens), rtol=0.05, atol=0.05)


LEARNED = {
    "Block": {"trunk": {"num_frames": 4}},
    "CTC": {"trunk": {"num_frames": 6, "markov_rank": 4, "draft_vocab_size": 30}, "loss": {"num_labels": 4}},
    "EAGLE": {"draft": {"depth": 3}},
    "EAGLE3": {"draft": {"depth": 3}},
    "Hydra": {"heads": {"num_heads": 3, "own_heads": False}},
    "Medusa": {"heads": {"num_heads": 3}},
}


@torch.inference_mode()
@pytest.mark.parametrize("kind", LEARNED)
def test_learned_drafters_read_the_packed_head_and_draft_the_same_trees(packed, kind, tmp_path):
    plain, base = packed
    torch.manual_seed(0)
    config = DrafterConfig(f"drafters.{kind}", LEARNED[kind], plain.shape, plain.name, tokenizer_hash(plain.tokenizer))
    checkpoint.save(tmp_path, config.build(), config)
    tokens = torch.randint(2, 40, (20,), generator=torch.Generator().manual_seed(1))
    trees = []
    for each in packed:
        drafter = drafter_specs.make(f"{kind.lower()}={tmp_path}", Runner(each))
        hidden, _ = each.hidden_states(tokens[None], drafter.required_outputs.hidden_layers)
        anchors = torch.tensor([5, 11, 19])
        trees.append(drafter.draft_at(hidden[0], tokens, anchors, drafter.base_weights, Limits(8, 12)))
    for tree, expected in zip(*trees, strict=True):
        assert tree.probabilities == pytest.approx(expected.probabilities, rel=1e-4)
        assert sorted(tree.tokens) == sorted(expected.tokens)  # nodes may be equally probable
    assert any(isinstance(module, PackedLinear) for module in drafter.modules())
    assert drafter.base_weights.packed_head is base.model.lm_head
    if kind == "CTC":
        assert isinstance(drafter.output(drafter.base_weights).base_weights.packed_head, PackedLinear)


def test_smaller_layers_are_packed_where_the_model_is_large(make_base, monkeypatch):
    counts = []
    for large in (2**40, 1):
        monkeypatch.setattr(module, "LARGE_MODEL", large)
        monkeypatch.setattr(module, "MIN_PACKED_ELEMENTS", 2**12)
        model = copy.deepcopy(make_base(dtype=torch.float32).model)
        counts.append(pack_weights(model))
        sizes = [each.weight.numel() for each in model.modules() if type(each) is torch.nn.Linear]
        assert max(sizes, default=0) < 2**12 / (16 if large == 1 else 1)
    assert counts[0] < counts[1]


def test_a_layer_packed_at_first_use_takes_memory_only_then():
    layer = PackedLinear(torch.nn.Linear(24, 40), at_first_use=True)
    layer(torch.ones(1, 24))
    assert layer._packed is None
    layer(torch.ones(2, 24))
    assert layer._packed is not None


def test_small_layers_stay_as_they_are_and_other_dtypes_are_refused(make_base, monkeypatch):
    model = make_base(dtype=torch.float32).model
    assert pack_weights(model) == 0 and not any(isinstance(each, PackedLinear) for each in model.modules())
    with pytest.raises(ValueError, match="need float32 or bfloat16 on a CPU, and these are float16 on cpu"):
        pack_weights(make_base(dtype=torch.float16).model)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(ValueError, match="no products in bfloat16 for this CPU: do not pack the weights, or use flo"):
        pack_weights(make_base(dtype=torch.bfloat16).model)


def test_a_layer_moved_to_bfloat16_needs_no_products_that_the_cpu_lacks(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    layer, tokens = PackedLinear(torch.nn.Linear(24, 40, bias=False)).bfloat16(), torch.ones(4, 24).bfloat16()
    assert layer(tokens).any()
    layer.weight.data.zero_()  # a packed copy would keep the old ones
    assert not layer(tokens).any()


def test_model_options_load_packed_weights(make_base, toy_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MIN_PACKED_ELEMENTS", 1)
    make_base(dtype=torch.float32).model.save_pretrained(tmp_path)
    toy_tokenizer.save_pretrained(tmp_path)
    assert isinstance(ModelOptions(str(tmp_path), device="cpu", forward="packed").load().model.lm_head, PackedLinear)
    assert not isinstance(ModelOptions(str(tmp_path), device="cpu").load().model.lm_head, PackedLinear)
