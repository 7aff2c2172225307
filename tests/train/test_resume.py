import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from train import cli, commands

ROOT = Path(__file__).parents[2]


def kill_after_a_checkpoint(config, checkpoints, log):
    """Start `lightning fit` and kill it, as a crash or a pre-empted machine would, once it has saved something."""
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "train", "fit", "--config", str(config)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=stream,
            stderr=stream,
        )
        try:
            until = time.monotonic() + 90
            while not (checkpoints / "last.ckpt").exists():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert process.returncode == -signal.SIGKILL


def test_a_killed_training_goes_on_where_it_stopped_and_its_drafter_loses_nothing(call, write_recipe, tiny, tmp_path):
    last_step = 60
    checkpoints = tmp_path / "checkpoints"
    config = write_recipe(
        tmp_path,
        max_steps=last_step,
        val_check_interval=20,
        callbacks=[
            {
                "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                "init_args": {
                    "dirpath": str(checkpoints),
                    "filename": "step={step}",
                    "auto_insert_metric_name": False,
                    "every_n_train_steps": 4,
                    "save_last": "link",
                },
            }
        ],
    )
    kill_after_a_checkpoint(config, checkpoints, tmp_path / "log.txt")
    stopped = torch.load(checkpoints / "last.ckpt", weights_only=True)["global_step"]
    assert 0 < stopped < last_step and stopped % 4 == 0

    resumed = call(cli.main, "fit", "--config", config, "--ckpt_path", "last")
    assert resumed.code == 0, resumed.err
    saved = torch.load(checkpoints / "last.ckpt", weights_only=True)
    assert saved["global_step"] == last_step
    (optimizer,) = saved["optimizer_states"]
    assert {int(state["step"]) for state in optimizer["state"].values()} == {last_step}
    trained_batches = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"]
    assert trained_batches == last_step, "no batch is repeated and none is left out"

    assert call(commands.main, "export", checkpoints / "last.ckpt", tmp_path / "drafter").code == 0
    verified = call(
        *(commands.main, "verify", "--base", tiny, "--drafter", f"ctc={tmp_path / 'drafter'}"),
        *("--limit", 3, "--max-new-tokens", 24),
    )
    assert verified.code == 0, verified.out
    assert "3/3" in verified.out and "Nothing is lost" in verified.out
