"""The recipes for public bases fit their shapes and train on toys of their architectures."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import drafters
from data.templates import resolve_template
from data.tokenizer import COMMIT, load_tokenizer, split_revision
from drafters import recipe
from train.module import DrafterTraining

ROOT = Path(__file__).parents[2]
RECIPES = "qwen3_8b", "llama3_8b", "vicuna_7b"
# What the hub's config.json of each base says of its shape.
LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8}
BASES = {
    "Qwen/Qwen3-8B": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
    ),
    "meta-llama/Meta-Llama-3-8B-Instruct": (
        "llama",
        LLAMA_3
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 8192,
        },
    ),
    "lmsys/vicuna-7b-v1.3": (
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
    ),
}


def read(name):
    return yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())


def stated_memory(name):
    return re.search(r"One of 8 GPUs needs ([\d.]+ GB)", (ROOT / "configs" / f"{name}.yaml").read_text())[1]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_and_documentation_state_the_same_memory_which_a_gpu_has(name):
    assert f"| `{name}.yaml` | {stated_memory(name)} |" in (ROOT / "docs" / "training.md").read_text()
    assert float(stated_memory(name).split()[0]) < 0.85 * 80, "room is left for what the allocator keeps"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_on_a_toy_of_its_bases_architecture(name, tmp_path):
    tokenizer = load_tokenizer("checkpoints/tiny-chat")
    settings = read(name)
    kind, shape = BASES[split_revision(settings["model"]["base"])[0]]
    config = AutoConfig.for_model(kind, **shape)
    assert max(settings["model"]["drafter"]["init_args"]["trunk"]["hidden_layers"]) < config.num_hidden_layers
    assert settings["data"]["max_length"] <= config.max_position_embeddings
    config.update(
        {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    )
    config.update({"vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    if ":thinking" in settings["data"]["template"]:
        tokenizer.chat_template += "{%- if enable_thinking is defined and enable_thinking is false -%}{%- endif -%}"
    tokenizer.save_pretrained(tmp_path)
    assert resolve_template(settings["data"]["template"], tokenizer)
    node = settings["model"]["drafter"]
    build = partial(recipe.build, getattr(drafters, node["class_path"].split(".")[-1]), init_args=node["init_args"])
    module = DrafterTraining(str(tmp_path), build)
    ids = torch.randint(3, 300, (1, 16), generator=torch.Generator().manual_seed(0))
    loss, _ = module.drafter.loss(module.compute_batch(ids, torch.ones_like(ids).bool()), module.base.base_weights)
    loss.backward()
    assert loss.isfinite() and all(weight.grad is not None for weight in module.drafter.parameters())


def test_every_recipe_names_a_commit_of_a_base_of_known_shape():
    for name in RECIPES:
        base, revision = split_revision(read(name)["model"]["base"])
        assert base in BASES and COMMIT.fullmatch(revision)
