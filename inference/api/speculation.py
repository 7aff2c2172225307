"""Speculation inside transformers' own ``model.generate``, handed over as ``custom_generate``."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

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

# These look at one row of scores and at nothing else, so the rows of a whole draft tree may go through them at once.
WARPERS = {
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
    """Drafts and verifies in place of transformers' own loop: ``custom_generate=Speculation("anpd")``.

    Greedy text is what the model writes without it, token for token. Sampled text follows the model's law after the
    temperature, top_k, top_p and the like that were asked for; its draws are keyed by a number from torch's global
    generator, so ``torch.manual_seed`` repeats them. Of several prompts each is decoded alone.

    Stopping criteria see the text grow token by token. transformers loses the tokenizer that ``stop_strings`` needs
    on the way to a callable: pass ``stopping_criteria=[StopStringCriteria(tokenizer, [...])]`` instead.

    Args:
        drafter: A name as on the command line (``anpd``, ``ctc=FOLDER``), built at the first call with a model and
            kept; or an object.
        tokenizer: Of the model, for drafters whose folder is checked against it; if not given, it is looked for where
            the model was loaded from.
        cache: ``static``, one buffer that is kept with the model from call to call, or ``dynamic``, transformers' own.
    """

    def __init__(
        self,
        drafter: str | Drafter = "anpd",
        tokenizer: PreTrainedTokenizerBase | None = None,
        cache: CacheKind = "static",
    ) -> None:
        self.drafter, self.tokenizer, self.cache = drafter, tokenizer, cache
        self.generations: list[Generation] = []  # of the last call, one a prompt
        self._built: tuple[Runner, Drafter] | None = None

    @property
    def steps(self) -> list[StepCost]:
        """What each base forward of the last call cost; each prompt's first is its prefill."""
        return [step for generation in self.generations for step in generation.steps]

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a base forward in the last call, prefills excluded; None where these were all."""
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
        """What ``generate`` calls: prompts (B, S) in, texts (B, S + N) out, padded behind what ended early.

        Raises:
            ValueError: The call asks for something that cannot be done without changing the text.
        """
        streamer, assistant = _lost_on_the_way()
        watching = StoppingCriteriaList(
            one for one in stopping_criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)
        )
        _refuse(generation_config, logits_processor, assistant, model_kwargs)
        if len(input_ids) > 1 and (watching or streamer is not None):
            raise _refusal("a streamer or stopping criteria with several texts at once")
        prompts = _prompts(input_ids, model_kwargs)
        ends = [one.max_length for one in stopping_criteria if type(one) is MaxLengthCriteria]
        eos = [one.eos_token_id.flatten().tolist() for one in stopping_criteria if type(one) is EosTokenCriteria]
        eos = frozenset(chain.from_iterable(eos))
        base = self._base(model)
        self.generations = []
        with acquire_runner(base, self.cache) as runner:
            room = _room(base, input_ids.shape[1], max(map(len, prompts)), ends)
            for row, prompt in zip(input_ids, prompts, strict=True):
                sampler = _sampler(generation_config, logits_processor)
                session = Session(runner, self._drafter(runner, sampler), sampler)
                self.generations.append(_run(session, prompt, room, eos, row, watching, streamer))
        if streamer is not None:
            streamer.end()
        texts = [input_ids.new_tensor(generation.tokens) for generation in self.generations]
        pad = generation_config._pad_token_tensor
        texts = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=0 if pad is None else pad.item())
        sequences = torch.cat([input_ids, texts], dim=1)
        return GenerateDecoderOnlyOutput(sequences) if generation_config.return_dict_in_generate else sequences

    def _base(self, model: PreTrainedModel) -> Base:
        name = getattr(model, "name_or_path", "")
        tokenizer = self.tokenizer
        if tokenizer is None and isinstance(self.drafter, str) and catalogue.split(self.drafter)[1]:
            if not name:
                raise ValueError(
                    f"{self.drafter} is checked against the tokenizer: pass Speculation(..., tokenizer=...)"
                )
            tokenizer = load_tokenizer(name)
        return Base(name or type(model).__name__, model, tokenizer)

    def _drafter(self, runner: Runner, sampler: Sampler) -> Drafter:
        if not self._built or self._built[0] is not runner:
            self._built = runner, make_drafter(self.drafter, runner, getattr(sampler, "seed", None))
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
    """``model.generate(**inputs, custom_generate=speculate, drafter="anpd")``: one call of a new `Speculation`.

    A drafter that is named by a folder is loaded by every call: keep a `Speculation` instead.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: From ``generate``.
        drafter: A name as on the command line, or an object.

    Raises:
        ValueError: As `Speculation`.
    """
    return Speculation(drafter)(
        model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
    )


def _run(
    session: Session,
    prompt: list[int],
    room: int,
    eos: frozenset[int],
    row: Tensor,
    watching: StoppingCriteriaList,
    streamer: BaseStreamer | None,
) -> Generation:
    """Write one text; criteria and streamer get to see every token of a step as if it were a step of its own."""
    written, started = Generation(), time.perf_counter()
    for emitted, cost in session.decode(prompt, room, eos):
        before = len(written.tokens)
        for token in emitted:
            written.tokens.append(token)
            stopped = watching and watching(torch.cat([row, row.new_tensor(written.tokens)])[None], None).item()
            if streamer is not None:
                streamer.put(torch.tensor([token]))
            if stopped:
                break
        kept = len(written.tokens) - before
        written.steps.append(replace(cost, emitted=kept, accepted=min(cost.accepted, kept)))
        if stopped:
            break
    written.seconds = time.perf_counter() - started
    return written


class _Warped(KeyedSampler):
    """Draws after the warpers that ``generate`` made."""

    def __init__(self, warpers: LogitsProcessorList, seed: int) -> None:
        super().__init__(seed=seed)
        self._warpers = warpers


class _WarpedGreedy(Greedy):
    """The most probable token after the warpers, which may remove the model's own."""

    def __init__(self, warpers: LogitsProcessorList) -> None:
        self._warpers = warpers

    def decide(self, logits: Tensor, tree: DraftTree, positions: Sequence[int]) -> Tensor:
        return super().decide(self._warpers(None, logits.float()), tree, positions)


def _sampler(config: GenerationConfig, warpers: LogitsProcessorList) -> Sampler:
    if config.do_sample:
        return _Warped(warpers, int(torch.randint(2**62, ())))
    return _WarpedGreedy(warpers) if warpers else Greedy()


def _lost_on_the_way() -> tuple[BaseStreamer | None, PreTrainedModel | None]:
    """The streamer and the assistant model that ``generate`` was given.

    transformers (5.23) hands neither to a callable, though it has put the prompt into the streamer, whose reader would
    then wait for ever. They are looked up where they are: among the locals of ``generate``, which has called us.
    """
    frame = sys._getframe(2)
    if frame.f_code is speculate.__code__:
        frame = frame.f_back
    found = frame.f_locals if frame.f_code is inspect.unwrap(GenerationMixin.generate).__code__ else {}
    return found.get("streamer"), found.get("assistant_model")


def _refusal(what: str) -> ValueError:
    return ValueError(
        f"speculation would not give generate's own result with {what}: leave it out, or call generate without "
        "custom_generate"
    )


def _refuse(
    config: GenerationConfig,
    processors: LogitsProcessorList,
    assistant: PreTrainedModel | None,
    model_kwargs: Mapping[str, Any],
) -> None:
    """Raise ValueError where the call asks for what the engine does not do."""
    mode = config.get_generation_mode(assistant)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise _refusal(f"{mode.value.replace('_', ' ')} (num_beams, assistant_model, ...)")
    for processor in processors:
        if type(processor) not in WARPERS:
            raise _refusal(f"{type(processor).__name__} (repetition_penalty, min_length, ...)")
    for output in EXTRA_OUTPUTS:
        if config.return_dict_in_generate and getattr(config, output):
            raise _refusal(output)
    for name, value in model_kwargs.items():
        if value is not None and name not in MODEL_INPUTS:
            raise _refusal(name)
    if getattr(model_kwargs.get("past_key_values"), "_is_user_defined", False):
        raise _refusal("past_key_values")


def _prompts(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[list[int]]:
    """Each prompt (B, S) without the padding on its left."""
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    if mask.shape != input_ids.shape or (mask[:, 1:] < mask[:, :-1]).any():
        raise _refusal("an attention mask that hides more than padding on the left")
    positions = model_kwargs.get("position_ids")
    if positions is not None and ((positions.to(mask.device) - mask.cumsum(-1) + 1) * mask).any():
        raise _refusal("position_ids that do not count from the start of each text")
    return [row[real.bool()].tolist() for row, real in zip(input_ids, mask, strict=True)]


def _room(base: Base, width: int, longest: int, ends: Sequence[int]) -> int:
    """Tokens that may be written after prompts of this width, padding included."""
    room = max(1, min(ends) - width) if ends else base.context_length - longest
    if longest + room > base.context_length:
        raise ValueError(
            f"{longest} tokens and {room} more do not fit into the context of {base.name}, which ends at "
            f"{base.context_length}: lower max_new_tokens"
        )
    return room
