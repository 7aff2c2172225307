"""What all our proposers share: vLLM's configuration, the limits of a draft, and which requests get one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from logging import Logger, getLogger
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from data.hub import join_revision
from data.tokenizer import load_tokenizer
from drafters.protocol import Limits
from inference.verifier.base import BaseConfig
from inference.vllm.served_drafter import check_version

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

logger: Logger = getLogger("vllm.drafters")  # below vLLM's own logger, so that its handlers and levels apply
KEY = "drafter"
"""Entry of vLLM's ``--additional-config`` that names the drafter: a folder or a spec."""
GREEDY_ONLY = "greedy_only"
"""Entry that says that no request has a temperature above 0; see `sampler_loses_temperatures`."""
MOST_REQUESTS = "most_requests"
"""Entry with the largest number of requests in a step for which drafts are made."""


class Proposer(ABC):
    """A drafter as vLLM's ``custom_class`` hook calls it (``vllm/v1/spec_decode/custom_class_proposer.py``).

        --speculative-config '{"method": "custom_class", "model": "MODULE.CLASS", "num_speculative_tokens": 6}'
        --additional-config '{"drafter": "FOLDER"}'

    vLLM verifies the chains by its own rejection sampler, so the texts stay the base's own whatever is proposed. Raises
    ValueError if the drafter is missing or does not fit the base, or vLLM would verify it wrongly.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        import vllm
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

        check_version(vllm.__version__)
        self.vllm_config = vllm_config
        additional = vllm_config.additional_config
        options = additional if isinstance(additional, dict) else {}
        self.spec = str(options.get(KEY) or "")
        if not self.spec:
            raise ValueError(f'no drafter is named: add --additional-config \'{{"{KEY}": "FOLDER"}}\'')
        if not options.get(GREEDY_ONLY) and sampler_loses_temperatures():
            raise ValueError(
                "this build of vLLM loses the temperatures of requests as soon as it speculates, with any drafter, and "
                f'draws wrong tokens above temperature 0: send greedy requests only, and say so by "{GREEDY_ONLY}": '
                "true in --additional-config"
            )
        model: Any = vllm_config.model_config
        speculative: Any = vllm_config.speculative_config
        self.num_tokens = int(speculative.num_speculative_tokens)
        most, schedule = vllm_config.scheduler_config.max_num_seqs, speculative.num_speculative_tokens_per_batch_size
        self.lengths = [self.num_tokens] * (most + 1)
        """Largest number of draft tokens by the number of requests in a step; vLLM leaves it to a custom_class."""
        if schedule:
            self.lengths = build_dynamic_sd_schedule_lookup(schedule, most, self.num_tokens)
        if limit := options.get(MOST_REQUESTS):
            self.lengths = [length if number <= limit else 0 for number, length in enumerate(self.lengths)]
        tokenizer = load_tokenizer(join_revision(model.tokenizer, model.tokenizer_revision))
        self.base = BaseConfig(model.model, tokenizer, model.hf_text_config)
        ids = model.try_get_generation_config().get("eos_token_id")
        ids = model.hf_text_config.eos_token_id if ids is None else ids
        self.limits = Limits(self.num_tokens, eos=frozenset([ids] if isinstance(ids, int) else ids or ()))
        self.num_drafts = 0
        """Number of texts that a chain was asked for so far, one per request and step after its prefill."""

    def load_model(self, target_model: nn.Module) -> None:  # noqa: B027 - most proposers need nothing of the model
        """Read what the drafter needs of the base's model; vLLM calls it once, after loading the model."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return a chain for each of R requests; an empty one where a prompt is still being read, or R is too large.

        Args:
            sampled_token_ids: For each request the tokens that the last step emitted; none within a prompt.
            num_tokens_no_spec: (R or more,) lengths of the texts, the emitted tokens included.
            token_ids_cpu: (R or more, S) the texts.
            slot_mappings: Not used.
        """
        rows = [row for row, tokens in enumerate(sampled_token_ids) if tokens]
        self.num_drafts += len(rows)
        chains: list[list[int]] = [[] for _ in sampled_token_ids]
        longest = self.lengths[len(sampled_token_ids)]
        if rows and longest:
            texts = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in rows]
            for row, chain in zip(rows, self.draft(rows, texts), strict=True):
                chains[row] = [int(token) for token in chain[:longest]]
        return chains

    @abstractmethod
    def draft(self, rows: list[int], texts: list[np.ndarray]) -> list[list[int]]:
        """Return the chains of N requests, from their rows in vLLM's batch and their texts.

        The last token of a text is the root, which the base has not read yet.
        """


def sampler_loses_temperatures() -> bool:
    """Whether vLLM's rejection sampler computes with wrong temperatures, as its CPU build 0.32 does.

    There the kernel that repeats each request's temperature for its draft tokens converts its output to int64, and
    drops the copy that it has filled (``vllm/utils/cpu_triton_utils.py``, ``_expand_kernel_impl``). Greedy requests
    are not affected.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    if not current_platform.is_cpu():
        return False
    temperatures = torch.rand(2)
    repeated = expand_batch_to_tokens(temperatures, torch.tensor([1, 3]), 3)
    return not torch.equal(repeated, temperatures[[0, 1, 1]])
