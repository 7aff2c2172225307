"""Tiny random models of many families, as transformers builds them from a configuration."""

from functools import cache
from typing import NamedTuple

import pytest
import torch

VOCAB, CONTEXT, WINDOW, BORDER = 40, 64, 8, 16
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": CONTEXT, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": BORDER,
    "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0],
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": BORDER,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": BORDER}


class Family(NamedTuple):
    """A configuration class of transformers without its ``Config``, and what a tiny model of it is given."""

    name: str
    arguments: dict


FAMILIES = {
    "LLaMA": Family("Llama", {}),
    "LLaMA, llama3 scaling": Family("Llama", {"rope_parameters": LLAMA3}),
    "LLaMA, yarn scaling": Family("Llama", {"rope_parameters": YARN}),
    "LLaMA, longrope scaling": Family("Llama", {"rope_parameters": LONGROPE}),
    "Mistral": Family("Mistral", {"sliding_window": None}),
    "Mistral, sliding window": Family("Mistral", {"sliding_window": WINDOW}),
    "Ministral": Family("Ministral", {"head_dim": 8, **ALTERNATING}),
    "Mixtral": Family("Mixtral", {"sliding_window": WINDOW, **EXPERTS}),
    "Qwen2": Family("Qwen2", {}),
    "Qwen2, sliding window": Family(
        "Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "Qwen2-MoE": Family("Qwen2Moe", {"shared_expert_intermediate_size": 16, **EXPERTS}),
    "Qwen3": Family("Qwen3", {"head_dim": 8}),
    "Qwen3-MoE": Family("Qwen3Moe", {"head_dim": 8, **EXPERTS}),
    "Gemma": Family("Gemma", {"head_dim": 8}),
    "Gemma 2": Family("Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, **ALTERNATING}),
    "Gemma 3": Family("Gemma3Text", {"head_dim": 8, "query_pre_attn_scalar": 8, **ALTERNATING}),
    "gpt-oss": Family("GptOss", {"head_dim": 8, **ALTERNATING, **EXPERTS}),
    "Phi": Family("Phi", {"num_key_value_heads": 2}),
    "Phi-3": Family("Phi3", {}),
    "Phi-3, longrope scaling": Family(
        "Phi3", {"original_max_position_embeddings": BORDER, "rope_parameters": LONGROPE}
    ),
    "Phi-MoE": Family("Phimoe", EXPERTS),
    "OLMo": Family("Olmo", {}),
    "OLMo 2": Family("Olmo2", {}),
    "OLMo 3": Family("Olmo3", ALTERNATING),
    "OLMoE": Family("Olmoe", EXPERTS),
    "Cohere": Family("Cohere", {"logit_scale": 0.5}),
    "Cohere 2": Family("Cohere2", ALTERNATING),
    "Granite": Family("Granite", {"logits_scaling": 2.0, "embedding_multiplier": 3.0}),
    "Granite-MoE": Family("GraniteMoe", EXPERTS),
    "DeepSeek-V2": Family("DeepseekV2", LATENT),
    "DeepSeek-V3": Family("DeepseekV3", LATENT),
    "Llama 4 (text)": Family(
        "Llama4Text",
        {
            "head_dim": 8, "intermediate_size_mlp": 16, "attention_chunk_size": WINDOW, "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"], "moe_layers": [1], **EXPERTS,
        },
    ),
    "EXAONE 4": Family("Exaone4", {"sliding_window_pattern": 2, **ALTERNATING}),
    "SmolLM3": Family("SmolLM3", {}),
    "GLM-4": Family("Glm4", {"head_dim": 8}),
    "StarCoder2": Family("Starcoder2", {"sliding_window": WINDOW}),
    "StableLM": Family("StableLm", {}),
    "Nemotron": Family("Nemotron", {"head_dim": 8}),
    "GPT-2": Family("GPT2", GPT),
    "GPT-NeoX": Family("GPTNeoX", {}),
    "GPT-J": Family("GPTJ", {**GPT, "rotary_dim": 4}),
    "GPTBigCode": Family("GPTBigCode", GPT),
    "OPT": Family("OPT", {"ffn_dim": 16, "word_embed_proj_dim": 16}),
    "Falcon": Family("Falcon", {"alibi": False}),
    "BERT": Family("Bert", {"is_decoder": True}),
    "ELECTRA": Family("Electra", {"is_decoder": True, "embedding_size": 16}),
    "ERNIE": Family("Ernie", {"is_decoder": True}),
    "ModernBERT (decoder)": Family("ModernBertDecoder", {"local_attention": WINDOW}),
    "RoBERTa": Family("Roberta", {"is_decoder": True}),
    "GPT-Neo": Family(
        "GPTNeo",
        {"num_layers": 2, "num_heads": 2, "window_size": WINDOW, "attention_types": [[["global", "local"], 1]]},
    ),
    "Falcon, ALiBi": Family("Falcon", {"alibi": True}),
    "BLOOM": Family("Bloom", {"n_layer": 2, "n_head": 2}),
    "MPT": Family("Mpt", {"d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": CONTEXT}),
    "BART (decoder)": Family(
        "Bart",
        {
            "d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16,
            "is_decoder": True, "is_encoder_decoder": False,
        },
    ),
    "Mamba": Family("Mamba", {"state_size": 4}),
    "RWKV": Family("Rwkv", {"attention_hidden_size": 16, "context_length": CONTEXT}),
    "Jamba": Family(
        "Jamba",
        {
            "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
            "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False, **EXPERTS,
        },
    ),
    "Qwen3-Next": Family(
        "Qwen3Next",
        {
            "head_dim": 8, "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"], **EXPERTS,
        },
    ),
    "LFM2": Family("Lfm2", {"layer_types": ["conv", "full_attention"]}),
}  # fmt: skip


@cache
def tiny_model(label, dtype=torch.float32):
    """A random causal language model of a family, with weights large enough that its texts vary."""
    import transformers

    family = FAMILIES[label]
    config = getattr(transformers, f"{family.name}Config")(**(COMMON | family.arguments))
    with torch.random.fork_rng():
        model = transformers.AutoModelForCausalLM.from_config(config)
        torch.manual_seed(0)
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.data.normal_(0, 0.4)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.to(dtype).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def families():
    """The families of `docs/bases.md`, by their labels there."""
    return FAMILIES


@pytest.fixture(scope="session")
def make_model():
    """Build a tiny model of a family; the same arguments give the same model."""
    return tiny_model
