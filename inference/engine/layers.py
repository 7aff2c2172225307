"""The base's layers one after the other, without what transformers wraps around them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

PLAIN_MODEL_TYPES = {
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
}  # embedding, layers with rotary positions, norm: nothing else


@contextmanager
def capture_hidden_states(model: PreTrainedModel, wanted: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """A dictionary that a forward of a `PLAIN_MODEL_TYPES` model fills with what the layers ``wanted`` give.

    Args:
        model: The base without its head.
        wanted: 0 is the embedding, i the output of layer i, of the last too before the norm.
    """
    states: dict[int, Tensor] = {}
    modules = [model.embed_tokens, *model.layers]
    hooks = [
        modules[layer].register_forward_hook(lambda module, given, state, layer=layer: states.update({layer: state}))
        for layer in wanted
    ]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def compute_hidden_states(
    model: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor,
    mask: Tensor | None,
    cache: Cache,
    wanted: Collection[int] = (),
) -> dict[int, Tensor]:
    """Run the base's layers on new tokens behind a cache, and return hidden states by layer.

    The layers of `PLAIN_MODEL_TYPES` are called directly, which makes the forward of a small base a tenth faster and
    keeps only the requested states. Other models run through their own forward.

    Args:
        model: The base without its head.
        input_ids: (1, S).
        position_ids: (1, S).
        mask: (1, 1, S, S + cached) additive, or None for plain causal attention over an empty cache or by one token.
        cache: Holds what came before; it grows by S.
        wanted: 0 is the embedding, i the output of layer i.
    """
    if model.config.model_type not in PLAIN_MODEL_TYPES:
        seen = model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=any(layer != -1 for layer in wanted),
        )
        states = {layer: seen.hidden_states[layer] for layer in wanted if layer != -1}
        return {**states, -1: seen.last_hidden_state}
    state = model.embed_tokens(input_ids)
    rotary = model.rotary_emb(state, position_ids=position_ids)
    states = {0: state} if 0 in wanted else {}
    layers = model.layers._modules.values()
    for number, layer in enumerate(layers, start=1):
        state = layer(
            state,
            attention_mask=mask,
            position_embeddings=rotary,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        if number in wanted:
            states[number] = state
    last = model.norm(state)
    if len(layers) in wanted:  # transformers counts the normed state as the last layer's
        states[len(layers)] = last
    return {**states, -1: last}
