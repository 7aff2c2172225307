"""``drafters eval --server``: a server that decodes with a toy base, asked over real HTTP, and its figures."""

import json
import random
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

import numpy as np
import pytest

from inference import drafter_specs, generate
from inference.evaluate import results, server
from inference.evaluate.answers import Answer, AnswerFiles, Turn
from inference.evaluate.figures import acceptance_rates, count_drafts
from inference.evaluate.server import Server, Servers, acceptance_by_counts, inter_token_seconds, percentiles
from inference.options import EvaluationOptions, ModelOptions, QuestionOptions
from inference.server_process import free_port, read_counts
from inference.verifier.base import load_base_info
from inference.verifier.runner import Runner
from inference.verifier.sampling import Greedy
from inference.verifier.session import Session
from inference.vllm.command import Launch, running_vllm
from tests.conftest import Handler, serving
from train.cli import run_drafters as main

QUESTIONS = ["w5 w6 w7 w8", "w9 w9", "w10 w11 w12", "w20 w21 w22"]
TOKENS = 24
METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {drafts}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="1",position="0"}} -0.0
process_start_time_seconds 1.7e9
"""


class Engine(Handler):
    """Decodes with a drafter, an event for each step, and counts its drafts as vLLM does."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        own = self.server
        if self.path == "/metrics" and "no metrics" not in own.kind:
            return self.reply(200, METRICS.format(**own.counts))
        models = json.dumps(
            {
                "object": "list",
                "data": [{"id": "toy", "object": "model", "created": 1, "owned_by": "x"} | own.limits],
            }
        )
        return self.reply(200, models) if self.path == "/v1/models" else self.reply(404, "{}")

    def do_POST(self):
        asked, own = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server
        own.num_asked += 1
        own.keys.add(self.headers["Authorization"])
        is_chat = self.path.endswith("/chat/completions")
        if is_chat != ("chat" in own.kind) or ("no ids" in own.kind and "return_token_ids" in asked):
            return self.reply(405 if is_chat != ("chat" in own.kind) else 400, '{"error": {"message": "not here"}}')
        if "denies" in own.kind:
            return self.reply(401, json.dumps({"error": {"message": f"wrong key {self.headers['Authorization']}"}}))
        tokenizer = own.base.tokenizer
        prompt = asked.get("prompt") or tokenizer(" ".join(each["content"] for each in asked["messages"])).input_ids
        events = []
        with own.lock:
            for emitted, step in own.session.decode(prompt, asked["max_tokens"], own.base.eos):
                own.counts["drafts"] += step.fed_candidates > 0
                own.counts["drafted"] += step.fed_candidates
                own.counts["accepted"] += step.accepted
                text = "".join(f"{word} " for word in tokenizer.convert_ids_to_tokens(emitted))
                piece = {"delta": {"content": text}} if is_chat else {"text": text}
                ids = {"token_ids": emitted} if asked.get("return_token_ids") else {}
                events.append({"index": 0, "finish_reason": None, **piece, **ids})
        last = {"index": 0, "finish_reason": "length", **({"delta": {}} if is_chat else {"text": ""})}
        if own.num_asked <= own.num_good:
            events.append(last)
        about = {"id": "1", "created": 1, "model": "toy", "object": "text_completion"}
        body = "".join(f"data: {json.dumps({**about, 'choices': [each]})}\n\n" for each in events)
        return self.reply(200, body + "data: [DONE]\n\n", "text/event-stream")

    def reply(self, status, content, kind="application/json"):
        super().reply(status, content.encode(), {"Content-Type": kind})


@contextmanager
def running(base, drafter="none", kind=""):
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Engine)) as own:
        own.base, own.kind, own.lock, own.keys = base, kind, threading.Lock(), set()
        own.session = drafter_specs.make_session(drafter, Runner(base), Greedy())
        own.limits = {"max_model_len": 4} if "short" in kind else {}
        own.counts, own.num_asked, own.num_good = {"drafts": 0, "drafted": 0, "accepted": 0}, 0, 10**9
        own.url = f"http://127.0.0.1:{own.server_port}/v1"
        yield own


@pytest.fixture(scope="module")
def base(make_base):
    return make_base(context=256, predictable=True)


@pytest.fixture(scope="module")
def words(base, toy_tokenizer, tmp_path_factory):
    """The command line of an evaluation of four questions, one of them of two turns."""
    folder = tmp_path_factory.mktemp("asked")
    base.model.config.save_pretrained(folder / "base")
    toy_tokenizer.save_pretrained(folder / "base")
    turns = [[text] for text in QUESTIONS]
    turns[1].append("w3 w4")
    rows = [{"question_id": 1 + at, "category": "a", "turns": own} for at, own in enumerate(turns)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = f"mt_bench={folder / 'questions.jsonl'}"
    return ["eval", "--base", str(folder / "base"), "--benchmark", named, "--max-new-tokens", str(TOKENS)]


@pytest.fixture(scope="module")
def measured(base, words, tmp_path_factory):
    """The folder of an evaluation of two servers, how it was asked, and the number of requests that each got."""
    out = tmp_path_factory.mktemp("eval") / "out"
    with running(base) as none, running(base, "anpd:order=2") as anpd:
        asked = [*words, "--server", f"none={none.url}", "--server", f"anpd={anpd.url}", "--out", str(out)]
        main([*asked, "--concurrency", "1", "--concurrency", "2"])
        before = none.num_asked, anpd.num_asked
        main([*asked, "--concurrency", "1", "--concurrency", "3"])
        yield out, before, (none.num_asked - before[0], anpd.num_asked - before[1])


@pytest.mark.slow
def test_servers_are_compared_by_texts_throughput_latency_and_their_own_counters(measured, base):
    found = results.read(measured[0])
    summaries = found.summaries["mt_bench"]
    assert list(summaries) == ["none @ 1", "none @ 3", "anpd @ 1", "anpd @ 3"]
    expected = [generate(base, text, "none", max_new_tokens=TOKENS)[0].token_ids for text in QUESTIONS]
    for name, summary in summaries.items():
        answers = found.answers["mt_bench"][name]
        assert [answer.turns[0].token_ids for answer in answers] == expected
        turns = [turn for answer in answers for turn in answer.turns]
        assert len(turns) == 5 and summary.identical == summary.questions == 4
        assert summary.tokens == sum(len(turn.token_ids) for turn in turns)
        for turn in turns:
            assert sum(count for _, count in turn.arrivals) == len(turn.token_ids)
            assert 0 < turn.arrivals[0][0] <= turn.arrivals[-1][0] <= turn.seconds
        first, between = summary.latency.first_token, summary.latency.inter_token
        assert 0 < first[0] <= first[1] < summary.speed.seconds and 0 <= between[0] <= between[1]
        steps = sum(len(turn.arrivals) - 1 for turn in turns)
        length = (summary.tokens - len(turns)) / steps
        assert summary.acceptance.length.value == pytest.approx(length, rel=0.02), "an event for each step"
    assert summaries["anpd @ 1"].acceptance.length.value > 1.2 and summaries["none @ 1"].acceptance.length.value == 1
    assert found.conditions.same()["device"].startswith("127.0.0.1")
    assert "writes the same text as the base at" in (measured[0] / "report.html").read_text()


@pytest.mark.slow
def test_a_repeated_command_asks_only_what_is_missing(measured):
    out, before, after = measured
    per_run = len(QUESTIONS) + 1
    # Besides the answers: a probe for each server, and as many requests as are sent at once before each run.
    assert before == (2 * per_run + 1 + 1 + 2,) * 2
    assert after == (per_run + 1 + 3,) * 2
    assert len(list((out / "answers").glob("*/*.jsonl"))) == 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["no ids, no metrics", "chat, no ids, no metrics"])
def test_a_server_that_knows_less_is_measured_without_acceptance(kind, base, words, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-of-mine")
    with running(base, kind=kind) as own:
        main([*words, "--server", own.url, "--concurrency", "2", "--out", str(tmp_path / "out")])
        assert own.keys == {"Bearer secret-of-mine"}
    found = results.read(tmp_path / "out")
    (summary,) = found.summaries["mt_bench"].values()
    assert (summary.acceptance.length.value, summary.latency.inter_token) == (None, None)
    assert summary.identical == 4 and summary.latency.first_token and summary.tokens == TOKENS * 5
    assert "sends no token ids" in " ".join(found.record.warnings)
    texts = [path.read_text() for path in (tmp_path / "out").rglob("*.*") if path.suffix != ".png"]
    assert not any("secret-of" in text for text in texts)


@pytest.mark.slow
def test_an_evaluation_whose_server_fails_continues_where_it_stopped(base, words, tmp_path, capsys):
    asked = [*words, "--concurrency", "1", "--concurrency", "2", "--out", str(tmp_path / "out"), "--server"]
    per_run = len(QUESTIONS) + 1
    with running(base) as own:
        own.num_good = 1 + 1 + per_run + 2 + 1  # the first run with its probe and warm-up, and one answer of the second
        with pytest.raises(SystemExit) as stopped:
            main([*asked, f"a={own.url}"])
        assert stopped.value.code == 2
        assert "broke an answer off: its stream ended without a reason" in capsys.readouterr().err
        own.num_good, own.num_asked = 10**9, 0
        main([*asked, f"a={own.url}"])
        # The probe, the warm-up and the second run; a request of the first command may still have been on its way.
        assert 1 + 2 + per_run <= own.num_asked < 2 * per_run
    assert list(results.read(tmp_path / "out").summaries["mt_bench"]) == ["a @ 1", "a @ 2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--server", "http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer (ConnectError)"),
        (["--server", "@denies"], "refuses (HTTP 401 Unauthorized): set the variable OPENAI_API_KEY"),
        (["--server", "@short"], "takes 4 tokens, and question 1 has "),
        (["--server", "localhost:8000"], "--server must look like http://localhost:8000/v1, not 'localhost:8000'"),
        (["--server", "http://a", "--server", "http://a"], "two servers have one name: write --server NAME=URL"),
        (["--server", "http://a", "--drafter", "anpd"], "which have drafters of their own"),
        (["--server", "http://a", "--concurrency", "9"], "9 requests at once need as many questions"),
        (
            ["--server", "http://a", "--temperature", "1"],
            "--temperature is for our own decoding loop, not for --server",
        ),
        (["--server", "vllm"], "--server vllm needs vLLM in this environment"),
        (["--concurrency", "2"], "--concurrency is for a server"),
        (["--disable-by-batch-size", "2"], "--disable_by_batch_size is for vLLM"),
        (["--server", "http://a", "--disable-by-batch-size", "2"], "--disable_by_batch_size is for vLLM"),
        (["--server", "vllm", "--disable-by-batch-size", "0"], "disable_by_batch_size must be at least 1, not 0"),
    ],
)
def test_mistakes_are_explained_in_one_line_without_the_key(options, message, base, words, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-of-mine")
    monkeypatch.setattr(server, "installed_vllm", lambda: ("", ""))
    kind = "short" if "@short" in options else "denies"
    with running(base, kind=kind) as own, pytest.raises(SystemExit) as stopped:
        options = [option.replace(f"@{kind}", own.url) for option in options]
        main([*words, *options, *([] if "--concurrency" in options else ["--concurrency", "1"])])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and message in error and "secret" not in error and "Traceback" not in error


def test_a_drafter_that_vllm_cannot_serve_is_refused_before_any_server_starts(words, monkeypatch, capsys):
    monkeypatch.setattr(server, "installed_vllm", lambda: ("torch", "0.32.0"))
    monkeypatch.setattr(server, "running_vllm", lambda *_: pytest.fail("a server was started"))
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--server", "vllm", "--drafter", "self_speculative", "--concurrency", "1"])
    assert stopped.value.code == 2 and "the drafter self_speculative reads the base" in capsys.readouterr().err


# ---- the process of vLLM

# A server that is healthy at once, with a child process.
HEALTHY = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *given): pass
subprocess.Popen(["sleep", "600"])
HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="ends servers by prctl")


def launched(base, folder, script=HEALTHY, environment=None):
    port = free_port()
    asked = Server(f"http://127.0.0.1:{port}", base, "tokenizer", is_ours=True)
    return running_vllm(Launch(environment or {}, ["-c", script, str(port)]), folder / "log", asked.is_healthy)


def sleepers():
    """Processes of the servers that have not ended."""
    found = subprocess.run(["ps", "-eo", "stat=,args="], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if "sleep 600" in line and not line.startswith("Z")]


@linux
@pytest.mark.slow
@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_all_processes_are_ended_with_the_evaluation(error, base, tmp_path):
    before = sleepers()
    try:
        with launched(base, tmp_path):
            assert len(sleepers()) == len(before) + 1
            if error:
                raise error
    except (KeyboardInterrupt, ValueError) as raised:
        assert type(raised) is error
    assert sleepers() == before


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "import sys; sys.exit('ValueError: no folder\\nException: WorkerProc initialization failed due to it"
            "\\nError: Engine core initialization failed')",
            "no folder",
        ),
        (
            'import os, sys; sys.exit(f\'ValueError: {os.environ.get("VLLM_API_KEY")} {os.environ["OTHER"]}\')',
            "None kept",
        ),
    ],
)
def test_a_server_that_does_not_start_is_explained_by_the_cause_in_its_log(script, said, base, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret-of-vllm")  # vLLM would demand it from its clients
    with (
        pytest.raises(ValueError, match=f"^vLLM ended with code 1: ValueError: {said}; see .*log$"),
        launched(base, tmp_path, script, {"OTHER": "kept"}),
    ):
        pass


# ---- figures


@pytest.fixture(scope="module")
def texts(pseudo_runner):
    """The steps of some texts, with a drafter of chains that often has no draft."""
    runner, texts = pseudo_runner(), []
    for seed in range(8):
        session = Session(runner, drafter_specs.make("anpd:order=3", runner), Greedy())
        texts.append([cost for _, cost in session.decode([seed, seed + 1, 3], 60, frozenset())])
    return texts


def test_acceptance_by_the_counters_is_that_of_the_steps_that_were_counted(texts):
    steps = [step for text in texts for step in text[1:]]
    own = count_drafts(texts)
    counts = {"drafts": own.drafting_steps, "draft_tokens": own.drafted, "accepted_tokens": own.accepted}
    counts |= {f"accepted_tokens_per_pos{at:04}": sum(step.accepted > at for step in steps) for at in range(12)}
    found = acceptance_by_counts(counts, len(texts), sum(step.emitted for text in texts for step in text))
    # At the length cap a step may end with an accepted token, without the bonus token that the formula assumes.
    num_steps = own.steps - sum(text[-1].accepted == text[-1].emitted for text in texts)
    assert found.length.value == own.emitted / num_steps
    assert (found.draft_efficiency, found.fed_per_token) == (
        own.accepted / own.drafted,
        (num_steps + own.drafted) / own.emitted,
    )
    expected = acceptance_rates([text[1:] for text in texts])
    shares = [rate.conditional.value for rate in expected[1:]]
    assert [rate.conditional.value for rate in found.rates[1:]] == pytest.approx(shares)
    assert [rate.rate.value * num_steps for rate in found.rates] == pytest.approx(
        [rate.rate.value * own.steps for rate in expected]
    )


@pytest.mark.parametrize(
    ("drafts", "drafted", "accepted", "at", "length"),
    [
        (2, 6, 2, 2, 2.0),
        (0, 0, 0, 0, 1.0),
        (3, 6, 4, 4, None),
        (-7, -6, -7, 0, None),
    ],
)
def test_counts_that_the_texts_cannot_have_are_left_out(drafts, drafted, accepted, at, length):
    counts = {"drafts": drafts, "draft_tokens": drafted, "accepted_tokens": accepted, "accepted_tokens_per_pos0000": at}
    assert acceptance_by_counts(counts, 2, 6).length.value == length
    assert acceptance_by_counts(None, 2, 6).length.value is None


def test_the_counters_of_all_engines_are_added_up_and_others_are_left_out():
    text = METRICS.format(drafts=3, drafted=12, accepted=5).replace("-0.0", "4")
    assert read_counts(text) == {
        "drafts": 3,
        "draft_tokens": 12,
        "accepted_tokens": 5,
        "accepted_tokens_per_pos0000": 3 + 4,
    }
    assert read_counts(text.replace("vllm:", "llamacpp:")) == read_counts(text)  # llama.cpp names them alike
    assert read_counts("process_start_time_seconds 1.7e9\n") is None


def test_latencies_are_those_of_tokens_that_come_at_an_even_pace_between_events():
    chance, turns, gaps = random.Random(0), [], []
    for _ in range(20):
        arrivals, now, times = [], 0.0, []
        for _ in range(chance.randrange(1, 9)):
            before, now, count = now, now + chance.random(), chance.randrange(1, 5)
            times += [now] * count if not arrivals else np.linspace(before, now, count + 1)[1:].tolist()
            arrivals.append((now, count))
        turns.append(Turn("", [0] * len(times), 3, [], now, False, arrivals=arrivals))
        gaps += np.diff(times)[arrivals[0][1] - 1 :].tolist()
    assert sorted(inter_token_seconds(turns)) == pytest.approx(sorted(gaps))
    assert percentiles(gaps) == pytest.approx((np.percentile(gaps, 50), np.percentile(gaps, 95)))
    assert percentiles([]) is None
    assert inter_token_seconds([Turn("", [1, 2], 3, [], 1.0, False, arrivals=[(0.5, 0), (1.0, 0)])]) == []


def test_throughput_is_compared_with_as_many_requests_at_once_and_texts_token_by_token(words):
    model, selection = ModelOptions(words[2]), QuestionOptions([words[4]], limit=2, max_new_tokens=9)
    base = load_base_info(model.base)
    options = EvaluationOptions(server=["none=http://none", "ctc=http://ctc"], concurrency=[1, 2])
    served = Servers(model, selection, selection.select(base, selection.load()), base, options)
    files = AnswerFiles(None, {})
    for drafter, level, seconds, texts in [
        ("none", 1, 8.0, [[1, 2, 3], [4, 9]]),
        ("none", 2, 4.0, [[1, 2, 3], [4, 5]]),
        ("ctc", 1, 8.0, [[1, 2, 3], [4, 9]]),
        ("ctc", 2, 2.0, [[1, 2, 3], [4, 6]]),
    ]:
        for number, ids in enumerate(texts, 1):
            turn = Turn(str(ids), ids, 4, [], 0.5, False, arrivals=[(0.1, 1), (0.5, len(ids) - 1)])
            files.add("mt_bench", Answer(number, "a", f"{drafter} @ {level}", [turn]))
        files.add_event({"benchmark": "mt_bench", "drafter": drafter, "concurrency": level, "seconds": seconds})
    found = served.results(files)
    (warning,) = found.record.warnings
    summaries = found.summaries
    summary = summaries["mt_bench"]["ctc @ 2"]
    assert (summary.speed.tokens_per_second, summary.speed.wall.value) == (2.5, 2.0)
    assert (summary.identical, summary.questions, summary.first_divergence) == (1, 2, (2, 0, 1))
    assert (summary.acceptance.length.value, summary.speed.speedup.value) == (None, None)
    assert summary.latency.first_token == pytest.approx((0.1, 0.1))
    assert [name for name, each in summaries["mt_bench"].items() if each.is_baseline] == ["none @ 1", "none @ 2"]
    assert "none itself writes 1 of 2 answers of mt_bench differently with 2 requests at once than with 1" in warning
