"""The same training in bfloat16 and over two processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def fit(run, *arguments):
    """``lightning fit --config ctc.yaml --config debug.yaml`` as the README has it, in a process of its own."""
    command = [sys.executable, "-m", "train", "fit", "--config", "ctc.yaml", "--config", "debug.yaml"]
    command += ["--trainer.default_root_dir", str(run), "--data.cache_dir", str(run / "cache"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_papers_config_trains_for_four_steps_with_the_debug_overlay(tmp_path):
    done = fit(tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    saved = torch.load(tmp_path / "checkpoints" / "best.ckpt", weights_only=True)
    assert saved["measured"]["step"] in (2, 4) and saved["measured"]["acceptance_length"] >= 1
    again = fit(tmp_path)
    assert again.returncode == 2 and "already holds checkpoints" in again.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--trainer.precision", "bf16-mixed", "--model.base_dtype", "bfloat16"),
        ("--config", "strategy/ddp.yaml", "--trainer.devices", "2"),
    ],
    ids=["bfloat16", "two processes"],
)
def test_it_also_trains_with(arguments, tmp_path):
    done = fit(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    saved = torch.load(tmp_path / "checkpoints" / "best.ckpt", weights_only=True)
    weights = [weight for name, weight in saved["state_dict"].items() if name.startswith("drafter.")]
    assert weights and all(weight.dtype == torch.float32 and weight.isfinite().all() for weight in weights)
