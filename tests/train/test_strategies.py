"""Two processes train like one with twice the batch size, with every way of sharding the drafter."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from safetensors.torch import load_file

from train.checkpoints import read_checkpoint
from train.cli import run_drafters, run_lightning

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent / "processes"
STEPS = 6
STAGES = (1, 2, 3)
SHARDED_BASE = {"sharded_base": [], "sharded_both": ["--config", str(ROOT / "configs/strategy/fsdp.yaml")]}


def arguments(config, folder, *more):
    """A training that logs its losses and reads the same rows in every number of processes."""
    given = {
        "trainer.default_root_dir": folder,
        "trainer.max_steps": STEPS,
        "trainer.gradient_clip_val": 0.5,
        "trainer.gradient_clip_algorithm": "norm",
        "trainer.log_every_n_steps": 1,
        "trainer.logger": "lightning.pytorch.loggers.CSVLogger",
        "trainer.logger.save_dir": folder,
        "trainer.logger.name": "log",
        "model.drafter.init_args.loss.num_anchors": 256,  # every anchor there is: none is drawn
        "model.val_answers": "text",  # of different lengths, so that processes draft in different numbers of calls
    }
    return ["fit", "--config", str(config), *(f"--{name}={value}" for name, value in given.items()), *more]


def logged(folder, name="train/loss"):
    """A logged value by step, over all runs in a folder."""
    found = {}
    for path in sorted(Path(folder).glob("log/version_*/metrics.csv")):
        with path.open() as file:
            found |= {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}
    return found


@pytest.fixture(scope="module")
def runs(write_recipe, make_tiny, shared_folder):
    """Folders of one process's run and of two processes' runs, and the output of the processes.

    The base is a file in bfloat16 and runs in float32, so that its weights are converted where they run.
    """

    def fill(root):
        base = {"base": str(make_tiny("half", dtype=torch.bfloat16))}
        checkpoints = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"save_last": True}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["pytest"])
            config = write_recipe(root, base, callbacks=[checkpoints], val_check_interval=3)
            run_lightning(arguments(config, root / "one", "--data.batch_size=8"))
        two = ["--data.batch_size=4", "--trainer.devices=2"]
        shards = ["--config", str(ROOT / "configs/strategy/fsdp.yaml"), *two]
        together = [
            arguments(config, root / "ddp", "--config", str(ROOT / "configs/strategy/ddp.yaml"), *two),
            arguments(config, root / "fsdp", *shards, "--trainer.max_steps=3"),
            arguments(config, root / "fsdp", *shards, "--ckpt_path=last"),
        ]
        for name, drafter in SHARDED_BASE.items():
            overlays = ["--config", str(ROOT / "configs/strategy/sharded_base.yaml"), *drafter]
            together.append(arguments(config, root / name, *overlays, *two))
        for stage in STAGES:
            overlay = ["--config", str(ROOT / f"configs/strategy/deepspeed_{stage}.yaml")]
            double = ["--trainer.strategy=cpu_deepspeed.CPUDeepSpeed", f"--trainer.strategy.stage={stage}"]
            parts = [["--trainer.max_steps=3"], ["--ckpt_path=last"]] if stage > 1 else [[]]
            together += [
                arguments(config, root / f"deepspeed_{stage}", *overlay, *double, *two, *part) for part in parts
            ]
        # Any free port: another training may be running on this machine.
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(HERE / "in_turn.py")]
        done = subprocess.run(
            [sys.executable, *launch, json.dumps(together)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])},
            capture_output=True,
            text=True,
        )
        (root / "said.txt").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, done.stderr[-5000:]

    return shared_folder("strategies", fill)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", *SHARDED_BASE, *(f"deepspeed_{stage}" for stage in STAGES)])
def test_two_processes_have_the_losses_of_one_with_the_doubled_batch(runs, strategy):
    expected, said = logged(runs / "one"), (runs / "said.txt").read_text()[-3000:]
    assert sorted(expected) == list(range(STEPS))
    assert logged(runs / strategy) == pytest.approx(expected, abs=1e-5), said
    lengths = logged(runs / "one", "val/acceptance_length")
    assert lengths and logged(runs / strategy, "val/acceptance_length") == pytest.approx(lengths, abs=1e-4)


@pytest.mark.slow
def test_a_resumed_sharded_training_saves_the_checkpoint_of_a_single_process(runs, call, tmp_path):
    ours, one = (runs / name / "checkpoints" / "last.ckpt" for name in ("fsdp", "one"))
    saved, expected = (torch.load(path, weights_only=True) for path in (ours, one))
    assert saved["global_step"] == expected["global_step"] == STEPS
    torch.testing.assert_close(saved["state_dict"], expected["state_dict"], atol=1e-5, rtol=1e-4)
    assert call(run_drafters, "export", ours, tmp_path / "drafter").code == 0


@pytest.mark.slow
def test_a_sharded_base_changes_no_bit_of_the_losses_and_of_the_trained_weights(runs):
    losses, lengths = ("train/loss", "val/acceptance_length")
    for name in (losses, lengths):
        whole, sharded = (logged(runs / folder, name) for folder in ("ddp", "sharded_base"))
        assert whole and whole == sharded
    paths = (runs / folder / "checkpoints" / "last.ckpt" for folder in ("ddp", "sharded_base", "one"))
    whole, sharded, one = (torch.load(path, weights_only=True) for path in paths)
    torch.testing.assert_close(sharded["state_dict"], whole["state_dict"], atol=0, rtol=0)
    torch.testing.assert_close(sharded["state_dict"], one["state_dict"], atol=1e-5, rtol=1e-4)
    assert sharded["base"] == whole["base"], "the hash is that of the whole weights"


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_shards_are_exported_as_the_drafter_of_a_single_process(runs, call, tmp_path, stage):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    ckpt, one = (runs / name / "checkpoints" / "last.ckpt" for name in (f"deepspeed_{stage}", "one"))
    saved, expected = read_checkpoint(ckpt), torch.load(one, weights_only=True)
    assert saved["global_step"] == expected["global_step"] == STEPS
    torch.testing.assert_close(saved["state_dict"], expected["state_dict"], atol=1e-5, rtol=1e-4)
    theirs = dict(get_fp32_state_dict_from_zero_checkpoint(ckpt))
    torch.testing.assert_close(saved["state_dict"], theirs, atol=0, rtol=0)
    assert call(run_drafters, "export", ckpt, tmp_path / "drafter").code == 0
    exported = load_file(tmp_path / "drafter" / "model.safetensors")
    assert len(exported) == 17
    assert all(torch.equal(weight, saved["state_dict"][f"drafter.{name}"]) for name, weight in exported.items())


@pytest.mark.slow
def test_a_folder_without_the_first_process_is_refused_in_one_line(runs, call, tmp_path):
    ckpt = shutil.copytree(runs / "deepspeed_3" / "checkpoints" / "last.ckpt", tmp_path / "last.ckpt")
    (states,) = ckpt.glob("checkpoint/*pp_rank_0_*_model_states.pt")
    states.unlink()
    error = call(run_drafters, "export", ckpt, tmp_path / "drafter").one_line_error("drafters")
    assert "copy the whole checkpoint of DeepSpeed again" in error and not (tmp_path / "drafter").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_each_deepspeed_overlay_selects_its_stage(stage):
    overlay = yaml.safe_load((ROOT / f"configs/strategy/deepspeed_{stage}.yaml").read_text())["trainer"]
    trainer = L.Trainer(**overlay, accelerator="cpu", gradient_clip_val=0.5, logger=False)
    assert trainer.strategy.config["zero_optimization"]["stage"] == stage
    assert trainer.gradient_clip_algorithm == "norm"
