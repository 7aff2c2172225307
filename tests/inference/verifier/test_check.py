"""A base whose logits through a runner are not its own is refused, and checked again when it changes."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from drafters import DraftTree
from inference.generation import generate, stream
from inference.speculation import Speculation
from inference.verifier import attention, check
from inference.verifier.attention import causal_tree_mask
from inference.verifier.base import Base
from inference.verifier.cache import BufferCache
from inference.verifier.graphed import make_runner


@pytest.fixture
def fresh_base(make_model, toy_tokenizer):
    """Build a base that no other test uses, in a dtype."""

    def make(label="LLaMA", dtype=torch.float32):
        return Base("toy", copy.deepcopy(make_model(label)).to(dtype), toy_tokenizer)

    return make


def own_text(base, prompt, length=20):
    ids = base.model.generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False)
    return ids[0, len(prompt) :].tolist()


def written_text(base, prompt, length=20, **options):
    (one,) = generate(base, prompt, "token_recycling", max_new_tokens=length, eos=[], **options)
    return one.token_ids


def negate_logits(module, inputs, outputs):
    outputs.logits.neg_()


# ---- what is found


def ignore_the_tree(pending, parents, *place):
    return causal_tree_mask(pending + len(parents), (), *place)


def see_all_nodes_before(tree):
    return np.tri(len(tree), dtype=bool)


def keep_the_first(cache, length, moved, keep=BufferCache.keep):
    keep(cache, length + len(moved), [])


def see_one_more(config, spans=attention.attention_spans):
    return {kind: span + (kind == "sliding_attention") for kind, span in spans(config).items()}


def see_everything(config, spans=attention.attention_spans):
    return dict.fromkeys(spans(config), 10**9)


def count_from_the_root(tree):
    return [1] * len(tree)


# An error, the family and the comparison that find it, and what is replaced by what.
WRONG = {
    "mask": (
        "LLaMA",
        "a draft tree",
        [(attention, "kept_mask", ignore_the_tree), (DraftTree, "ancestor_mask", see_all_nodes_before)],
    ),
    "positions": ("LLaMA", "a draft tree", [(DraftTree, "depths", property(count_from_the_root))]),
    "commit": ("LLaMA", "after an accepted draft", [(BufferCache, "keep", keep_the_first)]),
    "window": ("Mistral, sliding window", "a plain forward", [(attention, "attention_spans", see_one_more)]),
    "no window": ("Gemma 2", "a plain forward", [(attention, "attention_spans", see_everything)]),
    "border": (
        "LLaMA, longrope scaling",
        "last position is far away",
        [(module, "longrope_border", lambda config: None) for module in (attention, check)],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_of_the_engine_is_found_by_the_check(fresh_base, monkeypatch, wrong, dtype):
    label, where, replacements = WRONG[wrong]
    make_runner(fresh_base(label, dtype))  # right without the error
    for place, name, replacement in replacements:
        monkeypatch.setattr(place, name, replacement)
    base = fresh_base(label, dtype)
    with pytest.raises(ValueError, match=f"toy is not supported: in .*{where}.* its logits are not those") as caught:
        make_runner(base)
    assert "\n" not in str(caught.value)
    make_runner(replace(base, check=False))


@pytest.mark.slow
def test_a_model_that_changes_its_logits_is_refused_by_every_door(fresh_base, toy_tokenizer):
    base = fresh_base()
    base.model.register_forward_hook(negate_logits)
    with pytest.raises(ValueError, match="in a plain forward its logits are not those of the model's own forward"):
        make_runner(base)
    for call in (generate, stream):
        with pytest.raises(ValueError, match="pass check=False"):
            call(base.model, [3, 4, 5], tokenizer=toy_tokenizer)
    arguments = {"max_new_tokens": 4, "pad_token_id": 0}
    with pytest.raises(ValueError, match="pass check=False"):
        base.model.generate(torch.tensor([[3, 4, 5]]), custom_generate=Speculation(), **arguments)
    base.model.generate(torch.tensor([[3, 4, 5]]), custom_generate=Speculation(check=False), **arguments)
    assert len(written_text(base, [3, 4, 5], 4, check=False)) == 4


def test_a_subclass_that_passes_its_arguments_on_is_checked(fresh_base):
    base, prompt = fresh_base(), [5, 6, 7, 8]

    class Subclass(type(base.model)):
        def forward(self, *args, **options):
            return super().forward(*args, **options)

    class Negated(Subclass):
        def forward(self, *args, **options):
            outputs = super().forward(*args, **options)
            negate_logits(self, args, outputs)
            return outputs

    base.model.__class__ = Subclass
    assert written_text(base, prompt) == own_text(base, prompt)
    base.model.__class__ = Negated
    with pytest.raises(ValueError, match="in a plain forward its logits are not those of the model's own forward"):
        written_text(base, prompt)


def test_an_encoder_decoder_model_is_refused(toy_tokenizer):
    from transformers import AutoModelForSeq2SeqLM, T5Config

    config = T5Config(vocab_size=40, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="encoder-decoder"):
        make_runner(Base("T5", AutoModelForSeq2SeqLM.from_config(config), toy_tokenizer))


def adapt(model, kind, **options):
    import peft

    options = {"r": 2, "target_modules": ["q_proj"], "init_weights": False} | options
    options[f"init_{'lora_' if kind == 'Lora' else ''}weights"] = options.pop("init_weights")
    peft.inject_adapter_in_model(getattr(peft, f"{kind}Config")(**options), model)
    model.requires_grad_(False)


# What drops out or adds noise in training mode: a family, its part in the message, and how the model is made.
RANDOM = {
    "a module": ("GPT-2", "transformer.drop", None),
    "of the attention": (
        "LLaMA",
        "model.layers.0.self_attn",
        lambda model: with_value(model, "attention_dropout", 0.1),
    ),
    "of sublayers": ("OPT", "model.decoder", None),
    "layerdrop": ("OPT", "model.decoder", lambda model: with_value(model, "layerdrop", 0.1)),
    "jitter": ("Phi-MoE", "model.layers.0", lambda model: with_value(model, "input_jitter_noise", 0.01)),
    "an adapter": ("LLaMA", "lora_dropout.default", lambda model: adapt(model, "Lora", lora_dropout=0.1)),
    "another adapter": ("LLaMA", "self_attn.q_proj", lambda model: adapt(model, "LoHa", rank_dropout=0.1)),
}


def with_value(model, name, value):
    for module in model.modules():
        for known in vars(module):
            if name == "layerdrop" and known == "dropout":
                module.dropout = 0.0
            elif known == name:
                setattr(module, name, value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RANDOM)
def test_a_base_that_drops_out_is_refused_until_it_is_in_evaluation_mode(fresh_base, kind):
    label, part, change = RANDOM[kind]
    base, prompt = fresh_base(label), [3, 4, 5]
    if change:
        change(base.model)
    speculation = Speculation(check=False)
    arguments = {"max_new_tokens": 8, "pad_token_id": 0, "custom_generate": speculation, "do_sample": False}

    base.model.eval()
    expected = written_text(base, prompt, 8)
    assert expected == own_text(base, prompt, 8)
    for _ in range(2):  # also a runner that was kept
        base.model.train()
        for call in (
            lambda: written_text(base, prompt, 8),
            lambda: written_text(base, prompt, 8, check=False),
            lambda: stream(base, prompt),
            lambda: base.model.generate(torch.tensor([prompt]), **arguments),
            lambda: make_runner(replace(base, check=False)),
        ):
            with pytest.raises(ValueError, match=f"is in training mode, and its .*{part}.* drops out at random: call"):
                call()
        assert all(module.training for module in base.model.modules())
        base.model.eval()
        assert written_text(base, prompt, 8) == expected
    assert base.model.generate(torch.tensor([prompt]), **arguments)[0, 3:].tolist() == expected


def test_training_mode_without_dropout_and_dropout_in_evaluation_mode_are_no_reason_to_refuse(fresh_base):
    base, prompt = fresh_base(), [3, 4, 5]
    expected = written_text(base, prompt, 8)
    base.model.train()
    assert written_text(base, prompt, 8) == expected
    with_value(base.model.eval(), "attention_dropout", 0.1)
    assert written_text(base, prompt, 8) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_is_refused_in_one_line_and_outside_of_it_all_is_as_before(fresh_base, dtype):
    base, prompt = fresh_base(dtype=dtype), [3, 4, 5]
    speculation = Speculation()
    arguments = {"max_new_tokens": 8, "pad_token_id": 0, "custom_generate": speculation, "do_sample": False}
    for _ in range(2):
        expected = written_text(base, prompt, 8)
        with torch.autocast("cpu", torch.bfloat16):
            for call in (
                lambda: written_text(base, prompt, 8),
                lambda: stream(base, prompt),
                lambda: base.model.generate(torch.tensor([prompt]), **arguments),
                lambda: make_runner(base),
            ):
                with pytest.raises(ValueError, match="decodes in the dtype of its weights: call it outside of"):
                    call()
            with torch.autocast("cpu", enabled=False):
                assert written_text(base, prompt, 8) == expected


@pytest.mark.slow
def test_a_model_behind_torch_compile_is_the_model_itself(fresh_base):
    base, prompt = fresh_base(), [3, 4, 5]
    expected, compiled = written_text(base, prompt, 8), torch.compile(base.model, backend="eager")
    assert Base("toy", compiled, base.tokenizer).model is base.model
    (one,) = generate(compiled, prompt, "token_recycling", tokenizer=base.tokenizer, max_new_tokens=8, eos=[])
    assert one.token_ids == expected == own_text(base, prompt, 8)
    arguments = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False}
    found = compiled.generate(torch.tensor([prompt]), custom_generate=Speculation(), **arguments)
    assert found[0, 3:].tolist() == expected


# ---- what it leaves behind


@pytest.mark.parametrize("label", ["Qwen3", "Gemma 3", "Phi-3, longrope scaling"])
def test_the_model_is_left_as_it_was(fresh_base, label):
    base = fresh_base(label)
    base.model.train()  # without dropout
    base.model.base_model.get_input_embeddings().eval()
    before, training = copy.deepcopy(base.model.state_dict()), [module.training for module in base.model.modules()]
    config, rng = copy.deepcopy(base.model.config), torch.get_rng_state()
    make_runner(base)
    assert [module.training for module in base.model.modules()] == training
    assert all(torch.equal(value, base.model.state_dict()[name]) for name, value in before.items())
    assert base.model.config.to_dict() == config.to_dict() and torch.equal(rng, torch.get_rng_state())
    assert not any(module._forward_hooks for module in base.model.modules())


@pytest.mark.slow
def test_a_model_is_checked_once_for_each_state(fresh_base, monkeypatch):
    base, checked, check_base = fresh_base(), [], check.check_base
    monkeypatch.setattr(check, "check_base", lambda runner: (checked.append(runner), check_base(runner)))
    for _ in range(3):
        written_text(base, [5, 6, 7], 4)
    assert len(checked) == 1
    base.model.set_attn_implementation("eager")
    make_runner(base)
    base.model.set_attn_implementation("sdpa")
    make_runner(base)
    assert len(checked) == 2


# ---- runners follow their model


@pytest.mark.slow
def test_a_runner_follows_the_attention_implementation_and_hooks(fresh_base):
    base, prompt = fresh_base(), [5, 6, 7, 8]
    before = written_text(base, prompt)
    for implementation in ("eager", "sdpa"):
        base.model.set_attn_implementation(implementation)
        assert written_text(base, prompt) == own_text(base, prompt)
    hook = base.model.base_model.layers[0].register_forward_hook(lambda module, inputs, state: state * 1.5)
    assert written_text(base, prompt) == own_text(base, prompt) != before
    hook.remove()
    assert written_text(base, prompt) == own_text(base, prompt) == before
    base.model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="takes no tree mask: load toy with attn_implementation='sdpa'"):
        written_text(base, prompt)


@pytest.mark.slow
def test_a_runner_follows_adapters_that_are_switched(fresh_base):
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    base, prompt = fresh_base("Qwen3"), [5, 6, 7, 8]
    plain = written_text(base, prompt)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False), base.model)
    base.model.requires_grad_(False)
    adapted = written_text(base, prompt)
    assert adapted == own_text(base, prompt) != plain
    for is_on, expected in ((False, plain), (True, adapted)):
        for module in base.model.modules():
            if isinstance(module, BaseTunerLayer):
                module.enable_adapters(is_on)
        assert written_text(base, prompt) == own_text(base, prompt) == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft reads it
def test_a_model_wrapped_by_peft_is_exact_with_weights_and_refused_with_virtual_tokens(fresh_base):
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    base, prompt = fresh_base(), [5, 6, 7, 8]
    lora = get_peft_model(copy.deepcopy(base.model), LoraConfig(target_modules=["v_proj"], init_lora_weights=False))
    wrapped = Base("wrapped", lora.eval(), base.tokenizer)
    expected = lora.generate(input_ids=torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, 4:].tolist()
    assert written_text(wrapped, prompt) == expected != written_text(base, prompt)
    tuned = get_peft_model(base.model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="in a plain forward its logits are not"):
        written_text(Base("tuned", tuned.eval(), base.tokenizer), prompt)
