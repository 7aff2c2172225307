"""The pre-training of a base: its loss, its size, its folder and its tokenizer."""

import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from benchmarks import pretrain
from benchmarks.pretrain import BaseTraining
from data.batches import collate
from data.tokenizer import load_tokenizer, tokenizer_hash
from inference.verifier.base import load_base

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 64, "context_length": 64}


@pytest.fixture(scope="module")
def tiny(repository):
    """Folder of a tokenizer."""
    return repository / "checkpoints" / "tiny-chat"


@pytest.fixture(scope="module")
def module(tiny):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BaseTraining(str(tiny), prompt_weight=0.3, **SIZES)


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(1)
    rows = [
        {
            "input_ids": torch.randint(3, 400, (length,), generator=generator),
            "loss_mask": torch.rand(length, generator=generator) < 0.5,
        }
        for length in (5, 9, 12)
    ]
    return collate(rows)


def test_the_loss_is_the_weighted_mean_over_real_tokens(module, batch):
    total = weight = 0.0
    for row, length in enumerate(batch["lengths"].tolist()):
        with torch.no_grad():
            distributions = module.model(batch["input_ids"][row : row + 1, :length]).logits[0].log_softmax(-1)
        for at in range(1, length):
            share = 1.0 if batch["loss_mask"][row, at] else 0.3
            total -= share * distributions[at - 1, batch["input_ids"][row, at]].item()
            weight += share
    assert module._loss(batch).item() == pytest.approx(total / weight, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "vocab_size", "least", "most"), [("tiny", 1024, 3e6, 5e6), ("chat-30m", 8192, 29e6, 33e6)]
)
def test_a_config_has_the_size_that_its_comment_states(tiny, repository, name, vocab_size, least, most):
    arguments = yaml.safe_load((repository / "benchmarks" / "pretrain" / f"{name}.yaml").read_text())["model"]
    with torch.device("meta"):
        model = BaseTraining(**arguments | {"tokenizer": str(tiny)}).model
    embeddings = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    inner = sum(weight.numel() for weight in model.parameters() if weight not in embeddings)
    assert least < inner + 2 * vocab_size * model.config.hidden_size < most


@pytest.mark.slow
def test_a_base_is_trained_and_exported_in_shards_of_the_given_size(tiny, repository, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["pytest"])
    config = repository / "benchmarks" / "pretrain" / "tiny.yaml"
    options = {"max_steps": 2, "val_check_interval": 2, "default_root_dir": tmp_path, "logger": False}
    options = {f"trainer.{name}": value for name, value in options.items()}
    options |= {"trainer.enable_progress_bar": False, "data.files": "[embedded:16]", "data.val_size": 4}
    options |= {"model.tokenizer": tiny, **{f"model.{name}": size for name, size in SIZES.items()}}
    options |= {"data.max_length": 64, "data.batch_size": 4}
    pretrain.run(["fit", "--config", str(config), *(f"--{name}={value}" for name, value in options.items())])
    ckpt, folder = str(tmp_path / "checkpoints" / "last.ckpt"), tmp_path / "base"
    pretrain.run(["export", ckpt, str(folder), "--max_shard_size", "100KB"])
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1 and not (folder / "model.safetensors").exists()
    assert all(shard.stat().st_size < 105_000 for shard in shards), "each has a header besides its weights"
    trained = torch.load(ckpt, weights_only=True)["state_dict"]
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert {f"model.{name}" for name in loaded} == trained.keys()
    assert all(torch.equal(weight, trained[f"model.{name}"].bfloat16()) for name, weight in loaded.items())
    base = load_base(str(folder))
    assert base.context_length == 64 and tokenizer_hash(base.tokenizer) == tokenizer_hash(load_tokenizer(str(tiny)))
    pretrain.run(["export", ckpt, str(folder)])
    assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]


def test_a_tokenizer_is_trained_on_the_given_conversations(tmp_path, capsys):
    records = [{"history": [{"user": "zyx wvu", "bot": "quuxquux"}, {"user": "zyx", "bot": "quuxquux"}]}] * 9
    (tmp_path / "own.json").write_text(json.dumps(records), encoding="utf-8")
    words = ["tokenizer", str(tmp_path / "out"), "--vocab_size", "340", "--files", f"[{tmp_path / 'own.json'}]"]
    pretrain.run(words)
    assert "9 conversations" in capsys.readouterr().out
    vocabulary = load_tokenizer(str(tmp_path / "out"))
    assert {"Ġquuxquux", "Ġzyx"} <= vocabulary.get_vocab().keys()
    assert len(vocabulary) <= 340 and vocabulary.chat_template and vocabulary.eos_token == "</s>"
    with pytest.raises(SystemExit):
        pretrain.run(words)
    assert "already holds a tokenizer" in capsys.readouterr().err
