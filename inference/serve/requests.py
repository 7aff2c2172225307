"""The requests of the API: which fields are read, which are refused, and the texts they ask for."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inference.prompts import encode_messages
from inference.serve.decoding import TextRequest
from inference.serve.errors import ApiError
from inference.verifier.base import Base
from inference.verifier.options import SamplingOptions
from inference.verifier.session import check_prompt

MAX_TEXTS = 16  # of one request
MAX_MESSAGES = 1000
DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API
# Fields that say nothing about the text.
LABELS = {"user", "safety_identifier", "prompt_cache_key", "metadata", "service_tier", "parallel_tool_calls"}
# Fields that are read only where they ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Prompt = Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Fields):
    """Options of a streamed reply."""

    include_usage: bool = False


class TextPart(_Fields):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Fields):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def as_pair(self) -> tuple[str, str]:
        """The role, which is ``system`` for a developer's message, and the text."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return "system" if self.role == "developer" else self.role, text


class TemplateOptions(_Fields):
    """What vLLM and SGLang hand to the chat template besides the messages; of it, the thinking switch."""

    enable_thinking: bool | None = None


class GenerationFields(_Fields):
    """Fields that both kinds of requests share.

    ``top_k`` and ``return_token_ids`` are vLLM's, ``use_drafter`` and ``include_steps`` our own.
    """

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_TEXTS)] = 1
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    use_drafter: bool = True
    include_steps: bool = False

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many alternatives to each token are reported, or None for no log probabilities."""

    @property
    def asked_tokens(self) -> int | None:
        """The maximum number of tokens of a text, if the request has one."""
        return self.max_tokens


class ChatRequest(GenerationFields):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    chat_template_kwargs: TemplateOptions = TemplateOptions()

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def template(self, default: str) -> str:
        """The chat template: the server's, with the thinking switch that the request asks for."""
        is_on = self.chat_template_kwargs.enable_thinking
        return default if is_on is None else f"{default.partition(':')[0]}:thinking={'on' if is_on else 'off'}"


class CompletionRequest(GenerationFields):
    """The body of ``POST /v1/completions``."""

    prompt: Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_TEXTS)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS


AnyRequest = TypeVar("AnyRequest", ChatRequest, CompletionRequest)


def read_request(kind: type[AnyRequest], body: Any) -> AnyRequest:
    """Check the body of a request; a field that is null counts as missing.

    Raises:
        ApiError: A field is unknown, missing, out of its range or not supported.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    fields = {key: value for key, value in body.items() if value is not None and key not in LABELS}
    for name in NEUTRAL.keys() & fields.keys():
        if fields.pop(name) not in NEUTRAL[name]:
            raise ApiError(400, f"{name} is not supported: leave it out", param=name, code="unsupported_parameter")
    if isinstance(fields.get("messages"), list):
        fields["messages"] = [_without_nulls(message) for message in fields["messages"]]
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise _explained(error) from error
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: set logprobs to true", param="top_logprobs")
    return request


def _without_nulls(message: Any) -> Any:
    """A message without the fields that clients send as null when they return an answer of ours."""
    if not isinstance(message, Mapping):
        return message
    return {key: value for key, value in message.items() if value is not None}


def _explained(error: ValidationError) -> ApiError:
    """The deepest mistake in one line. A field that may have several types has an entry for each: left out here."""
    first = max(error.errors(include_url=False, include_context=False, include_input=False), key=_depth)
    field, *inner = first["loc"] or ("the body",)
    place = [field, *(part for part in inner if isinstance(part, int) or (part.isidentifier() and part != "str"))]
    name = ".".join(map(str, place))
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{name} is not supported: leave it out", param=name, code="unsupported_parameter")
    return ApiError(400, f"{name}: {first['msg']}", param=name)


def _depth(details: Any) -> int:
    return len(details["loc"])


@dataclass(frozen=True)
class TextLimits:
    """What a request may ask of a base.

    Args:
        base: The base.
        template: Chat template, as in `encode_messages`.
        max_tokens: Maximum number of new tokens of a text.
    """

    base: Base
    template: str
    max_tokens: int


def texts_of(request: ChatRequest | CompletionRequest, limits: TextLimits) -> list[TextRequest]:
    """Return the texts that a request asks for: ``n`` for each prompt, sampled with seed, seed + 1 and so on.

    As in vLLM, the seeds of each prompt begin anew, so its texts are those that it has in a request of its own.

    Raises:
        ApiError: A prompt is empty or does not fit into the context, or too many texts or tokens are asked for.
    """
    max_new_tokens = request.asked_tokens or limits.max_tokens
    if max_new_tokens > limits.max_tokens:
        raise ApiError(400, f"max_tokens must be at most {limits.max_tokens} on this server", param="max_tokens")
    prompts = _prompts(request, limits)
    if len(prompts) * request.n > MAX_TEXTS:
        raise ApiError(400, f"{len(prompts)} prompts with n {request.n}: at most {MAX_TEXTS} texts", param="n")
    for prompt in prompts:
        _check(prompt, max_new_tokens, limits.base)
    seed = secrets.randbits(32) if request.seed is None else request.seed
    return [
        TextRequest(
            prompt,
            max_new_tokens,
            SamplingOptions(request.temperature, request.top_k, request.top_p, seed + index % request.n),
            [request.stop] if isinstance(request.stop, str) else request.stop,
            request.num_logprobs,
            request.use_drafter,
            request.include_steps,
        )
        for index, prompt in enumerate(prompt for prompt in prompts for _ in range(request.n))
    ]


def _prompts(request: ChatRequest | CompletionRequest, limits: TextLimits) -> list[list[int]]:
    """The token ids of each prompt."""
    base = limits.base
    if isinstance(request, ChatRequest):
        if request.messages[-1].role != "user":
            raise ApiError(400, "the last message must be the user's", param="messages")
        messages, template = [message.as_pair() for message in request.messages], request.template(limits.template)
        try:
            return [encode_messages(base, messages, template)]
        except ValueError as error:
            raise ApiError(400, " ".join(str(error).split()), param="messages") from error
    prompt = request.prompt
    is_one = isinstance(prompt, str) or all(isinstance(part, int) for part in prompt)
    prompts: Sequence[Any] = [prompt] if is_one else prompt
    return [list(base.tokenizer(each).input_ids) if isinstance(each, str) else each for each in prompts]


def _check(prompt: list[int], max_new_tokens: int, base: Base) -> None:
    vocab_size = base.model.config.vocab_size
    try:
        check_prompt(base, prompt, max_new_tokens)
    except ValueError as error:
        code = "context_length_exceeded" if len(prompt) >= base.context_length else None
        raise ApiError(400, str(error), code=code) from error
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise ApiError(400, f"prompt has token ids outside 0 to {vocab_size - 1}", param="prompt")
