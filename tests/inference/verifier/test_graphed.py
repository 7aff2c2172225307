"""Graphed steps: the texts, hidden states and caches of the eager engine, from graphs that are captured once."""

import json
import logging
import random
import re
from dataclasses import replace

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention
from transformers import GenerationConfig

from drafters import DraftTree
from drafters.protocol import NoDrafter, RequiredOutputs
from inference.commands import verify
from inference.generation import acquire_runner, generate, stream
from inference.options import ModelOptions
from inference.speculation import Speculation
from inference.verifier import fixed_step, graphed
from inference.verifier.fixed_step import attend, dense_mask, sparse_mask, step_inputs, visibility
from inference.verifier.graphed import GraphRunner, make_runner
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler
from inference.verifier.session import Session
from tests.devices.graphs import use_flex_attention
from tests.inference.verifier.oracles import random_tree
from train.arguments import grouped

PROMPT = [5, 9, 7, 5, 9]
OTHER_BASES = [("llama", "eager"), ("gpt2", "sdpa"), ("olmo", "sdpa"), ("mistral", "sdpa")]
CPU = torch.device("cpu")


@pytest.fixture
def few_shapes(monkeypatch):
    """Leaves two numbers of rows, and lets the cache grow by so few positions that a text of the tests outgrows it."""
    monkeypatch.setattr(graphed, "NUM_ROWS", (1, 13))
    monkeypatch.setattr("inference.verifier.cache.POSITIONS_AT_ONCE", 32)


@pytest.fixture
def compiles(monkeypatch):
    """Lets layers be compiled on the CPU, traced as they are on a GPU; returns the graphs that are traced."""
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(graphed, "COMPILED_ON", frozenset(["cpu"]))
    monkeypatch.setattr(fixed_step, "BACKEND", backend)
    # pytest listens to all loggers, so torch would describe every step of a trace, which takes as long as the trace.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    return traced


@pytest.fixture
def flex_on_cpu(monkeypatch):
    return use_flex_attention(monkeypatch)


def graph_runner(base, **changes):
    runner = make_runner(replace(base, graphed=True, **changes))
    assert isinstance(runner, GraphRunner)
    return runner


def greedy(base, prompt, max_new_tokens):
    """The text of transformers' own `generate`."""
    config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)
    return base.model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()


# ---- what each row sees


@pytest.fixture(params=[5, 40])
def step(request):
    """The inputs of a step of 9 rows for 2 pending tokens and 5 nodes, and the places that each row should see."""
    rng, start, span = random.Random(request.param), 9, request.param
    pending, tree = [3, 4], random_tree(rng, 5)
    inputs = torch.from_numpy(step_inputs(pending, tree, start, 9))
    positions = [*range(start + 2), *(start + 1 + depth for depth in tree.depths)]  # of the slots that hold something
    expected = {kind: [] for kind in ("full_attention", "sliding_attention", "chunked_attention")}
    for row in range(7):
        seen = {*range(start + min(row, 1) + 1)}
        node = row - 2
        while node >= 0:
            seen.add(start + 2 + node)
            node = tree.parents[node]
        here = positions[start + row]
        expected["full_attention"].append(seen)
        expected["sliding_attention"].append({slot for slot in seen if positions[slot] > here - span})
        expected["chunked_attention"].append({slot for slot in seen if positions[slot] // span == here // span})
    for rows in expected.values():
        rows += [rows[1]] * 2  # the padding repeats the root
    return inputs, span, expected


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention", "chunked_attention"])
def test_rows_see_the_text_and_the_nodes_above_and_of_them_what_is_near(step, kind):
    inputs, span, expected = step
    sees = visibility(inputs, kind, 10**9 if kind == "full_attention" else span)
    mask = dense_mask(sees, 9, 32, CPU)
    assert [set(row.nonzero().flatten().tolist()) for row in mask] == expected[kind]
    assert torch.equal(create_mask(sees, 1, 1, 9, 32, device="cpu")[0, 0], mask), "as FlexAttention asks"
    assert torch.equal(dense_mask(sees, 27, 32, CPU), mask.repeat(3, 1)), "also for the rows of further heads"


@pytest.mark.parametrize("num_heads", [4, 6, 9])
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_flex_attention_computes_what_a_dense_mask_gives(flex_on_cpu, num_heads, kind):
    """With whole blocks of the text, and blocks that no row sees, and heads in groups of 2 and 3."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    num_key_heads, num_rows, length = 3 if num_heads % 3 == 0 else 2, 16, 600
    inputs = torch.from_numpy(step_inputs([3], random_tree(rng, 12), 420, num_rows))
    sees = visibility(inputs, kind, 10**9 if kind == "full_attention" else 200)
    is_visible = dense_mask(sees, num_rows, length, CPU)
    query = torch.randn(1, num_heads, num_rows, 16, generator=generator)
    key, value = (torch.randn(1, num_key_heads, length, 16, generator=generator) for _ in range(2))
    expected = scaled_dot_product_attention(query, key, value, is_visible, enable_gqa=True).transpose(1, 2)
    model = type("Config", (), {"num_attention_heads": num_heads, "num_key_value_heads": num_key_heads})
    mask = sparse_mask(is_visible, sees, fixed_step.num_folded(model))
    assert mask.full_kv_num_blocks.item() == (3 if kind == "full_attention" else 1)
    result, _ = attend(torch.nn.Identity().eval(), query, key, value, mask)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


# ---- texts


@pytest.mark.parametrize(
    ("kind", "attention"), [("llama", "sdpa"), *(pytest.param(*way, marks=pytest.mark.slow) for way in OTHER_BASES)]
)
def test_texts_are_those_of_transformers(make_base, adversary, emulated_graphs, few_shapes, kind, attention):
    base = make_base(kind, attention, layers=2, predictable=True)
    expected = greedy(base, PROMPT, 50)
    runner = graph_runner(base)
    result = Session(runner, adversary([*PROMPT, *expected], most=16)).run(PROMPT, 50)
    assert result.tokens == expected
    assert max(step.fed for step in result.steps[1:]) == 13, "larger trees are cut"
    assert runner.cache.capacity > 32, "the text has outgrown the first cache"
    assert {step.capacity for step in runner._steps.values()} == {runner.cache.capacity}, (
        "graphs of the shorter cache are gone"
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
def test_with_flex_attention_texts_are_those_of_transformers(
    make_base, oracle, few_shapes, flex_on_cpu, emulated_graphs, kind
):
    base = make_base(kind, dtype=torch.float32, predictable=True)
    expected = greedy(base, PROMPT, 30)
    result = Session(graph_runner(base), oracle([*PROMPT, *expected], length=4)).run(PROMPT, 30)
    assert result.tokens == expected and len(flex_on_cpu) > 5
    assert sum(each.accepted for each in result.steps) > 10
    assert base.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("kind", "layers"), [("llama", 3), pytest.param("qwen3", 3, marks=pytest.mark.slow)])
def test_all_layers_of_a_kind_share_one_compiled_function(make_base, oracle, few_shapes, compiles, kind, layers):
    base = make_base(kind, layers=layers, predictable=True)
    numbers = [module.layer_idx for module in base.model.modules() if hasattr(module, "layer_idx")]
    expected = greedy(base, PROMPT, 20)
    runner = graph_runner(base)
    assert Session(runner, oracle([*PROMPT, *expected], length=4)).run(PROMPT, 20).tokens == expected
    assert {num_rows for num_rows, _ in runner._layer_functions} == {1, 13}
    assert len(compiles) == len(runner._layer_functions), "one for each number of rows, and length of the cache"
    assert not any("forward" in vars(module) for module in base.model.modules())
    assert [module.layer_idx for module in base.model.modules() if hasattr(module, "layer_idx")] == numbers


@pytest.mark.slow
def test_sampled_texts_hidden_states_and_caches_are_those_of_the_eager_engine(
    make_base, make_random_ctc, emulated_graphs, few_shapes
):
    base = replace(make_base(predictable=True), check=False)
    sampler = KeyedSampler(temperature=0.8, top_k=20, top_p=0.95, seed=5)
    drafter = make_random_ctc(base, num_layers=2, hidden_layers=[0, 1, -1])
    eager, runner = Runner(base), graph_runner(base)
    results = [Session(each, drafter, sampler, max_nodes=12).run(PROMPT, 40) for each in (eager, runner)]
    assert results[0].tokens == results[1].tokens
    assert [each.fed for each in results[0].steps] == [each.fed for each in results[1].steps]
    assert sum(each.accepted for each in results[0].steps) > 0
    tree = DraftTree(range(3, 11), [-1, -1, 1, 2, 2, 3, 3, 3])
    for pending, path in (([6], [1, 2, 4]), ([4, 5], [])):
        theirs, ours = (each.forward(pending, tree, drafter.required_outputs) for each in (eager, runner))
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-9)
        torch.testing.assert_close(ours.hidden, theirs.hidden, rtol=0, atol=1e-9)
        for each in (eager, runner):
            each.commit(path)
    for ours, theirs in zip(runner.cache.layers, eager.cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=1e-9)
        torch.testing.assert_close(ours.values, theirs.values, rtol=0, atol=1e-9)


def test_a_step_is_one_launch_and_all_addresses_stay(make_base, oracle, emulated_graphs):
    base = make_base(predictable=True)
    runner = graph_runner(base)
    session = Session(runner, oracle([*PROMPT, *greedy(base, PROMPT, 55)], length=3))
    session.begin(PROMPT, reserve=90)
    addresses, num_steps = set(), 0
    emulated_graphs.launches.clear()
    for _ in session.steps(len(PROMPT) + 55):
        views = [tensor.data_ptr() for pair in runner.cache.views for tensor in pair]
        inputs = [each._inputs.device.data_ptr() for each in runner._steps.values()]
        addresses.add((*views, *inputs, session.last.logits.untyped_storage().data_ptr()))
        num_steps += 1
    assert num_steps > 12 and len(addresses) == 1
    assert sum(emulated_graphs.launches.values()) == num_steps
    assert len(runner._steps) == len(graphed.NUM_ROWS), "all were captured before the text"


def test_the_states_of_a_prompt_that_is_read_in_small_pieces_are_those_of_the_whole(make_base, emulated_graphs):
    required, prompt = RequiredOutputs((1, -1)), [*range(3, 33)]
    base = make_base()
    runner = graph_runner(base, prefill_chunk=7)
    runner.capture(NoDrafter())
    runner.reset(60)
    hidden = runner.forward(prompt, DraftTree(), required).hidden
    torch.testing.assert_close(hidden, Runner(base).forward(prompt, DraftTree(), required).hidden, rtol=0, atol=1e-9)


def test_python_calls_take_graphed_and_keep_the_graphs(make_base, emulated_graphs, few_shapes):
    base = make_base(seed=2, layers=1, predictable=True)
    (expected,) = generate(base, [PROMPT], "joint", max_new_tokens=12)
    arguments = {"max_new_tokens": 12, "graphed": True, "check": False}
    assert generate(base, [PROMPT], "joint", **arguments)[0].token_ids == expected.token_ids
    num_captured = emulated_graphs.num_captured
    assert num_captured > 0
    assert "".join(stream(base, PROMPT, "joint", **arguments)) == expected.text
    speculation = Speculation("joint", graphed=True, check=False)
    ids = base.model.generate(torch.tensor([PROMPT]), custom_generate=speculation, max_new_tokens=12, do_sample=False)
    assert ids[0, len(PROMPT) :].tolist() == expected.token_ids
    assert emulated_graphs.num_captured == num_captured, "the runner was kept"
    with acquire_runner(base) as eager:
        assert not isinstance(eager, GraphRunner)


def test_a_base_whose_hidden_states_were_asked_for_before_can_be_graphed(make_base, oracle, few_shapes, compiles):
    base = make_base(seed=8)
    expected = greedy(base, PROMPT, 9)
    base.model(torch.tensor([PROMPT]), output_hidden_states=True)  # leaves hooks
    writing = Session(graph_runner(base), oracle([*PROMPT, *expected], length=4))
    assert writing.run(PROMPT, 9).tokens == expected


def test_a_base_that_waits_for_the_device_is_refused_in_one_line(make_base, emulated_graphs):
    base = make_base(seed=3, layers=1)
    hook = base.model.model.layers[0].register_forward_hook(lambda *given: print(given[2].sum().item()))
    try:
        with pytest.raises(ValueError, match=r"toy-llama cannot be graphed .*pass --forward eager") as caught:
            graph_runner(base)
    finally:
        hook.remove()
    assert "\n" not in str(caught.value)


def test_a_graph_that_computes_something_else_is_refused(make_base, monkeypatch):
    run_step = graphed.run_step
    monkeypatch.setattr(graphed, "run_step", lambda *given: (run_step(*given)[0] * 1.01, None))
    with pytest.raises(ValueError, match=r"graphed step differ from those of the eager one by 0\.01"):
        graph_runner(make_base(seed=3, layers=1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what inductor imports and flex_attention has for the CPU
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_with_layers_and_flex_attention_compiled_by_inductor_texts_are_those_of_transformers(
    make_base, oracle, few_shapes, monkeypatch, kind
):
    monkeypatch.setattr(graphed, "COMPILED_ON", frozenset(["cpu"]))
    monkeypatch.setattr(fixed_step, "FLEX_ON", frozenset(["cpu"]))
    base = replace(make_base(kind, dtype=torch.float32, layers=2, predictable=True), check=False)
    expected = greedy(base, PROMPT, 14)
    result = Session(graph_runner(base), oracle([*PROMPT, *expected], length=4)).run(PROMPT, 14)
    assert result.tokens == expected
    assert sum(each.accepted for each in result.steps) > 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_layer_writes_into_the_cache_and_copies_none_of_it(make_base, few_shapes, monkeypatch):
    monkeypatch.setattr(graphed, "COMPILED_ON", frozenset(["cpu"]))
    monkeypatch.setattr(fixed_step, "FLEX_ON", frozenset(["cpu"]))
    monkeypatch.setattr("inference.verifier.cache.POSITIONS_AT_ONCE", 50)  # no other size of the toy base
    base = replace(make_base(dtype=torch.float32, layers=2), check=False)
    runner, codes = run_and_get_code(lambda: graph_runner(base))
    assert f", {runner.cache.capacity}, " in codes[0], "the cache is read"
    allocated = re.findall(r"empty_strided_cpu\(\((.*?)\)", codes[0])
    assert allocated and not any(str(runner.cache.capacity) in sizes.split(", ") for sizes in allocated)


def test_a_graphed_draft_model_has_the_logits_of_an_eager_one(make_base, emulated_graphs):
    base = make_base(predictable=True)
    for vocab_size in (base.config.vocab_size - 3, base.config.vocab_size + 5):
        eager, runner = (make_runner(replace(base, graphed=graphed), vocab_size) for graphed in (False, True))
        assert isinstance(runner, GraphRunner)
        for each in (eager, runner):
            each.forward(PROMPT, DraftTree(), RequiredOutputs())
            each.commit([])
        theirs, ours = (each.forward([7], DraftTree([39, 4], [-1, 0]), RequiredOutputs()) for each in (eager, runner))
        assert ours.logits.shape == (3, vocab_size)
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-9)


# ---- the commands


@pytest.fixture
def folder(make_base, toy_tokenizer, tmp_path):
    """A toy base, and a file with a question."""
    make_base(dtype=torch.float32, context=256, layers=1, predictable=True).model.save_pretrained(tmp_path / "base")
    toy_tokenizer.save_pretrained(tmp_path / "base")
    question = {"question_id": 1, "category": "toy", "turns": ["w5 w6 w7 w5", "w9 w8"]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question) + "\n")
    return tmp_path


@pytest.mark.slow
def test_verify_compares_graphed_steps_with_generate(folder, emulated_graphs, capsys):
    options = {"base": str(folder / "base"), "max_new_tokens": 12}
    options |= {"benchmark": [f"mt_bench={folder / 'questions.jsonl'}"], "drafter": ["prompt_lookup"]}
    options |= {"template": "vicuna_v1.1", "texts": 0, "forward": "graphed"}
    verify(**grouped(verify, options))
    assert "Nothing is lost" in capsys.readouterr().out
    assert emulated_graphs.launches


def test_by_default_a_gpu_has_graphs_and_a_cpu_has_none(folder):
    gpu = torch.device("cuda")
    assert ModelOptions().on(gpu).forward == "graphed" and ModelOptions().on(CPU).forward == "eager"
    assert ModelOptions(bitwise=True).on(gpu).forward == "eager"
    assert ModelOptions(forward="eager").on(gpu).forward == "eager"
    assert type(make_runner(ModelOptions(str(folder / "base")).load())) is Runner
