"""``drafters serve-command --engine llama.cpp``: the line that starts llama.cpp's server with a drafter."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.files import reading
from data.gguf import BASE_NAME, DRAFTER_FILE, is_gguf, read_gguf
from data.safe_text import safe_line
from drafters.checks import check_at_least
from inference.vllm.command import DEFAULT_CHAIN

if TYPE_CHECKING:
    from gguf import GGUFReader


def server_line(base: str | None, drafter: str, num_tokens: int | None, port: int) -> str:
    """The line for a shell; see `inference.commands.serve_command`.

    Raises ValueError if the drafter is not in llama.cpp's format, or was trained for another base.
    """
    check_at_least(1, num_tokens=1 if num_tokens is None else num_tokens)
    path = Path(drafter) / DRAFTER_FILE if Path(drafter).is_dir() else Path(drafter)
    if not is_gguf(path):
        raise ValueError(f"{drafter} is no drafter for llama.cpp: pass what `drafters export --format gguf` wrote")
    content = read_gguf(path)
    named = _field(content, BASE_NAME)
    if not is_gguf(served := base or str(named)):
        raise ValueError(f"llama.cpp serves GGUF files: pass that of the base {safe_line(named)} with --base")
    with reading(path, "export the drafter again"):
        method, longest = _method(content)
    for what in ("embedding_length", "tokenizer.ggml.tokens"):
        if _field(content, what) != _field(read_gguf(Path(served)), what):
            raise ValueError(f"{drafter} was trained for a base with another {what} than {served}")
    chain = ["--spec-type", f"draft-{method}", "--spec-draft-n-max", str(min(num_tokens or longest, longest))]
    # The counters of /metrics are what `drafters eval --server` reads.
    return shlex.join(
        ["llama-server", "-m", served, "-md", str(path), *chain, "-fa", "on", "--metrics", "--port", str(port)]
    )


def _method(content: GGUFReader) -> tuple[str, int]:
    """llama.cpp's name of the method, and the length of its longest draft, or of a usual one."""
    if _field(content, "general.architecture") == "eagle3":
        return "eagle3", DEFAULT_CHAIN
    num_frames = content.fields["dflash.block_size"].contents()
    if not any(tensor.name == "markov_w1.weight" for tensor in content.tensors):
        return "dflash", num_frames - 1
    return "dspark", num_frames - (_field(content, "dflash.sample_from_anchor") is False)


def _field(content: GGUFReader, name: str) -> Any:
    """A field by its name, or by its name behind that of the architecture; None if there is none."""
    architecture = content.fields.get("general.architecture")
    field = content.fields.get(name) or (architecture and content.fields.get(f"{architecture.contents()}.{name}"))
    return field and field.contents()
