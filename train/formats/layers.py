"""The decoder layers of a draft module in the configurations and weights of public formats."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from data.files import reading, validated
from drafters.protocol import BaseShape
from inference.verifier.base import shape_of
from train.formats.public import PublicCheckpoint

MAX_SIZE = 1 << 24  # of any number in a configuration
MAY_BE_ZERO = "sliding_window", "max_window_layers"
LLAMA3 = "llama3"  # the type of Llama 3's rotary scaling
ROPE = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_frequency",
    "high_freq_factor": "rope_high_frequency",
    "original_max_position_embeddings": "rope_original_length",
}
"""Its settings, and the sizes of `BaseShape` that they are here."""
# The settings of transformers' LLaMA and Qwen3 that decide what a layer computes, and in the last line vLLM's.
SETTINGS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "rope_theta", "rope_scaling"),
    *("rope_parameters", "attention_bias", "mlp_bias", "use_sliding_window", "sliding_window"),
    *("max_window_layers", "layer_types", "is_neox_style", "logit_scale"),
)


@dataclass(frozen=True)
class DecoderLayers:
    """Decoder layers that a drafter here can compute."""

    shape: BaseShape  # their sizes, with those of the base
    num_layers: int
    num_key_value_heads: int  # in the checkpoint

    def expand(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights with keys and values for every head: grouped heads are repeated, which computes the same."""
        repeats, groups = self.shape.num_heads // self.num_key_value_heads, self.num_key_value_heads
        return {
            name: weight.unflatten(0, (groups, -1)).repeat_interleave(repeats, dim=0).flatten(0, 1)
            # The comparison with the drafter names a weight of a wrong shape.
            if name.endswith(("k_proj.weight", "v_proj.weight")) and not weight.shape[0] % groups
            else weight
            for name, weight in weights.items()
        }


def layer_config(shape: BaseShape, num_layers: int, context_length: int, model_type: str) -> dict[str, Any]:
    """The configuration of LLaMA's or Qwen3's layers, as transformers names its settings."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if shape.rope_factor != 1:
        rope = {"rope_type": LLAMA3} | {name: getattr(shape, size) for name, size in ROPE.items()}
    return {
        "model_type": model_type,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": context_length,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": rope | {"rope_theta": shape.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }


def read_layers(checkpoint: PublicCheckpoint, values: Any, base: BaseShape, model_type: str) -> DecoderLayers:
    """Read the part of config.json that describes the decoder layers, of ``model_type`` where it names no type.

    Raises ValueError if a setting has a wrong type, or the layers compute something that none here computes.
    """
    if not isinstance(values, dict):
        checkpoint.refuse("config.json does not describe its layers")
    stated = {name: values[name] for name in SETTINGS if values.get(name) is not None}
    model_type = values.get("model_type", model_type)
    if model_type not in ("llama", "qwen3"):
        checkpoint.refuse(f"its layers are those of {model_type}, not of LLaMA or Qwen3")
    for name, value in stated.items():
        if type(value) in (int, float) and name not in MAY_BE_ZERO and not 0 < value <= MAX_SIZE:
            raise ValueError(f"{checkpoint.described_in}: {name} is {value}")
    # transformers raises errors of its own kinds for settings that do not fit.
    with reading(checkpoint.described_in):
        config: Any = (LlamaConfig if model_type == "llama" else Qwen3Config)(**stated)
        shape = shape_of(config)
    _check_computation(checkpoint, config)
    shape = _scaled(checkpoint, shape, config.rope_parameters)
    for size in ("hidden_size", "vocab_size"):
        if (here := getattr(shape, size)) != (expected := getattr(base, size)):
            checkpoint.refuse(f"its {size} is {here}, but the base has {expected}: pass the base it was trained for")
    groups = config.num_key_value_heads
    if groups < 1 or shape.num_heads % groups:
        checkpoint.refuse(f"its {shape.num_heads} heads cannot share {groups} heads of keys and values")
    shape = replace(shape, num_layers=base.num_layers)
    return DecoderLayers(shape, config.num_hidden_layers, groups)


def _check_computation(checkpoint: PublicCheckpoint, config: Any) -> None:
    rope = config.rope_parameters
    if config.hidden_act not in ("silu", "swish"):
        checkpoint.refuse(f"its activation is {config.hidden_act}, not silu")
    if config.attention_bias or getattr(config, "mlp_bias", False):
        checkpoint.refuse("its layers have biases (attention_bias or mlp_bias)")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        checkpoint.refuse("its layers attend to a sliding window (layer_types, use_sliding_window)")
    if getattr(config, "is_neox_style", True) is False:
        checkpoint.refuse("its rotary positions turn neighbouring dimensions (is_neox_style: false)")
    if getattr(config, "logit_scale", 1.0) != 1.0:
        checkpoint.refuse(f"its logits are scaled (logit_scale: {config.logit_scale:g})")
    if rope.get("rope_type", "default") not in ("default", LLAMA3) or rope.get("partial_rotary_factor", 1.0) != 1.0:
        checkpoint.refuse(f"its rotary positions are scaled or partial ({validated(dict, rope)})")


def _scaled(checkpoint: PublicCheckpoint, shape: BaseShape, rope: dict[str, Any]) -> BaseShape:
    """Sizes with the scaling of rotary positions."""
    if rope.get("rope_type") != LLAMA3:
        return shape
    scaled: BaseShape = checkpoint.settings(BaseShape, vars(shape) | {ROPE[name]: rope.get(name) for name in ROPE})
    low, high = scaled.rope_low_frequency, scaled.rope_high_frequency
    if not low < high:
        checkpoint.refuse(f"its rotary scaling has low_freq_factor {low} and high_freq_factor {high}")
    return scaled
