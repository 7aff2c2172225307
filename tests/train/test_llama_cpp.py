"""Drafters as GGUF files: what they hold, what is read back, and what llama.cpp's own converter makes of our export.

llama.cpp itself is run by tests/llama_cpp only (`make test-llamacpp`).
"""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks import recipes
from benchmarks.recipes import grouped
from data.tokenizer import tokenizer_hash
from drafters import CTC, EAGLE, EAGLE3, Block, checkpoint
from drafters.checkpoint import DrafterConfig
from inference.verifier.base import load_base
from train.cli import run_drafters, run_lightning
from train.formats import gguf as formats

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
SOURCE = os.environ.get("LLAMA_CPP_SOURCE")
V, LAYERS, MASK = 404, 4, 402  # of the base; the tokenizer has 400 tokens
TRUNK = {"num_frames": 5, "num_layers": 2, "hidden_layers": [1, 3]}
EAGLE_3 = {"hidden_layers": [1, 2, 3], "own_head": True}
KINDS = {
    "dspark": (Block, {"trunk": TRUNK | {"markov_rank": 4}}),
    "dspark without a bias": (Block, {"trunk": TRUNK | {"intermediate_size": 24, "num_key_heads": 1}}),
    "dflash": (Block, {"trunk": TRUNK | {"sample_from_anchor": False}}),
    "eagle3": (EAGLE3, EAGLE_3 | {"draft_vocab_size": 50}),
    "eagle3, whole vocabulary": (EAGLE3, EAGLE_3 | {"own_head": False, "layer": {"norm_before_residual": True}}),
}


@pytest.fixture(scope="module")
def base(make_tiny):
    """A base whose LM head is not its embedding, and whose sizes are no library's defaults."""
    rope = {"rope_type": "default", "rope_theta": 700.0}
    return load_base(str(make_tiny("deep", vocab_size=V, num_layers=LAYERS, rms_norm_eps=1e-5, rope_parameters=rope)))


def save(folder, kind, init_args, base, **changes):
    """A drafter with random weights in a folder, with a base of changed sizes."""
    shape = replace(base.shape, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drafter = recipes.build(kind, shape, init_args).eval().requires_grad_(False)
        for weight in drafter.parameters():
            weight += torch.randn(weight.shape) * 0.2
        if getattr(drafter, "draft_tokens", None) is not None:
            drafter.draft_tokens.copy_(torch.randperm(V)[: len(drafter.draft_tokens)].sort().values)
    vocabulary = tokenizer_hash(base.tokenizer)
    config = DrafterConfig(f"drafters.{kind.__name__}", grouped(kind, init_args), shape, base.name, vocabulary)
    folder.mkdir()
    checkpoint.save(folder, drafter, config)
    return drafter


def words(kind, *options):
    return [*options, *(["--mask_token_id", MASK] if kind in (Block, CTC) else [])]


def content(path):
    """The fields and the tensors of a file."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_exported_is_imported_with_the_same_weights(name, dtype, base, call, tmp_path):
    kind, init_args = KINDS[name]
    drafter = save(tmp_path / "ours", kind, init_args, base)
    export = "export", tmp_path / "ours", tmp_path / "gguf", "--format", "gguf", "--dtype", dtype
    assert call(run_drafters, *words(kind, *export)).code == 0
    place = tmp_path / "gguf" / ("model.gguf" if name == "dflash" else "")
    assert call(run_drafters, "import", place, tmp_path / "again").code == 0  # the base is the one that the file names
    again, config = checkpoint.load(tmp_path / "again")
    assert again.required_outputs == drafter.required_outputs and config.base_name == base.name
    assert config.base == replace(base.shape, intermediate_size=config.base.intermediate_size)
    weights = load_file(tmp_path / "again" / "model.safetensors")
    for key, weight in drafter.state_dict().items():
        expected = weight.to(getattr(torch, dtype)) if weight.is_floating_point() else weight
        torch.testing.assert_close(weights[key], expected, rtol=0, atol=0)  # its dtype, too
    assert weights.keys() == drafter.state_dict().keys()
    card = (tmp_path / "gguf" / "README.md").read_text()
    assert f"--spec-type draft-{name.partition(' ')[0].partition(',')[0]} " in card


def test_a_file_holds_what_llama_cpp_asks_for(base, call, tmp_path):
    """The names as in llama.cpp's src/models/dflash.cpp; a head of its own, as the base's is not its embedding."""
    save(tmp_path / "ours", *KINDS["dspark"], base)
    assert call(run_drafters, *words(Block, "export", tmp_path / "ours", tmp_path / "g", "--format", "gguf")).code == 0
    fields, tensors = content(tmp_path / "g" / "model.gguf")
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm")
    parts += ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    names = {f"blk.{layer}.{part}.weight" for layer in (0, 1) for part in parts}
    outside = ("token_embd", "output", "fc", "enc.output_norm", "output_norm", "markov_w1", "markov_w2")
    assert tensors.keys() == names | {f"{name}.weight" for name in outside}
    assert tensors["markov_w2.weight"].shape.tolist() == [4, V] and tensors["fc.weight"].shape.tolist() == [64, 32]
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert {kind for name, kind in kinds.items() if name.endswith("norm.weight")} == {"F32"}
    assert {kind for name, kind in kinds.items() if not name.endswith("norm.weight")} == {"BF16"}
    assert fields["general.architecture"] == "dflash" and fields["tokenizer.ggml.mask_token_id"] == MASK
    assert fields["dflash.target_layers"] == [1, 3] and fields["dflash.block_size"] == 5
    assert fields["dflash.sample_from_anchor"] is True and fields["dflash.has_confidence_head"] is False
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert base.tokenizer.convert_tokens_to_ids(tokens[:400]) == list(range(400)) and tokens[401] == "[PAD401]"
    assert types[401] == 5 and types[base.tokenizer.eos_token_id] == 3 and types[399] == 1
    head = gguf.dequantize(tensors["output.weight"].data, tensors["output.weight"].tensor_type)
    assert np.array_equal(head, base.base_weights.head.bfloat16().float().numpy())


def test_the_tokenizer_of_a_base_in_gguf_is_copied(base, call, tmp_path):
    save(tmp_path / "ours", *KINDS["eagle3"], base)
    assert call(run_drafters, "export", tmp_path / "ours", tmp_path / "g", "--format", "gguf").code == 0
    path = tmp_path / "g" / "model.gguf"
    config = checkpoint.read_config(tmp_path / "ours")
    copied = formats._tokenizer(replace(config, base_name=str(path)))
    assert copied == formats._tokenizer(config) and len(copied["tokenizer.ggml.tokens"]) == V


def test_the_confidence_head_of_a_file_is_left_out(base, call, tmp_path, monkeypatch):
    """Nothing here trains one, but llama.cpp's converter writes that of a DSpark drafter."""

    def with_head(*given):
        method, num_tokens, values, weights = convert(*given)
        head = {"confidence_head.proj.weight": torch.zeros(1, 36), "confidence_head.proj.bias": torch.zeros(1)}
        return method, num_tokens, values | {"enable_confidence_head": True}, weights | head

    convert = formats.converted
    monkeypatch.setattr(formats, "converted", with_head)
    save(tmp_path / "ours", *KINDS["dspark"], base)
    assert call(run_drafters, *words(Block, "export", tmp_path / "ours", tmp_path / "g", "--format", "gguf")).code == 0
    assert content(tmp_path / "g" / "model.gguf")[0]["dflash.has_confidence_head"] is True
    assert call(run_drafters, "import", tmp_path / "g", tmp_path / "again").out.endswith("cuts drafts short\n")


def test_scaled_positions_are_written_as_factors_and_not_read(base, call, tmp_path):
    """`drafters import` would have to guess the four numbers of Llama 3's scaling."""
    scaling = {"rope_factor": 8.0, "rope_low_frequency": 1.0, "rope_high_frequency": 4.0, "rope_original_length": 16}
    save(tmp_path / "ours", *KINDS["eagle3"], base, **scaling)
    assert call(run_drafters, "export", tmp_path / "ours", tmp_path / "g", "--format", "gguf").code == 0
    factors = content(tmp_path / "g" / "model.gguf")[1]["rope_freqs.weight"].data
    assert 1 < factors[0] < 8 and factors[-1] == 8
    said = call(run_drafters, "import", tmp_path / "g", tmp_path / "again").one_line_error("drafters")
    assert "no drafter here has weights such as rope_freqs.weight" in said


def test_the_line_that_starts_llama_cpp_is_printed_for_a_base_that_fits(base, call, tmp_path):
    """A drafter's file has the sizes and the tokenizer of its base, and stands for it here."""
    for name, length in ("dspark", 5), ("dflash", 4), ("eagle3", 6):
        save(tmp_path / name, *KINDS[name], base)
        export = "export", tmp_path / name, tmp_path / f"{name}-gguf", "--format", "gguf"
        assert call(run_drafters, *words(KINDS[name][0], *export)).code == 0
        file = tmp_path / f"{name}-gguf" / "model.gguf"
        serve = "serve-command", file.parent, "--engine", "llama.cpp"
        method = f"--spec-type draft-{name} --spec-draft-n-max"
        line = f"llama-server -m {file} -md {file} {method} {length} -fa on --metrics --port 8000\n"
        assert call(run_drafters, *serve, "--base", file).out == line
        assert f"{method} 3 " in call(run_drafters, *serve, "--base", file, "--num_tokens", 3).out
        assert f"pass that of the base {base.name} with --base" in call(run_drafters, *serve).one_line_error("drafters")
    other = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    other.add_uint32("llama.embedding_length", base.shape.hidden_size)
    other.add_array("tokenizer.ggml.tokens", ["a"] * V)
    for step in (other.write_header_to_file, other.write_kv_data_to_file, other.write_tensors_to_file, other.close):
        step()
    said = call(run_drafters, *serve, "--base", tmp_path / "other.gguf").one_line_error("drafters")
    assert "was trained for a base with another tokenizer.ggml.tokens than" in said
    said = call(run_drafters, "serve-command", tmp_path / "dspark", "--engine", "llama.cpp").one_line_error("drafters")
    assert "pass what `drafters export --format gguf` wrote" in said


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["smollm2", "ctc"])
def test_the_overlay_for_llama_cpp_trains_what_the_format_holds(recipe, call, tmp_path):
    """The recipe of SmolLM2 has a lookup, copies, fewer tokens, a window; the paper's reads the last states."""
    configs = [word for name in (recipe, "ctc_served", "debug") for word in ("--config", f"{name}.yaml")]
    short = ["--trainer.max_steps", 1, "--trainer.val_check_interval", 1, "--trainer.logger", "false"]
    call(run_lightning, "fit", *configs, *short, "--trainer.default_root_dir", tmp_path).succeeded()
    export = "export", tmp_path / "checkpoints" / "best.ckpt", tmp_path / "gguf", "--format", "gguf"
    assert call(run_drafters, *export, "--mask_token_id", 0).code == 0
    fields, tensors = content(tmp_path / "gguf" / "model.gguf")
    assert fields["dflash.block_size"] == 8 and tensors["markov_w1.weight"].shape.tolist()[0] == 128


@pytest.mark.skipif(SOURCE is None, reason="LLAMA_CPP_SOURCE does not name the folder of llama.cpp's source")
@pytest.mark.parametrize("name", KINDS)
def test_llama_cpp_s_converter_makes_the_same_of_our_export_for_vllm(name, base, call, tmp_path):
    kind, init_args = KINDS[name]
    save(tmp_path / "ours", kind, init_args, base)
    for format in ("gguf", "vllm"):
        export = "export", tmp_path / "ours", tmp_path / format, "--format", format
        assert call(run_drafters, *words(kind, *export)).code == 0
    # The converter knows how a tokenizer splits texts by the hash of an example, and does not know this one's.
    script = f"""import runpy, sys
sys.path[:0] = [{SOURCE!r}, {SOURCE + "/gguf-py"!r}]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "default"
runpy.run_path({SOURCE + "/convert_hf_to_gguf.py"!r}, run_name="__main__")"""
    options = "--target-model-dir", base.name, "--outtype", "bf16", "--outfile", tmp_path / "theirs.gguf"
    subprocess.run([sys.executable, "-c", script, tmp_path / "vllm", *options], check=True, capture_output=True)
    (ours, tensors), (theirs, expected) = content(tmp_path / "gguf" / "model.gguf"), content(tmp_path / "theirs.gguf")
    unread = "general.", "GGUF.", "tokenizer.chat_template", "tokenizer.ggml.padding", "tokenizer.ggml.unknown"
    for key, value in theirs.items():
        if not key.startswith(unread) or key == "general.architecture":
            assert ours[key] == value, key
    # DFlash by its name instead of an empty bias; the head of a base that is not its embedding, which is lost there.
    lost = {"output.weight"} if kind is Block else set()
    added = {"markov_w1.weight", "markov_w2.weight"} if name == "dflash" else set()
    assert tensors.keys() == (expected.keys() | lost) - added
    for key in tensors.keys() & expected.keys():
        assert tensors[key].tensor_type == expected[key].tensor_type, key
        assert np.array_equal(tensors[key].data, expected[key].data), key


# ---- refusals

ONE = {"hidden_layers": [1]}


@pytest.mark.parametrize(
    ("kind", "init_args", "said"),
    [
        (CTC, {"trunk": ONE}, "the gguf format has no root_everywhere: train the drafter with root_everywhere: false"),
        (EAGLE, {}, "EAGLE has no gguf format (only EAGLE3, Block and CTC have one)"),
        (EAGLE3, EAGLE_3 | {"hidden_layers": [1, 2]}, "three hidden_layers"),
        (EAGLE3, EAGLE_3 | {"layer": {"has_qk_norm": True}}, "has_qk_norm: false"),
        (EAGLE3, EAGLE_3 | {"draft": {"window": 9}}, "no window (9): train the drafter with window: 0"),
    ],
)  # fmt: skip
def test_what_the_format_cannot_hold_is_refused_by_name(kind, init_args, said, base, call, tmp_path):
    save(tmp_path / "ours", kind, init_args, base)
    export = "export", tmp_path / "ours", tmp_path / "g", "--format", "gguf"
    assert said in call(run_drafters, *words(kind, *export)).one_line_error("drafters")
    assert not (tmp_path / "g").exists()


def test_other_files_are_refused_in_one_line(base, call, tmp_path):
    def refusal(path):
        return call(run_drafters, "import", path, tmp_path / "out", "--base", base.name).one_line_error("drafters")

    def write(arch, **fields):
        writer = gguf.GGUFWriter(path := tmp_path / "other.gguf", arch)
        for name, value in fields.items():
            writer.add_uint32(f"{arch}.{name}", value)
        writer.add_array("tokenizer.ggml.tokens", ["a"] * V)
        rows = np.ones((32, 32), np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor("fc.weight", gguf.quantize(rows, kind), raw_dtype=kind)
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()
        return path

    writer = gguf.GGUFWriter(path := tmp_path / "empty.gguf", "llama")
    writer.kv_data[0].clear()
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    serve = "serve-command", path, "--engine", "llama.cpp", "--base", path
    assert "export the drafter again" in call(run_drafters, *serve).one_line_error("drafters")
    assert "it holds a model llama; read are dflash and eagle3" in refusal(write("llama"))
    assert "no drafter here has dflash.selector_rank" in refusal(write("dflash", selector_rank=3))
    assert "fc.weight is quantised (Q8_0): convert the drafter in 16 bits" in refusal(write("dflash", block_count=1))
    path = tmp_path / "cut.gguf"
    path.write_bytes((tmp_path / "other.gguf").read_bytes()[:100])
    assert "copy or download it again" in refusal(path)
