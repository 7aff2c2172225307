"""Decoding for other programs: `generate` returns texts and their cost, `stream` yields a text piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast
from weakref import WeakKeyDictionary

from pydantic import Field
from torch import nn
from transformers import PreTrainedTokenizerBase

from data.conversations import text_of
from data.files import check_encodable, reading
from data.templates import encode_prompt
from inference.arguments import checks_arguments, must_be, plain
from inference.drafter_specs import AnyDrafter, make
from inference.options import SamplingOptions
from inference.verifier.base import Base
from inference.verifier.check import check_config, model_state
from inference.verifier.graphed import make_runner
from inference.verifier.runner import Runner
from inference.verifier.sampling import Sampler
from inference.verifier.session import Session, Step, acceptance_length, check_prompt

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedModel

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
BYTES = bytes | bytearray | memoryview  # which Python takes for lists of integers
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


@checks_arguments
@dataclass(frozen=True)
class GenerateOptions(SamplingOptions):
    """The keyword arguments that `generate` and `stream` share, besides those of `SamplingOptions`.

    Prompt i is sampled with seed + i.

    Args:
        tokenizer: Tokenizer of a transformers model; must be left out with a `Base`, which has its own.
        max_new_tokens: Maximum number of new tokens of a text. A text also ends where the base's context ends.
        eos: Id of the token that ends a text, or several; by default the base's own end-of-sequence tokens.
        tools: Tools that the chat template offers to the base: JSON objects, or functions, as transformers reads them.
        logits_processor: Logits processors of transformers, applied before temperature, top_k and top_p. They are
            called once for each new token, in order, with the token ids (1, S) of prompt and text before it.
        check: Whether the base is checked at the first call, and again after the model has changed: the logits of a few
            draft tokens are compared with those of the model's own forward, and a base where they differ is refused.
        bitwise: Whether texts are those of the base alone bit for bit, see `Base`.
        graphed: Whether decoding steps are CUDA graphs, see `Base`. They are kept with the model between calls.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    eos: TokenId | list[TokenId] | set[TokenId] | frozenset[TokenId] | None = None
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] = ()
    logits_processor: Sequence[Callable[..., Any]] = ()
    check: bool = True
    bitwise: bool | None = None
    graphed: bool | None = None

    def sampler_of(self, index: int) -> Sampler:
        """The sampler of a prompt."""
        return replace(self, seed=self.seed + index).sampler(self.logits_processor)  # type: ignore[arg-type]

    def wrap(self, base: Base | PreTrainedModel) -> Base:
        """Return what was given as the base as a `Base`; raises ValueError if it is none."""
        if isinstance(base, Base):
            if self.tokenizer is not None:
                raise ValueError(f"{base.name} has a tokenizer of its own: leave tokenizer out")
            bitwise = base.bitwise if self.bitwise is None else self.bitwise
            graphed = base.graphed if self.graphed is None else self.graphed
            base = replace(base, check=base.check and self.check, bitwise=bitwise, graphed=graphed)
        elif not isinstance(base, nn.Module) or not hasattr(base, "get_output_embeddings"):
            raise ValueError(f"base must come from load_base or be a model of transformers, not {type(base).__name__}")
        elif self.tokenizer is None:
            raise ValueError("a model of transformers comes without its tokenizer: pass tokenizer=...")
        else:
            name = base.name_or_path or type(base).__name__
            base = Base(name, base, self.tokenizer, self.check, bitwise=self.bitwise, graphed=self.graphed)
        check_config(base)
        return base

    def end_tokens(self, base: Base) -> frozenset[int]:
        """The tokens that end a text; raises ValueError if the base has no such token."""
        ids = base.eos if self.eos is None else frozenset([self.eos] if isinstance(self.eos, int) else self.eos)
        if self.eos is not None and max(ids, default=0) >= base.config.vocab_size:
            raise ValueError(f"eos names the token {max(ids)}, but {base.name} has only {base.config.vocab_size}")
        return ids


@dataclass(frozen=True)
class Generated:
    """A generated text and its cost."""

    text: str  # without special tokens
    token_ids: list[int]  # including the end-of-sequence token if there is one
    steps: list[Step]  # cost of each base forward; the first is the prefill
    seconds: float  # wall time

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per base forward, prefill excluded; None if there was no forward but the prefill."""
        return acceptance_length([self.steps])

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, prefill included."""
        return len(self.token_ids) / self.seconds


def generate(
    base: Base | PreTrainedModel, prompts: Prompt | Sequence[Prompt], drafter: AnyDrafter = "anpd", **options: Any
) -> list[Generated]:
    """Generate a text for each prompt, in order: the same tokens as without a drafter, in fewer base forwards.

    Raises ValueError if an argument is invalid or does not fit the base; the message says what to do.

    Args:
        base: The result of `load_base`, or a causal language model of transformers.
        prompts: One prompt or a list of prompts. A prompt is a text, which is encoded as it stands; a list of chat
            messages ``{"role": ..., "content": ...}``, handed with all that they hold to the tokenizer's chat template;
            or a list of token ids.
        drafter: Name of a drafter as on the command line (``anpd``, ``ctc=FOLDER``), or the `Path` of the folder of a
            trained one, built for this call; or a drafter object.
        options: Any of `GenerateOptions`, such as ``max_new_tokens=64``.
    """
    chosen = GenerateOptions(**options)
    base = chosen.wrap(base)
    encoded = [_encode(prompt, base, chosen) for prompt in _listed(prompts)]
    samplers, eos = [chosen.sampler_of(index) for index in range(len(encoded))], chosen.end_tokens(base)
    generated = []
    with acquire_runner(base) as runner:
        built = make(drafter, runner)
        for prompt, sampler in zip(encoded, samplers, strict=True):
            generation = Session(runner, built, sampler).run(prompt, chosen.max_new_tokens, eos)
            text = IncrementalDetokenizer(base.tokenizer).add(generation.tokens, is_last=True)
            generated.append(Generated(text, generation.tokens, generation.steps, generation.seconds))
    return generated


def stream(base: Base | PreTrainedModel, prompt: Prompt, drafter: AnyDrafter = "anpd", **options: Any) -> Iterator[str]:
    """Generate one text and yield it piece by piece; the pieces are whole characters and join to `generate`'s text.

    The arguments are those of `generate`. The call itself refuses them if they are wrong, not the first piece.
    """
    chosen = GenerateOptions(**options)
    base = chosen.wrap(base)
    prompts = _listed(prompt)
    if len(prompts) != 1:
        raise ValueError(f"stream writes one text: pass one prompt, not {len(prompts)}")
    encoded, sampler, eos = _encode(prompts[0], base, chosen), chosen.sampler_of(0), chosen.end_tokens(base)

    def pieces() -> Iterator[str]:
        detokenizer = IncrementalDetokenizer(base.tokenizer)
        with acquire_runner(base) as runner:
            session = Session(runner, make(drafter, runner), sampler)
            yield ""  # the call itself asks for this one, so that it refuses the base and the drafter
            for emitted, _ in session.decode(encoded, chosen.max_new_tokens, eos):
                if piece := detokenizer.add(emitted):
                    yield piece
        if piece := detokenizer.finish():
            yield piece

    next(begun := pieces())
    return begun


class IncrementalDetokenizer:
    """Turns tokens into text as they are generated, in pieces that are final.

    A token may end within a character, and the text of a token may depend on the token before it (spaces). So each
    piece is decoded together with the previous one, and held back while it ends with an incomplete character. Tokens
    are read one by one, so that the text does not depend on how many are added at once.
    """

    @checks_arguments
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        self._decode: Any = partial(tokenizer.decode, **options)
        self._last_piece: list[int] = []  # tokens of the last piece that was returned
        self._waiting: list[int] = []  # tokens whose text was not returned yet

    @checks_arguments
    def add(self, tokens: Sequence[TokenId], is_last: bool = False) -> str:
        """Add tokens, and return the text that has become final, often empty; after the last ones, all that is left."""
        final = ""
        for token in tokens:
            self._waiting.append(token)
            text = self.finish()
            if text and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                self._last_piece, self._waiting = self._waiting, []
                final += text
        return final + self.finish() if is_last else final

    def finish(self) -> str:
        """Return what is still held back when the text ends."""
        prefix, text, alone = map(self._decode, (self._last_piece, self._last_piece + self._waiting, self._waiting))
        # With bytes that are no character, those of the character before them may not be one either.
        return text[len(prefix) :] if text.startswith(prefix) else alone


# Each model's idle runners with the `model_state` they were made in, by whether they are graphed, bit-identical and
# checked. An idle runner has no base: the entry of a model whose runners refer to it would never be freed.
_idle: WeakKeyDictionary[Any, dict[tuple[bool | None, bool | None, bool], tuple[int, Runner]]] = WeakKeyDictionary()


@contextmanager
def acquire_runner(base: Base) -> Iterator[Runner]:
    """Use the runner of a model, which keeps its buffers between calls and is freed with the model.

    While it is in use, another call gets a runner of its own, so several texts may be streamed at the same time. If the
    model has changed since (`model_state`), the runner is made anew, and the model checked again. Raises ValueError as
    `make_runner` does.
    """
    check_config(base)
    runners, kind = _idle.setdefault(base.model, {}), (base.graphed, base.bitwise, base.check)
    state, runner = runners.pop(kind, (0, None))
    if runner is not None and state == model_state(base.model):
        runner.base = base
    else:
        runner = make_runner(base)
        state = model_state(base.model)
    try:
        yield runner
    finally:
        del runner.base
        runners[kind] = state, runner


def _listed(prompts: Any) -> Sequence[Any]:
    """Return a list of prompts, or one prompt as a list."""
    prompts = plain(prompts)
    is_one = isinstance(prompts, str | BYTES) or not isinstance(prompts, Sequence)
    return prompts if not is_one and all(isinstance(prompt, Sequence) for prompt in prompts) else [prompts]


def _encode(prompt: Any, base: Base, options: GenerateOptions) -> list[int]:
    """Return the token ids of a prompt; ValueError if it has none of the three forms, or does not fit the base."""
    tokenizer, tools = base.tokenizer, cast(Any, options.tools)
    parts: list[Any] = [*prompt] if isinstance(prompt, Sequence) and not isinstance(prompt, str | BYTES) else [None]
    with reading("the prompt"):
        check_encodable([prompt, tools])
        if isinstance(prompt, str) and not tools:
            token_ids = list(tokenizer(prompt).input_ids)
        elif all(type(part) is int for part in parts) and not tools:
            token_ids = parts
        elif not all(map(_is_message, parts)):
            forms = 'a text or token ids, without tools, or a list of {"role": ..., "content": ...}'
            raise must_be("the prompt", forms, prompt)
        elif not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: pass a text or token ids")
        else:
            texts = [{"content": text_of(part["content"])} if "content" in part else {} for part in parts]
            messages = [{**part, **text} for part, text in zip(parts, texts, strict=True)]
            token_ids = encode_prompt(messages, tokenizer, "tokenizer", tools)
            if tools and token_ids == encode_prompt(messages, tokenizer, "tokenizer"):
                raise ValueError("the chat template ignores tools: leave them out")
        check_prompt(base, token_ids, options.max_new_tokens)
    return token_ids


def _is_message(part: Any) -> bool:
    """Whether this is a message with a role, and with a text or tool calls."""
    has_role = isinstance(part, Mapping) and isinstance(part.get("role"), str)
    return has_role and (isinstance(text_of(part.get("content")), str) or bool(part.get("tool_calls")))
