"""``drafters eval --endpoint``: a foreign server, measured by the load generator over real HTTP."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from inference.evaluation.served.client import ServerClient, ServerError
from inference.results import folders, records
from train.cli import run_drafters as main

KEY = "MEASURED_SERVER_KEY"
QUESTIONS = ["w5 w6 w7 w8", "w9 w9", "w10 w11 w12", "w20 w21 w22"]
TOKENS = 24


@pytest.fixture(scope="module")
def asked(make_base, toy_tokenizer, tmp_path_factory):
    """The arguments of an evaluation of four questions, one of them of two turns."""
    folder = tmp_path_factory.mktemp("asked")
    make_base(context=4096).model.config.save_pretrained(folder / "base")
    toy_tokenizer.save_pretrained(folder / "base")
    turns = [[text] for text in QUESTIONS]
    turns[1].append("w3 w4")
    rows = [{"question_id": 1 + at, "category": "a", "turns": own} for at, own in enumerate(turns)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval", "--base", str(folder / "base"), "--benchmark", "mt_bench"]
    return [*words, "--questions", str(folder / "questions.jsonl"), "--max-new-tokens", str(TOKENS)]


class Foreign(BaseHTTPRequestHandler):
    """Another OpenAI-compatible server: it knows no token ids, has no metrics, and breaks as it is told."""

    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.server.num_connections += 1

    def do_GET(self):
        self.server.authorizations.add(self.headers["Authorization"])
        if self.path == "/v1/models":
            echoed = {word: f"{word} {self.headers['Authorization']}" for word in ("id", "drafter", "owned_by")}
            plain = {"id": "foreign", "owned_by": "someone"}
            return self.reply(200, {"data": [echoed if self.server.fault == "spell" else plain]})
        return self.reply(404, {})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.num_asked += 1
        fault = self.server.fault if self.server.num_asked > self.server.num_good else None
        if "return_token_ids" in asked and fault not in ("ignore", "spell", "w9 w10"):
            return self.reply(400, {"error": {"message": "return_token_ids: extra fields not permitted"}})
        if fault == "echo":
            return self.reply(401, {"error": {"message": f"wrong key {self.headers['Authorization']}"}})
        if fault == "redirect":
            return self.reply(307, {}, Location="http://127.0.0.1:9/")
        words = [f"w{3 + (sum(asked['prompt']) + at) % 36}" for at in range(asked["max_tokens"])]
        words = {"empty": [""], "spell": [self.headers["Authorization"]]}.get(fault, words)
        events = [{"choices": [{"index": 0, "text": word and f"{word} ", "finish_reason": None}]} for word in words]
        if fault == "w9 w10":
            events = [{"choices": [{"index": 0, "text": fault, "token_ids": self.server.token_ids}]}]
        events.append({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if fault == "cut":
            events.pop()
        if fault == "error":
            events[2] = {"error": {"message": "out of memory\nat line 3"}}
        if fault == "list":
            events[1] = [1, 2]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return self.reply(200, body.encode()[: 40 if fault == "half" else None])

    def reply(self, status, content, **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *given):
        pass


@contextmanager
def foreign_server(fault=None, num_good=0):
    with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        server.fault, server.num_good, server.num_asked, server.authorizations = fault, num_good, 0, set()
        server.num_connections, server.token_ids = 0, []
        server.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_a_server_without_metrics_and_token_ids_is_measured_without_acceptance(asked, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, "secret-of-foreign")
    with foreign_server() as server, foreign_server("ignore") as other:
        endpoints = ["--endpoint", f"vanilla={server.url}", "--endpoint", f"own={other.url}", "--api-key-env", KEY]
        main([*asked, *endpoints, "--concurrency", "2", "--out", str(tmp_path / "out")])
        assert server.authorizations == {"Bearer secret-of-foreign"}
    results = folders.read(tmp_path / "out")
    for name in ("vanilla @ 2", "own @ 2"):
        summary = results.summaries["mt_bench"][name]
        assert (summary.acceptance_length, summary.draft_tokens, summary.served.inter_token) == (None, None, None)
        assert summary.identical == 4 and summary.baseline == "vanilla @ 2" and summary.served.first_token
        assert summary.tokens == TOKENS * 5
    assert "own sends no token ids" in results.context["warnings"], "it ignores the field that the other refuses"
    assert not any("secret-of" in path.read_text() for path in (tmp_path / "out").rglob("*.*") if path.suffix != ".png")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["spell", "w9 w10"])
def test_no_result_holds_the_key_that_a_server_echoes(key, asked, toy_tokenizer, tmp_path, monkeypatch):
    """As text, with the model's name, or as token ids that spell it."""
    secret = "secret-of-foreign" if key == "spell" else key
    monkeypatch.setenv(KEY, secret)
    with foreign_server(key) as server:
        server.token_ids = toy_tokenizer(key).input_ids
        words = ["--endpoint", server.url, "--api-key-env", KEY, "--concurrency", "1", "--out", str(tmp_path / "out")]
        main([*asked, *words])
    answers = records.read(tmp_path / "out" / "answers" / "mt_bench" / "server___1.jsonl")
    for turn in (turn for answer in answers for turn in answer.turns):
        assert secret not in turn.text and secret not in toy_tokenizer.decode(turn.token_ids)
    places = [path for path in (tmp_path / "out").rglob("*.*") if path.suffix != ".png"]
    if key == "spell":
        assert "[the API key]" in answers[0].turns[0].text
        assert not any(secret in path.read_text() for path in places)


@pytest.mark.slow
def test_an_evaluation_whose_server_fails_continues_where_it_stopped(asked, tmp_path, capsys):
    words = [*asked, "--concurrency", "[1,2]", "--out", str(tmp_path / "out"), "--endpoint"]
    per_run = len(QUESTIONS) + 1
    num_before = 2 + 1 + per_run  # the probe, with and without token ids, and the first run behind its warm-up
    with foreign_server("error", num_before + 4) as server:
        with pytest.raises(SystemExit) as stopped:
            main([*words, f"a={server.url}"])
        assert stopped.value.code == 2
        assert "broke an answer off: out of memory at line 3" in capsys.readouterr().err.splitlines()[-1]
        server.num_good, server.num_asked = 10**6, 0
        main([*words, f"a={server.url}"])
        # The probe, the warm-up and the second run; a request of the first command may still have been on its way.
        assert 2 + 2 + per_run <= server.num_asked < num_before + 2 + per_run
    assert list(folders.read(tmp_path / "out").summaries["mt_bench"]) == ["a @ 1", "a @ 2"]


def test_a_server_whose_tokens_have_no_text_is_not_believed_to_send_token_ids():
    with foreign_server("empty") as server:
        client = ServerClient(server.url)
        found = client.complete("foreign", [3, 4], 1, {})
        client.close()
    assert (found.text, found.token_ids) == ("", None)


def test_requests_one_after_the_other_share_a_connection():
    with foreign_server("ignore") as server:
        client = ServerClient(server.url)
        texts = [client.complete("foreign", [3, 4], 5, {}).text for _ in range(5)]
        client.close()
        assert texts == ["w10 w11 w12 w13 w14 "] * 5 and server.num_connections == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("echo", "HTTP 401 Unauthorized): pass --api-key-env"),
        ("redirect", "HTTP 307 Temporary Redirect)"),
        ("cut", "its stream ended without a reason"),
        ("half", "its stream ended without a reason"),
        ("error", "broke an answer off: out of memory at line 3"),
        ("list", "not as an OpenAI-compatible server does"),
    ],
)
def test_a_reply_that_is_wrong_is_explained_in_one_line_without_the_key(fault, message, monkeypatch):
    monkeypatch.setenv(KEY, "secret-of-foreign")
    with foreign_server(fault) as server:
        client = ServerClient(server.url, KEY)
        with pytest.raises(ServerError) as raised:
            client.complete("foreign", [3, 4], 5, {})
        client.close()
    assert message in str(raised.value) and "secret" not in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--endpoint", "http://127.0.0.1:9"], "does not answer (ConnectError): is the server running?"),
        (["--endpoint", "localhost:8000"], "endpoint must look like http://localhost:8000/v1"),
        (["--endpoint", "@url", "--api-key-env", "NO_SUCH_KEY"], "the variable NO_SUCH_KEY is not set"),
        (["--endpoint", "@url", "--drafter", "anpd"], "leave --drafter out"),
        (["--endpoint", "@url", "--endpoint", "@url"], "two endpoints are called server"),
        (["--endpoint", "@url", "--temperature", "1"], "leave --temperature out"),
        (
            ["--endpoint", "@url", "--concurrency", "[1,5]"],
            "5 requests at once need as many questions",
        ),
        (["--endpoint", "@url", "--concurrency", "[0]"], "concurrency must list numbers of at least 1"),
        (["--endpoint", "@url", "--repeats", "3"], "--repeats is for our own decoding loop"),
        (["--endpoint", "@url", "--engine", "vllm"], "not both"),
        (["--endpoint", "@url", "--engine-args", "--x"], "--engine-args is for --engine vllm"),
        (["--engine", "vllm", "--engine-args", "--seed 1 --port=9"], "--engine-args must not set --port=9"),
        (["--concurrency", "[1]"], "--concurrency is for a server: add --engine vllm or --endpoint URL"),
        (["--engine", "vllm"], "needs vLLM in this environment; install both in an environment of its own"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(options, message, asked, capsys, monkeypatch):
    monkeypatch.setattr("inference.evaluation.served.plan.installed_vllm", lambda: ("", ""))
    with pytest.raises(SystemExit) as stopped, foreign_server() as server:
        main([*asked, *(server.url if word == "@url" else word for word in options)])
    error = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2 and error.startswith("drafters eval: error: ") and message in error
