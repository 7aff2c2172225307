"""GGUF, llama.cpp's format of a whole model in one file: what a file holds, and its tokenizer."""

from __future__ import annotations

import io
import json
import sys
from contextlib import nullcontext, redirect_stderr
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from data.files import reading
from data.hub import load_pretrained

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedTokenizerBase

# Vocabularies of which each digit is a word for itself (llama.cpp, src/llama-vocab.cpp); transformers does not say so.
DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}

DRAFTER_FILE, BASE_NAME = "model.gguf", "general.base_model.0.name"
"""The file in the folder of a drafter for llama.cpp, and its field that names the base."""


class Content(NamedTuple):
    """What a file holds, to compare with what transformers reads of it."""

    num_tokens: int
    num_weights: int
    scaling: str  # of positions, by llama.cpp's name
    split: str  # how a text is split into words, by llama.cpp's name


def is_gguf(name: str | Path) -> bool:
    """Return whether a base is a GGUF file."""
    return str(name).lower().endswith(".gguf") and Path(name).is_file()


def check_installed(*packages: str) -> None:
    """Raise ValueError if one of the packages that GGUF needs is missing."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise ValueError(f"GGUF needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def read_gguf(path: Path) -> GGUFReader:
    """Open a file, whose fields and tensors are read when they are asked for; ValueError if it is damaged."""
    check_installed("gguf")
    from gguf import GGUFReader

    with reading(path, "copy or download it again"):
        return GGUFReader(path)


def check_gguf(path: Path) -> Content:
    """Read what a file holds; raise ValueError if it is not whole, or a package is missing that reads it."""
    check_installed("gguf", "accelerate")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: copy or download it again, or give the folder of a base")
    return _content(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)  # seconds for a large vocabulary
def _content(path: Path, modified: int) -> Content:
    try:
        reader = read_gguf(path)
        texts = {name: bytes(field.parts[-1]).decode(errors="replace") for name, field in reader.fields.items()}
        num_tokens = len(reader.fields["tokenizer.ggml.tokens"].data)
        scaling = texts.get(f"{texts['general.architecture']}.rope.scaling.type", "none")
        num_weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
        return Content(num_tokens, num_weights, scaling, texts.get("tokenizer.ggml.pre", ""))
    except Exception as error:  # the errors of numpy where a file ends too early
        raise ValueError(f"{path} is damaged, cut off or has no tokenizer: copy or download it again") from error


def short_number(value: Any) -> Any:
    """Return a number that GGUF keeps in float32 as it was written: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def load_gguf(auto_class: Any, path: Path, **options: Any) -> Any:
    """Load what a class of transformers reads in a GGUF file: a tokenizer, a configuration or a model."""
    # From an empty folder: in the file's own, transformers would read a tokenizer and a chat template beside it.
    progress = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    with TemporaryDirectory() as empty, progress:
        loaded = load_pretrained(auto_class, empty, gguf_file=str(path.resolve()), **options)
    loaded.name_or_path = str(path)
    return loaded


def load_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a GGUF file, with `DIGITS`, and without the end of text that transformers adds to it."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    content = check_gguf(path)
    tokenizer = load_gguf(PreTrainedTokenizerFast, path)  # the automatic class would read the whole file once more
    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["id"] < content.num_tokens]
    if content.split in DIGITS and (after := saved["pre_tokenizer"])["type"] == "ByteLevel":
        digits = {"type": "Digits", "individual_digits": True}
        saved["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, after]}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(saved))
    return tokenizer
