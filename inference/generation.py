"""Decoding for other programs: `generate` returns texts and their cost, `stream` yields a text piece by piece."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from data.templates import encode_prompt
from drafters.protocol import Drafter
from inference import drafter_specs
from inference.budget import BudgetController
from inference.compiled.runner import make_runner
from inference.drafter_specs import Budget
from inference.evaluate import metrics
from inference.verifier.base import Base
from inference.verifier.cache import CacheKind
from inference.verifier.examination import check_config, model_state
from inference.verifier.options import SamplingOptions
from inference.verifier.runner import Runner
from inference.verifier.session import Session, StepCost, check_prompt

if TYPE_CHECKING:
    from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


@dataclass(frozen=True)
class Generated:
    """A generated text and its cost.

    Args:
        text: The text without special tokens.
        token_ids: Its tokens, including the end-of-sequence token if there is one.
        steps: Cost of each base forward; the first is the prefill.
        seconds: Wall time.
    """

    text: str
    token_ids: list[int]
    steps: list[StepCost]
    seconds: float

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per base forward, prefill excluded; None if there was no forward but the prefill."""
        return metrics.acceptance_length([self])

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, prefill included."""
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
    logits_processor: Sequence[LogitsProcessor] = (),
    check: bool = True,
    budget: Budget = "fixed",
    compile: bool = False,
) -> list[Generated]:
    """Generate a text for each prompt: the same tokens as without a drafter, in fewer base forwards.

    Args:
        base: The result of `load_base`, or a causal language model of transformers.
        prompts: One prompt or a list of prompts. A prompt is a text, which is encoded as it stands; a list of chat
            messages ``{"role": ..., "content": ...}``, rendered by the tokenizer's chat template; or a list of token
            ids.
        drafter: Name of a drafter as on the command line (``anpd``, ``ctc=FOLDER``), built for this call; or a drafter
            object.
        tokenizer: Tokenizer of a transformers model; must be left out with a `Base`, which has its own.
        max_new_tokens: Maximum number of new tokens of a text. A text also ends where the base's context ends.
        temperature: Sampling temperature; 0 decodes greedily.
        top_k: Sample from the k most probable tokens only; 0 keeps all tokens.
        top_p: Sample from the most probable tokens whose probabilities add up to this value; 1 keeps all tokens.
        seed: Seed of the random sampling; prompt i is sampled with seed + i.
        eos: Tokens that end a text; by default the base's own end-of-sequence tokens.
        cache: Kind of the KV cache: ``static`` is one buffer that is kept with the model between calls, ``dynamic``
            transformers' own cache.
        logits_processor: Logits processors of transformers, applied before temperature, top_k and top_p. They are
            called once for each new token, in order, with the token ids (1, S) of prompt and text before it.
        check: Whether the base is examined: at the first call, and again after the model has changed, the logits of a
            few draft tokens are compared with those of the model's own forward, and a base where they differ is
            refused.
        budget: How many draft tokens a step feeds, if the drafter's name gives no ``num_nodes`` or ``num_draft``:
            ``fixed``, the drafter's own number; or ``auto``, as many as pay for their time, up to that number; or a
            file that ``drafters step-cost`` wrote, which is ``auto`` with these times to start from. The tokens are the
            same, but with ``auto`` their number per step depends on the clock. What was learned about a
            drafter given by its name is kept with the model between calls.
        compile: Whether decoding steps are compiled, see `inference.compiled.runner`. What is compiled is kept with the
            model between calls.

    Returns:
        One `Generated` per prompt, in order.

    Raises:
        ValueError: An argument is invalid or does not fit the base; the message says what to do.
    """
    base, encoded_prompts, eos = _prepare(base, tokenizer, prompts, max_new_tokens, eos, check)
    sampling = SamplingOptions(temperature, top_k, top_p, seed)
    samplers = [replace(sampling, seed=seed + index).sampler(logits_processor) for index in range(len(encoded_prompts))]
    with acquire_runner(base, cache, compile) as runner:
        built = make_drafter(drafter, runner)
        controller = kept_budget(drafter, built, runner, budget)
        generations = [
            Session(runner, built, sampler, budget=controller).run(prompt, max_new_tokens, eos)
            for prompt, sampler in zip(encoded_prompts, samplers, strict=True)
        ]
    return [
        Generated(_decode(base.tokenizer, each.tokens), each.tokens, each.steps, each.seconds) for each in generations
    ]


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
    logits_processor: Sequence[LogitsProcessor] = (),
    check: bool = True,
    budget: Budget = "fixed",
    compile: bool = False,
) -> Iterator[str]:
    """Generate one text and yield it piece by piece; the pieces are whole characters and join to `generate`'s text.

    Args:
        base, prompt, drafter, tokenizer, max_new_tokens, temperature, top_k, top_p, seed, eos, cache, logits_processor,
            check, budget, compile: As in `generate`.

    Raises:
        ValueError: As in `generate`; raised by the call itself, not with the first piece.
    """
    base, encoded_prompts, eos = _prepare(base, tokenizer, prompt, max_new_tokens, eos, check)
    if len(encoded_prompts) != 1:
        raise ValueError(f"stream writes one text: pass one prompt, not {len(encoded_prompts)}")
    sampler = SamplingOptions(temperature, top_k, top_p, seed).sampler(logits_processor)
    with acquire_runner(base, cache, compile):
        pass  # refuses a base now, not with the first piece

    def pieces() -> Iterator[str]:
        detokenizer = IncrementalDetokenizer(base.tokenizer)
        with acquire_runner(base, cache, compile) as runner:
            built = make_drafter(drafter, runner)
            session = Session(runner, built, sampler, budget=kept_budget(drafter, built, runner, budget))
            for emitted, _ in session.decode(encoded_prompts[0], max_new_tokens, eos):
                if piece := detokenizer.add(emitted):
                    yield piece
        if piece := detokenizer.finish():
            yield piece

    return pieces()


class IncrementalDetokenizer:
    """Turns tokens into text as they are generated, in pieces that are final.

    A token may end within a character, and the text of a token may depend on the token before it (spaces). So each
    piece is decoded together with the previous one, and held back while it ends with an incomplete character.

    Args:
        tokenizer: Tokenizer of the base.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._last_piece: list[int] = []  # tokens of the last piece that was returned
        self._waiting: list[int] = []  # tokens whose text was not returned yet

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens, and return the text that has become final; often empty."""
        self._waiting += tokens
        text = self._text_after_last_piece()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._last_piece, self._waiting = self._waiting, []
        return text

    def finish(self) -> str:
        """Return what is still held back when the text ends."""
        return self._text_after_last_piece()

    def _text_after_last_piece(self) -> str:
        prefix = _decode(self.tokenizer, self._last_piece)
        return _decode(self.tokenizer, self._last_piece + self._waiting)[len(prefix) :]


class _RunnerPool(dict[tuple[CacheKind, bool], Runner]):
    """The idle runners of a model, by cache and whether they are compiled; copies of the model start with none."""

    def __reduce__(self) -> tuple[type[_RunnerPool], tuple[()]]:
        return _RunnerPool, ()


@contextmanager
def acquire_runner(base: Base, cache: CacheKind = "static", compile: bool = False) -> Iterator[Runner]:
    """Use the runner of a model, which keeps its buffers between calls and is freed with the model.

    While it is in use, another call gets a runner of its own, so several texts may be streamed at the same time. If the
    model has changed since (`model_state`), the runner is made anew, and the model examined again.

    Args:
        base: The base.
        cache: Kind of the KV cache.
        compile: Whether its steps are compiled.

    Raises:
        ValueError: The runner cannot feed draft trees to this model, or cannot compile it.
    """
    model = base.model
    # The pool is an attribute of the model: a runner refers to its model, so in a weak dictionary by model it would
    # never release its own key.
    pool = model.__dict__.setdefault("_drafters_runners", _RunnerPool())
    runner = pool.pop((cache, compile), None)
    if not runner or runner.state != model_state(model) or (base.check and not runner.base.check):
        runner = make_runner(base, compile, cache)
    runner.base = base
    try:
        yield runner
    finally:
        pool[cache, compile] = runner


def make_drafter(drafter: str | Drafter, runner: Runner) -> Drafter:
    """Build a drafter from its name as on the command line; a drafter object is returned as it is."""
    return drafter_specs.make(drafter, runner) if isinstance(drafter, str) else drafter


def kept_budget(drafter: str | Drafter, built: Drafter, runner: Runner, budget: Budget) -> BudgetController | None:
    """The controller of a drafter's budget; that of a drafter given by its name is kept with the runner."""
    if not isinstance(drafter, str):
        return drafter_specs.make_budget(built, None, budget)
    if (drafter, budget) not in runner.budgets:
        runner.budgets[drafter, budget] = drafter_specs.make_budget(built, drafter, budget)
    return runner.budgets[drafter, budget]


def _prepare(
    base: Base | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int,
    eos: int | Collection[int] | None,
    check: bool,
) -> tuple[Base, list[list[int]], frozenset[int]]:
    """Return the base, the token ids of each prompt and the end-of-sequence tokens, after checking them all."""
    if isinstance(base, Base):
        if tokenizer is not None:
            raise ValueError(f"{base.name} has a tokenizer of its own: leave tokenizer out")
        base = replace(base, check=base.check and check)
    elif not hasattr(base, "get_output_embeddings"):
        raise ValueError(f"base must come from load_base or be a model of transformers, not {type(base).__name__}")
    elif tokenizer is None:
        raise ValueError("a model of transformers comes without its tokenizer: pass tokenizer=...")
    else:
        base = Base(base.name_or_path or type(base).__name__, base, tokenizer, check)
    check_config(base)
    encoded_prompts = [_encode(prompt, base.tokenizer) for prompt in (prompts if _is_list(prompts) else [prompts])]
    for token_ids in encoded_prompts:
        check_prompt(base, token_ids, max_new_tokens)
        if not 0 <= min(token_ids) <= max(token_ids) < base.model.config.vocab_size:
            raise ValueError(f"a prompt has token ids outside the {base.model.config.vocab_size} of {base.name}")
    return base, encoded_prompts, base.eos if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


def _is_list(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a list of prompts, not one prompt."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return False
    return not (prompts and isinstance(prompts[0], Integral | Mapping))


def _encode(prompt: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a prompt, whatever its form; raises ValueError if it has none of the three forms."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt).input_ids)
    parts: list[Any] = list(prompt) if isinstance(prompt, Sequence) else [None]
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


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of tokens without special tokens."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
