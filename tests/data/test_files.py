import errno
import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from data.files import (
    CHECKSUMS,
    atomic_folder,
    atomic_write,
    check_files,
    checksum,
    delete_stale,
    disk_errors,
    output_lock,
    read_json,
    reading,
    validated,
    write_checksums,
    write_text,
)


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def killed(action):
    """Run an action in a process that must not survive it."""
    if not (child := os.fork()):
        action()
        os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


# --- reading -----------------------------------------------------------------------------------------------------

DAMAGED = {
    "half an object": (b'{"a": [1,', "invalid JSON"),
    "too deep": (b"[" * 100_000, "recursion"),
    "not UTF-8": (b'["\xff"]', "not UTF-8"),
    "nothing": (b"", "invalid JSON"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_json_is_one_line_with_the_file_the_line_and_the_remedy(tmp_path, name):
    text, reason = DAMAGED[name]
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=rf"^\S*damaged.jsonl( line 1)?: .*{reason}.*; fetch it again$"):
        read_json(path, "fetch it again")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("rows"), "FILE: no 'rows'; copy it"),
        (OSError(errno.ENOENT, "No such file", "FILE"), "FILE: no such file; copy it"),
        (AttributeError("has no shape\nand more"), "FILE: has no shape; copy it"),
        (TypeError(), "FILE: TypeError; copy it"),
        (ValueError("FILE line 3: known"), "FILE line 3: known"),
    ],
)
def test_any_error_of_reading_becomes_one_line_that_begins_with_the_file(error, said):
    with pytest.raises(ValueError, match=f"^{said}$"), reading("FILE", "copy it"):
        raise error


def test_the_types_of_values_are_checked():
    assert validated(tuple[int, ...], [1, 2]) == (1, 2)
    with pytest.raises(ValueError, match=r"^1: .*integer"):
        validated(list[int], [1, None])


# --- writing -----------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_when_the_block_ends_and_kept_when_it_fails_or_is_killed(tmp_path):
    path = tmp_path / "new" / "out.txt"
    write_text(path, "old")
    with pytest.raises(KeyError), atomic_write(path) as new:
        new.write_text("half")
        assert path.read_text() == "old"
        raise KeyError
    assert contents(path.parent) == {"out.txt": "old"}

    def die():
        with atomic_write(path) as new:
            new.write_text("a longer half")
            os.kill(os.getpid(), signal.SIGKILL)

    killed(die)
    assert path.read_text() == "old"
    write_text(path, '{"text": "a\ud83d"}')
    assert contents(path.parent) == {"out.txt": '{"text": "a\\ud83d"}'}, "half of a surrogate pair as its escape"


def test_only_files_replace_files_and_folders_folders(tmp_path):
    """With the rights of root, /dev/null could be renamed and replaced."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("pipe", "folder", "link"):
        with pytest.raises(ValueError, match=f"{name} is not a regular file: give another name"):
            write_text(tmp_path / name, "new")
    for name in ("pipe", "file", "folder/../pipe"):
        with pytest.raises(ValueError, match=f"{name} is not a folder"), atomic_folder(tmp_path / name):
            raise AssertionError
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "folder", "file", "link"}
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("listed", ["[", "[5]", "{}"])
def test_only_files_that_the_list_of_a_folder_names_are_deleted(tmp_path, listed):
    folder = tmp_path / "plots"
    for name in ["../out.png", "own.png", "a/new.png", "old.png", "a/old.png"]:
        write_text(folder / name, "")
    delete_stale(folder, ["old.png", "a/old.png", "a/new.png"])
    names = json.loads((folder / ".written.json").read_text())
    (folder / ".written.json").write_text(json.dumps([*names, "../out.png", str(tmp_path / "out.png"), "missing.png"]))
    delete_stale(folder, ["a/new.png"])
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png")}
    assert files == {"out.png", "plots/own.png", "plots/a/new.png"}
    (folder / ".written.json").write_text(listed)
    with pytest.raises(ValueError, match=r"written\.json.*: .*; delete it$"):
        delete_stale(folder, [])
    assert (folder / "a" / "new.png").exists()


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such thing"), disk_errors(tmp_path):
        raise OSError(errno.ENOENT, "no such thing")


def test_a_folder_is_replaced_when_the_new_one_is_whole(tmp_path):
    path = tmp_path / "out"
    path.mkdir()
    for name in ("config.json", "model-1.safetensors", "notes.txt"):
        (path / name).write_text("old")
    old = contents(path)
    with pytest.raises(KeyError), atomic_folder(path, ["model*"]) as new:
        (new / "config.json").write_text("half")
        raise KeyError
    assert contents(path) == old
    (tmp_path / "link").symlink_to(path)
    with atomic_folder(tmp_path / "link", ["model*"]) as new:
        (new / "config.json").write_text("new")
        (new / "model.safetensors").write_text("new")
    assert contents(path) == {"config.json": "new", "model.safetensors": "new", "notes.txt": "old"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "out"] and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_folder_survives_a_kill_before_between_and_after_the_two_renames(moment, tmp_path):
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

    killed(replace_and_die)
    with pytest.raises(KeyError), atomic_folder(path):
        raise KeyError
    assert contents(path) == {"a": "new" if moment == "after" else "old", "b": "old"}
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


# --- checksums ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    for name, text in {"config.json": "{}", "model.safetensors": "weights", "README.md": "card"}.items():
        (tmp_path / name).write_text(text)
    write_checksums(tmp_path)
    write_checksums(tmp_path)  # whose list is not one of the files
    return tmp_path


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="no sha256sum to compare with")
def test_the_list_is_what_sha256sum_reads_and_writes(folder):
    done = subprocess.run(["sha256sum", "--check", CHECKSUMS], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "config.json: OK\nmodel.safetensors: OK\n"
    for line in ("{} *config.json", "{}  ./config.json"):
        (folder / CHECKSUMS).write_text(line.format(checksum(folder / "config.json")))
        check_files(folder)


def test_each_flipped_byte_and_each_missing_file_is_found_and_a_card_may_be_edited(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    (folder / "README.md").write_text("better")
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        for names in ((), (path.name,)):
            with pytest.raises(ValueError, match=r"model.safetensors is damaged or cut short, or was edited: .*"):
                check_files(folder, *names)
        check_files(folder, "config.json", "README.md")
    path.unlink()
    with pytest.raises(ValueError, match=r"model.safetensors is damaged or cut short"):
        check_files(folder)


@pytest.mark.parametrize(
    ("line", "said"),
    [("\xff", f"{CHECKSUMS}: .*copy or export"), ("{}  ../../etc/passwd", "passwd is damaged")],
)
def test_a_damaged_list_is_refused_and_a_list_names_no_files_outside_its_folder(folder, line, said):
    (folder / CHECKSUMS).write_text(line.format(checksum(folder / "config.json")), encoding="latin-1")
    with pytest.raises(ValueError, match=f"{re.escape(str(folder))}/{said}"):
        check_files(folder)


# --- locks -------------------------------------------------------------------------------------------------------


def test_a_second_process_is_told_who_holds_the_place_and_a_killed_one_holds_nothing(tmp_path):
    place = tmp_path / "results" / "out"
    reader, writer = os.pipe()
    if not (child := os.fork()):
        with output_lock(place):
            os.write(writer, b"held")
            time.sleep(60)
        os._exit(0)
    assert os.read(reader, 4) == b"held"
    (tmp_path / "other name").symlink_to(tmp_path / "results")
    for name in (place, tmp_path / "other name" / "out"):
        told = rf"out is in use by process {child} on {os.uname().nodename} since \d{{4}}-.*: wait until it ends, or"
        with pytest.raises(ValueError, match=told), output_lock(name):
            raise AssertionError
    with output_lock(tmp_path / "results" / "another"):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with output_lock(place):
        assert (tmp_path / "results" / ".out.lock").exists()
    assert not (tmp_path / "results" / ".out.lock").exists()


def test_a_folder_in_a_place_that_is_not_writable_holds_its_lock_itself(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with output_lock(tmp_path / "out"):
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    assert not list((tmp_path / "out").iterdir())


def test_a_command_that_writes_nothing_leaves_nothing(tmp_path):
    with output_lock(tmp_path / "a" / "b" / "out"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not list(tmp_path.iterdir())
    with output_lock(tmp_path / "out"):
        (tmp_path / "out").touch()
    with output_lock(tmp_path / "out"), output_lock(tmp_path / "out" / "deeper"):
        pass  # no lock fits into a file, and the command itself says what is wrong
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
