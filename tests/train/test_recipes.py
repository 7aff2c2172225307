"""The recipes for public bases fit their shapes and train on toys of their architectures."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch.strategies import DDPStrategy
from transformers import AutoConfig, AutoModelForCausalLM

import drafters
from data.hub import COMMIT, split_revision
from data.templates import resolve_template
from data.tokenizer import load_tokenizer
from drafters import recipe
from inference.verifier.base import Base, shape_of
from train.memory import largest_batches, memory_parts
from train.module import DrafterTraining

ROOT = Path(__file__).parents[2]
RECIPES = "qwen3_8b", "llama3_8b", "vicuna_7b"
SIZES = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
SIZES = *SIZES, "num_key_value_heads", "max_position_embeddings"
BASES = {  # what the hub's config.json of each base says
    "Qwen/Qwen3-8B": ("qwen3", (151936, 4096, 12288, 36, 32, 8, 40960)),
    "meta-llama/Meta-Llama-3-8B-Instruct": ("llama", (128256, 4096, 14336, 32, 32, 8, 8192)),
    "lmsys/vicuna-7b-v1.3": ("llama", (32000, 4096, 11008, 32, 32, 32, 2048)),
}


def config_of(settings):
    """The transformers configuration of a recipe's base."""
    kind, sizes = BASES[split_revision(settings["model"]["base"])[0]]
    return AutoConfig.for_model(kind, **dict(zip(SIZES, sizes, strict=True)), head_dim=128, tie_word_embeddings=False)


def read(name):
    return yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())


def stated_memory(name):
    return re.search(r"One of 8 GPUs needs ([\d.]+ GB)", (ROOT / "configs" / f"{name}.yaml").read_text())[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_states_the_memory_that_is_estimated_for_one_of_eight_gpus(name):
    settings = read(name)
    config, node = config_of(settings), settings["model"]["drafter"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        drafter = recipe.build(drafters.CTC, shape_of(config), node["init_args"])
    if drafter.draft_tokens is not None:  # whose values the estimate reads
        drafter.draft_tokens = torch.arange(len(drafter.draft_tokens))
    base = Base(settings["model"]["base"], model, None)
    ddp = type("DDP", (DDPStrategy,), {"root_device": torch.device("cuda")})
    trainer = SimpleNamespace(strategy=ddp(gradient_as_bucket_view=True), world_size=8)
    module = SimpleNamespace(base=base, drafter=drafter, shard_base=False, runs_base=lambda _: True)
    data = settings["data"]
    sizes = largest_batches([data["max_length"], 1024], data["batch_size"], data["max_tokens"])
    needed = max(sum(memory_parts(module, trainer, size, torch.bfloat16).values()) for size in sizes)
    assert stated_memory(name) == f"{needed / 1e9:.1f} GB"


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_and_documentation_state_the_same_memory_which_a_gpu_has(name):
    assert f"{stated_memory(name)} with `{name}.yaml`" in (ROOT / "docs" / "training.md").read_text()
    assert float(stated_memory(name).split()[0]) < 0.85 * 80, "room is left for what the allocator keeps"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_on_a_toy_of_its_bases_architecture(name, tmp_path):
    tokenizer = load_tokenizer("checkpoints/tiny-chat")
    settings = read(name)
    config = config_of(settings)
    assert settings["data"]["max_length"] <= config.max_position_embeddings
    toy = dict(zip(SIZES, (len(tokenizer), 16, 16, config.num_hidden_layers, 2, 1, 2048), strict=True))
    config.update(toy | {"head_dim": 8, "bos_token_id": 1, "eos_token_id": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    if ":thinking" in settings["data"]["template"]:
        tokenizer.chat_template += "{%- if enable_thinking is defined and enable_thinking is false -%}{%- endif -%}"
    tokenizer.save_pretrained(tmp_path)
    assert resolve_template(settings["data"]["template"], tokenizer)
    node = settings["model"]["drafter"]
    build = partial(recipe.build, getattr(drafters, node["class_path"].split(".")[-1]), init_args=node["init_args"])
    module = DrafterTraining(str(tmp_path), build)
    stated = re.search(
        r"hidden_layers: \[\] # five, evenly spaced: ([\d, ]+)", (ROOT / "configs" / f"{name}.yaml").read_text()
    )
    assert ", ".join(map(str, module.drafter.required_outputs.hidden_layers)) == stated[1]
    ids = torch.randint(3, 300, (1, 16), generator=torch.Generator().manual_seed(0))
    batch = module.training_batch({"input_ids": ids, "loss_mask": torch.ones_like(ids).bool()})
    loss, _ = module.drafter.loss(batch, module.base.base_weights)
    loss.backward()
    assert loss.isfinite() and all(weight.grad is not None for weight in module.drafter.parameters())


def test_every_recipe_names_a_commit_of_a_base_of_known_shape():
    for name in RECIPES:
        base, revision = split_revision(read(name)["model"]["base"])
        assert base in BASES and COMMIT.fullmatch(revision)
