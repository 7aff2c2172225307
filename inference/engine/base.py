"""The frozen base: loading it, its numbers, and whether a drafter fits it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from logging import ERROR, getLogger
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from data.shipped import find_base
from data.tokenizer import first_line, load_tokenizer, tokenizer_hash
from drafters.checkpoint import DrafterConfig
from drafters.protocol import BaseShape, BaseWeights
from inference.engine.layers import PLAIN_MODEL_TYPES, capture_hidden_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Dtype = Literal["float32", "bfloat16", "float16", "int8", "nf4"]
QUANTIZED_DTYPES = "int8", "nf4"


class BaseInfo(Protocol):
    """What of a base decides which prompts it reads: a `Base`, or a base whose weights are not loaded."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    context_length: int


@dataclass(frozen=True)
class Base:
    """A frozen causal language model with its tokenizer.

    Args:
        name: Folder or hub id it was loaded from.
        model: In evaluation mode, no gradients.
        tokenizer: Its tokenizer.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def shape(self) -> BaseShape:
        return shape_of(self.model.config)

    @property
    def base_weights(self) -> BaseWeights:
        return BaseWeights(self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight)

    def hidden_states(self, input_ids: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run one forward and return hidden states.

        For the model types of `PLAIN_MODEL_TYPES` only the requested layers are kept in memory.

        Args:
            input_ids: (B, S).
            layers: F layers; 0 is the embedding, i the output of layer i, -1 the last state after the final norm.

        Returns:
            The requested layers side by side (B, S, F * D), and the last state after the final norm (B, S, D).
        """
        model, wanted = self.model.base_model, {layer for layer in layers if layer != -1}
        if model.config.model_type not in PLAIN_MODEL_TYPES:
            seen = model(input_ids, use_cache=False, output_hidden_states=bool(wanted))
            states = {layer: seen.hidden_states[layer] for layer in wanted}
        else:
            with capture_hidden_states(model, wanted) as states:
                seen = model(input_ids, use_cache=False)
            states[len(model.layers)] = seen.last_hidden_state  # transformers counts the normed state as the last's
        last = states[-1] = seen.last_hidden_state
        return torch.cat([states[layer] for layer in layers], dim=-1), last

    @torch.no_grad()
    def greedy(self, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int) -> Tensor:
        """What the base writes alone, by transformers' own `generate`: (B, N), padded where a text has ended.

        A penalty or a beam that its generation_config asks for is left out: the text is the plain argmax.
        """
        pad = self.tokenizer.pad_token_id
        return self.model.generate(
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(self.eos) or None,
            pad_token_id=min(self.eos, default=0) if pad is None else pad,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
        )[:, input_ids.shape[1] :]

    @property
    def context_length(self) -> int:
        return self.model.config.max_position_embeddings

    @property
    def eos(self) -> frozenset[int]:
        """Tokens that end a text."""
        ids = self.model.generation_config.eos_token_id
        ids = self.tokenizer.eos_token_id if ids is None else ids
        return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)


def shape_of(config) -> BaseShape:
    """The numbers of a transformers configuration that a learned drafter is built from.

    Raises:
        ValueError: The model is not laid out like LLaMA.
    """
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


def base_hash(base: Base) -> str:
    """A short name of a base's weights: of their shapes and 32 values of each as they are loaded.

    A base that was trained further has another name; its folder or the version of transformers does not matter.
    """
    shape = base.shape
    numbers = shape.num_heads, shape.head_dim, shape.rope_theta, shape.norm_eps  # what the weights do not show
    digest = hashlib.sha256(repr(numbers).encode())
    for name, weight in base.model.named_parameters():
        flat = weight.detach().flatten()
        at = torch.linspace(0, len(flat) - 1, min(32, len(flat)), dtype=torch.float64).long()
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(flat[at.to(flat.device)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def load_base(name: str, dtype: Dtype = "float32", device: str | torch.device = "cpu") -> Base:
    """Load a frozen base from a local folder or a hub id.

    Args:
        dtype: ``int8`` and ``nf4`` quantise the linear layers of the blocks as they are loaded (bitsandbytes); the
            embedding, the norms and the head, which drafters borrow, stay in bfloat16.

    Raises:
        ValueError: Nothing loadable is there; the message says what to do.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    tokenizer = load_tokenizer(name)
    options = quantization_options(dtype, device) if dtype in QUANTIZED_DTYPES else {"dtype": getattr(torch, dtype)}
    try:
        model = AutoModelForCausalLM.from_pretrained(find_base(name), **options)
    except Exception as error:  # as above; safetensors has its own error type too
        raise ValueError(
            f"cannot load the base {name}: {first_line(error)}; if a file is damaged, copy or download it again"
        ) from error
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer of {name} has {len(tokenizer)} tokens and the model {model.config.vocab_size}: "
            "they do not belong together"
        )
    return Base(name, model.to(device).eval().requires_grad_(False), tokenizer)


def load_base_info(name: str) -> BaseInfo:
    """Load a base's tokenizer and configuration, and no weights.

    Raises:
        ValueError: Nothing loadable is there.
    """
    from transformers import AutoConfig

    tokenizer = load_tokenizer(name)
    try:
        config = AutoConfig.from_pretrained(find_base(name))
    except Exception as error:  # as for the tokenizer
        raise ValueError(f"cannot load the configuration of {name}: {first_line(error)}") from error
    return SimpleNamespace(name=name, tokenizer=tokenizer, context_length=config.max_position_embeddings)


def quantization_options(dtype: Dtype, device: str | torch.device) -> dict[str, Any]:
    """What transformers is told to quantise a model while it is loaded.

    Raises:
        ValueError: bitsandbytes or accelerate is not installed.
    """
    if missing := [package for package in ("bitsandbytes", "accelerate") if find_spec(package) is None]:
        raise ValueError(
            f"a base in {dtype} needs {' and '.join(missing)}: pip install {' '.join(missing)}, or take bfloat16"
        )
    from transformers import BitsAndBytesConfig

    getLogger("bitsandbytes").setLevel(ERROR)  # it says at every product that int8 multiplies in float16
    half = torch.bfloat16
    config = (
        BitsAndBytesConfig(load_in_8bit=True)
        if dtype == "int8"
        else BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=half)
    )
    return {"dtype": half, "quantization_config": config, "device_map": {"": device}}


def check_fit(drafter: DrafterConfig, base: Base) -> None:
    """Raise ValueError where a drafter was trained for another base."""
    wanted, given = asdict(drafter.base), asdict(base.shape)
    for number in ("hidden_size", "vocab_size", "num_layers"):
        if wanted[number] != given[number]:
            raise ValueError(
                f"this drafter was trained for {drafter.base_name} with {number} {wanted[number]}, but {base.name} has "
                f"{given[number]}: pass the base it was trained for, or train a drafter for this one"
            )
    if drafter.tokenizer_hash != tokenizer_hash(base.tokenizer):
        raise ValueError(
            f"this drafter was trained for {drafter.base_name}, whose tokenizer differs from that of {base.name}: "
            "pass the base it was trained for, or train a drafter for this one"
        )


def resolve_device(name: str) -> torch.device:
    """``auto`` is the GPU where there is one.

    Raises:
        ValueError: cuda is asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device here: pass --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
