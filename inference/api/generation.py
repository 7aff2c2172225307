"""Prompts in, texts and their cost out: what decodes for a user, with any drafter, whole or piece by piece."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

from data.conversation import encode_prompt
from drafters.protocol import Drafter
from inference.engine.base import Base
from inference.engine.cache import CacheKind
from inference.engine.runner import Runner
from inference.engine.sampling import make_sampler
from inference.engine.session import Session, StepCost, check_prompt
from inference.registry import catalogue
from inference.results import metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


@dataclass(frozen=True)
class Generated:
    """A written text and what it cost.

    Args:
        text: Without special tokens.
        token_ids: The end-of-sequence token among them, where there is one.
        steps: What each base forward cost; the first is the prefill.
        seconds: Wall time.
    """

    text: str
    token_ids: list[int]
    steps: list[StepCost]
    seconds: float

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a base forward, the prefill excluded; None where the prefill was all."""
        return metrics.acceptance_length([self])

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, the prefill included."""
        return len(self.token_ids) / self.seconds


def generate(
    base: Base | PreTrainedModel,
    prompts: Prompt | Sequence[Prompt],
    drafter: str | Drafter = "anpd",
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eos: int | Collection[int] | None = None,
    cache: CacheKind = "static",
) -> list[Generated]:
    """Write a text after each prompt: the base's own, token for token, in fewer forwards.

    Args:
        base: What `load_base` gives, or a causal model of transformers.
        prompts: One prompt or a list of them. A prompt is a text, taken as it stands; a list of chat messages
            ``{"role": ..., "content": ...}``, rendered by the tokenizer's chat template; or a list of token ids.
        drafter: A name as on the command line (``anpd``, ``ctc=FOLDER``), built for this call; or an object.
        tokenizer: Of a transformers model; a `Base` has its own.
        max_new_tokens: Tokens of a text at most; it also ends where the base's context does.
        temperature: 0 decodes greedily, above it samples.
        top_k: Sampling keeps the k most probable tokens; 0 keeps all.
        top_p: Sampling keeps the most probable tokens up to this probability.
        seed: Of the sampling; prompt i draws with seed + i.
        eos: Tokens that end a text; the base's own if not given.
        cache: ``static``, one buffer that is kept with the model from call to call, or ``dynamic``, transformers' own.

    Returns:
        One `Generated` a prompt, in order.

    Raises:
        ValueError: What is asked for cannot be done; the message says what to do.
    """
    base, texts, eos = _prepare(base, tokenizer, prompts, max_new_tokens, eos)
    samplers = [make_sampler(temperature, top_k, top_p, seed + index) for index in range(len(texts))]
    with acquire_runner(base, cache) as runner:
        proposer = make_drafter(drafter, runner, seed if temperature > 0 else None)
        written = [
            Session(runner, proposer, sampler).run(text, max_new_tokens, eos)
            for text, sampler in zip(texts, samplers, strict=True)
        ]
    return [Generated(_text(base.tokenizer, one.tokens), one.tokens, one.steps, one.seconds) for one in written]


def stream(
    base: Base | PreTrainedModel,
    prompt: Prompt,
    drafter: str | Drafter = "anpd",
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eos: int | Collection[int] | None = None,
    cache: CacheKind = "static",
) -> Iterator[str]:
    """Write one text and yield it as it grows; the pieces are whole characters and join to `generate`'s text.

    Args:
        base, prompt, drafter, tokenizer, max_new_tokens, temperature, top_k, top_p, seed, eos, cache: As in `generate`.

    Raises:
        ValueError: At once, not at the first piece.
    """
    base, texts, eos = _prepare(base, tokenizer, prompt, max_new_tokens, eos)
    if len(texts) != 1:
        raise ValueError(f"stream writes one text: pass one prompt, not {len(texts)}")
    sampler = make_sampler(temperature, top_k, top_p, seed)

    def pieces() -> Iterator[str]:
        growing = IncrementalDetokenizer(base.tokenizer)
        with acquire_runner(base, cache) as runner:
            proposer = make_drafter(drafter, runner, seed if temperature > 0 else None)
            for emitted, _ in Session(runner, proposer, sampler).decode(texts[0], max_new_tokens, eos):
                if piece := growing.add(emitted):
                    yield piece
        if piece := growing.finish():
            yield piece

    return pieces()


class IncrementalDetokenizer:
    """Turns tokens into text as they come, in pieces that need never be taken back.

    A token may end within a character, and decoders look at the neighbours of a token (for spaces). So each piece is
    decoded together with the one before, and held back while it ends in the sign of a broken character.

    Args:
        tokenizer: Of the base.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._piece: list[int] = []  # tokens of the last piece given out
        self._held: list[int] = []

    def add(self, tokens: Sequence[int]) -> str:
        """The text that is certain now and was not before; often empty."""
        self._held += tokens
        text = self._beyond_last_piece()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._piece, self._held = self._held, []
        return text

    def finish(self) -> str:
        """What is still held back when the text ends."""
        return self._beyond_last_piece()

    def _beyond_last_piece(self) -> str:
        return _text(self.tokenizer, self._piece + self._held)[len(_text(self.tokenizer, self._piece)) :]


class _KeptRunners(dict):
    """The runners kept with a model, by kind of cache; a copy of the model starts without them."""

    def __reduce__(self):
        return _KeptRunners, ()


@contextmanager
def acquire_runner(base: Base, cache: CacheKind = "static") -> Iterator[Runner]:
    """The runner of a model, which keeps its buffers from call to call and goes away with the model.

    While it is lent another call gets one of its own, so that two texts may be written in turn.

    Raises:
        ValueError: The model is not one that `Runner` can feed draft trees to.
    """
    model = base.model
    # A runner holds its model: in a weak dictionary it would keep its own key alive, as an attribute it does not.
    kept = model.__dict__.setdefault("_drafters_runners", _KeptRunners())
    runner = kept.pop(cache, None)
    if not runner or not _is_of_today(runner, model):
        _check_model(base)
        runner = Runner(base, cache)
    runner.base = base
    try:
        yield runner
    finally:
        kept[cache] = runner


def _is_of_today(runner: Runner, model: PreTrainedModel) -> bool:
    """Whether the model was neither moved, cast nor given another head since."""
    same_place = (runner.device, runner.dtype) == (model.device, model.dtype)
    return same_place and runner.head is model.get_output_embeddings()


def _check_model(base: Base) -> None:
    config = base.model.config
    if config.is_encoder_decoder:
        raise ValueError(f"{base.name} is an encoder-decoder model: pass a causal language model")
    for number in ("max_position_embeddings", "vocab_size", "num_hidden_layers"):
        if not isinstance(getattr(config, number, None), int):
            raise ValueError(f"{base.name} has no {number} in its config: not supported")
    if (attention := getattr(config, "_attn_implementation", None)) not in (None, "sdpa", "eager"):
        raise ValueError(f"{attention} takes no tree mask: load {base.name} with attn_implementation='sdpa'")


def make_drafter(drafter: str | Drafter, runner: Runner, seed: int | None = None) -> Drafter:
    """The drafter itself, or the one that a name builds.

    Args:
        drafter: An object or a name.
        runner: Of the base.
        seed: Given where the base draws. A named drafter that draws as well takes it, unless its name sets one: with
            the same numbers in every call, texts of many calls would not follow the base's law.
    """
    if not isinstance(drafter, str):
        return drafter
    name, _, arguments = catalogue.split(drafter)
    kind = catalogue.TRAINING_FREE.get(name)
    set_already = any(pair.startswith("seed=") for pair in arguments.split(","))
    if seed is not None and kind and not set_already and "seed" in inspect.signature(kind.build).parameters:
        drafter += f"{',' if arguments else ':'}seed={seed}"
    return catalogue.make(drafter, runner)


def _prepare(
    base: Base | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int,
    eos: int | Collection[int] | None,
) -> tuple[Base, list[list[int]], frozenset[int]]:
    """Base, token ids of each prompt and end-of-sequence tokens, all checked before anything is decoded."""
    if isinstance(base, Base):
        if tokenizer is not None:
            raise ValueError(f"{base.name} has a tokenizer of its own: leave tokenizer out")
    elif not hasattr(base, "get_output_embeddings"):
        raise ValueError(f"base must come from load_base or be a model of transformers, not {type(base).__name__}")
    elif tokenizer is None:
        raise ValueError("a model of transformers comes without its tokenizer: pass tokenizer=...")
    else:
        base = Base(base.name_or_path or type(base).__name__, base, tokenizer)
    _check_model(base)
    many = isinstance(prompts, Sequence) and not isinstance(prompts, str)
    many = many and not (prompts and isinstance(prompts[0], Integral | Mapping))
    texts = [_encode(prompt, base.tokenizer) for prompt in (prompts if many else [prompts])]
    for text in texts:
        check_prompt(base, text, max_new_tokens)
        if not 0 <= min(text) <= max(text) < base.model.config.vocab_size:
            raise ValueError(f"a prompt has token ids outside the {base.model.config.vocab_size} of {base.name}")
    return base, texts, base.eos if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


def _encode(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt).input_ids)
    parts = list(prompt) if isinstance(prompt, Sequence) else [None]
    if all(isinstance(part, Integral) for part in parts):
        return [int(part) for part in parts]
    if not all(isinstance(part, Mapping) and {"role", "content"} <= part.keys() for part in parts):
        raise ValueError(
            'a prompt must be a text, a list of {"role": ..., "content": ...} or a list of token ids, '
            f"not {type(prompt).__name__}"
        )
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: pass a text or token ids")
    return encode_prompt([(part["role"], part["content"]) for part in parts], tokenizer, "tokenizer")


def _text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
