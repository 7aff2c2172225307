"""Drafters on a hub: a server that speaks the hub's protocol keeps what is uploaded and gives it out again."""

import base64
import hashlib
import json
import re
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from huggingface_hub import constants

from data import hub
from data.files import write_checksums
from data.tokenizer import tokenizer_hash
from drafters import CTC, checkpoint, recipe
from inference import drafter_specs
from inference.fingerprint import fingerprint
from inference.results.folders import EvaluationResults
from inference.results.metrics import summarise
from inference.results.records import Answer, Turn
from inference.verifier.base import load_base
from inference.verifier.runner import Runner
from inference.verifier.session import StepCost
from train.cli.commands import main
from train.export.export import model_card
from train.export.push import _row, card_for_hub

TOKEN = "hf_secret_of_the_test"


class Hub:
    """The repositories: visibility, and the files of each commit."""

    def __init__(self):
        self.private, self.commits, self.requests = {}, {}, []

    def commit(self, repository, body):
        files = dict(self.commits.get(repository, {}).get("main", {}))
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        oid = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits.setdefault(repository, {}).update({oid: files, "main": files})
        return oid

    def oid(self, repository, revision):
        files = self.commits[repository][revision]
        return next(oid for oid, each in self.commits[repository].items() if each is files and oid != "main")


def handler_of(hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def reply(self, status, content=b"", **headers):
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for key, value in {"Content-Length": len(content), **headers}.items():
                self.send_header(key.replace("_", "-"), str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.requests.append((self.command, self.path))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                error = {"X_Error_Message": "Invalid token", "X_Request_Id": "1-2"}  # its client begins with the id
                return self.reply(401, {"error": "Invalid token"}, **error)
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                repository = f"{asked.get('organization') or 'ada'}/{asked['name']}"
                status = 409 if repository in hub.private else 200
                hub.private.setdefault(repository, asked.get("private", asked.get("visibility") == "private"))
                return self.reply(status, {"url": f"{constants.ENDPOINT}/{repository}"})
            if self.path == "/api/validate-yaml":
                return self.reply(200, {"errors": [], "warnings": []})
            repository, action = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", self.path).groups()
            if action == "preupload":
                files = [
                    {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for each in json.loads(body)["files"]
                ]
                return self.reply(200, {"files": files})
            oid = hub.commit(repository, body)
            return self.reply(200, {"commitUrl": f"{constants.ENDPOINT}/{repository}/commit/{oid}", "commitOid": oid})

        def do_GET(self):
            hub.requests.append((self.command, self.path))
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([\w.-]+))?(\?.*)?", self.path):
                repository, revision = match[1], match[2] or "main"
                if revision not in hub.commits.get(repository, {}):
                    return self.reply(404, {"error": "not found"}, X_Error_Code="RevisionNotFound")
                names = [{"rfilename": name} for name in hub.commits[repository][revision]]
                oid = hub.oid(repository, revision)
                return self.reply(200, {"id": repository, "sha": oid, "siblings": names, "private": True})
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([\w.-]+)(\?.*)?", self.path):
                files = hub.commits[match[1]][match[2]]
                listed = [{"type": "file", "path": path, "size": len(files[path]), "oid": "0" * 40} for path in files]
                return self.reply(200, listed)
            if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([\w.-]+)/(.+)", self.path):
                files = hub.commits.get(match[1], {}).get(match[2], {})
                if match[3] not in files:
                    return self.reply(404, b"", X_Error_Code="EntryNotFound")
                content, oid = files[match[3]], hub.oid(match[1], match[2])
                return self.reply(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=oid)
            return self.reply(404)

        do_HEAD = do_GET

    return Handler


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A hub of our own, to which the hub's client is pointed."""
    hub = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
        server.shutdown()


@pytest.fixture(scope="module")
def base(tiny):
    return load_base(str(tiny))


@pytest.fixture
def folder(base, tmp_path):
    """An exported CTC drafter, with a file next to it that must stay here."""
    torch.manual_seed(0)
    config = checkpoint.DrafterConfig(
        "drafters.CTC", {}, base.shape, base.name, tokenizer_hash(base.tokenizer), {"val_answers": "text", "data": []}
    )
    training = {"val_acceptance_length": None, "val_step": None, "steps": 3, "command": None}
    config.training.update(training)
    checkpoint.save(tmp_path / "ctc", recipe.build(CTC, base.shape, {}), config)
    (tmp_path / "ctc" / "README.md").write_text(model_card(config, 7))
    write_checksums(tmp_path / "ctc")
    (tmp_path / "ctc" / "secret.env").write_text("HF_TOKEN=x")
    return tmp_path / "ctc"


def test_a_pushed_drafter_is_private_and_loads_at_its_commit(server, folder, base, capsys):
    main(["push", str(folder), "ada/drafter"])
    spec = re.search(r"--drafter (ctc=ada/drafter@[0-9a-f]{40})\n", capsys.readouterr().out)[1]
    assert server.private == {"ada/drafter": True}
    assert set(server.commits["ada/drafter"]["main"]) == set(checkpoint.FILES)
    loaded = drafter_specs.make(spec, Runner(base))
    expected = drafter_specs.make(f"ctc={folder}", Runner(base))
    for name, weight in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    asked = len(server.requests)
    drafter_specs.make(spec, Runner(base))  # the commit is in the cache
    assert len(server.requests) == asked


def test_a_later_commit_does_not_change_what_a_spec_loads(server, folder, base, capsys):
    main(["push", str(folder), "ada/drafter"])
    spec = re.search(r"--drafter (\S+)", capsys.readouterr().out)[1]
    (folder / "README.md").write_text("---\n---\nanother card")
    main(["push", str(folder), "ada/drafter", "--public", "true"])
    assert server.private == {"ada/drafter": True} and len(server.commits["ada/drafter"]) == 3
    found = drafter_specs.drafter_folder(drafter_specs.split(spec)[1])
    assert "another card" not in (found / "README.md").read_text()
    latest = drafter_specs.drafter_folder("ada/drafter@main")
    assert "another card" in (latest / "README.md").read_text()


def test_a_dry_run_shows_the_card_and_sends_nothing(server, folder, capsys):
    main(["push", str(folder), "ada/drafter", "--license", "apache-2.0", "--dry_run", "true"])
    out = capsys.readouterr().out
    assert server.requests == [] and "nothing was uploaded" in out
    assert "license: apache-2.0\nlibrary_name:" in out and "base_model" not in out, "the base is a folder"
    assert "drafters serve-command ada/drafter@REVISION" in out and "--drafter ctc=ada/drafter@REVISION" in out
    assert all(name in out for name in checkpoint.FILES) and "secret.env" not in out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nowhere", "ada/drafter"], "no drafter at nowhere"),
        (["FOLDER", "drafter"], "'drafter' is no repository of the hub: write OWNER/NAME"),
        (["FOLDER", "ada/drafter", "--results", "FOLDER"], "holds no results.json"),
    ],
)
def test_mistakes_are_refused_before_anything_is_sent(server, folder, arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["push", *(str(folder) if each == "FOLDER" else each for each in arguments)])
    assert stopped.value.code == 2 and said in " ".join(capsys.readouterr().err.split())
    assert server.requests == []


def test_a_folder_in_vllm_s_format_is_not_pushed(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "medusa", "hidden_size": 8, "vocab_size": 9}))
    with pytest.raises(SystemExit):
        main(["push", str(tmp_path), "ada/drafter"])
    said = "is in vLLM's format: push the folder written without --format vllm"
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("checkpoints/tiny-chat", None),  # which looks like a name of the hub
        ("ada/base", "base_model: ada/base"),
        ("ada/base@v1.2", "base_model: ada/base"),
        ("/my/base", None),
    ],
)
def test_the_card_names_a_base_of_the_hub_and_no_folder(name, line, folder):
    config = replace(checkpoint.read_config(folder), base_name=name)
    (folder / "README.md").write_text(model_card(config, 7))
    header = card_for_hub(folder, config, "ada/drafter").split("---\n")[1].splitlines()
    assert [each for each in header if each.startswith("base_model")] == ([line] if line else [])


def test_the_card_shows_the_speed_up_of_a_served_run():
    summary = measured().summaries["mt_bench"]["ctc"]
    row = _row("mt_bench", "ctc", replace(summary, speedup=None, wall_speedup=1.5))
    assert "| 1.50× (wall time) |" in row and "(wall" not in _row("mt_bench", "ctc", replace(summary, speedup=1.4))


def measured(**context):
    """Results that hold a drafter as our own loop and as a server names it."""
    turn = Turn("", [1, 2], 3, [StepCost(2, 1, 1, 4, 0, 0, (0.1,) * 5)], 1.0)
    answers = [Answer(1, "writing", "ctc", [turn], [True])]
    summary = summarise(answers, answers)
    labels = "none", "ctc", "ctc:tree=chain @ 4"
    return EvaluationResults("runs/eval", {"": context}, {"mt_bench": dict.fromkeys(labels, summary)}, {}, {})


def rows_of(card):
    return [line.split(" | ")[1] for line in card.splitlines() if line.startswith("| mt_bench")]


def test_the_card_shows_only_what_was_measured_with_these_files(folder):
    config, own = checkpoint.read_config(folder), fingerprint(folder)
    both = ["ctc", "ctc:tree=chain @ 4"]

    def card(stated):
        results = [measured(**stated)]
        return card_for_hub(folder, config, "ada/drafter", results)

    assert rows_of(card({"drafter_fingerprints": f"ctc: {own}; ctc:tree=chain: {own}"})) == both
    mixed = card({"drafter_fingerprints": f"ctc: {'0' * 16}; ctc:tree=chain: {own}; eagle: {'1' * 16}"})
    assert rows_of(mixed) == both[1:] and "do not say" not in mixed
    older = card({})
    assert rows_of(older) == both and "- drafter: one named ctc; the results do not say which files" in older
    with pytest.raises(ValueError, match="measured ctc, ctc:tree=chain @ 4 from other files than this folder's"):
        card({"drafter_fingerprints": f"ctc: {'0' * 16}; ctc:tree=chain: {'0' * 16}"})


def test_damaged_weights_are_not_pushed(server, folder, capsys):
    with (folder / "model.safetensors").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(SystemExit):
        main(["push", str(folder), "ada/drafter"])
    assert "does not have its checksum" in " ".join(capsys.readouterr().err.split()) and server.requests == []


def test_a_refused_token_and_no_token_take_one_line(server, folder, monkeypatch, capsys):
    wrong = "hf_wrong_token", "cannot upload to ada/drafter: Invalid token"
    for token, said in (wrong, (None, "nobody is logged in to the hub")):
        monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
        with pytest.raises(SystemExit) as stopped:
            main(["push", str(folder), "ada/drafter"])
        err = capsys.readouterr().err
        assert stopped.value.code == 2 and said in " ".join(err.split()) and "Traceback" not in err
        assert "hf_wrong_token" not in err


def test_what_the_hub_does_not_have_is_refused_in_one_line(server, base):
    with pytest.raises(ValueError, match=r"cannot download ada/none@main: .*; check the name and the revision"):
        drafter_specs.make("ctc=ada/none@main", Runner(base))


def test_an_unreachable_hub_is_refused_at_once(server, folder, monkeypatch, capsys):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SystemExit) as stopped:
        main(["push", str(folder), "ada/drafter"])
    assert stopped.value.code == 2 and "cannot upload to ada/drafter: " in capsys.readouterr().err
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    with pytest.raises(ValueError, match="is not here, and the hub cannot be reached"):
        hub.find_folder(f"ada/drafter@{'0' * 40}", checkpoint.FILES)


def test_a_local_folder_of_that_name_comes_first(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ada" / "drafter@main").mkdir(parents=True)
    assert hub.find_folder("ada/drafter@main", checkpoint.FILES).is_dir() and server.requests == []


@pytest.mark.slow
def test_the_card_shows_what_was_measured_for_this_drafter(server, folder, base, tmp_path, capsys):
    results = str(tmp_path / "eval")
    measured = ["--benchmark", "embedded", "--limit", "2", "--max_new_tokens", "6", "--repeats", "1", "--out", results]
    main(["eval", "--base", base.name, "--drafter", f"ctc={folder}", "--drafter", "anpd", *measured])
    capsys.readouterr()
    main(["push", str(folder), "ada/drafter", "--results", results])
    card = server.commits["ada/drafter"]["main"]["README.md"].decode()
    rows = [line for line in card.splitlines() if line.startswith("| embedded")]
    summary = json.loads((tmp_path / "eval" / "results.json").read_text())["results"]["embedded"]["ctc"]
    assert len(rows) == 1 and rows[0].startswith(f"| embedded | ctc | {summary['acceptance_length']:.2f} |")
    assert f"{summary['identical']}/2" in rows[0] and "transformers" in card and "- device: cpu" in card
    (tmp_path / "eval" / "results.json").write_text(
        (tmp_path / "eval" / "results.json").read_text().replace('"ctc"', '"block"')
    )
    with pytest.raises(SystemExit):
        main(["push", str(folder), "ada/drafter", "--results", results])
    assert "holds no results of ctc, but of none, block, anpd" in " ".join(capsys.readouterr().err.split())
