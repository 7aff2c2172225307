"""A client of an OpenAI-compatible server: its model, its metrics, and completions with the time of each event."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import openai

from data.files import MALFORMED, MIN_SECRET_LENGTH, safe_line, validated
from inference.evaluation.served.metrics import read_counts
from inference.results.served_figures import SpeculationCounts

OWN_SERVER = "drafters"  # who owns the model of `drafters serve`
REFUSALS = (400, 422)  # of a field that a server does not know
MAX_TOKEN_ID = 1 << 31
SETTLING_SECONDS = 0.1  # between two readings of counters, which engines update after the last event
MAX_READINGS = 20
HIDDEN = "[the API key]"

KEY = "OPENAI_API_KEY"
TIMEOUT = 600.0  # seconds without data, and seconds for a whole reply, before a request is given up
MAX_REPLY_BYTES = 1 << 24
FRAMING = "content-encoding", "content-length", "transfer-encoding"  # headers of a body that is still on its way


class UnboundedReply(Exception):
    """A reply is larger than `MAX_REPLY_BYTES`, or takes longer than `TIMEOUT`."""


class BoundedClient(openai.DefaultHttpxClient):
    """An HTTP client that reads replies within bounds, and does not decompress them: it never asks for that."""

    def send(self, request: Any, **options: Any) -> Any:
        """Send a request and return the reply with its whole body."""
        response = super().send(request, **options | {"stream": True})
        body, deadline = bytearray(), time.monotonic() + TIMEOUT
        try:
            for block in response.iter_raw():
                body += block
                if len(body) > MAX_REPLY_BYTES or time.monotonic() > deadline:
                    raise UnboundedReply(f"a reply of more than {MAX_REPLY_BYTES >> 20} MiB or {TIMEOUT:g} seconds")
        finally:
            response.close()
        headers = {name: value for name, value in response.headers.items() if name not in FRAMING}
        return type(response)(response.status_code, headers=headers, content=bytes(body), request=request)


def server_root(url: str) -> str:
    """Return the address of a server without ``/v1`` and what follows it.

    Raises:
        ValueError: It is not the address of a server, or contains a password.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"endpoint must look like http://localhost:8000/v1, not {parts.scheme}://{parts.hostname}")
    if "@" in parts.netloc:
        raise ValueError(f"the endpoint's URL contains a password: put the key into the variable {KEY} instead")
    return url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")


def read_key(variable: str) -> str | None:
    """Return the API key in an environment variable, or None if it is not set.

    Raises:
        ValueError: The key contains characters that a header cannot hold; the message does not quote it.
    """
    key = os.environ.get(variable)
    if key and not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"the variable {variable} contains a line break or another character that no HTTP header can hold"
        )
    return key or None


class ServerError(ValueError):
    """A server does not answer, or not as expected; the message is one line.

    Args:
        message: What is wrong.
        status: The HTTP status of the reply, if there was one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ServedModel:
    """The model of a server.

    Args:
        name: Its name in requests.
        context_length: Maximum number of tokens of a prompt and its continuation, if the server says so.
        owner: Who owns it, by the server.
        drafter: Label of the drafter, which only `drafters serve` tells.
    """

    name: str
    context_length: int | None
    owner: str
    drafter: str | None = None


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt.

    Args:
        text: The text.
        token_ids: Its tokens; None if the server does not send them.
        ended: Whether it ended by itself, and not at the length cap.
        arrivals: Seconds from the request to each event with tokens, and their number, 0 if the server does not say.
        seconds: Seconds from the request to the end of the stream.
    """

    text: str
    token_ids: list[int] | None
    ended: bool
    arrivals: list[tuple[float, int]]
    seconds: float


class ServerClient:
    """An OpenAI-compatible server. May be used by many threads at once.

    Args:
        url: Its address, with or without ``/v1``.
        api_key_env: Environment variable that holds the API key; None sends no key.
        uses_proxy: Whether the proxies of the environment are used.

    Raises:
        ValueError: The address is none, or the variable holds no key.
    """

    def __init__(self, url: str, api_key_env: str | None = None, uses_proxy: bool = True) -> None:
        self.root, self._key = server_root(url), None
        headers = {"Accept-Encoding": "identity"}
        if api_key_env is not None:
            self._key = read_key(api_key_env)
            if self._key is None:
                raise ValueError(f"the variable {api_key_env} is not set: put the server's API key into it")
            headers["Authorization"] = f"Bearer {self._key}"
        # Redirects are not followed: they could send the key to another host.
        options: dict[str, Any] = {"headers": headers, "timeout": TIMEOUT, "trust_env": uses_proxy}
        self._streams = openai.DefaultHttpxClient(follow_redirects=False, **options)
        self._replies = BoundedClient(follow_redirects=False, **options)

    def close(self) -> None:
        """Close all connections; a thread that waits for a reply is not woken."""
        self._streams.close()
        self._replies.close()

    def is_healthy(self) -> bool:
        """Whether the route ``/health`` says that the server is ready."""
        try:
            return bool(self._replies.get(f"{self.root}/health").status_code == HTTPStatus.OK)
        except Exception:  # the errors of httpx, whose package depends on the version of openai
            return False

    def model(self) -> ServedModel:
        """Return the first model that the server lists.

        Raises:
            ServerError: It lists none, or it does not answer.
        """
        body = self._get("/v1/models")
        try:
            entry = json.loads(body)["data"][0]
            length = validated(int | None, entry.get("max_model_len"))
            drafter = validated(str | None, entry.get("drafter"))
            name, owner = validated(str, entry["id"]), str(entry.get("owned_by", ""))
            return ServedModel(name, length, self.without_key(owner), drafter and self.without_key(drafter))
        except MALFORMED as error:
            raise ServerError(f"{self.root}/v1/models is not as in OpenAI's API: is the address right?") from error

    def counts(self) -> SpeculationCounts | None:
        """Return what the route ``/metrics`` counts of speculation, once it stands still; None if it has no such thing.

        Engines add to their counters after they have sent the last event of a text.
        """
        counts = None
        for _ in range(MAX_READINGS):
            before = counts
            try:
                counts = read_counts(self._get("/metrics").decode("utf-8", "replace"))
            except ServerError:
                return None
            if counts is None or counts == before:
                break
            time.sleep(SETTLING_SECONDS)
        return counts

    def complete(self, model: str, prompt: Sequence[int], max_tokens: int, extra: Mapping[str, Any]) -> Completion:
        """Continue a prompt greedily, as a stream.

        Args:
            model: Name of the model.
            prompt: Token ids.
            max_tokens: Maximum number of new tokens.
            extra: Further fields of the request.

        Raises:
            ServerError: The server refuses, breaks off, or sends something else than a stream of completions.
        """
        body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True}
        text, has_ids, has_sent_ids = "", True, False
        token_ids: list[int] = []
        arrivals: list[tuple[float, int]] = []
        reason: str | None = None
        started = now = time.perf_counter()
        try:
            with self._streams.stream("POST", f"{self.root}/v1/completions", json={**body, **extra}) as response:
                if response.status_code != HTTPStatus.OK:
                    raise self._refusal("/v1/completions", response.status_code, _beginning(response))
                for now, event in _events(response.iter_raw()):
                    if event.get("error"):
                        raise ServerError(f"{self.root} broke an answer off: {self._message(event)}")
                    for choice in validated(list[dict[str, Any]], event.get("choices") or [])[:1]:
                        piece, ids = choice.get("text") or "", choice.get("token_ids")
                        text, reason = text + piece, choice.get("finish_reason") or reason
                        has_ids = has_ids and (ids is not None or not piece)
                        has_sent_ids = has_sent_ids or ids is not None
                        token_ids += validated(list[int], ids or [])
                        if ids or piece:
                            arrivals.append((now - started, len(ids or [])))
        except ServerError:
            raise
        except MALFORMED as error:
            raise ServerError(f"{self.root} answers, but not as an OpenAI-compatible server does") from error
        except Exception as error:  # the errors of httpx; their texts may quote the request's headers, and so the key
            raise ServerError(f"{self.root} does not answer ({type(error).__name__}): is the server running?") from None
        if reason is None:
            raise ServerError(f"{self.root} broke an answer off: its stream ended without a reason")
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < MAX_TOKEN_ID:
            raise ServerError(f"{self.root} sends token ids that no vocabulary has")
        if not (has_ids := has_ids and has_sent_ids):
            arrivals = [(seconds, 0) for seconds, _ in arrivals]
        ended = reason == "stop"
        return Completion(self.without_key(text), token_ids if has_ids else None, ended, arrivals, now - started)

    def _get(self, route: str) -> bytes:
        try:
            response = self._replies.get(self.root + route)
        except Exception as error:  # as in `complete`
            raise ServerError(f"{self.root} does not answer ({type(error).__name__}): is the server running?") from None
        if response.status_code != HTTPStatus.OK:
            raise self._refusal(route, response.status_code, response.content)
        return bytes(response.content)

    def _refusal(self, route: str, status: int, body: bytes) -> ServerError:
        phrase = HTTPStatus(status).phrase if status in HTTPStatus.__members__.values() else ""
        hint = "pass --api-key-env with the variable that holds the server's key" if status in (401, 403) else ""
        try:
            hint = hint or self._message(json.loads(body))
        except MALFORMED:
            hint = hint or "is it an OpenAI-compatible server?"
        return ServerError(f"{self.root}{route} refuses (HTTP {status} {phrase}): {hint}", status)

    def _message(self, body: Any) -> str:
        """The message of an error without the key, which a server may echo."""
        error = body.get("error", body)
        message = str(error.get("message", error) if isinstance(error, dict) else error)
        return safe_line(message.replace(self._key, HIDDEN) if self._key else message)[:200]

    def without_key(self, text: str) -> str:
        """Replace the API key, which a server may echo; a value too short for a secret would be found in any text."""
        return text.replace(self._key, HIDDEN) if self._key and len(self._key) >= MIN_SECRET_LENGTH else text


def _beginning(response: Any) -> bytes:
    """The first block of a reply, which is enough for the message of an error."""
    return next(iter(response.iter_raw()), b"")


def _events(blocks: Iterator[bytes]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield each server-sent event as JSON, with the time at which it arrived.

    The body is read to its end, behind the last event too: only then is its connection used for the next request.
    """
    rest, size, is_done = b"", 0, False
    for block in blocks:
        now, size = time.perf_counter(), size + len(block)
        if size > MAX_REPLY_BYTES:
            raise ServerError(f"the server sends more than {MAX_REPLY_BYTES >> 20} MiB for one answer")
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if is_done or not line.startswith(b"data:"):
                continue
            if is_done := (data := line[5:].strip()) == b"[DONE]":
                continue
            yield now, validated(dict[str, Any], json.loads(data))
