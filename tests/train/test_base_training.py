import shutil

import pytest
import torch
import yaml
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from data.batches import collate
from train.base_training import BaseTraining
from train.cli import commands, lightning_command

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 64, "context_length": 64}


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
    return collate(rows, pad_id=0)


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


@pytest.mark.slow
def test_training_memorises_a_text(tiny, batch, tmp_path):
    import lightning as L

    with torch.random.fork_rng():
        torch.manual_seed(0)
        learner = BaseTraining(str(tiny), warmup_steps=2, learning_rate=1e-2, **SIZES)
        trainer = L.Trainer(
            **{"accelerator": "cpu", "devices": 1, "max_steps": 60, "logger": False, "enable_checkpointing": False},
            **{"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tmp_path},
        )
        before = learner._loss(batch).item()
        trainer.fit(learner, DataLoader([batch], batch_size=None))
    assert learner._loss(batch).item() < 0.1 * before


@pytest.mark.parametrize("name, least, most", [("base/tiny.yaml", 3e6, 5e6), ("base/chat-30m.yaml", 29e6, 33e6)])
def test_a_shipped_base_config_has_the_size_that_its_comment_states(tiny, name, least, most):
    arguments = yaml.safe_load((lightning_command.CONFIGS / name).read_text())["model"]["init_args"]
    vocab_size = {"base/tiny.yaml": 1024, "base/chat-30m.yaml": 8192}[name]
    with torch.device("meta"):
        model = BaseTraining(**arguments | {"tokenizer": str(tiny)}).model
    embeddings = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    inner = sum(weight.numel() for weight in model.parameters() if weight not in embeddings)
    assert least < inner + 2 * vocab_size * model.config.hidden_size < most


@pytest.fixture(scope="module")
def ckpt(module, tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "base.ckpt"
    torch.save({"hyper_parameters": dict(module.hparams), "state_dict": module.state_dict()}, path)
    return path


@pytest.mark.slow
def test_a_base_is_exported_in_shards_of_the_given_size(call, ckpt, tiny, module, tmp_path):
    folder = tmp_path / "base"
    assert call(commands.main, "export", ckpt, folder, "--max-shard-size", "30KB").code == 0
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2 and not (folder / "model.safetensors").exists()
    assert all(shard.stat().st_size < 30_000 + 5_000 for shard in shards), "each has a header besides its weights"
    refused = call(commands.main, "export", ckpt, folder).one_line_error("drafters")
    assert "already holds a model" in refused
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    for name, weight in module.model.state_dict().items():
        assert torch.equal(loaded[name], weight.bfloat16()), name

    whole = shutil.copytree(folder, tmp_path / "whole")
    assert call(commands.main, "export", ckpt, whole, "--overwrite").code == 0
    assert [path.name for path in whole.glob("*.safetensors*")] == ["model.safetensors"]
    assert call(commands.main, "export", ckpt, whole, "--overwrite", "--max-shard-size", "30KB").code == 0
    assert sorted(path.name for path in whole.glob("*.safetensors")) == [shard.name for shard in shards]


@pytest.mark.parametrize("size", ["16", "0MB", "16 MB", "-1GB", "16TBs"])
def test_a_shard_size_without_a_valid_unit_is_refused(call, ckpt, tmp_path, size):
    said = call(commands.main, "export", ckpt, tmp_path / "base", f"--max-shard-size={size}").one_line_error("drafters")
    assert "such as 16MB" in said


def test_a_tokenizer_is_trained_on_the_given_conversations(call, tmp_path):
    import json

    from data.tokenizer import load_tokenizer

    records = [{"history": [{"user": "zyx wvu", "bot": "quuxquux"}, {"user": "zyx", "bot": "quuxquux"}]}] * 9
    (tmp_path / "own.json").write_text(json.dumps([*records, {"history": []}]), encoding="utf-8")
    given = ("--vocab-size", 340, "--files", tmp_path / "own.json")
    made = call(commands.main, "tokenizer", tmp_path / "tokenizer", *given)
    assert made.code == 0 and "9 conversations" in made.out and "dropped 1 records" in made.out
    pieces = load_tokenizer(str(tmp_path / "tokenizer")).get_vocab()
    assert "Ġquuxquux" in pieces and "Ġzyx" in pieces
