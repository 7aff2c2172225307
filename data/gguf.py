"""Bases in GGUF, llama.cpp's format of a whole model in one file, as transformers loads them."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

# Vocabularies of which each digit is a word for itself (llama.cpp, src/llama-vocab.cpp); transformers does not say so.
DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


class Content(NamedTuple):
    """What a file holds, to compare with what transformers reads of it."""

    num_tokens: int
    num_weights: int
    scaling: str  # of positions, by llama.cpp's name
    split: str  # how a text is split into words, by llama.cpp's name


def is_gguf(name: str | Path) -> bool:
    """Return whether a base is a GGUF file."""
    return str(name).lower().endswith(".gguf") and Path(name).is_file()


def check_gguf(path: Path) -> Content:
    """Read what a file holds; raise ValueError if it is not whole, or a package is missing that reads it."""
    if missing := [package for package in ("gguf", "accelerate") if find_spec(package) is None]:
        raise ValueError(f"a base in GGUF needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: copy or download it again, or give the folder of a base")
    return _content(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)  # seconds for a large vocabulary
def _content(path: Path, modified: int) -> Content:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        texts = {name: bytes(field.parts[-1]).decode(errors="replace") for name, field in reader.fields.items()}
        num_tokens = len(reader.fields["tokenizer.ggml.tokens"].data)
        scaling = texts.get(f"{texts['general.architecture']}.rope.scaling.type", "none")
        num_weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
        return Content(num_tokens, num_weights, scaling, texts.get("tokenizer.ggml.pre", ""))
    except Exception as error:  # the errors of numpy where a file ends too early
        raise ValueError(f"{path} is damaged, cut off or has no tokenizer: copy or download it again") from error


def load_gguf(load: Callable[..., Any], auto_class: Any, path: Path, **options: Any) -> Any:
    """Load a model with dequantised weights, a configuration or a tokenizer from a GGUF file.

    ``load`` is `data.tokenizer.load_pretrained`, called for an empty folder: in the file's own, transformers would read
    a tokenizer and a chat template beside it. Raises ValueError if it leaves out weights or the scaling of positions.
    """
    import transformers
    from tokenizers import Tokenizer

    content, is_model = check_gguf(path), auto_class is transformers.AutoModelForCausalLM
    if "quantization_config" in options:
        raise ValueError("a GGUF file is loaded in float32, bfloat16 or float16")
    if is_model and hasattr(transformers, "GgufConfig"):  # versions without it always dequantise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if auto_class is transformers.AutoTokenizer:  # it would read the whole file once more
        auto_class = transformers.PreTrainedTokenizerFast
    progress = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    with TemporaryDirectory() as empty, progress:
        loaded = load(auto_class, empty, gguf_file=str(path.resolve()), **options)
    loaded.name_or_path = str(path)
    if auto_class is transformers.PreTrainedTokenizerFast:
        # Without the end of text of GPT-2, which transformers adds to a vocabulary that lacks it, and with `DIGITS`.
        saved = json.loads(loaded.backend_tokenizer.to_str())
        saved["added_tokens"] = [token for token in saved["added_tokens"] if token["id"] < content.num_tokens]
        if content.split in DIGITS and (after := saved["pre_tokenizer"])["type"] == "ByteLevel":
            digits = {"type": "Digits", "individual_digits": True}
            saved["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, after]}
        loaded._tokenizer = Tokenizer.from_str(json.dumps(saved))
        return loaded
    config = loaded.config if is_model else loaded
    config.name_or_path = str(path)
    for name, value in [(name, value) for name, value in vars(config).items() if type(value) is float]:
        setattr(config, name, float(str(np.float32(value))))  # 1e-05, where float32 has 9.999999747378752e-06
    if is_model:
        rope = getattr(config, "rope_parameters", None) or {}
        if content.scaling != "none" and rope.get("rope_type", "default") == "default":
            raise ValueError(f"transformers leaves out how its positions are scaled ({content.scaling})")
        if (found := sum(weight.numel() for weight in loaded.parameters())) != content.num_weights:
            # Llama 3 keeps the scaling of its positions in weights, rope_freqs; a part of a split model has fewer.
            raise ValueError(f"it holds {content.num_weights:,} weights, but its model in transformers {found:,}")
    return loaded
