"""The replies to the real ``openai`` client: equal to our own `generate`, one after the other; and errors.

What chat templates read is in test_messages.py, where a text ends in test_stop.py, and connections in
test_connections.py.
"""

import json
import re
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from data.files import validated
from inference import generate
from inference.serve.app import ChatRequest
from tests.inference.serve.conftest import wait_until

PROMPT = "w3 w4 w5 w6 w7 w8 w3 w4"
CHAT = [{"role": "user", "content": PROMPT}]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 5}
GREEDY = {"temperature": 0}
LONG, SHORT = GREEDY | {"max_tokens": 4000}, GREEDY | {"max_tokens": 5}
each_sampling = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def chat(client, messages=CHAT, max_tokens=40, extra=None, **options):
    return client.chat.completions.create(
        model="toy", messages=messages, max_tokens=max_tokens, extra_body=extra, **options
    )


def own(server, max_new_tokens=40, prompt=PROMPT, drafter="anpd:order=2", **options):
    """What our own `generate` writes."""
    options = {"temperature": 0.0} | options
    return generate(server.base, prompt, drafter, max_new_tokens=max_new_tokens, **options)[0]


# ---- answers


@each_sampling
def test_an_answer_equals_our_own_generate_in_text_and_steps(server, client, sampling):
    expected, reply = own(server, **sampling), chat(client, **sampling)
    choice, usage = reply.choices[0], reply.usage
    assert (choice.message.content, choice.message.role) == (expected.text, "assistant")
    assert choice.finish_reason == ("stop" if expected.token_ids[-1] in server.base.eos else "length")
    assert (usage.prompt_tokens, usage.completion_tokens) == (8, len(expected.token_ids))
    details = usage.completion_tokens_details
    accepted = sum(step.accepted for step in expected.steps)
    assert details.accepted_prediction_tokens == accepted > 0
    rejected = sum(step.fed_candidates for step in expected.steps) - accepted
    assert details.rejected_prediction_tokens == rejected


@pytest.mark.slow
@pytest.mark.parametrize("room", [1, 3])
def test_an_answer_ends_at_the_last_position_of_the_context(server, client, room):
    words = ["w3", "w4", "w5"] * server.base.context_length
    reply = chat(client, [{"role": "user", "content": " ".join(words[: server.base.context_length - room])}], **GREEDY)
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (room, "length")


def test_without_a_seed_texts_differ_and_without_a_temperature_they_are_sampled(client):
    assert len({chat(client).choices[0].message.content for _ in range(4)}) > 1


@each_sampling
def test_a_stream_is_the_whole_reply_in_pieces(client, sampling):
    whole = chat(client, **sampling)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **sampling))
    parts = [choice for chunk in chunks for choice in chunk.choices]
    assert len(parts) > 3
    assert [part.delta.role for part in parts].count("assistant") == 1
    assert "".join(part.delta.content or "" for part in parts) == whole.choices[0].message.content
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [whole.choices[0].finish_reason]
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert len({chunk.id for chunk in chunks}) == 1


def test_each_step_is_shown_with_its_draft_tree(server, client):
    expected = own(server)
    chunks = chat(client, stream=True, extra={"include_steps": True}, **GREEDY)
    parts = [part for chunk in chunks for part in chunk.choices if "steps" in (part.model_extra or {})]
    shown = [(part.model_extra["steps"][0], part.delta.content) for part in parts]
    assert len(shown) == len(expected.steps)
    for (step, text), cost in zip(shown, expected.steps, strict=True):
        assert (step["num_tokens"], len(step["path"]), step["num_fed"]) == (cost.emitted, cost.accepted, cost.fed)
        assert len(step["tokens"]) - step["num_scratch"] == cost.fed_candidates
        accepted = text[: step["num_accepted_characters"]]
        assert accepted.split() == [step["tokens"][node].strip() for node in step["path"]]
        parents = [-1, *step["path"]][: len(step["path"])]
        assert [step["parents"][node] for node in step["path"]] == parents
        assert all(token.startswith(" ") for token in step["tokens"])
    assert "".join(text for _, text in shown) == expected.text


def test_a_request_learns_nothing_from_the_ones_before(long_base, serve_base):
    with serve_base(long_base, "joint") as running:
        usages = [chat(running.client(), **GREEDY).usage for _ in range(2)]
    assert usages[0] == usages[1]
    assert usages[0].completion_tokens_details.accepted_prediction_tokens > 0


def test_the_base_alone_writes_the_same_text_without_drafts(client):
    alone, drafted = (chat(client, extra={"use_drafter": is_on}, **GREEDY) for is_on in (False, True))
    assert alone.choices[0].message.content == drafted.choices[0].message.content
    assert alone.usage.completion_tokens_details.accepted_prediction_tokens == 0


# ---- one after the other


def occupy(server):
    """Start a request of seconds, and return its stream after the first chunk."""
    stream = chat(server.client(), stream=True, **LONG)
    next(stream)
    return stream


@pytest.fixture
def running(long_base, serve_base):
    with serve_base(long_base) as running:
        yield running


def wait_for_decoder(server):
    """Wait until the requests that were sent so far are decoded or given up."""
    server.decoder._thread.submit(int).result(60)


def test_decoding_stops_when_a_client_goes_away(running, monkeypatch):
    steps = running.decoder.steps

    def slowly(asked, prompt):
        for step in steps(asked, prompt):
            time.sleep(0.002)
            yield step

    monkeypatch.setattr(running.decoder, "steps", slowly)
    occupy(running).close()
    wait_for_decoder(running)
    assert running.decoder.runner.cached < 3000
    with pytest.raises(openai.APITimeoutError):
        chat(running.client().with_options(timeout=0.2), **LONG)
    wait_for_decoder(running)
    assert running.decoder.runner.cached < 3000
    assert chat(running.client(), **SHORT).choices


def test_requests_are_answered_in_order(running, monkeypatch):
    stream, decoded, steps = occupy(running), [], running.decoder.steps

    def recorded(asked, prompt):
        decoded.append(asked.max_tokens)
        return steps(asked, prompt)

    monkeypatch.setattr(running.decoder, "steps", recorded)
    with ThreadPoolExecutor(3) as pool:
        asked = []
        for number in range(3):
            asked.append(pool.submit(chat, running.client(), **SHORT | {"max_tokens": 5 + number}))
            wait_until(lambda number=number: running.decoder._thread._work_queue.qsize() == number + 1)
        assert not decoded
        stream.close()
        for each in asked:
            each.result()
    assert decoded == [5, 6, 7]


def test_a_client_that_does_not_read_its_stream_delays_no_other_one(running):
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        place.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
        asked = {"model": "toy", "messages": CHAT, "stream": True, "include_steps": True}
        content = json.dumps(asked | LONG | {"max_tokens": 800}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        place.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
        assert chat(running.client(), **SHORT).choices


def test_a_failed_request_does_not_end_the_server(running, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(running.decoder.runner, "forward", None)
        with pytest.raises(openai.InternalServerError):
            chat(running.client(), **SHORT)
        with pytest.raises(openai.APIError, match="decoding failed"):
            list(chat(running.client(), stream=True, **SHORT))
    assert chat(running.client(), **SHORT).choices


# ---- errors, the key and the page

REFUSED = {
    "no model": ({"model": "other"}, 404, "toy is served"),
    "temperature": ({"temperature": -1}, 400, "temperature must be"),
    "top_p": ({"top_p": 0}, 400, "top_p"),
    "top_p of greedy decoding": ({"temperature": 0, "top_p": 2}, 400, "top_p must be above 0 and at most 1, not 2"),
    "top_k of greedy decoding": ({"temperature": 0, "top_k": -3}, 400, "top_k must be at least 0, not -3"),
    "a penalty": ({"frequency_penalty": 0.5}, 400, "frequency_penalty not supported: leave it out"),
    "another penalty": ({"repetition_penalty": 1.1}, 400, "repetition_penalty not supported: leave it out"),
    "no penalty": ({"repetition_penalty": 0}, 400, "repetition_penalty not supported: leave it out"),
    "JSON": ({"response_format": {"type": "json_object"}}, 400, "response_format not supported: leave it out"),
    "another tier": ({"service_tier": "flex"}, 400, "service_tier not supported: leave it out"),
    "a call": ({"tool_choice": "required"}, 400, "tool_choice: Input should be 'auto' or 'none'"),
    "a named call": (
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        400,
        "tool_choice: Input should",
    ),
    "tools without a template": ({"tools": [{"name": "f"}]}, 400, "the chat template of this base ignores tools"),
    "two limits": ({"max_tokens": 5, "max_completion_tokens": 5}, 400, "max_completion_tokens not supported: leave it"),
    "two texts": ({"n": 2}, 400, "Input should be 1"),
    "log probabilities": ({"logprobs": True}, 400, "logprobs not supported: leave it out"),
    "five stop strings": ({"stop": list("abcde")}, 400, "stop: List should have at most 4 items"),
    "a stop token": ({"stop": [5]}, 400, "stop.0: Input should be a valid string"),
    "a long stop string": ({"stop": "w" * 1001}, 400, "stop.0: String should have at most 1000 characters"),
    "too many tokens": ({"max_tokens": 4001}, 400, "max_tokens must be at most 4000"),
    "no tokens": ({"max_tokens": 0}, 400, "Input should be greater than 0"),
    "a long prompt": ({"messages": [{"role": "user", "content": "w3 " * 4096}]}, 400, "the context of toy-llama ends"),
    "no messages": ({"messages": []}, 400, "messages"),
    "an empty message": ({"messages": [{"role": "user", "content": ""}]}, 400, "the prompt is empty"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "images"),
    "another role": ({"messages": [{"role": "narrator", "content": "w3"}]}, 400, "unknown speaker 'narrator'"),
    "a text as message": ({"messages": ["w3"]}, 400, "a message is not a JSON object"),
    "no content": ({"messages": [{"role": "user", "content": None}]}, 400, "a turn has no text"),
    "half a character": ({"messages": [{"role": "user", "content": "\ud83d"}]}, 400, "hex escape at line 1 column"),
    "a number as text": ({"max_tokens": "12"}, 400, "Input should be a valid integer"),
    "no JSON": (b'{"model": "toy",\n "n": }', 400, "Invalid JSON: expected value at line 2 column 7"),
    "no UTF-8": (b'{"model": "\xff"}', 400, "Invalid JSON: invalid unicode code point at line 1 column 12"),
    "no object": (b"[]", 400, "model: Field required"),
    "nothing": (b"", 400, "Invalid JSON: EOF while parsing a value at line 1 column 0"),
    "a deep body": (b"[" * 100_000, 400, "Invalid JSON: recursion limit exceeded at line 1 column 202"),
    "a large body": ({"user": "w" * (5 << 20)}, 413, "too large: this server reads at most 4,194,304 bytes"),
    "NaN": (b'{"model": "toy", "messages": [{"role": "user", "content": "w3"}], "temperature": NaN}', 400, "temp"),
}


def post(server, body, path="/v1/chat/completions", kind="application/json", **headers):
    """The status and the JSON of the reply to a raw request."""
    content = body if isinstance(body, bytes) else json.dumps({"model": "toy", "messages": CHAT} | body).encode()
    headers = {"Content-Type": kind} | headers
    request = urllib.request.Request(server.url + path, content, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_is_refused(server, name, capfd):
    body, status, message = REFUSED[name]
    found, text = post(server, body)
    error = json.loads(text)["error"]
    assert (found, error["type"]) == (status, "invalid_request_error")
    assert message in error["message"] and "\n" not in error["message"]
    assert capfd.readouterr() == ("", ""), "nothing is logged"


def test_other_types_and_names_of_this_machine_are_refused(server):
    for kind in ("text/plain", "", "application/x-www-form-urlencoded"):
        assert post(server, {}, kind=kind)[0] == 400, "which a page from elsewhere could send"
    assert post(server, {}, Host="evil.example")[0] == 400, "a name that a page from elsewhere gave to this machine"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/models", 405), ("POST", "/v1/completions", 405), ("PUT", "/", 405), ("GET", "/v1/models/other", 404)]
    + [("GET", path, 404) for path in ("/nowhere", "/%2e%2e/app.py", "/v1/chat/completions", "/%00")],
)
def test_other_routes_are_refused_in_openai_s_form(server, method, path, status):
    request = urllib.request.Request(server.url + path, method=method)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    error = json.loads(refused.value.read())["error"]
    assert refused.value.code == status
    assert error["message"].endswith("see GET /v1/models and POST /v1/chat/completions")
    assert error | {"message": ""} == {"message": "", "type": "invalid_request_error", "param": None, "code": None}


NOTHING = [
    {"tool_choice": "none", "tools": [{"name": "f"}]},
    {"response_format": {"type": "text"}, "modalities": ["text"]},
    {"parallel_tool_calls": True},
    {"parallel_tool_calls": False, "function_call": "none", "functions": []},
    {"service_tier": "auto", "store": False, "logit_bias": {}},
    {"repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0, "ignore_eos": False},
    {"logprobs": False, "top_logprobs": 0, "n": 1, "best_of": 1, "top_k": -1, "top_p": 0.5},
    {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "me", "prompt_cache_key": "k"},
    {"stop": [], "tools": []},
    {"stop": ["", "not written"]},
    {"temperature": 1e-6, "top_p": 0.9},
    dict.fromkeys(
        ["logit_bias", "logprobs", "top_logprobs", "presence_penalty", "n", "top_p", "stream", "stop", "seed"]
    )
    | dict.fromkeys(["response_format", "service_tier", "stream_options", "tools", "tool_choice", "user", "metadata"])
    | dict.fromkeys(["parallel_tool_calls", "reasoning_effort", "audio", "modalities", "store", "top_k"]),
]


@pytest.mark.parametrize("asked", NOTHING, ids=lambda asked: " ".join(asked)[:40])
def test_a_field_that_asks_for_nothing_changes_nothing(server, asked):
    status, reply = post(server, GREEDY | {"max_tokens": None, "max_completion_tokens": 12} | asked)
    assert (status, reply["choices"][0]["message"]["content"]) == (200, own(server, 12).text)


def test_a_temperature_of_null_is_the_default_of_one(server):
    texts = [post(server, {"seed": 3, "max_tokens": 9} | asked)[1]["choices"] for asked in ({"temperature": None}, {})]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("field", [*ChatRequest.model_fields, "response_format", "logit_bias", "max_completion_tokens"])
def test_no_value_of_a_field_breaks_the_server(server, field):
    deep = {}
    for _ in range(80):
        deep = {"a": [deep]}
    message = {"role": "user", "content": "w3"}
    values = [True, -1, 0.5, 1e999, 10**40, "", "\0", "w3", [], {}, [None], [[]], {"a": None}, [{"role": []}]]
    values += [[message | {name: [deep]} for name in ("name", "tool_calls", "content")], [deep]]
    values += [[message | {"role": role, "tool_calls": calls}] for role in ("user", "assistant") for calls in (5, [5])]
    for value in values:
        body = json.dumps({"model": "toy", "messages": [message], field: value}).encode()
        try:
            assert server.decoder.encode(validated(ChatRequest, body))
        except ValueError as error:
            assert str(error)


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.model_extra["drafter"]) == ("toy", "anpd:order=2")


def test_a_key_is_asked_for_and_never_shown(make_base, serve_base, capfd):
    with serve_base(make_base(), api_key="s3cret-key") as running:
        for key in ("wrong", "s3cret-ke", "s3cret-key2"):
            with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong") as refused:
                running.client(key).models.list()
            assert "s3cret" not in str(refused.value)
        with pytest.raises(openai.AuthenticationError):
            chat(running.client("wrong"))
        assert running.client("s3cret-key").models.list().data
        assert chat(running.client("s3cret-key"), max_tokens=2).choices
        assert urllib.request.urlopen(running.url).status == 200, "the page asks for the key"
    assert "s3cret" not in "".join(capfd.readouterr())


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_inline_code(server):
    for path in ("/", "/page.css", "/page.js"):
        with urllib.request.urlopen(server.url + path) as reply:
            text = reply.read().decode()
            policy = reply.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'self'; ") and "unsafe" not in policy
        assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert not re.search(r"<script(?! src=)| on\w+=|<style", text)
