"""The recipes for public bases fit their shapes, train on toys of their architectures, and state their memory."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from rich.filesize import decimal

import drafters
from benchmarks.recipe_memory import BASES, base_config, estimated_parts
from data.conversation import resolve_template
from data.hub import COMMIT, split_revision
from data.tokenizer import load_tokenizer
from drafters import recipe
from train.callbacks.memory import peak_memory
from train.module import DrafterTraining

ROOT = Path(__file__).parents[2]
RECIPES = "qwen3_8b", "llama3_8b", "vicuna_7b"


def read(name):
    return yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())


def stated_memory(name):
    return re.search(r"One of 8 GPUs needs ([\d.]+ GB)", (ROOT / "configs" / f"{name}.yaml").read_text())[1]


@pytest.mark.slow
def test_the_memory_that_a_recipe_states_is_what_its_base_needs_on_one_of_eight_gpus():
    peak = peak_memory(estimated_parts(read("vicuna_7b")))
    assert stated_memory("vicuna_7b") == decimal(round(peak), precision=1)


@pytest.mark.slow
def test_the_memory_stated_for_reasoning_is_that_of_the_longer_texts():
    settings = read("qwen3_8b")
    settings["data"] |= {"max_length": 8192, "batch_size": 2}
    stated = f"batch_size 2, which needs {decimal(round(peak_memory(estimated_parts(settings))), precision=1)} by"
    assert stated in (ROOT / "configs" / "qwen3_8b.yaml").read_text()


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_and_documentation_state_the_same_memory_which_a_gpu_has(name):
    assert f"| `{name}.yaml` | {stated_memory(name)} |" in (ROOT / "docs" / "training.md").read_text()
    assert float(stated_memory(name).split()[0]) < 0.85 * 80, "room is left for what the allocator keeps"


@pytest.mark.slow
def test_a_base_of_70b_fits_on_eight_gpus_if_it_and_the_drafter_are_sharded():
    settings = read("llama3_8b")
    settings["model"]["base"] = "meta-llama/Llama-3.3-70B-Instruct"
    settings["model"]["drafter"]["init_args"]["trunk"]["hidden_layers"] = [2, 21, 40, 59, 78]
    settings["data"]["batch_size"] = 1
    parts = estimated_parts(settings, sharded_base=True, sharded_drafter=True)
    assert decimal(round(peak_memory(parts)), precision=1) in (ROOT / "docs" / "training.md").read_text()
    layer = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192  # attention, key and value, MLP, norms
    assert parts["weights of the base"] == 2 * (80 * layer / 8 + 2 * 128256 * 8192 + 8192)
    assert parts["its gathered layers"] == 2 * 2 * layer


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_on_a_toy_of_its_bases_architecture(name, tmp_path):
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer("checkpoints/tiny-chat")
    settings = read(name)
    config = base_config(split_revision(settings["model"]["base"])[0])
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
