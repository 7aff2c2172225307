import json
import logging
import random

import lightning as L
import pytest
import torch

from data.batches import BucketSampler
from data.conversations import parse
from data.module import ShareGPTData, describe_epoch, hold_out
from data.rows import describe
from tests.train.conftest import QUIET

CONVERSATION = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}


@pytest.fixture
def make(tokenizer_folder, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")

    def make(files=("embedded:40",), **arguments):
        options = {"val_size": 8, "batch_size": 4, "max_length": 200, "cache_dir": str(cache)} | arguments
        return ShareGPTData(tokenizer_folder, list(files), **options)

    return make


class Recorder(L.LightningModule):
    """Records the batches it is trained on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch):
        self.seen.append(batch["input_ids"].tolist())
        return self.weight * 1.0

    def validation_step(self, batch):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(data, folder, resume=None, **options):
    recorder = Recorder()
    checkpoints = L.pytorch.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = L.Trainer(**QUIET, max_epochs=3, callbacks=[checkpoints], **options)
    trainer.fit(recorder, data, ckpt_path=resume)
    return recorder.seen


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 13, 16])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"batch_size": 100, "max_tokens": 700}], ids=str)
def test_a_resumed_run_trains_on_the_batches_of_an_uninterrupted_run(make, tmp_path, step, options):
    """Batches that a worker has prefetched do not count as trained on."""
    whole = fit(make(**options), tmp_path)
    epoch = len(whole) // 3
    assert len(whole) == 3 * epoch and sorted(map(str, whole[:epoch])) != sorted(map(str, whole[epoch : 2 * epoch]))
    assert "max_tokens" not in options or all(len(ids) * len(ids[0]) <= 700 for ids in whole)
    resumed = fit(make(**options), tmp_path / "again", resume=tmp_path / f"step={step}.ckpt")
    assert resumed == whole[step:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_stay_for_the_next_epoch_and_batches_are_pinned_for_a_gpu_alone(make, num_workers):
    data = make(num_workers=num_workers)
    data.setup()
    loader = data.train_dataloader()
    assert (loader.num_workers, loader.persistent_workers) == (num_workers, num_workers > 0)
    assert loader.pin_memory == torch.cuda.is_available()


@pytest.mark.slow
def test_training_logs_its_data_batches_and_steps_before_it_starts(make, tmp_path, caplog):
    broken = {"conversations": [{"from": "human", "value": "Hi"}]}
    (tmp_path / "mute.jsonl").write_text(json.dumps(broken) + "\n" + json.dumps(CONVERSATION) + "\n")
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        data = make(["embedded:40", str(tmp_path / "mute.jsonl")])
        seen = fit(data, tmp_path, accumulate_grad_batches=2, limit_train_batches=0.5)
    logged = "\n".join(caplog.messages)
    assert (
        "dropped 1 records (1 x no assistant turn after a user turn), for example\n  mute.jsonl line 1: no " in logged
    )
    assert f"training: {describe(data.train_set)}" in logged and "training: 33 conversations, " in logged
    assert "validation: 8 conversations, " in logged
    assert len(seen) == 3 * 4  # of the 9 batches of an epoch half is trained on, two a step
    assert (tmp_path / "step=6.ckpt").is_file() and not (tmp_path / "step=7.ckpt").exists()
    assert (
        "training: 9 batches an epoch and device, " in logged
        and "% of their tokens padding; 6 steps, 2 an epoch" in logged
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_epochs": 3}, "; 48 steps, 16 an epoch"),
        ({"max_epochs": 3, "max_steps": 20}, "; 20 steps, 16 an epoch"),
        ({"max_epochs": -1, "max_steps": 20}, "; 20 steps, 16 an epoch"),
        ({"max_epochs": -1}, "% of their tokens padding"),
        ({"max_epochs": 3, "accumulate_grad_batches": 5, "limit_train_batches": 11}, "; 9 steps, 3 an epoch"),
    ],
)
def test_the_number_of_steps_is_logged_if_it_is_known(options, expected):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **options)
    assert describe_epoch(BucketSampler([1] * 63, 4), trainer).endswith(expected)


def test_held_out_conversations_are_not_trained_on(make):
    data = make()
    data.setup("fit")
    train, val = set(data.train_set["id"]), set(data.val_set["id"])
    assert (len(train), len(val)) == (32, 8) and not train & val
    rows = [ids for batch in data.val_dataloader() for ids in batch["input_ids"].tolist()]
    assert len(rows) == 8
    assert [batch["lengths"].tolist() for batch in data.test_dataloader()] == [
        batch["lengths"].tolist() for batch in data.val_dataloader()
    ]


def test_validation_files_replace_the_held_out_conversations(make):
    data, none = make(val_files=["embedded:6:500"]), make(val_size=0)
    for each in (data, none):
        each.setup("fit")
        assert len(each.train_set) == 40
    assert set(data.val_set["id"]) == {f"embedded-0-{n}" for n in range(500, 506)}
    assert none.val_dataloader() == []


def test_all_answers_to_a_prompt_are_in_the_same_set_and_the_order_stays():
    def answers(prompts, num_answers):
        turns = [[f"question {n}", str(a)] for n in range(prompts) for a in range(num_answers)]
        return [parse({"history": [turn]}, n) for n, turn in enumerate(turns)]

    for seed in range(5):
        train, val = hold_out(answers(8, 4), 10, seed)
        asked = [{conversation.messages[0]["content"] for conversation in part} for part in (train, val)]
        assert not asked[0] & asked[1] and (len(train), len(val)) == (20, 12)
        assert [int(c.id) for c in train] == sorted(int(c.id) for c in train)
        held_out = sorted(random.Random(seed).sample(range(20), 20)[15:])
        assert [int(c.id) for c in hold_out(answers(20, 1), 5, seed)[1]] == held_out
    assert hold_out(answers(20, 1), 0, seed=1) == (answers(20, 1), [])
    for conversations, val_size in ((answers(1, 3), 2), (answers(20, 1), 20), (answers(20, 1), 21)):
        with pytest.raises(
            ValueError, match=rf"val_size {val_size} leaves nothing of {len(conversations)} conversations"
        ):
            hold_out(conversations, val_size, seed=0)
    with pytest.raises(ValueError, match="val_size must be at least 0, not -1"):
        hold_out(answers(20, 1), -1, seed=0)
