"""The HTTP side of the server: routes, the API key, limits of requests, streams, and the web page."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from inference.serve.decoding import RETRY_AFTER_SECONDS, DecodingThread, Job, Outcome, Progress
from inference.serve.errors import RATE_LIMIT, SERVER, ApiError
from inference.serve.replies import Reply
from inference.serve.requests import (
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    TextLimits,
    read_request,
    texts_of,
)

MAX_BODY_BYTES = 1 << 20
BODY_SECONDS = 30.0  # in which the body of a request must have arrived
CLIENT_CLOSED_REQUEST = 499  # as nginx logs it; nobody reads this reply
PAGE = Path(__file__).with_name("page")
PAGE_FILES = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css")}
PAGE_FILES["/page.js"] = ("page.js", "text/javascript")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# Older versions of Starlette cut a host at its first colon, so "[" stands for all IPv6 addresses.
LOCAL_HOSTS = ["127.0.0.1", "localhost", "[", "[::1]"]


@dataclass(frozen=True)
class Served:
    """What the server offers.

    Args:
        name: Name of the model in requests and replies.
        drafter: Label of the drafter, for the web page.
        limits: The base, and what a request may ask of it.
        timeout: Seconds after which a request is given up, the time in the queue included.
        api_key: The key that requests must carry, or None.
        is_local: Whether only this machine can reach the server.
        host: Address at which the server listens.
    """

    name: str
    drafter: str
    limits: TextLimits
    timeout: float
    api_key: str | None
    is_local: bool
    host: str = "127.0.0.1"


def make_app(served: Served, thread: DecodingThread) -> FastAPI:
    """Build the application; it starts the decoding thread, and stops it at the end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        thread.start()
        yield
        await asyncio.to_thread(thread.stop)

    # No pages about the API: FastAPI's would load scripts from elsewhere.
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    api, needs_key = _Api(served, thread), [Depends(_key_checker(served.api_key))]
    options: dict[str, Any] = {"response_model": None, "dependencies": needs_key}
    app.add_api_route("/v1/chat/completions", api.chat, methods=["POST"], **options)
    app.add_api_route("/v1/completions", api.complete, methods=["POST"], **options)
    app.add_api_route("/v1/models", api.models, **options)
    app.add_api_route("/v1/models/{name:path}", api.model, **options)
    app.add_api_route("/metrics", api.metrics, **options)
    app.add_api_route("/health", api.health, response_model=None)
    for path, (file, kind) in PAGE_FILES.items():
        app.add_api_route(path, _page_file(file, kind), response_model=None)
    if served.is_local:  # a page from elsewhere must not reach the server under a host name of its own
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL_HOSTS, served.host], www_redirect=False)

    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> Response:
        return api.refusal(error)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        return api.refusal(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))

    @app.exception_handler(ClientDisconnect)
    async def ignore(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    return app


def _key_checker(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    def digest(header: str) -> bytes:  # of one length, so that the comparison takes the same time for every header
        return hashlib.sha256(header.encode("utf-8", "surrogateescape")).digest()

    expected = digest(f"Bearer {api_key}")

    async def check(request: Request) -> None:
        given = digest(request.headers.get("Authorization", ""))
        if api_key is not None and not hmac.compare_digest(given, expected):
            raise ApiError(
                401, "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
            )

    return check


def _page_file(file: str, kind: str) -> Callable[[], Awaitable[Response]]:
    content = (PAGE / file).read_bytes()

    async def page() -> Response:
        return Response(content, media_type=f"{kind}; charset=utf-8", headers=HEADERS)

    return page


class _Api:
    """The routes."""

    def __init__(self, served: Served, thread: DecodingThread) -> None:
        self._served, self._thread, self._metrics = served, thread, thread.metrics
        self._created = int(time.time())
        self._encoding = asyncio.Lock()  # one prompt is encoded at a time, beside the event loop

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, await self._read(request, ChatRequest))

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, await self._read(request, CompletionRequest))

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]}, headers=HEADERS)

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._model(), headers=HEADERS)

    def _model(self) -> dict[str, Any]:
        """The model; ``max_model_len`` is vLLM's field for the context length, ``drafter`` is our own."""
        model = {"id": self._served.name, "object": "model", "created": self._created, "owned_by": "drafters"}
        return model | {"max_model_len": self._served.limits.base.context_length, "drafter": self._served.drafter}

    def _check_model(self, name: str) -> None:
        if name != self._served.name:
            raise ApiError(
                404, f"there is no such model: {self._served.name} is served", param="model", code="model_not_found"
            )

    async def metrics(self) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(self) -> Response:
        if not self._thread.is_alive:
            return JSONResponse({"status": "the decoding thread has ended"}, status_code=503)
        return JSONResponse({"status": "ok"})

    def refusal(self, error: ApiError) -> Response:
        """The reply to a request that is refused."""
        self._metrics.refused.labels(str(error.status)).inc()
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if error.kind == RATE_LIMIT else {}
        return JSONResponse(error.body(), status_code=error.status, headers=HEADERS | headers)

    async def _read(self, request: Request, kind: type[AnyRequest]) -> AnyRequest:
        """Read and check the body of a request."""
        # A web page can send other types to any server without asking it first.
        if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "send the body as JSON, with the header 'Content-Type: application/json'")
        try:
            body = await asyncio.wait_for(_body(request), BODY_SECONDS)
            asked = read_request(kind, json.loads(body))
        except asyncio.TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} seconds") from error
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body cannot be read: {error}") from error
        self._check_model(asked.model)
        return asked

    async def _answer(self, request: Request, asked: ChatRequest | CompletionRequest) -> Response:
        async with self._encoding:
            texts = await asyncio.to_thread(texts_of, asked, self._served.limits)
        lengths = [len(text.prompt) for text in texts]
        is_chat = isinstance(asked, ChatRequest)
        has_logprobs = asked.num_logprobs is not None
        reply = Reply(asked.model, is_chat, lengths, asked.n, has_logprobs, asked.return_token_ids)
        pending = _PendingReply(request, self._thread, self._served.timeout)
        pending.submit(texts)
        progress = pending.progress()
        if not asked.stream:
            async for each in progress:
                reply.add(each.index, each.addition)
            return JSONResponse(reply.whole(), headers=HEADERS)
        first = await anext(progress)  # what fails before has the HTTP status of an error
        stream = _events(first, progress, reply, asked.stream_options.include_usage)
        return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)


async def _body(request: Request) -> bytes:
    """The body of a request, at most `MAX_BODY_BYTES`."""
    too_long = ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes: send a shorter one")
    length = request.headers.get("Content-Length", "0")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise too_long
    body = bytearray()
    async for block in request.stream():
        body += block
        if len(body) > MAX_BODY_BYTES:
            raise too_long
    return bytes(body)


async def _events(
    first: Progress, rest: AsyncGenerator[Progress, None], reply: Reply, includes_usage: bool
) -> AsyncIterator[str]:
    """A reply as server-sent events. An error after the first one is an event, too."""

    def event(value: dict[str, Any]) -> str:
        return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"

    async with aclosing(rest):
        for chunk in reply.add(first.index, first.addition):
            yield event(chunk)
        try:
            async for each in rest:
                for chunk in reply.add(each.index, each.addition):
                    yield event(chunk)
        except ApiError as error:
            yield event(error.body())
            return
        except ClientDisconnect:
            return
    if includes_usage:
        yield event(reply.usage_chunk())
    yield "data: [DONE]\n\n"


class _PendingReply:
    """A request that is in the hands of the decoding thread.

    Args:
        request: The HTTP request; when its client goes away, decoding stops at the end of the step.
        thread: The decoding thread.
        timeout: Seconds after which the request is given up.
    """

    def __init__(self, request: Request, thread: DecodingThread, timeout: float) -> None:
        self._request, self._thread, self._timeout = request, thread, timeout
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self._started = time.monotonic()

    def submit(self, texts: list[Any]) -> None:
        """Give the texts to the decoding thread; raises ApiError as `DecodingThread.submit` does."""
        loop = asyncio.get_running_loop()

        def report(outcome: Outcome) -> None:
            with suppress(RuntimeError):  # the loop has been closed, and nobody waits any more
                loop.call_soon_threadsafe(self._outcomes.put_nowait, outcome)

        self._job = Job(texts, report)
        self._thread.submit(self._job)
        # Not only in `progress`, which waits while a client does not read its stream.
        self._timer = loop.call_later(self._timeout, self._thread.cancel, self._job)

    async def progress(self) -> AsyncGenerator[Progress, None]:
        """Yield the progress of the texts.

        Raises:
            ApiError: The request has taken too long, or its decoding has failed.
            ClientDisconnect: The client has gone away.
        """
        metrics, outcome_name, is_first = self._thread.metrics, "aborted", True
        watcher = asyncio.create_task(self._watch())
        try:
            while True:
                remaining = self._started + self._timeout - time.monotonic()
                try:
                    outcome = await asyncio.wait_for(self._outcomes.get(), max(0.0, remaining))
                except asyncio.TimeoutError as error:
                    outcome_name = "timed_out"
                    message = f"the request took longer than {self._timeout:g} seconds: ask for fewer tokens"
                    raise ApiError(HTTPStatus.GATEWAY_TIMEOUT, message, SERVER, code="timeout") from error
                if isinstance(outcome, Progress):
                    if is_first:
                        metrics.first_token_seconds.observe(time.monotonic() - self._started)
                        is_first = False
                    yield outcome
                    continue
                if outcome is None:
                    outcome_name = "finished"
                    return
                if not isinstance(outcome, ClientDisconnect):
                    outcome_name = "failed"
                raise outcome
        finally:
            watcher.cancel()
            self._timer.cancel()
            self._thread.cancel(self._job)
            metrics.requests.labels(outcome_name).inc()
            metrics.request_seconds.observe(time.monotonic() - self._started)

    async def _watch(self) -> None:
        """Give the request up when its client closes the connection."""
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._thread.cancel(self._job)
        self._outcomes.put_nowait(ClientDisconnect())
