"""Bases in GGUF, llama.cpp's format of a whole model in one file: its header, and loading it with transformers."""

from __future__ import annotations

import io
import json
import struct
import sys
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The types of values in a header; those of numbers as the module struct writes them.
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
ANSWER = "\ue000"  # stands for an answer in a rendered chat template


@dataclass(frozen=True)
class Header:
    """What a GGUF file says of its model."""

    values: dict[str, Any]  # by their names in the file, such as general.architecture
    num_weights: int  # numbers in all tensors


def is_gguf(name: str | Path) -> bool:
    """Return whether a base is a GGUF file."""
    return str(name).lower().endswith(".gguf") and Path(name).is_file()


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

    Raises ValueError if the file is not whole, or transformers lacks a package to load it.
    """
    if missing := [package for package in ("gguf", "accelerate") if find_spec(package) is None]:
        raise ValueError(f"a base in GGUF needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    from gguf import GGML_QUANT_SIZES

    damaged = ValueError(f"{path} is damaged or cut off: copy or download it again")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: copy or download it again, or give the folder of a base")
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            try:
                values, tensors, size = *_read(content), len(content)
            except (struct.error, LookupError, ValueError, OverflowError, MemoryError, RecursionError) as error:
                raise damaged from error
    if unknown := {kind for kind, _, _ in tensors}.difference(GGML_QUANT_SIZES):
        raise ValueError(f"{path} has weights of type {min(unknown)}, which gguf does not know: pip install -U gguf")
    for kind, num_weights, start in tensors:
        block, num_bytes = GGML_QUANT_SIZES[kind]
        if start + num_weights // block * num_bytes > size:
            raise damaged
    return Header(values, sum(num_weights for _, num_weights, _ in tensors))


def _read(content: mmap) -> tuple[dict[str, Any], list[tuple[int, int, int]]]:
    """The values of a header, and of each tensor the type, the number of weights and the first byte."""

    def number(code: str) -> Any:
        return struct.unpack(f"<{code}", content.read(struct.calcsize(f"<{code}")))[0]

    def string() -> str:
        return content.read(number("Q")).decode()

    def value(kind: int) -> Any:
        if kind == ARRAY:
            kind, count = number("I"), number("Q")
            return [value(kind) for _ in range(count)]
        return string() if kind == STRING else number(NUMBERS[kind])

    content.seek(8)  # behind the version
    num_tensors, num_values = number("Q"), number("Q")
    values, tensors = {string(): value(number("I")) for _ in range(num_values)}, []
    for _ in range(num_tensors):
        string()  # its name
        num_weights = prod(number("Q") for _ in range(number("I")))
        tensors.append((number("I"), num_weights, number("Q")))
    alignment = values.get("general.alignment", 32)
    data = -(-content.tell() // alignment) * alignment
    return values, [(kind, num_weights, data + offset) for kind, num_weights, offset in tensors]


def load_gguf(auto_class: Any, path: Path, **options: Any) -> Any:
    """Load a model with dequantised weights, a configuration or a tokenizer from a GGUF file with transformers.

    Raises ValueError if transformers would leave out weights or the scaling of positions, and errors of its own.
    """
    import transformers
    from tokenizers import Tokenizer

    if "quantization_config" in options:
        raise ValueError("a GGUF file is loaded in float32, bfloat16 or float16")
    is_model, is_tokenizer = (
        auto_class is kind for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    )
    if is_model and hasattr(transformers, "GgufConfig"):  # versions without it always dequantise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if is_tokenizer:  # AutoTokenizer would read the file once more, with the slow reader of gguf
        auto_class = transformers.PreTrainedTokenizerFast
    header, progress = read_header(path), nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    # In the file's own folder, transformers would read a tokenizer and a chat template beside it.
    with TemporaryDirectory() as empty, progress:
        loaded = auto_class.from_pretrained(empty, gguf_file=str(path.resolve()), trust_remote_code=False, **options)
    loaded.name_or_path = str(path)
    if is_tokenizer:  # without the end of text of GPT-2, which transformers adds to a vocabulary that lacks it
        content = json.loads(loaded.backend_tokenizer.to_str())
        num_tokens = len(header.values["tokenizer.ggml.tokens"])
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < num_tokens]
        loaded._tokenizer = Tokenizer.from_str(json.dumps(content))
    if is_model:
        loaded.config.name_or_path = str(path)
        found = sum(weight.numel() for weight in loaded.parameters())
        scaling = header.values.get(f"{header.values['general.architecture']}.rope.scaling.type", "none")
        rope = (getattr(loaded.config, "rope_parameters", None) or {}).get("rope_type", "default")
        if found != header.num_weights or (scaling != "none" and rope == "default"):
            raise ValueError(
                f"it has {header.num_weights:,} weights and positions with scaling {scaling!r}, but transformers reads "
                f"{found:,} and {rope!r}: give the folder of the base, not a part of it or a file with more"
            )
    return loaded


def end_tokens(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end an answer: those that a file names, and the special one in its template after one."""
    values = read_header(path).values
    names = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    found = {values[name] for name in names if name in values}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    with suppress(Exception):  # there may be no template, or one that refuses these messages
        after = str(tokenizer.apply_chat_template(messages, tokenize=False)).rpartition(ANSWER)[2].lstrip()
        first = tokenizer(after, add_special_tokens=False).input_ids[0]
        found |= {first} if tokenizer.added_tokens_decoder[first].special else set()
    return sorted(found)
