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
        decoder: Its decoder.
        url: Its address.
    """

    base: object
    decoder: object
    url: str

    def client(self, key="unused"):
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.002)


@contextmanager
def serving(base, drafter="anpd:order=2", api_key="", template="tokenizer"):
    import uvicorn

    from inference.serve.app import SERVER, Decoder, make_app
    from inference.serve.command import LOCAL_HOSTS

    decoder = Decoder(base, drafter, template, max_tokens=4000)
    app = make_app(decoder, NAME, drafter, api_key, LOCAL_HOSTS)
    server = uvicorn.Server(uvicorn.Config(app, **SERVER | {"timeout_graceful_shutdown": 1}))
    place = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
    thread.start()
    try:
        yield Running(base, decoder, f"http://127.0.0.1:{place.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


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
