"""EAGLE: written and read as the EAGLE project's own checkpoints, which vLLM reads too."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from drafters import EAGLE
from drafters.protocol import BaseShape, BaseWeights
from train.export.formats.decoder_layers import layer_config, read_layers
from train.export.formats.public_checkpoint import PublicCheckpoint, PublicDrafter
from train.export.formats.speculators import Verifier

LAYER = "layers.0."


def eagle_config(drafter: EAGLE, shape: BaseShape, verifier: Verifier) -> dict[str, Any]:
    """Return the config.json of vLLM's EAGLE for LLaMA.

    Raises:
        ValueError: The drafter has a bias, which vLLM's has not.
    """
    if drafter.fc.bias is not None:
        raise ValueError("vLLM's EAGLE has no bias behind its first projection: train with fc_bias: false")
    layers = layer_config(shape, 1, verifier.context_length, "llama")
    return {"architectures": ["LlamaForCausalLM"], **layers, "mlp_bias": False, "bias": False}


def eagle_weights(drafter: EAGLE) -> dict[str, Tensor]:
    """Return the weights by their public names; the embedding and the LM head are the base's."""
    weights = drafter.state_dict()
    return {
        LAYER + name.removeprefix("layer.") if name.startswith("layer.") else name: weight
        for name, weight in weights.items()
    }


def read_eagle(checkpoint: PublicCheckpoint, base: BaseShape, base_weights: BaseWeights) -> PublicDrafter:
    """Read an EAGLE drafter.

    Raises:
        ValueError: A setting or a weight is missing or wrong, or EAGLE here cannot compute the same.
    """
    layers = read_layers(checkpoint, checkpoint.config, base, "llama")
    if layers.num_layers != 1:
        checkpoint.refuse(f"it has {layers.num_layers} layers, and EAGLE here has one")
    checkpoint.drop_copy("embed_tokens.weight", base_weights.embedding, "an embedding")
    checkpoint.drop_copy("lm_head.weight", base_weights.head, "an LM head")
    layer = layers.expand(checkpoint.take_all(LAYER))
    weights = {f"layer.{name}": weight for name, weight in layer.items()}
    weights |= {f"fc.{name}": weight for name, weight in checkpoint.take_all("fc.").items()}
    return PublicDrafter("drafters.EAGLE", {"fc_bias": "fc.bias" in weights}, layers.shape, weights)
