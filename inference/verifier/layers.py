"""The base's forward: run behind a cache with masks of our own, or observed while the model itself runs."""

import threading
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from inspect import Parameter, signature
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.cache_utils import Cache

from inference.verifier.attention import Fed, attention_kinds

# Embedding, decoder layers with rotary positions and a final norm, and nothing else in their forward.
PLAIN_MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def model_lock(model: Any) -> AbstractContextManager[Any]:
    """What a thread holds while it runs a model on a GPU: capturing a step changes the model's layers meanwhile."""
    return nullcontext() if model.device.type == "cpu" else _LOCKS.setdefault(model, threading.RLock())


@contextmanager
def capture_hidden_states(model: nn.Module, layers: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of some layers while a model of `PLAIN_MODEL_TYPES` runs inside the ``with`` block.

    Yields a dictionary that each forward of this thread fills with the states by layer: 0 is the embedding, i the
    output of layer i. The last layer's is taken before the final norm. The model has no LM head.
    """
    states: dict[int, Tensor] = {}
    thread = threading.get_ident()
    decoder: Any = model  # torch types the attributes of a module as Tensor | Module
    modules = [decoder.embed_tokens, *decoder.layers]

    def keep(layer: int, module: nn.Module, inputs: object, state: Tensor) -> None:
        if threading.get_ident() == thread:
            states[layer] = state

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(modules[layer].register_forward_hook(partial(keep, layer)))
        yield states


def unwrap(model: Any) -> Any:
    """Return the model of transformers inside a model of peft; other models are returned as they are."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@lru_cache
def takes_argument(model_class: type[nn.Module], name: str) -> bool:
    """Whether the forward of a class of models has an argument of this name, or passes it on to a parent class."""
    for parent in model_class.__mro__:
        if "forward" in vars(parent):
            parameters = signature(vars(parent)["forward"]).parameters
            if name in parameters:
                return True
            if all(parameter.kind is not Parameter.VAR_KEYWORD for parameter in parameters.values()):
                return False
    return False


def _logits_to_keep(model: Any, num_logits: int | None) -> dict[str, int]:
    """The argument that lets a model compute its last logits only, if it has one."""
    return {"logits_to_keep": num_logits} if num_logits and takes_argument(model.__class__, "logits_to_keep") else {}


def model_logits(model: Any, input_ids: Tensor, num_logits: int) -> Tensor:
    """Return the last logits (B, num_logits, V) of a model's own forward over texts (B, S), without a cache."""
    keep = _logits_to_keep(unwrap(model), num_logits)
    return model(input_ids, use_cache=False, **keep).logits[:, -num_logits:]


def cache_name(model_class: Any) -> str:
    """The name of the argument that takes the cache, since transformers 5.24 ``cache``; a constant when compiling."""
    return "cache" if takes_argument(model_class, "cache") else "past_key_values"


def cache_argument(module: Any, cache: Cache) -> dict[str, Cache]:
    """Return the cache as a keyword argument of a model or layer."""
    return {cache_name(module.__class__): cache}


def run_base(
    model: nn.Module, fed: Fed, num_logits: int | None, layers: Collection[int] = ()
) -> tuple[Tensor, dict[int, Tensor]]:
    """Run the base on S new tokens behind a cache.

    Models outside `PLAIN_MODEL_TYPES` run through their own forward, so that whatever they do around the layers
    (scaling, soft-capping, a transform before the LM head) is done.

    Returns the logits (num_logits, V) of the last tokens, or of all for None, and the states (1, S, D) of the requested
    layers: 0 is the embedding, i the output of layer i, -1 the last state after the final norm.
    """
    base: Any = model  # torch types the attributes of a module as Tensor | Module
    last = slice(None) if num_logits is None else slice(-num_logits, None)
    with model_lock(base):
        if base.config.model_type in PLAIN_MODEL_TYPES:
            states = compute_hidden_states(base.base_model, fed, layers)
            return base.get_output_embeddings()(states[-1][0, last]), states
        outputs = _whole_forward(base, fed, bool(layers), **_logits_to_keep(base, num_logits))
    return outputs.logits[0, last], {layer: outputs.hidden_states[layer] for layer in layers}


def compute_hidden_states(model: nn.Module, fed: Fed, layers: Collection[int] = ()) -> dict[int, Tensor]:
    """Run a base without its LM head and return states as in `run_base`, and under -1 that after the final norm.

    The layers of `PLAIN_MODEL_TYPES` are called directly, which makes the forward of a small base a tenth faster and
    keeps only the requested states.
    """
    decoder: Any = model  # as above
    if decoder.config.model_type not in PLAIN_MODEL_TYPES:
        inner = [layer for layer in layers if layer != -1]
        outputs = _whole_forward(decoder, fed, bool(inner))
        return {**{layer: outputs.hidden_states[layer] for layer in inner}, -1: outputs.last_hidden_state}
    state = decoder.embed_tokens(fed.ids)
    rotary = decoder.rotary_emb(state, position_ids=fed.positions)
    states = {0: state} if 0 in layers else {}
    decoder_layers = decoder.layers._modules.values()  # iterating over the ModuleList itself is slower
    cached: dict[str, Any] = cache_argument(decoder.layers[0], fed.cache)
    options = {"position_embeddings": rotary, "position_ids": fed.positions, "use_cache": True, **cached}
    kinds = attention_kinds(decoder.config)
    for number, (decoder_layer, kind) in enumerate(zip(decoder_layers, kinds, strict=True), start=1):
        state = decoder_layer(state, attention_mask=fed.masks[kind], **options)
        if number in layers:
            states[number] = state
    last_hidden = decoder.norm(state)
    if len(decoder_layers) in layers:  # in transformers, the last layer's output is the state after the norm
        states[len(decoder_layers)] = last_hidden
    return {**states, -1: last_hidden}


def _whole_forward(model: Any, fed: Fed, with_states: bool, **keep: int) -> Any:
    """Run a model by its own forward, which takes one mask, or a dictionary if there are several kinds of layers."""
    return model(
        input_ids=fed.ids,
        position_ids=fed.positions,
        attention_mask=next(iter(fed.masks.values())) if len(fed.masks) == 1 else fed.masks,
        use_cache=True,
        output_hidden_states=with_states,
        return_dict=True,
        **cache_argument(model, fed.cache),
        **keep,
    )
