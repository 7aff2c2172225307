"""What importing and using the packages leaves as it was: transformers' registries, the process, a user's own model."""

import subprocess
import sys

import pytest

IMPORTS = """
import os
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

def registries():
    return [{name: each[name] for name in each} for each in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]

before, environment = registries(), dict(os.environ)
"""
UNCHANGED = """
for old, new in zip(before, registries()):
    assert all(new[name] is old[name] for name in old), "one of transformers' functions was replaced"
    assert all(name.endswith("_bitwise") for name in new.keys() - old.keys())
changed = {name for name in os.environ.keys() | environment.keys() if os.environ.get(name) != environment.get(name)}
assert not {name for name in changed if "MKL" in name or "DNN" in name}, changed
"""
FREED = """
import resource
for _ in range(24):
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults > 1000, "glibc was told to keep freed memory"
"""


def run(code):
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not finished.returncode, finished.stderr[-2000:]


@pytest.mark.slow
def test_importing_everything_changes_nothing():
    run(
        IMPORTS
        + """
import importlib, pkgutil
for package in ("data", "drafters", "inference", "train"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if ".vllm" not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""
        + UNCHANGED
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_of_the_users_own_computes_as_before_after_ours_used_it(dtype):
    run(
        IMPORTS
        + f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("checkpoints/tiny-chat", dtype=torch.{dtype}).eval()
tokenizer = AutoTokenizer.from_pretrained("checkpoints/tiny-chat")
ids = torch.tensor([[5, 6, 7, 8, 9, 10], [9, 8, 7, 6, 5, 4]])
mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])

def texts():
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
    return logits, model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)

expected, attributes = texts(), set(vars(model))
from inference import Speculation, generate
generate(model, "The cat", "joint", tokenizer=tokenizer, max_new_tokens=12)
model.generate(ids[1:], custom_generate=Speculation("joint"), max_new_tokens=12, do_sample=False)
assert all(map(torch.equal, texts(), expected)) and set(vars(model)) == attributes
"""
        + UNCHANGED
        + FREED
    )
