"""Requests that wait, that are given up, and that find the queue full."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import openai
import pytest

from inference.serve import server as server_module

LONG = {"model": "toy", "prompt": "w3 w4", "max_tokens": 4000, "temperature": 0}
SHORT = {"model": "toy", "prompt": "w9 w8", "max_tokens": 5, "temperature": 0}


@pytest.fixture
def running(long_base, serve_base):
    with serve_base(long_base, max_waiting=3) as running:
        yield running


def occupy(server):
    """Start a request of seconds, and return its stream after the first chunk."""
    stream = server.client().completions.create(stream=True, **LONG)
    next(stream)
    return stream


def test_decoding_stops_when_the_client_of_a_stream_goes_away(running):
    stream = occupy(running)
    assert running.decoding.num_running == 1
    stream.close()
    running.wait_until_idle()
    assert running.metric('drafters_requests_total{outcome="aborted"}') == 1
    assert running.metric("drafters_generated_tokens_total") < 3000
    assert running.decoding._runner.cached == 0
    assert running.client().completions.create(**SHORT).choices


def test_decoding_stops_when_a_client_does_not_wait_for_its_whole_reply(running):
    with pytest.raises(openai.APITimeoutError):
        running.client().with_options(timeout=0.2).completions.create(**LONG)
    running.wait_until_idle()
    assert running.metric('drafters_requests_total{outcome="aborted"}') == 1
    assert running.metric("drafters_generated_tokens_total") < 3000


def test_requests_are_answered_in_order_and_a_full_queue_refuses_more(running, until):
    stream, done = occupy(running), []
    with ThreadPoolExecutor(4) as pool:

        def ask(number):
            running.client().completions.create(**SHORT)
            done.append(number)

        asked = []
        for number in range(3):
            asked.append(pool.submit(ask, number))
            until(lambda number=number: running.decoding.num_waiting == number + 1)
        with pytest.raises(openai.RateLimitError, match="3 requests are waiting") as refused:
            running.client().completions.create(**SHORT)
        assert refused.value.response.headers["Retry-After"] == "1"
        assert not done
        stream.close()
        for each in asked:
            each.result()
    assert done == [0, 1, 2]


def test_a_client_that_goes_away_leaves_the_queue(running, until):
    stream = occupy(running)
    with pytest.raises(openai.APITimeoutError):
        running.client().with_options(timeout=0.1).completions.create(**SHORT)
    until(lambda: running.decoding.num_waiting == 0)
    assert running.decoding.num_running == 1
    stream.close()
    running.wait_until_idle()
    assert running.metric('drafters_requests_total{outcome="aborted"}') == 2


def test_a_request_is_given_up_after_its_time(long_base, serve_base):
    with serve_base(long_base, timeout=0.5) as running:
        with pytest.raises(openai.InternalServerError, match=r"took longer than 0\.5 seconds") as late:
            running.client().completions.create(**LONG)
        assert late.value.status_code == 504
        running.wait_until_idle()
        with pytest.raises(openai.APIError, match=r"took longer than 0\.5 seconds"):
            list(running.client().completions.create(stream=True, **LONG))
        running.wait_until_idle()
        assert running.metric('drafters_requests_total{outcome="timed_out"}') == 2


def test_a_failed_request_does_not_end_the_server(running, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        patch.setattr(running.decoding._runner, "forward", None)
        with pytest.raises(openai.InternalServerError, match="decoding failed, and the server's log says why"):
            running.client().completions.create(**SHORT)
    assert "TypeError" in capfd.readouterr().err
    assert running.client().completions.create(**SHORT).choices
    assert running.metric('drafters_requests_total{outcome="failed"}') == 1


def test_a_server_that_stops_tells_those_whose_requests_it_gives_up(long_base, serve_base, until, capfd):
    before = set(threading.enumerate())  # the server that other tests share may run
    with ThreadPoolExecutor(1) as pool:
        with serve_base(long_base, grace_seconds=0.1) as running:
            stream = occupy(running)
            waiting = pool.submit(running.client().completions.create, **SHORT)
            until(lambda: running.decoding.num_waiting == 1)
        with pytest.raises(openai.InternalServerError, match="the server is stopping"):
            waiting.result()
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)
    assert "decoding" not in {thread.name for thread in set(threading.enumerate()) - before}
    assert capfd.readouterr() == ("", ""), "nothing is logged"


def connect(server):
    """A socket that takes little of what it does not read."""
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    place.settimeout(30)
    place.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    return place


def post(body):
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + content


def test_a_client_that_does_not_read_its_stream_is_cut_off(long_base, serve_base, until, monkeypatch):
    monkeypatch.setattr(server_module, "READ_SECONDS", 0.1)
    with serve_base(long_base, buffer=4096) as running, connect(running) as place:
        place.sendall(post(LONG | {"stream": True, "logprobs": 5, "include_steps": True}))
        until(lambda: running.metric('drafters_requests_total{outcome="aborted"}') == 1)
        running.wait_until_idle()
        assert running.metric("drafters_generated_tokens_total") < 3000


def test_decoding_ends_at_the_time_limit_although_the_stream_is_not_read(long_base, serve_base, until):
    with serve_base(long_base, timeout=0.3, buffer=4096) as running, connect(running) as place:
        place.sendall(post(LONG | {"stream": True, "logprobs": 5, "include_steps": True}))
        until(lambda: running.decoding.num_running == 1)
        running.wait_until_idle()
        assert running.metric("drafters_generated_tokens_total") < 3000


@pytest.mark.parametrize(("sent", "follows"), [(b"", False), (b"POST /v1", False), (b"POST /v1", True)])
def test_a_connection_on_which_no_request_arrives_is_closed(sent, follows, running, monkeypatch):
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.2)
    with connect(running) as place:
        if follows:  # a whole request on the same connection
            place.sendall(post(SHORT))
            received = b""
            while b'"usage"' not in received:
                received += place.recv(4096)
        place.sendall(sent)
        with suppress(ConnectionResetError):
            while place.recv(4096):
                pass
