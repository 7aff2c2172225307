"""A small client of OpenAI-compatible servers: chats and continuations, whole or as a stream, with explained errors."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import openai

from data.files import validated
from data.safe_text import redacted, safe_line

KEY = "OPENAI_API_KEY"
TIMEOUT = 600.0  # seconds without data before a request is given up
BUSY = (408, 409, 429)


class ServerError(ValueError):
    """A request that a server did not answer, explained in one line.

    ``status`` is the HTTP status code, or 0 if there was no whole reply; ``reason`` names it in a few words.
    """

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status, self.reason = status, reason

    @property
    def concerns_every_request(self) -> bool:
        """Whether no request can succeed: the key, the model or the address is wrong, or nobody answers."""
        return self.status in (0, *BUSY, 401, 403, 404) or 300 <= self.status < 400


@dataclass(frozen=True)
class Completion:
    """What a server wrote; what it does not report is None or empty."""

    text: str = ""
    is_cut: bool = False  # off at the token limit
    num_read: int | None = None  # tokens of the prompt
    num_written: int | None = None  # tokens of the answer
    reasoning: str = ""  # before the answer, where it is reported apart from the text
    tokens: list[int] | None = None  # of the answer, its EOS token included


class Piece(NamedTuple):
    """An event of a streamed answer."""

    text: str
    token_ids: list[int]  # empty if the server does not report them
    finish_reason: str | None  # of the last piece: stop or length
    seconds: float  # since the request was sent


class OpenAIServer:
    """A model on an OpenAI-compatible server. May be used by many threads at once.

    Requests are those of OpenAI's API by name: one with ``messages`` is a chat, one with ``prompt`` a text, or its
    token ids, to continue. The key is read from OPENAI_API_KEY for every request, and never stored, printed or sent to
    another host.

    Args:
        url: Address such as http://localhost:8000, with or without /v1; ValueError if it is none or holds a password.
        model: Name under which the server offers the model; None until `find_model` has found one.
        max_retries: How often a request is repeated after a lost connection, a timeout or HTTP 408, 409, 429 or 5xx.
        uses_proxy: Whether proxies of the environment are used; not for a server of this process.
    """

    def __init__(self, url: str, model: str | None = None, max_retries: int = 0, uses_proxy: bool = True) -> None:
        self.root, self.model = server_root(url), model
        self.sends_token_ids = True  # an extension of vLLM; False once the server has refused to be asked for them
        self._client = openai.OpenAI(
            base_url=f"{self.root}/v1",
            api_key="unused",  # each request carries the key from the environment, or none
            max_retries=max_retries,
            timeout=TIMEOUT,
            # By default redirects are followed, which could send the key to another host.
            http_client=openai.DefaultHttpxClient(follow_redirects=False, trust_env=uses_proxy),
        )

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def get(self, route: str) -> str | None:
        """The reply to a route outside of the API, such as /metrics; None if there is none."""
        with suppress(openai.OpenAIError):
            return self._client.get(self.root + route, cast_to=str, options={"headers": authorization()})
        return None

    def find_model(self) -> int | None:
        """Take the first model that the server lists; return its context length, if it is reported, as by vLLM."""
        with self._explained():
            first = self._client.models.list(extra_headers=authorization()).data[0]
            self.model = validated(str, first.id)
            return validated(int | None, getattr(first, "max_model_len", None))

    def complete(self, extra: Mapping[str, Any] | None = None, **request: Any) -> Completion:
        """Answer a request; ``extra`` holds fields that OpenAI's API does not have. Raises `ServerError`."""
        with self._explained():
            reply = self._create(extra or {}, request)
            choice, usage = reply.choices[0], reply.usage
            message = getattr(choice, "message", None)  # None in a continuation
            reasoning = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
            text = choice.text if message is None else message.content
            return Completion(
                storable(text),
                choice.finish_reason == "length",
                validated(int | None, getattr(usage, "prompt_tokens", None)),
                validated(int | None, getattr(usage, "completion_tokens", None)),
                storable(reasoning),
                validated(list[int] | None, getattr(choice, "token_ids", None)),
            )

    def stream(self, extra: Mapping[str, Any] | None = None, **request: Any) -> Iterator[Piece]:
        """Answer a request, and yield the pieces as they arrive. Raises `ServerError`, also if the stream breaks off.

        The texts are as they came: the key may be in them, should the server echo it, over several pieces.
        """
        started, reason = time.perf_counter(), None
        with self._explained(), self._create(extra or {}, request | {"stream": True}) as events:
            for choice in (choice for event in events for choice in event.choices[:1]):
                text = (choice.delta.content if "messages" in request else choice.text) or ""
                token_ids = validated(list[int], getattr(choice, "token_ids", None) or [])
                reason = choice.finish_reason or reason
                yield Piece(text, token_ids, choice.finish_reason, time.perf_counter() - started)
        if reason is None:
            raise ServerError(f"{self.root} broke an answer off: its stream ended without a reason")

    def _create(self, extra: Mapping[str, Any], request: Mapping[str, Any]) -> Any:
        """Send a request that also asks for the token ids, or without them to a server that does not know them."""
        route: Any = self._client.chat.completions if "messages" in request else self._client.completions
        request = {"model": self.model, "extra_headers": authorization(), **request}
        if self.sends_token_ids:
            with suppress(openai.BadRequestError, openai.UnprocessableEntityError):
                return route.create(**request, extra_body={**extra, "return_token_ids": True})
        reply = route.create(**request, extra_body=extra)
        self.sends_token_ids = False
        return reply

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn every error of a request into a `ServerError`."""
        try:
            yield
        except ServerError:
            raise
        except (openai.APIStatusError, openai.APIConnectionError) as error:
            raise self._error_of(error) from None  # its text may quote the key
        except Exception as error:  # in the middle of a stream, or as the openai package checks nothing that it reads
            cause = redacted(safe_line(repr(error)))[:200]
            raise ServerError(f"{self.root} answers, but not as an OpenAI-compatible server does ({cause})") from None

    def _error_of(self, error: openai.APIStatusError | openai.APIConnectionError) -> ServerError:
        status = error.status_code if isinstance(error, openai.APIStatusError) else 0
        # The standard phrase of a status, and only the type of another cause: their texts may quote the key.
        phrase = HTTPStatus(status).phrase if status in HTTPStatus.__members__.values() else ""
        reason = f"HTTP {status} {phrase}".rstrip() if status else type(error.__cause__ or error).__name__
        num_tries = 1 + int(error.request.headers.get("x-stainless-retry-count", 0))
        tries = f", tried {num_tries} times" * (num_tries > 1)
        advice = f"refuses ({reason}): {redacted(safe_line(error))[:200]}"
        if status in (0, *BUSY):
            advice = f"does not answer ({reason}){tries}: check the address, or repeat the command to continue"
        elif status >= 500:
            advice = f"fails ({reason}){tries}"
        elif status in (401, 403):
            advice = f"refuses ({reason}): set the variable {KEY} to the server's key"
        elif status == 404:
            advice = f"refuses ({reason}): the address or the model {self.model!r} is wrong"
        elif status < 400:
            advice = f"refuses ({reason}): the server has moved: give its new address"
        return ServerError(f"{self.root} {advice}", status, f"{reason}{tries}")


def server_root(url: str) -> str:
    """The address of a server without the API's routes; raises ValueError if it is none, or contains a password."""
    if "@" in url:
        raise ValueError(f"the address of --server contains a password: put the key into the variable {KEY} instead")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        address = safe_line(url.partition("?")[0])  # a key may stand behind the question mark
        raise ValueError(f"--server must look like http://localhost:8000/v1, not {address!r}")
    return url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")


def authorization() -> Mapping[str, str | openai.Omit]:
    """The Authorization header with the key of the environment, or none.

    Raises `ServerError`, which does not quote the key, if a header cannot hold its characters.
    """
    key = os.environ.get(KEY)
    if key and not (key.isascii() and key.isprintable()):
        raise ServerError(f"the variable {KEY} contains a line break or another character that no HTTP header can hold")
    return {"Authorization": f"Bearer {key}" if key else openai.Omit()}


def storable(text: str | None) -> str:
    """A text without what no file may hold: the key, should the server echo it, and halves of surrogate pairs."""
    return redacted((text or "").encode("utf-8", "replace").decode())
