"""Folders in vLLM's formats: every key, shape and number, and a forward written from the formats' documentation.

vLLM itself is run by none of these tests.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from benchmarks import recipes
from benchmarks.recipes import grouped
from data.tokenizer import tokenizer_hash
from drafters import CTC, EAGLE, EAGLE3, Block, Hydra, Medusa, checkpoint
from drafters.checkpoint import DrafterConfig
from inference.verifier.base import load_base
from tests.train import public_formats
from train.cli import run_drafters
from train.formats import vllm

D, V, LAYERS, MASK = 32, 404, 4, 402  # of the base; the tokenizer has 400 tokens
TRUNK = {"num_frames": 5, "num_layers": 2, "hidden_layers": [1, 3]}
CHAIN = {"num_nodes": 8, "tree": "chain", "top_k": V}
HEAD = {"hidden_layers": [1, 2, 3], "own_head": True, "draft_vocab_size": 50, "draft": {"depth": 4, "tree": "chain"}}
MEDUSA = {"heads": {"num_heads": 3, "num_layers": 2}, "draft": {"num_nodes": 8, "top_k": 2, "tree": "chain"}}
KINDS = {
    "medusa": (Medusa, MEDUSA),
    "eagle": (EAGLE, {"fc_bias": False, "draft": {"depth": 4, "tree": "chain"}}),
    "eagle3": (EAGLE3, HEAD),
    "eagle3, qk norms": (
        EAGLE3,
        HEAD | {"layer": {"has_qk_norm": True, "norm_before_residual": True}, "draft_vocab_size": None},
    ),
    "eagle3, the base's rows": (EAGLE3, HEAD | {"own_head": False}),
    "block": (Block, {"trunk": TRUNK, "draft": CHAIN}),
    "block, markov": (Block, {"trunk": TRUNK | {"markov_rank": 4}, "draft": CHAIN}),
    "block, slim": (Block, {"trunk": TRUNK | {"intermediate_size": 24, "num_key_heads": 1}, "draft": CHAIN}),
    "dflash": (Block, {"trunk": TRUNK | {"sample_from_anchor": False}, "draft": CHAIN}),
    "block, base's markov": (Block, {"trunk": TRUNK | {"markov_rank": 4, "markov_factors": "base"}, "draft": CHAIN}),
}


@pytest.fixture(scope="module")
def base(make_tiny):
    """A base whose sizes are no library's defaults."""
    rope = {"rope_type": "default", "rope_theta": 700.0}
    return load_base(str(make_tiny("deep", vocab_size=V, num_layers=LAYERS, rms_norm_eps=1e-3, rope_parameters=rope)))


def build(kind, init_args, base):
    """A drafter whose drafts depend on every weight, and its configuration."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drafter = recipes.build(kind, base.shape, init_args).eval().requires_grad_(False)
        for name, weight in drafter.named_parameters():
            weight += torch.randn(weight.shape) * (3.0 if "markov" in name else 0.2)
        if getattr(drafter, "draft_tokens", None) is not None:
            drafter.draft_tokens.copy_(torch.randperm(V)[: len(drafter.draft_tokens)].sort().values)
    vocabulary = tokenizer_hash(base.tokenizer)
    return drafter, DrafterConfig(
        f"drafters.{kind.__name__}", grouped(kind, init_args), base.shape, base.name, vocabulary
    )


def written(folder, drafter, config):
    """The content of config.json and the weights."""
    folder.mkdir(exist_ok=True)
    vllm.write(folder, drafter, config, MASK, torch.float32)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


# ---- keys and numbers


@pytest.mark.parametrize("name", ["block", "block, markov"])
def test_a_folder_has_what_only_the_engine_reads(name, base, tmp_path):
    """Sizes, layers and names of weights are read by the literal forward below and by `drafters import`."""
    config, weights = written(tmp_path, *build(*KINDS[name], base))
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    algorithm = {"algorithm": "dspark", "default_proposal_method": "greedy", "proposal_methods": [proposal]}
    algorithm["verifier"] = {"name_or_path": base.name, "architectures": ["LlamaForCausalLM"]}
    assert config["speculators_config"] == algorithm
    assert (config["architectures"], config["speculators_version"]) == (["DSparkDraftModel"], "0.7.0")
    assert config["markov_rank"] == (4 if "markov" in name else 1) and config["markov_head_type"] == "vanilla"
    assert config["sliding_window_non_causal"] and config["target_hidden_size"] == D
    off = "enable_confidence_head", "confidence_head_with_markov"
    assert not any(config[key] for key in off) and config["dtype"] == "float32"
    layer = config["transformer_layer_config"]
    assert (layer["max_position_embeddings"], layer["layer_types"]) == (512, ["full_attention"] * 2)
    assert not any(layer[key] for key in ("attention_bias", "attention_dropout", "tie_word_embeddings"))
    assert weights["markov_head.markov_w1.weight"].shape == (V, config["markov_rank"])
    others = [token for token in range(V) if token != MASK]
    assert torch.equal(weights["embed_tokens.weight"][others], base.base_weights.embedding[others])


# ---- what is computed


def literal_medusa(config, weights, base, ids):
    """The most probable token of each head, from the state that decided the last token."""
    state, chain = base.hidden_states(ids[None], (-1,))[0][0, -2], []
    for head in range(config["num_heads"]):
        x = state
        for number in range(config["num_hidden_layers"]):
            name = f"blocks.{head}.layers.{number}"
            x = x + F.silu(F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"]))
        chain.append((weights[f"lm_heads.{head}.weight"] @ x).argmax().item())
    return chain


def literal(name, config, weights, base, ids):
    """A chain, from the folder and the base alone."""
    if name == "medusa":
        return literal_medusa(config, weights, base, ids)
    if name == "eagle":
        return public_formats.eagle(config, weights, base.model, ids, 4)[1]
    layers = config["transformer_layer_config"]
    if "eagle3" in name:
        fused, normed = config["eagle_aux_hidden_state_layer_ids"], config["norm_before_residual"]
        return public_formats.eagle3(layers, weights, base.model, fused, ids, 4, normed)[1]
    slots, fused = (config["block_size"], config["mask_token_id"]), config["aux_hidden_state_layer_ids"]
    return public_formats.dflash(layers, weights, base.model, fused, ids, *slots, config["sample_from_anchor"])[1]


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_the_format_as_documented_gives_the_chain_of_our_own_drafter_and_is_imported_again(name, base, call, tmp_path):
    drafter, config = build(*KINDS[name], base)
    drafter.attach_base_weights(base.base_weights)
    content, drafts = written(tmp_path / "vllm", drafter, config), set()
    for seed in range(4):
        ids = torch.randint(3, 400, (24,), generator=torch.Generator().manual_seed(seed))
        hidden = base.hidden_states(ids[None], drafter.required_outputs.hidden_layers)[0][0]
        (tree,) = drafter.draft_at(hidden, ids, torch.tensor([23]), base.base_weights)
        assert list(tree.tokens) == literal(name, *content, base, ids)
        assert list(tree.parents) == list(range(-1, len(tree.tokens) - 1))
        drafts.add(tuple(tree.tokens))
    assert len(drafts) > 1
    imported = call(run_drafters, "import", tmp_path / "vllm", tmp_path / "out", "--base", base.name)
    if name == "medusa":
        assert "its architecture is MedusaModel" in imported.one_line_error("drafters")
        return
    again, read = checkpoint.load(tmp_path / "out")
    own_width = read.base.intermediate_size  # that of its layers
    assert read.base == replace(config.base, intermediate_size=own_width)
    assert again.required_outputs == drafter.required_outputs
    assert read.init_args.get("draft") == ({"depth": 4} if "eagle3" in name else None)
    expected = drafter.state_dict()
    if name == "eagle3, the base's rows":  # which are written as a head of its own
        expected = expected | {"lm_head.weight": base.base_weights.head[drafter.draft_tokens]}
    if name != "block, base's markov":  # whose bias is written folded with the base's weights
        torch.testing.assert_close(dict(again.state_dict()), dict(expected), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["block", "eagle3"])
@torch.no_grad()
def test_layers_are_fused_in_the_order_in_which_vllm_hands_them_over(name, base, tmp_path):
    kind, arguments = KINDS[name]
    layers = [3, 1, 2] if kind is EAGLE3 else [3, 1]
    others = {"hidden_layers": layers} if kind is EAGLE3 else {"trunk": TRUNK | {"hidden_layers": layers}}
    drafter, config = build(kind, arguments | others, base)
    drafter.attach_base_weights(base.base_weights)
    content, weights = written(tmp_path, drafter, config)
    key = "eagle_aux_hidden_state_layer_ids" if kind is EAGLE3 else "aux_hidden_state_layer_ids"
    assert content[key] == sorted(layers)
    ids = torch.randint(3, 400, (24,), generator=torch.Generator().manual_seed(0))
    hidden = base.hidden_states(ids[None], layers)[0][0]
    (tree,) = drafter.draft_at(hidden, ids, torch.tensor([23]), base.base_weights)
    assert list(tree.tokens) == literal(name, content, weights, base, ids)


def test_eagle3_of_another_number_of_layers_names_it_where_vllm_reads_it(base, tmp_path):
    two, _ = written(tmp_path, *build(EAGLE3, HEAD | {"hidden_layers": [1, 3]}, base))
    assert two["transformer_layer_config"]["num_aux_hidden_states"] == 2


def test_a_fusion_of_low_rank_is_written_as_one_matrix(base, tmp_path):
    drafter, config = build(Block, {"trunk": TRUNK | {"fusion_rank": 6}, "draft": CHAIN}, base)
    weight = written(tmp_path, drafter, config)[1]["fc.weight"]
    states = torch.randn(5, weight.shape[1])
    torch.testing.assert_close(states @ weight.T, drafter.trunk.fc(states), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("factors", ["own", "base"])
@torch.no_grad()
def test_a_ctc_drafter_is_written_as_the_chain_of_its_frames_without_their_blank(factors, base, call, tmp_path, capsys):
    trunk = TRUNK | {"root_everywhere": False, "frames_differ": False, "markov_rank": 4, "markov_factors": factors}
    drafter, config = build(CTC, {"trunk": trunk, "loss": {"num_labels": 5}}, base)
    drafter.blank_bias += 1e6  # every frame is blank
    content, weights = written(tmp_path / "vllm", drafter, config), base.base_weights
    assert capsys.readouterr().out == f"{vllm.BLANK_LOST}\n" and content[0]["speculators_model_type"] == "dspark"
    bias = drafter.markov.folded(weights)
    for seed in range(4):
        ids = torch.randint(3, 400, (24,), generator=torch.Generator().manual_seed(seed))
        hidden = base.hidden_states(ids[None], drafter.required_outputs.hidden_layers)[0]
        frames = drafter(hidden, drafter.roots(ids[None], torch.tensor([[23]])), weights.embedding)[0, 0]
        token, chain = ids[-1], []
        for logits in drafter.logits(frames, weights):
            biased = logits + bias(token)
            assert biased.argmax() == V
            token = biased[:-1].argmax()
            chain.append(token.item())
        assert chain == literal("dspark", *content, base, ids)


def test_a_draft_vocabulary_of_all_tokens_is_exported_in_their_order(base, tmp_path):
    """vLLM reads no map of ids where the draft vocabulary is as large as the base's."""
    drafter, config = build(*KINDS["eagle3, qk norms"], base)
    permuted = recipes.build(EAGLE3, base.shape, config.init_args | {"draft_vocab_size": V})
    tokens = torch.randperm(V)
    head = drafter.lm_head.weight[tokens]
    permuted.load_state_dict(drafter.state_dict() | {"draft_tokens": tokens, "lm_head.weight": head})
    vllm.write(tmp_path, permuted, config, None, torch.float32)
    weights = load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], drafter.lm_head.weight) and not {"d2t", "t2d"} & weights.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "block, markov"])
def test_an_export_is_rounded_to_bfloat16_once(name, base, call, tmp_path):
    drafter, config = build(*KINDS[name], base)
    (tmp_path / "public").mkdir()
    vllm.write(tmp_path / "public", drafter, config, MASK, torch.bfloat16)
    weights = load_file(tmp_path / "public" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} <= {torch.bfloat16, torch.int64, torch.bool}
    assert json.loads((tmp_path / "public" / "config.json").read_text())["dtype"] == "bfloat16"
    assert call(run_drafters, "import", tmp_path / "public", tmp_path / "out", "--base", base.name).code == 0
    again, expected = load_file(tmp_path / "out" / "model.safetensors"), drafter.bfloat16().state_dict()
    assert again.keys() == expected.keys()
    assert all(torch.equal(weight, expected[key]) for key, weight in again.items())


@pytest.mark.slow
def test_the_row_of_the_mask_is_not_rounded_by_the_bases_dtype(make_tiny, tmp_path):
    base = load_base(str(make_tiny("stored-in-bfloat16", vocab_size=V, num_layers=LAYERS)), "bfloat16")
    base.model.save_pretrained(base.name)
    drafter, config = build(*KINDS["block"], base)
    vllm.write(tmp_path, drafter, config, MASK, torch.float32)
    embedding = load_file(tmp_path / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(embedding[MASK], drafter.frame_embedding[0])
    assert not torch.equal(embedding[MASK], embedding[MASK].bfloat16().float())
    embedding[MASK] = base.base_weights.embedding[MASK].float()
    assert torch.equal(embedding, base.base_weights.embedding.float())


# ---- cards and refusals


ONE = {"hidden_layers": [1]}
CTC_FORM = ONE | {"root_everywhere": False, "frames_differ": False}


@pytest.mark.parametrize(
    ("kind", "init_args", "message"),
    [
        (Hydra, {}, "Hydra has no vllm format"),
        (Medusa, {"own_heads": False}, "own_heads: true"),
        (EAGLE, {}, "fc_bias: false"),
        (CTC, ONE | {"root_everywhere": False}, "no frames_differ: train the drafter with frames_differ: false"),
        (CTC, ONE | {"frames_differ": False}, "no root_everywhere"),
        (CTC, CTC_FORM | {"lookup": True, "copy": True}, "no lookup"),
        (CTC, CTC_FORM | {"window": 9}, "no window"),
        (EAGLE3, {"hidden_layers": [1, 2, -1]}, r"not hidden_layers \[1, 2, -1\]"),
        (Block, ONE | {"tokens_in_context": True}, "no tokens_in_context"),
        (Block, ONE | {"lookup": True}, "no lookup"),
        (Block, ONE | {"llama_layer": True}, "no llama_layer"),
        (Block, ONE | {"draft_vocab_size": 50}, "draft_vocab_size: null"),
        (Block, ONE | {"window": 64}, "no window"),
        (Block, {"hidden_layers": [1, -1]}, r"layers 1 to 3 of this base, not hidden_layers \[1, -1\]"),
        (Block, {"hidden_layers": [4]}, "layers 1 to 3"),
        (Block, {"hidden_layers": [2, 2]}, r"hand each layer over once, and hidden_layers are \[2, 2\]"),
    ],
)
def test_a_drafter_that_vllm_cannot_run_is_refused(kind, init_args, message, base, tmp_path):
    with pytest.raises(ValueError, match=message):
        vllm.write(tmp_path / "a", *build(kind, init_args, base), MASK, torch.bfloat16)
    assert not (tmp_path / "a").exists()


def test_no_token_of_texts_is_the_mask_token(call, base, tmp_path):
    def refusal(folder, *options):
        words = "export", folder, tmp_path / "a", "--format", "vllm", *options
        return call(run_drafters, *words).one_line_error("drafters")

    (tmp_path / "block").mkdir()
    checkpoint.save(tmp_path / "block", *build(*KINDS["block"], base))
    assert "--mask_token_id is missing" in refusal(tmp_path / "block")
    for token in (base.tokenizer.eos_token_id, 50, V, -1):
        said = refusal(tmp_path / "block", "--mask-token-id", token)
        assert f"--mask_token_id {token} is a token of texts" in said
    assert not (tmp_path / "a").exists()
