"""Fingerprints tell a model that was replaced from a copy of it."""

import shutil

from inference.fingerprint import fingerprint


def test_a_copy_has_the_same_fingerprint_and_a_drafter_that_was_trained_again_another_one(tmp_path):
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(5_000_000))
    before = fingerprint(str(folder))
    shutil.copytree(folder, tmp_path / "copy")
    assert fingerprint(str(tmp_path / "copy")) == before
    (folder / "model.safetensors").write_bytes(b"\1" * 5_000_000)
    assert fingerprint(str(folder)) != before


def test_a_hub_id_has_the_empty_fingerprint():
    assert fingerprint("some/hub-id") == fingerprint(None) == ""
