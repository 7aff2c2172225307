"""``drafters serve``: an OpenAI-compatible server with a web page, on this project's own engine."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import ip_address
from math import inf

from data.files import reading, safe_line
from inference import drafter_specs
from inference.verifier.options import ModelOptions

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
KEY_VARIABLE = "DRAFTERS_API_KEY"
MAX_KEY_BYTES = 1 << 20
EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


@dataclass(frozen=True)
class ListenOptions:
    """Where the server listens, and who may ask.

    Args:
        host: Address to listen on. By default only this machine can reach the server; every other address needs an API
            key.
        port: Port to listen on; 0 takes a free one.
        api_key_file: File that holds the key which requests must carry as ``Authorization: Bearer KEY``. By default the
            environment variable DRAFTERS_API_KEY; without either, requests need no key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def read_key(self) -> str | None:
        """Return the API key, or None if requests need none.

        Raises:
            ValueError: The key cannot be read or is empty, or there is none although other machines reach the server.
        """
        key, source = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
        if self.api_key_file is not None:
            source = self.api_key_file
            with reading(source), open(source, encoding="ascii", errors="replace") as stream:
                key = stream.read(MAX_KEY_BYTES)
        if key is None:
            if not self.is_local:
                raise ValueError(f"other machines can reach {self.host}: give --api-key-file, or leave --host out")
            return None
        key = key.strip()
        if not (key and key.isascii() and key.isprintable()):
            raise ValueError(f"{source} must hold the API key and nothing else, in ASCII")
        return key

    def open(self) -> socket.socket:
        """Open the socket; raises ValueError if the address cannot be used."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port must be from 0 to 65535, not {self.port}")
        try:
            return socket.create_server((self.host, self.port), family=family)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"cannot listen on {self.host} port {self.port} ({reason}): give another one") from error


@dataclass(frozen=True)
class RequestOptions:
    """What requests may ask for.

    Args:
        max_tokens: Maximum number of new tokens of a text, and the number for chats that name none.
        max_waiting: Maximum number of requests that wait while another one is decoded; more are refused with HTTP 429.
        timeout: Seconds after which a request is given up, the time that it waits included.
    """

    max_tokens: int = 4096
    max_waiting: int = 64
    timeout: float = 600.0

    def check(self) -> None:
        """Raise ValueError if a value is out of its range."""
        for name, value in (("max_tokens", self.max_tokens), ("max_waiting", self.max_waiting)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0 < self.timeout < inf:
            raise ValueError(f"timeout must be a number of seconds above 0, not {self.timeout}")


def serve(
    model: ModelOptions,
    listen: ListenOptions,
    requests: RequestOptions,
    drafter: str = "joint",
    served_name: str | None = None,
    template: str = "tokenizer",
) -> None:
    """Serve a base with a drafter through OpenAI's API, with a web page that shows every step.

    Needs the extra `serve`: pip install 'ctc-drafters[serve]'. The server decodes one text at a time, and other
    requests wait in order. It ends at Ctrl-C or SIGTERM, after at most ten seconds for the requests that are running.

    Args:
        model: The base.
        listen: Where the server listens.
        requests: What requests may ask for.
        drafter: NAME[=FILE][:key=value,...], such as joint, anpd:order=4 or ctc=FOLDER; an unknown name lists all.
        served_name: Name of the model in requests; by default the base as it was given.
        template: Chat template: vicuna_v1.1, llama2_chat, or tokenizer for the tokenizer's own, whose thinking switch
            tokenizer:thinking=on or tokenizer:thinking=off sets.
    """
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        raise ValueError(f"drafters serve needs {' and '.join(missing)}: pip install 'ctc-drafters[serve]'")
    from data.conversation import resolve_template
    from inference.serve.app import Served, make_app
    from inference.serve.decoding import DecodingThread
    from inference.serve.metrics import Metrics
    from inference.serve.requests import TextLimits
    from inference.serve.server import GracefulServer

    requests.check()
    api_key = listen.read_key()
    with closing(listen.open()) as server_socket:
        base = model.load()
        if template != "tokenizer":
            resolve_template(template, base.tokenizer)
        thread = DecodingThread(base, drafter, requests.max_waiting, Metrics())
        served = Served(
            name=served_name or model.base,
            drafter=drafter_specs.label(drafter),
            limits=TextLimits(base, template, requests.max_tokens),
            timeout=requests.timeout,
            api_key=api_key,
            is_local=listen.is_local,
            host=listen.host,
        )
        host, port = server_socket.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        needs_key = ", which asks for the API key" if api_key else ""
        print(safe_line(f"{served.name} with {served.drafter}: {address}/v1, and a web page at {address}/{needs_key}"))
        sys.stdout.flush()
        for number in EXIT_CODES:  # uvicorn takes the signals while it runs, and raises them again when it has ended
            signal.signal(number, _exit_by)
        GracefulServer(make_app(served, thread), thread).run(sockets=[server_socket])


def _exit_by(number: int, _: object) -> None:
    sys.exit(EXIT_CODES[signal.Signals(number)])
