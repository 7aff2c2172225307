"""Rows are bit-identical to decoding token by token, whatever is fed beside them."""

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from drafters import DraftTree
from drafters.protocol import RequiredOutputs
from inference import load_base
from inference.generation import generate
from inference.timing import processor_name
from inference.verifier import bitwise, packed
from inference.verifier.base import Base
from inference.verifier.bitwise import padded
from inference.verifier.check import difference
from inference.verifier.graphed import make_runner
from inference.verifier.int8 import can_multiply_int8, quantise_layers
from inference.verifier.packed import pack_weights
from inference.verifier.row_multiples import PACKED_MULTIPLE, tree_around

LAYERS = RequiredOutputs((0, 1, -1))
DTYPES = (torch.bfloat16, torch.float32)
CONTEXT, WIDTH = 320, 64
# Sizes that reach matrix products of the usual kind: those of at most 8 columns are summed in other ways.
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": WIDTH, "max_position_embeddings": CONTEXT, "head_dim": 32,
    "n_embd": WIDTH, "n_positions": CONTEXT, "query_pre_attn_scalar": 32,
}  # fmt: skip
DENSE = (
    "LLaMA", "LLaMA, yarn scaling", "Mistral, sliding window", "Qwen2, sliding window", "Qwen3", "Gemma 2", "Gemma 3",
    "Phi-3", "OLMo 3", "Cohere 2", "GLM-4", "GPT-2", "GPT-NeoX",
)  # fmt: skip


@pytest.fixture
def make_family(make_model, families, toy_tokenizer):
    """Build a random base of a family, wide enough for matrix products of the usual kind."""
    import transformers

    def make(label, dtype, **sizes):
        family = families[label]
        small = make_model(label).config.to_dict()
        given = {name: SIZES[name] for name in SIZES if name in small and (name in family.arguments or name in small)}
        config = getattr(transformers, f"{family.name}Config")(**{**small, **given, **sizes})
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config)
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.data.normal_(0, 0.2)
        return Base("toy", model.to(dtype).eval().requires_grad_(False), toy_tokenizer, bitwise=True)

    return make


def count_different(base, length, seed=0, num_tokens=80):
    """Compare the rows of random chunks, steps, chains and trees with decoding token by token behind one prefill.

    Returns:
        The number of rows compared, and that of those with a different bit in a logit or a hidden state.
    """
    runner, chance = make_runner(base), random.Random(seed)
    vocab_size, sizes = runner.vocab_size, [0, 0, 50, 100, 180]
    text = [chance.randrange(vocab_size) for _ in range(length + num_tokens + 40)]
    rows, num_compared, num_different = {}, 0, 0
    for at, piece in [(length - 1, text[:length]), *((at, [text[at]]) for at in range(length, len(text)))]:
        output = runner.forward(piece, DraftTree(), LAYERS)
        rows[at] = output.logits[0], output.hidden[-1]
        runner.commit([])
    for _ in range(2):
        runner.reset()
        at, begin = 0, length + chance.randrange(8)
        while at < begin:
            piece = text[at : min(begin, at + chance.choice([1, 2, 7, 33, 64, 200]))]
            runner.forward(piece, DraftTree(), RequiredOutputs())
            runner.commit([])
            at += len(piece)
        while at < length + num_tokens - 6:
            pending = text[at : at + chance.choice([1, 1, 3, 6])]
            root = at + len(pending) - 1
            depth = min(chance.choice([0, 1, 4, 12, bitwise.MAX_DEPTH]), len(text) - root - 1)
            path = text[root + 1 : root + 1 + depth]
            tree, nodes = DraftTree(), []
            if depth:
                tree, nodes = tree_around(path, chance.choice(sizes), vocab_size, chance)
            output = runner.forward(pending, tree, LAYERS)
            for place, row in enumerate([0, *(1 + node for node in nodes)]):
                logits, hidden = rows[root + place]
                num_compared += 1
                is_same = torch.equal(output.logits[row], logits)
                is_same &= torch.equal(output.hidden[len(pending) - 1 + row], hidden)
                num_different += not is_same
            accepted = nodes[: chance.randrange(len(nodes) + 1)]
            runner.commit(accepted)
            at = root + 1 + len(accepted)
            if chance.random() < 0.3:
                at -= chance.randrange(min(6, at - length + 1))
                runner.truncate(at)
    return num_compared, num_different


def assert_all_equal(base, *lengths):
    for length in lengths:
        num_compared, num_different = count_different(base, length)
        assert num_compared > 50 and num_different == 0


@pytest.fixture
def set_num_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_rows_of_the_shipped_base_are_equal(set_num_threads, dtype, num_threads):
    set_num_threads(num_threads)
    base = load_base("checkpoints/tiny-chat", str(dtype).removeprefix("torch."), bitwise=True)
    if num_threads == 1:
        assert_all_equal(base, 1, 50, 300, 700)
    else:
        assert count_different(base, 90, num_tokens=20)[1] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_packed_weights_are_equal(monkeypatch, dtype):
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no products in bfloat16 for this CPU")
    monkeypatch.setattr(packed, "MIN_PACKED_ELEMENTS", 2**14)
    base = load_base("checkpoints/tiny-chat", str(dtype).removeprefix("torch."), bitwise=True)
    assert pack_weights(base.model) > 10
    assert_all_equal(base, 1, 300)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("quantised", [False, True])
def test_rows_are_equal_in_any_number_where_all_products_are_packed(set_num_threads, num_threads, quantised):
    if not (can_multiply_int8() if quantised else packed.has_packed_products(torch.bfloat16)):
        pytest.skip("this CPU has no such products")
    set_num_threads(num_threads)
    base = load_base("checkpoints/tiny-chat", "bfloat16", bitwise=True)
    assert make_runner(base).row_multiple != PACKED_MULTIPLE, "its layers are not packed"
    if quantised:
        quantise_layers(base.model)
    else:
        pack_weights(base.model, smallest=1)
    runner = make_runner(base)
    assert runner.row_multiple == PACKED_MULTIPLE
    assert [padded(rows, runner.row_multiple) for rows in (1, 2, 5)] == [1, 2, 5]
    assert_all_equal(base, 1, 90, 300)


@pytest.mark.slow
@pytest.mark.parametrize("label", DENSE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_family_are_equal(make_family, label, dtype):
    assert_all_equal(make_family(label, dtype), 1, 150)


@pytest.mark.slow
@pytest.mark.parametrize("label", ["Mistral, sliding window", "Gemma 2", "Gemma 3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_windows_that_reach_into_the_aligned_keys_are_equal(make_family, label, dtype):
    base = make_family(label, dtype, sliding_window=90, max_position_embeddings=720)
    for length in (60, 110, 560):  # the window begins to move, and passes a block of 512 keys
        assert_all_equal(base, length)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm-chat-7m", "stories260K"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_trained_bases_are_equal(shared, name, dtype):
    base = load_base(str(shared(f"models/{name}")), str(dtype).removeprefix("torch."), bitwise=True)
    assert_all_equal(base, 40, 400)


@pytest.mark.parametrize(
    ("label", "sizes"),
    [
        ("LLaMA", {}),
        ("LLaMA", {"attention_chunk_size": 50}),
        ("Mistral, sliding window", {"sliding_window": 5}),
        ("Gemma 2", {"sliding_window": 90}),
        ("Gemma 3", {"sliding_window": 600}),
    ],
)
def test_the_attention_is_the_usual_one_up_to_rounding(make_family, label, sizes):
    base, chance = make_family(label, torch.float32, max_position_embeddings=1024, **sizes), random.Random(0)
    base = replace(base, check=False)  # LLaMA's own forward knows no chunks
    runners = make_runner(base), make_runner(replace(base, bitwise=False))
    assert runners[0].row_multiple and runners[1].row_multiple is None
    for num_cached, num_pending, num_nodes in ((0, 1, 9), (63, 2, 150), (511, 40, 70), (600, 1, 150), (200, 300, 30)):
        text = [chance.randrange(40) for _ in range(num_cached + num_pending)]
        is_deep = chance.random() < 0.5  # deeper than `MAX_DEPTH`, as only scratch nodes of other callers are
        parents = [node - 1 if is_deep else chance.randrange(-1, node) for node in range(num_nodes)]
        tree = DraftTree([chance.randrange(40) for _ in parents], parents, num_scratch=num_nodes // 3)
        outputs = []
        for runner in runners:
            runner.reset()
            if num_cached:
                runner.forward(text[:num_cached], DraftTree(), LAYERS)
                runner.commit([])
            outputs.append(runner.forward(text[num_cached:], tree, LAYERS))
        assert difference(outputs[0].logits, outputs[1].logits) < 1e-5
        assert difference(outputs[0].hidden, outputs[1].hidden) < 1e-5


# ---- controls: without one of the two measures, rows differ


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_differ_with_the_usual_attention(dtype):
    base = load_base("checkpoints/tiny-chat", str(dtype).removeprefix("torch."))
    num_compared, num_different = count_different(replace(base, bitwise=False), 300)
    assert num_different > num_compared / 2


def test_rows_differ_where_they_are_not_filled_up_or_on_intel_without_mkls_strict_mode(monkeypatch):
    if "Intel" in processor_name():  # there the strict mode is the measure: it sums any number of rows alike
        code = "from inference import load_base; from inference.verifier.graphed import make_runner;"
        code += "make_runner(load_base('checkpoints/tiny-chat', 'float32', bitwise=True))"
        loose = {**os.environ, "MKL_CBWR": "AUTO"}
        run = subprocess.run([sys.executable, "-c", code], env=loose, capture_output=True, text=True)
        assert "checkpoints/tiny-chat has no bit-identical rows here" in run.stderr
        return
    base = load_base("checkpoints/tiny-chat", "float32", bitwise=True)
    assert make_runner(base).row_multiple > 1
    monkeypatch.setattr("inference.verifier.graphed.row_multiple", lambda runner: 1)
    num_compared, num_different = count_different(base, 300)
    assert num_different > num_compared / 2


def test_rows_differ_where_tails_are_longer_than_a_product_sums_at_once(monkeypatch):
    monkeypatch.setattr(bitwise, "BLOCK", 512)
    monkeypatch.setattr(bitwise, "MAX_TAIL", 1024)
    num_different = count_different(load_base("checkpoints/tiny-chat", "float32", bitwise=True), 500)[1]
    assert num_different


# ---- where it works


def test_bits_are_kept_by_default_in_half_precision_only(make_family):
    multiples = {
        dtype: make_runner(replace(make_family("LLaMA", dtype), bitwise=None)).row_multiple for dtype in DTYPES
    }
    assert multiples[torch.bfloat16] and multiples[torch.float32] is None


@pytest.mark.parametrize("label", ["Falcon", "Mixtral"])  # with attention of its own, and with experts
def test_a_base_that_cannot_is_refused_if_asked_for_and_else_runs_as_before(make_family, label):
    base = make_family(label, torch.bfloat16)
    with pytest.raises(ValueError, match="toy has no bit-identical rows here: leave out --bitwise or bitwise=True"):
        make_runner(base)
    runner = make_runner(replace(base, bitwise=None))
    assert runner.row_multiple is None
    generate(replace(base, bitwise=None), [3, 4], max_new_tokens=2)  # whose runner is kept
    with pytest.raises(ValueError, match="toy has no bit-identical rows here"):
        generate(replace(base, bitwise=None), [3, 4], bitwise=True, max_new_tokens=2)
    with pytest.raises(ValueError, match="has no bit-identical rows in graphed steps: leave out one of the two"):
        generate(replace(base, bitwise=None), [3, 4], bitwise=True, graphed=True)


def test_a_width_whose_products_depend_on_the_number_of_rows_is_found(make_family):
    sizes = {"hidden_size": 240, "intermediate_size": 650, "num_attention_heads": 5, "vocab_size": 1024}
    base = make_family("LLaMA", torch.float32, **sizes)  # the last of 650 values are computed without vectors
    assert make_runner(base).row_multiple == 16
    assert_all_equal(base, 60)


def test_the_model_itself_computes_as_before(make_family):
    base = make_family("LLaMA", torch.bfloat16)
    ids = torch.randint(3, 40, (2, 50), generator=torch.Generator().manual_seed(0))
    before = base.model(ids).logits, base.model.generate(ids, max_new_tokens=20, do_sample=False)
    assert make_runner(base).row_multiple and base.model.config._attn_implementation == "sdpa_bitwise"
    after = base.model(ids).logits, base.model.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_in_bfloat16_are_those_without_a_drafter(temperature):
    base = load_base("checkpoints/tiny-chat", "bfloat16")
    chance = random.Random(0)
    prompts = [[chance.randrange(base.config.vocab_size) for _ in range(chance.choice([5, 60, 200]))] for _ in range(4)]
    options = {"max_new_tokens": 60, "temperature": temperature, "seed": 3}
    alone = [one.token_ids for one in generate(base, prompts, "none", **options)]
    for drafter in ("joint", "token_recycling", "lookahead", "self_speculative"):
        written = generate(base, prompts, drafter, **options)
        assert [one.token_ids for one in written] == alone
        assert sum(step.accepted for one in written for step in one.steps)
    assert [one.token_ids for one in generate(replace(base, prefill_chunk=7), prompts, "joint", **options)] == alone


def test_drafts_are_no_deeper_than_the_split_of_the_keys_allows():
    runner = make_runner(load_base("checkpoints/tiny-chat", "bfloat16"))
    assert runner.prepare(100) == 100 + bitwise.MAX_DEPTH
    assert runner.prepare(runner.context_length - 3) == runner.context_length
    assert make_runner(load_base("checkpoints/tiny-chat")).prepare(100) == runner.context_length
