"""What a call of transformers' ``generate`` asks of the decoding loop, and what of it is refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation import logits_process
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.utils import GenerationMixin

from inference.verifier.base import Base
from inference.verifier.processing import ScoreProcessors

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

# Processors that read the text but keep no state; `ScoreProcessors` knows those that read a row of scores only.
STATELESS_PROCESSORS = {
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
}
CACHE_NAMES = {"cache", "past_key_values"}  # since transformers 5.24 and before it
MODEL_INPUTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"} | CACHE_NAMES
EXTRA_OUTPUTS = ("output_attentions", "output_hidden_states")
SCORE_OUTPUTS = ("output_scores", "output_logits")


def find_generate_call(model: PreTrainedModel) -> Mapping[str, Any]:
    """Return the local variables of the call of ``model.generate`` that is running in this thread.

    transformers (5.23) hands neither the streamer nor the assistant model to a callable ``custom_generate``. The
    streamer is needed because ``generate`` has put the prompt into it, and its reader would never get the rest; the
    assistant model is needed to refuse it. So the call is looked up on the stack, below any number of wrappers.

    Raises:
        ValueError: ``model.generate`` is not running in this thread.
    """
    generate_code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is generate_code and frame.f_locals["self"] is model:
            return frame.f_locals
        frame = frame.f_back
    raise ValueError(
        "speculation was not called by the generate of this model in this thread, so its streamer is unknown: pass "
        "streamer=... on, or streamer=None if there is none"
    )


def unsupported(what: str) -> ValueError:
    return ValueError(
        f"speculation would not give generate's own result with {what}: leave it out, or call generate without "
        "custom_generate"
    )


def check_supported(
    config: GenerationConfig,
    assistant: PreTrainedModel | None,
    model_kwargs: Mapping[str, Any],
) -> None:
    """Raise ValueError if the call uses options that the engine does not support."""
    mode = config.get_generation_mode(assistant)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise unsupported(f"{mode.value.replace('_', ' ')} (num_beams, assistant_model, ...)")
    for output in EXTRA_OUTPUTS:
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
        if type(processor) not in STATELESS_PROCESSORS and ScoreProcessors([processor]).read_text
    ]
    if criteria or streamer is not None:
        what.append("a streamer or stopping criteria")
    if what:
        raise unsupported(f"{what[0]} with several texts at once")


def read_prompts(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[list[int]]:
    """Return the token ids of each prompt of (B, S) without its left padding.

    Raises:
        ValueError: Attention mask or position ids describe more than left padding.
    """
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    if mask.shape != input_ids.shape or (mask[:, 1:] < mask[:, :-1]).any():
        raise unsupported("an attention mask that hides more than padding on the left")
    positions = model_kwargs.get("position_ids")
    if positions is not None and ((positions.to(mask.device) - mask.cumsum(-1) + 1) * mask).any():
        raise unsupported("position_ids that do not count from the start of each text")
    return [row[real.bool()].tolist() for row, real in zip(input_ids, mask, strict=True)]


def count_new_tokens(base: Base, padded_length: int, longest: int, max_lengths: Sequence[int]) -> int:
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
