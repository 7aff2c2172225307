"""The base's forward: run behind a cache with masks of our own, or observed while the model itself runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from transformers.cache_utils import Cache

# Embedding, decoder layers with rotary positions and a final norm, and nothing else in their forward.
PLAIN_MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}

PACKED_ROWS = {torch.float32: range(2, 257), torch.bfloat16: range(1, 257)}
"""Numbers of tokens for which packed weights are faster, by dtype: one token in float32 is a matrix-vector product, and
many tokens make the cost of packing small."""

MIN_PACKED_ELEMENTS = 2**20
"""Layers with fewer weights stay in the processor's cache, where packing costs little."""


def _has_packed_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies by packed weights of this type here: not every CPU has products in bfloat16."""
    return dtype is not torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedLinear(nn.Linear):
    """A linear layer of a CPU that multiplies few tokens by a packed copy of its weights.

    For a product of `PACKED_ROWS` tokens, the matrix library copies all weights into blocks that fit its registers,
    which may take longer than the product. Here this is done once. The layer shares its weights with the given one.

    Args:
        linear: A layer in float32 or bfloat16 on the CPU.
        at_first_use: Whether the copy is made at the first product of a few tokens, or at once.
        alone: Whether the layer has the packed weights only, for any number of tokens: half the memory, but they can
            be neither saved nor loaded.
    """

    def __init__(self, linear: nn.Linear, at_first_use: bool = False, alone: bool = False) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.training, self.alone = linear.training, alone
        self._packed: Tensor | None = None
        self._packed_from: tuple[int, int] | None = None
        if alone or not at_first_use:
            self._packed_weight()
        if alone:
            self.weight = nn.Parameter(linear.weight.detach().new_empty(0), requires_grad=False)

    def _packed_weight(self) -> Tensor:
        """The packed copy, made anew if other weights were loaded or the layer was moved since."""
        weight = self.weight.detach()
        origin = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        if self._packed is None or (not self.alone and self._packed_from != origin):
            typical_rows = 16  # it decides about the size of the blocks; from 1 to 64 all sizes run
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, typical_rows)
            self._packed_from = origin
        return self._packed

    def __getstate__(self) -> dict[str, Any]:
        """The state without the packed copy, which can be neither copied nor pickled."""
        return {**self.__dict__, "_packed": None, "_packed_from": None}

    def forward(self, input: Tensor) -> Tensor:
        """Multiply tokens (..., in) by the weights: (..., out)."""
        dtype = self.weight.dtype
        is_few = input.numel() // self.in_features in PACKED_ROWS.get(dtype, ()) and _has_packed_products(dtype)
        if not (is_few or self.alone) or self.weight.device.type != "cpu":
            return F.linear(input, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(input, self._packed_weight(), self.bias, "none", [], "")


def pack_weights(model: nn.Module, at_first_use: bool = False, alone: bool = False) -> int:
    """Replace the large linear layers of a model by `PackedLinear`, and return how many there were.

    The model computes the same function up to rounding, in about twice the memory, unless ``alone``.

    Args:
        model: A base or a drafter.
        at_first_use: Whether a layer is packed when it first multiplies a few tokens; one that only ever reads one
            token, such as Medusa's LM heads, then takes no more memory.
        alone: Whether the packed weights of a base replace the plain ones, except for the LM head, which drafters read.

    Raises:
        ValueError: The weights are not in float32 or bfloat16 on the CPU, or torch cannot pack them here.
    """
    weight = next(model.parameters())
    device, dtype = weight.device.type, str(weight.dtype).removeprefix("torch.")
    if device != "cpu" or weight.dtype not in PACKED_ROWS:
        raise ValueError(
            f"packed weights need float32 or bfloat16 on a CPU, and these are {dtype} on {device}: do not pack them"
        )
    if not torch.backends.mkldnn.is_available():
        raise ValueError("this build of torch has no oneDNN, whose packed weights are used: do not pack them")
    if not _has_packed_products(weight.dtype):
        raise ValueError("oneDNN has no products in bfloat16 for this CPU: do not pack the weights, or use float32")
    layers = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.numel() >= MIN_PACKED_ELEMENTS
    ]
    base: Any = model
    kept = base.get_output_embeddings().weight if alone else None
    for parent, name in layers:  # one by one: its plain weights may be freed before the next is packed
        linear = getattr(parent, name)
        try:
            layer = PackedLinear(linear, at_first_use, alone and linear.weight is not kept)
        except (AttributeError, RuntimeError) as error:
            raise ValueError(f"torch cannot pack {dtype} weights here ({error}): do not pack them") from error
        setattr(parent, name, layer)
    return len(layers)


@contextmanager
def capture_hidden_states(model: nn.Module, layers: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of some layers while a model of `PLAIN_MODEL_TYPES` runs inside the ``with`` block.

    Other threads may run the model meanwhile: only forwards of this thread are observed.

    Args:
        model: The base without its LM head.
        layers: 0 is the embedding, i the output of layer i. The last layer's output is taken before the final norm.

    Yields:
        A dictionary that each forward fills with the states by layer.
    """
    states: dict[int, Tensor] = {}
    thread = threading.get_ident()
    decoder: Any = model  # torch types the attributes of a module as Tensor | Module
    modules = [decoder.embed_tokens, *decoder.layers]

    def keep(layer: int, module: nn.Module, inputs: object, state: Tensor) -> None:
        if threading.get_ident() == thread:
            states[layer] = state

    hooks = [modules[layer].register_forward_hook(partial(keep, layer)) for layer in layers]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def attention_kinds(config: PretrainedConfig) -> list[str]:
    """Return the kind of attention of each layer by transformers' name for it, such as ``sliding_attention``."""
    if kinds := getattr(config, "layer_types", None):
        return list(kinds)
    if getattr(config, "sliding_window", None):
        kind = "sliding_attention"
    elif getattr(config, "attention_chunk_size", None):
        kind = "chunked_attention"
    else:
        kind = "full_attention"
    return [kind] * config.num_hidden_layers


def longrope_border(config: PretrainedConfig) -> int | None:
    """Return the position at which a base with longrope scaling changes the angles of all its positions, if it has one.

    A forward that feeds this position or a later one computes all its tokens with the long factors, any other forward
    with the short ones.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    by_kind = [each for each in rope.values() if isinstance(each, dict)]  # some bases have parameters for each kind
    default = getattr(config, "original_max_position_embeddings", None)
    scalings = [each for each in (rope, *by_kind) if each.get("rope_type") == "longrope"]
    borders = [each.get("original_max_position_embeddings", default) for each in scalings]
    return min((border for border in borders if border is not None), default=None)


@lru_cache
def takes_argument(model_class: type[nn.Module], name: str) -> bool:
    """Whether the forward of a class of models has an argument of this name, or passes it on to a parent class."""
    for each in model_class.__mro__:
        if "forward" in vars(each):
            parameters = signature(vars(each)["forward"]).parameters
            if name in parameters:
                return True
            if all(parameter.kind is not Parameter.VAR_KEYWORD for parameter in parameters.values()):
                return False
    return False


@torch.compiler.assume_constant_result
def _cache_name(model_class: Any) -> str:
    return "cache" if takes_argument(model_class, "cache") else "past_key_values"


def cache_argument(module: Any, cache: Cache) -> dict[str, Cache]:
    """Return the cache as a keyword argument of a model or layer: since transformers 5.24 it is named ``cache``."""
    return {_cache_name(module.__class__): cache}


def attention_spans(config: PretrainedConfig) -> dict[str, int]:
    """Return the number of positions of a window or chunk for each kind of attention in a base.

    Raises:
        ValueError: A layer keeps a state from which rejected drafts cannot be removed.
    """
    sizes = {"full_attention": sys.maxsize}
    sizes["sliding_attention"] = getattr(config, "sliding_window", None) or sys.maxsize
    sizes["chunked_attention"] = getattr(config, "attention_chunk_size", None) or sys.maxsize
    kinds = sorted(set(attention_kinds(config)))
    if unknown := [kind for kind in kinds if kind not in sizes]:
        raise ValueError(f"it has {' and '.join(unknown)} layers, which are not supported")
    return {kind: sizes[kind] for kind in kinds}


def run_base(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    masks: Mapping[str, Tensor | None],
    cache: Cache,
    num_logits: int | None,
    layers: Collection[int] = (),
) -> tuple[Tensor, dict[int, Tensor]]:
    """Run the base on new tokens behind a cache.

    The layers of `PLAIN_MODEL_TYPES` are called directly, which makes the forward of a small base a tenth faster and
    keeps only the requested states. Other models run through their own forward, so that whatever they do around the
    layers (scaling, soft-capping, a transform before the LM head) is done.

    Args:
        model: The base.
        input_ids: (1, S).
        position_ids: (1, S).
        masks: Additive attention mask (1, 1, S, cached + S) for each kind of attention in the base. None means plain
            causal attention, which is right for an empty cache or a single new token.
        cache: Keys and values of the tokens before; it grows by S.
        num_logits: Number of last tokens whose logits are returned; None for all of them.
        layers: Requested layers; 0 is the embedding, i the output of layer i, -1 the last state after the final norm.

    Returns:
        Logits (num_logits, V), and the states (1, S, D) of the requested layers.
    """
    base: Any = model  # torch types the attributes of a module as Tensor | Module
    last = slice(None) if num_logits is None else slice(-num_logits, None)
    if base.config.model_type in PLAIN_MODEL_TYPES:
        states = compute_hidden_states(base.base_model, input_ids, position_ids, masks, cache, layers)
        return base.get_output_embeddings()(states[-1][0, last]), states
    keep = {"logits_to_keep": num_logits} if num_logits and takes_argument(base.__class__, "logits_to_keep") else {}
    outputs = base(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=_mask_argument(masks),
        use_cache=True,
        output_hidden_states=bool(layers),
        return_dict=True,
        **cache_argument(base, cache),
        **keep,
    )
    return outputs.logits[0, last], {layer: outputs.hidden_states[layer] for layer in layers}


def _mask_argument(masks: Mapping[str, Tensor | None]) -> Any:
    """Return masks as transformers takes them: one tensor, or a dictionary if there are several kinds of layers."""
    return next(iter(masks.values())) if len(masks) == 1 else masks


def compute_hidden_states(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    masks: Mapping[str, Tensor | None],
    cache: Cache,
    layers: Collection[int] = (),
) -> dict[int, Tensor]:
    """Run the layers of a base and return hidden states by layer.

    The layers of `PLAIN_MODEL_TYPES` are called one after the other, which keeps only the requested states.

    Args:
        model: The base without its LM head.
        input_ids, position_ids, masks, cache, layers: As in `run_base`.

    Returns:
        States (1, S, D) of the requested layers, and under -1 the last state after the final norm.
    """
    decoder: Any = model  # as above
    if decoder.config.model_type not in PLAIN_MODEL_TYPES:
        outputs = decoder(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=_mask_argument(masks),
            use_cache=True,
            output_hidden_states=any(layer != -1 for layer in layers),
            **cache_argument(decoder, cache),
        )
        states = {layer: outputs.hidden_states[layer] for layer in layers if layer != -1}
        return {**states, -1: outputs.last_hidden_state}
    state = decoder.embed_tokens(input_ids)
    rotary = decoder.rotary_emb(state, position_ids=position_ids)
    states = {0: state} if 0 in layers else {}
    decoder_layers = decoder.layers._modules.values()  # iterating over the ModuleList itself is slower
    cached = cache_argument(decoder.layers[0], cache)
    for number, (decoder_layer, kind) in enumerate(
        zip(decoder_layers, attention_kinds(decoder.config), strict=True), start=1
    ):
        state = decoder_layer(
            state,
            attention_mask=masks[kind],
            position_embeddings=rotary,
            position_ids=position_ids,
            use_cache=True,
            **cached,
        )
        if number in layers:
            states[number] = state
    last_hidden = decoder.norm(state)
    if len(decoder_layers) in layers:  # in transformers, the last layer's output is the state after the norm
        states[len(decoder_layers)] = last_hidden
    return {**states, -1: last_hidden}
