"""Speculative decoding inside transformers' own ``model.generate``, passed to it as ``custom_generate``."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from data.tokenizer import load_tokenizer
from drafters.protocol import Drafter
from inference import drafter_specs
from inference.arguments import checks_arguments
from inference.drafter_specs import AnyDrafter
from inference.generation import acquire_runner
from inference.verifier.base import Base
from inference.verifier.processing import ScoreProcessors, is_one_of
from inference.verifier.runner import Runner
from inference.verifier.sampling import Greedy, KeyedSampler, Sampler
from inference.verifier.session import Generation, Session, Step, acceptance_length

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
    from transformers.generation.streamers import BaseStreamer

CACHE_NAMES = {"cache", "past_key_values"}  # since transformers 5.24 and before it
MODEL_INPUTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"} | CACHE_NAMES
SCORE_OUTPUTS = ("output_scores", "output_logits")
# Processors that read the text but keep no state; `ScoreProcessors` knows those that read a row of scores only.
STATELESS_PROCESSORS = {
    "EncoderNoRepeatNGramLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor", "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor",
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor",
}  # fmt: skip


class Speculation:
    """A decoding loop for ``model.generate``: ``custom_generate=Speculation("anpd")``.

    Greedy text is the same as without speculation, token for token. Sampled text follows the model's distribution after
    the requested temperature, top_k, top_p and so on; its draws are others than without speculation, keyed by a number
    from torch's global generator, so that ``torch.manual_seed`` repeats them. Several prompts are decoded one by one.

    Logits processors, those of ``generate`` (repetition_penalty, bad_words_ids, ...) and your own, are called as
    without speculation: once for each new token, in order, with the text before it. So they may even keep a state.
    Several texts at once take only transformers' own processors. Stopping criteria see the text grow token by token,
    after each step, and its scores if ``generate`` returns them. In place of ``stop_strings``, whose tokenizer is not
    passed on, use ``stopping_criteria=[StopStringCriteria(tokenizer, [...])]``.

    Threads that share a model need a `Speculation` each, with a drafter of its own.

    Args:
        drafter: Name of a drafter as on the command line (``anpd``, ``ctc=FOLDER``), built at the first call with a
            model and kept; or a drafter object.
        tokenizer: Tokenizer of the model, needed if the drafter comes from a folder, which is checked against it. By
            default it is loaded from where the model was loaded from.
        check, graphed: As in `inference.generation.GenerateOptions`.
    """

    @checks_arguments
    def __init__(
        self,
        drafter: Any = "anpd",  # AnyDrafter, see `resolve`
        tokenizer: PreTrainedTokenizerBase | None = None,
        check: bool = True,
        graphed: bool | None = None,
    ) -> None:
        self.drafter = drafter_specs.resolve(drafter)
        self.tokenizer, self.check, self.graphed = tokenizer, check, graphed
        self.generations: list[Generation] = []  # of the last call, one per prompt
        self._built: tuple[Runner, Drafter] | None = None
        self._in_use = threading.Lock()

    @property
    def steps(self) -> list[Step]:
        """Cost of each base forward of the last call; the first of each prompt is its prefill."""
        return [step for generation in self.generations for step in generation.steps]

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per base forward in the last call, prefills excluded; None if there was no other forward."""
        return acceptance_length(generation.steps for generation in self.generations)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode prompts (B, S), padded on the left, to (B, S + N), padded on the right; called by ``generate``.

        A wrapper that calls from another thread than ``generate`` adds ``streamer``, None if there is none. Raises
        ValueError if the call uses an option that would change the text or is not supported, or this object is decoding
        already.
        """
        if not self._in_use.acquire(blocking=False):
            raise ValueError("this Speculation object is already decoding: make one for each thread")
        try:
            call = model_kwargs if "streamer" in model_kwargs else find_generate_call(model)
            streamer, assistant = call["streamer"], call.get("assistant_model")
            model_kwargs.pop("streamer", None)
            max_lengths, eos, criteria = list[int](), set[int](), StoppingCriteriaList()
            for criterion in stopping_criteria:
                if type(criterion) is MaxLengthCriteria:
                    max_lengths.append(criterion.max_length)
                elif type(criterion) is EosTokenCriteria:
                    eos.update(criterion.eos_token_id.flatten().tolist())
                else:
                    criteria.append(criterion)
            check_supported(generation_config, assistant, model_kwargs)
            if len(input_ids) > 1:
                check_supported_in_batch(generation_config, logits_processor, criteria, streamer)
            prompts = read_prompts(input_ids, model_kwargs)
            base = self._base(model)
            self.generations = []
            with acquire_runner(base) as runner:
                max_new_tokens = count_new_tokens(base, input_ids.shape[1], max(map(len, prompts)), max_lengths)
                for row, prompt in enumerate(prompts):
                    processors = _ProcessorsOfOneText(generation_config, logits_processor, input_ids, row, len(prompt))
                    used = [processors] if processors.read_text else processors.processors
                    sampler: Sampler = Greedy(used)
                    if generation_config.do_sample:
                        sampler = KeyedSampler(seed=int(torch.randint(2**62, ())), processors=used)
                    session = Session(runner, self._drafter(runner), sampler)
                    steps = session.decode(prompt, max_new_tokens, frozenset(eos))
                    self.generations.append(_collect(steps, input_ids[row], criteria, streamer, processors))
        finally:
            self._in_use.release()
        if streamer is not None:
            streamer.end()
        answers = [input_ids.new_tensor(generation.tokens) for generation in self.generations]
        pad = generation_config._pad_token_tensor
        padding_value = 0 if pad is None else pad.item()
        padded = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=padding_value)
        sequences: Any = torch.cat([input_ids, padded], dim=1)
        if not generation_config.return_dict_in_generate:
            return sequences
        scores: Any = processors.recorded("output_scores", padded.shape[1])
        logits: Any = processors.recorded("output_logits", padded.shape[1])
        return GenerateDecoderOnlyOutput(sequences, scores=scores, logits=logits)

    def _base(self, model: PreTrainedModel) -> Base:
        """Wrap the model; its tokenizer is loaded only if the drafter's folder is to be checked against it."""
        name = getattr(model, "name_or_path", "")
        tokenizer = self.tokenizer
        if tokenizer is None and isinstance(self.drafter, str) and drafter_specs.split(self.drafter).file:
            if not name:
                raise ValueError(
                    f"{self.drafter} is checked against the tokenizer: pass Speculation(..., tokenizer=...)"
                )
            tokenizer = load_tokenizer(name)
        # Without a tokenizer nothing is encoded or decoded: `generate` passes token ids and end-of-sequence tokens.
        name, known_tokenizer = name or type(model).__name__, cast(PreTrainedTokenizerBase, tokenizer)
        return Base(name, model, known_tokenizer, self.check, graphed=self.graphed)

    def _drafter(self, runner: Runner) -> Drafter:
        """Build the drafter at the first call with this runner."""
        if not self._built or self._built[0] is not runner:
            self._built = runner, drafter_specs.make(self.drafter, runner)
        return self._built[1]


def speculate(
    model: PreTrainedModel, input_ids: Tensor, *, drafter: AnyDrafter = "anpd", **arguments: Any
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode by one call of a new `Speculation`, with a drafter's name as on the command line, or a drafter object.

    Use it as ``model.generate(**inputs, custom_generate=speculate, drafter="anpd")``. A drafter that is loaded from a
    folder is loaded again by every call; keep a `Speculation` object to avoid that.
    """
    return Speculation(drafter)(model, input_ids, **arguments)


# ---- what a call of ``generate`` asks for, and what of it is refused


def find_generate_call(model: PreTrainedModel) -> Mapping[str, Any]:
    """Return the local variables of the call of ``model.generate`` that is running in this thread.

    transformers hands neither the streamer nor the assistant model to a callable ``custom_generate``. ``generate`` has
    put the prompt into the streamer, so its reader would wait for the rest for ever; the assistant model is refused.
    Raises ValueError if ``model.generate`` is not running in this thread.
    """
    code, frame = inspect.unwrap(GenerationMixin.generate).__code__, inspect.currentframe()
    while frame is not None and not (frame.f_code is code and frame.f_locals["self"] is model):
        frame = frame.f_back
    if frame is None:
        raise ValueError(
            "speculation was not called by the generate of this model in this thread, so its streamer is unknown: pass "
            "streamer=... on, or streamer=None if there is none"
        )
    return frame.f_locals


def unsupported(what: str) -> ValueError:
    return ValueError(
        f"speculation would not give generate's own result with {what}: leave it out, or call generate without "
        "custom_generate"
    )


def check_supported(
    config: GenerationConfig, assistant: PreTrainedModel | None, model_kwargs: Mapping[str, Any]
) -> None:
    """Raise ValueError if the call uses options that the decoding loop does not support."""
    mode = config.get_generation_mode(assistant)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise unsupported(f"{mode.value.replace('_', ' ')} (num_beams, assistant_model, ...)")
    for output in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, output):
            raise unsupported(output)
    for name, value in model_kwargs.items():
        if value is not None and name not in MODEL_INPUTS:
            raise unsupported(name)
    for name in sorted(CACHE_NAMES):
        if getattr(model_kwargs.get(name), "_is_user_defined", False):
            raise unsupported(f"a cache of your own ({name}=...)")


def check_supported_in_batch(
    config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList, streamer: object
) -> None:
    """Raise ValueError if the call uses options that need all texts of a batch side by side: we decode one by one."""
    what = [output for output in SCORE_OUTPUTS if config.return_dict_in_generate and getattr(config, output)]
    # Any other class may keep a state, which transformers' loop would advance once for all texts.
    what += [
        type(processor).__name__
        for processor in processors
        if not is_one_of(STATELESS_PROCESSORS, processor) and ScoreProcessors([processor]).read_text
    ]
    if criteria or streamer is not None:
        what.append("a streamer or stopping criteria")
    if what:
        raise unsupported(f"{what[0]} with several texts at once")


def read_prompts(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[list[int]]:
    """Return the token ids of each prompt of (B, S) without its left padding.

    Raises ValueError if the attention mask or position ids describe more than left padding.
    """
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    if mask.shape != input_ids.shape or (mask[:, 1:] < mask[:, :-1]).any():
        raise unsupported("an attention mask that hides more than padding on the left")
    positions = model_kwargs.get("position_ids")
    if positions is not None and ((positions.to(mask.device) - mask.cumsum(-1) + 1) * mask).any():
        raise unsupported("position_ids that do not count from the start of each text")
    return [row[real.bool()].tolist() for row, real in zip(input_ids, mask, strict=True)]


def count_new_tokens(base: Base, padded_length: int, longest: int, max_lengths: list[int]) -> int:
    """Return the maximum number of new tokens of each text.

    transformers counts the padding in its maximum lengths, of which the smallest applies; without one, only the context
    of the base limits the text behind the longest prompt. Raises ValueError if prompt and text do not fit into it.
    """
    max_new_tokens = max(1, min(max_lengths) - padded_length) if max_lengths else base.context_length - longest
    if longest + max_new_tokens > base.context_length:
        raise ValueError(
            f"{longest} tokens and {max_new_tokens} more do not fit into the context of {base.name}, which ends at "
            f"{base.context_length}: lower max_new_tokens"
        )
    return max_new_tokens


# ---- decoding one text


def _collect(
    steps: Iterator[tuple[list[int], Step]],
    prompt: Tensor,
    criteria: StoppingCriteriaList,
    streamer: BaseStreamer | None,
    processors: _ProcessorsOfOneText,
) -> Generation:
    """Run the steps of one text; criteria and streamer get every token as if it had been a step of its own.

    The criteria see the prompt (S,) with its padding, and the scores that the processors hold.
    """
    generation, started, is_stopped = Generation(), time.perf_counter(), False
    for emitted, cost in steps:
        num_before = len(generation.tokens)
        for token in emitted:
            generation.tokens.append(token)
            if criteria:
                text: Any = torch.cat([prompt, prompt.new_tensor(generation.tokens)])[None]
                scores: Any = processors.recorded("output_scores", len(generation.tokens))
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
    """

    def __init__(
        self, config: GenerationConfig, processors: LogitsProcessorList, input_ids: Tensor, row: int, length: int
    ) -> None:
        self.processors, self.row, self.num_rows = processors, row, len(input_ids)
        self.padding = input_ids[row, : input_ids.shape[1] - length]
        self.returned = [name for name in SCORE_OUTPUTS if config.return_dict_in_generate and getattr(config, name)]
        self.read_text = bool(self.returned) or ScoreProcessors(processors).read_text
        self._recorded: list[dict[str, Tensor]] = []  # logits and scores (1, V) before each new token

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Process the logits (1, V) after a text (1, S)."""
        place = self.padding.device  # of the prompts, where transformers processes too
        text: Any = torch.cat([self.padding, input_ids[0].to(place)]).repeat(self.num_rows, 1)
        logits: Any = scores.to(place).repeat(self.num_rows, 1)
        processed = self.processors(text, logits)[self.row : self.row + 1]
        if self.returned:
            self._recorded.append({"output_logits": logits, "output_scores": processed})
        return processed.to(scores.device)

    def recorded(self, name: str, num_tokens: int) -> tuple[Tensor, ...] | None:
        """The scores or logits (1, V) that decided the first tokens, or None if ``generate`` does not return them."""
        return tuple(record[name] for record in self._recorded[:num_tokens]) if name in self.returned else None
