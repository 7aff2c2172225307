"""The frozen base: loading it, its shape and weights, and the check that a drafter was trained for it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from data.dtypes import Dtype
from data.gguf import is_gguf
from data.hub import split_revision
from data.templates import end_tokens
from data.tokenizer import load_tokenizer, tokenizer_hash
from drafters.checkpoint import DrafterConfig
from drafters.protocol import BaseShape, BaseWeights, LearnedDrafter
from inference.arguments import checks_arguments
from inference.bases import QUANTIZED_DTYPES, load_config, load_model
from inference.timing import processor_name
from inference.verifier.int8 import DraftHead, Int8Linear, can_multiply_int8, quantise_layers
from inference.verifier.layers import PLAIN_MODEL_TYPES, capture_hidden_states, unwrap
from inference.verifier.packed import PackedLinear, pack_weights, smallest_packed

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedModel

PREFILL_CHUNK = 4096  # tokens; shorter prompts are read by one forward


class _Sizes:
    """What a base's configuration says of its sizes."""

    name: str
    config: PretrainedConfig

    @property
    def shape(self) -> BaseShape:
        """The sizes that a learned drafter is built from; raises ValueError as `shape_of` does."""
        return shape_of(self.config)

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a text, prompt included."""
        return self.config.max_position_embeddings

    def check_length(self, max_length: int, option: str) -> None:
        """Raise ValueError if texts of ``max_length`` tokens, which this option sets, do not fit into the context."""
        if max_length > self.context_length:
            raise ValueError(
                f"{option} is {max_length}, but the context of {self.name} ends at {self.context_length}: "
                f"pass --{option} {self.context_length} or less"
            )


@dataclass(frozen=True)
class BaseConfig(_Sizes):
    """A base without its weights: enough to encode prompts, check lengths, and tell whether a drafter fits."""

    name: str  # folder or hub id
    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig


@dataclass(frozen=True)
class Base(_Sizes):
    """A frozen causal language model with its tokenizer; other projects call it the target or verifier model.

    Args:
        name: Folder or hub id it was loaded from.
        model: The model in evaluation mode; its weights require no gradients.
        tokenizer: Its tokenizer.
        check: Whether a runner compares its logits with the model's own (`check_base`).
        prefill_chunk: Maximum number of tokens of a prompt that one forward of a runner reads; 0 for no maximum.
        bitwise: Whether a runner computes bit-identical rows (`inference.verifier.bitwise`), where that works. By
            default it does in bfloat16 and float16 on a CPU, in which texts would differ otherwise.
        graphed: Whether a runner's steps are graphed (`inference.verifier.graphed`). By default they are on a GPU,
            unless the base cannot be captured or must have bit-identical rows.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    check: bool = True
    prefill_chunk: int = PREFILL_CHUNK
    bitwise: bool | None = None
    graphed: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", getattr(self.model, "_orig_mod", self.model))  # behind torch.compile(model)

    @property
    def wants_bitwise(self) -> bool:
        """Whether a runner computes bit-identical rows, if it can."""
        is_half = self.model.dtype in (torch.bfloat16, torch.float16)
        return is_half and self.model.device.type == "cpu" if self.bitwise is None else self.bitwise

    @property
    def wants_graphs(self) -> bool:
        """Whether a runner's steps are graphed, if they can be."""
        return self.model.device.type == "cuda" and not self.bitwise if self.graphed is None else self.graphed

    @property
    def config(self) -> PretrainedConfig:  # type: ignore[override]  # nobody sets it
        return self.model.config

    @property
    def eos(self) -> frozenset[int]:
        """Ids of the end-of-sequence tokens that the base can write: a tokenizer may have more tokens than it."""
        ids = self.model.generation_config.eos_token_id
        ids = self.tokenizer.eos_token_id if ids is None else ids
        every = [] if ids is None else [ids] if isinstance(ids, int) else ids
        return frozenset(token for token in every if token < self.config.vocab_size)

    @property
    def base_weights(self) -> BaseWeights:
        """The embedding and the weights of the LM head, which learned drafters use."""
        embedding: Any = self.model.get_input_embeddings()
        head: Any = self.model.get_output_embeddings()
        is_packed = isinstance(head, PackedLinear | Int8Linear) and head.bias is None
        return BaseWeights(embedding.weight, head.weight, packed_head=head if is_packed else None)

    def move_to(self, device: str | torch.device, part: nn.Module | None = None) -> None:
        """Move the model or a part of it to a device; weights that have the dtype of their file yet are converted."""
        moved: Any = part or self.model
        for weight in moved.parameters():
            if weight.dtype != self.dtype_of(weight):
                weight.data = weight.data.to(device, self.model.dtype)
        moved.to(device)

    def dtype_of(self, weight: Tensor) -> torch.dtype:
        """The dtype that a weight has once the base is where it runs, see ``movable`` of `load_base`."""
        is_converted = weight.is_floating_point() and self.config.model_type in PLAIN_MODEL_TYPES
        return self.model.dtype if is_converted else weight.dtype

    @property
    def is_packed(self) -> bool:
        """Whether it multiplies by packed weights, as then what drafts for it does."""
        return isinstance(self.model.get_output_embeddings(), PackedLinear)

    @property
    def drafts_in_int8(self) -> bool:
        """Whether what drafts for it multiplies in 8 bits: as it does, or beside packed weights in bfloat16.

        Drafts need not be exact.
        """
        is_half = self.is_packed and self.model.dtype is torch.bfloat16
        return isinstance(self.model.get_output_embeddings(), Int8Linear) or (is_half and can_multiply_int8())

    def lend_weights_to(self, drafter: LearnedDrafter) -> None:
        """Make a learned drafter ready to decode: on the base's device, with its weights, and packed as it is."""
        weights = self.base_weights
        if isinstance(head := weights.packed_head, PackedLinear) and self.drafts_in_int8:
            weights = replace(weights, packed_head=DraftHead(head))
        if head is not None and self.drafts_in_int8:
            quantise_layers(drafter, smallest_packed(self.model))
        elif head is not None:
            pack_weights(drafter, at_first_use=True, smallest=smallest_packed(self.model))
        drafter.to(self.model.device).attach_base_weights(weights)

    def hidden_states(self, input_ids: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run one forward over (B, S); return F layers side by side (B, S, F * D), and the normed last state (B, S, D).

        Of the layers, 0 is the embedding, i the output of layer i, and -1 the last state after the final norm. For the
        model types of `PLAIN_MODEL_TYPES` only the requested ones are kept in memory.
        """
        decoder: Any = self.model.base_model  # torch types the attributes of a module as Tensor | Module
        inner_layers = {layer for layer in layers if layer != -1}
        if decoder.config.model_type not in PLAIN_MODEL_TYPES:
            outputs = decoder(input_ids, use_cache=False, output_hidden_states=bool(inner_layers))
            states = {layer: outputs.hidden_states[layer] for layer in inner_layers}
        else:
            with capture_hidden_states(decoder, inner_layers) as states:
                outputs = decoder(input_ids, use_cache=False)
            # In transformers, the last layer's output is the state after the final norm.
            states[len(decoder.layers)] = outputs.last_hidden_state
        last_hidden = states[-1] = outputs.last_hidden_state
        return torch.cat([states[layer] for layer in layers], dim=-1), last_hidden

    @torch.no_grad()
    def greedy(self, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int) -> Tensor:
        """Decode greedily with transformers' own `generate`, whatever the model's generation_config says.

        Prompts (B, S) are padded on the left, and the new tokens (B, N) of texts that end early on the right. The
        padding is token 0, as the embedding may have no row for the tokenizer's padding token.
        """
        from torch.distributed.fsdp import FSDPModule

        config = GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=sorted(self.eos) or None, pad_token_id=0)
        model: Any = unwrap(self.model)
        # The options of the model's own configuration would be added to these.
        before, model.generation_config = model.generation_config, config
        # Layers that are sharded over processes run in all of them, until the last one has finished.
        options = {"attention_mask": attention_mask, "synced_gpus": isinstance(model.base_model, FSDPModule)}
        try:
            return model.generate(input_ids, config, **options)[:, input_ids.shape[1] :]
        finally:
            model.generation_config = before


def shape_of(config: PretrainedConfig) -> BaseShape:
    """Read the sizes that a learned drafter is built from; raises ValueError if the model is not like LLaMA."""
    if not hasattr(config, "intermediate_size"):
        raise ValueError(f"no learned drafter is built for {config.model_type} models: use one of the LLaMA family")
    rope = getattr(config, "rope_parameters", None) or {}
    return BaseShape(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        norm_eps=getattr(config, "rms_norm_eps", 1e-6),
    )


def changed_logits(model: Any) -> str:
    """What a model does to the logits of its LM head, or nothing: its distributions are not the head's alone then."""
    options = {"logit_scale": 1, "logits_scaling": 1, "final_logit_softcapping": None}
    values = {name: getattr(model.config, name, None) for name in options}
    changed = [f"{name} {value}" for name, value in values.items() if value not in (None, options[name])]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        changed.append("a bias of its LM head")
    return ", ".join(changed)


def base_hash(base: Base) -> str:
    """Return a short hash of a base's weights, computed from their shapes and 32 values of each.

    Further training changes the hash; another folder or another version of transformers does not.
    """
    shape = base.shape
    numbers = shape.num_heads, shape.head_dim, shape.rope_theta, shape.norm_eps  # not visible in the weights
    digest = hashlib.sha256(repr(numbers).encode())
    for name, weight in base.model.named_parameters():
        flat = weight.detach().flatten()
        indices = torch.linspace(0, len(flat) - 1, min(32, len(flat)), dtype=torch.float64).long()
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        values = flat[indices.to(flat.device)].to(base.dtype_of(weight))
        digest.update(values.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@checks_arguments
def load_base(
    name: str | Path,
    dtype: Dtype = "float32",
    device: str | torch.device = "cpu",
    check: bool = True,
    packed: bool = False,
    prefill_chunk: Annotated[int, Field(ge=0)] = PREFILL_CHUNK,
    bitwise: bool | None = None,
    graphed: bool | None = None,
    movable: bool = False,
) -> Base:
    """Load a frozen base from a folder, a hub id or a GGUF file, or raise ValueError, which says what to do.

    Args:
        name: Folder or hub id, also with ``@REVISION`` (a commit, tag or branch), which the base's name does not keep;
            or a GGUF file, see `data.gguf`.
        dtype: Dtype of the weights. ``nf4``, and ``int8`` on a GPU, quantise the linear layers of the decoder layers
            while loading (bitsandbytes); the others stay in bfloat16. ``int8`` on a CPU quantises the LM head, too, and
            multiplies integers exactly (`inference.verifier.int8`).
        device: Device to load the base to.
        check: Whether a runner of the base compares its logits with the model's own, and refuses it if they differ.
        packed: Whether large linear layers keep a second, packed copy of their weights; see `pack_weights`.
        prefill_chunk: See `Base`.
        bitwise: See `Base`.
        graphed: See `Base`.
        movable: Whether `Base.move_to` follows, as in training. Until then only the embedding and the LM head are sure
            to have ``dtype``; the other weights may stay mapped from the file. bitsandbytes quantises on a CPU, too.
    """
    name = str(name)
    is_exact_int8 = dtype == "int8" and torch.device(device).type == "cpu" and not movable
    tokenizer = load_tokenizer(name)
    is_whole = not movable or dtype in QUANTIZED_DTYPES or is_gguf(name)
    if not is_whole and load_config(name).model_type in PLAIN_MODEL_TYPES:
        model = load_model(name, "auto", "cpu")
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight.data = layer.weight.data.to(getattr(torch, dtype))
        model.config.dtype = getattr(torch, dtype)
    else:
        model = load_model(name, "bfloat16" if is_exact_int8 else dtype, device)
    if is_gguf(name):
        model.generation_config.eos_token_id = list(end_tokens(tokenizer))
    if is_exact_int8:
        quantise_layers(model)
        for weight in model.parameters():
            weight.data = weight.data.clone()  # so that the file, of which it is a small part, is mapped no longer
    elif packed:
        pack_weights(model)
    return Base(split_revision(name)[0], model, tokenizer, check, prefill_chunk, bitwise, graphed)


def prepare_process(device: str | torch.device = "cpu", sums_alike: bool = False) -> None:
    """Change settings of this process that make it decode faster on a CPU; the commands do, a program of yours may.

    glibc then reuses the memory that tensors free, while it would give back every large block, and the system fill with
    zeros what it hands out again. With ``sums_alike``, the matrix libraries sum a row alike whatever rows are beside
    it, which bit-identical rows need: on AMX's tiles oneDNN rounds a few rows otherwise, and so does MKL on Intel's
    processors. Both read their variables before their first product.
    """
    if sums_alike:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        if "Intel" in processor_name():
            os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
    if torch.device(device).type == "cpu" and platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block comes from mmap, which would be unmapped as soon as it is freed
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the largest int


def load_base_info(name: str) -> BaseConfig:
    """Load a base's tokenizer and configuration without its weights; raises ValueError as `load_base`."""
    tokenizer, config = load_tokenizer(name), load_config(name).get_text_config()
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        raise ValueError(f"the configuration of {name} has no context length (max_position_embeddings)")
    return BaseConfig(name, tokenizer, config)


def check_fit(drafter: DrafterConfig, base: Base | BaseConfig) -> None:
    """Raise ValueError if a drafter was trained for another base."""
    for size in ("hidden_size", "vocab_size", "num_layers"):
        expected, actual = getattr(drafter.base, size), getattr(base.shape, size)
        if expected != actual:
            raise ValueError(
                f"this drafter was trained for {drafter.base_name} with {size} {expected}, but {base.name} has "
                f"{actual}: pass the base it was trained for, or train a drafter for this one"
            )
    if drafter.tokenizer_hash != tokenizer_hash(base.tokenizer):
        raise ValueError(
            f"this drafter was trained for {drafter.base_name}, whose tokenizer differs from that of {base.name}: "
            "pass the base it was trained for, or train a drafter for this one"
        )


def resolve_device(name: str) -> torch.device:
    """Return the device with this name; ``auto`` is the GPU if there is one, else the CPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device here: pass --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
