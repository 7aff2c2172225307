"""``drafters serve``: a web page that shows every step of decoding, and OpenAI's chat endpoint behind it."""

import os
import socket
from importlib.util import find_spec

from data.safe_text import safe_line
from inference.options import ModelOptions

KEY_VARIABLE = "DRAFTERS_API_KEY"
LOCAL_HOSTS = ["127.0.0.1", "localhost", "::1"]


def serve(
    model: ModelOptions,
    drafter: str = "joint",
    served_name: str | None = None,
    template: str = "tokenizer",
    max_tokens: int = 4096,
    host: str = "127.0.0.1",
    port: int = 8000,
) -> None:
    """Serve a base with a drafter: a web page that shows every step, and OpenAI's chat endpoint.

    Needs the extra `serve`: pip install 'ctc-drafters[serve]'. One answer is decoded at a time, and other requests wait
    in order. For many requests at once, see `drafters serve-command`. If the variable DRAFTERS_API_KEY is set, requests
    must carry its value as ``Authorization: Bearer KEY``.

    Args:
        drafter: NAME[=FILE][:key=value,...], such as joint, anpd:order=4 or ctc=FOLDER; an unknown name lists all.
        served_name: Name of the model in requests; by default the base as it was given.
        template: Chat template: vicuna_v1.1, llama2_chat, or tokenizer[:thinking=on|off] for the tokenizer's own.
        max_tokens: Maximum number of tokens of an answer, and the number for requests that name none.
        host: Address to listen on. By default only this machine reaches the server; others need an API key.
        port: Port to listen on; 0 takes a free one.
    """
    if not (find_spec("fastapi") and find_spec("uvicorn")):
        raise ValueError("drafters serve needs FastAPI and uvicorn: pip install 'ctc-drafters[serve]'")
    import uvicorn

    from data.templates import resolve_template
    from inference import drafter_specs
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
