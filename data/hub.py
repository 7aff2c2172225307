"""Whether the Hugging Face hub can be reached, found out by a single request.

Without a network, the hub's libraries repeat each of their requests for about half a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

TIMEOUT = 10  # seconds


def connection_error(repository: str, file: str, repo_type: str | None = None) -> Exception | None:
    """Ask the hub for one file of a repository; return why it gave no answer, or None if it gave any.

    Args:
        repository: Id of the repository, as OWNER/NAME.
        file: Name of the file.
        repo_type: "dataset", or None for a model.
    """
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
def cached_if_unreachable(repository: str) -> Iterator[None]:
    """Let `datasets` read a data set from the local cache alone if the hub gives no answer."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if connection_error(repository, "README.md", "dataset"):
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
