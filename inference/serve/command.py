"""``drafters serve``: a web page that shows every step of decoding, and OpenAI's chat endpoint behind it."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path

from data.files import reading, safe_line
from data.templates import resolve_template
from inference import drafter_specs
from inference.verifier.options import ModelOptions

PACKAGES = ("fastapi", "uvicorn")
KEY_VARIABLE = "DRAFTERS_API_KEY"
LOCAL_HOSTS = ["127.0.0.1", "localhost", "[::1]", "["]  # older Starlette cuts [::1] at its first colon
GRACE_SECONDS = 10  # in which answers may end after SIGTERM or Ctrl-C


def serve(
    model: ModelOptions,
    drafter: str = "joint",
    served_name: str | None = None,
    template: str = "tokenizer",
    max_tokens: int = 4096,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key_file: str | None = None,
) -> None:
    """Serve a base with a drafter: a web page that shows every step, and OpenAI's chat endpoint.

    Needs the extra `serve`: pip install 'ctc-drafters[serve]'. One answer is decoded at a time, and other requests wait
    in order. For many requests at once, see `drafters serve-command`.

    Args:
        model: The base.
        drafter: NAME[=FILE][:key=value,...], such as joint, anpd:order=4 or ctc=FOLDER; an unknown name lists all.
        served_name: Name of the model in requests; by default the base as it was given.
        template: Chat template: vicuna_v1.1, llama2_chat, or tokenizer[:thinking=on|off] for the tokenizer's own.
        max_tokens: Maximum number of tokens of an answer, and the number for requests that name none.
        host: Address to listen on. By default only this machine reaches the server; others need an API key.
        port: Port to listen on; 0 takes a free one.
        api_key_file: File with the key that requests carry as ``Authorization: Bearer KEY``; by default the variable
            DRAFTERS_API_KEY, and without it no key is needed.
    """
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        raise ValueError(f"drafters serve needs {' and '.join(missing)}: pip install 'ctc-drafters[serve]'")
    import uvicorn

    from inference.serve.app import Decoder, make_app

    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    key = read_key(host, api_key_file)
    with closing(listen(host, port)) as place:
        base = model.load()
        if template != "tokenizer":
            resolve_template(template, base.tokenizer)
        name, label = served_name or model.base, drafter_specs.label(drafter)
        decoder = Decoder(base, drafter, template, max_tokens)
        app = make_app(decoder, name, label, key, [*LOCAL_HOSTS, host] if is_local(host) else ["*"])
        host, port = place.getsockname()[:2]
        address, needs_key = f"http://{f'[{host}]' if ':' in host else host}:{port}", ", which asks for the API key"
        page = f"and a web page at {address}/{needs_key if key else ''}"
        print(safe_line(f"{name} with {label}: {address}/v1, {page}"), flush=True)
        config = uvicorn.Config(app, log_level="warning", server_header=False, timeout_graceful_shutdown=GRACE_SECONDS)
        uvicorn.Server(config).run(sockets=[place])


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server at this address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_key(host: str, file: str | None) -> str | None:
    """Return the API key, or None if requests need none.

    Raises:
        ValueError: The key is empty or not ASCII, or there is none although other machines reach the server.
    """
    key = os.environ.get(KEY_VARIABLE)
    if file is not None:
        with reading(file):
            key = Path(file).read_text(encoding="ascii", errors="replace")
    if key is None and not is_local(host):
        raise ValueError(f"other machines can reach {host}: give --api-key-file, or leave --host out")
    key = key and key.strip()
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise ValueError(f"{file or KEY_VARIABLE} must hold the API key and nothing else, in ASCII")
    return key


def listen(host: str, port: int) -> socket.socket:
    """Open the server's socket; raises ValueError if the address cannot be used."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen on {host} port {port} ({reason}): give another one") from error
