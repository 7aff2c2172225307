"""Drafters by name: the syntax of specs, and one-line errors for invalid ones."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import drafters
from data.tokenizer import tokenizer_hash
from drafters import checkpoint, recipe, registry
from drafters.checkpoint import DrafterConfig
from inference import drafter_specs, model_drafters
from inference.verifier import int8, packed
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from tests import conftest
from tests.conftest import recorded_trees


@pytest.fixture
def config(base):
    arguments = {"trunk": {"num_frames": 5}, "loss": {"num_labels": 3}, "draft": {"num_nodes": 9}}
    return DrafterConfig("drafters.CTC", arguments, base.shape, "toy-llama", tokenizer_hash(base.tokenizer))


@pytest.fixture
def save(tmp_path):
    def save(config, name="drafter"):
        checkpoint.save(tmp_path / name, config.build(), config)
        return tmp_path / name

    return save


def refusal(spec, base):
    return conftest.refusal(drafter_specs.make, spec, Runner(base))


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("anpd", ("anpd", None, "")),
        ("anpd:order=4,num_draft=5", ("anpd", None, "order=4,num_draft=5")),
        ("ctc=runs/one:num_nodes=16", ("ctc", "runs/one", "num_nodes=16")),
        (r"ctc=C:\runs\one:num_nodes=16", ("ctc", r"C:\runs\one", "num_nodes=16")),
        (r"ctc=C:\runs\one", ("ctc", r"C:\runs\one", "")),
        ("ctc=runs/20:15:01/one:top_k=2,num_nodes=3", ("ctc", "runs/20:15:01/one", "top_k=2,num_nodes=3")),
        ("ctc=runs/lr=1e-3/one", ("ctc", "runs/lr=1e-3/one", "")),
    ],
)
def test_a_spec_is_a_name_a_folder_and_arguments(spec, parts):
    assert drafter_specs.split(spec) == parts


def test_a_label_is_the_spec_without_its_folder():
    assert drafter_specs.label("ctc=runs/a:b:num_nodes=16") == "ctc:num_nodes=16"
    assert drafter_specs.label("ctc=runs/a") == "ctc"
    assert drafter_specs.label("anpd:order=4") == "anpd:order=4"


def test_arguments_take_the_type_of_their_default(base):
    drafter = drafter_specs.make("anpd:order=4,num_draft=5,update=false", Runner(base))
    assert (drafter.order, drafter.num_draft, drafter.update) == (4, 5, False)
    assert drafter_specs.make("anpd:update=True", Runner(base)).update is True


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        *((spec, "is no drafter") for spec in ("", "anpd:", "anpd:order", "ctc=", "=folder", "a b", "ctc:=1")),
        ("nothing", "unknown drafter 'nothing'; known are anpd, cascade=MODEL, corpus=CORPUS, "),
        ("anpd=runs/one", "has no weights"),
        ("ctc", "needs its folder"),
        ("ctc:num_nodes=3", "needs its folder"),
        ("ctc=no/such/folder", "no drafter at"),
        ("anpd:wings=2", "anpd takes order, num_draft, update, multi_level; not 'wings=2'"),
        ("anpd:wings=", "anpd takes order, num_draft, update, multi_level; not 'wings'"),
        ("anpd:order=", "anpd takes order, num_draft, update, multi_level; order has no value"),
        ("anpd:order=2,num_draft", "num_draft has no value"),
        ("anpd:order=4,", "not ''"),
        ("none:order=4", "takes no arguments"),
        ("anpd:order=four", "order must be int, not 'four'"),
        ("anpd:order=4.5", "order must be int"),
        ("anpd:update=perhaps", "update must be bool"),
        ("anpd:order=1", "at least 2"),
    ],
)
def test_an_unknown_name_or_value_is_refused_with_the_valid_ones(base, spec, said):
    assert said in refusal(spec, base)


def test_a_merged_drafter_reads_the_folder_of_a_learned_one(base, config, save):
    folder, runner = save(config), Runner(base)
    merged = drafter_specs.make(f"merged={folder}:num_nodes=6,order=2,min_probability=0.001", runner)
    assert (merged.num_nodes, merged.learned.draft_options.num_nodes, merged.ngrams.order) == (6, 18, 2)
    assert type(merged.learned) is drafters.CTC and merged.min_probability == 0.001
    result = Session(runner, merged).run([5, 6, 7], 8)
    assert result.tokens == Session(runner, drafter_specs.make("none", runner)).run([5, 6, 7], 8).tokens
    assert "num_nodes must be at least 1" in refusal(f"merged={folder}:num_nodes=0", base)
    drawing = save(replace(config, init_args=config.init_args | {"draft": {"draws": 2}}), "drawing")
    assert "set draws of the learned drafter to 0" in refusal(f"merged={drawing}", base)
    other = save(replace(config, base=replace(base.shape, num_layers=3)), "other")
    assert "trained for toy-llama with num_layers 3" in refusal(f"merged={other}", base)


@pytest.mark.slow
def test_draft_models_draft_for_one_another_as_deep_as_the_spec_says(make_base, tmp_path):
    runner, folders = Runner(make_base(dtype=torch.float32)), []
    for seed, vocab in ((1, 40), (2, 40), (3, 40), (3, 41)):
        folders.append(f"{tmp_path}/{seed}-{vocab}")
        make_base(seed=seed, vocab=vocab, dtype=torch.float32).model.save_pretrained(folders[-1])
        runner.base.tokenizer.save_pretrained(folders[-1])
    first, second, third, other = folders
    alone = Session(runner, drafters.NoDrafter()).run([5, 6, 7], 20).tokens
    for options in ("lookup=false", "inner_ngram=2", "leniency=9,extension=3"):
        drafter = drafter_specs.make(f"cascade={first}:inner={second}+{third},inner_draft=3,{options}", runner)
        steps = Session(runner, drafter).run([5, 6, 7], 20)
        assert steps.tokens == alone
        models, lowest = [drafter], drafter
        while isinstance(lowest := lowest.inner.session.drafter, drafters.DraftModel):
            models.append(lowest)
        assert [model.num_draft for model in models] == [5, 3, 3]
        assert [model.inner.session.runner.base.name for model in models] == [first, second, third]
        assert type(lowest) is (drafters.NoDrafter if options == "lookup=false" else drafters.MaxGram)
        assert sum(step.draft_forwards for step in steps.steps) == drafter.draft_forwards > models[1].draft_forwards
    tokenizer = copy.deepcopy(runner.base.tokenizer)
    tokenizer.add_tokens(["w40"])
    tokenizer.save_pretrained(other)
    assert f"{other} has another tokenizer (41 tokens)" in refusal(f"cascade={first}:inner={other}", runner.base)


needs_int8 = pytest.mark.skipif(
    not (int8.can_multiply_int8() and packed.has_packed_products(torch.bfloat16)), reason="needs VNNI and bfloat16"
)


@pytest.mark.parametrize(
    ("dtype", "change", "kind"),
    [
        (torch.float32, packed.pack_weights, packed.PackedLinear),
        pytest.param(torch.bfloat16, packed.pack_weights, int8.Int8Linear, marks=needs_int8),
        pytest.param(torch.bfloat16, int8.quantise_layers, int8.Int8Linear, marks=needs_int8),
    ],
)
def test_a_draft_model_multiplies_as_learned_drafters_do(make_base, tmp_path, monkeypatch, dtype, change, kind):
    monkeypatch.setattr(packed, "MIN_PACKED_ELEMENTS", 1)
    base = make_base(dtype=dtype, predictable=True)
    base.model.save_pretrained(tmp_path)
    base.tokenizer.save_pretrained(tmp_path)
    beside_plain = model_drafters.model_runner(str(tmp_path), base)
    assert not any(isinstance(layer, kind) for layer in beside_plain.base.model.modules())
    base = replace(base, model=copy.deepcopy(base.model))
    assert change(base.model)
    runner = Runner(base)
    drafter = drafter_specs.make(f"draft_model={tmp_path}", runner)
    layers = [*drafter.inner.session.runner.base.model.modules()]
    assert any(isinstance(layer, kind) for layer in layers) and not any(type(layer) is nn.Linear for layer in layers)
    found, alone = (Session(runner, each).run([33, 5, 38, 6, 7], 30) for each in (drafter, drafters.NoDrafter()))
    assert found.tokens == alone.tokens and len(found.steps) < len(alone.steps) / 3


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["draft_model={}", "draft_model={}:threshold=0.1", "cascade={}:extension=2",
                                  "cascade={}:inner={},leniency=9", "cascade={0}:inner={0},lookup=false",
                                  "ouroboros={}:level=3,window=4"])  # fmt: skip
@pytest.mark.parametrize("vocab", [30, 48])
def test_a_draft_model_may_pad_its_vocabulary_to_another_size_than_the_base(make_base, tmp_path, vocab, spec):
    base = make_base(dtype=torch.float32, predictable=True)
    draft = copy.deepcopy(base.model)
    draft.resize_token_embeddings(vocab, mean_resizing=False)
    with torch.no_grad():
        draft.lm_head.weight[40:] = draft.lm_head.weight[9]  # the added rows are often the most probable
    draft.save_pretrained(tmp_path)
    base.tokenizer.save_pretrained(tmp_path)
    runner, prompt = Runner(base), [33, 5, 38, 6, 7]
    found = Session(runner, drafter_specs.make(spec.format(tmp_path, tmp_path), runner)).run(prompt, 40)
    alone = Session(runner, drafters.NoDrafter()).run(prompt, 40).tokens
    assert found.tokens == alone and max(alone) >= 30
    assert sum(step.accepted for step in found.steps) > 3


@pytest.mark.parametrize("name", ["drafter", "a:b", "lr=1e-3:x"])
def test_a_trained_drafter_comes_from_its_folder_ready_to_decode(base, config, save, name):
    drafter = drafter_specs.make(f"ctc={save(config, name)}:num_nodes=4,min_probability=0.001", Runner(base))
    assert (drafter.draft_options.num_nodes, drafter.draft_options.min_probability) == (4, 0.001)
    assert drafter.num_frames == 5
    assert drafter.frame_embedding.dtype == base.model.dtype
    result = Session(Runner(base), drafter).run([5, 6, 7], 8)
    assert result.tokens == Session(Runner(base), drafter_specs.make("none", Runner(base))).run([5, 6, 7], 8).tokens
    assert 0 < max(step.fed_candidates for step in result.steps) <= 4


LEARNED = registry.learned().items()
DECODING = [(name, key) for name, kind in LEARNED for key in sorted(recipe.draft_defaults(kind))]
FIXED = [(name, key) for name, kind in LEARNED for key in recipe.training_defaults(kind)]
OTHER = {
    **{"tree": "chain", "num_nodes": 3, "top_k": 1, "width": 1, "depth": 1, "min_probability": 0.3, "draws": 4},
    **{"draw_temperature": 9.0, "static": "tree.json"},
    **{"window": 2, ("eagle3", "window"): 7},  # at least num_unroll
}
BESIDE = {"draw_temperature": ["draws=4"]}
BESIDE |= {("eagle", "window"): ["depth=1"], ("eagle3", "window"): ["depth=1"]}  # a window exceeds the depth


@pytest.fixture
def save_any(base, tmp_path, monkeypatch):
    """Save a drafter with random weights and the files that its arguments may name; return its folder."""

    def save(name):
        kind = registry.learned()[name]
        fits = base.shape, base.name, tokenizer_hash(base.tokenizer)
        config = DrafterConfig(f"drafters.{kind.__name__}", {"draft": {"num_nodes": 16}}, *fits)
        drafter = config.build()
        for weight in drafter.parameters():
            torch.nn.init.normal_(weight, std=0.5, generator=torch.Generator().manual_seed(weight.numel()))
        checkpoint.save(tmp_path / "drafter", drafter, config)
        (tmp_path / "tree.json").write_text(json.dumps({"static": [[0], [1], [0, 1]]}))
        monkeypatch.chdir(tmp_path)
        return "drafter"

    return save


def drafted(drafter, base):
    """Return the trees that a drafter proposes while a text is decoded."""
    trees = recorded_trees(drafter)
    Session(Runner(base), drafter).run([5, 6, 7, 8], 12)
    return [(list(tree.tokens), list(tree.parents)) for tree in trees]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key"), DECODING)
def test_every_decoding_key_changes_the_draft_trees_of_the_same_weights(base, save_any, name, key):
    folder, beside = save_any(name), BESIDE.get((name, key), BESIDE.get(key, []))

    def make(*pairs):
        return drafter_specs.make(f"{name}={folder}" + (f":{','.join(pairs)}" if pairs else ""), Runner(base))

    usual, again, other = make(*beside), make(*beside), make(*beside, f"{key}={OTHER.get((name, key), OTHER.get(key))}")
    weights = load_file(f"{folder}/model.safetensors")
    assert other.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight, weights[part].to(weight)) for part, weight in other.state_dict().items())
    trees = drafted(usual, base)
    assert drafted(again, base) == trees
    assert drafted(other, base) != trees


@pytest.mark.parametrize(("name", "key"), FIXED)
def test_keys_that_only_training_reads_are_refused_at_decoding(base, save_any, name, key):
    message = refusal(f"{name}={save_any(name)}:{key}=1", base)
    assert f"{key} is fixed by training: drafter has " in message
    assert set(message.partition("decoding reads ")[2].split(", ")) == set(
        recipe.draft_defaults(registry.learned()[name])
    )


def test_a_drafter_of_another_base_tokenizer_or_kind_is_refused(base, config, save):
    for number, other in {"hidden_size": 64, "vocab_size": 41, "num_layers": 3}.items():
        message = refusal(f"ctc={save(replace(config, base=replace(config.base, **{number: other})))}", base)
        assert f"{number} {other}" in message and f"toy-llama has {getattr(base.shape, number)}" in message
    assert "tokenizer differs" in refusal(f"ctc={save(replace(config, tokenizer_hash='0' * 16))}", base)
    assert "holds a drafters.CTC, not a medusa" in refusal(f"medusa={save(config)}", base)
    assert "num_nodes must be int" in refusal(f"ctc={save(config)}:num_nodes=x", base)
    for older in (config, replace(config, init_args=config.init_args | {"draft": {"wings": 2}})):
        assert "ctc takes tree, num_nodes, top_k" in refusal(f"ctc={save(older)}:wings=2", base)
    message = refusal(f"ctc={save(config)}:top_k=0", base)
    assert "top_k must be at least 1" in message and "damaged" not in message
