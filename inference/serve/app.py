"""The HTTP side of the server, and the decoder behind it, which writes one answer at a time."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException as RoutingError
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from data.conversations import parse_chat
from data.files import validated
from data.safe_text import safe_line
from drafters.protocol import NoDrafter
from inference import drafter_specs
from inference.arguments import LOWEST_TEMPERATURE
from inference.generation import IncrementalDetokenizer
from inference.options import SamplingOptions
from inference.prompts import encode_messages
from inference.verifier.base import Base
from inference.verifier.graphed import make_runner
from inference.verifier.sampling import Greedy, Sampler
from inference.verifier.session import Session, check_prompt

WARM_UP_TOKENS = 4  # the first steps of a process are slow
MAX_BODY_BYTES = 4 << 20  # of a request: about a million tokens
HEAD_SECONDS, BODY_SECONDS = 10.0, 30.0  # in which the head of a request must arrive, and its body
StepReport = dict[str, Any]  # what a step adds to an answer, and its figures for the web page
LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # say nothing about the text
# With these values fields that are not served ask for nothing; any other such field with false, 0 or what is empty.
NEUTRAL: dict[str, tuple[Any, ...]] = dict.fromkeys(["repetition_penalty", "length_penalty", "best_of"], (1,))
NEUTRAL |= {"response_format": ({"type": "text"},), "modalities": (["text"],), "parallel_tool_calls": (True, False)}
NEUTRAL |= {"service_tier": ("auto", "default"), "function_call": ("auto", "none"), "skip_special_tokens": (True,)}


class ChatRequest(BaseModel):
    """The fields of OpenAI's request that are served; ``use_drafter`` and ``include_steps`` are our own."""

    model_config = ConfigDict(strict=True)
    model: str
    messages: Annotated[list[Any], Field(min_length=1)]
    tools: list[Any] = []
    tool_choice: Literal["auto", "none"] = "auto"  # no answer is read for calls
    max_tokens: int | None = Field(None, gt=0)
    stop: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=4)] = []
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = Field(None, ge=0)
    n: Literal[1] = 1
    stream: bool = False
    stream_options: dict[str, Any] = {}
    use_drafter: bool = True
    include_steps: bool = False

    @model_validator(mode="before")
    @classmethod
    def read(cls, body: Any) -> Any:
        """Let null stand for a field's default, and a text for a list of one stop string; refuse what is not served."""
        fields = {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else {}
        if "max_tokens" not in fields:
            fields["max_tokens"] = fields.pop("max_completion_tokens", None)
        others = [name for name in fields if name not in cls.model_fields and name not in LABELS]
        if refused := [name for name in others if fields[name] not in NEUTRAL.get(name, (0, "", [], {}))]:
            raise ValueError(f"{', '.join(refused[:9])} not supported: leave it out")
        return fields | {"stop": [fields["stop"]]} if isinstance(fields.get("stop"), str) else fields

    def sampler(self) -> Sampler:
        """Raises ValueError if an option is out of range."""
        is_greedy = 0 <= self.temperature < LOWEST_TEMPERATURE  # top-p and top-k keep the most probable token
        seed = secrets.randbits(32) if self.seed is None else self.seed
        top_k = 0 if self.top_k == -1 else self.top_k  # all tokens, as vLLM's clients write it
        sampler = SamplingOptions(1.0 if is_greedy else self.temperature, top_k, self.top_p, seed).sampler()
        return Greedy() if is_greedy else sampler


class Decoder:
    """Decodes answers one after the other, in a thread of its own.

    Every answer starts with an empty cache and a drafter that remembers nothing, so that no request can change or see
    anything of another one. The arguments are those of `serve`.
    """

    def __init__(self, base: Base, drafter: str, template: str, max_tokens: int) -> None:
        self.base, self.template, self.max_tokens, self.runner = base, template, max_tokens, make_runner(base)
        self.drafter = drafter_specs.make(drafter, self.runner)
        self._thread, warm_up = ThreadPoolExecutor(1, "decoding"), Session(self.runner, self.drafter).run
        self._thread.submit(warm_up, [min(base.eos, default=0)], WARM_UP_TOKENS).result()

    def encode(self, request: ChatRequest) -> list[int]:
        """Return the prompt of a request; raises ValueError if the messages or the options do not fit."""
        request.sampler()
        if (num_new_tokens := request.max_tokens or self.max_tokens) > self.max_tokens:
            raise ValueError(f"max_tokens must be at most {self.max_tokens} on this server")
        messages, tools = parse_chat(request.messages, request.tools if request.tool_choice != "none" else [])
        prompt = encode_messages(self.base, messages, self.template, tools)
        if tools and prompt == encode_messages(self.base, messages, self.template):
            raise ValueError("the chat template of this base ignores tools: leave them out")
        check_prompt(self.base, prompt, num_new_tokens)
        return prompt

    async def answer(self, request: ChatRequest, prompt: list[int]) -> AsyncGenerator[StepReport, None]:
        """Yield the steps of an answer. Closing the generator ends decoding after the running step."""
        # A queue, so that a client that reads slowly delays no other one.
        steps, is_closed, loop = asyncio.Queue[Any](), threading.Event(), asyncio.get_running_loop()

        def decode() -> None:
            for step in self.steps(request, prompt):
                loop.call_soon_threadsafe(steps.put_nowait, step)
                if is_closed.is_set():
                    return

        job = loop.run_in_executor(self._thread, decode)
        job.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            while step := await steps.get():
                yield step
            await job  # raises what decoding has raised
        finally:
            is_closed.set()
            job.cancel()

    def steps(self, request: ChatRequest, prompt: list[int]) -> Iterator[StepReport]:
        """Decode an answer step by step."""
        self.drafter.reset()
        session = Session(self.runner, self.drafter if request.use_drafter else NoDrafter(), request.sampler())
        num_new_tokens, eos = request.max_tokens or self.max_tokens, self.base.eos
        answer, end = AnswerText(self.base.tokenizer, request.stop), session.end_of(prompt, num_new_tokens)
        for emitted, cost in session.decode(prompt, num_new_tokens, eos):
            text, drafted, is_last = "", "", emitted[-1] in eos or len(session.seq) >= end
            for count, token in enumerate(emitted, 1):
                text += answer.add(token, is_last and count == len(emitted))
                drafted = text if count <= cost.accepted else drafted
                if answer.is_stopped:
                    break
            step: StepReport = {
                "text": text,
                "finish_reason": "stop" if answer.is_stopped or token in eos else "length" if is_last else None,
                "num_accepted_characters": len(drafted),
                "num_tokens": count,
                "num_accepted": (num_accepted := min(cost.accepted, count)),
                "num_rejected": cost.fed_candidates - num_accepted,
                "num_fed": cost.fed,
                "seconds": sum(cost.seconds),
            }
            if request.include_steps:
                tree, path = session.last.tree, session.last.path[:count]
                step |= {"parents": list(tree.parents), "num_scratch": tree.num_scratch, "path": path}
                step["tokens"] = [token_text(self.base.tokenizer, token) for token in tree.tokens]
            yield step
            if answer.is_stopped:
                return


class AnswerText:
    """The text of an answer up to the stop string that is complete first; what may begin one is held back."""

    def __init__(self, tokenizer: Any, stops: list[str]) -> None:
        self.stops, self.is_stopped, self._held = list(filter(None, stops)), False, ""
        self._detokenizer = IncrementalDetokenizer(tokenizer)

    def add(self, token: int, is_last: bool) -> str:
        """Add a token, and return the text that has become final."""
        text = self._held + self._detokenizer.add([token], is_last)
        complete = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        begun = (size for stop in self.stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        end = min(complete)[1] if complete else len(text) - (0 if is_last else max(begun, default=0))
        self.is_stopped, self._held = bool(complete), text[end:]
        return text[:end]


def token_text(tokenizer: Any, token: int) -> str:
    """The text of a token, with the space before it, which tokenizers drop where a text begins."""
    before = list(tokenizer("a", add_special_tokens=False).input_ids)[-1:]
    alone, behind = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (before, [*before, token]))
    return behind[len(alone) :]


def make_app(decoder: Decoder, name: str, drafter: str, api_key: str, hosts: list[str]) -> FastAPI:
    """Build the application, which may be called by these host names: no page from elsewhere reaches it by its own."""

    def check_key(request: Request) -> None:
        key = request.headers.get("Authorization", "").encode()
        if api_key and not hmac.compare_digest(key, f"Bearer {api_key}".encode()):
            raise HTTPException(401, "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'")

    # No pages about the API: FastAPI's would load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(check_key)])
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    reading = asyncio.Lock()  # the tokens of a long prompt take up to a gigabyte

    @app.exception_handler(RoutingError)
    async def refuse(_: Request, error: RoutingError) -> Response:
        served = "" if isinstance(error, HTTPException) else ": see GET /v1/models and POST /v1/chat/completions"
        return refusal(error.status_code, f"{error.detail}{served}")

    @app.get("/v1/models", response_model=None)
    async def models() -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": 0, "owned_by": "drafters", "drafter": drafter}
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(connection: Request) -> Response | dict[str, Any]:
        try:
            body = await asyncio.wait_for(read_body(connection), BODY_SECONDS)
            async with reading:
                request = await asyncio.to_thread(validated, ChatRequest, body)
                if request.model != name:
                    raise HTTPException(404, f"there is no such model: {name} is served")
                prompt = await asyncio.to_thread(decoder.encode, request)
        except (ValueError, ClientDisconnect, asyncio.TimeoutError) as error:
            raise HTTPException(400, str(error) or f"no whole body within {BODY_SECONDS:g} seconds") from error
        head = {"id": f"chatcmpl-{secrets.token_hex(16)}", "created": int(time.time()), "model": name}
        steps = decoder.answer(request, prompt)
        if request.stream:
            return StreamingResponse(stream(steps, request, head, len(prompt)), media_type="text/event-stream")
        done = []
        async with aclosing(steps):
            async for step in steps:
                done.append(step)
                if await connection.is_disconnected():
                    return Response(status_code=499)  # as nginx logs it; nobody reads this reply
        message = {"role": "assistant", "content": "".join(step["text"] for step in done)}
        choice = {"index": 0, "message": message, "finish_reason": done[-1]["finish_reason"]}
        whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage(done, len(prompt))}
        return ChatCompletion.model_validate(whole).model_dump(exclude_unset=True)

    app.mount("/", StaticFiles(directory=Path(__file__).with_name("page"), html=True))
    return app


class Connection(H11Protocol):
    """A connection that is closed if no head of a request arrives between two looks; uvicorn alone waits for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look(before=self)

    def _look(self, before: object) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is before:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(HEAD_SECONDS, self._look, self.cycle if is_idle else self)


POLICY = "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
SERVER: dict[str, Any] = {"http": Connection, "ws": "none", "limit_concurrency": 100, "log_level": "warning"}
SERVER |= {"server_header": False, "headers": [("Content-Security-Policy", POLICY)], "timeout_graceful_shutdown": 10}


async def read_body(request: Request) -> bytes:
    """Read a body of JSON; of one that is too large uvicorn drops the rest."""
    if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(400, "send Content-Type: application/json")  # which no page from elsewhere can
    body = bytearray()
    async for block in request.stream():
        body += block
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is too large: this server reads at most {MAX_BODY_BYTES:,} bytes")
    return bytes(body)


async def stream(
    steps: AsyncGenerator[StepReport, None], request: ChatRequest, head: dict[str, Any], num_prompt_tokens: int
) -> AsyncIterator[str]:
    """An answer as server-sent events; an error is an event, too."""

    def event(*choices: dict[str, Any], **more: Any) -> str:
        chunk = {**head, "object": "chat.completion.chunk", "choices": [{"index": 0, **choice} for choice in choices]}
        return f"data: {ChatCompletionChunk.model_validate(chunk | more).model_dump_json(exclude_unset=True)}\n\n"

    done: list[StepReport] = []
    async with aclosing(steps):
        try:
            async for step in steps:
                delta = {"content": step["text"]} if done else {"role": "assistant", "content": step["text"]}
                details = {"steps": [step]} if request.include_steps else {}
                yield event({"delta": delta, "finish_reason": None, **details})
                done.append(step)
        except Exception:
            yield f"data: {bytes(refusal(500, 'decoding failed, see the log of the server').body).decode()}\n\n"
            raise
    yield event({"delta": {}, "finish_reason": done[-1]["finish_reason"]})
    if request.stream_options.get("include_usage"):
        yield event(usage=usage(done, num_prompt_tokens))
    yield "data: [DONE]\n\n"


def usage(steps: list[StepReport], num_prompt_tokens: int) -> dict[str, Any]:
    """What an answer cost, with the numbers of draft tokens that were accepted and rejected."""
    names = "num_tokens", "num_accepted", "num_rejected"
    num_tokens, accepted, rejected = (sum(step[name] for step in steps) for name in names)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "completion_tokens_details": {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected},
    }


def refusal(status: int, message: str) -> Response:
    """An error in the form of OpenAI's API."""
    error = {"message": safe_line(message), "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status)
