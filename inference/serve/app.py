"""The HTTP side of the server, and the decoder behind it, which writes one answer at a time."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from openai.types import CompletionUsage, ErrorObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import ChatCompletionContentPartTextParam as TextPart
from openai.types.chat import ChatCompletionStreamOptionsParam as StreamOptions
from openai.types.completion_usage import CompletionTokensDetails
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from data.files import print_traceback
from drafters.protocol import NoDrafter
from inference import drafter_specs
from inference.generation import IncrementalDetokenizer
from inference.prompts import encode_messages
from inference.verifier.base import Base
from inference.verifier.options import SamplingOptions
from inference.verifier.runner import Runner
from inference.verifier.session import Session, check_prompt

MAX_BODY_BYTES = 1 << 20
MAX_WAITING = 64  # requests that wait while another one is decoded
WARM_UP_TOKENS = 4  # the first steps of a process are slow
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"Cache-Control": "no-store", "Content-Security-Policy": CONTENT_POLICY, "X-Content-Type-Options": "nosniff"}
LABELS = {"user", "safety_identifier", "prompt_cache_key", "metadata", "service_tier"}  # say nothing about the text
NEUTRAL = {"n": 1, "frequency_penalty": 0, "presence_penalty": 0, "logprobs": False, "tools": [], "logit_bias": {}}
ERROR_KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}
StopString = Annotated[str, Field(min_length=1, max_length=256)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def leave_out(cls, fields: Any) -> Any:
        """Leave out fields that are null, say nothing about the text, or ask for nothing."""
        if not isinstance(fields, dict):
            return fields
        fields = {name: value for name, value in fields.items() if value is not None and name not in LABELS}
        return {name: value for name, value in fields.items() if name not in NEUTRAL or value != NEUTRAL[name]}


class Message(_Fields):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def as_pair(self) -> tuple[str, str]:
        """The role, which is ``system`` for a developer's message, and the text."""
        text = self.content if isinstance(self.content, str) else "".join(part["text"] for part in self.content)
        return "system" if self.role == "developer" else self.role, text


class ChatRequest(_Fields):
    """The fields of OpenAI's request that are served; ``use_drafter`` and ``include_steps`` are our own."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=0)] = Field(default_factory=lambda: secrets.randbits(32))
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] = []
    stream: bool = False
    stream_options: StreamOptions = {}
    chat_template_kwargs: dict[Literal["enable_thinking"], bool] = {}
    use_drafter: bool = True
    include_steps: bool = False


class Piece(NamedTuple):
    """What one step adds to an answer. The end of a step's text may come with a later step."""

    text: str
    finish_reason: Literal["stop", "length"] | None
    step: dict[str, Any]  # for the web page


class Decoder:
    """Decodes answers one after the other, in a thread of its own.

    Every answer starts with an empty cache and a drafter that remembers nothing, so that no request can change or see
    anything of another one.

    Args:
        base: The base.
        drafter, template, max_tokens: As in `serve`.

    Raises:
        ValueError: The drafter is unknown or does not fit the base, or the base cannot read draft trees.
    """

    def __init__(self, base: Base, drafter: str, template: str, max_tokens: int) -> None:
        self.base, self.template, self.max_tokens, self.runner = base, template, max_tokens, Runner(base)
        self.drafter = drafter_specs.make(drafter, self.runner)
        self.num_requests = 0  # those that wait, and the one that is decoded
        self._thread, warm_up = ThreadPoolExecutor(1, "decoding"), Session(self.runner, self.drafter).run
        self._thread.submit(warm_up, [min(base.eos, default=0)], WARM_UP_TOKENS).result()

    def num_new_tokens(self, asked: ChatRequest) -> int:
        """The maximum number of tokens that a request asks for."""
        return asked.max_completion_tokens or asked.max_tokens or self.max_tokens

    def encode(self, asked: ChatRequest) -> list[int]:
        """Return the prompt of a request; raises ValueError if the messages or the limits do not fit the base."""
        if asked.messages[-1].role != "user":
            raise ValueError("messages: the last message must be the user's")
        if self.num_new_tokens(asked) > self.max_tokens:
            raise ValueError(f"max_tokens must be at most {self.max_tokens} on this server")
        template = self.template
        for is_on in asked.chat_template_kwargs.values():
            template = f"{template.partition(':')[0]}:thinking={'on' if is_on else 'off'}"
        prompt = encode_messages(self.base, [message.as_pair() for message in asked.messages], template)
        check_prompt(self.base, prompt, self.num_new_tokens(asked))
        return prompt

    async def answer(self, asked: ChatRequest, prompt: list[int]) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of an answer. Closing the generator ends decoding after the running step."""
        # A queue, so that a client that reads slowly delays no other one.
        pieces, is_closed, loop = asyncio.Queue[Any](), threading.Event(), asyncio.get_running_loop()

        def decode() -> None:
            end: Exception | None = None
            try:
                for piece in self.steps(asked, prompt):
                    loop.call_soon_threadsafe(pieces.put_nowait, piece)
                    if is_closed.is_set():
                        return
            except Exception as error:
                print_traceback(type(error), error, error.__traceback__)
                end = error
            loop.call_soon_threadsafe(pieces.put_nowait, end)

        self.num_requests += 1
        job = self._thread.submit(decode)
        try:
            while isinstance(piece := await pieces.get(), Piece):
                yield piece
            if piece:
                raise HTTPException(500, "decoding failed, and the server's log says why") from piece
        finally:
            is_closed.set()
            job.cancel()
            self.num_requests -= 1

    def steps(self, asked: ChatRequest, prompt: list[int]) -> Iterator[Piece]:
        """Decode an answer step by step, until it ends or contains a stop string."""
        self.drafter.reset()
        sampling = SamplingOptions(asked.temperature, asked.top_k, asked.top_p, asked.seed)
        if not sampling.temperature:  # top-p and top-k keep the most probable token
            sampling = SamplingOptions()
        session = Session(self.runner, self.drafter if asked.use_drafter else NoDrafter(), sampling.sampler())
        end = session.end_of(prompt, self.num_new_tokens(asked))
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        num_held = max(map(len, stops), default=1) - 1  # characters that may be the beginning of a stop string
        detokenizer, text, num_shown = IncrementalDetokenizer(self.base.tokenizer), "", 0
        for emitted, cost in session.decode(prompt, self.num_new_tokens(asked), self.base.eos):
            is_eos, is_cut = emitted[-1] in self.base.eos, len(session.seq) >= end
            text += detokenizer.add(emitted[: cost.accepted])
            num_drafted_characters = len(text) - num_shown
            text += detokenizer.add(emitted[cost.accepted :]) + (detokenizer.finish() if is_eos or is_cut else "")
            stop = find_stop(text, stops)
            is_last = is_eos or is_cut or stop is not None
            num_final = max(num_shown, len(text) - (0 if is_last else num_held)) if stop is None else stop
            step: dict[str, Any] = {
                "num_accepted_characters": min(num_drafted_characters, num_final - num_shown),
                "num_tokens": len(emitted),
                "num_accepted": cost.accepted,
                "num_rejected": cost.fed_candidates - cost.accepted,
                "num_fed": cost.fed,
                "seconds": sum(cost.seconds),
            }
            if asked.include_steps:
                tree, path = session.last.tree, session.last.path
                step |= {"parents": list(tree.parents), "num_scratch": tree.num_scratch, "path": path}
                step["tokens"] = [token_text(self.base.tokenizer, token) for token in tree.tokens]
            reason: Literal["stop", "length"] = "stop" if is_eos or stop is not None else "length"
            yield Piece(text[num_shown:num_final], reason if is_last else None, step)
            if is_last:
                return
            num_shown = num_final


def find_stop(text: str, stops: list[str]) -> int | None:
    """Where a text ends: before the stop string that is complete first, the longest of several; None without one."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    return sum(min(ends)) if ends else None


def token_text(tokenizer: Any, token: int) -> str:
    """The text of a token, with the space before it, which tokenizers drop where a text begins."""
    before = list(tokenizer("a", add_special_tokens=False).input_ids)[-1:]
    alone, behind = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (before, [*before, token]))
    return behind[len(alone) :]


def make_app(decoder: Decoder, name: str, drafter: str, api_key: str | None, hosts: list[str]) -> FastAPI:
    """Build the application.

    Args:
        decoder: Writes the answers.
        name: Name of the model.
        drafter: Name of the drafter, for the web page.
        api_key: The key that requests must carry, or None.
        hosts: Host names by which the server may be called: no page from elsewhere reaches it under its own name.
    """
    # No pages about the API: FastAPI's would load scripts from elsewhere.
    app, created = FastAPI(docs_url=None, redoc_url=None, openapi_url=None), int(time.time())

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        key, length = request.headers.get("Authorization", ""), request.headers.get("Content-Length", "")
        num_bytes = int(length) if length.isdecimal() else inf if request.method == "POST" else 0
        is_allowed = not api_key or hmac.compare_digest(key.encode(), f"Bearer {api_key}".encode())
        if num_bytes > MAX_BODY_BYTES:
            response = refusal(413, f"the body has more than {MAX_BODY_BYTES} bytes: send a shorter one")
        elif request.url.path.startswith("/v1") and not is_allowed:
            response = refusal(401, "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'")
        else:
            response = await answer(request)
        response.headers.update(HEADERS)
        return response

    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)

    @app.exception_handler(AnyHTTPException)
    async def refuse(_: Request, error: AnyHTTPException) -> Response:
        return refusal(error.status_code, error.detail)

    @app.exception_handler(RequestValidationError)
    async def explain(_: Request, error: RequestValidationError) -> Response:
        first = max(error.errors(), key=lambda each: len(each["loc"]))  # a field of several types has one for each
        place = [str(part) for part in first["loc"][1:] if isinstance(part, int) or part.isidentifier()]
        message = "not supported: leave it out" if first["type"] == "extra_forbidden" else first["msg"]
        return refusal(400, f"{'.'.join(place) or 'the body'}: {message}")

    @app.get("/v1/models", response_model=None)
    async def models() -> dict[str, Any]:
        model = Model(id=name, object="model", created=created, owned_by="drafters").model_dump()
        more = {"max_model_len": decoder.base.context_length, "drafter": drafter}  # vLLM's field, and one of our own
        return {"object": "list", "data": [model | more]}

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: ChatRequest, request: Request) -> Response | dict[str, Any]:
        if asked.model != name:
            raise HTTPException(404, f"there is no such model: {name} is served")
        if decoder.num_requests > MAX_WAITING:
            raise HTTPException(429, f"{MAX_WAITING} requests are waiting, which is the maximum: try again later")
        try:
            prompt = await asyncio.to_thread(decoder.encode, asked)
        except ValueError as error:
            raise HTTPException(400, " ".join(str(error).split())) from error
        head = {"id": f"chatcmpl-{secrets.token_hex(16)}", "created": int(time.time()), "model": name}
        pieces = decoder.answer(asked, prompt)
        if asked.stream:
            first = await anext(pieces)  # what fails before has the HTTP status of an error
            events = stream(first, pieces, asked, head, len(prompt))
            return StreamingResponse(events, media_type="text/event-stream")
        written = []
        async with aclosing(pieces):
            async for piece in pieces:
                written.append(piece)
                if await request.is_disconnected():
                    return Response(status_code=499)  # as nginx logs it; nobody reads this reply
        message = {"role": "assistant", "content": "".join(piece.text for piece in written)}
        choice = {"index": 0, "message": message, "finish_reason": written[-1].finish_reason}
        whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage(written, len(prompt))}
        return ChatCompletion.model_validate(whole).model_dump(exclude_unset=True)

    app.mount("/", StaticFiles(directory=Path(__file__).with_name("page"), html=True))
    return app


async def stream(
    first: Piece, rest: AsyncGenerator[Piece, None], asked: ChatRequest, head: dict[str, Any], num_read: int
) -> AsyncIterator[str]:
    """An answer as server-sent events. An error after the first one is an event, too."""

    def event(*choices: dict[str, Any], **more: Any) -> str:
        chunk = {**head, "object": "chat.completion.chunk", "choices": [{"index": 0, **each} for each in choices]}
        return f"data: {ChatCompletionChunk.model_validate(chunk | more).model_dump_json(exclude_unset=True)}\n\n"

    def delta(piece: Piece, **role: str) -> str:
        steps = {"steps": [piece.step]} if asked.include_steps else {}
        return event({"delta": {**role, "content": piece.text}, "finish_reason": None, **steps})

    written = [first]
    async with aclosing(rest):
        yield delta(first, role="assistant")
        try:
            async for piece in rest:
                written.append(piece)
                yield delta(piece)
        except HTTPException as error:
            yield f"data: {bytes(refusal(500, error.detail).body).decode()}\n\n"
            return
    yield event({"delta": {}, "finish_reason": written[-1].finish_reason})
    if asked.stream_options.get("include_usage"):
        yield event(usage=usage(written, num_read))
    yield "data: [DONE]\n\n"


def usage(pieces: list[Piece], num_read: int) -> CompletionUsage:
    """What an answer cost, with the numbers of draft tokens that were accepted and rejected."""
    total = {name: sum(piece.step[f"num_{name}"] for piece in pieces) for name in ("tokens", "accepted", "rejected")}
    details = CompletionTokensDetails(
        accepted_prediction_tokens=total["accepted"], rejected_prediction_tokens=total["rejected"]
    )
    counts = {"completion_tokens": total["tokens"], "total_tokens": num_read + total["tokens"]}
    return CompletionUsage(prompt_tokens=num_read, **counts, completion_tokens_details=details)


def refusal(status: int, message: str) -> Response:
    """An error in the form of OpenAI's API."""
    error = ErrorObject(message=message, type=ERROR_KINDS.get(status, "invalid_request_error"), param=None, code=None)
    return JSONResponse({"error": error.model_dump()}, status)
