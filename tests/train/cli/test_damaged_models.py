"""One flipped byte of an exported folder or of a checkpoint is found before its weights are used."""

import shutil
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import load_file

from data.files import write_checksums
from drafters import checkpoint
from inference.verifier.base import load_base
from train.cli import commands


def flip(path, place):
    """Change one bit of the byte at a place; negative places count from the end."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), [("model.safetensors", -5), ("config.json", -3)])
def test_a_damaged_drafter_is_refused_in_one_line(name, place, trained, call, tiny, tmp_path):
    folder = shutil.copytree(trained.folder, tmp_path / "drafter")
    flip(folder / name, place)
    line = ("verify", "--base", tiny, "--drafter", f"ctc={folder}", "--limit", 1, "--max-new-tokens", 4)
    error = call(commands.main, *line).one_line_error("drafters")
    assert f"{folder / name} is" in error


def test_a_drafter_that_was_exported_without_checksums_still_loads(trained, tmp_path):
    folder = shutil.copytree(trained.folder, tmp_path / "drafter")
    (folder / "SHA256SUMS").unlink()
    assert checkpoint.load(folder)[1] == checkpoint.load(trained.folder)[1]


def test_a_damaged_base_is_refused(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "base")
    write_checksums(folder)
    load_base(str(folder))
    flip(folder / "model.safetensors", -5)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
        load_base(str(folder))


def test_a_damaged_checkpoint_is_not_exported_and_the_old_folder_is_kept(trained, call, tmp_path):
    folder = shutil.copytree(trained.folder, tmp_path / "drafter")
    damaged = tmp_path / "damaged.ckpt"
    shutil.copy(trained.ckpt, damaged)
    with ZipFile(damaged) as file:
        largest = max(file.infolist(), key=lambda entry: entry.file_size)
        flip(damaged, largest.header_offset + 1000)  # within its data
    assert torch.load(damaged, weights_only=True)["global_step"] == 8, "torch itself notices nothing"
    error = call(commands.main, "export", damaged, folder, "--overwrite").one_line_error("drafters")
    assert "damaged.ckpt is not a readable checkpoint" in error and "is damaged" in error
    for name, weight in load_file(trained.folder / "model.safetensors").items():
        assert torch.equal(load_file(folder / "model.safetensors")[name], weight)


def test_a_checkpoint_whose_directory_of_files_is_damaged_is_refused(trained, call, tmp_path):
    damaged = tmp_path / "damaged.ckpt"
    shutil.copy(trained.ckpt, damaged)
    content = damaged.read_bytes()
    end = content.rindex(b"PK\x06\x07")  # the record that says on how many disks the file lies
    damaged.write_bytes(content[: end + 16] + b"\x05" + content[end + 17 :])
    error = call(commands.main, "export", damaged, tmp_path / "out").one_line_error("drafters")
    assert "damaged.ckpt is not a readable checkpoint" in error


def test_overwrite_replaces_the_folder_as_a_whole(trained, call, tmp_path):
    folder = shutil.copytree(trained.folder, tmp_path / "drafter")
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(trained.ckpt)
    (folder / "notes.txt").write_text("of the user")
    before = trained.ckpt.read_bytes()
    assert call(commands.main, "export", trained.ckpt, folder, "--overwrite").code == 0
    names = {"README.md", "SHA256SUMS", "config.json", "model.safetensors", "notes.txt"}
    assert {path.name for path in folder.iterdir()} == names and not (folder / "README.md").is_symlink()
    assert trained.ckpt.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["drafter"]
