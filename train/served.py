"""Hidden states that a vLLM server has computed and speculators' data generation has written, one file a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from data.features import LAST_HIDDEN
from data.files import hash_of, reading
from drafters.protocol import TrainingBatch
from inference.verifier.base import Base
from inference.verifier.sampling import most_probable

if TYPE_CHECKING:
    from datasets import Dataset

AGAIN = "delete it, and run data_generation_offline.py again, which writes what is missing"


@dataclass(frozen=True)
class ServedStates:
    """A folder of ``hs_*.safetensors``, each with ``token_ids`` (S,) and ``hidden_states`` (S, F, D) of F layers.

    The layers count as ours, but the last one is stored before the final norm. The files do not say which layers they
    hold: they are those that the server was started with, in ascending order.
    """

    folder: Path
    layers: tuple[int, ...]
    files: dict[bytes, Path]  # by `key_of` their tokens

    @classmethod
    def scan(
        cls, folder: Path, held: tuple[int, ...], base: Base, layers: Sequence[int], max_length: int
    ) -> ServedStates:
        """Read the headers and tokens of all files of a folder, whose texts may be longer than ``max_length`` tokens.

        Raises ValueError if a file is damaged or of another base, or they do not hold all ``layers`` and the last one.
        """
        shape = base.shape
        needed = {shape.num_layers if layer == LAST_HIDDEN else layer for layer in (LAST_HIDDEN, *layers)}
        if list(held) != sorted(held) or not needed <= set(held):
            names = [",".join(map(str, numbers)) for numbers in (held, sorted(needed))]
            raise ValueError(
                f"the served layers {names[0]} must ascend and hold {names[1]} (the labels need {shape.num_layers}): "
                "start the server with them as --target-layer-ids, and pass its layers as --served_layers"
            )
        if not hasattr(base.model.base_model, "norm"):
            raise ValueError(f"the final norm of a {base.config.model_type} base is not known: leave served out")
        files = {}
        for path in sorted(folder.glob("hs_*.safetensors")):
            with reading(path, AGAIN), safe_open(path, framework="pt") as opened:
                tokens, found = opened.get_tensor("token_ids"), opened.get_slice("hidden_states").get_shape()
                expected = [len(tokens), len(held), shape.hidden_size]
            if found != expected:
                raise ValueError(
                    f"{path}: hidden_states is {found}, not {expected} (tokens, the layers {','.join(map(str, held))}, "
                    f"hidden size of {base.name}): pass the served base, and its --target-layer-ids as --served_layers"
                )
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < shape.vocab_size:
                problem = f"its tokens reach {tokens.max()}, but {base.name} has 0 to {shape.vocab_size - 1}"
                raise ValueError(f"{path}: {problem}: pass the served base")
            files[key_of(tokens[:max_length])] = path
        if not files:
            raise ValueError(f"{folder} has no hs_*.safetensors: give the --output of data_generation_offline.py")
        return cls(folder, held, files)

    def check(self, texts: Dataset) -> None:
        """Raise ValueError if a tokenised conversation has no file."""
        rows = texts.with_format("torch", ["input_ids"])
        missing = [number for number, row in enumerate(rows) if key_of(row["input_ids"]) not in self.files]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(texts)} conversations have no hidden states in {self.folder}, the first is "
                f"{texts[missing[0]]['id']}: run data_generation_offline.py again, or give files, template and "
                "max_length as they were served"
            )

    @torch.no_grad()
    def compute(self, base: Base, layers: Sequence[int], input_ids: Tensor, loss_mask: Tensor) -> TrainingBatch:
        """Do as `train.features.compute_features` for one text (1, S), with the base's final norm and LM head only."""
        path, length, head = self.files[key_of(input_ids[0])], input_ids.shape[1], base.base_weights.head
        decoder: Any = base.model.base_model
        with reading(path, AGAIN), safe_open(path, framework="pt") as opened:
            held = opened.get_slice("hidden_states")[:length].to(head.device, head.dtype)
        states = dict(zip(self.layers, held.unbind(1), strict=True))
        states[LAST_HIDDEN] = states[base.shape.num_layers] = decoder.norm(states[base.shape.num_layers])
        hidden, labels = torch.cat([states[layer] for layer in layers], -1), most_probable(states[-1] @ head.T)
        return TrainingBatch(hidden[None], states[-1][None], input_ids, labels[None], loss_mask)


def key_of(tokens: Tensor) -> bytes:
    """Return the key under which the file of a text (S,) is found."""
    return bytes.fromhex(hash_of([tokens.cpu().to(torch.int32).numpy().tobytes()], 32))
