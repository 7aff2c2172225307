"""A base behind an OpenAI-compatible server: greedy chat answers over HTTP, with retries."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

KEY = "OPENAI_API_KEY"
RETRIES = 5
LONGEST_WAIT = 60.0  # seconds between two tries
TIMEOUT = 600.0  # seconds for one answer


class Refused(Exception):
    """The server refuses this one request; others may go well."""


class Failing(Refused):
    """The server fails at this request again and again."""


@dataclass(frozen=True)
class Said:
    """What the server answered.

    Args:
        text: The answer.
        is_cut: Whether the length cap ended it.
        num_read: Tokens of the prompt by the server's count, where it gives one.
        num_written: Tokens of the answer by the server's count, where it gives one.
    """

    text: str
    is_cut: bool
    num_read: int | None
    num_written: int | None


class Endpoint:
    """``/v1/chat/completions`` of a server. The key is read from the environment, OPENAI_API_KEY, and kept nowhere.

    Args:
        url: Of the server, with or without ``/v1``.
        model: The name the server gives the base.
        first_wait: Seconds before the second try; doubled before each further one.

    Raises:
        ValueError: The URL is not one of a server, or holds a password.
    """

    def __init__(self, url: str, model: str, first_wait: float = 1.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"endpoint must look like http://localhost:8000/v1, not {parts.scheme}://{parts.hostname}")
        if "@" in parts.netloc:
            raise ValueError(f"the endpoint's URL holds a password: put the key into the variable {KEY} instead")
        stem = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
        self.url, self.model, self.first_wait = f"{stem}/v1/chat/completions", model, first_wait
        self._open = build_opener(_NoRedirect).open  # a redirect would carry the key elsewhere

    def chat(self, messages: Sequence[tuple[str, str]], max_new_tokens: int) -> Said:
        """The greedy answer to (role, text) messages.

        Raises:
            Refused: This request cannot be answered; of `Failing`, by a fault of the server's.
            ValueError: None can: the key, the model or the address is wrong, or nobody answers.
        """
        asked = {
            "model": self.model,
            "messages": [{"role": role, "content": text} for role, text in messages],
            "temperature": 0,
            "max_tokens": max_new_tokens,
        }
        body = self._tried(lambda: self._post(json.dumps(asked).encode()))
        try:
            (choice, *_), usage = body["choices"], body.get("usage") or {}
            text = choice["message"]["content"] or ""
            if not isinstance(text, str):
                raise TypeError("its content is no text")
            is_cut = choice.get("finish_reason") == "length"
            return Said(text, is_cut, usage.get("prompt_tokens"), usage.get("completion_tokens"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{self.url} answers, but not as an OpenAI-compatible server does ({error!r})") from error

    def _post(self, data: bytes) -> dict:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        with self._open(Request(self.url, data, headers), timeout=TIMEOUT) as reply:
            return json.loads(reply.read())

    def _tried(self, post: Callable[[], dict]) -> dict:
        for number in range(RETRIES + 1):
            wait = min(self.first_wait * 2**number, LONGEST_WAIT)
            try:
                return post()
            except HTTPError as error:
                said = f"HTTP {error.code} {error.reason}"
                if mistake := self._mistake(error.code):
                    raise ValueError(f"{self.url} refuses ({said}): {mistake}") from error
                if error.code not in (408, 409, 429) and error.code < 500:
                    raise Refused(said) from error
                if number == RETRIES and error.code >= 500:
                    raise Failing(f"{said}, {RETRIES + 1} times") from error
                wait = _asked_to_wait(error.headers.get("Retry-After"), wait)
            except (URLError, HTTPException, OSError, ValueError) as error:  # no connection, cut short, or not JSON
                said = str(getattr(error, "reason", error)) or type(error).__name__
            if number < RETRIES:
                time.sleep(wait)
        raise ValueError(f"{self.url} does not answer ({said}), tried {RETRIES + 1} times; the same command goes on")

    def _mistake(self, code: int) -> str | None:
        """What the user must mend before any request can go well."""
        if code in (401, 403):
            return f"set the variable {KEY} to its key"
        if code == 404:
            return f"the address or the model {self.model!r} is wrong"
        return "it has moved: give its new address" if 300 <= code < 400 else None


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *given) -> None:
        """Follow none: it becomes an HTTPError."""


def _asked_to_wait(header: str | None, otherwise: float) -> float:
    return min(float(header), LONGEST_WAIT) if header and header.isdigit() else otherwise
