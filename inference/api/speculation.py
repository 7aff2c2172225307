"""Speculative decoding inside transformers' own ``model.generate``, passed to it as ``custom_generate``."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers.generation import logits_process
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from data.tokenizer import load_tokenizer
from drafters.protocol import Drafter
from drafters.tree import DraftTree
from inference.api.generation import acquire_runner, make_drafter
from inference.engine.base import Base
from inference.engine.cache import CacheKind
from inference.engine.runner import Runner
from inference.engine.sampling import Greedy, KeyedSampler, Sampler
from inference.engine.session import Generation, Session, StepCost
from inference.registry import catalogue
from inference.results import metrics

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer

# Processors that read nothing but one row of scores, so the rows of a whole draft tree can go through them at once.
ROWWISE_PROCESSORS = {
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.LogitNormalization,
}
MODEL_INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
EXTRA_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class Speculation:
    """A decoding loop for ``model.generate``: ``custom_generate=Speculation("anpd")``.

    Greedy text is the same as without speculation, token for token. Sampled text follows the model's distribution after
    the requested temperature, top_k, top_p and so on; its draws are keyed by a number from torch's global generator, so
    ``torch.manual_seed`` repeats them. Several prompts are decoded one after the other.

    Stopping criteria see the text grow token by token. ``stop_strings`` does not work, because transformers does not
    pass the tokenizer on; use ``stopping_criteria=[StopStringCriteria(tokenizer, [...])]`` instead.

    Args:
        drafter: Name of a drafter as on the command line (``anpd``, ``ctc=FOLDER``), built at the first call with a
            model and kept; or a drafter object.
        tokenizer: Tokenizer of the model, needed if the drafter comes from a folder, which is checked against it. By
            default it is loaded from where the model was loaded from.
        cache: Kind of the KV cache: ``static`` is one buffer that is kept with the model between calls, ``dynamic``
            transformers' own cache.
    """

    def __init__(
        self,
        drafter: str | Drafter = "anpd",
        tokenizer: PreTrainedTokenizerBase | None = None,
        cache: CacheKind = "static",
    ) -> None:
        self.drafter, self.tokenizer, self.cache = drafter, tokenizer, cache
        self.generations: list[Generation] = []  # of the last call, one per prompt
        self._built: tuple[Runner, Drafter] | None = None

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
            model, logits_processor, stopping_criteria, generation_config, model_kwargs: What ``generate`` prepared.
            input_ids: (B, S) prompts, padded on the left.

        Returns:
            (B, S + N) prompts and texts; texts that end early are padded on the right.

        Raises:
            ValueError: The call uses an option that would change the text, or that is not supported.
        """
        streamer, assistant = _unpassed_arguments()
        other_criteria = StoppingCriteriaList(
            each for each in stopping_criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria)
        )
        _check_supported(generation_config, logits_processor, assistant, model_kwargs)
        if len(input_ids) > 1 and (other_criteria or streamer is not None):
            raise _unsupported("a streamer or stopping criteria with several texts at once")
        prompts = _prompts(input_ids, model_kwargs)
        max_lengths = [each.max_length for each in stopping_criteria if type(each) is MaxLengthCriteria]
        eos_criteria = [each for each in stopping_criteria if type(each) is EosTokenCriteria]
        eos = frozenset(chain.from_iterable(each.eos_token_id.flatten().tolist() for each in eos_criteria))
        base = self._base(model)
        self.generations = []
        with acquire_runner(base, self.cache) as runner:
            max_new_tokens = _max_new_tokens(base, input_ids.shape[1], max(map(len, prompts)), max_lengths)
            for row, prompt in zip(input_ids, prompts, strict=True):
                sampler = _sampler(generation_config, logits_processor)
                steps = Session(runner, self._drafter(runner), sampler).decode(prompt, max_new_tokens, eos)
                self.generations.append(_collect(steps, row, other_criteria, streamer))
        if streamer is not None:
            streamer.end()
        answers = [input_ids.new_tensor(generation.tokens) for generation in self.generations]
        pad = generation_config._pad_token_tensor
        padding_value = 0 if pad is None else pad.item()
        padded = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=padding_value)
        sequences: Any = torch.cat([input_ids, padded], dim=1)
        return GenerateDecoderOnlyOutput(sequences) if generation_config.return_dict_in_generate else sequences

    def _base(self, model: PreTrainedModel) -> Base:
        """Wrap the model; its tokenizer is loaded only if the drafter's folder is to be checked against it."""
        name = getattr(model, "name_or_path", "")
        tokenizer = self.tokenizer
        if tokenizer is None and isinstance(self.drafter, str) and catalogue.split(self.drafter)[1]:
            if not name:
                raise ValueError(
                    f"{self.drafter} is checked against the tokenizer: pass Speculation(..., tokenizer=...)"
                )
            tokenizer = load_tokenizer(name)
        # Without a tokenizer nothing is encoded or decoded: `generate` passes token ids and end-of-sequence tokens.
        return Base(name or type(model).__name__, model, cast("PreTrainedTokenizerBase", tokenizer))

    def _drafter(self, runner: Runner) -> Drafter:
        """Build the drafter at the first call with this runner."""
        if not self._built or self._built[0] is not runner:
            self._built = runner, make_drafter(self.drafter, runner)
        return self._built[1]


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
) -> Generation:
    """Run the steps of one text; criteria and streamer get every token as if it had been a step of its own.

    Args:
        steps: The steps of `Session.decode`.
        prompt: (S,) the prompt with its padding, as the criteria expect it.
        criteria: Stopping criteria besides length and end-of-sequence tokens, which the steps respect already.
        streamer: Receives each token, if given.
    """
    generation, started, is_stopped = Generation(), time.perf_counter(), False
    for emitted, cost in steps:
        num_before = len(generation.tokens)
        for token in emitted:
            generation.tokens.append(token)
            if criteria:
                text: Any = torch.cat([prompt, prompt.new_tensor(generation.tokens)])[None]
                scores: Any = None
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


class _ProcessedSampler(KeyedSampler):
    """Draws from the distribution after the logits processors that ``generate`` made."""

    def __init__(self, processors: LogitsProcessorList, seed: int) -> None:
        super().__init__(seed=seed)
        self._processors = processors


class _ProcessedGreedy(Greedy):
    """Picks the most probable token after the logits processors, which may exclude the model's own argmax."""

    def __init__(self, processors: LogitsProcessorList) -> None:
        self._processors: Any = processors  # called without the token ids that its type asks for

    def decide(self, logits: Tensor, tree: DraftTree, positions: Sequence[int]) -> Tensor:
        return super().decide(self._processors(None, logits.float()), tree, positions)


def _sampler(config: GenerationConfig, processors: LogitsProcessorList) -> Sampler:
    if config.do_sample:
        return _ProcessedSampler(processors, int(torch.randint(2**62, ())))
    return _ProcessedGreedy(processors) if processors else Greedy()


def _unpassed_arguments() -> tuple[BaseStreamer | None, PreTrainedModel | None]:
    """Return the streamer and the assistant model that were passed to ``generate``.

    transformers (5.23) passes neither on to a callable ``custom_generate``. The streamer is needed because ``generate``
    has put the prompt into it, and its reader would never get the rest. The assistant model is needed to refuse
    it. So both are read from the local variables of ``generate``, two frames up the call stack (three if it called
    `speculate`). If anything else calls us, such as a wrapper around `speculate`, nothing is found there: the streamer
    is not served and an assistant model is ignored.
    """
    frame: FrameType | None = sys._getframe(2)
    if frame and frame.f_code is speculate.__code__:
        frame = frame.f_back
    is_generate = frame is not None and frame.f_code is inspect.unwrap(GenerationMixin.generate).__code__
    local_variables = frame.f_locals if frame and is_generate else {}
    return local_variables.get("streamer"), local_variables.get("assistant_model")


def _unsupported(what: str) -> ValueError:
    return ValueError(
        f"speculation would not give generate's own result with {what}: leave it out, or call generate without "
        "custom_generate"
    )


def _check_supported(
    config: GenerationConfig,
    processors: LogitsProcessorList,
    assistant: PreTrainedModel | None,
    model_kwargs: Mapping[str, Any],
) -> None:
    """Raise ValueError if the call uses options that the engine does not support."""
    mode = config.get_generation_mode(assistant)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise _unsupported(f"{mode.value.replace('_', ' ')} (num_beams, assistant_model, ...)")
    for processor in processors:
        if type(processor) not in ROWWISE_PROCESSORS:
            raise _unsupported(f"{type(processor).__name__} (repetition_penalty, min_length, ...)")
    for output in EXTRA_OUTPUTS:
        if config.return_dict_in_generate and getattr(config, output):
            raise _unsupported(output)
    for name, value in model_kwargs.items():
        if value is not None and name not in MODEL_INPUTS:
            raise _unsupported(name)
    if getattr(model_kwargs.get("past_key_values"), "_is_user_defined", False):
        raise _unsupported("past_key_values")


def _prompts(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[list[int]]:
    """Return the token ids of each prompt of (B, S) without its left padding.

    Raises:
        ValueError: Attention mask or position ids describe more than left padding.
    """
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    if mask.shape != input_ids.shape or (mask[:, 1:] < mask[:, :-1]).any():
        raise _unsupported("an attention mask that hides more than padding on the left")
    positions = model_kwargs.get("position_ids")
    if positions is not None and ((positions.to(mask.device) - mask.cumsum(-1) + 1) * mask).any():
        raise _unsupported("position_ids that do not count from the start of each text")
    return [row[real.bool()].tolist() for row, real in zip(input_ids, mask, strict=True)]


def _max_new_tokens(base: Base, padded_length: int, longest: int, max_lengths: Sequence[int]) -> int:
    """Return the maximum number of new tokens of each text.

    Args:
        base: The base.
        padded_length: Length S of the prompts with their padding, which transformers counts.
        longest: Length of the longest prompt without padding.
        max_lengths: Maximum lengths of padded prompt and text, of which the smallest applies; if there are none, only
            the context limits the text.

    Raises:
        ValueError: Prompt and text do not fit into the context.
    """
    max_new_tokens = max(1, min(max_lengths) - padded_length) if max_lengths else base.context_length - longest
    if longest + max_new_tokens > base.context_length:
        raise ValueError(
            f"{longest} tokens and {max_new_tokens} more do not fit into the context of {base.name}, which ends at "
            f"{base.context_length}: lower max_new_tokens"
        )
    return max_new_tokens
