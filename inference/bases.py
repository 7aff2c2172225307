"""Loads the models of bases with transformers: from a folder, a GGUF file or the Hugging Face hub."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from logging import ERROR, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from data.dtypes import Dtype
from data.files import cause_of, check_files, reading
from data.gguf import check_gguf, is_gguf, load_gguf, short_number
from data.hub import find_base, load_pretrained

if TYPE_CHECKING:
    from transformers import PretrainedConfig

QUANTIZED_DTYPES = "int8", "nf4"


def load_config(name: str) -> PretrainedConfig:
    """Load the configuration of a base, given as for `load_tokenizer`, or raise ValueError, which says what to do."""
    from transformers import AutoConfig

    try:
        if not is_gguf(source := find_base(name)):
            return load_pretrained(AutoConfig, name)
        check_gguf(Path(source))
        return _with_short_numbers(load_gguf(AutoConfig, Path(source)))
    except Exception as error:  # transformers and the hub client raise errors of their own
        raise ValueError(f"cannot load the configuration of {name}: {cause_of(error)}") from error


def load_model(name: str, dtype: Dtype | Literal["auto"], device: str | torch.device) -> Any:
    """Load the causal language model of a base, given as for `load_tokenizer`, for inference only.

    On a CPU, weights in the dtype of the file, as all are with ``auto``, are mapped from it: processes share them.
    Raises ValueError, which says what to do, if it cannot be loaded in this dtype to this device.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    with reading(f"device {device}"):
        torch.empty(0, device=device)
    source = find_base(name)
    check_files(Path(source))
    options = {"dtype": getattr(torch, dtype, dtype)}  # transformers knows "auto", too
    if dtype in QUANTIZED_DTYPES:
        options = quantization_options(dtype, device)
    try:
        if is_gguf(source):
            model = _load_gguf_model(Path(source), **options)
        else:
            model = load_pretrained(AutoModelForCausalLM, name, **options)
    except Exception as error:  # transformers, the hub client and safetensors each raise errors of their own
        remedy = "give the folder of the base" if is_gguf(source) else "if a file is damaged, copy or download it again"
        raise ValueError(f"cannot load the base {name}: {cause_of(error)}; {remedy}") from error
    eos = model.generation_config.eos_token_id
    if not (eos is None or all(isinstance(token, int) for token in (eos if isinstance(eos, list) else [eos]))):
        raise ValueError(f"the generation_config.json of {name} has the eos_token_id {eos!r}: give token ids")
    return model.to(device).eval().requires_grad_(False)


def _load_gguf_model(path: Path, **options: Any) -> Any:
    """Load a model with dequantised weights; raise ValueError if that leaves out weights or a scaling of positions."""
    import transformers

    content = check_gguf(path)
    if "quantization_config" in options:
        raise ValueError("a GGUF file is loaded in float32, bfloat16 or float16")
    if hasattr(transformers, "GgufConfig"):  # versions without it always dequantise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = load_gguf(transformers.AutoModelForCausalLM, path, **options)
    config = _with_short_numbers(model.config)
    config.name_or_path = str(path)
    rope = getattr(config, "rope_parameters", None) or {}
    if content.scaling != "none" and rope.get("rope_type", "default") == "default":
        raise ValueError(f"transformers leaves out how its positions are scaled ({content.scaling})")
    if (num_weights := sum(weight.numel() for weight in model.parameters())) != content.num_weights:
        # Llama 3 keeps the scaling of its positions in weights, rope_freqs; a part of a split model has fewer.
        raise ValueError(f"it holds {content.num_weights:,} weights, but its model in transformers {num_weights:,}")
    return model


def _with_short_numbers(config: Any) -> Any:
    for name, value in [(name, value) for name, value in vars(config).items() if type(value) is float]:
        setattr(config, name, short_number(value))
    return config


def quantization_options(dtype: str, device: str | torch.device) -> dict[str, Any]:
    """Return the arguments that make transformers quantise a model while loading it."""
    if missing := [package for package in ("bitsandbytes", "accelerate") if find_spec(package) is None]:
        raise ValueError(
            f"a base in {dtype} needs {' and '.join(missing)}: pip install {' '.join(missing)}, or take bfloat16"
        )
    from transformers import BitsAndBytesConfig

    getLogger("bitsandbytes").setLevel(ERROR)  # it warns at every matrix product that int8 multiplies in float16
    compute_dtype = torch.bfloat16
    config = BitsAndBytesConfig(load_in_8bit=True)
    if dtype == "nf4":
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute_dtype)
    return {"dtype": compute_dtype, "quantization_config": config, "device_map": {"": device}}
