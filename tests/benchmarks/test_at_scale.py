"""A wider base and its drafters compute what the small ones do: logits, texts, draft trees and acceptance."""

import copy
import doctest
import json
from dataclasses import replace

import pytest
import torch

import drafters
from benchmarks import at_scale, harness, recipes, widening
from benchmarks.widening import widen_base, widen_drafter
from data.tokenizer import tokenizer_hash
from drafters import checkpoint, registry
from drafters.checkpoint import DrafterConfig
from inference.verifier.runner import Runner
from inference.verifier.session import Session, Step
from tests.conftest import recorded_trees

SHAPE = 80, 150, 4, 10, 5  # hidden, intermediate, layers, heads, key-value heads; the toy base has 32, 64, 3, 4, 2
VOCAB = 64
PROMPT = [1, 5, 9, 11, 4]
FRAMES = {"num_frames": 5, "num_nodes": 9, "top_k": 5}
LEVELS = {"depth": 4, "width": 3, "top_k": 4, "num_nodes": 9}
LABELS = FRAMES | {"num_labels": 3}
DRAFTERS = {
    "medusa": (drafters.Medusa, {"num_heads": 3, "num_nodes": 9}),
    "medusa, the base's head": (drafters.Medusa, {"num_heads": 3, "num_layers": 2, "own_heads": False}),
    "hydra": (drafters.Hydra, {"num_heads": 3, "num_nodes": 9}),
    "hydra++": (drafters.Hydra, {"num_heads": 3, "num_layers": 2, "prefix_attention": True, "own_heads": False}),
    "eagle": (drafters.EAGLE, LEVELS),
    "eagle3": (drafters.EAGLE3, LEVELS),
    "eagle3, own head": (drafters.EAGLE3, LEVELS | {"own_head": True, "hidden_layers": [3, -1]}),
    "block": (drafters.Block, FRAMES | {"markov_rank": 2}),
    "block, root everywhere": (drafters.Block, FRAMES | {"root_everywhere": True, "frames_differ": True}),
    "ctc": (drafters.CTC, LABELS),
    "ctc, bias": (drafters.CTC, LABELS | {"markov_rank": 3}),
    "ctc, bias from the base": (drafters.CTC, LABELS | {"markov_rank": 3, "markov_factors": "base"}),
    "ctc, deep": (drafters.CTC, LABELS | {"num_layers": 2, "hidden_layers": [0, 1, -1], "causal": True}),
    "ctc, reads tokens": (drafters.CTC, LABELS | {"hidden_layers": [1, -1], "tokens_in_context": True}),
}

ACCEPTED = ("medusa", "block", "ctc, bias", "ctc, deep")  # though they were not trained


@pytest.fixture(scope="module")
def small(make_base):
    return make_base(layers=3, predictable=True)


@pytest.fixture(scope="module")
def wide(small):
    return widen_base(small, "wide", SHAPE, VOCAB, torch.float64)


@pytest.fixture(scope="module")
def texts():
    return torch.randint(0, 40, (2, 20), generator=torch.Generator().manual_seed(0))


def error(base, wide, texts):
    """Largest difference of the logits of the small vocabulary."""
    own, logits = (each.model(texts).logits.double() for each in (base, wide))
    return (logits[..., : own.shape[-1]] - own).abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("llama", SHAPE),
        ("llama", (96, 70, 3, 12, 12)),  # no groups: key-value heads are repeated
        ("llama", (64, 64, 3, 8, 2)),  # larger groups, heads as wide as those of the base
        ("qwen3", SHAPE),  # norms of queries and keys
        ("qwen2", SHAPE),  # biases of queries, keys and values
        ("tied", SHAPE),
    ],
)
def test_a_wider_base_has_the_logits_and_the_greedy_text_of_the_small_one(make_base, texts, kind, shape):
    base = copy.deepcopy(make_base()) if kind == "tied" else make_base(kind, layers=3, predictable=True)
    if kind == "tied":
        base.model.config.tie_word_embeddings = True
        base.model.lm_head.weight = base.model.model.embed_tokens.weight
    wide = widen_base(base, "wide", shape, VOCAB, torch.float32)
    assert wide.model.dtype == torch.float32 and error(base, wide, texts) < 2e-5
    assert torch.equal(wide.model(texts).logits.argmax(-1), base.model(texts).logits.argmax(-1))
    answers = [Session(Runner(each), drafters.NoDrafter()).run(PROMPT, 30).tokens for each in (base, wide)]
    assert answers[0] == answers[1] and len(set(answers[0])) > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_wider_drafter_drafts_the_same_trees_and_has_the_same_acceptance(small, wide, name):
    kind, options = DRAFTERS[name]
    drafter = trained_at_random(kind, options, small)
    wider = widen_drafter(drafter, recipes.grouped(kind, options), small.shape, wide)
    expected = recipes.build(kind, wide.shape, options)
    sizes = {key: weight.shape for key, weight in expected.state_dict().items()}
    assert {key: weight.shape for key, weight in wider.state_dict().items()} == sizes
    (answer, trees), (wide_answer, wide_trees) = (decoded(*each) for each in ((small, drafter), (wide, wider)))
    assert [(tree.tokens, tree.parents) for tree in wide_trees] == [(tree.tokens, tree.parents) for tree in trees]
    for tree, wide_tree in zip(trees, wide_trees, strict=True):
        assert wide_tree.probabilities == pytest.approx(tree.probabilities, abs=1e-5)
    assert wide_answer.tokens == answer.tokens
    costs = [[replace(step, seconds=()) for step in each.steps] for each in (answer, wide_answer)]
    assert costs[0] == costs[1]
    assert sum(step.fed_candidates for step in answer.steps) > len(answer.steps)
    assert name not in ACCEPTED or sum(step.accepted for step in answer.steps) >= 3


def trained_at_random(kind, options, base):
    """A drafter none of whose weights is as it was initialised."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drafter = recipes.build(kind, base.shape, options).to(base.model.dtype)
        with torch.no_grad():
            drafter.initialise(base.base_weights)
            for weight in drafter.parameters():
                weight += 0.1 * torch.randn_like(weight)
    drafter.eval().requires_grad_(False).attach_base_weights(base.base_weights)
    return drafter


def decoded(base, drafter):
    """A text of 30 tokens, and the trees that were proposed."""
    trees = recorded_trees(drafter)
    return Session(Runner(base), drafter).run(PROMPT, 30), trees


@torch.no_grad()
def test_in_bfloat16_a_wider_base_is_as_near_to_float32_as_the_small_one(small, texts):
    exact = small.model(texts).logits
    rounded = copy.deepcopy(small.model).to(torch.bfloat16)
    wide = widen_base(small, "wide", SHAPE, VOCAB, torch.bfloat16).model
    errors = [(model(texts).logits[..., :40].double() - exact).square().mean().sqrt() for model in (rounded, wide)]
    assert 0 < errors[1] < 2 * errors[0]


def test_examples_of_the_axes():
    assert doctest.testmod(widening).failed == 0 and doctest.testmod(widening).attempted > 2


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("llama", (32, 150, 4, 4, 2), "hidden_size 32, and the base needs 33"),
        ("llama", (80, 150, 1, 10, 5), "num_layers 1"),
        ("llama", (48, 150, 4, 4, 2), "no multiple"),
        ("llama", (80, 150, 4, 10, 1), "2 key-value heads of 2 queries each do not fit into 1 heads of 10"),
        ("gpt2", SHAPE, "cannot be widened: it is gpt2"),
    ],
)
def test_a_base_that_does_not_fit_is_refused(make_base, kind, shape, message):
    with pytest.raises(ValueError, match=message):
        widen_base(make_base(kind), "wide", shape, VOCAB, torch.float32)


def test_other_frequencies_and_unknown_weights_are_refused(small, wide, base):
    stretched = copy.deepcopy(base)
    stretched.model.config.rope_parameters["rope_type"] = "yarn"
    with pytest.raises(ValueError, match="yarn rotary embeddings"):
        widen_base(stretched, "wide", SHAPE, VOCAB, torch.float32)
    strange = torch.nn.ParameterDict({"extra": torch.zeros(3)})
    heads = widening.Attention(4, 2, 8), widening.Attention(10, 5, 16)
    between = widening.Axes.between(small.shape, wide.shape, *heads)
    with pytest.raises(ValueError, match="no rule that widens the weight extra"):
        widening._write_weights(strange, strange, between)


def test_a_slow_step_does_not_change_the_decoding_time():
    times = [(1, 2.0), (1, 2.0), (1, 90.0), (5, 4.0), (5, 3.0), (5, 4.0)]
    steps = [Step(1, 0, 1, fed - 1, 0, 1, (0.0, seconds, 0.0, 0.0, 0.0)) for fed, seconds in times]
    assert at_scale.decoding_seconds(steps) == 3 * 2.0 + 3 * 4.0


@pytest.fixture(scope="module")
def results(make_base, tmp_path_factory):
    """The command on a toy base at two shapes, with an untrained CTC drafter."""
    folder = tmp_path_factory.mktemp("at_scale")
    base = make_base(context=128, predictable=True)
    base.model.save_pretrained(folder / "toy")
    base.tokenizer.save_pretrained(folder / "toy")
    kind, options = DRAFTERS["ctc, bias"]
    class_path, tokenizer = registry.class_path(kind), tokenizer_hash(base.tokenizer)
    config = DrafterConfig(class_path, recipes.grouped(kind, options), base.shape, "toy", tokenizer)
    checkpoint.save(folder / "ctc", trained_at_random(kind, options, base), config)
    arguments = ["--base", f"{folder}/toy", "--limit", "2", "--vocab-size", "64", "--out", f"{folder}/out"]
    specs = ["--drafter", f"ctc={folder}/ctc", f"--drafter=ctc={folder}/ctc:num_nodes=3", "--drafter", "joint"]
    specs.append(f"--drafter=merged={folder}/ctc:num_nodes=8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(harness.SHAPES, "tiny", SHAPE)
        patch.setitem(harness.SHAPES, "draft", (64, 64, 2, 8, 2))
        harness.main(at_scale.at_scale, [*arguments, *specs, "--shape", "tiny", "--dtype", "float32"])
        harness.main(at_scale.at_scale, [*arguments, "--drafter=joint", "--max-new-tokens", "8", "--shape", "draft"])
    return folder / "out"


@pytest.mark.slow
def test_the_command_writes_what_the_small_base_writes(results):
    (file,) = results.glob("toy-tiny-float32-*.json")
    found = json.loads(file.read_text())
    assert list(found["drafters"]) == ["none", "ctc", "ctc:num_nodes=3", "joint", "merged:num_nodes=8"]
    for own in found["drafters"].values():
        assert own["same_steps_as_small"] == own["same_texts_as_small"] == own["identical"] == own["questions"] == 2
        assert own["acceptance_length"] == own["small_acceptance_length"]
    assert found["drafters"]["none"]["speedup"] == 1 and found["drafters"]["none"]["parameters"] == 0
    assert found["drafters"]["merged:num_nodes=8"]["parameters"] == found["drafters"]["ctc"]["parameters"] > 0
    assert found["drafters"]["ctc"]["fed_per_step"] > found["drafters"]["ctc:num_nodes=3"]["fed_per_step"]
    assert found["drafters"]["none"]["draft_ms"] < found["drafters"]["ctc"]["draft_ms"]
    assert found["drafters"]["ctc"]["acceptance_length"] > 1.2


@pytest.mark.slow
def test_runs_into_one_folder_share_their_tables(results):
    tables = (results / "at_scale.md").read_text()
    for title in ("toy at the shape tiny, float32", "toy at the shape draft, bfloat16"):
        assert f"## {title}\n" in tables
