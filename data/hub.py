"""Finds bases and drafters on the disk and on the Hugging Face hub.

Without a network, the hub's libraries repeat each of their requests for about half a minute, so one request asks first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

TIMEOUT = 10  # seconds
PINNED = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)@(?P<revision>[\w.-]+)")
COMMIT = re.compile("[0-9a-f]{40}")


def shipped_folder(name: str) -> Path:
    """Return the folder ``configs`` or ``checkpoints``: inside this package (see setup.py) or next to it."""
    package = Path(__file__).resolve().parent
    return package / name if (package / name).is_dir() else package.parent / name


def find_base(name: str) -> str:
    """Return where a base or a drafter is loaded from: `name`, or what ships under it if there is no such folder."""
    path = Path(name)
    if path.parts[:1] == ("checkpoints",) and not path.exists():
        shipped = shipped_folder("checkpoints").joinpath(*path.parts[1:])
        if (shipped / "config.json").is_file():
            return str(shipped)
    return name


def split_revision(name: str) -> tuple[str, str | None]:
    """Split ``OWNER/NAME@REVISION`` of the hub; a folder, or a name without a revision, stays as it is."""
    match = PINNED.fullmatch(name)
    return (name, None) if match is None or Path(name).exists() else (match["repository"], match["revision"])


def join_revision(name: str, revision: str | None) -> str:
    """Return ``OWNER/NAME@REVISION``, the inverse of `split_revision`; a folder has no revisions and stays as it is."""
    return f"{name}@{revision}" if revision and not Path(name).exists() else name


def find_folder(name: str | Path, files: Sequence[str]) -> Path:
    """Return a local folder, or the local copy of files of ``OWNER/NAME@REVISION``, a repository of the hub.

    A folder is found as by `find_base`. What was downloaded stays in the hub's cache; a commit that is there is not
    asked for again. Raises ValueError if the hub cannot be reached, or has no such repository or revision.
    """
    repository, revision = split_revision(str(name))
    if revision is None:
        return Path(find_base(str(name)))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    options: dict[str, Any] = {"revision": revision, "allow_patterns": list(files), "etag_timeout": TIMEOUT}
    if COMMIT.fullmatch(revision):
        with suppress(LocalEntryNotFoundError):
            folder = Path(snapshot_download(repository, local_files_only=True, **options))
            if all((folder / file).is_file() for file in files):
                return folder
    try:
        if error := connection_error(repository, files[0]):
            raise error
        return Path(snapshot_download(repository, **options))
    except Exception as error:  # the hub client's own errors, and those of its HTTP client
        reason = getattr(error, "server_message", None) or " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"cannot download {name} ({reason}): check the name and the revision, go online, log in with "
            "`hf auth login` if the repository is private, or give a folder"
        ) from error


def connection_error(repository: str, file: str, repo_type: str | None = None) -> Exception | None:
    """Ask the hub for one file of a repository, OWNER/NAME; return why it gave no answer, or None if it gave any."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(repository, file, repo_type=repo_type), timeout=TIMEOUT)
    except HfHubHTTPError:
        return None
    except Exception as error:  # the errors of httpx, or that the hub was switched off
        return error
    return None


@contextmanager
def cached_if_unreachable(repository: str, file: str, repo_type: str | None = None) -> Iterator[None]:
    """Let the hub's libraries read from the local cache alone if the hub gives no answer about a repository's file."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if connection_error(repository, file, repo_type):
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def load_pretrained(auto_class: Any, name: str, **options: Any) -> Any:
    """Load what a class of transformers reads, without running code that its folder contains.

    Every call of `from_pretrained` goes through here: where `trust_remote_code` is left out, transformers asks on
    standard input whether to run the code, and whatever is piped into the command answers. For what they cannot load,
    transformers, the hub client and safetensors raise errors of many types. The name is a folder or a hub id, also with
    ``@REVISION`` (a commit, tag or branch), as `find_base` reads it.
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
