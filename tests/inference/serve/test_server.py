"""The replies to the real ``openai`` client: equal to our own `generate`, one after the other; and errors."""

import http.client
import json
import random
import re
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace

import openai
import pytest

from inference import generate
from inference.serve.app import find_stop

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


def cut_by_characters(text, stops):
    """The text up to the first stop string that is complete, the longest if several end at the same character."""
    for end in range(len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, ending))]
    return None


def test_the_first_stop_string_ends_a_text():
    rng = random.Random(0)
    for _ in range(1000):
        text = "".join(rng.choices("abc", k=rng.randrange(1, 14)))
        stops = ["".join(rng.choices("abc", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        end = find_stop(text, stops)
        assert (None if end is None else text[:end]) == cut_by_characters(text, stops), (text, stops)


@each_sampling
def test_a_stop_string_across_token_borders_ends_the_answer_before_it(server, client, sampling):
    text = own(server, **sampling).text
    middle = len(text) // 2
    for stop in (text[middle : middle + 5], [text[middle : middle + 9], "none of it"]):
        expected = text[: text.index(stop if isinstance(stop, str) else stop[0])]
        replies = [chat(client, stop=stop, extra={"use_drafter": is_on}, **sampling) for is_on in (True, False)]
        for reply in replies:
            assert reply.choices[0].message.content == expected
            assert reply.choices[0].finish_reason == "stop"
        assert replies[1].usage.completion_tokens <= replies[0].usage.completion_tokens < 40
        assert replies[1].usage.completion_tokens_details.accepted_prediction_tokens == 0
        streamed = chat(client, stop=stop, stream=True, **sampling)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected


@pytest.mark.parametrize("stop", [[], ["none of it"]])
def test_each_step_is_shown_with_its_draft_tree(server, client, stop):
    expected = own(server)
    chunks = chat(client, stream=True, stop=stop, extra={"include_steps": True}, **GREEDY)
    parts = [part for chunk in chunks for part in chunk.choices if "steps" in (part.model_extra or {})]
    shown = [(part.model_extra["steps"][0], part.delta.content) for part in parts]
    assert len(shown) == len(expected.steps)
    for (step, text), cost in zip(shown, expected.steps, strict=True):
        assert (step["num_tokens"], len(step["path"]), step["num_fed"]) == (cost.emitted, cost.accepted, cost.fed)
        assert len(step["tokens"]) - step["num_scratch"] == cost.fed_candidates
        if not stop:  # which holds characters back
            accepted = text[: step["num_accepted_characters"]]
            assert accepted.split() == [step["tokens"][node].strip() for node in step["path"]]
        assert 0 <= step["num_accepted_characters"] <= len(text)
        parents = [-1, *step["path"]][: len(step["path"])]
        assert [step["parents"][node] for node in step["path"]] == parents
        assert all(token.startswith(" ") for token in step["tokens"])
    assert "".join(text for _, text in shown) == expected.text


def test_a_request_learns_nothing_from_the_ones_before(long_base, serve_base):
    with serve_base(long_base, "joint") as running:
        usages = [chat(running.client(), **GREEDY).usage for _ in range(2)]
    assert usages[0] == usages[1]
    assert usages[0].completion_tokens_details.accepted_prediction_tokens > 0


THINKING = (
    "{%- for m in messages -%}{{- m.content + ' ' -}}{%- endfor -%}"
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false -%}"
    "{{- 'w30 w31 ' -}}{%- endif -%}"
)


@pytest.mark.parametrize("template", ["tokenizer", "tokenizer:thinking=off"])
def test_a_request_sets_the_thinking_switch_whatever_the_server_was_told(make_base, serve_base, template):
    tokenizer = deepcopy(make_base().tokenizer)
    tokenizer.chat_template = THINKING
    thinking = replace(make_base(), tokenizer=tokenizer)

    def expected(switch):
        prompt = tokenizer.apply_chat_template(
            CHAT, add_generation_prompt=True, return_dict=False, enable_thinking=switch
        )
        return generate(thinking, [prompt], "none", max_new_tokens=12, temperature=0.0)[0].text

    with serve_base(thinking, template=template) as running, running.client() as client:
        for switch in (True, False):
            asked = {"chat_template_kwargs": {"enable_thinking": switch}}
            assert chat(client, extra=asked, max_tokens=12, **GREEDY).choices[0].message.content == expected(switch)
        own = chat(client, max_tokens=12, **GREEDY).choices[0].message.content
        assert own == expected(template == "tokenizer")


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


def test_decoding_stops_when_a_client_goes_away(running, until):
    occupy(running).close()
    until(lambda: not running.decoder.num_requests)
    with pytest.raises(openai.APITimeoutError):
        chat(running.client().with_options(timeout=0.2), **LONG)
    until(lambda: not running.decoder.num_requests)
    assert chat(running.client(), **SHORT).choices
    assert running.decoder.runner.cached < 100


def test_requests_are_answered_in_order_and_too_many_are_refused(running, until, monkeypatch):
    monkeypatch.setattr("inference.serve.app.MAX_WAITING", 3)
    stream, decoded, steps = occupy(running), [], running.decoder.steps

    def recorded(asked, prompt):
        decoded.append(asked.max_tokens)
        return steps(asked, prompt)

    monkeypatch.setattr(running.decoder, "steps", recorded)
    with ThreadPoolExecutor(4) as pool:
        asked = []
        for number in range(3):
            asked.append(pool.submit(chat, running.client(), **SHORT | {"max_tokens": 5 + number}))
            until(lambda number=number: running.decoder.num_requests == number + 2)
        with pytest.raises(openai.RateLimitError, match="3 requests are waiting"):
            chat(running.client(), **SHORT)
        assert not decoded
        stream.close()
        for each in asked:
            each.result()
    assert decoded == [5, 6, 7]


def test_a_client_that_does_not_read_its_stream_delays_no_other_one(running, until):
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        place.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
        asked = {"model": "toy", "messages": CHAT, "stream": True, "include_steps": True}
        content = json.dumps(asked | LONG | {"max_tokens": 800}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        place.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
        until(lambda: running.decoder.num_requests)
        assert chat(running.client(), **SHORT).choices


def test_a_failed_request_does_not_end_the_server(running, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        patch.setattr(running.decoder.runner, "forward", None)
        for is_streamed in (False, True):
            with pytest.raises(openai.InternalServerError, match="decoding failed, and the server's log says why"):
                chat(running.client(), stream=is_streamed, **SHORT)
    assert "TypeError" in capfd.readouterr().err
    stream = occupy(running)
    with monkeypatch.context() as patch:
        patch.setattr(running.decoder.runner, "forward", None)
        with pytest.raises(openai.APIError, match="decoding failed"):
            list(stream)
    assert chat(running.client(), **SHORT).choices


# ---- errors, the key and the page

REFUSED = {
    "no model": ({"model": "other"}, 404, "toy is served"),
    "temperature": ({"temperature": 3}, 400, "temperature: Input should be less than or equal to 2"),
    "top_p": ({"top_p": 0}, 400, "top_p"),
    "a penalty": ({"frequency_penalty": 0.5}, 400, "frequency_penalty: not supported: leave it out"),
    "two texts": ({"n": 2}, 400, "n: not supported: leave it out"),
    "log probabilities": ({"logprobs": True}, 400, "logprobs: not supported: leave it out"),
    "tools": ({"tools": [{"type": "function"}]}, 400, "tools: not supported"),
    "documents": ({"chat_template_kwargs": {"documents": []}}, 400, "chat_template_kwargs.documents"),
    "a text as switch": ({"chat_template_kwargs": {"enable_thinking": "yes"}}, 400, "should be a valid boolean"),
    "too many tokens": ({"max_tokens": 4001}, 400, "max_tokens must be at most 4000"),
    "no tokens": ({"max_tokens": 0}, 400, "max_tokens: Input should be greater than or equal to 1"),
    "a long prompt": ({"messages": [{"role": "user", "content": "w3 " * 4096}]}, 400, "the context of toy-llama ends"),
    "no messages": ({"messages": []}, 400, "messages"),
    "an empty message": ({"messages": [{"role": "user", "content": ""}]}, 400, "the prompt is empty"),
    "a message without a role": ({"messages": [{"content": "a"}]}, 400, "messages.0.role: Field required"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "messages.0.content.0",
    ),
    "a chat that ends with an answer": ({"messages": [{"role": "assistant", "content": "w3"}]}, 400, "the user's"),
    "an empty stop string": ({"stop": ""}, 400, "stop"),
    "five stop strings": ({"stop": list("abcde")}, 400, "stop"),
    "a negative seed": ({"seed": -1}, 400, "seed"),
    "a number as text": ({"max_tokens": "12"}, 400, "max_tokens: Input should be a valid integer"),
    "a switch without a template": ({"chat_template_kwargs": {"enable_thinking": True}}, 400, "has no chat template"),
    "a list": (b"[]", 400, "the body"),
    "no JSON": (b"{", 400, "JSON decode error"),
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
def test_a_bad_request_is_refused_in_one_line(server, name, capfd):
    body, status, message = REFUSED[name]
    found, text = post(server, body)
    error = json.loads(text)["error"]
    assert (found, error["type"]) == (status, "invalid_request_error")
    assert message in error["message"] and "\n" not in error["message"]
    assert capfd.readouterr() == ("", ""), "nothing is logged"


def test_a_long_body_is_refused_before_it_arrives(server):
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    for header, value in (("Content-Length", str((1 << 20) + 1)), ("Transfer-Encoding", "chunked")):
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader(header, value)
        connection.endheaders()
        reply = connection.getresponse()
        assert reply.status == 413 and "more than 1048576 bytes" in json.load(reply)["error"]["message"]
        connection.close()


def test_other_routes_types_and_names_of_this_machine_are_refused(server):
    status, text = post(server, {}, "/v1/completions")
    assert status in (404, 405) and json.loads(text)["error"]["message"]
    assert post(server, {}, kind="text/plain")[0] == 400, "which a page from elsewhere could send"
    assert post(server, {}, Host="evil.example")[0] == 400, "a name that a page from elsewhere gave to this machine"


def test_neutral_values_and_nulls_are_accepted(server):
    asked = {"frequency_penalty": 0.0, "tools": [], "n": 1, "user": "me", "stop": None, "seed": None}
    message = {"role": "user", "content": [{"type": "text", "text": "w3 "}, {"type": "text", "text": "w4"}]}
    earlier = [{"role": "developer", "content": "w9"}, {"role": "assistant", "content": "w5", "refusal": None}]
    asked |= {"temperature": 0, "top_p": 0.5, "max_completion_tokens": 5, "messages": [*earlier, message]}
    status, reply = post(server, asked)
    assert status == 200
    assert reply["choices"][0]["message"]["content"] == own(server, 5, "w9\nw5\nw3 w4").text


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.model_extra["max_model_len"], model.model_extra["drafter"]) == ("toy", 4096, "anpd:order=2")


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
            text, policy = reply.read().decode(), reply.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert not re.search(r"<script(?! src=)| on\w+=|<style", text)
