import pytest

from inference.regeneration.endpoint import Endpoint, Refused, Said


@pytest.fixture
def chat(chat_server, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    endpoint = Endpoint(chat_server.url, "m", first_wait=0.001)
    return lambda text, room=9: endpoint.chat([("system", "be brief"), ("user", text)], room)


def test_an_answer_comes_with_its_end_and_counts(chat, chat_server):
    assert chat("one two three") == Said("three two one", False, 3, 3)
    assert chat("one two three", 2) == Said("three two", True, 3, 2)
    path, headers, body = chat_server.seen[-1]
    assert path == "/v1/chat/completions" and "Authorization" not in headers
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one two three"}],
        "temperature": 0,
        "max_tokens": 2,
    }


def test_the_key_is_sent_and_not_kept(chat_server, monkeypatch):
    endpoint = Endpoint(chat_server.url, "m")
    monkeypatch.setenv("OPENAI_API_KEY", "secret-1")
    endpoint.chat([("user", "hi")], 3)
    assert chat_server.seen[-1][1]["Authorization"] == "Bearer secret-1"
    assert "secret-1" not in str(vars(endpoint))


@pytest.mark.parametrize("ending", ["", "/v1", "/v1/", "/v1/chat/completions"])
def test_the_address_may_be_written_in_four_ways(chat_server, ending):
    assert Endpoint(chat_server.url.removesuffix("/v1") + ending, "m").chat([("user", "a b")], 3).text == "b a"


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(chat, chat_server, code):
    assert chat(f"fail {code} 3").text == f"3 {code} fail"
    assert chat_server.tries[f"fail {code} 3"] == 4


@pytest.mark.parametrize(("code", "num_tries"), [(400, 1), (422, 1), (500, 6)])
def test_a_request_that_cannot_be_answered_is_refused_alone(chat, chat_server, code, num_tries):
    with pytest.raises(Refused, match=f"HTTP {code}"):
        chat(f"fail {code} 99")
    assert chat_server.tries[f"fail {code} 99"] == num_tries


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("fail 401 99", "OPENAI_API_KEY"),
        ("fail 404 99", "the model 'm' is wrong"),
        ("fail 307 99", "it has moved"),
        ("fail 429 99", "does not answer .HTTP 429.*the same command goes on"),
        ("hang up", "does not answer"),
        ("babble", "not as an OpenAI-compatible server does"),
    ],
)
def test_what_no_request_can_mend_ends_in_one_line(chat, asked, reason):
    with pytest.raises(ValueError, match=reason) as error:
        chat(asked)
    assert "\n" not in str(error.value)


def test_nobody_at_the_address_is_one_line():
    with pytest.raises(ValueError, match="does not answer"):
        Endpoint("http://127.0.0.1:9", "m", first_wait=0.001).chat([("user", "a")], 3)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "http://", "http://x/v1?key=1"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ValueError, match="must look like"):
        Endpoint(url, "m")


def test_a_password_in_the_address_is_refused_and_not_repeated():
    with pytest.raises(ValueError, match="OPENAI_API_KEY") as error:
        Endpoint("http://me:hunter2@host/v1", "m")
    assert "hunter2" not in str(error.value)
