"""Block drafters: written as speculators' DSpark, read as DFlash and DSpark of speculators, SpecForge and DeepSpec."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafters import CTC, Block
from drafters.checkpoint import DrafterConfig
from drafters.ctc.drafter import CTCTrunkOptions
from drafters.nn.markov import Markov
from drafters.protocol import BaseShape, BaseWeights
from inference.verifier.base import Base
from train.formats.layers import layer_config, read_layers
from train.formats.public import PublicCheckpoint, PublicDrafter, Target, by_depth, check_layers, speculators_config


def without_blank(drafter: CTC, config: DrafterConfig) -> tuple[Block, DrafterConfig]:
    """The block drafter with the weights of a CTC drafter but its blank's, and its configuration.

    Frame u drafts the u-th token of a chain: less well, as no frame can be blank or repeat the one before.
    """
    trunk = vars(CTCTrunkOptions(**config.init_args.get("trunk", {})))
    draft = {"tree": "chain", "window": drafter.draft_options.window}
    init_args = {"trunk": {name: value for name, value in trunk.items() if name != "blank_bias"}, "draft": draft}
    blank = "blank_row", "blank_bias", "markov.blank"
    weights = {name: weight for name, weight in drafter.state_dict().items() if name not in blank}
    if isinstance(drafter.markov, Markov):
        weights["markov.right"] = weights["markov.right"][:-1]
    config = replace(config, class_path="drafters.Block", init_args=init_args)
    block: Any = config.build(weights)
    return block, config


def check_block(drafter: Block, config: DrafterConfig, format: str) -> None:
    """Raise ValueError if a block drafter has properties that the DSpark format cannot describe."""
    names = "llama_layer", "tokens_in_context", "root_everywhere", "causal"
    claims = {name: getattr(drafter, name) for name in names}
    claims |= {"frames_differ": len(drafter.frame_embedding) > 1, "lookup": drafter.lookup is not None}
    for argument, is_true in claims.items():
        if is_true:
            raise ValueError(f"the {format} format has no {argument}: train the drafter with {argument}: false")
    if drafter.draft_tokens is not None:
        raise ValueError(f"the {format} format of Block has no draft_vocab_size: train it with draft_vocab_size: null")
    check_layers(drafter.required_outputs.hidden_layers, config.base)


def check_mask_token(mask_token_id: int | None, base: Base) -> int:
    """Return the mask token if the base never writes it, so that its embedding is free; else raise ValueError."""
    names = dict(zip(base.tokenizer.all_special_ids, base.tokenizer.all_special_tokens, strict=True))
    free = {token: name for token, name in names.items() if token not in base.eos}
    free |= {token: "unused" for token in range(len(base.tokenizer), base.shape.vocab_size)}
    if mask_token_id is None or mask_token_id not in free:
        examples = ", ".join(f"{token} ({name})" for token, name in sorted(free.items())[:4])
        problem = "is missing" if mask_token_id is None else f"{mask_token_id} is a token of texts or none at all"
        raise ValueError(
            f"--mask_token_id {problem}: masked frames take the embedding of a token that {base.name} never writes, "
            f"such as {examples or 'none of this tokenizer'}"
        )
    return mask_token_id


def block_config(drafter: Block, shape: BaseShape, target: Target, mask_token_id: int) -> dict[str, Any]:
    """Return the config.json of speculators' DSpark.

    The format is not ``dflash``, in which vLLM's frame 0 repeats the root. Frame 0 of our block drafter predicts the
    next token, as DSpark's does with ``sample_from_anchor``.
    """
    num_layers = len(drafter.trunk.layers)
    layers = layer_config(shape, num_layers, target.context_length, "qwen3")
    layer: Any = drafter.trunk.layers[0]
    layers |= {
        "num_key_value_heads": layer.self_attn.num_key_heads,
        "intermediate_size": layer.mlp.gate_proj.out_features,
    }
    return speculators_config("dspark", "DSparkDraftModel", drafter.num_labels, target) | {
        "transformer_layer_config": layers
        | {"use_sliding_window": False, "layer_types": ["full_attention"] * num_layers},
        "draft_vocab_size": shape.vocab_size,
        "target_hidden_size": shape.hidden_size,
        "block_size": drafter.num_frames,
        # Speculators counts layers as we do: i is the output of layer i, which layer i + 1 reads.
        "aux_hidden_state_layer_ids": sorted(drafter.required_outputs.hidden_layers),
        "mask_token_id": mask_token_id,
        "sample_from_anchor": drafter.first_frame == 0,
        "sliding_window_non_causal": True,  # no layer slides, but for vLLM false means that all layers are causal
        "markov_rank": drafter.markov.rank if drafter.markov else 1,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }


def block_weights(drafter: Block, base: Base, mask_token_id: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights of the trunk, the base's embedding with the mask's in it, and the Markov bias.

    The row of the mask is trained and may be wider than the base's, so the embedding is cast before the row is written.
    vLLM's DSpark always adds a bias: a drafter without one gets a zero bias of rank 1. The LM head is the base's.
    """
    trunk = drafter.trunk.state_dict()
    if "fc.1.weight" in trunk:  # a projection of low rank
        trunk["fc.weight"] = trunk.pop("fc.1.weight") @ trunk.pop("fc.0.weight")
    trunk["fc.weight"] = by_depth(trunk["fc.weight"], drafter.required_outputs.hidden_layers)
    embedding = base.base_weights.embedding.detach().to(dtype, copy=True)
    embedding[mask_token_id] = drafter.frame_embedding.detach()[0].to(embedding)
    zero = torch.zeros(drafter.vocab_size, 1)
    bias = drafter.markov and drafter.markov.folded(base.base_weights)
    left, right = (bias.left, bias.right) if bias else (zero, zero)
    markov = {"markov_head.markov_w1.weight": left, "markov_head.markov_w2.weight": right}
    return {**trunk, "embed_tokens.weight": embedding, **markov}


# ---- reading


@dataclass(frozen=True)
class BlockSettings:
    """The settings of DFlash and DSpark; None where a format leaves them out.

    Speculators and DeepSpec have them on the top of config.json, SpecForge and DFlash in its part ``dflash_config``.
    """

    block_size: int | None = None
    mask_token_id: int | None = None
    aux_hidden_state_layer_ids: tuple[int, ...] | None = None  # speculators', counted as here
    target_layer_ids: tuple[int, ...] = ()  # the others', counted from 0; -1 is the embedding
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    markov_head_type: str = "vanilla"
    projector_type: str | None = None
    shift_label: bool = False
    sample_from_anchor: bool | None = None
    is_causal: bool | None = None  # this one and those below are vLLM's
    causal: bool | None = None
    use_swa: bool = False
    attention_value_scale: float | None = None
    attention_sink_bias: bool = False
    add_swa_attention_sink_bias: bool = False


def read_block(
    checkpoint: PublicCheckpoint, base: BaseShape, base_weights: BaseWeights, is_dspark: bool
) -> PublicDrafter:
    """Read a DFlash or DSpark drafter; in DSpark, frame 0 predicts a token where the format does not say so.

    Raises ValueError if a setting or a weight is missing or wrong, or Block cannot compute the same.
    """
    part, described = (checkpoint.config.get(name) or {} for name in ("dflash_config", "transformer_layer_config"))
    if not isinstance(part, dict):
        checkpoint.refuse("its dflash_config is no object")
    settings: BlockSettings = checkpoint.settings(BlockSettings, part | checkpoint.config)
    layers = read_layers(checkpoint, described or checkpoint.config, base, "qwen3")
    _check_computation(checkpoint, settings, base)
    num_frames, mask = settings.block_size, settings.mask_token_id
    if not num_frames or mask is None or not 0 <= mask < base.vocab_size:
        checkpoint.refuse("config.json has no block_size, or no mask_token_id of the vocabulary")
    from_anchor = settings.sample_from_anchor
    if from_anchor is None and checkpoint.config.get("speculators_model_type") == "dspark":
        checkpoint.refuse("config.json leaves out sample_from_anchor, whose default differs between its readers")
    fused = settings.aux_hidden_state_layer_ids
    if fused is None:
        fused = tuple(layer + 1 for layer in settings.target_layer_ids)
    init_args: dict[str, Any] = {
        "trunk": {
            "num_frames": num_frames,
            "num_layers": layers.num_layers,
            "num_key_heads": layers.num_key_value_heads,
            "hidden_layers": checkpoint.check_hidden_layers(fused, base),
            "sample_from_anchor": is_dspark if from_anchor is None else from_anchor,
            "causal": bool(settings.causal if settings.is_causal is None else settings.is_causal),
        }
    }
    weights = {"frame_embedding": _mask_row(checkpoint, mask, base_weights)}
    checkpoint.drop_copy("lm_head.weight", base_weights.head, "an LM head")
    left, right = (checkpoint.weights.pop(f"markov_head.markov_{name}.weight", None) for name in ("w1", "w2"))
    if (left is None) != (right is None):
        checkpoint.refuse("it has one half of a Markov head")
    if left is not None and right is not None and (left.any() or right.any()):
        weights |= {"markov.left": left, "markov.right": right}
        init_args["trunk"]["markov_rank"] = left.shape[-1]
    has_confidence = bool(checkpoint.take_all("confidence_head."))
    left_out = ("the confidence head, which only cuts drafts short",) if has_confidence else ()
    for prefix in ("fc.", "hidden_norm.", "norm.", "layers."):
        weights |= {f"trunk.{prefix}{name}": weight for name, weight in checkpoint.take_all(prefix).items()}
    return PublicDrafter("drafters.Block", init_args, layers.shape, weights, left_out)


def _check_computation(checkpoint: PublicCheckpoint, settings: BlockSettings, base: BaseShape) -> None:
    if settings.draft_vocab_size not in (None, base.vocab_size) or {"d2t", "t2d"} & checkpoint.weights.keys():
        checkpoint.refuse("block drafters are read only with the whole vocabulary (draft_vocab_size)")
    checkpoint.check_hidden_size(settings.target_hidden_size, base)
    kind = settings.markov_head_type
    if kind != "vanilla" and "markov_head.markov_w1.weight" in checkpoint.weights:
        checkpoint.refuse(f"its Markov head is {kind}: the bias of block drafters here depends on one token")
    if settings.projector_type not in (None, "dflash", "dspark") or settings.shift_label:
        checkpoint.refuse(f"block drafters here have no {settings.projector_type or 'shift_label'} head")
    if settings.use_swa:
        checkpoint.refuse("its layers attend to a sliding window (use_swa)")
    if (scale := settings.attention_value_scale) not in (None, 1.0):
        checkpoint.refuse(f"its attention scales the values (attention_value_scale: {scale:g})")
    if settings.attention_sink_bias or settings.add_swa_attention_sink_bias:
        checkpoint.refuse("its attention has sinks (attention_sink_bias)")


def _mask_row(checkpoint: PublicCheckpoint, mask: int, base_weights: BaseWeights) -> Tensor:
    """The embedding of the mask, (1, D): that of the checkpoint, whose other rows must be the base's, or the base's."""
    embedding = checkpoint.weights.get("embed_tokens.weight")
    if embedding is None:
        return base_weights.embedding[mask].detach().cpu()[None].clone()
    if embedding.shape != base_weights.embedding.shape:
        checkpoint.refuse(f"its embed_tokens.weight is {tuple(embedding.shape)}")
    row, original = embedding[mask][None].clone(), base_weights.embedding.detach().cpu().clone()
    checkpoint.weights["embed_tokens.weight"] = embedding.index_fill(0, torch.tensor([mask]), 0)
    original[mask] = 0
    checkpoint.drop_copy("embed_tokens.weight", original, "an embedding")
    return row
