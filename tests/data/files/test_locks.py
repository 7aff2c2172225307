import os
import signal
import time

import pytest

from data.files import output_lock


@pytest.fixture
def hold():
    """Holds a lock in another process until it is killed; returns the id of the process."""
    children = []

    def start(*place):
        reader, writer = os.pipe()
        if not (child := os.fork()):
            with output_lock(*place):
                os.write(writer, b"held")
                time.sleep(60)
            os._exit(0)
        children.append(child)
        assert os.read(reader, 4) == b"held"
        return child

    yield start
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_second_process_is_told_who_holds_the_place(hold, tmp_path):
    place = tmp_path / "results" / "out"
    holder = hold(place)
    (tmp_path / "other name").symlink_to(tmp_path / "results")
    for name in (place, tmp_path / "other name" / "out"):
        told = rf"out is in use by process {holder} on {os.uname().nodename} since \d{{4}}-.*: wait until it ends, or"
        with pytest.raises(ValueError, match=told), output_lock(name):
            raise AssertionError
    with output_lock(tmp_path / "results" / "another"):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    place = tmp_path / "out"
    if not (child := os.fork()):
        with output_lock(place):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    left = tmp_path / ".out.lock"
    assert left.exists()
    with output_lock(place):
        pass
    assert not left.exists()


def test_a_folder_in_a_place_that_is_not_writable_holds_its_lock_itself(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with output_lock(tmp_path / "out"):
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    assert not list((tmp_path / "out").iterdir())


def test_a_missing_folder_is_left_to_a_command_that_makes_none(tmp_path):
    with output_lock(tmp_path / "missing" / "out", makes_folders=False):
        assert not list(tmp_path.iterdir())


def test_a_command_that_writes_nothing_leaves_nothing(tmp_path):
    with output_lock(tmp_path / "a" / "b" / "out"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not list(tmp_path.iterdir())
    with output_lock(tmp_path / "out"):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "results.json").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["results.json"]


def test_a_place_that_no_lock_fits_into_is_left_to_the_command(tmp_path):
    (tmp_path / "out").touch()
    with output_lock(tmp_path / "out"), output_lock(tmp_path / "out" / "deeper"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_only_one_of_many_processes_that_take_turns_holds_the_lock(tmp_path):
    """Each process appends to a file and checks that no other has done so while it holds the lock."""
    log, children = tmp_path / "log", []
    for _ in range(4):
        if not (child := os.fork()):
            done = 0
            while done < 25:
                try:
                    with output_lock(tmp_path / "out"), log.open("a") as stream:
                        size = os.fstat(stream.fileno()).st_size
                        stream.write("x")
                        stream.flush()
                        done += 1
                        if os.fstat(stream.fileno()).st_size != size + 1:
                            os._exit(1)
                except ValueError:
                    time.sleep(0.0005)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert log.stat().st_size == 100
