"""Checkpoints are complete or absent, and `last` is the newest one that can be continued."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from train.checkpoints import AtomicCheckpointIO, check_complete, newest_complete
from train.resume import save_last


def save(folder, name, step, age=0.0):
    """Save a small checkpoint with a given age in seconds."""
    path = folder / f"{name}.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": step, "optimizer_states": [], "w": torch.zeros(1000)}, path)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def resident_bytes(kind):
    """Bytes of memory that this process uses now (VmRSS), or its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(kind))


def test_a_checkpoint_is_written_without_a_copy_of_it_in_memory(fork, tmp_path):
    def main(_):
        weights = torch.ones(2**25)  # 128 MiB
        before = resident_bytes("VmRSS")
        AtomicCheckpointIO().save_checkpoint({"w": weights}, tmp_path / "last.ckpt")
        print(resident_bytes("VmHWM") - before)

    run = fork(main=main)
    run.succeed()
    assert int(run.log.read_text()) < 2**24
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["w"].sum() == 2**25


def test_the_newest_checkpoint_is_found_under_any_name(tmp_path):
    assert newest_complete([tmp_path]) is None
    old, new = save(tmp_path, "last", 4, age=9), save(tmp_path, "step=8", 8)
    assert newest_complete([tmp_path]) == new
    old.unlink()
    old.symlink_to(new.name)
    assert newest_complete([tmp_path]) == old, "of one file the name that stays"
    old.unlink()
    old.symlink_to("step=4.ckpt")
    assert newest_complete([tmp_path]) == new, "a link to a file that was deleted is no loss"


@pytest.mark.parametrize("damage", ["cut", "a byte", "text", "empty"])
def test_a_damaged_checkpoint_is_skipped_by_last_and_refused_by_name(tmp_path, capsys, damage):
    whole, broken = save(tmp_path, "step=4", 4, age=9), save(tmp_path, "step=8", 8)
    content = bytearray(broken.read_bytes())
    content[len(content) // 2] ^= 1
    damaged = {"cut": bytes(content[: len(content) // 2]), "a byte": bytes(content), "text": b"no zip", "empty": b""}
    broken.write_bytes(damaged[damage])
    assert newest_complete([tmp_path]) == whole
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("passed over for an older one: ") and "step=8.ckpt is not a readable checkpoint" in line
    with pytest.raises(ValueError, match=r"step=8.ckpt is not a readable checkpoint .*train or copy it again"):
        check_complete(broken)


def test_a_folder_that_deepspeed_did_not_finish_is_skipped(tmp_path, capsys):
    (tmp_path / "step=8.ckpt" / "checkpoint").mkdir(parents=True)
    whole = save(tmp_path, "step=4", 4, age=9)
    assert newest_complete([tmp_path]) == whole
    assert "step=8.ckpt is not a readable checkpoint (no file latest" in capsys.readouterr().err
    (tmp_path / "step=8.ckpt" / "latest").write_text("checkpoint")
    assert newest_complete([tmp_path]) == tmp_path / "step=8.ckpt"


def test_deepspeeds_last_checkpoint_is_a_folder_of_its_own_and_is_dated_by_its_end(tmp_path):
    """DeepSpeed writes file by file into a folder that may exist already, behind a link, too."""
    periodic, last = tmp_path / "step=4.ckpt", tmp_path / "last.ckpt"

    def write(path, weights_only):
        path.mkdir(exist_ok=True)
        assert not (path / "latest").exists(), "until the end, the folder is none to go on with"
        (path / "latest").write_text("checkpoint")

    strategy = SimpleNamespace(barrier=lambda: None)
    saver = ModelCheckpoint(tmp_path, save_last="link")
    trainer = SimpleNamespace(
        checkpoint_callbacks=[saver], is_global_zero=True, strategy=strategy, save_checkpoint=write
    )
    write(periodic, False)
    last.symlink_to(periodic.name)
    os.utime(periodic / "latest", (1e9, 1e9))
    save_last(trainer)
    assert not last.is_symlink() and (periodic / "latest").stat().st_mtime == 1e9
    save_last(trainer)  # over its own
    for path, age in ((last, 9.0), (periodic, 0.0)):
        os.utime(path, (1e9 - age, 1e9 - age))
    assert newest_complete([tmp_path]) == last


def test_a_run_does_not_start_over_if_all_checkpoints_are_damaged(tmp_path):
    save(tmp_path, "last", 4).write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be resumed"):
        newest_complete([tmp_path])


def test_a_checkpoint_without_optimizer_states_cannot_be_continued(tmp_path):
    full, _ = save(tmp_path, "last", 4, age=9), torch.save({"state_dict": {}}, tmp_path / "weights.ckpt")
    assert newest_complete([tmp_path]) == full
