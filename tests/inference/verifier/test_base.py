"""Loading a base: its shape and weights, and a one-line error for everything that is not a base."""

import copy
import json
import os
import platform
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

from data.tokenizer import load_tokenizer, tokenizer_hash
from drafters import ANPD
from inference import Speculation, generate, stream
from inference.options import ModelOptions
from inference.verifier.base import Base, load_base, resolve_device, shape_of
from inference.verifier.runner import Runner
from inference.verifier.sampling import Greedy
from inference.verifier.session import Session
from inference.verify import generate_reference
from tests.inference.verifier.oracles import written_alone


@pytest.fixture(scope="module")
def whole(make_base, tmp_path_factory):
    folder, base = tmp_path_factory.mktemp("base"), make_base(dtype=torch.float32)
    base.model.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "base")


def refusal(name, load=load_base):
    with pytest.raises(ValueError) as caught:
        load(str(name))
    message = str(caught.value)
    assert "\n" not in message
    assert str(name) in message
    return message


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc's settings are glibc's")
def test_freed_memory_is_used_again_without_new_pages():
    code = """
import resource, torch
from inference.verifier.base import prepare_process
prepare_process(torch.device("cpu"))
for _ in range(24):
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MB, of which glibc keeps up to eight before it uses one again
assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 1000  # 16,384 without the setting
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("dtype", "bitwise", "is_limited"),
    [("bfloat16", None, True), ("bfloat16", False, False), ("float32", None, False), ("float32", True, True)],
)
def test_commands_limit_the_matrix_libraries_where_bits_are_wanted(whole, monkeypatch, dtype, bitwise, is_limited):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    load_base(str(whole), dtype, bitwise=bitwise)
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ, "a library changes no settings of the process"
    ModelOptions(str(whole), dtype, "cpu", bitwise=bitwise).load()
    assert ("ONEDNN_MAX_CPU_ISA" in os.environ) == is_limited


def test_a_saved_base_loads_frozen_and_gives_the_same_logits(whole, make_base):
    base = load_base(str(whole))
    assert not base.model.training
    assert not any(weight.requires_grad for weight in base.model.parameters())
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(base.model(ids).logits, make_base(dtype=torch.float32).model(ids).logits)
    assert base.eos == {2}
    assert base.context_length == 64
    assert load_base(str(whole), "bfloat16").model.dtype == torch.bfloat16


def test_a_place_without_a_model_says_what_to_pass(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path.parent)  # where a name of two parts may be a folder's
    mistaken = tmp_path / "nowhere", tmp_path / "model.safetensors", f"{tmp_path.name}/none", tmp_path / "none.gguf"
    for name in (*mistaken, "nowhere", "./nowhere/at/all", "a/b/c", "~/none"):
        for load in (load_base, load_tokenizer):
            assert "pass a folder with config.json and model.safetensors, or a hub id" in refusal(name, load)
    assert "pass a folder saved by save_pretrained" in refusal(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft reads it
def test_a_missing_tokenizer_is_refused_also_beside_an_adapter(folder, whole, tmp_path):
    from peft import LoraConfig, get_peft_model

    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert "cannot load the tokenizer" in refusal(folder)
    adapter, base = tmp_path / "adapter", load_base(str(whole))
    with torch.random.fork_rng():
        config = LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False)
        get_peft_model(base.model, config).save_pretrained(adapter)
    for load in (load_base, load_tokenizer):
        assert "holds an adapter without a tokenizer: save the tokenizer of its base there" in refusal(adapter, load)
    base.tokenizer.save_pretrained(adapter)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(load_base(str(adapter)).model(ids).logits, base.model.eval()(ids).logits)


# ---- a tokenizer with more tokens than the embedding has rows


@pytest.fixture
def larger(whole, folder):
    """A folder whose tokenizer has three tokens more than its model, one of them for padding, and the base alone."""
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens(["w40", "w41"])
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder, load_base(str(whole))


@pytest.mark.slow
def test_a_base_is_used_as_ever_if_its_tokenizer_has_more_tokens(larger):
    base, alone = load_base(str(larger[0])), larger[1]
    assert (len(base.tokenizer), base.tokenizer.pad_token_id, base.shape.vocab_size) == (43, 42, 40)
    expected = [one.token_ids for one in generate(alone, ["w5 w6", "w7"], "none", max_new_tokens=12)]
    for drafter in ("anpd", "token_recycling", "lookahead"):
        assert [one.token_ids for one in generate(base, ["w5 w6", "w7"], drafter, max_new_tokens=12)] == expected
    ids, mask = torch.tensor([[5, 6], [0, 7]]), torch.tensor([[1, 1], [0, 1]])
    assert torch.equal(base.greedy(ids, mask, 12), alone.greedy(ids, mask, 12))


def test_a_prompt_with_a_token_that_has_no_row_in_the_embedding_is_refused_by_every_door(larger):
    base = load_base(str(larger[0]))
    ids = torch.tensor([[5, 41]])
    for call in (
        lambda: generate(base, "w5 w41"),
        lambda: generate(base, ["w5", [5, -1]]),
        lambda: stream(base, [{"role": "user", "content": "w40"}]),
        lambda: base.model.generate(ids, max_new_tokens=4, custom_generate=Speculation()),
        lambda: generate_reference(base, [5, 41], 4, Greedy()),
        lambda: Session(Runner(base), ANPD()).run([5, 41], 4),
    ):
        with pytest.raises(
            ValueError, match=r"the prompt has the token (41|40|-1), but .* has an embedding for 0 to 39"
        ):
            call()


def test_end_of_sequence_tokens_that_the_base_cannot_write_end_nothing(larger):
    base = load_base(str(larger[0]))
    base.model.generation_config.eos_token_id = [2, 41, 10**7]
    assert base.eos == {2}
    base.model.generation_config.eos_token_id = 41
    assert base.eos == frozenset() and len(base.greedy(torch.tensor([[5]]), torch.ones(1, 1), 9)[0]) == 9


# ---- transformers' own greedy text

OPTIONS = {
    "suppress_tokens": [*range(3, 30)], "begin_suppress_tokens": [*range(3, 30)],
    "bad_words_ids": [[token] for token in range(3, 30)], "sequence_bias": [[[token], -90.0] for token in range(3, 30)],
    "forced_eos_token_id": 9, "forced_bos_token_id": 9, "exponential_decay_length_penalty": [1, 9.0],
    "guidance_scale": 3.0, "repetition_penalty": 5.0, "encoder_repetition_penalty": 5.0, "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1, "min_length": 30, "min_new_tokens": 30, "max_length": 5, "max_time": 0.0,
    "stop_strings": ["w"], "num_return_sequences": 2, "num_beams": 3, "num_beam_groups": 2, "penalty_alpha": 0.6,
    "top_k": 4, "top_p": 0.3, "min_p": 0.9, "typical_p": 0.3, "temperature": 9.0, "do_sample": True,
    "dola_layers": "high", "token_healing": True, "prompt_lookup_num_tokens": 3, "assistant_early_exit": 1,
    "watermarking_config": {"bias": 9.0, "seeding_scheme": "selfhash"}, "cache_implementation": "static",
    "use_cache": False, "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
    "output_attentions": True, "output_hidden_states": True, "remove_invalid_values": True, "renormalize_logits": True,
    "constraints": [1], "pad_token_id": 7, "bos_token_id": 7, "custom_entry": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_text_obeys_nothing_that_generation_config_says_but_the_ends_of_texts(make_base, monkeypatch, name):
    base = make_base()
    own = GenerationConfig(eos_token_id=2)
    setattr(own, name, OPTIONS[name])
    if name in ("penalty_alpha", "dola_layers"):
        own.top_k, own.custom_generate = 4, f"transformers-community/{name}"
    if name.startswith("output_"):
        own.return_dict_in_generate = True
    monkeypatch.setattr(base.model, "generation_config", own)
    prompt = (5, 6, 7)
    texts = base.greedy(torch.tensor([prompt, prompt]), torch.ones(2, 3), 20)
    assert texts.tolist() == [written_alone(base, prompt, 20, base.eos)] * 2
    assert base.model.generation_config is own and getattr(own, name) == OPTIONS[name]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft reads it
def test_a_refused_greedy_call_leaves_generation_config_and_a_model_of_peft_has_its_own(make_base):
    from peft import LoraConfig, get_peft_model

    base = make_base()
    own = base.model.generation_config
    with pytest.raises(IndexError):
        base.greedy(torch.tensor([[99]]), torch.ones(1, 1), 3)
    assert base.model.generation_config is own
    wrapped = get_peft_model(copy.deepcopy(base.model), LoraConfig(target_modules=["v_proj"])).eval()
    wrapped.get_base_model().generation_config.suppress_tokens = [*range(3, 30)]
    texts = [each.greedy(torch.tensor([[5, 6, 7]]), torch.ones(1, 3), 9) for each in (base, Base("", wrapped, None))]
    assert torch.equal(*texts)
    assert wrapped.get_base_model().generation_config.suppress_tokens == [*range(3, 30)]


def test_the_hash_of_a_tokenizer_depends_on_its_token_ids(toy_tokenizer, whole):
    assert tokenizer_hash(toy_tokenizer) == tokenizer_hash(load_tokenizer(str(whole)))
    other = load_tokenizer(str(whole))
    other.add_tokens(["w40"])
    assert tokenizer_hash(other) != tokenizer_hash(toy_tokenizer)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_shape_of_a_base_is_read_from_its_config(make_base, kind):
    shape = make_base(kind, layers=3).shape
    assert (shape.hidden_size, shape.vocab_size, shape.num_layers, shape.num_heads) == (32, 40, 3, 4)
    assert (shape.head_dim, shape.intermediate_size) == (8, 64)
    config = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rms_norm_eps=1e-5)
    assert (shape_of(config).rope_theta, shape_of(config).norm_eps) == (5e5, 1e-5)


def test_the_base_weights_are_shared_with_the_base_and_not_copied(base):
    assert base.base_weights.embedding.data_ptr() == base.model.get_input_embeddings().weight.data_ptr()
    assert base.base_weights.head.data_ptr() == base.model.lm_head.weight.data_ptr()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_hidden_states_are_those_of_transformers(make_base, kind):
    base, ids = make_base(kind, layers=3), torch.tensor([[5, 6, 7], [8, 9, 10]])
    every = base.model.base_model(ids, output_hidden_states=True)  # leaves hooks of its own
    hooks = [len(module._forward_hooks) for module in base.model.modules()]
    for layers in [(0,), (1,), (2, 1), (3,), (-1, 3, 0, 2, 2)]:
        states, last = base.hidden_states(ids, layers)
        assert torch.equal(states, torch.cat([every.hidden_states[layer] for layer in layers], -1))
        assert torch.equal(last, every.last_hidden_state)
    assert hooks == [len(module._forward_hooks) for module in base.model.modules()]


@pytest.mark.parametrize(("given", "eos"), [(None, {2}), (7, {7}), ([7, 9], {7, 9})])
def test_end_of_sequence_tokens_are_the_models_or_else_the_tokenizers(make_base, monkeypatch, given, eos):
    base = make_base(seed=9)
    monkeypatch.setattr(base.model.generation_config, "eos_token_id", given)
    assert Base("toy", base.model, base.tokenizer).eos == eos


@pytest.mark.parametrize("eos", [0.5, "2", [2, "x"]])
def test_end_of_sequence_tokens_that_are_no_ids_are_refused(folder, eos):
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": eos}))
    assert f"has the eos_token_id {eos!r}: give token ids" in refusal(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_refused():
    with pytest.raises(ValueError, match="pass --device cpu or auto"):
        resolve_device("cuda")
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
