"""Compiled steps: the texts, hidden states and caches of the eager engine, in one graph for each shape."""

import copy
import json
import logging
import random
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from drafters import DraftTree
from inference.commands import verify
from inference.generation import acquire_runner, generate, stream
from inference.options import ModelOptions
from inference.speculation import Speculation
from inference.verifier import compiled as module
from inference.verifier import packed
from inference.verifier.compiled import CompiledRunner, make_runner, step_inputs, step_masks
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler
from inference.verifier.session import Session
from tests.inference.verifier.oracles import random_tree
from train.arguments import grouped

PROMPT = [5, 9, 7, 5, 9]
OTHER_BASES = [("llama", "eager"), ("gpt2", "sdpa"), ("olmo", "sdpa")]


@pytest.fixture
def graphs(monkeypatch):
    """Returns the graphs that are traced during the test; they are not compiled further."""
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(module, "BACKEND", backend)
    # pytest listens to all loggers, so torch would describe every step of a trace, which takes as long as the trace.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    return traced


@pytest.fixture
def few_shapes(monkeypatch):
    """Leaves two numbers of rows, and makes the smallest cache so small that a text of the tests outgrows it."""
    monkeypatch.setattr(module, "NUM_ROWS", (1, 13))
    monkeypatch.setattr(module, "SHORTEST", 32)


def greedy(base, prompt, max_new_tokens):
    """The text of transformers' own `generate`."""
    config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)
    return base.model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("span", [5, 40])
def test_the_masks_show_the_text_and_the_nodes_above_and_of_them_what_is_near(span):
    rng, length, start, num_rows = random.Random(span), 32, 9, 9
    pending, tree = [3, 4], random_tree(rng, 5)
    spans = {"full_attention": 10**9, "sliding_attention": span, "chunked_attention": span}
    inputs = torch.from_numpy(step_inputs(pending, tree, start, num_rows))
    masks = step_masks(inputs, length, spans, torch.float32)
    positions = [*range(start + 2), *(start + 1 + depth for depth in tree.depths)]  # of the slots that hold something
    for row in range(7):
        seen = {*range(start + min(row, 1) + 1)}
        node = row - 2
        while node >= 0:
            seen.add(start + 2 + node)
            node = tree.parents[node]
        here = positions[start + row]
        near = {
            "full_attention": seen,
            "sliding_attention": {slot for slot in seen if positions[slot] > here - span},
            "chunked_attention": {slot for slot in seen if positions[slot] // span == here // span},
        }
        for kind, expected in near.items():
            assert set((masks[kind][0, 0, row] == 0).nonzero().flatten().tolist()) == expected
    for padding in (7, 8):
        assert torch.equal(masks["full_attention"][0, 0, padding], masks["full_attention"][0, 0, 1])


@pytest.mark.parametrize(
    ("kind", "attention"), [("llama", "sdpa"), *(pytest.param(*way, marks=pytest.mark.slow) for way in OTHER_BASES)]
)
def test_texts_are_those_of_transformers_in_one_graph_for_each_shape(
    make_base, adversary, graphs, few_shapes, monkeypatch, kind, attention
):
    base, names, compile_fixed = make_base(kind, attention, layers=1, predictable=True), [], module.compile_fixed
    monkeypatch.setattr(
        module, "compile_fixed", lambda step, name, device: names.append(name) or compile_fixed(step, name, device)
    )
    expected = greedy(base, PROMPT, 50)
    runner = make_runner(base, compile=True)
    result = Session(runner, adversary([*PROMPT, *expected], most=16)).run(PROMPT, 50)
    assert result.tokens == expected
    assert {step.fed > 13 for step in result.steps} == {False, True}, "some trees are larger than any graph"
    assert {"step_of_13_rows_behind_32", "step_of_13_rows_behind_64", "step_of_1_rows_behind_32"} <= set(names)
    assert len(graphs) == len(names), "nothing was traced twice, and nothing broke a graph in two"
    assert {length for _, length, _ in runner._graphs} == {runner.cache.capacity}, "smaller graphs are gone"


@pytest.mark.slow
def test_sampled_texts_hidden_states_and_caches_are_those_of_the_eager_engine(
    make_base, make_random_ctc, graphs, few_shapes
):
    base = replace(make_base(predictable=True), check=False)
    sampler = KeyedSampler(temperature=0.8, top_k=20, top_p=0.95, seed=5)
    drafter = make_random_ctc(base, num_layers=2, hidden_layers=[0, 1, -1])
    eager, compiled = Runner(base), make_runner(base, compile=True)
    results = [Session(runner, drafter, sampler).run(PROMPT, 40) for runner in (eager, compiled)]
    assert results[0].tokens == results[1].tokens
    assert [each.fed for each in results[0].steps] == [each.fed for each in results[1].steps]
    assert sum(each.accepted for each in results[0].steps) > 0
    tree = DraftTree(range(3, 11), [-1, -1, 1, 2, 2, 3, 3, 3])
    for pending, path in (([6], [1, 2, 4]), ([4, 5], [])):
        theirs, ours = (runner.forward(pending, tree, drafter.required_outputs) for runner in (eager, compiled))
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-9)
        torch.testing.assert_close(ours.hidden, theirs.hidden, rtol=0, atol=1e-9)
        for runner in (eager, compiled):
            runner.commit(path)
    for ours, theirs in zip(compiled.cache.layers, eager.cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=1e-9)
        torch.testing.assert_close(ours.values, theirs.values, rtol=0, atol=1e-9)


def test_python_calls_take_compile_and_keep_what_was_compiled(make_base, graphs, few_shapes):
    base = make_base(seed=2, layers=1, predictable=True)
    (expected,) = generate(base, [PROMPT], "joint", max_new_tokens=12)
    arguments = {"max_new_tokens": 12, "compile": True, "check": False}
    assert generate(base, [PROMPT], "joint", **arguments)[0].token_ids == expected.token_ids
    num_graphs = len(graphs)
    assert num_graphs > 0
    assert "".join(stream(base, PROMPT, "joint", **arguments)) == expected.text
    speculation = Speculation("joint", compile=True, check=False)
    ids = base.model.generate(torch.tensor([PROMPT]), custom_generate=speculation, max_new_tokens=12, do_sample=False)
    assert ids[0, len(PROMPT) :].tolist() == expected.token_ids
    assert len(graphs) == num_graphs, "the runner was kept"
    with acquire_runner(base) as eager:
        assert not isinstance(eager, CompiledRunner)


def test_a_base_whose_hidden_states_were_asked_for_before_can_be_compiled(make_base, oracle, graphs, few_shapes):
    base = make_base(seed=8)
    expected = greedy(base, PROMPT, 9)
    base.model(torch.tensor([PROMPT]), output_hidden_states=True)  # leaves hooks
    writing = Session(make_runner(base, compile=True), oracle([*PROMPT, *expected], length=4))
    assert writing.run(PROMPT, 9).tokens == expected
    num_graphs = len(graphs)
    base.model(torch.tensor([PROMPT]), output_hidden_states=True)
    assert writing.run(PROMPT, 9).tokens == expected and len(graphs) == num_graphs > 0


def test_a_base_that_breaks_the_graph_is_refused_in_one_line(make_base, graphs):
    base = make_base(seed=3, layers=1)
    hook = base.model.model.layers[0].register_forward_hook(lambda *given: print(given[2].sum().item()))
    try:
        with pytest.raises(ValueError, match=r"toy-llama cannot be compiled .*leave out --forward compiled") as caught:
            make_runner(base, compile=True)
    finally:
        hook.remove()
    assert "\n" not in str(caught.value)


def test_a_graph_that_computes_something_else_is_refused(make_base, monkeypatch):
    def wrong(graph, inputs):
        return lambda *given: tuple(each * 1.01 for each in graph.forward(*given))

    monkeypatch.setattr(module, "BACKEND", wrong)
    with pytest.raises(ValueError, match=r"compiled step differ from those of the eager one by 0\.01"):
        make_runner(make_base(seed=3, layers=1), compile=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which inductor imports
def test_compiled_by_inductor_texts_are_those_of_transformers(make_base, oracle, few_shapes):
    base = replace(make_base(dtype=torch.float32, layers=1, predictable=True), check=False)
    expected = greedy(base, PROMPT, 14)
    runner = make_runner(base, compile=True)
    result = Session(runner, oracle([*PROMPT, *expected], length=4)).run(PROMPT, 14)
    assert result.tokens == expected
    assert sum(each.accepted for each in result.steps) > 5


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
def test_verify_compares_compiled_steps_with_generate(folder, graphs, few_shapes, capsys):
    options = {"base": str(folder / "base"), "max_new_tokens": 12}
    options |= {"benchmark": [f"mt_bench={folder / 'questions.jsonl'}"], "drafter": ["prompt_lookup"]}
    options |= {"template": "vicuna_v1.1", "texts": 0, "forward": "compiled"}
    verify(**grouped(verify, options))
    assert "Nothing is lost" in capsys.readouterr().out
    assert graphs


def test_a_command_without_compiled_steps_refuses_them(folder):
    with pytest.raises(ValueError, match="only eval, verify and chat have compiled steps: pass --forward eager or pac"):
        ModelOptions(str(folder / "base"), forward="compiled").load()


def test_packed_weights_and_compiled_steps_exclude_each_other(make_base, monkeypatch):
    plain = make_base(dtype=torch.float32)
    base = replace(plain, model=copy.deepcopy(plain.model))
    monkeypatch.setattr(packed, "MIN_PACKED_ELEMENTS", 1)
    packed.pack_weights(base.model)
    with pytest.raises(ValueError, match="has packed weights, which compiled steps cannot use"):
        make_runner(base, compile=True)
