"""Drafters as GGUF files: speculators' EAGLE-3, DSpark and DFlash under llama.cpp's names.

Names, layouts and meanings are those of llama.cpp's converter and of its models ``dflash`` and ``eagle3`` of October
2026. There DSpark is a ``dflash`` with a Markov bias.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.files import reading, write_text
from data.gguf import BASE_NAME, DRAFTER_FILE, check_installed, is_gguf, read_gguf, short_number
from data.hub import find_base
from data.safe_text import code_span
from data.tokenizer import load_tokenizer
from drafters import EAGLE3, Block
from drafters.checkpoint import DrafterConfig
from drafters.nn.transformer import RotaryEmbedding
from drafters.protocol import BaseShape, LearnedDrafter
from train.formats.public import PublicCheckpoint
from train.formats.vllm import converted
from train.model_card import card_header, described_base

SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""The settings of the decoder layers, by their names in GGUF."""
SETTINGS = {
    "dflash": {
        "block_size": "block_size",
        "target_layers": "aux_hidden_state_layer_ids",
        "sample_from_anchor": "sample_from_anchor",
        "has_confidence_head": "enable_confidence_head",
    },
    "eagle3": {
        "target_layers": "eagle_aux_hidden_state_layer_ids",
        "target_hidden_size": "target_hidden_size",
        "norm_before_residual": "norm_before_residual",
        "norm_before_fc": "norm_before_fc",
    },
}
"""The settings of both models."""
WEIGHTS = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}
LAYER_WEIGHTS = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROTATED = "self_attn.q_proj.weight", "self_attn.k_proj.weight"
"""Of EAGLE-3: there the two halves of a head, which turn together, alternate row by row."""
MASK, FACTORS = "tokenizer.ggml.mask_token_id", "rope_freqs.weight"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens


def write(
    folder: Path, drafter: LearnedDrafter, config: DrafterConfig, mask_token_id: int | None, dtype: torch.dtype
) -> None:
    """Write model.gguf, with matrices in this dtype and the tokenizer of the base, and README.md.

    Raises ValueError if llama.cpp has no method that drafts in the same way, or a package is missing.
    """
    check_installed("gguf")
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    method, num_tokens, values, weights = converted(drafter, config, mask_token_id, dtype, "gguf")
    arch, layers = "eagle3" if method == "eagle3" else "dflash", values["transformer_layer_config"]
    if isinstance(drafter, EAGLE3) and drafter.has_qk_norm:
        raise ValueError("the gguf format of EAGLE-3 has no has_qk_norm: train it with has_qk_norm: false")
    if isinstance(drafter, EAGLE3) and len(drafter.required_outputs.hidden_layers) != 3:
        raise ValueError("the gguf format of EAGLE-3 fuses three layers: train it with three hidden_layers")
    if isinstance(drafter, Block) and drafter.first_frame and not drafter.markov:
        method, weights = "dflash", {name: w for name, w in weights.items() if not name.startswith("markov")}
    fields = {f"{arch}.{name}": layers[size] for name, size in SIZES.items()}
    fields |= {f"{arch}.{name}": values[setting] for name, setting in SETTINGS[arch].items()}
    fields |= {f"{arch}.vocab_size": layers["vocab_size"], f"{arch}.rope.dimension_count": layers["head_dim"]}
    fields |= {"general.base_model.count": 1, BASE_NAME: config.base_name, **_tokenizer(config)}
    if method != "eagle3":
        fields[MASK] = values["mask_token_id"]
    writer = GGUFWriter(folder / DRAFTER_FILE, arch)
    add: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add |= {str: writer.add_string, list: writer.add_array}
    for name, value in fields.items():
        add[type(value)](name, value)
    if config.base.rope_factor != 1:
        writer.add_tensor(FACTORS, _rope_factors(config.base).numpy())
    names = _names(layers["num_hidden_layers"])
    kinds = {torch.bfloat16: GGMLQuantizationType.BF16, torch.float16: GGMLQuantizationType.F16}
    for name, weight in weights.items():
        if name == "d2t":  # here the ids themselves
            writer.add_tensor(name, (weight + torch.arange(len(weight))).numpy())
        elif name != "t2d":
            if arch == "eagle3" and name.endswith(ROTATED):
                weight = weight.unflatten(0, (-1, 2, layers["head_dim"] // 2)).transpose(1, 2).flatten(0, 2)
            kind = kinds.get(dtype, GGMLQuantizationType.F32) if weight.ndim > 1 else GGMLQuantizationType.F32
            place, _, part = name.rpartition(".")
            writer.add_tensor(f"{names[place]}.{part}", quantize(weight.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    card = f"""{card_header(config, None, "gguf")}
The drafter for llama.cpp, whose type `draft-{method}` proposes one chain of tokens without a tree:

    llama-server -m BASE.gguf -md {DRAFTER_FILE} --spec-type draft-{method} --spec-draft-n-max {num_tokens} -fa on

- Base: {described_base(config)}
- Command of the training: {code_span(config.training.get("command") or "not recorded")}
"""
    write_text(folder / "README.md", card)


def _names(num_layers: int) -> dict[str, str]:
    """The names in GGUF of speculators' weights, without the last part, ``weight`` or ``bias``."""
    return WEIGHTS | {
        f"layers.{number}.{name}": f"blk.{number}.{short}"
        for number in range(num_layers)
        for name, short in LAYER_WEIGHTS.items()
    }


def _rope_factors(shape: BaseShape) -> Tensor:
    """What Llama 3's scaling divides each frequency by, (d / 2,)."""
    cpu = torch.device("cpu")
    plain = RotaryEmbedding(replace(shape, rope_factor=1.0)).frequencies(cpu)
    return plain / RotaryEmbedding(shape).frequencies(cpu)


def _tokenizer(config: DrafterConfig) -> dict[str, Any]:
    """The fields of the base's tokenizer: of a GGUF file, those there; ValueError if it has none that are known."""
    source = find_base(config.base_name)
    if is_gguf(source):
        stored = read_gguf(Path(source)).fields
        return {name: field.contents() for name, field in stored.items() if name.startswith("tokenizer.")}
    tokenizer: Any = load_tokenizer(config.base_name)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ValueError(
            f"the tokenizer of {config.base_name} is not of GPT-2's kind: pass the GGUF file of the base with --base"
        )
    ids = {token: name for name, token in tokenizer.get_vocab().items()}
    words = tokenizer.added_tokens_decoder
    added = {token: CONTROL if word.special else USER_DEFINED for token, word in words.items()}
    everyone = range(config.base.vocab_size)
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",  # how a text is split before, which a drafter does not do
        "tokenizer.ggml.tokens": [ids.get(token, f"[PAD{token}]") for token in everyone],
        "tokenizer.ggml.token_type": [added.get(token, NORMAL if token in ids else UNUSED) for token in everyone],
        "tokenizer.ggml.merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
    }
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    return fields | {f"tokenizer.ggml.{name}_token_id": token for name, token in special.items() if token is not None}


# ---- reading


def read(path: Path) -> PublicCheckpoint:
    """Read a file of llama.cpp's ``dflash`` or ``eagle3`` as the checkpoint of speculators that it holds.

    Raises ValueError if it is damaged, or holds something else or weights of fewer than 16 bits.
    """
    content = read_gguf(path)
    fields = {name: field.contents() for name, field in content.fields.items()}
    arch = fields.get("general.architecture")
    checkpoint = PublicCheckpoint(path, {}, {})
    if arch not in SETTINGS:
        checkpoint.refuse(f"it holds a model {arch}; read are {' and '.join(SETTINGS)}")
    settings = {f"{arch}.{short}": name for short, name in (SIZES | SETTINGS[arch]).items()}
    known = {*settings, *(f"{arch}.{name}" for name in ("vocab_size", "rope.dimension_count", "attention.causal"))}
    if unknown := sorted(name for name in fields.keys() - known if name.startswith(f"{arch}.")):
        checkpoint.refuse(f"no drafter here has {unknown[0]}")
    values = {name: short_number(fields[short]) for short, name in settings.items() if short in fields}
    layers = {name: values.pop(name) for name in dict.fromkeys(SIZES.values()) if name in values}
    weights = checkpoint.weights
    with reading(path):
        names = {short: name for name, short in _names(layers["num_hidden_layers"]).items()}
        layers["vocab_size"] = vocab_size = len(fields["tokenizer.ggml.tokens"])
        for tensor in content.tensors:
            place, _, part = tensor.name.rpartition(".")
            name = f"{names[place]}.{part}" if place in names else tensor.name
            weights[name] = _weight(checkpoint, tensor)
            if arch == "eagle3" and name.endswith(ROTATED):
                halves = weights[name].unflatten(0, (-1, layers["head_dim"] // 2, 2))
                weights[name] = halves.transpose(1, 2).flatten(0, 2)
        if "d2t" in weights:
            weights["d2t"] -= torch.arange(len(weights["d2t"]))
    for name, weight in weights.items():  # vectors have 32 bits, whatever was trained
        dtype = weights["fc.weight"].dtype if "fc.weight" in weights else weight.dtype
        if weight.ndim == 1 and weight.is_floating_point() and torch.equal(weight.to(dtype).float(), weight):
            weights[name] = weight.to(dtype)
    has_markov = "markov_head.markov_w1.weight" in weights
    checkpoint.config = values | {
        "speculators_model_type": "eagle3" if arch == "eagle3" else "dspark" if has_markov else "dflash",
        "speculators_config": {"verifier": {"name_or_path": fields.get(BASE_NAME)}},
        "transformer_layer_config": layers,
        "draft_vocab_size": len(weights.get("d2t", range(vocab_size))),
        "mask_token_id": fields.get(MASK),
        "is_causal": fields.get("dflash.attention.causal"),
        "norm_before_residual": values.get("norm_before_residual", False),
        "sample_from_anchor": has_markov and values.get("sample_from_anchor", True),
    }
    return checkpoint


def _weight(checkpoint: PublicCheckpoint, tensor: Any) -> Tensor:
    from gguf import dequantize

    kind = tensor.tensor_type.name
    if kind == "I64":
        return torch.from_numpy(tensor.data.copy())
    if kind not in ("F32", "F16", "BF16"):
        checkpoint.refuse(f"its {tensor.name} is quantised ({kind}): convert the drafter in 16 bits")
    weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    return weight.to({"BF16": torch.bfloat16, "F16": torch.float16}.get(kind, torch.float32))
