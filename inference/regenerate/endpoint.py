"""Chat answers from an OpenAI-compatible server, through the ``openai`` client."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import openai

from data.files import validated
from inference.verifier.options import GREEDY, SamplingOptions

KEY = "OPENAI_API_KEY"
MAX_RETRIES = 5
TIMEOUT = 600.0  # seconds without data, and seconds for a whole reply, before a request is given up
MAX_REPLY_BYTES = 1 << 24
FRAMING = "content-encoding", "content-length", "transfer-encoding"  # headers of a body that is still on its way


class RequestRefused(Exception):
    """The server refuses this one request; other requests may succeed."""


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


class RequestFailed(RequestRefused):
    """The server failed at this request in every attempt."""


@dataclass(frozen=True)
class ChatAnswer:
    """An answer of the server.

    Args:
        text: Text of the answer.
        is_cut: Whether the answer was cut off at the token limit.
        num_read: Number of prompt tokens that the server reports, or None.
        num_written: Number of answer tokens that the server reports, or None.
        reasoning: Reasoning before the answer, if the server reports it apart from the text.
    """

    text: str
    is_cut: bool
    num_read: int | None
    num_written: int | None
    reasoning: str = ""


class Endpoint:
    """The route ``/v1/chat/completions`` of a server.

    The API key is read from the environment variable OPENAI_API_KEY for every request and never stored or printed.

    Args:
        url: Address of the server, with or without ``/v1``.
        model: Name under which the server offers the base.
        template_arguments: What the server's chat template is told besides the messages, such as enable_thinking.
        max_retries: How often a request is repeated after a lost connection, a timeout or HTTP 408, 409, 429 or 5xx;
            the client waits longer before each retry, or as long as the server asks for.

    Raises:
        ValueError: `url` is not the address of a server, or contains a password.
    """

    def __init__(
        self,
        url: str,
        model: str,
        template_arguments: Mapping[str, bool] | None = None,
        max_retries: int = MAX_RETRIES,
    ) -> None:
        stem = server_root(url)
        self.url, self.model = f"{stem}/v1/chat/completions", model
        self.template_arguments = dict(template_arguments or {})
        self._client = openai.OpenAI(
            base_url=f"{stem}/v1",
            api_key="unused",  # each request carries the key from the environment, or none
            max_retries=max_retries,
            timeout=TIMEOUT,
            # The client follows redirects by default, which could send the key to another host.
            http_client=BoundedClient(follow_redirects=False),
            default_headers={"Accept-Encoding": "identity"},
        )

    def chat(
        self, messages: Sequence[tuple[str, str]], max_new_tokens: int, sampling: SamplingOptions = GREEDY
    ) -> ChatAnswer:
        """Return the answer to (role, text) messages.

        Raises:
            RequestRefused: The server cannot answer this request; `RequestFailed` if the fault is the server's own.
            ValueError: No request can succeed: the key, the model name or the address is wrong, or nobody answers.
        """
        try:
            # The raw body, because the client does not check what it parses.
            response = self._client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=[{"role": role, "content": text} for role, text in messages],  # type: ignore[misc]
                temperature=sampling.temperature,
                max_tokens=max_new_tokens,
                extra_headers=_authorization(),
                extra_body=self._extra_body(sampling),
            )
        except openai.APIStatusError as error:
            raise self._explained(error.status_code, num_attempts(error)) from error
        except openai.APIConnectionError as error:
            # Only the type of the cause: its text may quote the request's headers, and with them the key.
            if isinstance(error.__cause__, UnboundedReply):
                raise RequestFailed(str(error.__cause__)) from error
            reason = type(error.__cause__ or error).__name__
            raise self._no_answer(reason, num_attempts(error)) from None
        except UnboundedReply as error:  # newer versions of the client raise it as it is
            raise RequestFailed(str(error)) from error
        try:
            return _parsed(response.content)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{self.url} answers, but not as an OpenAI-compatible server does ({error!r})") from error

    def _extra_body(self, sampling: SamplingOptions) -> dict[str, Any]:
        """The rest of the body; top_k and the arguments of the template are extensions of vLLM and others."""
        body: dict[str, Any] = {"top_p": sampling.top_p, "seed": sampling.seed} if sampling.temperature else {}
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if self.template_arguments:
            body["chat_template_kwargs"] = self.template_arguments
        return body

    def _explained(self, code: int, attempts: int) -> Exception:
        """The exception for an HTTP status that is not a success."""
        # The standard phrase of the status, not the server's: a server may echo the key there.
        phrase = HTTPStatus(code).phrase if code in HTTPStatus.__members__.values() else ""
        status = f"HTTP {code} {phrase}".rstrip()
        if mistake := self._mistake(code):
            return ValueError(f"{self.url} refuses ({status}): {mistake}")
        if code >= 500:
            return RequestFailed(f"{status}, {attempts} times")
        if code in (408, 409, 429):
            return self._no_answer(status, attempts)
        return RequestRefused(status)

    def _mistake(self, code: int) -> str | None:
        """What the user has to correct before any request can succeed."""
        if code in (401, 403):
            return f"set the variable {KEY} to the server's key"
        if code == 404:
            return f"the address or the model {self.model!r} is wrong"
        return "the server has moved: give its new address" if 300 <= code < 400 else None

    def _no_answer(self, reason: str, attempts: int) -> ValueError:
        return ValueError(
            f"{self.url} does not answer ({reason}), tried {attempts} times; repeat the command to continue"
        )


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


def num_attempts(error: openai.APIError) -> int:
    """Return how often the client sent a request before it raised the error.

    It gives up early if the server asks it to wait for more than two minutes.
    """
    return 1 + int(error.request.headers.get("x-stainless-retry-count", 0))


def _authorization() -> Mapping[str, str | openai.Omit]:
    """The Authorization header with the key of the environment, or none; raises ValueError as `read_key` does."""
    key = read_key(KEY)
    return {"Authorization": f"Bearer {key}" if key else openai.Omit()}


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


def _parsed(body: bytes) -> ChatAnswer:
    completion = json.loads(body)
    (choice, *_), usage = completion["choices"], completion.get("usage") or {}
    message = choice["message"]
    text, reasoning = message["content"] or "", message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(text, str) or not isinstance(reasoning, str):
        raise TypeError("the content or the reasoning is not a string")
    try:
        (text + reasoning).encode()
    except UnicodeEncodeError as error:
        raise RequestRefused("the answer holds half of a surrogate pair, which no file can hold") from error
    is_cut = choice.get("finish_reason") == "length"
    num_read, num_written = (validated(int | None, usage.get(f"{kind}_tokens")) for kind in ("prompt", "completion"))
    return ChatAnswer(text, is_cut, num_read, num_written, reasoning)
