"""Exported folders: equal to their checkpoint, never half replaced, and on a hub that speaks the hub's protocol."""

import base64
import hashlib
import json
import re
import shutil
from http.server import ThreadingHTTPServer

import pytest
import torch
import yaml
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file, save_file

from data.hub import find_folder
from data.tokenizer import tokenizer_hash
from drafters import checkpoint
from inference import drafter_specs
from inference.verifier.runner import Runner
from tests.conftest import Handler, serving
from train.cli import run_drafters


def test_an_exported_folder_holds_the_configuration_the_weights_and_a_model_card(trained, tiny, tiny_base):
    names = ["README.md", "SHA256SUMS", "config.json", "model.safetensors"]
    assert sorted(path.name for path in trained.folder.iterdir()) == names
    saved = torch.load(trained.ckpt, weights_only=True)
    config = json.loads((trained.folder / "config.json").read_text())
    assert config["class_path"] == "drafters.CTC"
    assert config["init_args"] == saved["hyper_parameters"]["drafter"]["init_args"]
    assert config["base_name"] == str(tiny)
    assert config["tokenizer_hash"] == tokenizer_hash(tiny_base.tokenizer)
    training = config["training"]
    assert training["steps"] == 8 and training["data"] == ["embedded:24"] and training["val_answers"] == "greedy"
    assert training["val_acceptance_length"] == pytest.approx(saved["measured"]["acceptance_length"], abs=1e-4)
    card = (trained.folder / "README.md").read_text()
    for said in (
        f"Base: `{tiny}`",
        "embedded:24, 8 steps",
        f"{saved['measured']['acceptance_length']:.2f} tokens per base forward",
        f"`lightning fit --config {trained.config}`",
        "| trunk.num_frames | 6 |",
    ):
        assert said in card


def test_a_drafter_is_replaced_only_with_overwrite_and_as_a_whole(call, trained, tmp_path):
    folder = shutil.copytree(trained.folder, tmp_path / "drafter")
    (folder / "model.safetensors").write_bytes(b"mine")
    assert "already holds a model" in call(run_drafters, "export", trained.ckpt, folder).one_line_error("drafters")
    assert (folder / "model.safetensors").read_bytes() == b"mine"
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(trained.ckpt)
    (folder / "notes.txt").write_text("of the user")
    moved = shutil.copy(trained.ckpt, tmp_path / "alone.ckpt")  # the checkpoint is all that it needs
    assert call(run_drafters, "export", moved, folder, "--overwrite").code == 0
    names = {"README.md", "SHA256SUMS", "config.json", "model.safetensors", "notes.txt"}
    assert {path.name for path in folder.iterdir()} == names and not (folder / "README.md").is_symlink()
    assert (folder / "model.safetensors").read_bytes() == (trained.folder / "model.safetensors").read_bytes()
    (folder / "config.json").unlink()
    refused = call(run_drafters, "export", trained.ckpt, folder, "--overwrite")
    assert "holds other files than those of a drafter" in refused.one_line_error("drafters")


def test_a_base_is_never_replaced_by_its_drafter(call, trained, tiny, tmp_path):
    base = shutil.copytree(tiny, tmp_path / "base")
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    for more in ((), ("--overwrite",)):
        refused = call(run_drafters, "export", trained.ckpt, base, *more)
        assert "holds other files than those of a drafter" in refused.one_line_error("drafters")
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before


@pytest.mark.parametrize("part", ["model.safetensors", "config.json"])
def test_what_was_written_is_compared_with_the_checkpoint(part, call, trained, tmp_path, monkeypatch):
    save = checkpoint.save

    def damaging(folder, drafter, config):
        save(folder, drafter, config)
        if part == "config.json":
            text = (folder / part).read_text()
            (folder / part).write_text(text.replace('"steps": 8', '"steps": 9'))
        else:
            weights = load_file(folder / part)
            weights["blank_row"].view(torch.int32).bitwise_xor_(1)
            save_file(weights, folder / part)

    monkeypatch.setattr(checkpoint, "save", damaging)
    error = call(run_drafters, "export", trained.ckpt, tmp_path / "out").one_line_error("drafters")
    assert "was not written as it is in the checkpoint" in error and not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_not_exported(call, trained, tmp_path):
    saved = torch.load(trained.ckpt, weights_only=True)
    saved["state_dict"]["drafter.blank_row"][0] = torch.nan
    torch.save(saved, tmp_path / "nan.ckpt")
    error = call(run_drafters, "export", tmp_path / "nan.ckpt", tmp_path / "out").one_line_error("drafters")
    assert "blank_row of the checkpoint holds numbers that are not finite" in error


def test_a_folder_is_exported_again_with_another_base_and_evaluations(call, trained, tmp_path):
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "results.md").write_text("| drafter | tokens |\n|---|---|\n| ctc | 3.14 |\n")
    words = "--base", "someone/base-7b", "--results", tmp_path / "eval", "--license", "mit"
    assert call(run_drafters, "export", trained.folder, tmp_path / "a", *words).code == 0
    assert call(run_drafters, "export", trained.ckpt, tmp_path / "b", "--dtype", "bfloat16").code == 0
    exact, rounded = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(rounded[name], weight.bfloat16()) for name, weight in exact.items())
    card = (tmp_path / "a" / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "someone/base-7b"
    assert "## Measured" in card and "| ctc | 3.14 |" in card and "license: mit" in card
    assert checkpoint.read_config(tmp_path / "a").base_name == "someone/base-7b"
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (trained.folder / "model.safetensors").read_bytes()


# ---- the hub


TOKEN = "hf_secret_of_the_test"


class Hub(ThreadingHTTPServer):
    """The repositories of a hub: whether each is private, the files of its commits, and all requests."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.private, self.files, self.latest, self.requests = {}, {}, {}, []

    def commit(self, repository, body):
        """Add the uploaded files to those of the latest commit."""
        entries = [json.loads(line) for line in body.splitlines()]
        new = {each["value"]["path"]: base64.b64decode(each["value"]["content"]) for each in entries[1:]}
        files = self.files.get(self.latest.get(repository), {}) | new
        oid = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.files[oid], self.latest[repository] = files, oid
        return oid


class HubHandler(Handler):
    protocol_version = "HTTP/1.1"

    def reply(self, status, content=b"", **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        super().reply(status, content, {key.replace("_", "-"): value for key, value in headers.items()})

    def do_POST(self):
        hub, body = self.server, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append(self.path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            error = {"X_Error_Message": "Invalid token", "X_Request_Id": "1-2"}  # its client begins with the id
            return self.reply(401, {"error": "Invalid token"}, **error)
        url = f"{constants.ENDPOINT}/ada/drafter"
        if self.path == "/api/repos/create":
            asked, is_new = json.loads(body), "ada/drafter" not in hub.private
            hub.private.setdefault("ada/drafter", asked.get("private", asked.get("visibility") == "private"))
            return self.reply(200 if is_new else 409, {"url": url})
        if self.path.endswith("/preupload/main"):
            asked, how = json.loads(body)["files"], {"uploadMode": "regular", "shouldIgnore": False}
            return self.reply(200, {"files": [{"path": each["path"], **how} for each in asked]})
        if self.path.endswith("/commit/main"):
            oid = hub.commit("ada/drafter", body)
            return self.reply(200, {"commitUrl": f"{url}/commit/{oid}", "commitOid": oid})
        return self.reply(200, {"errors": [], "warnings": []})  # of the card

    def do_GET(self):
        hub = self.server
        hub.requests.append(self.path)
        path = re.fullmatch(r"/(?:api/models/)?(\w+/\w+)/(revision|tree|resolve)/(\w+)(?:/(.+?))?(?:\?.*)?", self.path)
        repository, kind, revision, name = path.groups() if path else (None, None, None, None)
        oid = hub.latest.get(repository) if revision == "main" else revision
        if oid not in hub.files:
            return self.reply(404, {"error": "not found"}, X_Error_Code="RevisionNotFound")
        files = hub.files[oid]
        if kind == "revision":
            return self.reply(200, {"id": repository, "sha": oid, "siblings": [{"rfilename": each} for each in files]})
        if kind == "tree":
            sizes = {each: len(content) for each, content in files.items()}
            return self.reply(200, [{"type": "file", "path": each, "size": sizes[each], "oid": oid} for each in files])
        content = files.get(name, b"")
        return self.reply(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=oid)

    do_HEAD = do_GET


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A hub of our own, to which the hub's client is pointed."""
    with serving(Hub()) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def push(trained, out, *more):
    """Export a drafter and upload its folder, as `hf upload` does; return the commit."""
    run_drafters(["export", str(trained.ckpt), str(out), *more])
    HfApi().create_repo("ada/drafter", private=True, exist_ok=True)
    return HfApi().upload_folder(repo_id="ada/drafter", folder_path=out).oid


def test_an_uploaded_drafter_loads_at_its_commit_whatever_comes_later(server, trained, tiny_base, tmp_path):
    spec = f"ctc=ada/drafter@{push(trained, tmp_path / 'a', '--license', 'apache-2.0')}"
    files = server.files[server.latest["ada/drafter"]]
    assert set(files) == set(checkpoint.FILES)
    card = files["README.md"].decode()
    assert "license: apache-2.0\nlibrary_name:" in card and "base_model" not in card, "the base is a folder"
    loaded, expected = (drafter_specs.make(each, Runner(tiny_base)) for each in (spec, f"ctc={trained.folder}"))
    torch.testing.assert_close(loaded.state_dict(), expected.state_dict(), rtol=0, atol=0)
    asked = len(server.requests)
    drafter_specs.make(spec, Runner(tiny_base))  # the commit is in the cache
    assert len(server.requests) == asked
    push(trained, tmp_path / "b")
    assert len(server.files) == 2
    found = drafter_specs.drafter_folder(drafter_specs.split(spec)[1])
    assert "apache" in (found / "README.md").read_text()
    latest = drafter_specs.drafter_folder("ada/drafter@main")
    assert "apache" not in (latest / "README.md").read_text()


def test_what_the_hub_does_not_have_and_a_hub_that_cannot_be_reached_are_refused(
    server, trained, tiny_base, monkeypatch, tmp_path
):
    with pytest.raises(ValueError, match=r"cannot download ada/none@main .not found.: check the name and the revision"):
        drafter_specs.make("ctc=ada/none@main", Runner(tiny_base))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    with pytest.raises(ValueError, match=r"Connection refused.*go online"):
        find_folder(f"ada/drafter@{'0' * 40}", checkpoint.FILES)
