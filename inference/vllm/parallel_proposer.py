"""CTC and block drafters as a proposer of vLLM: chains for the whole batch from one pass over their frames."""

from __future__ import annotations

from dataclasses import dataclass
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

    @classmethod
    def of(cls, metadata: Any, positions: Tensor, block_size: int) -> FedBatch:
        """Read the attention metadata of a forward; ``positions`` (N,) are those of its tokens.

        Raises ValueError if the attention backend tells no block table of this block size.
        """
        table = getattr(metadata, "block_table", None)
        if table is not None:
            batch = cls(table, block_size)
            first = batch.slots([0], positions[:1].cpu() + 1)[0, -1]  # the first token belongs to the first request
            if first == metadata.slot_mapping[0]:
                return batch
        raise ValueError(
            f"vLLM's attention backend gives no table of the cache's blocks ({type(metadata).__name__}), which the "
            "drafter needs: start vLLM with --attention-backend FLASH_ATTN or TRITON_ATTN"
        )

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
        shape = self.num_layers, 2, num_slots, attention.num_heads, attention.head_dim
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

    vLLM gives a proposer of this kind no hidden states. They come from a forward hook on the base's model, and where
    they belong from the attention metadata of the same forward. Raises ValueError if the folder is missing or damaged,
    the drafter is of another kind or was trained for another base, or the engine runs compiled or spreads the base's
    layers over processes.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        if not vllm_config.model_config.enforce_eager:
            raise ValueError(
                "the drafter reads hidden states by a hook, which CUDA graphs leave out: add --enforce-eager"
            )
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("the drafter needs all layers of the base in one process: set pipeline_parallel_size to 1")
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
        self.inner_layers: tuple[int, ...] = ()
        self.cache: SlotCache | None = None
        self.fed: FedBatch | None = None

    def load_model(self, target_model: nn.Module) -> None:
        """Attach the base's embedding and LM head, and a hook that reads its hidden states.

        Raises ValueError if the model does not give out the hidden states that the drafter reads.
        """
        model: Any = target_model
        try:
            embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        except AttributeError as error:
            raise ValueError(f"{self.base.name} has no plain embedding and LM head in vLLM ({error})") from error
        vocab_size, num_layers = self.base.shape.vocab_size, self.base.shape.num_layers
        rows = slice(vocab_size)  # without those that vLLM pads with
        self.weights = BaseWeights(_whole(embedding.data)[rows], _whole(head.data)[rows])
        self.drafter.to(embedding.device).attach_base_weights(self.weights)
        wanted = self.drafter.required_outputs.hidden_layers
        self.inner_layers = tuple(sorted({layer for layer in wanted if layer not in (-1, num_layers)}))
        if self.inner_layers:
            if not hasattr(model, "set_aux_hidden_state_layers"):
                raise ValueError(
                    f"vLLM gives out no inner hidden states of {type(model).__name__}, and the drafter reads layers "
                    f"{list(self.inner_layers)}: train one on the last hidden state (hidden_layers: [-1])"
                )
            model.set_aux_hidden_state_layers(self.inner_layers)  # counted as ours: i is the output of layer i
        target_model.register_forward_hook(self._observe, with_kwargs=True)

    @torch.inference_mode()
    def _observe(self, _module: nn.Module, _args: object, inputs: dict[str, Any], output: Any) -> Tensor:
        """Store the trunk's keys and values of every position that the base was fed.

        Returns the last hidden states alone, as vLLM expects them of a base without inner ones.
        """
        from vllm.forward_context import get_forward_context

        assert self.weights is not None, "the model was not loaded"
        last, inner = output if self.inner_layers else (output, ())
        if self.vllm_config.cache_config.num_gpu_blocks is None:  # a forward that only measures memory
            return last
        cache = self._reserved()  # also by a forward that warms up a GPU, so that it does not fail at a request
        if not (metadata_of_layers := get_forward_context().attn_metadata):
            return last
        metadata, *others = {id(kind): kind for kind in metadata_of_layers.values()}.values()
        if others:  # as where some layers have windows
            raise ValueError("vLLM keeps this base's layers in several KV cache groups: the drafter cannot follow them")
        num_fed = metadata.num_actual_tokens
        states = dict(zip(self.inner_layers, inner, strict=True)) | {-1: last, self.base.shape.num_layers: last}
        hidden = torch.cat([states[layer][:num_fed] for layer in self.drafter.required_outputs.hidden_layers], dim=-1)
        tokens = inputs["input_ids"][None, :num_fed] if self.drafter.tokens_in_context else None
        positions = inputs["positions"][None, :num_fed]
        context = self.drafter.context(hidden[None], positions, tokens, self.weights.embedding)
        cache.write(metadata.slot_mapping[:num_fed].long(), context)
        block_size: Any = self.vllm_config.cache_config.block_size
        if self.fed is None:
            self.fed = FedBatch.of(metadata, inputs["positions"], block_size)
        else:
            self.fed = FedBatch(metadata.block_table, block_size)
        return last

    def _reserved(self) -> SlotCache:
        """The cache, with one row for every slot that vLLM has; reserved in full as soon as vLLM knows how many."""
        cache_config: Any = self.vllm_config.cache_config
        num_slots = cache_config.num_gpu_blocks * cache_config.block_size
        if self.cache is None or self.cache.num_slots != num_slots:
            self.cache = None  # what measuring the memory has reserved
            self.cache = SlotCache(self.drafter, num_slots)
            logger.info(
                "%s: %.2f GiB reserved for the draft module's keys and values, %d slots as in the base's cache",
                self.spec,
                self.cache.num_bytes / GIB,
                num_slots,
            )
        return self.cache

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


def _whole(weight: Tensor) -> Tensor:
    """All rows of an embedding or LM head (V, D), of which each process has a part under tensor parallelism.

    Each process drafts for itself, with the whole weights.
    """
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather

    return weight if get_tensor_model_parallel_world_size() == 1 else tensor_model_parallel_all_gather(weight, dim=0)
