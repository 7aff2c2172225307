"""Connections that send nothing, half a request or too much."""

import json
import socket

import pytest

from inference.serve import app

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ASKED = {"model": "toy", "messages": [{"role": "user", "content": "w3 w4"}], "temperature": 0, "max_tokens": 5}
BODY = json.dumps(ASKED)
WHOLE = f"{HEAD}Content-Length: {len(BODY)}\r\n\r\n{BODY}"


@pytest.fixture
def connect(server):
    """Opens connections to the server."""
    opened = []

    def connect():
        opened.append(socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60))
        return opened[-1]

    yield connect
    for each in opened:
        each.close()


def read_all(connection):
    """What the server sends until it closes the connection."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts).decode()


@pytest.mark.parametrize(
    ("sent", "replies"),
    [("", 0), ("G", 0), (HEAD, 0), (WHOLE, 1), (WHOLE + "P", 1), (WHOLE + WHOLE + HEAD, 2)],
    ids=["nothing", "a byte", "half a head", "a request", "a request and a byte", "two requests and half a head"],
)
def test_a_connection_that_waits_for_a_head_is_closed(connect, monkeypatch, capfd, sent, replies):
    monkeypatch.setattr(app, "HEAD_SECONDS", 0.02)
    connection = connect()
    connection.sendall(sent.encode())
    text = read_all(connection)
    assert text.count("HTTP/1.1 200 OK") == text.count('"finish_reason":"length"') == replies
    assert capfd.readouterr() == ("", ""), "nothing is logged"


def test_a_connection_is_kept_while_its_request_is_answered(connect, monkeypatch):
    monkeypatch.setattr(app, "HEAD_SECONDS", 0.2)  # its answer takes longer
    body = json.dumps(ASKED | {"max_tokens": 1000, "stream": True})
    connection = connect()
    connection.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    assert "data: [DONE]" in read_all(connection)


@pytest.mark.parametrize("length", ["Content-Length: 100", "Transfer-Encoding: chunked"])
def test_a_body_that_does_not_arrive_is_refused(connect, monkeypatch, length):
    monkeypatch.setattr(app, "BODY_SECONDS", 0.02)
    monkeypatch.setattr(app, "HEAD_SECONDS", 0.02)
    connection = connect()
    connection.sendall(f"{HEAD}{length}\r\n\r\n".encode())
    text = read_all(connection)
    assert text.startswith("HTTP/1.1 400") and "no whole body within 0.02 seconds" in text


def test_a_client_that_leaves_while_it_sends_does_no_harm(server, connect, capfd):
    for _ in range(3):
        connection = connect()
        connection.sendall(f"{HEAD}Content-Length: 100\r\n\r\n{{".encode())
        connection.close()
    assert server.client().chat.completions.create(**ASKED).choices
    assert capfd.readouterr() == ("", "")


def test_of_a_body_that_is_too_large_nothing_is_kept_and_the_next_request_is_read(connect, monkeypatch):
    monkeypatch.setattr(app, "MAX_BODY_BYTES", 1000)
    connection = connect()
    blocks = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n" + ("1f4\r\n" + "x" * 500 + "\r\n") * 1000 + "0\r\n\r\n"
    connection.sendall(blocks.encode())
    close = HEAD.replace("Host", "Connection: close\r\nHost") + WHOLE.removeprefix(HEAD)
    connection.sendall(close.encode())
    text = read_all(connection)
    assert text.startswith("HTTP/1.1 413") and text.count("HTTP/1.1 200 OK") == 1
