"""Tokenizers of bases."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from data.files import cause_of, short_hash
from data.gguf import check_gguf, is_gguf, load_gguf_tokenizer
from data.hub import cached_if_unreachable, find_base, load_pretrained, split_revision

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a base: a folder, a GGUF file or a hub id, also with ``@REVISION``.

    Raises ValueError if there is none.
    """
    from transformers import AutoTokenizer

    source = find_base(name)
    path = Path(source)
    is_hub_id = source.count("/") == 1 and not source.startswith((".", "/", "~")) and not path.parent.is_dir()
    if path.is_dir() and not any((path / file).is_file() for file in ("config.json", "tokenizer.json")):
        if (path / "adapter_config.json").is_file():
            remedy = "save the tokenizer of its base there, or pass a folder with the base and the adapter merged"
            raise ValueError(f"{path} holds an adapter without a tokenizer: {remedy}")
        raise ValueError(f"{path} is a folder without config.json: pass a folder saved by save_pretrained")
    if is_gguf(source):
        check_gguf(path)  # its errors say what is wrong with the file, and are not put into another sentence
    elif not path.is_dir() and (path.exists() or not is_hub_id):
        raise ValueError(
            f"no base at {name}: pass a folder with config.json and model.safetensors, or a hub id (owner/name), or a "
            "file that ends in .gguf"
        )
    try:
        with cached_if_unreachable(split_revision(name)[0], "config.json") if is_hub_id else nullcontext():
            return load_gguf_tokenizer(path) if is_gguf(source) else load_pretrained(AutoTokenizer, name)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and others for the same mistakes
        place = f"no base {name} from the hub" if is_hub_id else f"cannot load the tokenizer of {name}"
        remedy = "check the name, go online, or give a folder" if is_hub_id else "give a folder with tokenizer.json"
        raise ValueError(f"{place} ({cause_of(error)}): {remedy}") from error


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a short hash of the vocabulary, equal for tokenizers that assign the same id to every token."""
    return _vocabulary_hash(tokenizer, len(tokenizer))


# Called once per conversation. The size tells one state of a vocabulary from another, since tokens are only ever added.
@lru_cache(maxsize=8)
def _vocabulary_hash(tokenizer: PreTrainedTokenizerBase, size: int) -> str:
    by_index = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    return short_hash("\n".join(f"{index} {token}" for token, index in by_index))
