"""The base's decoder layers, without its LM head: run behind a cache, or observed during a forward of the model."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

# Embedding, decoder layers with rotary positions and a final norm, and nothing else in their forward.
PLAIN_MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}


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


def compute_hidden_states(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    mask: Tensor | None,
    cache: Cache,
    layers: Collection[int] = (),
) -> dict[int, Tensor]:
    """Run the base's layers on new tokens behind a cache, and return hidden states by layer.

    The layers of `PLAIN_MODEL_TYPES` are called directly, which makes the forward of a small base a tenth faster and
    keeps only the requested states. Other models run through their own forward.

    Args:
        model: The base without its LM head.
        input_ids: (1, S).
        position_ids: (1, S).
        mask: Additive attention mask (1, 1, S, S + cached). None means plain causal attention, which is right for an
            empty cache or a single new token.
        cache: Keys and values of the tokens before; it grows by S.
        layers: Requested layers; 0 is the embedding, i the output of layer i.

    Returns:
        States (1, S, D) of the requested layers, and under -1 the last state after the final norm.
    """
    decoder: Any = model  # as above
    if decoder.config.model_type not in PLAIN_MODEL_TYPES:
        outputs = decoder(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=any(layer != -1 for layer in layers),
        )
        states = {layer: outputs.hidden_states[layer] for layer in layers if layer != -1}
        return {**states, -1: outputs.last_hidden_state}
    state = decoder.embed_tokens(input_ids)
    rotary = decoder.rotary_emb(state, position_ids=position_ids)
    states = {0: state} if 0 in layers else {}
    decoder_layers = decoder.layers._modules.values()  # iterating over the ModuleList itself is slower
    for number, decoder_layer in enumerate(decoder_layers, start=1):
        state = decoder_layer(
            state,
            attention_mask=mask,
            position_embeddings=rotary,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        if number in layers:
            states[number] = state
    last_hidden = decoder.norm(state)
    if len(decoder_layers) in layers:  # in transformers, the last layer's output is the state after the norm
        states[len(decoder_layers)] = last_hidden
    return {**states, -1: last_hidden}
