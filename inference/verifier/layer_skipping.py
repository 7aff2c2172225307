"""Self-speculative decoding: the base drafts for itself with some sublayers switched off, on its own KV cache."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.files import read_json, reading, validated
from drafters.training_free.draft_model import DraftedTokens, DraftSession
from drafters.tree import DraftTree
from inference.verifier.layers import compute_hidden_states
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler


def sublayers(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the attention modules and the MLP modules of the decoder layers of a model without its LM head.

    Raises ValueError if the model has neither the layout of LLaMA nor that of GPT-2.
    """
    decoder: Any = model  # torch types the attributes of a module as Tensor | Module
    layers = list(getattr(decoder, "layers", None) or getattr(decoder, "h", None) or [])
    for name in ("self_attn", "attn"):
        if layers and all(hasattr(layer, name) and hasattr(layer, "mlp") for layer in layers):
            return [getattr(layer, name) for layer in layers], [layer.mlp for layer in layers]
    raise ValueError(
        f"no sublayers of {decoder.config.model_type} models can be left out: pass a base laid out like LLaMA or GPT-2"
    )


class _NoAttention(nn.Module):
    def forward(self, hidden_states: Tensor, *_, **__) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class _NoMLP(nn.Module):
    def forward(self, hidden_states: Tensor, *_, **__) -> Tensor:
        return torch.zeros_like(hidden_states)


def without_sublayers(model: nn.Module, attention: Sequence[int], mlp: Sequence[int]) -> nn.Module:
    """Return a view of a model that leaves out sublayers: they do not run, and add zero to the residual stream.

    The norm before a sublayer still runs, and layers without their attention cache nothing. The view shares all modules
    with the model, which has no LM head, except for the decoder and the layers that lack a sublayer, which are shallow
    copies: no weight is copied, and the model itself stays as it is, so that other threads may run it meanwhile. Make a
    new view for each draft, to follow changes of the model.
    """
    attentions, mlps = sublayers(model)
    replacements: dict[nn.Module, nn.Module] = dict.fromkeys((attentions[layer] for layer in attention), _NoAttention())
    replacements |= dict.fromkeys((mlps[layer] for layer in mlp), _NoMLP())
    return _with_replacements(model, replacements, depth=3)  # decoder, list of layers, layer, sublayer


def _with_replacements(module: nn.Module, replacements: dict[nn.Module, nn.Module], depth: int) -> nn.Module:
    """Return the module if nothing in it is replaced, else a shallow copy of it, ``depth`` levels deep."""
    if module in replacements or not depth:
        return replacements.get(module, module)
    children = {
        name: child and _with_replacements(child, replacements, depth - 1) for name, child in module._modules.items()
    }
    if children == module._modules:
        return module
    view = type(module).__new__(type(module))  # copy.copy takes ten times longer
    vars(view).update(vars(module), _modules=children)
    vars(view).pop("forward", None)  # one set on the module itself (accelerate does so) would run the whole module
    return view


def default_skips(num_layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the layers whose attention is skipped by default, and those whose MLP is: 1, 3, 5, ..., never the last."""
    every_second = tuple(range(1, num_layers - 1, 2))
    return every_second, every_second


def read_skips(file: str | Path, num_layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Read the layers whose attention is skipped, and those whose MLP is, of a base with ``num_layers`` layers.

    Raises ValueError if the file is no JSON object ``{"attention": [...], "mlp": [...]}``, or is for another base.
    """
    with reading(file, 'give a skip set {"attention": [...], "mlp": [...]}'):
        content = read_json(file)
        attention, mlp = (validated(tuple[int, ...], content[kind]) for kind in ("attention", "mlp"))
        if content.get("num_layers", num_layers) != num_layers:
            raise ValueError(
                f"it is for {content.get('base')} with {content['num_layers']} layers, and this base has {num_layers}"
            )
    return attention, mlp


class LayerSkippingSession(DraftSession):
    """The base with some sublayers skipped, as a draft model.

    It keeps no state of its own. Drafting and verification share one KV cache (Draft & Verify): a draft is written
    behind the committed tokens in the cache of the base's own runner, which the verifying session uses too, and rolled
    back before `write` returns. Before the prefill it drafts nothing. The seed of the sampler selects other samples for
    the same request; without a sampler, decoding is greedy. Raises ValueError if a layer whose attention or MLP is to
    be skipped does not exist or is named twice, or the base has neither LLaMA's nor GPT-2's layout.
    """

    def __init__(
        self,
        runner: Runner,
        attention: Sequence[int] = (),
        mlp: Sequence[int] = (),
        sampler: KeyedSampler | None = None,
    ) -> None:
        num_layers = len(sublayers(runner.causal_lm.base_model)[0])
        for kind, layers in (("attention", attention), ("mlp", mlp)):
            exist = all(type(layer) is int and 0 <= layer < num_layers for layer in layers)
            if not exist or len(set(layers)) < len(layers):
                choice = f"layers 0 to {num_layers - 1} of {runner.base.name}"
                raise ValueError(f"cannot skip {kind} {list(layers)}: name {choice}, none twice")
        self.runner, self.attention, self.mlp, self.sampler = runner, tuple(attention), tuple(mlp), sampler
        self.forwards, self.remembers, self.samples_drafts = 0, False, sampler is not None

    @torch.inference_mode()
    def write(
        self,
        seq: Sequence[int],
        num_tokens: int,
        eos: frozenset[int] = frozenset(),
        threshold: float = 0.0,
        draft_seed: int = 0,
    ) -> DraftedTokens:
        runner, sampler = self.runner, self.sampler and self.sampler.for_proposal(draft_seed)
        draft = DraftedTokens([], [])
        start, end = runner.cached, min(len(seq) + num_tokens, runner.context_length)
        if not start:
            return draft
        tokens, head = seq[start:], runner.causal_lm.get_output_embeddings()
        try:
            draft_model = without_sublayers(runner.causal_lm.base_model, self.attention, self.mlp)
            while start + len(tokens) < end:
                fed = runner.attention.feed(tokens, DraftTree(), start, runner.cache)
                logits = head(compute_hidden_states(draft_model, fed)[-1][0, -1:])  # (1, V)
                self.forwards += 1
                start += len(tokens)
                if sampler:
                    picked = sampler.pick(logits, [start])
                    draft.distributions.extend(sampler.probabilities(logits))
                else:
                    picked = logits.argmax(-1)
                # The probability at temperature 1 comes to the host with the token, by one copy.
                probability = logits.float().softmax(-1)[0, picked]
                token, probability_on_host = torch.cat([picked.double(), probability.double()]).tolist()
                tokens = [int(token)]
                draft.tokens.extend(tokens)
                if int(token) in eos or probability_on_host < threshold:
                    break
        finally:
            runner.truncate(runner.cached)
        return draft
