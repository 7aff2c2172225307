"""The base drafting for itself: sublayers switched off for a while, on the very cache it verifies with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from drafters.protocol import DraftedTokens
from inference.engine.runner import Runner
from inference.engine.sampling import KeyedSampler, RunningSampler


def sublayers(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The attention and the MLP of every decoder layer of a transformers model without its head.

    Raises:
        ValueError: It is laid out like neither LLaMA nor GPT-2.
    """
    layers = list(getattr(model, "layers", None) or getattr(model, "h", None) or [])
    for name in ("self_attn", "attn"):
        if layers and all(hasattr(layer, name) and hasattr(layer, "mlp") for layer in layers):
            return [getattr(layer, name) for layer in layers], [layer.mlp for layer in layers]
    raise ValueError(
        f"no sublayers of {model.config.model_type} models can be left out: pass a base laid out like LLaMA or GPT-2"
    )


def _no_attention(hidden_states: Tensor, *_, **__) -> tuple[Tensor, None]:
    return torch.zeros_like(hidden_states), None


def _no_mlp(hidden_states: Tensor, *_, **__) -> Tensor:
    return torch.zeros_like(hidden_states)


@contextmanager
def skipping(model: nn.Module, attention: Sequence[int], mlp: Sequence[int]) -> Iterator[None]:
    """Leave sublayers out: what they add to the residual stream is zero, and they do not run.

    Their ``forward`` is covered by another one on the module itself; the norm before them still runs. Afterwards the
    modules are as they were, whatever was raised.

    Args:
        model: A transformers model without its head.
        attention: Layers whose attention is left out; their cache does not grow.
        mlp: Layers whose MLP is left out.
    """
    attentions, mlps = sublayers(model)
    covers = [*((attentions[layer], _no_attention) for layer in attention), *((mlps[layer], _no_mlp) for layer in mlp)]
    owned = [(module, vars(module).get("forward")) for module, _ in covers]  # a wrapper may have put one there
    try:
        for module, cover in covers:
            module.forward = cover
        yield
    finally:
        for module, forward in owned:
            if forward is None:
                vars(module).pop("forward", None)
            else:
                module.forward = forward


def default_skips(num_layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What is skipped where nothing was searched: attention and MLP of layers 1, 3, 5, ..., never of the last.

    The base skips about half of itself; a base of two layers skips nothing.
    """
    every_second = tuple(range(1, num_layers - 1, 2))
    return every_second, every_second


def read_skips(file: str | Path, num_layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The skip set ``{"attention": [...], "mlp": [...]}`` that `drafters skip-search` writes.

    Raises:
        ValueError: There is no such file, it holds none, or was searched for a base of another depth.
    """
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        attention, mlp = (tuple(found[kind]) for kind in ("attention", "mlp"))
    except OSError as error:
        raise ValueError(
            f"cannot read the skip set {file} ({error.strerror}): make one by `drafters skip-search`"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f'{file} holds no skip set: need {{"attention": [...], "mlp": [...]}}: make one by `drafters skip-search`'
        ) from error
    if found.get("num_layers", num_layers) != num_layers:
        raise ValueError(
            f"the skip set {file} is for {found.get('base')} with {found['num_layers']} layers, and this base has "
            f"{num_layers}: run `drafters skip-search` with it"
        )
    return attention, mlp


class LayerSkippingSession:
    """A session of the base with sublayers left out; implements `drafters.protocol.DraftSession`.

    It holds nothing of its own: it writes on the cache of the base's runner, behind what is committed there, and takes
    everything back before it returns; drafting and verifying share one cache (Draft & Verify). Before the prefill it
    writes nothing.

    Args:
        runner: The base's own runner, which the session that verifies uses too.
        attention: Layers whose attention is left out.
        mlp: Layers whose MLP is left out.
        sampler: How draft tokens are picked; greedily unless said otherwise.

    Raises:
        ValueError: A layer is not there or named twice, or the base is laid out otherwise than LLaMA and GPT-2.
    """

    def __init__(
        self,
        runner: Runner,
        attention: Sequence[int] = (),
        mlp: Sequence[int] = (),
        sampler: KeyedSampler | None = None,
    ) -> None:
        num_layers = len(sublayers(runner.model)[0])
        for kind, layers in (("attention", attention), ("mlp", mlp)):
            known = all(type(layer) is int and 0 <= layer < num_layers for layer in layers)
            if not known or len(set(layers)) < len(layers):
                raise ValueError(
                    f"cannot skip {kind} {list(layers)}: name layers 0 to {num_layers - 1} of {runner.base.name}, none "
                    "twice"
                )
        self.runner, self.attention, self.mlp, self.sampler = runner, tuple(attention), tuple(mlp), sampler
        self.forwards = 0
        self.remembers = isinstance(sampler, RunningSampler)

    def begin(self, prompt: Sequence[int]) -> None:
        """Nothing is held."""

    def rewind(self, length: int) -> None:
        """Nothing is held."""

    def reset(self) -> None:
        """Nothing is held but the place in a row of draws."""
        if isinstance(self.sampler, RunningSampler):
            self.sampler.reset()

    @torch.inference_mode()
    def write(
        self, seq: Sequence[int], num_tokens: int, eos: frozenset[int] = frozenset(), threshold: float = 0.0
    ) -> DraftedTokens:
        runner, tokens, distributions = self.runner, [], []
        start, end = runner.cached, min(len(seq) + num_tokens, runner.context_length)
        if not start:
            return DraftedTokens(tokens, distributions)
        fed = seq[start:]
        try:
            with skipping(runner.model, self.attention, self.mlp):
                while start + len(fed) < end:
                    logits = runner.forward_uncommitted(fed, start)
                    self.forwards += 1
                    start += len(fed)
                    token, probability = self._pick(logits, start, distributions)
                    tokens.append(token)
                    fed = [token]
                    if token in eos or probability < threshold:
                        break
        finally:
            runner.rollback()
        return DraftedTokens(tokens, distributions)

    def _pick(self, logits: Tensor, position: int, distributions: list[Tensor]) -> tuple[int, float]:
        """The next token and how probable it is before any warping, by one copy to the host."""
        if self.sampler:
            picked = self.sampler.pick(logits, [position])
            distributions += self.sampler.probabilities(logits)
        else:
            picked = logits.argmax(-1)
        probability = logits.float().softmax(-1)[0, picked]
        token, probable = torch.cat([picked.double(), probability.double()]).tolist()
        return int(token), probable
