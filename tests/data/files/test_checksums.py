import re
import shutil
import subprocess

import pytest

from data.files import CHECKSUMS, check_files, checksum, write_checksums


@pytest.fixture
def folder(tmp_path):
    for name, text in {"config.json": "{}", "model.safetensors": "weights", "README.md": "card"}.items():
        (tmp_path / name).write_text(text)
    write_checksums(tmp_path)
    return tmp_path


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="no sha256sum to compare with")
def test_the_list_is_what_sha256sum_reads_and_writes(folder):
    done = subprocess.run(["sha256sum", "--check", CHECKSUMS], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "config.json: OK\nmodel.safetensors: OK\n"


def test_each_flipped_byte_is_found(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        for names in ((), (path.name,)):
            with pytest.raises(ValueError, match=r"model.safetensors is damaged or cut short, or was edited: .*"):
                check_files(folder, *names)
        check_files(folder, "config.json")
    path.write_bytes(whole)
    check_files(folder)


def test_a_card_may_be_edited_and_other_files_have_no_checksum(folder):
    (folder / "README.md").write_text("better")
    (folder / "notes.txt").write_text("more")
    check_files(folder)
    check_files(folder, "notes.txt")


def test_a_missing_file_and_a_damaged_list_are_refused(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json is damaged or cut short"):
        check_files(folder)
    (folder / CHECKSUMS).write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=rf"{CHECKSUMS} is damaged"):
        check_files(folder)
    (folder / CHECKSUMS).unlink()
    check_files(folder)


def test_a_list_cannot_name_files_outside_the_folder(folder):
    (folder / CHECKSUMS).write_text(f"{checksum(folder / 'config.json')}  ../../../etc/passwd\n")
    with pytest.raises(ValueError, match=re.escape(f"{folder}/passwd is damaged or cut short")):
        check_files(folder)


@pytest.mark.parametrize("form", ["{digest}  {name}", "{digest} *{name}", "{digest}  ./{name}"])
def test_the_forms_that_sha256sum_writes_are_read(tmp_path, form):
    (tmp_path / "a.bin").write_bytes(b"content")
    line = form.format(digest=checksum(tmp_path / "a.bin"), name="a.bin")
    (tmp_path / CHECKSUMS).write_text(f"{line}\n")
    check_files(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"contents")
    with pytest.raises(ValueError, match="does not have its checksum"):
        check_files(tmp_path)
