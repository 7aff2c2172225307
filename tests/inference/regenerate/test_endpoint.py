"""The client of an OpenAI-compatible server, against a real server on this machine."""

import contextlib
import json
import socket
import threading
import time

import pytest

from inference.regenerate import endpoint
from inference.regenerate.endpoint import ChatAnswer, Endpoint, RequestFailed, RequestRefused


@pytest.fixture
def chat(chat_server, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    endpoint = Endpoint(chat_server.url, "m")
    return lambda text, max_new_tokens=9: endpoint.chat([("system", "be brief"), ("user", text)], max_new_tokens)


@pytest.mark.slow
def test_an_answer_reports_its_token_counts_and_whether_it_was_cut(chat, chat_server):
    assert chat("one two three") == ChatAnswer("three two one", False, 3, 3)
    assert chat("one two three", 2) == ChatAnswer("three two", True, 3, 2)
    path, headers, body = chat_server.seen[-1]
    assert path == "/v1/chat/completions" and "authorization" not in {name.lower() for name in headers}
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one two three"}],
        "temperature": 0,
        "max_tokens": 2,
    }


def test_the_key_is_sent_but_not_stored(chat_server, monkeypatch):
    endpoint = Endpoint(chat_server.url, "m")
    monkeypatch.setenv("OPENAI_API_KEY", "secret-1")
    endpoint.chat([("user", "hi")], 3)
    headers = {name.lower(): value for name, value in chat_server.seen[-1][1].items()}
    assert headers["authorization"] == "Bearer secret-1"
    assert "secret-1" not in str(vars(endpoint)) + str(vars(endpoint._client))


def test_a_key_that_is_invalid_in_a_header_is_refused_without_being_quoted(chat, chat_server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-3\n")
    with pytest.raises(ValueError, match="OPENAI_API_KEY contains a line break") as error:
        chat("hi")
    assert "secret-3" not in str(error.value) and not chat_server.seen


@pytest.mark.parametrize("ending", ["", "/v1", "/v1/", "/v1/chat/completions"])
def test_the_address_may_be_written_in_four_ways(chat_server, ending):
    assert Endpoint(chat_server.url.removesuffix("/v1") + ending, "m").chat([("user", "a b")], 3).text == "b a"


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_busy_server_is_asked_again(chat, chat_server, code):
    assert chat(f"fail {code} 3").text == f"3 {code} fail"
    assert chat_server.tries[f"fail {code} 3"] == 4


@pytest.mark.parametrize(("code", "num_tries"), [(400, 1), (422, 1), (500, 6)])
def test_a_request_that_cannot_be_answered_is_refused_by_itself(chat, chat_server, code, num_tries):
    with pytest.raises(RequestRefused, match=f"HTTP {code}"):
        chat(f"fail {code} 99")
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


def test_a_server_that_hangs_up_is_asked_again_and_then_reported_in_one_line(chat_server):
    with pytest.raises(ValueError, match=r"does not answer .*tried 2 times") as error:
        Endpoint(chat_server.url, "m", max_retries=1).chat([("user", "hang up")], 3)
    assert "\n" not in str(error.value) and chat_server.tries["hang up"] == 2


def test_an_address_where_no_server_listens_is_reported_in_one_line():
    with pytest.raises(ValueError, match="does not answer"):
        Endpoint("http://127.0.0.1:9", "m", max_retries=1).chat([("user", "a")], 3)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "http://", "http://x/v1?key=1"])
def test_a_malformed_address_is_refused(url):
    with pytest.raises(ValueError, match="must look like"):
        Endpoint(url, "m")


def test_a_password_in_the_address_is_refused_and_not_repeated():
    with pytest.raises(ValueError, match="OPENAI_API_KEY") as error:
        Endpoint("http://me:hunter2@host/v1", "m")
    assert "hunter2" not in str(error.value)


@pytest.fixture
def raw_server():
    """Starts a server that answers every connection by what a function sends on it."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve(send):
        def run():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    with contextlib.suppress(OSError):  # the client has hung up
                        send(connection)

        threading.Thread(target=run, daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield serve
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


HEAD = b"HTTP/1.1 %d OK\r\nContent-Type: application/json\r\nContent-Length: 3000000000\r\n\r\n"


@pytest.mark.parametrize("code", [200, 500])
def test_a_reply_of_gigabytes_is_cut_off(raw_server, monkeypatch, code):
    sent = []

    def send(connection):
        connection.sendall(HEAD % code)
        for _ in range(3000):
            connection.sendall(b" " * 1_000_000)
            sent.append(1)

    url = raw_server(send)
    monkeypatch.setattr(endpoint, "MAX_REPLY_BYTES", 1 << 22, raising=False)
    with pytest.raises(RequestFailed, match="a reply of more than 4 MiB"):
        Endpoint(url, "m", max_retries=0).chat([("user", "hi")], 3)
    assert len(sent) < 100


def test_a_reply_that_drips_for_ever_is_cut_off(raw_server, monkeypatch):
    def send(connection):
        connection.sendall(HEAD % 200)
        for _ in range(200):
            connection.sendall(b" ")
            time.sleep(0.02)

    monkeypatch.setattr(endpoint, "TIMEOUT", 0.3)
    with pytest.raises(RequestFailed, match=r"a reply of more than .* 0\.3 seconds"):
        Endpoint(raw_server(send), "m", max_retries=0).chat([("user", "hi")], 3)


@pytest.mark.parametrize("text", ["\\ud800"])
def test_an_answer_that_no_file_can_hold_is_refused_in_one_line(raw_server, text):
    whole = json.dumps({"choices": [{"message": {"content": "@"}}]}).replace("@", text)
    body = whole.encode() if text.startswith("\\u") else text.encode()

    def send(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    with pytest.raises((RequestRefused, ValueError), match=r"half of a surrogate pair|nested too deeply"):
        Endpoint(raw_server(send), "m", max_retries=0).chat([("user", "hi")], 3)
