"""The server's replies to the real ``openai`` client: equal to our own `generate`, and to the base's own forward."""

import http.client
import json
import re
import urllib.error
import urllib.request

import openai
import pytest
import torch

from inference import generate

PROMPT = "w3 w4 w5 w6 w7 w8 w3 w4"
CHAT = [{"role": "user", "content": PROMPT}]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 5}
GREEDY = {"temperature": 0}
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


@each_sampling
def test_a_chat_equals_our_own_generate_in_text_and_steps(server, client, sampling):
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


@each_sampling
def test_completions_of_texts_and_token_ids_equal_our_own_generate(server, client, sampling):
    options = {"model": "toy", "max_tokens": 20, **sampling}
    for prompt in (["w9 w8", "w30 w31 w30"], [[9, 8], [30, 31, 30]]):
        expected = [generate(server.base, each, "none", max_new_tokens=20, **sampling)[0] for each in prompt]
        reply = client.completions.create(prompt=prompt, **options)
        assert [choice.text for choice in reply.choices] == [each.text for each in expected]
        assert [choice.index for choice in reply.choices] == [0, 1]
        one = client.completions.create(prompt=prompt[0], **options)
        assert one.choices[0].text == expected[0].text


def test_n_texts_are_sampled_with_the_seeds_that_follow(server, client):
    reply = chat(client, n=3, max_tokens=12, **SAMPLED)
    expected = [own(server, 12, **SAMPLED | {"seed": seed}) for seed in (5, 6, 7)]
    assert [choice.message.content for choice in reply.choices] == [each.text for each in expected]
    assert reply.usage.prompt_tokens == 8
    assert reply.usage.completion_tokens == sum(len(each.token_ids) for each in expected)


def test_each_of_several_prompts_has_the_texts_of_a_request_of_its_own(client):
    options = {"model": "toy", "max_tokens": 12, "n": 2, **SAMPLED}
    together, *alone = (
        [choice.text for choice in client.completions.create(prompt=prompt, **options).choices]
        for prompt in (["w9 w8", "w30 w31 w30"], "w9 w8", "w30 w31 w30")
    )
    assert together == [*alone[0], *alone[1]] and len(set(together)) > 2


def test_temperatures_near_0_are_greedy_whatever_top_k_and_top_p_are(server, client):
    reply = chat(client, temperature=1e-39, top_p=0.9, extra={"top_k": 3})
    assert reply.choices[0].message.content == own(server).text


def test_without_a_seed_texts_differ_and_without_a_temperature_they_are_sampled(client):
    assert len({chat(client).choices[0].message.content for _ in range(4)}) > 1


@each_sampling
def test_a_stream_is_the_whole_reply_in_pieces(client, sampling):
    options = {"logprobs": True, "top_logprobs": 2, "n": 2, **sampling}
    whole = chat(client, **options)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **options))
    for index, expected in enumerate(whole.choices):
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert len(parts) > 3
        assert [part.delta.role for part in parts].count("assistant") == 1
        assert "".join(part.delta.content or "" for part in parts) == expected.message.content
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [expected.finish_reason]
        assert [each for part in parts if part.logprobs for each in part.logprobs.content] == expected.logprobs.content
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_token_ids_of_a_reply_are_those_of_our_own_generate(server, client):
    expected, asked = own(server, 20), {"extra_body": {"return_token_ids": True}, "model": "toy", "max_tokens": 20}
    whole = client.completions.create(prompt=PROMPT, temperature=0, **asked).choices[0]
    assert whole.model_extra["token_ids"] == expected.token_ids
    pieces = [
        chunk.choices[0].model_extra["token_ids"]
        for chunk in client.completions.create(prompt=PROMPT, temperature=0, stream=True, **asked)
    ]
    assert [len(piece) for piece in pieces] == [step.emitted for step in expected.steps]
    assert [token for piece in pieces for token in piece] == expected.token_ids


def test_a_completion_is_streamed_too(server, client):
    options = {"model": "toy", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logprobs": 1}
    chunks = list(client.completions.create(stream=True, **options))
    whole = client.completions.create(**options).choices[0]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text == own(server, 20).text
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason
    offsets = [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset]
    assert offsets == whole.logprobs.text_offset


@each_sampling
def test_a_stop_string_across_token_borders_ends_the_text_before_it(server, client, sampling):
    text = own(server, **sampling).text
    middle = len(text) // 2
    for stop in (text[middle : middle + 5], [text[middle : middle + 9], "none of it"]):
        expected = text[: text.index(stop if isinstance(stop, str) else stop[0])]
        replies = [chat(client, stop=stop, extra={"use_drafter": is_on}, **sampling) for is_on in (True, False)]
        for reply in replies:
            assert reply.choices[0].message.content == expected
            assert reply.choices[0].finish_reason == "stop"
        assert replies[0].usage.completion_tokens == replies[1].usage.completion_tokens < 40
        assert replies[1].usage.completion_tokens_details.accepted_prediction_tokens == 0
        streamed = chat(client, stop=stop, stream=True, **sampling)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected


@each_sampling
def test_logprobs_are_those_of_the_base_itself(server, client, sampling):
    expected = own(server, **sampling)
    ids = server.base.tokenizer(PROMPT).input_ids + expected.token_ids
    with torch.no_grad():
        scores = server.base.model(torch.tensor([ids])).logits[0, 7:-1].double().log_softmax(-1)
    content = chat(client, logprobs=True, top_logprobs=3, **sampling).choices[0].logprobs.content
    decode = server.base.tokenizer.decode
    assert [each.token.strip() for each in content] == [decode([token]) for token in expected.token_ids]
    for each, row, token in zip(content, scores, expected.token_ids, strict=True):
        top = row.topk(3)
        assert each.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [other.logprob for other in each.top_logprobs] == pytest.approx(top.values.tolist(), abs=1e-4)
        assert [other.token.strip() for other in each.top_logprobs] == [decode([other]) for other in top.indices]
        assert bytes(each.bytes).decode() == each.token


def test_each_step_is_shown_with_its_draft_tree(server, client):
    expected = own(server)
    chunks = chat(client, stream=True, extra={"include_steps": True}, **GREEDY)
    shown = [
        (choice.model_extra["steps"][0], choice.delta.content)
        for chunk in chunks
        for choice in chunk.choices
        if "steps" in (choice.model_extra or {})
    ]
    assert len(shown) == len(expected.steps)
    for (step, text), cost in zip(shown, expected.steps, strict=True):
        assert (step["num_tokens"], len(step["path"]), step["num_fed"]) == (cost.emitted, cost.accepted, cost.fed)
        assert len(step["tokens"]) - step["num_scratch"] == cost.fed_candidates
        accepted = text[: step["num_accepted_characters"]]
        assert accepted.split() == [step["tokens"][node].strip() for node in step["path"]]
        parents = [-1, *step["path"]][: len(step["path"])]
        assert [step["parents"][node] for node in step["path"]] == parents
    assert "".join(text for _, text in shown) == expected.text


def test_a_request_learns_nothing_from_the_ones_before(long_base, serve_base):
    with serve_base(long_base, "joint") as running:
        usages = [chat(running.client(), **GREEDY).usage for _ in range(2)]
    assert usages[0] == usages[1]
    assert usages[0].completion_tokens_details.accepted_prediction_tokens > 0


REFUSED = {
    "no model": ({"model": "other"}, 404, "toy is served"),
    "temperature": ({"temperature": 3}, 400, "temperature: Input should be less than or equal to 2"),
    "top_p": ({"top_p": 0}, 400, "top_p"),
    "a penalty": ({"frequency_penalty": 0.5}, 400, "frequency_penalty is not supported: leave it out"),
    "an unknown field": ({"guided_json": {}}, 400, "guided_json is not supported: leave it out"),
    "tools": ({"tools": [{"type": "function"}]}, 400, "tools is not supported"),
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
    "too many texts": ({"n": 17}, 400, "n: Input should be less than or equal to 16"),
    "top_logprobs alone": ({"top_logprobs": 2}, 400, "top_logprobs needs logprobs"),
    "a number as text": ({"max_tokens": "12"}, 400, "max_tokens: Input should be a valid integer"),
    "a list": ([], 400, "must be a JSON object"),
    "no JSON": (b"{", 400, "the body cannot be read: Expecting"),
    "NaN": (
        b'{"model": "toy", "messages": [{"role": "user", "content": "w3"}], "temperature": NaN}',
        400,
        "temperature",
    ),
    "nesting": (b"[" * 5000, 400, "the body cannot be read"),
}


def post(server, body, path="/v1/chat/completions", kind="application/json", **headers):
    """The status and the JSON of the reply to a raw request."""
    if isinstance(body, dict):
        body = {"model": "toy", "messages": CHAT} | body
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": kind} | {name.replace("_", "-"): value for name, value in headers.items()}
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
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str((1 << 20) + 1))
    connection.endheaders()
    reply = connection.getresponse()
    assert reply.status == 413 and "more than 1048576 bytes" in json.load(reply)["error"]["message"]
    connection.close()


def test_bad_completions_and_routes_are_refused(server):
    for body, message in (
        ({"prompt": [99]}, "prompt has token ids outside 0 to 39"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "w3", "echo": True}, "echo is not supported"),
        ({"prompt": ["w3"] * 9, "n": 2}, "at most 16 texts"),
    ):
        status, text = post(server, json.dumps({"model": "toy"} | body).encode(), "/v1/completions")
        assert status == 400 and message in json.loads(text)["error"]["message"]
    status, text = post(server, {}, "/v1/embeddings")
    assert status == 404 and json.loads(text)["error"]["message"] == "POST /v1/embeddings: Not Found"
    assert post(server, {}, kind="text/plain")[0] == 415, "which a page from elsewhere could send"
    assert post(server, {}, Host="evil.example")[0] == 400, "a name that a page from elsewhere gave to this machine"


def test_neutral_values_and_nulls_are_accepted(server):
    asked = {"frequency_penalty": 0, "tools": [], "response_format": {"type": "text"}, "user": "me", "stop": None}
    message = {"role": "user", "content": [{"type": "text", "text": "w3 "}, {"type": "text", "text": "w4"}]}
    earlier = [{"role": "developer", "content": "w9"}, {"role": "assistant", "content": "w5", "refusal": None}]
    asked |= {"temperature": 0, "top_p": 0.5, "max_completion_tokens": 5, "messages": [*earlier, message]}
    status, reply = post(server, asked)
    assert status == 200
    assert reply["choices"][0]["message"]["content"] == own(server, 5, "w9\nw5\nw3 w4").text


def test_the_model_is_listed_and_the_server_says_that_it_lives(server, client):
    (model,) = client.models.list().data
    assert (model.id, model.model_extra["max_model_len"]) == ("toy", 4096)
    assert client.models.retrieve("toy") == model
    with pytest.raises(openai.NotFoundError, match="there is no such model: toy is served"):
        client.models.retrieve("other/model")
    with urllib.request.urlopen(f"{server.url}/health") as reply:
        assert json.load(reply) == {"status": "ok"}


def test_metrics_count_what_was_decoded(server, client):
    names = ("generated_tokens", "accepted_draft_tokens", "rejected_draft_tokens", "prompt_tokens", "base_forwards")
    server.wait_until_idle()
    before = {name: server.metric(f"drafters_{name}_total") for name in names}
    reply = chat(client, **GREEDY)
    with urllib.request.urlopen(f"{server.url}/metrics") as shown:
        assert shown.headers["Content-Type"].startswith("text/plain")
        assert b"drafters_requests_waiting 0.0" in shown.read()
    after = [server.metric(f"drafters_{name}_total") - before[name] for name in names]
    details = reply.usage.completion_tokens_details
    counted = (details.accepted_prediction_tokens, details.rejected_prediction_tokens, 8)
    assert after == [reply.usage.completion_tokens, *counted, len(own(server).steps)]


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
        for path in ("/", "/health"):
            assert urllib.request.urlopen(running.url + path).status == 200
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{running.url}/metrics")
    assert "s3cret" not in "".join(capfd.readouterr())


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_inline_code(server):
    for path in ("/", "/page.css", "/page.js"):
        with urllib.request.urlopen(server.url + path) as reply:
            text, policy = reply.read().decode(), reply.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'") and "unsafe" not in policy
        assert not re.search(r"https?:|//[^ ]|innerHTML|<script>|<style|\s(on\w+|style)=", text)
