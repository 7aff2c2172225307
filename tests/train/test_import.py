"""Public checkpoints made by script, one in each format: imported drafters compute what the formats say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafters import checkpoint
from inference.verifier.base import load_base
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from tests.train import public_formats
from train.cli import run_drafters
from train.formats.block import read_block
from train.formats.public import PublicCheckpoint

D, V, LAYERS, HEADS, GROUPS, HEAD_DIM, WIDTH, FRAMES, RANK, MASK = 32, 404, 5, 4, 2, 8, 48, 4, 3, 402
LAYER = {  # its sizes are neither the base's nor any library's defaults
    "hidden_size": D,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD_DIM,
    "vocab_size": V,
    "rms_norm_eps": 1e-4,
    "rope_theta": 300.0,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def base(make_tiny):
    rope = {"rope_type": "default", "rope_theta": 700.0}
    return load_base(str(make_tiny("import", vocab_size=V, num_layers=LAYERS, rope_parameters=rope)))


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 400, (24,), generator=torch.Generator().manual_seed(0))


def random_weights(shapes):
    """Weights large enough that drafts depend on every one of them."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: 1 + 0.3 * torch.randn(shape, generator=generator)
        if name.endswith("norm.weight")
        else 2 * torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }


def layer_shapes(prefix, num_inputs=1, qk_norm=False):
    sizes = {"q": HEADS, "k": GROUPS, "v": GROUPS}
    shapes = {f"{prefix}self_attn.{n}_proj.weight": (h * HEAD_DIM, num_inputs * D) for n, h in sizes.items()}
    shapes |= {f"{prefix}self_attn.o_proj.weight": (D, HEADS * HEAD_DIM)}
    shapes |= {f"{prefix}self_attn.{n}_norm.weight": (HEAD_DIM,) for n in "qk" if qk_norm}
    shapes |= {f"{prefix}mlp.{n}_proj.weight": (WIDTH, D) for n in ("gate", "up")}
    return shapes | {f"{prefix}mlp.down_proj.weight": (D, WIDTH), f"{prefix}post_attention_layernorm.weight": (D,)}


def draft_tokens():
    """A draft vocabulary of 100 of the base's tokens, as d2t and t2d."""
    tokens = torch.randperm(V, generator=torch.Generator().manual_seed(2))[:100].sort().values
    return {"d2t": tokens - torch.arange(100), "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, tokens, True)}


def eagle3_weights(prefix, num_fused=3, qk_norm=False, num_tokens=100):
    shapes = {"fc.weight": (D, num_fused * D), "norm.weight": (D,), "lm_head.weight": (num_tokens, D)}
    shapes |= {f"{prefix}{norm}.weight": (D,) for norm in ("input_layernorm", "hidden_norm")}
    return random_weights(shapes | layer_shapes(prefix, 2, qk_norm))


def named_base(base):
    return {"verifier": {"name_or_path": base.name}, "proposal_methods": [{"speculative_tokens": 5}]}


def eagle3_of_speculators(base):
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "speculators_config": named_base(base),
        "transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 1, **LAYER},
        "draft_vocab_size": 100,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    }
    embedding = {"embed_tokens.weight": base.base_weights.embedding.clone()}
    return config, eagle3_weights("layers.0.") | draft_tokens() | embedding, [1, 3, 4]


def eagle3_of_specforge(base):
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": V,
        "num_hidden_layers": 1,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "use_aux_hidden_state": True},
        **LAYER,
    }
    whole = {"d2t": torch.zeros(V, dtype=torch.long), "t2d": torch.ones(V, dtype=torch.bool)}
    return config, eagle3_weights("midlayer.", num_tokens=V) | whole, [1, 3, 4]


def eagle3_of_eagle(base):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": 100}
    config |= {"num_hidden_layers": 1} | LAYER
    return config, eagle3_weights("midlayer.") | draft_tokens(), [2, 2, 2]  # of five layers: 2, 5 // 2 and 5 - 3


def eagle3_of_deepspec(base):
    config = {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "target_layer_ids": [0, 1, 2, 3],
        "target_model_name_or_path": base.name,
        **LAYER,
    }
    weights = eagle3_weights("layers.0.", num_fused=4, qk_norm=True, num_tokens=V)
    return config, weights | {"embed_tokens.weight": base.base_weights.embedding.clone()}, [1, 2, 3, 4]


def block_weights(markov=False):
    shapes = {"fc.weight": (D, 2 * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for prefix in ("layers.0.", "layers.1."):
        shapes |= layer_shapes(prefix, qk_norm=True) | {f"{prefix}input_layernorm.weight": (D,)}
    if markov:
        shapes |= {f"markov_head.markov_w{i}.weight": (V, RANK) for i in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, D + RANK), "confidence_head.proj.bias": (1,)}
    return random_weights(shapes)


def copies(base, mask_row=None):
    """The base's embedding, with another row of the mask if it is given, and its LM head."""
    embedding = base.base_weights.embedding.clone()
    if mask_row is not None:
        embedding[MASK] = mask_row
    return {"embed_tokens.weight": embedding, "lm_head.weight": base.base_weights.head.clone()}


def of_speculators(base, kind, **others):
    config = {
        "speculators_model_type": kind,
        "architectures": ["DFlashDraftModel"],
        "speculators_config": named_base(base),
        "transformer_layer_config": {"model_type": "qwen3", "num_hidden_layers": 2, **LAYER},
        "draft_vocab_size": V,
        "block_size": FRAMES,
        "aux_hidden_state_layer_ids": [4, 1],
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
    }
    return config | others


def dflash_of_speculators(base):
    return of_speculators(base, "dflash"), block_weights() | copies(base), [4, 1]


def dspark_of_speculators(base):
    config = of_speculators(base, "dspark", markov_rank=RANK, markov_head_type="vanilla", sample_from_anchor=True)
    mask_row = torch.linspace(-1, 1, D)
    return config, block_weights(markov=True) | copies(base, mask_row), [4, 1]


def dflash_of_specforge(base):
    part = {"mask_token_id": MASK, "target_layer_ids": [3, 0]}
    config = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": FRAMES, "dflash_config": part}
    return config | {"num_hidden_layers": 2, "rope_scaling": None} | LAYER, block_weights(), [4, 1]


def causal_dflash_of_specforge(base):
    config, weights, layers = dflash_of_specforge(base)
    return config | {"dflash_config": config["dflash_config"] | {"causal": True}}, weights, layers


def dspark_of_specforge(base):
    part = {"mask_token_id": MASK, "target_layer_ids": [3, 0], "projector_type": "dspark", "markov_rank": RANK}
    config = {"architectures": ["DSparkDraftModel"], "model_type": "qwen3", "block_size": FRAMES, "dflash_config": part}
    return config | {"num_hidden_layers": 2} | LAYER, block_weights(markov=True), [4, 1]


def dspark_of_deepspec(base):
    own = {"block_size": FRAMES, "mask_token_id": MASK, "target_layer_ids": [3, 0], "markov_rank": RANK}
    config = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 2, **own, **LAYER}
    return config, block_weights(markov=True) | copies(base), [4, 1]


EAGLE3_FORMATS = [eagle3_of_speculators, eagle3_of_specforge, eagle3_of_eagle, eagle3_of_deepspec]
BLOCK_FORMATS = [
    dflash_of_speculators,
    dspark_of_speculators,
    dflash_of_specforge,
    causal_dflash_of_specforge,
    dspark_of_specforge,
    dspark_of_deepspec,
]


def write(folder, config, weights):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def imported(call, base, tmp_path):
    """Imports a checkpoint by the command, and loads the folder that it wrote."""

    def run(config, weights, **draft):
        folder = write(tmp_path / "public", config, weights)
        done = call(run_drafters, "import", folder, tmp_path / "out", "--base", base.name).succeeded()
        read = checkpoint.read_config(tmp_path / "out")
        options = {"draft": read.init_args.get("draft", {}) | {"tree": "chain"} | draft}
        drafter, _ = checkpoint.load(tmp_path / "out", config=replace(read, init_args=read.init_args | options))
        drafter.attach_base_weights(base.base_weights)
        return drafter, done.out

    return run


def check_chains(drafter, base, ids, literal):
    """The drafts below several roots are those of the literal forward, and differ."""
    hidden, roots = base.hidden_states(ids[None], drafter.required_outputs.hidden_layers)[0][0], [7, 15, len(ids) - 1]
    trees = drafter.draft_at(hidden, ids, torch.tensor(roots), base.base_weights)
    assert [list(tree.tokens) for tree in trees] == [literal(ids[: root + 1])[1] for root in roots]
    assert len({token for tree in trees for token in tree.tokens}) > 3
    return hidden


@pytest.mark.slow
@pytest.mark.parametrize("make", EAGLE3_FORMATS, ids=lambda make: make.__name__)
@torch.no_grad()
def test_an_imported_eagle3_computes_what_its_format_says(make, base, ids, imported):
    config, weights, layers = make(base)
    drafter, _ = imported(config, weights, depth=5)
    normed = config.get("norm_before_residual", False)

    def literal(ids):
        return public_formats.eagle3(LAYER, weights, base.model, layers, ids, 5, normed)

    hidden, (logits, _) = check_chains(drafter, base, ids, literal), literal(ids)
    states = drafter(drafter.project_hidden(hidden[None, :-1]), ids[None, 1:], base.base_weights)
    torch.testing.assert_close(drafter.draft_logits(states, base.base_weights)[0], logits, rtol=1e-5, atol=1e-5)
    whole, drafted = drafter.logits(states, base.base_weights)[0], weights.get("t2d", torch.ones(V, dtype=torch.bool))
    torch.testing.assert_close(whole[:, drafted], logits, rtol=1e-5, atol=1e-5)
    assert torch.isneginf(whole[:, ~drafted]).all()


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.slow
@pytest.mark.parametrize("is_legacy", [True, False])
@torch.no_grad()
def test_llama_3_s_rotary_scaling_is_that_of_transformers_and_is_exported_again(
    is_legacy, base, ids, imported, call, tmp_path
):
    config, weights, layers = eagle3_of_specforge(base)
    scaled = {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    newer = {"rope_parameters": {"rope_type": "llama3", "rope_theta": LAYER["rope_theta"], **LLAMA3}}
    drafter, _ = imported(config | (scaled if is_legacy else newer), weights, depth=5)

    def literal(ids, settings=LAYER | scaled):
        return public_formats.eagle3(settings, weights, base.model, layers, ids, 5)

    check_chains(drafter, base, ids, literal)
    states = drafter(
        drafter.project_hidden(base.hidden_states(ids[None, :-1], layers)[0]), ids[None, 1:], base.base_weights
    )
    logits = drafter.draft_logits(states, base.base_weights)[0]
    torch.testing.assert_close(logits, literal(ids)[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits, literal(ids, LAYER)[0], atol=0.1)
    assert call(run_drafters, "export", tmp_path / "out", tmp_path / "vllm", "--format", "vllm").code == 0
    written = json.loads((tmp_path / "vllm" / "config.json").read_text())["transformer_layer_config"]
    assert written["rope_parameters"] == newer["rope_parameters"]
    assert call(run_drafters, "import", tmp_path / "vllm", tmp_path / "again", "--base", base.name).code == 0
    assert checkpoint.read_config(tmp_path / "again").base == checkpoint.read_config(tmp_path / "out").base


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_an_imported_eagle_computes_what_its_format_says(bias, base, ids, imported):
    shapes = layer_shapes("layers.0.") | {"fc.weight": (D, 2 * D)} | ({"fc.bias": (D,)} if bias else {})
    weights = random_weights(shapes)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, **LAYER}
    drafter, _ = imported(config, weights, depth=5)

    def literal(ids):
        return public_formats.eagle(LAYER, weights, base.model, ids, 5)

    hidden, (features, _) = check_chains(drafter, base, ids, literal), literal(ids)
    states = drafter(drafter.project_hidden(hidden[None, :-1]), ids[None, 1:], base.base_weights)[0]
    torch.testing.assert_close(states, features, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("make", BLOCK_FORMATS, ids=lambda make: make.__name__)
@torch.no_grad()
def test_an_imported_block_drafter_computes_what_its_format_says(make, base, ids, imported):
    config, weights, layers = make(base)
    drafter, said = imported(config, weights, top_k=V)
    is_dspark = "dspark" in make.__name__
    settings = LAYER | {"num_hidden_layers": 2}

    def literal(ids):
        causal = "causal" in make.__name__
        return public_formats.dflash(settings, weights, base.model, layers, ids, FRAMES, MASK, is_dspark, causal)

    hidden, (logits, draft) = check_chains(drafter, base, ids, literal), literal(ids)
    roots = drafter.roots(ids[None], torch.tensor([[len(ids) - 1]]))
    frames = drafter(hidden[None], roots, base.base_weights.embedding)[0, 0]
    torch.testing.assert_close(frames @ base.base_weights.head.T, logits, rtol=1e-5, atol=1e-5)
    assert len(draft) == (FRAMES if is_dspark else FRAMES - 1)
    assert ("left out: the confidence head" in said) == is_dspark


# ---- refusals


def without(weights, name):
    return {key: weight for key, weight in weights.items() if key != name}


def of_layers(**changes):
    """EAGLE-3 of speculators whose layer has other settings."""

    def make(base):
        config, weights, layers = eagle3_of_speculators(base)
        config["transformer_layer_config"] |= changes
        return config, weights, layers

    return make


def with_weights(make, change):
    def changed(base):
        config, weights, layers = make(base)
        return config, change(weights), layers

    return changed


def scaled(**changes):
    return of_layers(rope_scaling={"rope_type": "llama3", **LLAMA3, **changes})


def eagle3_with(change):
    return with_weights(eagle3_of_speculators, change)


def own_head(weights):
    return weights | {"lm_head.weight": weights["lm_head.weight"] + 1}


REFUSED = [
    (of_layers(attention_bias=True), {}, "biases"),
    (of_layers(hidden_act="gelu"), {}, "activation is gelu"),
    (of_layers(rope_scaling={"rope_type": "linear", "factor": 2.0}), {}, "rotary positions"),
    (scaled(low_freq_factor=4.0), {}, "low_freq_factor 4.0"),
    (of_layers(rope_parameters={"rope_type": "default", "rope_theta": -1.0}), {}, "rope_theta of the base is -1.0"),
    (of_layers(layer_types=["sliding_attention"], model_type="qwen3"), {}, "sliding window"),
    (of_layers(num_hidden_layers=2), {}, "2 layers"),
    (of_layers(vocab_size=500), {}, "vocab_size is 500, but the base has 404"),
    (of_layers(num_key_value_heads=3), {}, "4 heads cannot share 3"),
    (of_layers(model_type="gemma3"), {}, "layers are those of gemma3"),
    (of_layers(intermediate_size=49), {}, "do not fit its config.json"),
    (of_layers(num_attention_heads=10**8), {}, "num_attention_heads is 100000000"),
    (eagle3_of_speculators, {"norm_before_fc": True}, "EAGLE-3 here has no norm_before_fc"),
    (eagle3_of_speculators, {"norm_before_residual": None}, "leaves out norm_before_residual"),
    (eagle3_of_speculators, {"target_hidden_size": 64}, "target_hidden_size is 64"),
    (eagle3_of_speculators, {"draft_vocab_size": 101}, "d2t is (100,)"),
    (eagle3_of_speculators, {"eagle_aux_hidden_state_layer_ids": [1, 3, LAYERS]}, "the base's last layer (5)"),
    (eagle3_of_speculators, {"speculators_model_type": "peagle"}, "peagle of speculators is not read"),
    (
        eagle3_of_speculators,
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 10**9}]}},
        "depth must be at most 1000",
    ),
    (eagle3_with(lambda weights: weights | {"fc.bias": torch.zeros(D)}), {}, "weights such as fc.bias"),
    (eagle3_with(lambda weights: without(weights, "norm.weight")), {}, "no weights norm.weight"),
    (eagle3_with(lambda weights: without(weights, "lm_head.weight")), {}, "no weights lm_head.weight"),
    (eagle3_with(lambda weights: weights | {"d2t": weights["d2t"] + V}), {}, "outside the vocabulary"),
    (eagle3_with(lambda weights: weights | {"t2d": ~weights["t2d"]}), {}, "d2t and t2d name different tokens"),
    (eagle3_with(lambda weights: weights | {"embed_tokens.weight": torch.zeros(V, D)}), {}, "its embed_tokens.weight"),
    (with_weights(dspark_of_deepspec, own_head), {}, "its lm_head.weight differs from the base's"),
    (dspark_of_deepspec, {"markov_head_type": "gated"}, "Markov head is gated"),
    (dspark_of_speculators, {"sample_from_anchor": None}, "leaves out sample_from_anchor"),
    (dflash_of_speculators, {"draft_vocab_size": 100}, "the whole vocabulary"),
    (dflash_of_speculators, {"mask_token_id": V}, "no mask_token_id of the vocabulary"),
    (dflash_of_speculators, {"aux_hidden_state_layer_ids": [9]}, "reads the layers [9]"),
    (dspark_of_specforge, {"dflash_config": {"projector_type": "domino", "mask_token_id": 1}}, "no domino head"),
    (dflash_of_specforge, {"dflash_config": {"use_swa": True, "swa_window_size": 8}}, "sliding window (use_swa)"),
    (dflash_of_specforge, {"dflash_config": {"attention_value_scale": 0.7}}, "attention_value_scale: 0.7"),
    (dflash_of_specforge, {"add_swa_attention_sink_bias": True}, "its attention has sinks"),
    (dflash_of_specforge, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "layer_types"),
]


@pytest.mark.parametrize(("make", "change", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_computes_something_else_or_does_not_fit_is_refused(make, change, message, base, call, tmp_path):
    config, weights, _ = make(base)
    folder = write(tmp_path / "public", config | change, weights)
    error = call(run_drafters, "import", folder, tmp_path / "out", "--base", base.name).one_line_error("drafters")
    assert message in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, False),
        ({"dflash_config": {"causal": True}}, True),
        ({"is_causal": True}, True),
        ({"is_causal": False, "dflash_config": {"causal": True}}, False),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, False),  # from the third layer on
    ],
)
def test_whether_a_block_is_causal_is_read_as_vllm_reads_it(change, expected, base):
    config, weights, _ = dflash_of_specforge(base)
    change = change | {"dflash_config": config["dflash_config"] | change.get("dflash_config", {})}
    source = PublicCheckpoint(Path("public"), config | change, weights)
    public = read_block(source, base.shape, base.base_weights, is_dspark=False)
    assert public.init_args["trunk"]["causal"] == expected


@pytest.mark.slow
def test_damaged_and_hostile_folders_end_in_one_line(base, call, tmp_path):
    config, weights, _ = eagle3_of_specforge(base)
    folder = write(tmp_path / "public", config, weights)
    file, settings = folder / "model.safetensors", folder / "config.json"

    def error(*more):
        line = call(run_drafters, "import", folder, tmp_path / "out", *more).one_line_error("drafters")
        assert not (tmp_path / "out").exists()
        return line

    assert "--base is missing" in error()
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert "model.safetensors: " in error("--base", base.name)
    file.rename(folder / "pytorch_model.bin")
    assert "pickled weights (.bin, .pt) can run code and are not read" in error("--base", base.name)
    file.write_bytes(whole)
    for text, message in (
        ("[]", "is not an object"),
        ('{"class_path": "drafters.CTC"}', "a drafter of this project already"),
        ('{"speculators_model_type": ["eagle3"]}', "of speculators is not read"),
        ('{"speculators_model_type": "eagle3", "transformer_layer_config": 7}', "config.json"),
    ):
        settings.write_text(text)
        assert message in error("--base", base.name), text
    assert "download the drafter first" in call(
        run_drafters, "import", tmp_path / "none", tmp_path / "out"
    ).one_line_error("drafters")


@pytest.mark.slow
def test_an_imported_drafter_drafts_from_its_vocabulary_and_decodes_without_loss(base, ids, call, tmp_path):
    """With its dynamic tree, in which tokens outside the draft vocabulary have no probability."""
    config, weights, _ = eagle3_of_speculators(base)
    folder = write(tmp_path / "public", config, weights)
    assert call(run_drafters, "import", folder, tmp_path / "out").code == 0  # its config.json names the base
    drafter, _ = checkpoint.load(tmp_path / "out")
    drafter.attach_base_weights(base.base_weights)
    drafted, observe = set(), drafter.observe
    drafter.observe = lambda step: drafted.update(step.tree.tokens) or observe(step)
    text = Session(Runner(base), drafter).run(ids.tolist(), 24).tokens
    assert text == base.greedy(ids[None], torch.ones_like(ids)[None], 24)[0].tolist()
    assert drafted and weights["t2d"][sorted(drafted)].all()
