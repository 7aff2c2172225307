import errno
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from data.files import DiskError, atomic_folder, atomic_write, disk_errors, scratch_folder, write_text


@pytest.fixture
def full_disk():
    """No file may grow beyond 4 KiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, previous)


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def gone():
    """The id of a process that has ended."""
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_a_file_is_replaced_when_the_block_ends_and_kept_when_it_fails(tmp_path):
    path = tmp_path / "new" / "out.txt"
    write_text(path, "old")
    with pytest.raises(KeyError), atomic_write(path) as new:
        new.write_text("half")
        assert path.read_text() == "old"
        raise KeyError
    assert contents(path.parent) == {"out.txt": "old"}
    with atomic_write(path) as new:
        new.write_text("whole")
    assert contents(path.parent) == {"out.txt": "whole"}


def test_a_file_is_not_written_through_a_link(tmp_path):
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "out.txt").symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match=r"out\.txt is a symbolic link"):
        write_text(tmp_path / "out.txt", "new")
    assert (tmp_path / "precious").read_text() == "kept"


def test_only_files_replace_files_and_folders_folders(tmp_path):
    """With the rights of root, /dev/null could be renamed and replaced."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for name, said in (("pipe", "not a regular file"), ("folder", "a folder")):
        with pytest.raises(ValueError, match=f"{name} is {said}: give another name"):
            write_text(tmp_path / name, "new")
    for name in ("pipe", "file", "folder/../pipe"):
        with pytest.raises(ValueError, match=f"{name} is not a folder"), atomic_folder(tmp_path / name):
            raise AssertionError
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "folder", "file"} and (tmp_path / "pipe").is_fifo()


def test_half_of_a_surrogate_pair_is_written_as_its_escape(tmp_path):
    write_text(tmp_path / "out.json", '{"text": "a\ud83d"}')
    assert (tmp_path / "out.json").read_text() == '{"text": "a\\ud83d"}'


@pytest.mark.slow
def test_what_a_killed_process_left_is_deleted_and_what_a_living_one_writes_is_not(tmp_path):
    (tmp_path / f"out.{gone()}.new").write_text("half")
    (tmp_path / f"scratch.{gone()}.new").mkdir()
    (tmp_path / f"out.{os.getppid()}.new").write_text("of another process")
    write_text(tmp_path / "out", "whole")
    with scratch_folder(tmp_path / "scratch") as folder:
        (folder / "tokens").touch()
    assert contents(tmp_path) == {"out": "whole", f"out.{os.getppid()}.new": "of another process"}


@pytest.mark.slow
@pytest.mark.parametrize("write", ["python", "safetensors"])
def test_a_full_disk_is_one_line_and_leaves_the_old_file(write, full_disk, tmp_path):
    path = tmp_path / "out"
    path.write_text("old")
    with pytest.raises(DiskError, match=r"out could not be written \(File too large\), and what was there before"):  # noqa: SIM117
        with atomic_write(path) as new:
            if write == "python":
                new.write_bytes(bytes(9999))
            else:
                save_file({"x": np.zeros(9999)}, new)
    assert contents(tmp_path) == {"out": "old"}


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(OSError, match="no such thing") as raised, disk_errors(tmp_path):
        raise OSError(errno.ENOENT, "no such thing")
    assert not isinstance(raised.value, DiskError)


def test_a_folder_is_replaced_when_the_new_one_is_whole(tmp_path):
    path = tmp_path / "out"
    path.mkdir()
    for name in ("config.json", "model-1.safetensors", "notes.txt"):
        (path / name).write_text("old")
    old = contents(path)
    with pytest.raises(KeyError), atomic_folder(path, ["model*"]) as new:
        (new / "config.json").write_text("half")
        assert contents(path) == old
        raise KeyError
    assert contents(path) == old
    with atomic_folder(path, ["model*"]) as new:
        (new / "config.json").write_text("new")
        (new / "model.safetensors").write_text("new")
    assert contents(path) == {"config.json": "new", "model.safetensors": "new", "notes.txt": "old"}
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_folder_survives_a_kill_before_between_and_after_the_two_renames(moment, tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.mkdir()
    (path / "a").write_text("old")
    (path / "b").write_text("old")

    def replace_and_die():
        rename, calls = os.rename, []

        def stop(*names):
            calls.append(names)
            if len(calls) == 1 + ["before", "between", "after"].index(moment):
                os.kill(os.getpid(), signal.SIGKILL)
            rename(*names)

        os.rename = stop
        with atomic_folder(path) as new:
            (new / "a").write_text("new")

    if not (child := os.fork()):
        replace_and_die()
        os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    with pytest.raises(KeyError), atomic_folder(path):
        raise KeyError
    assert contents(path) == {"a": "new" if moment == "after" else "old", "b": "old"}
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with atomic_folder(tmp_path / "out") as new:
        (new / "a").write_text("new")
    assert (tmp_path / "out").is_symlink() and contents(tmp_path / "disk") == {"a": "new"}


def test_a_folder_that_cannot_be_renamed_is_refused(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()

    def busy(*_):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "rename", busy)
    with pytest.raises(ValueError, match="cannot be replaced"), atomic_folder(tmp_path / "out"):
        pass
    assert [path.name for path in Path(tmp_path).iterdir()] == ["out"]


def test_neither_a_pipe_nor_a_file_in_place_of_a_folder_is_replaced(tmp_path):
    """A rename would replace /dev/null, where a user may do that."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("kept")
    for name in ("pipe", "file"):
        with (
            pytest.raises(ValueError, match=f"{name} is not a folder: give another name"),
            atomic_folder(tmp_path / name),
        ):
            pass
    with (
        pytest.raises(ValueError, match="pipe is not a regular file: give another name"),
        atomic_write(tmp_path / "pipe"),
    ):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "file").read_text() == "kept"
