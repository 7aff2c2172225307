"""Servers of toy bases: the real application in uvicorn, in a thread on a free port, and the real client."""

import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

NAME = "toy"


@dataclass
class Running:
    """A server that runs in a thread of this process.

    Args:
        base: Its base.
        decoding: Its decoding thread.
        app: Its application.
        url: Its address.
    """

    base: object
    decoding: object
    app: object
    url: str

    def client(self, key="unused"):
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def metric(self, line):
        """The value of a metric; ``line`` is its name with its labels."""
        values = [each for each in self.decoding.metrics.text().decode().splitlines() if each.startswith(f"{line} ")]
        return float(values[0].split()[-1]) if values else 0.0

    def wait_until_idle(self):
        wait_until(lambda: not (self.decoding.num_running or self.decoding.num_waiting))


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.002)


@contextmanager
def serving(
    base,
    drafter="anpd:order=2",
    max_tokens=4000,
    max_waiting=64,
    timeout=60.0,
    api_key=None,
    grace_seconds=1.0,
    buffer=0,
):
    from inference.serve.app import Served, make_app
    from inference.serve.command import ListenOptions
    from inference.serve.decoding import DecodingThread
    from inference.serve.metrics import Metrics
    from inference.serve.requests import TextLimits
    from inference.serve.server import GracefulServer

    decoding = DecodingThread(base, drafter, max_waiting, Metrics())
    limits = TextLimits(base, "tokenizer", max_tokens)
    app = make_app(Served(NAME, drafter, limits, timeout, api_key, is_local=True), decoding)
    server = GracefulServer(app, decoding, grace_seconds)
    place = ListenOptions(port=0).open()
    if buffer:  # bytes that the system takes for a client that does not read; its connections inherit it
        place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
    thread.start()
    try:
        yield Running(base, decoding, app, f"http://127.0.0.1:{place.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive() and not decoding.is_alive


@pytest.fixture(scope="session")
def serve_base():
    """Serves a base: a context manager that yields a `Running`."""
    return serving


@pytest.fixture(scope="session")
def long_base(make_base):
    """A base whose texts do not end for seconds, so that a request can be aborted."""
    import torch

    return make_base(context=4096, predictable=True, dtype=torch.float32)


@pytest.fixture(scope="package")
def server(long_base):
    """A server that many tests share."""
    with serving(long_base) as running:
        yield running


@pytest.fixture(scope="session")
def until():
    """Waits until a condition holds."""
    return wait_until
