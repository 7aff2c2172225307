"""What public drafter checkpoints compute, written down from their formats: config.json and weights, and nothing else.

One text at a time, in plain operations. No code of this project is used, so that it can be compared with it.
"""

import torch
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


def base_states(model, ids, layers):
    """What decoder layers read, counted from 0, side by side (S, F * D); the states that the formats fuse."""
    read = {}
    hooks = [
        model.model.layers[i].register_forward_pre_hook(lambda _, args, i=i: read.__setitem__(i, args[0][0]))
        for i in layers
    ]
    model(ids[None])
    for hook in hooks:
        hook.remove()
    return torch.cat([read[i] for i in layers], dim=-1)


def rms_norm(x, weight, config):
    return x * (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * weight


def frequencies(config):
    """Radians per position: transformers' own, which speculators' layers use too."""
    layer = LlamaConfig(**{name: config[name] for name in ("head_dim", "rope_theta", "rope_scaling") if name in config})
    return LlamaRotaryEmbedding(layer).inv_freq


def rotated(x, positions, config):
    """Heads (S, h, d) at their positions."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * frequencies(config)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)


def attention(x, others, weights, prefix, config, positions, other_positions, allowed):
    """Attention of x (Q, ·) to others (K, ·), where allowed (Q, K)."""
    head_dim = config["head_dim"]

    def heads(inputs, name, at=None):
        projected = (inputs @ weights[f"{prefix}{name}_proj.weight"].T).unflatten(-1, (-1, head_dim))
        if at is None:
            return projected
        if (norm := f"{prefix}{name}_norm.weight") in weights:
            projected = rms_norm(projected, weights[norm], config)
        return rotated(projected, at, config)

    queries, keys, values = heads(x, "q", positions), heads(others, "k", other_positions), heads(others, "v")
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    results = []
    for head in range(config["num_attention_heads"]):
        scores = queries[:, head] @ keys[:, head // group].T / head_dim**0.5
        results.append(scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ values[:, head // group])
    return torch.cat(results, -1) @ weights[f"{prefix}o_proj.weight"].T


def feed_forward(x, weights, prefix):
    gate, up = (x @ weights[f"{prefix}{name}_proj.weight"].T for name in ("gate", "up"))
    return (F.silu(gate) * up) @ weights[f"{prefix}down_proj.weight"].T


def block(residual, x, weights, prefix, config):
    """The rest of a LLaMA layer over a whole text, causal, from its residual stream and its attention's input."""
    at = torch.arange(len(x))
    attended = attention(x, x, weights, f"{prefix}self_attn.", config, at, at, at[:, None] >= at[None])
    h = residual + attended
    return h + feed_forward(
        rms_norm(h, weights[f"{prefix}post_attention_layernorm.weight"], config), weights, f"{prefix}mlp."
    )


def eagle3(config, weights, model, layers, ids, num_tokens, norm_before_residual=False):
    """EAGLE-3: the logits over the draft vocabulary behind each pair (S - 1, ·), and a greedy chain after the text.

    Args:
        config: The settings of its layer.
        weights: The tensors of the checkpoint.
        model: The base.
        layers: The layers that are fused: what they read.
        ids: (S,) a text; the last token is the root.
        num_tokens: Length of the chain.
        norm_before_residual: As in the format.
    """
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in weights else "layers.0."
    embedding = weights.get("embed_tokens.weight", model.get_input_embeddings().weight)
    head = weights.get("lm_head.weight", model.lm_head.weight)
    states = base_states(model, ids, layers)[:-1] @ weights["fc.weight"].T
    tokens, chain, first = ids[1:], [], None
    while len(chain) < num_tokens:
        embedded = rms_norm(embedding[tokens], weights[f"{prefix}input_layernorm.weight"], config)
        normed = rms_norm(states, weights[f"{prefix}hidden_norm.weight"], config)
        residual = normed if norm_before_residual else states
        out = block(residual, torch.cat([embedded, normed], -1), weights, prefix, config)
        logits = rms_norm(out, weights["norm.weight"], config) @ head.T
        first = logits if first is None else first
        drafted = logits[-1].argmax()
        if "d2t" in weights:
            drafted = drafted + weights["d2t"][drafted]
        chain.append(drafted.item())
        states, tokens = torch.cat([states, out[-1:]]), torch.cat([tokens, drafted[None]])
    return first, chain


def eagle(config, weights, model, ids, num_tokens):
    """EAGLE: the features behind each pair (S - 1, D), and a greedy chain after the text."""
    embedding, features = model.get_input_embeddings().weight, model.model(ids[None]).last_hidden_state[0, :-1]
    tokens, chain, first = ids[1:], [], None
    while len(chain) < num_tokens:
        x = F.linear(torch.cat([embedding[tokens], features], -1), weights["fc.weight"], weights.get("fc.bias"))
        out = block(x, x, weights, "layers.0.", config)
        first = out if first is None else first
        drafted = (model.lm_head.weight @ out[-1]).argmax()
        chain.append(drafted.item())
        features, tokens = torch.cat([features, out[-1:]]), torch.cat([tokens, drafted[None]])
    return first, chain


def dflash(config, weights, model, layers, ids, num_slots, mask, sample_from_anchor, causal=False):
    """DFlash and DSpark: the logits of every slot that predicts, and the greedy draft after the text.

    Context keys and values come from the base's states at all positions before the root; the block is the root and
    mask tokens. With ``sample_from_anchor`` slot k predicts the token after its own position, otherwise the token at
    it. A Markov head adds a bias given the token drafted before. A causal block sees no slots behind its own.
    """
    embedding = weights.get("embed_tokens.weight", model.get_input_embeddings().weight)
    head = weights.get("lm_head.weight", model.lm_head.weight)
    fused = base_states(model, ids[:-1], layers) @ weights["fc.weight"].T
    context = rms_norm(fused, weights["hidden_norm.weight"], config)
    x = embedding[torch.tensor([ids[-1].item(), *[mask] * (num_slots - 1)])]
    positions = torch.arange(len(context) + num_slots)
    allowed = torch.ones(num_slots, len(positions), dtype=torch.bool)
    allowed = allowed.tril(len(context)) if causal else allowed
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        normed = rms_norm(x, weights[f"{prefix}input_layernorm.weight"], config)
        seen = torch.cat([context, normed])
        own = positions[-num_slots:]
        x = x + attention(normed, seen, weights, f"{prefix}self_attn.", config, own, positions, allowed)
        normed = rms_norm(x, weights[f"{prefix}post_attention_layernorm.weight"], config)
        x = x + feed_forward(normed, weights, f"{prefix}mlp.")
    logits = rms_norm(x, weights["norm.weight"], config) @ head.T
    logits = logits if sample_from_anchor else logits[1:]
    previous, drafted = ids[-1], []
    for row in logits:
        if "markov_head.markov_w1.weight" in weights:
            left = weights["markov_head.markov_w1.weight"][previous]
            row = row + weights["markov_head.markov_w2.weight"] @ left
        previous = row.argmax()
        drafted.append(previous.item())
    return logits, drafted
