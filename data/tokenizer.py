"""Loads the tokenizer of a base and identifies its vocabulary by a hash."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.hub import connection_error, split_revision
from data.shipped import find_base

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_pretrained(auto_class: Any, name: str, **options: Any) -> Any:
    """Load a model, a configuration or a tokenizer with transformers, without running code that its folder contains.

    Every call of `from_pretrained` goes through here: where `trust_remote_code` is left out, transformers asks on
    standard input whether to run the code, and whatever is piped into the command answers.

    Args:
        auto_class: A class of transformers, such as `AutoConfig`.
        name: Folder or hub id, also with ``@REVISION`` (a commit, tag or branch); ``checkpoints/tiny-chat`` is also
            found where the package is installed.
        options: Further arguments of `from_pretrained`.

    Raises:
        ValueError: It cannot be used without code of its own.
        Exception: transformers, the hub client and safetensors raise errors of many types for what they cannot load.
    """
    source, revision = split_revision(find_base(name))
    options |= {"revision": revision} if revision else {}
    try:
        return auto_class.from_pretrained(source, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            "it can only be used with the code in its folder (auto_map), which is never run: "
            "give a model of a type that transformers itself contains"
        ) from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a base.

    Args:
        name: Folder or hub id of the base; ``checkpoints/tiny-chat`` is also found where the package is installed.

    Raises:
        ValueError: No tokenizer can be loaded from there; the message says what is missing.
    """
    from transformers import AutoTokenizer

    source = find_base(name)
    _require_folder_or_hub_id(source)
    try:
        return load_pretrained(AutoTokenizer, name)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and others for the same mistakes
        if not Path(source).is_dir():
            raise ValueError(
                f"no base {name} from the hub ({first_line(error)}): check the name, go online, or give a folder"
            ) from error
        raise ValueError(
            f"cannot load the tokenizer of {name} ({first_line(error)}): tokenizer.json must be next to config.json"
        ) from error


def _require_folder_or_hub_id(name: str) -> None:
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / "tokenizer.json").is_file():
            raise ValueError(f"{name} is a folder without config.json: pass a folder saved by save_pretrained")
    elif path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ValueError(
            f"no base at {name}: pass a folder with config.json and model.safetensors, or a hub id (owner/name)"
        )
    elif path.parent.is_dir():
        raise ValueError(f"no base at {name}: {path.parent} is a folder here, but it holds no {path.name}")
    elif os.environ.get("HF_HUB_OFFLINE") == "1":
        from huggingface_hub import try_to_load_from_cache

        repository, revision = split_revision(name)
        if not isinstance(try_to_load_from_cache(repository, "config.json", revision=revision), str):
            raise ValueError(
                f"{name} is not in the local hub cache and HF_HUB_OFFLINE=1: pass a folder, or go online once"
            )
    else:
        _require_reachable(name)


def _require_reachable(name: str) -> None:
    """Raise ValueError if a hub id is neither in the local cache nor the hub can be reached."""
    from huggingface_hub import try_to_load_from_cache

    repository, revision = split_revision(name)
    files = "config.json", "tokenizer_config.json"
    if any(isinstance(try_to_load_from_cache(repository, file, revision=revision), str) for file in files):
        return
    if error := connection_error(repository, files[0]):
        raise ValueError(
            f"no base {name} from the hub ({first_line(error)}): check the name, go online, or give a folder"
        ) from error


def first_line(error: Exception) -> str:
    """Return the first line of an error message; libraries often add pages to it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a short hash of the vocabulary, equal for tokenizers that assign the same id to every token."""
    return _vocabulary_hash(tokenizer, len(tokenizer))


# Called once per conversation. The size tells one state of a vocabulary from another, since tokens are only ever added.
@lru_cache(maxsize=8)
def _vocabulary_hash(tokenizer: PreTrainedTokenizerBase, size: int) -> str:
    return short_hash("\n".join(f"{index} {token}" for token, index in _by_index(tokenizer)))


def _by_index(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, int]]:
    return sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])


def short_hash(text: str) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
