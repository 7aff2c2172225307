"""CTC and block drafters as a proposer of vLLM: chains for the whole batch from one pass over their frames."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from drafters import checkpoint
from drafters.nn.draft_cache import Context
from drafters.parallel import ParallelDrafter
from drafters.protocol import BaseWeights
from inference.vllm.proposer import Proposer, logger
from inference.vllm.served_drafter import read_parallel, spec_of

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

GIB = 1 << 30
MAX_GATHERED_BYTES = 1 << 30
"""Keys and values that one draft gathers at most, unless a single text has more."""


@dataclass(frozen=True)
class FedBatch:
    """Where the last forward of the base put the keys and values of each request."""

    block_table: Tensor  # (R, blocks) physical blocks of each request
    block_size: int  # slots of a block

    def slots(self, rows: list[int], lengths: Tensor) -> Tensor:
        """Physical slots (N, S) of the first positions of N requests, S being the largest of their lengths (N,).

        Behind the length of a request they are slot 0.
        """
        positions = torch.arange(int(lengths.max()), device=self.block_table.device)
        blocks = self.block_table[rows].long()[:, positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        return slots * (positions < lengths.to(positions.device)[:, None])


def groups(lengths: list[int], max_positions: int) -> list[list[int]]:
    """Divide texts into groups of similar lengths, each of which fits into a tensor (texts, longest text).

    Only a single text may have more than ``max_positions``.

    >>> groups([3, 100, 5, 4], max_positions=15)
    [[0, 3, 2], [1]]
    """
    divided: list[list[int]] = []
    for text in sorted(range(len(lengths)), key=lengths.__getitem__):
        if divided and (len(divided[-1]) + 1) * lengths[text] <= max_positions:
            divided[-1].append(text)
        else:
            divided.append([text])
    return divided


class SlotCache:
    """Keys and values of a drafter's trunk, one row for every slot of the base's own cache.

    A position's keys and values lie at the slot of its base keys and values. So whatever vLLM does with its blocks
    holds for ours too: shared prefixes are shared, a preempted request is fed again, and rejected drafts are written
    over.
    """

    def __init__(self, drafter: ParallelDrafter, num_slots: int) -> None:
        layer: Any = drafter.trunk.layers[0]
        attention, weight = layer.self_attn, drafter.frame_embedding
        self.num_slots, self.num_layers = num_slots, len(drafter.trunk.layers)
        shape = self.num_layers, 2, num_slots, attention.num_key_heads, attention.head_dim
        self._rows = torch.zeros(shape, dtype=weight.dtype, device=weight.device)

    @property
    def num_bytes(self) -> int:
        return self._rows.numel() * self._rows.element_size()

    def write(self, slots: Tensor, context: Context) -> None:
        """Store the keys and values of N positions, as `Trunk.context` gives them: for each layer two (1, h, N, d)."""
        for layer, pair in enumerate(context):
            for part, states in enumerate(pair):
                self._rows[layer, part, slots] = states[0].transpose(0, 1)

    def read(self, slots: Tensor) -> Context:
        """The keys and values at slots (B, S): for each layer two tensors of (B, h, S, d)."""
        layers = self._rows[:, :, slots].transpose(-3, -2)
        return [(keys, values) for keys, values in layers]


class ParallelProposer(Proposer):
    """Serves a CTC or block drafter; ``drafter`` is the folder that `drafters export` wrote.

    vLLM gives a proposer of this kind no hidden states, so it reads those that the model runner holds for EAGLE-3 after
    each forward: outside of CUDA graphs and compiled code, and with the batch's own lengths, which graphs pad.
    Raises ValueError if the folder is missing or damaged, the drafter is of another kind or was trained for another
    base, or the engine divides a forward of the base.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        for name in ("pipeline_parallel_size", "decode_context_parallel_size", "num_ubatches"):
            if getattr(vllm_config.parallel_config, name) > 1:
                raise ValueError(f"the drafter needs all layers and positions of a forward: vLLM's {name} has to be 1")
        folder, config = read_parallel(spec_of(self.spec), self.base, self.num_tokens)
        drafter, _ = checkpoint.load(folder, vllm_config.model_config.dtype, config)
        self.drafter = cast(ParallelDrafter, drafter)
        model: Any = vllm_config.model_config  # with embeddings for images, and for prompts of embeddings
        if self.drafter.tokens_in_context and (model.is_multimodal_model or model.enable_prompt_embeds):
            raise ValueError(
                f"{self.base.name} takes embeddings in place of tokens in vLLM, and the drafter reads tokens: "
                "train one with tokens_in_context: false"
            )
        self.weights: BaseWeights | None = None
        wanted = self.drafter.required_outputs.hidden_layers
        self.inner_layers = tuple(sorted({layer for layer in wanted if layer not in (-1, self.base.shape.num_layers)}))
        self.cache: SlotCache | None = None
        self.fed: FedBatch | None = None

    def load_model(self, target_model: nn.Module) -> None:
        """Attach the base's embedding and LM head, and read what the model runner holds from now on.

        Raises ValueError if the model does not give out the hidden states that the drafter reads.
        """
        model: Any = target_model
        try:
            embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        except AttributeError as error:
            raise ValueError(f"{self.base.name} has no plain embedding and LM head in vLLM ({error})") from error
        rows = slice(self.base.shape.vocab_size)  # without those that vLLM pads with
        self.weights = BaseWeights(_whole(embedding.data)[rows], _whole(head.data)[rows])
        self.drafter.to(embedding.device).attach_base_weights(self.weights)
        self.runner = sys._getframe(1).f_locals["self"]  # that called: vLLM hands over only its model
        if self.inner_layers:
            if not hasattr(model, "set_aux_hidden_state_layers"):
                raise ValueError(
                    f"vLLM gives out no inner hidden states of {type(model).__name__}, and the drafter reads layers "
                    f"{list(self.inner_layers)}: train one on the last hidden state (hidden_layers: [-1])"
                )
            self.runner.use_aux_hidden_state_outputs = True
            # The runner takes the layers from here, counted as ours: i is the output of layer i. In this place they are
            # also part of the key under which vLLM caches compiled models.
            draft_config: Any = self.vllm_config.speculative_config.draft_model_config
            draft_config.hf_config.eagle_aux_hidden_state_layer_ids = list(self.inner_layers)
        self.runner.initialize_kv_cache = _followed_by(self._reserve, self.runner.initialize_kv_cache)
        self.runner.execute_model = _followed_by(self._observe, self.runner.execute_model)

    @torch.inference_mode()
    def _observe(self) -> None:
        """Store the trunk's keys and values of every position that the base was fed."""
        assert self.weights is not None and self.cache is not None, "the model was not loaded"
        if (state := self.runner.execute_model_state) is None:  # there was nothing to feed
            return
        num_fed = state.scheduler_output.total_num_scheduled_tokens  # the tensors may be longer
        states = dict(zip(self.inner_layers, state.aux_hidden_states or (), strict=True))
        states |= {-1: state.hidden_states, self.base.shape.num_layers: state.hidden_states}
        hidden = torch.cat([states[layer][:num_fed] for layer in self.drafter.required_outputs.hidden_layers], dim=-1)
        tokens = self.runner.input_ids.gpu[None, :num_fed] if self.drafter.tokens_in_context else None
        positions = self.runner.positions[None, :num_fed]
        context = self.drafter.context(hidden[None], positions, tokens, self.weights.embedding)
        metadata = state.spec_decode_common_attn_metadata
        self.cache.write(metadata.slot_mapping[:num_fed].long(), context)
        self.fed = FedBatch(metadata.block_table_tensor, self.runner.input_batch.block_table[0].block_size)

    def _reserve(self) -> None:
        """Reserve the cache in full, with one row for every slot that vLLM has, as soon as it knows how many."""
        config: Any = self.runner.kv_cache_config
        if len(config.kv_cache_groups) > 1:  # as where some layers have windows
            raise ValueError("vLLM keeps this base's layers in several KV cache groups: the drafter cannot follow them")
        spec = config.kv_cache_groups[0].kv_cache_spec
        span = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
        if span and not 0 < self.drafter.draft_options.window < span - spec.block_size:
            raise ValueError(
                f"vLLM frees what is {span} positions back, and the drafter attends to it: train or serve it with a "
                "smaller draft.window"
            )
        num_slots = config.num_blocks * spec.block_size
        if self.cache is None or self.cache.num_slots != num_slots:
            self.cache = None  # what measuring the memory has reserved
            self.cache = SlotCache(self.drafter, num_slots)
            logger.info(
                "%s: %.2f GiB reserved for the draft module's keys and values, %d slots as in the base's cache",
                self.spec,
                self.cache.num_bytes / GIB,
                num_slots,
            )

    @torch.inference_mode()
    def draft(self, rows: list[int], texts: list[np.ndarray]) -> list[list[int]]:
        assert self.weights is not None and self.cache is not None and self.fed is not None, "the base was not run"
        chains = dict[int, list[int]]()
        lengths = [len(text) - 1 for text in texts]  # the root is not fed yet
        for group in groups(lengths, MAX_GATHERED_BYTES * self.cache.num_slots // self.cache.num_bytes):
            anchors = torch.tensor([lengths[text] for text in group])  # their maximum is read here
            context = self.cache.read(self.fed.slots([rows[text] for text in group], anchors))
            tokens = [torch.from_numpy(texts[text]) for text in group]
            trees = self.drafter.propose_batch(context, tokens, self.weights, self.limits)
            chains |= {text: tree.first_path(self.num_tokens) for text, tree in zip(group, trees, strict=True)}
        return [chains[text] for text in range(len(texts))]


def _followed_by(then: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a runner that calls ``then`` at its end."""

    @wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        then()
        return result

    return run


def _whole(weight: Tensor) -> Tensor:
    """All rows of an embedding or LM head (V, D), of which each process has a part under tensor parallelism.

    Each process drafts for itself, with the whole weights.
    """
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather

    return weight if get_tensor_model_parallel_world_size() == 1 else tensor_model_parallel_all_gather(weight, dim=0)
