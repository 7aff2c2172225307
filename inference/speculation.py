"""Speculative decoding inside transformers' own ``model.generate``, passed to it as ``custom_generate``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from data.tokenizer import load_tokenizer
from drafters.protocol import Drafter
from inference import drafter_specs
from inference.budget import BudgetController
from inference.drafter_specs import Budget
from inference.evaluate import metrics
from inference.generate_call import (
    SCORE_OUTPUTS,
    check_supported,
    check_supported_in_batch,
    count_new_tokens,
    find_generate_call,
    read_prompts,
)
from inference.generation import acquire_runner, kept_budget, make_drafter
from inference.verifier.base import Base
from inference.verifier.cache import CacheKind
from inference.verifier.processing import ScoreProcessors
from inference.verifier.runner import Runner
from inference.verifier.sampling import Greedy, KeyedSampler, Sampler
from inference.verifier.session import Generation, Session, StepCost

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer


class Speculation:
    """A decoding loop for ``model.generate``: ``custom_generate=Speculation("anpd")``.

    Greedy text is the same as without speculation, token for token. Sampled text follows the model's distribution after
    the requested temperature, top_k, top_p and so on; its draws are keyed by a number from torch's global generator, so
    ``torch.manual_seed`` repeats them. Several prompts are decoded one after the other.

    Logits processors, those of ``generate`` (repetition_penalty, bad_words_ids, ...) and your own, are called as
    without speculation: once for each new token, in order, with the text before it. So they may even keep a state.
    Several texts at once take only transformers' own processors.

    Stopping criteria see the text grow token by token, and its scores if ``generate`` returns them (``output_scores``).
    They are asked after a step, so processors may have been called for a few tokens behind the end they set.
    ``stop_strings`` does not work, because transformers does not pass the tokenizer on; use
    ``stopping_criteria=[StopStringCriteria(tokenizer, [...])]`` instead.

    Threads that share a model need a `Speculation` each, with a drafter of its own.

    Args:
        drafter: Name of a drafter as on the command line (``anpd``, ``ctc=FOLDER``), built at the first call with a
            model and kept; or a drafter object.
        tokenizer: Tokenizer of the model, needed if the drafter comes from a folder, which is checked against it. By
            default it is loaded from where the model was loaded from.
        cache: Kind of the KV cache: ``static`` is one buffer that is kept with the model between calls, ``dynamic``
            transformers' own cache.
        check: Whether the model is examined before it is used, as in `generation.generate`.
        budget: How many draft tokens a step feeds, as in `generation.generate`.
        compile: Whether decoding steps are compiled, as in `generation.generate`.
    """

    def __init__(
        self,
        drafter: str | Drafter = "anpd",
        tokenizer: PreTrainedTokenizerBase | None = None,
        cache: CacheKind = "static",
        check: bool = True,
        budget: Budget = "fixed",
        compile: bool = False,
    ) -> None:
        self.drafter, self.tokenizer, self.cache, self.check = drafter, tokenizer, cache, check
        self.budget: Budget = budget
        self.compile = compile
        self.generations: list[Generation] = []  # of the last call, one per prompt
        self._built: tuple[Runner, Drafter, BudgetController | None] | None = None
        self._in_use = threading.Lock()

    @property
    def steps(self) -> list[StepCost]:
        """Cost of each base forward of the last call; the first of each prompt is its prefill."""
        return [step for generation in self.generations for step in generation.steps]

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per base forward in the last call, prefills excluded; None if there was no other forward."""
        return metrics.acceptance_length(self.generations)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode the prompts; called by ``generate``.

        Args:
            model, logits_processor, stopping_criteria, generation_config, model_kwargs: What ``generate`` prepared. A
                wrapper that calls from another thread than ``generate`` adds ``streamer``, None if there is none.
            input_ids: (B, S) prompts, padded on the left.

        Returns:
            (B, S + N) prompts and texts; texts that end early are padded on the right.

        Raises:
            ValueError: The call uses an option that would change the text, or that is not supported; or this object is
                decoding already.
        """
        if not self._in_use.acquire(blocking=False):
            raise ValueError("this Speculation object is already decoding: make one for each thread")
        try:
            return self._decode(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        finally:
            self._in_use.release()

    def _decode(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> Tensor | GenerateDecoderOnlyOutput:
        call = model_kwargs if "streamer" in model_kwargs else find_generate_call(model)
        streamer, assistant = call["streamer"], call.get("assistant_model")
        model_kwargs = {name: value for name, value in model_kwargs.items() if name != "streamer"}
        other_criteria = StoppingCriteriaList(
            each for each in stopping_criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria)
        )
        check_supported(generation_config, assistant, model_kwargs)
        if len(input_ids) > 1:
            check_supported_in_batch(generation_config, logits_processor, other_criteria, streamer)
        prompts = read_prompts(input_ids, model_kwargs)
        max_lengths = [each.max_length for each in stopping_criteria if type(each) is MaxLengthCriteria]
        eos_criteria = [each for each in stopping_criteria if type(each) is EosTokenCriteria]
        eos = frozenset(chain.from_iterable(each.eos_token_id.flatten().tolist() for each in eos_criteria))
        base = self._base(model)
        self.generations = []
        with acquire_runner(base, self.cache, self.compile) as runner:
            max_new_tokens = count_new_tokens(base, input_ids.shape[1], max(map(len, prompts)), max_lengths)
            for index, prompt in enumerate(prompts):
                processors = _ProcessorsOfOneText(generation_config, logits_processor, input_ids, index, len(prompt))
                sampler = _sampler(generation_config, processors)
                drafter, budget = self._drafter(runner)
                session = Session(runner, drafter, sampler, budget=budget)
                steps = session.decode(prompt, max_new_tokens, eos)
                self.generations.append(_collect(steps, input_ids[index], other_criteria, streamer, processors))
        if streamer is not None:
            streamer.end()
        answers = [input_ids.new_tensor(generation.tokens) for generation in self.generations]
        pad = generation_config._pad_token_tensor
        padding_value = 0 if pad is None else pad.item()
        padded = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=padding_value)
        sequences: Any = torch.cat([input_ids, padded], dim=1)
        if not generation_config.return_dict_in_generate:
            return sequences
        scores: Any = processors.scores(padded.shape[1])
        logits: Any = processors.logits(padded.shape[1])
        return GenerateDecoderOnlyOutput(sequences, scores=scores, logits=logits)

    def _base(self, model: PreTrainedModel) -> Base:
        """Wrap the model; its tokenizer is loaded only if the drafter's folder is to be checked against it."""
        name = getattr(model, "name_or_path", "")
        tokenizer = self.tokenizer
        if tokenizer is None and isinstance(self.drafter, str) and drafter_specs.split(self.drafter)[1]:
            if not name:
                raise ValueError(
                    f"{self.drafter} is checked against the tokenizer: pass Speculation(..., tokenizer=...)"
                )
            tokenizer = load_tokenizer(name)
        # Without a tokenizer nothing is encoded or decoded: `generate` passes token ids and end-of-sequence tokens.
        return Base(name or type(model).__name__, model, cast("PreTrainedTokenizerBase", tokenizer), self.check)

    def _drafter(self, runner: Runner) -> tuple[Drafter, BudgetController | None]:
        """Build the drafter and its budget at the first call with this runner."""
        if not self._built or self._built[0] is not runner:
            drafter = make_drafter(self.drafter, runner)
            self._built = runner, drafter, kept_budget(self.drafter, drafter, runner, self.budget)
        return self._built[1:]


def speculate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: str | Drafter = "anpd",
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode by one call of a new `Speculation`.

    Use it as ``model.generate(**inputs, custom_generate=speculate, drafter="anpd")``. A drafter that is loaded from a
    folder is loaded again by every call; keep a `Speculation` object to avoid that.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: Passed by ``generate``.
        drafter: Name of a drafter as on the command line, or a drafter object.

    Raises:
        ValueError: As `Speculation`.
    """
    return Speculation(drafter)(
        model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
    )


def _collect(
    steps: Iterator[tuple[list[int], StepCost]],
    prompt: Tensor,
    criteria: StoppingCriteriaList,
    streamer: BaseStreamer | None,
    processors: _ProcessorsOfOneText,
) -> Generation:
    """Run the steps of one text; criteria and streamer get every token as if it had been a step of its own.

    Args:
        steps: The steps of `Session.decode`.
        prompt: (S,) the prompt with its padding, as the criteria expect it.
        criteria: Stopping criteria besides length and end-of-sequence tokens, which the steps respect already.
        streamer: Receives each token, if given.
        processors: Hold the scores that the criteria get.
    """
    generation, started, is_stopped = Generation(), time.perf_counter(), False
    for emitted, cost in steps:
        num_before = len(generation.tokens)
        for token in emitted:
            generation.tokens.append(token)
            if criteria:
                text: Any = torch.cat([prompt, prompt.new_tensor(generation.tokens)])[None]
                scores: Any = processors.scores(len(generation.tokens))
                is_stopped = bool(criteria(text, scores).item())
            if streamer is not None:
                streamer.put(torch.tensor([token]))
            if is_stopped:
                break
        num_kept = len(generation.tokens) - num_before
        generation.steps.append(replace(cost, emitted=num_kept, accepted=min(cost.accepted, num_kept)))
        if is_stopped:
            break
    generation.seconds = time.perf_counter() - started
    return generation


class _ProcessorsOfOneText(LogitsProcessor):
    """The logits processors of ``generate`` for one text of its batch, and a record of what they made of it.

    Processors may hold a value for each row of the batch (``prompt_ignore_length``), and they see the padding. So they
    get as many copies of the text as the batch has rows, each with the text's padding, and its own row is kept.

    Args:
        config: Says whether logits and scores are recorded.
        processors: What ``generate`` prepared for the batch.
        input_ids: (B, S) the padded prompts.
        row: Index of the text in the batch.
        prompt_length: Length of its prompt without padding.
    """

    def __init__(
        self,
        config: GenerationConfig,
        processors: LogitsProcessorList,
        input_ids: Tensor,
        row: int,
        prompt_length: int,
    ) -> None:
        self.processors, self.row, self.num_rows = processors, row, len(input_ids)
        self.padding = input_ids[row, : input_ids.shape[1] - prompt_length]
        self.returned = {name: bool(config.return_dict_in_generate and getattr(config, name)) for name in SCORE_OUTPUTS}
        self.read_text = any(self.returned.values()) or ScoreProcessors(processors).read_text
        self._recorded: list[tuple[Tensor, Tensor]] = []  # logits and scores (1, V) before each new token

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Process the logits (1, V) after a text (1, S)."""
        place = self.padding.device  # of the prompts, where transformers processes too
        text: Any = torch.cat([self.padding, input_ids[0].to(place)]).repeat(self.num_rows, 1)
        logits: Any = scores.to(place).repeat(self.num_rows, 1)
        processed = self.processors(text, logits)[self.row : self.row + 1]
        if any(self.returned.values()):
            self._recorded.append((logits, processed))
        return processed.to(scores.device)

    def scores(self, num_tokens: int) -> tuple[Tensor, ...] | None:
        """The scores (1, V) that decided the first tokens, or None if ``generate`` does not return scores."""
        scores = tuple(scores for _, scores in self._recorded[:num_tokens])
        return scores if self.returned["output_scores"] else None

    def logits(self, num_tokens: int) -> tuple[Tensor, ...] | None:
        """The logits (1, V) behind the first tokens, or None if ``generate`` does not return logits."""
        logits = tuple(logits for logits, _ in self._recorded[:num_tokens])
        return logits if self.returned["output_logits"] else None


def _sampler(config: GenerationConfig, processors: _ProcessorsOfOneText) -> Sampler:
    used = [processors] if processors.read_text else processors.processors
    return KeyedSampler(seed=int(torch.randint(2**62, ())), processors=used) if config.do_sample else Greedy(used)
