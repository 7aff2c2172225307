"""Linear layers in 8 bits: exact integer sums, rows with the same bits beside any others, and the texts of a base."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.tokenizer import tokenizer_hash
from drafters import checkpoint
from drafters.checkpoint import DrafterConfig
from inference.drafter_specs import make
from inference.options import ModelOptions
from inference.verifier import int8, packed
from inference.verifier.base import load_base
from inference.verifier.graphed import make_runner
from inference.verifier.int8 import Int8Linear, JoinedLinear, quantise, quantise_layers
from inference.verifier.sampling import KeyedSampler
from inference.verifier.session import Session
from tests.inference.verifier.oracles import prompt_of
from tests.inference.verifier.test_packed import LEARNED

pytestmark = pytest.mark.skipif(not int8.can_multiply_int8(), reason="needs exact products of integers (VNNI)")
SIZES = [(24, 40), (576, 192), (896, 4864), (8960, 1536)]


def make_layer(num_inputs, num_outputs, bias=True, **options):
    torch.manual_seed(num_inputs)
    linear = torch.nn.Linear(num_inputs, num_outputs, bias=bias).bfloat16().requires_grad_(False)
    return linear, Int8Linear(linear, **options)


@pytest.mark.parametrize("sizes", SIZES)
def test_products_are_the_sums_of_integers_times_the_scales(sizes):
    linear, layer = make_layer(*sizes, is_head=True)
    tokens = torch.randn(3, sizes[0])
    rows, scale = quantise(tokens)
    high, low = (rows.long() - 128).chunk(2)
    whole = 254 * high + low
    torch.testing.assert_close(whole * torch.from_numpy(scale)[:, None], tokens, rtol=0, atol=2e-4)  # 16 bits
    sums = [(part @ layer.quantised.long().T).float() * layer.scale for part in (high, low)]
    expected = (sums[0] * 254 + sums[1]) * torch.from_numpy(scale)[:, None] + linear.bias.float()
    torch.testing.assert_close(layer(tokens), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_result_is_that_of_the_layer_but_for_the_rounding_of_its_weights(sizes):
    linear, layer = make_layer(*sizes)
    tokens = torch.randn(2, 5, sizes[0]).bfloat16()
    exact = torch.nn.functional.linear(tokens.float(), linear.weight.float(), linear.bias.float())
    error = (layer(tokens).float() - exact).norm() / exact.norm()
    assert layer(tokens).shape == (2, 5, sizes[1]) and layer(tokens).dtype == torch.bfloat16
    assert error < 0.01


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_beside_any_number_of_others(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for sizes in SIZES:
            _, layer = make_layer(*sizes)
            tokens = torch.randn(64, sizes[0]).bfloat16()
            single = torch.cat([layer(token[None]) for token in tokens])
            for num_rows in range(1, 65):
                start = num_rows % 7
                assert torch.equal(layer(tokens[start : start + num_rows]), single[start : start + num_rows])
    finally:
        torch.set_num_threads(before)


def test_large_activations_of_one_token_leave_the_others_as_they_are():
    _, layer = make_layer(64, 8)
    tokens = torch.randn(4, 64)
    before = layer(tokens)
    tokens[2] *= 1e6
    assert torch.equal(layer(tokens)[[0, 1, 3]], before[[0, 1, 3]])
    torch.testing.assert_close(layer(torch.zeros(1, 64))[0], layer.bias.float())


def test_layers_that_read_the_same_states_give_what_each_gives_alone():
    attention = torch.nn.Module()
    for name, size, bias in (("q_proj", 48, True), ("k_proj", 16, False), ("v_proj", 16, True)):
        setattr(attention, name, make_layer(64, size, bias)[0])
    alone = {name: Int8Linear(layer) for name, layer in attention.named_children()}
    assert quantise_layers(attention) == 3 and {type(each) for each in attention.children()} == {JoinedLinear}
    for tokens in (torch.randn(1, 5, 64), torch.randn(1, 1, 64), torch.randn(1, 5, 64)):
        for name in ("q_proj", "k_proj", "v_proj", "k_proj"):
            assert torch.equal(getattr(attention, name)(tokens), alone[name](tokens))
    attention.q_proj(tokens)
    assert attention.k_proj._results, "kept for the layers after it"
    attention.v_proj(tokens)
    assert not attention.k_proj._results, "not kept behind the last one"


@pytest.fixture
def base(make_base):
    plain = make_base(dtype=torch.bfloat16, predictable=True)
    base = replace(plain, model=copy.deepcopy(plain.model))
    assert quantise_layers(base.model) == 15  # seven in each of two layers, and the LM head
    return base


@pytest.mark.parametrize("sampler", [None, KeyedSampler(0.8, seed=3)])
def test_texts_with_drafts_are_those_of_the_base_alone(base, oracle, sampler):
    runner, prompt = make_runner(base), prompt_of(17)
    assert runner.row_multiple, "rows are bit-identical"
    alone = Session(runner, make("none", runner), sampler).run(prompt, 30)
    drafter = oracle([*prompt, *alone.tokens], length=4)
    drafted = Session(runner, drafter, sampler).run(prompt, 30)
    assert drafted.tokens == alone.tokens
    assert sum(step.accepted for step in drafted.steps) > 15


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("beside", [Int8Linear, packed.PackedLinear])
def test_a_learned_drafter_multiplies_its_large_layers_in_8_bits(base, make_base, beside, kind, monkeypatch, tmp_path):
    monkeypatch.setattr(packed, "MIN_PACKED_ELEMENTS", 1)
    if beside is packed.PackedLinear:
        base = make_base(dtype=torch.bfloat16, predictable=True)
        base = replace(base, model=copy.deepcopy(base.model))
        packed.pack_weights(base.model)
    config = DrafterConfig(f"drafters.{kind}", LEARNED[kind], base.shape, base.name, tokenizer_hash(base.tokenizer))
    checkpoint.save(tmp_path, config.build(), config)
    runner = make_runner(base)
    drafter = make(f"{kind.lower()}={tmp_path}", runner)
    assert any(isinstance(module, Int8Linear | JoinedLinear) for module in drafter.modules())
    head = drafter.base_weights.packed_head
    assert isinstance(base.model.lm_head, beside)
    assert head is base.model.lm_head or isinstance(head.rows(torch.tensor([3, 1])), Int8Linear)
    prompt = prompt_of(17)
    assert (
        Session(runner, drafter).run(prompt, 12).tokens == Session(runner, make("none", runner)).run(prompt, 12).tokens
    )


def test_the_weights_of_the_head_are_those_that_are_multiplied(base):
    head = base.model.lm_head
    assert head.weight.dtype == torch.bfloat16 and head.weight.shape == (40, 32)
    tokens = torch.tensor([3, 1, 39])
    states = torch.randn(2, 32).bfloat16()
    torch.testing.assert_close(head.rows(tokens)(states), head(states)[:, tokens], rtol=0, atol=2e-2)
    assert not hasattr(base.model.model.layers[0].mlp.down_proj, "weight"), "only its packed copy is kept"


def test_int8_on_a_cpu_needs_no_other_package_and_is_refused_without_vnni(
    make_base, toy_tokenizer, tmp_path, monkeypatch
):
    make_base(dtype=torch.bfloat16).model.save_pretrained(tmp_path)
    toy_tokenizer.save_pretrained(tmp_path)
    base = ModelOptions(str(tmp_path), dtype="int8", device="cpu").load()
    assert isinstance(base.model.lm_head, Int8Linear) and base.wants_bitwise
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) not in maps.read_text(), "the file is mapped no longer"
    monkeypatch.setattr(int8, "can_multiply_int8", lambda: False)
    with pytest.raises(ValueError, match=r"no exact products of integers .*take bfloat16"):
        load_base(tmp_path, "int8")
