"""Folders in vLLM's formats: every key, shape and number, and a forward written from the formats' documentation.

vLLM itself is run by none of these tests.
"""

import json
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn import functional as F

from drafters import EAGLE, EAGLE3, Block, Hydra, Medusa, recipe
from drafters.checkpoint import DrafterConfig
from inference.verifier.base import load_base, tokenizer_hash
from train.cli import commands, lightning_command
from train.export import vllm

ARGUMENTS = {"num_anchors": 16, "num_nodes": 8}
MEDUSA = ARGUMENTS | {"num_heads": 3, "num_layers": 2, "top_k": 2}
BLOCK = ARGUMENTS | {"num_frames": 5, "num_layers": 2, "hidden_layers": [3, 1], "tree": "chain", "top_k": 400}
RECIPES = {
    "medusa": {"class_path": "drafters.Medusa", "init_args": MEDUSA},
    "block": {"class_path": "drafters.Block", "init_args": BLOCK},
    "block, markov": {"class_path": "drafters.Block", "init_args": BLOCK | {"markov_rank": 4}},
}
each_block = pytest.mark.parametrize("kind", ["block", "block, markov"])
D, V, WIDTH, LAYERS = 32, 404, 64, 4  # of the base; the tokenizer has 400 tokens


@pytest.fixture(scope="module")
def base(make_tiny):
    """A base whose sizes are no library's defaults."""
    rope = {"rope_type": "default", "rope_theta": 700.0}
    folder = make_tiny("deep", vocab_size=V, num_layers=LAYERS, rms_norm_eps=1e-3, rope_parameters=rope)
    return load_base(str(folder))


@pytest.fixture(scope="module")
def mask(base):
    """A token that the tokenizer does not have."""
    assert len(base.tokenizer) == 400
    return 402


@pytest.fixture(scope="module")
def exported(base, mask, write_recipe, tmp_path_factory):
    """Trains each kind of drafter once for two steps and exports it for vLLM."""
    done = {}

    def export(kind):
        if kind not in done:
            runs = tmp_path_factory.mktemp("vllm")
            config = write_recipe(runs, max_steps=2, val_check_interval=2)
            values = yaml.safe_load(config.read_text())
            values["model"] |= {"base": base.name, "drafter": RECIPES[kind]}
            values["trainer"]["callbacks"][0]["init_args"]["every_n_train_steps"] = 2
            config.write_text(yaml.safe_dump(values))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("sys.argv", ["pytest"])
                lightning_command.main(["fit", "--config", str(config)])
                ckpt, folder = runs / "checkpoints" / "last.ckpt", runs / "vllm"
                arguments = ["--format", "vllm", "--dtype", "float32"]
                arguments += ["--mask-token-id", str(mask)] if "block" in kind else []
                commands.main(["export", str(ckpt), str(folder), *arguments])
            saved = torch.load(ckpt, weights_only=True)["state_dict"]
            done[kind] = SimpleNamespace(
                ckpt=ckpt,
                folder=folder,
                config=json.loads((folder / "config.json").read_text()),
                weights=load_file(folder / "model.safetensors"),
                trained={name.removeprefix("drafter."): weight for name, weight in saved.items()},
            )
        return done[kind]

    return export


def shapes(weights):
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def config_of(kind, base, **init_args):
    return DrafterConfig(f"drafters.{kind}", init_args, base.shape, base.name, tokenizer_hash(base.tokenizer))


# ---- Medusa


@pytest.mark.slow
def test_a_medusa_folder_has_the_keys_shapes_and_numbers_that_vllm_reads(exported):
    made = exported("medusa")
    assert made.config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": D,
        "vocab_size": V,
        "truncated_vocab_size": V,
        "num_heads": 3,
        "num_hidden_layers": 2,
        "medusa_fc_bias": True,
        "original_lm_head": False,
        "dtype": "float32",
    }
    expected = {f"blocks.{i}.layers.{j}.weight": (D, D) for i in range(3) for j in range(2)}
    expected |= {f"blocks.{i}.layers.{j}.bias": (D,) for i in range(3) for j in range(2)}
    expected |= {f"lm_heads.{i}.weight": (V, D) for i in range(3)}
    assert shapes(made.weights) == expected


def test_an_exported_medusa_reloads_with_equal_weights_and_vllms_forward_gives_its_chain(exported, base):
    made = exported("medusa")
    config = made.config
    drafter = recipe.build(
        Medusa,
        base.shape,
        {"num_heads": config["num_heads"], "num_layers": config["num_hidden_layers"], "tree": "chain"},
    )
    drafter.load_state_dict(made.weights)
    assert made.weights.keys() == made.trained.keys()
    assert all(torch.equal(weight, made.trained[name]) for name, weight in made.weights.items())

    ids = torch.randint(3, 400, (20,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = base.hidden_states(ids[None], (-1,))[0][0]
        chain, state = [], states[18]  # it decided the root, token 19
        for head in range(config["num_heads"]):
            x = state
            for layer in range(config["num_hidden_layers"]):
                prefix = f"blocks.{head}.layers.{layer}"
                x = x + F.silu(F.linear(x, made.weights[f"{prefix}.weight"], made.weights[f"{prefix}.bias"]))
            chain.append((made.weights[f"lm_heads.{head}.weight"] @ x).argmax().item())
        (tree,) = drafter.draft_at(states, ids, torch.tensor([19]), base.base_weights)
    assert list(tree.tokens) == chain and list(tree.parents) == [-1, 0, 1]


# ---- Block


@pytest.mark.slow
@each_block
def test_a_block_folder_has_the_keys_shapes_and_numbers_of_dspark(exported, base, mask, kind):
    made = exported(kind)
    rank = 4 if "markov" in kind else 1
    assert made.config == {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": base.name, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": D,
            "intermediate_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "vocab_size": V,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-3,
            "rope_theta": 700.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "layer_types": ["full_attention", "full_attention"],
        },
        "draft_vocab_size": V,
        "target_hidden_size": D,
        "block_size": 5,
        "aux_hidden_state_layer_ids": [3, 1],
        "mask_token_id": mask,
        "sample_from_anchor": True,
        "sliding_window_non_causal": True,
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
        "dtype": "float32",
    }
    expected = {"fc.weight": (D, 2 * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    expected |= {"embed_tokens.weight": (V, D)}
    expected |= {"markov_head.markov_w1.weight": (V, rank), "markov_head.markov_w2.weight": (V, rank)}
    for layer in ("layers.0", "layers.1"):
        expected |= {f"{layer}.{norm}.weight": (D,) for norm in ("input_layernorm", "post_attention_layernorm")}
        expected |= {f"{layer}.self_attn.{name}_proj.weight": (D, D) for name in "qkvo"}
        expected |= {f"{layer}.self_attn.{name}_norm.weight": (8,) for name in "qk"}
        expected |= {f"{layer}.mlp.{name}_proj.weight": (WIDTH, D) for name in ("gate", "up")}
        expected |= {f"{layer}.mlp.down_proj.weight": (D, WIDTH)}
    assert shapes(made.weights) == expected


def reloaded(made, base):
    """The inverse of the export: build a block drafter from an exported folder."""
    config, weights = made.config, dict(made.weights)
    left, right = (weights.pop(f"markov_head.markov_w{i}.weight") for i in (1, 2))
    embedding = weights.pop("embed_tokens.weight")
    init_args = {
        "num_frames": config["block_size"],
        "num_layers": config["transformer_layer_config"]["num_hidden_layers"],
        "hidden_layers": config["aux_hidden_state_layer_ids"],
        "markov_rank": config["markov_rank"] if right.any() else 0,
        "tree": "chain",
        "top_k": V,
    }
    drafter = recipe.build(Block, base.shape, init_args)
    markov = {"markov.left": left, "markov.right": right} if right.any() else {}
    trunk = {f"trunk.{name}": weight for name, weight in weights.items()}
    drafter.load_state_dict(trunk | markov | {"frame_embedding": embedding[config["mask_token_id"]][None]})
    return drafter.eval(), embedding


@each_block
def test_an_exported_block_drafter_reloads_with_equal_weights(exported, base, mask, kind):
    made = exported(kind)
    drafter, embedding = reloaded(made, base)
    weights = drafter.state_dict()
    assert weights.keys() == made.trained.keys()
    assert all(torch.equal(weight, made.trained[name]) for name, weight in weights.items())
    others = [token for token in range(V) if token != mask]
    assert torch.equal(embedding[others], base.base_weights.embedding[others])
    if kind == "block":
        assert not made.weights["markov_head.markov_w1.weight"].any()


def dspark(made, base, ids):
    """DSpark as documented, from the folder and the base alone: the logits of every slot (T, V) and its greedy draft.

    Context keys and values come from the base's states at all positions before the root; the block is the root and
    T - 1 mask tokens; every slot predicts the token after its own, biased by the token drafted before.
    """
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

    config = Qwen3Config(**made.config["transformer_layer_config"])
    weights, num_heads, slots = made.weights, config.num_attention_heads, made.config["block_size"]
    rotary = Qwen3RotaryEmbedding(config)

    def norm(x, name):
        module = Qwen3RMSNorm(x.shape[-1], eps=config.rms_norm_eps)
        module.weight.data = weights[f"{name}.weight"]
        return module(x)

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"])

    def heads(x):
        return x.unflatten(-1, (num_heads, config.head_dim)).transpose(0, 1)[None]  # (1, h, S, d)

    read = {}  # state i is what decoder layer i, counted from 0, reads
    hooks = [
        base.model.model.layers[i].register_forward_pre_hook(lambda _, args, i=i: read.__setitem__(i, args[0][0]))
        for i in made.config["aux_hidden_state_layer_ids"]
    ]
    base.model(ids[None, :-1])
    for hook in hooks:
        hook.remove()
    fused = torch.cat([read[i] for i in made.config["aux_hidden_state_layer_ids"]], dim=-1)
    context = norm(linear(fused, "fc"), "hidden_norm")

    block = torch.tensor([ids[-1].item(), *[made.config["mask_token_id"]] * (slots - 1)])
    x = weights["embed_tokens.weight"][block]
    cos, sin = rotary(x, torch.arange(len(ids) - 1 + slots)[None])
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}"
        normed = norm(x, f"{name}.input_layernorm")
        attention = f"{name}.self_attn"
        seen = torch.cat([context, normed])
        queries = norm(heads(linear(normed, f"{attention}.q_proj")), f"{attention}.q_norm")
        keys = norm(heads(linear(seen, f"{attention}.k_proj")), f"{attention}.k_norm")
        values = heads(linear(seen, f"{attention}.v_proj"))
        queries = apply_rotary_pos_emb(queries, queries, cos[:, -slots:], sin[:, -slots:])[0]
        keys = apply_rotary_pos_emb(keys, keys, cos, sin)[0]
        scores = (queries @ keys.transpose(-1, -2) * config.head_dim**-0.5).softmax(-1)
        x = x + linear((scores @ values)[0].transpose(0, 1).flatten(1), f"{attention}.o_proj")
        normed = norm(x, f"{name}.post_attention_layernorm")
        gate = F.silu(linear(normed, f"{name}.mlp.gate_proj"))
        x = x + linear(gate * linear(normed, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
    logits = norm(x, "norm") @ base.model.lm_head.weight.T

    drafted, previous = [], ids[-1]
    for slot in range(slots):
        bias = linear(weights["markov_head.markov_w1.weight"][previous], "markov_head.markov_w2")
        previous = (logits[slot] + bias).argmax()
        drafted.append(previous.item())
    return logits, drafted


@each_block
def test_dspark_as_documented_gives_the_logits_and_the_chain_of_our_own_drafter(exported, base, kind):
    made = exported(kind)
    drafter, _ = reloaded(made, base)
    drafts = set()
    for seed in range(4):
        ids = torch.randint(3, 400, (24,), generator=torch.Generator().manual_seed(seed))
        anchor = torch.tensor([23])
        with torch.no_grad():
            logits, drafted = dspark(made, base, ids)
            hidden = base.hidden_states(ids[None], drafter.required_outputs.hidden_layers)[0]
            ours = drafter(hidden, anchor[None], ids[anchor][None], base.base_weights.embedding)[0, 0]
            (tree,) = drafter.draft_at(hidden[0], ids, anchor, base.base_weights)
        torch.testing.assert_close(logits, ours @ base.base_weights.head.T, rtol=1e-4, atol=1e-4)
        assert list(tree.tokens) == drafted
        drafts.add(tuple(drafted))
    assert len(drafts) > 1


@each_block
def test_wrong_layers_or_a_wrong_rotary_base_change_the_logits(exported, base, kind):
    """The test above would notice a difference."""
    made = exported(kind)
    ids = torch.randint(3, 400, (24,), generator=torch.Generator().manual_seed(0))
    layers = made.config["transformer_layer_config"]
    others = {
        "layers": {"aux_hidden_state_layer_ids": [2, 0]},
        "rotary": {"transformer_layer_config": layers | {"rope_theta": 1e4, "rope_parameters": None}},
        "epsilon": {"transformer_layer_config": layers | {"rms_norm_eps": 1e-6}},
        "mask": {"mask_token_id": 5},
    }
    with torch.no_grad():
        right = dspark(made, base, ids)[0]
        for change in others.values():
            wrong = SimpleNamespace(config=made.config | change, weights=made.weights)
            assert (dspark(wrong, base, ids)[0] - right).abs().max() > 1e-3


@pytest.mark.parametrize("factors", ["own", "base"])
def test_a_strong_markov_bias_reads_the_token_before_as_dsparks_does(base, mask, tmp_path, factors):
    """After two training steps the bias is too weak to change a draft, so the test makes it stronger."""
    init_args = BLOCK | {"markov_rank": 4, "markov_factors": factors}
    drafter = recipe.build(Block, base.shape, init_args)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for weight in drafter.markov.parameters():
            torch.nn.init.normal_(weight, std=3.0)
    vllm.write(tmp_path, drafter, config_of("Block", base, **init_args), mask, torch.float32)
    config, weights = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    ids = torch.randint(3, 400, (24,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, drafted = dspark(SimpleNamespace(config=config, weights=weights), base, ids)
        hidden = base.hidden_states(ids[None], drafter.required_outputs.hidden_layers)[0][0]
        (tree,) = drafter.draft_at(hidden, ids, torch.tensor([23]), base.base_weights)
    assert list(tree.tokens) == drafted
    assert all(token != plain for token, plain in zip(drafted, logits.argmax(-1).tolist(), strict=True))


# ---- cards and refusals


def test_the_model_card_tells_how_to_serve_it_that_it_drafts_a_chain_and_what_was_run_in_vllm(exported):
    for kind, method in (("medusa", "medusa"), ("block", "dspark")):
        made = exported(kind)
        names = ["README.md", "SHA256SUMS", "config.json", "model.safetensors"]
        assert sorted(file.name for file in made.folder.iterdir()) == names
        card = (made.folder / "README.md").read_text()
        tokens = 3 if kind == "medusa" else 5
        assert f'{{"method": "{method}", "model": "THIS_FOLDER", "num_speculative_tokens": {tokens}}}' in card
        assert "one chain without a tree" in card
        words = " ".join(card.split())
        assert ("Another variant of the format was run in vLLM" in words) is (kind == "medusa")  # with one layer a head
        assert ("the format was not run in vLLM" in words) is (kind == "block")


RUN_IN_VLLM = {"hidden_layers": [1], "own_head": True, "draft_vocab_size": 90}


@pytest.mark.parametrize(
    ("kind", "init_args", "was_run"),
    [
        (EAGLE3, RUN_IN_VLLM, True),
        (EAGLE3, {"hidden_layers": [1]}, False),
        (EAGLE3, RUN_IN_VLLM | {"draft_vocab_size": None}, False),
        (EAGLE3, RUN_IN_VLLM | {"has_qk_norm": True}, False),
        (EAGLE3, RUN_IN_VLLM | {"norm_before_residual": True}, False),
        (EAGLE, {"fc_bias": False}, True),
        (Medusa, {}, True),
        (Medusa, {"heads": {"num_layers": 2}}, False),
    ],
)
def test_the_model_card_says_so_if_this_variant_was_not_run_in_vllm(kind, init_args, was_run, base, tmp_path):
    drafter = recipe.build(kind, base.shape, init_args)
    vllm.write(tmp_path, drafter, config_of(kind.__name__, base, **init_args))
    card = " ".join((tmp_path / "README.md").read_text().split())
    assert ("This format was run in vLLM" in card) is was_run
    assert ("Another variant of the format was run in vLLM 0.32.0, but not this one" in card) is not was_run


def test_a_ctc_drafter_has_no_vllm_format_because_no_engine_collapses(call, trained, tmp_path):
    refused = call(commands.main, "export", trained.ckpt, tmp_path / "a", "--format", "vllm")
    assert "CTC has no vllm format (no engine applies a CTC collapse)" in refused.one_line_error("drafters")
    assert not (tmp_path / "a").exists()


def test_another_format_is_refused(call, trained, tmp_path):
    refused = call(commands.main, "export", trained.ckpt, tmp_path / "a", "--format", "gguf")
    assert "gguf" in refused.one_line_error("drafters")


def test_hydra_has_no_vllm_format(base, tmp_path):
    with pytest.raises(ValueError, match="Hydra has no vllm format"):
        vllm.write(tmp_path / "a", Hydra(base.shape), config_of("Hydra", base), None)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("kind", "init_args", "message"),
    [
        (EAGLE, {}, "fc_bias: false"),
        (EAGLE3, {"hidden_layers": [1, 2, -1]}, r"not hidden_layers \[1, 2, -1\]"),
        (EAGLE3, {"hidden_layers": [0, 1, 2]}, "fuses layers 1 to 3 of this base"),
    ],
)
def test_an_eagle_that_vllm_cannot_run_is_refused(kind, init_args, message, base, tmp_path):
    drafter, config = recipe.build(kind, base.shape, init_args), config_of(kind.__name__, base, **init_args)
    with pytest.raises(ValueError, match=message):
        vllm.write(tmp_path / "a", drafter, config)
    assert not (tmp_path / "a").exists()


def test_an_eagle3_folder_has_the_keys_and_shapes_of_speculators(base, tmp_path):
    init_args = {"hidden_layers": [1, 2, 3], "own_head": True, "draft_vocab_size": 50, "draft": {"depth": 4}}
    vllm.write(tmp_path, recipe.build(EAGLE3, base.shape, init_args), config_of("EAGLE3", base, **init_args))
    config = json.loads((tmp_path / "config.json").read_text())
    layers = config.pop("transformer_layer_config")
    assert config == {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": base.name, "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": 50,
        "target_hidden_size": D,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "dtype": "bfloat16",
    }
    assert (layers["model_type"], layers["num_hidden_layers"], layers["rms_norm_eps"]) == ("llama", 1, 1e-3)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    expected = {"fc.weight": (D, 3 * D), "norm.weight": (D,), "lm_head.weight": (50, D), "d2t": (50,), "t2d": (V,)}
    expected |= {f"layers.0.{norm}.weight": (D,) for norm in norms} | {"layers.0.self_attn.o_proj.weight": (D, D)}
    expected |= {f"layers.0.self_attn.{name}_proj.weight": (D, 2 * D) for name in "qkv"}
    expected |= {f"layers.0.mlp.{name}_proj.weight": (WIDTH, D) for name in ("gate", "up")}
    assert shapes(load_file(tmp_path / "model.safetensors")) == expected | {"layers.0.mlp.down_proj.weight": (D, WIDTH)}


def test_a_medusa_that_uses_the_bases_head_is_refused(base, tmp_path):
    drafter, config = recipe.build(Medusa, base.shape, {"own_heads": False}), config_of("Medusa", base, own_heads=False)
    with pytest.raises(ValueError, match="own_heads: true"):
        vllm.write(tmp_path / "a", drafter, config, None)


@pytest.mark.parametrize(
    ("init_args", "message"),
    [
        ({"tokens_in_context": True}, "no tokens_in_context"),
        ({"root_everywhere": True}, "no root_everywhere"),
        ({"frames_differ": True}, "no frames_differ"),
        ({"causal": True}, "no causal"),
        ({"draft_vocab_size": 50}, "draft_vocab_size: null"),
        ({"window": 64}, "no window"),
        ({"hidden_layers": [1, -1]}, r"layers 1 to 3 of this base, not hidden_layers \[1, -1\]"),
        ({"hidden_layers": [0]}, "layers 1 to 3"),
        ({"hidden_layers": [4]}, "layers 1 to 3"),
    ],
)
def test_a_block_drafter_that_dspark_cannot_describe_is_refused(base, mask, tmp_path, init_args, message):
    init_args = {"hidden_layers": [1]} | init_args
    drafter, config = recipe.build(Block, base.shape, init_args), config_of("Block", base, **init_args)
    with pytest.raises(ValueError, match=message):
        vllm.write(tmp_path / "a", drafter, config, mask)
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_the_mask_token_must_never_occur_in_text(call, exported, base, tmp_path):
    ckpt = exported("block").ckpt
    refused = call(commands.main, "export", ckpt, tmp_path / "a", "--format", "vllm")
    assert "--mask-token-id is missing" in refused.one_line_error("drafters")
    for token in (base.tokenizer.eos_token_id, 50, V, -1):
        refused = call(commands.main, "export", ckpt, tmp_path / "a", "--format", "vllm", "--mask-token-id", token)
        assert f"--mask-token-id {token} is a token of texts" in refused.one_line_error("drafters")
    assert not (tmp_path / "a").exists()
