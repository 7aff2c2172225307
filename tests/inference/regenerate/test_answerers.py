"""The client of an OpenAI-compatible server, against a real server on this machine."""

import pytest
from openai.types.chat import ChatCompletion

from data.conversations import user_message
from inference.openai_server import OpenAIServer
from inference.regenerate import answerers
from inference.regenerate.answerers import Request, ServerAnswerer, ServerReply


@pytest.fixture
def chat(chat_server, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return lambda text, max_new_tokens=9: ask(
        chat_server.url, text, max_new_tokens, [{"role": "system", "content": "be brief"}]
    )


def ask(url, text, max_new_tokens=3, before=()):
    return ServerAnswerer(url, "m").ask(Request([*before, user_message(text)], [], max_new_tokens))


@pytest.mark.slow
def test_an_answer_reports_its_token_counts_and_whether_it_was_cut(chat, chat_server):
    assert chat("one two three") == ServerReply("three two one", False, 3, 3)
    assert chat("one two three", 2) == ServerReply("three two", True, 3, 2)
    path, headers, body = chat_server.seen[-1]
    assert path == "/v1/chat/completions" and "authorization" not in {name.lower() for name in headers}
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one two three"}],
        "temperature": 0,
        "max_tokens": 2,
        "return_token_ids": True,
    }


def test_a_server_that_does_not_know_token_ids_is_asked_for_them_only_once(chat_server):
    answerer = ServerAnswerer(chat_server.url, "m")
    assert [answerer.ask(Request([user_message("strict")], [], 3)).text for _ in range(2)] == ["strict", "strict"]
    assert ["return_token_ids" in body for *_, body in chat_server.seen] == [True, False, False]


def test_the_context_of_the_server_limits_prompt_and_answer(chat_server):
    assert ServerAnswerer(chat_server.url, max_length=100).max_length == 40
    assert ServerAnswerer(chat_server.url, max_length=30).max_length == 30


def test_a_long_answer_has_longer_to_arrive(chat_server, monkeypatch):
    answerer, waits = ServerAnswerer(chat_server.url, "m"), []

    def complete(extra, timeout, complete=answerer.server.complete, **request):
        waits.append(timeout)
        return complete(extra, timeout=timeout, **request)

    monkeypatch.setattr(answerer.server, "complete", complete)
    for limit in (3, 9000):
        answerer.ask(Request([user_message("hi")], [], limit))
    assert waits == [603, 9600]


def test_the_key_is_sent_but_not_stored_and_an_invalid_one_not_quoted(chat_server, monkeypatch):
    answerer = ServerAnswerer(chat_server.url, "m")
    monkeypatch.setenv("OPENAI_API_KEY", "secret-1")
    answerer.ask(Request([user_message("hi")], [], 3))
    headers = {name.lower(): value for name, value in chat_server.seen.pop()[1].items()}
    assert headers["authorization"] == "Bearer secret-1"
    assert "secret-1" not in str(vars(answerer.server)) + str(vars(answerer.server._client))
    monkeypatch.setenv("OPENAI_API_KEY", "secret-3\n")
    with pytest.raises(ValueError, match="OPENAI_API_KEY contains a line break") as error:
        ask(chat_server.url, "hi")
    assert "secret-3" not in str(error.value) and not chat_server.seen


def test_the_address_may_be_written_in_four_ways_and_a_busy_server_is_asked_again(chat_server):
    for ending, code in zip(("", "/v1", "/v1/", "/v1/chat/completions"), (429, 500, 503, 503), strict=True):
        chat_server.tries.clear()
        text = f"fail {code} 3"
        assert ask(chat_server.url.removesuffix("/v1") + ending, text).text == f"3 {code} fail"
        assert chat_server.tries[text] == 4


@pytest.mark.parametrize(("code", "num_tries"), [(400, 2), (422, 2), (500, 6)])
def test_a_request_that_cannot_be_answered_is_refused_by_itself(chat, chat_server, code, num_tries):
    reply = chat(f"fail {code} 99")
    assert reply.refused.startswith(f"HTTP {code}") and reply.is_failing == (code == 500)
    assert chat_server.tries[f"fail {code} 99"] == num_tries


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("fail 401 99", "OPENAI_API_KEY"),
        ("fail 404 99", "the model 'm' is wrong"),
        ("fail 307 99", "has moved"),
        ("fail 429 99", "does not answer .HTTP 429.*repeat the command to continue"),
        ("babble", "not as an OpenAI-compatible server does"),
    ],
)
def test_an_error_that_concerns_every_request_is_one_line(chat, prompt, reason):
    with pytest.raises(ValueError, match=reason) as error:
        chat(prompt)
    assert "\n" not in str(error.value)


def test_a_server_that_hangs_up_or_does_not_listen_is_reported_in_one_line(chat_server, monkeypatch):
    monkeypatch.setattr(answerers, "MAX_RETRIES", 1)
    for url in (chat_server.url, "http://127.0.0.1:9"):
        with pytest.raises(ValueError, match=r"does not answer .*tried 2 times") as error:
            ask(url, "hang up")
        assert "\n" not in str(error.value)
    assert chat_server.tries["hang up"] == 2


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "http://", "http://x/v1?key=1", "http://me:hunter2@h"])
def test_a_malformed_address_or_one_with_a_password_is_refused_and_the_password_not_repeated(url):
    with pytest.raises(ValueError, match="OPENAI_API_KEY" if "@" in url else "must look like") as error:
        ServerAnswerer(url, "m")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "a \ud800 b"}, ServerReply("a ? b", num_read=3, num_written=4)),
        ({"content": None, "reasoning": "r"}, ServerReply("", num_read=3, num_written=4, reasoning="r")),
        ({"content": "the key s3cret-key"}, ServerReply("the key [OPENAI_API_KEY]", num_read=3, num_written=4)),
    ],
)
def test_what_no_file_may_hold_is_replaced(message, expected, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret-key")
    choices = [{"index": 0, "message": {"role": "assistant"} | message, "finish_reason": "stop"}]
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    completion = ChatCompletion.construct(choices=choices, usage=usage)
    monkeypatch.setattr(OpenAIServer, "_create", lambda *request: completion)
    assert ask("http://localhost:1", "hi") == expected
