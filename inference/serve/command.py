"""``drafters serve``: a web page that shows every step of decoding, and OpenAI's chat endpoint behind it."""

import os
import socket
from importlib.util import find_spec

from data.safe_text import safe_line
from data.templates import resolve_template
from inference import drafter_specs
from inference.options import ModelOptions

KEY_VARIABLE = "DRAFTERS_API_KEY"
LOCAL_HOSTS = ["127.0.0.1", "localhost", "::1"]


def serve(
    model: ModelOptions, drafter: str, served_name: str | None, template: str, max_tokens: int, host: str, port: int
) -> None:
    """Run `drafters serve`, see `inference.commands.serve`."""
    if not (find_spec("fastapi") and find_spec("uvicorn")):
        raise ValueError("drafters serve needs FastAPI and uvicorn: pip install 'ctc-drafters[serve]'")
    import uvicorn

    from inference.serve.app import SERVER, Decoder, make_app

    if max_tokens < 1 or not 0 <= port < 1 << 16:
        raise ValueError(f"need max_tokens >= 1 and a port below 65536, not {max_tokens} and {port}")
    key, is_local = os.environ.get(KEY_VARIABLE, "").strip(), host in LOCAL_HOSTS
    if not (key or is_local):
        raise ValueError(f"other machines can reach {host}: set {KEY_VARIABLE} to an API key, or leave --host out")
    hosts = [*LOCAL_HOSTS, "[::1]", "["] if is_local else ["*"]  # older Starlette cuts [::1] at its first colon
    with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as place:
        base = model.load()
        if template != "tokenizer":
            resolve_template(template, base.tokenizer)
        name, label = served_name or model.base, drafter_specs.label(drafter)
        decoder = Decoder(base, drafter, template, max_tokens)
        app = make_app(decoder, name, label, key, hosts)
        host, port = place.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(safe_line(f"{name} with {label}: {address}/v1, and a web page at {address}/"), flush=True)
        uvicorn.Server(uvicorn.Config(app, **SERVER)).run(sockets=[place])
