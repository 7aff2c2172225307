"""The feature store: what it holds, how a run of the command continues, and training from it."""

import json
import os
import shutil
from dataclasses import replace
from datetime import date, timedelta
from functools import cache, partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from benchmarks import recipes
from data import features
from data.features import (
    BYTES_PER_ROW,
    FeatureStore,
    Manifest,
    StoredRows,
    bytes_per_token,
    pack,
    pack_shard,
    row_keys,
    unpack,
)
from data.module import ShareGPTData
from data.templates import TEMPLATES
from data.tokenizer import load_tokenizer
from drafters import CTC, EAGLE, EAGLE3
from inference.verifier.int8 import can_multiply_int8
from tests.conftest import refusal
from tests.train.conftest import QUIET
from train.cli import run_drafters, run_lightning
from train.features import ShardRow, divide_into_shards, write_in_processes, write_store
from train.memory import memory_parts, num_bytes
from train.module import DrafterTraining

DATA = {"files": ["embedded:24"], "max_length": 400}
LAYERS = (0, 1, -1)
SMALL = {"num_frames": 6, "num_labels": 4, "num_anchors": 16, "num_nodes": 8, "top_k": 4}
SMALL_CTC = partial(recipes.build, CTC, init_args=SMALL)
SMALL_EAGLE = {"depth": 2, "width": 2, "top_k": 2, "num_nodes": 4}
RECIPES = {
    "ctc": SMALL_CTC,
    "ctc over fused layers": partial(recipes.build, CTC, init_args=SMALL | {"hidden_layers": (1, 0)}),
    "eagle": partial(recipes.build, EAGLE, init_args=SMALL_EAGLE),
    "eagle3": partial(recipes.build, EAGLE3, init_args=SMALL_EAGLE | {"hidden_layers": (0, 1), "num_unroll": 2}),
}


def command(tiny, out, **changes):
    """The command line that writes a store of three shards."""
    options = {"layers": ",".join(map(str, LAYERS)), "dtype": "float32", "max_length": 400, "shard_megabytes": 1}
    options |= {"base": tiny, "out": out, "files": "[embedded:24]"} | changes
    return ["features", *(f"--{name}={value}" for name, value in options.items())]


@pytest.fixture(scope="module")
def stores(tiny, tmp_path_factory):
    """Stores of the same conversations with each dtype."""
    folder = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["pytest"])
        for dtype in ("float32", "float16", "bfloat16", "int8"):
            run_drafters(command(tiny, folder / dtype, dtype=dtype))
    return folder


@pytest.fixture(scope="module")
def train_online(tiny, tmp_path_factory):
    """Trains a recipe once with the base in process, and returns what was recorded."""

    @cache
    def train(name):
        return fit(tiny, RECIPES[name], tmp_path_factory.mktemp("online"))

    return train


def read_data(tiny, features, stage="fit", **options):
    """The data of a training from a store, or from some; conversations are its own unless options change them."""
    stored = [*map(str, features)] if isinstance(features, list) else str(features)
    data = ShareGPTData(str(tiny), features=stored, **{"val_size": 4, "batch_size": 4} | DATA | options)
    data.setup(stage)
    return data


class Losses(L.Callback):
    """Records the loss and the tokens of each step, and how often the base runs in training."""

    def __init__(self):
        self.losses, self.tokens, self.base_forwards = [], [], 0

    def on_fit_start(self, trainer, module):
        def counted(*_):
            self.base_forwards += module.training

        module.base.model.base_model.register_forward_pre_hook(counted)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        self.tokens.append(batch["input_ids"].tolist())


def fit(tiny, drafter, folder, features=None, steps=8, val_answers="greedy", **changes):
    seen = Losses()
    L.seed_everything(0, verbose=False)
    module = DrafterTraining(str(tiny), drafter, learning_rate=3e-3, max_val_tokens=8, val_answers=val_answers)
    options = {"val_size": 4, "batch_size": 4, "features": features and str(features)} | DATA | changes
    data = ShareGPTData(str(tiny), **options)
    options = {"default_root_dir": folder, "num_sanity_val_steps": 0, "max_steps": steps, "limit_val_batches": 1}
    trainer = L.Trainer(**QUIET, **options, enable_checkpointing=False, callbacks=[seen])
    trainer.fit(module, data)
    seen.module, seen.metrics = module, {name: float(value) for name, value in trainer.callback_metrics.items()}
    seen.memory = memory_parts(module, trainer, (4, 400))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_training_from_a_store_gives_the_losses_of_training_with_the_base_in_process(
    tiny, stores, train_online, tmp_path, name
):
    online = train_online(name)
    assert online.base_forwards == len(online.losses) == 8
    assert any(row[-1] == 0 for batch in online.tokens for row in batch), "some rows are padded"
    for dtype, tolerance in (("float32", 1e-6), ("float16", 1e-3)):
        stored = fit(tiny, RECIPES[name], tmp_path / dtype, stores / dtype)
        assert stored.tokens == online.tokens, "the same batches in the same order"
        assert stored.losses == pytest.approx(online.losses, rel=tolerance, abs=0)
        assert stored.base_forwards == 0


@pytest.mark.slow
def test_with_a_store_the_layers_of_the_base_are_kept_only_if_validation_runs_them(
    tiny, tiny_base, stores, tmp_path, caplog
):
    caplog.set_level("INFO")
    said = []

    def train(name, store, **options):
        done = fit(tiny, SMALL_CTC, tmp_path / name, store, steps=6, **{"val_answers": "text"} | options)
        said.append(caplog.text)
        caplog.clear()
        return done

    whole, (shape, of_layers) = num_bytes(tiny_base.model), (tiny_base.shape, num_bytes(tiny_base.model.model.layers))
    online, stored = train("online", None), train("stored", stores / "float32")
    assert stored.metrics == pytest.approx(online.metrics, rel=1e-5) and "val/acceptance_length" in stored.metrics
    kept = dict(stored.module.base.model.named_parameters())
    assert {name.split(".")[-2] for name in kept} == {"embed_tokens", "norm", "lm_head"}
    assert stored.memory["weights of the base"] == 4 * shape.hidden_size * (2 * shape.vocab_size + 1)
    assert online.memory["weights of the base"] == whole == stored.memory["weights of the base"] + of_layers
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(TypeError):
        stored.module.training_batch({"input_ids": ids, "loss_mask": ids.bool()})
    for name, options in {"greedy": {"val_answers": "greedy"}, "text": {"val_files": ["embedded:4:900"]}}.items():
        assert train(name, stores / "float32", **options).memory["weights of the base"] == whole
    lines = ["embedding, the final norm and the LM head are kept", *["it need not with --model.val_answers text"] * 2]
    assert [line in text for text, line in zip(said[1:], lines, strict=True)] == [True] * 3


def state(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.slow
def test_an_interrupted_run_continues_after_its_complete_shards(call, tiny, stores, tmp_path):
    folder = tmp_path / "store"
    shutil.copytree(stores / "float32", folder)
    whole, manifest = state(folder), Manifest.read(folder)
    names = [shard.file for shard in manifest.shards]
    assert len(names) >= 3
    stopped = json.loads((folder / "manifest.json").read_text()) | {"is_complete": False}
    del stopped["shards"][2:]  # killed before the third was recorded, the second cut short by the crash
    (folder / "manifest.json").write_text(json.dumps(stopped))
    (folder / names[1]).write_bytes(whole[names[1]][0][:-7])
    (folder / f".{names[2]}.new").write_bytes(b"half")
    with pytest.raises(ValueError, match="is not finished"):
        FeatureStore(folder)
    outcome = call(run_drafters, *command(tiny, folder)).succeeded()
    there, said, done = outcome.out.splitlines()[-3:]
    assert there == f"1 of {len(names)} shards are there already"
    assert said.startswith("to be written: ") and "layers 0,1,-1 in float32" in said, "before writing"
    assert done.startswith(f"wrote {folder}: ")
    again = state(folder)
    assert {name: content for name, (content, _) in again.items()} == {
        name: content for name, (content, _) in whole.items()
    }, "byte by byte what an uninterrupted run writes"
    assert again[names[0]] == whole[names[0]], "the whole shard was left alone"


@pytest.mark.slow
def test_a_run_that_was_stopped_within_its_first_shards_continues(call, tiny, stores, tmp_path):
    folder, manifest = tmp_path / "store", Manifest.read(stores / "float32")
    second = manifest.shards[1].file

    def stopped(shards):
        shutil.copy(stores / "float32" / second, folder)  # complete before the first, so not yet recorded
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        write_store(folder, replace(manifest, shards=(), dtype="float16"), [[ShardRow(0, b"", 4)]] * 3, stopped)
    assert second in state(folder)
    call(run_drafters, *command(tiny, folder)).succeeded()
    assert {name: content for name, (content, _) in state(folder).items()} == {
        name: content for name, (content, _) in state(stores / "float32").items()
    }


@pytest.mark.slow
def test_two_processes_write_the_bytes_of_one_and_continue_what_it_began(call, tiny, stores, tmp_path):
    begun, said = tmp_path / "begun", "drafters features"
    shutil.copytree(stores / "float16", begun)
    names = sorted(path.name for path in begun.glob("*.safetensors"))
    (begun / names[0]).unlink()
    expected = {name: content for name, (content, _) in state(stores / "float16").items()}
    for folder in (tmp_path / "new", begun):
        said = call(run_drafters, *command(tiny, folder, dtype="float16", devices=2)).succeeded().out
        assert {name: content for name, (content, _) in state(folder).items()} == expected
    assert f"{len(names) - 1} of {len(names)} shards are there already" in said


@pytest.mark.slow
@pytest.mark.skipif(not can_multiply_int8(), reason="needs exact products of integers")
def test_a_store_written_in_int8_on_a_cpu_serves_a_training_with_bfloat16(call, tiny, tmp_path):
    stored = {}
    for name, options in {"bfloat16": {}, "int8": {}, "two": {"base_dtype": "int8", "devices": 2}}.items():
        options = {"base_dtype": name, "device": "cpu"} | options
        call(run_drafters, *command(tiny, tmp_path / name, **options)).succeeded()
        data = ShareGPTData(str(tiny), features=str(tmp_path / name), val_size=4, batch_size=4, **DATA)
        data.setup("fit")
        stored[name] = StoredRows(data.store, data._places)
    for exact, quantised, other in zip(*stored.values(), strict=True):
        states = exact["hidden"].float()
        assert 0 < (quantised["hidden"].float() - states).norm() < 0.02 * states.norm()
        assert (quantised["labels"] == exact["labels"]).float().mean() > 0.9
        assert torch.equal(quantised["hidden"], other["hidden"]), "each process quantises alike"
    assert Manifest.read(tmp_path / "int8").base_dtype == "bfloat16"
    mixed = call(run_drafters, *command(tiny, tmp_path / "int8", base_dtype="bfloat16", device="cpu"))
    assert "a store of another base_dtype (int8, not bfloat16)" in mixed.one_line_error("drafters")


@pytest.mark.slow
def test_what_ends_a_process_that_writes_shards_ends_the_command_in_one_line(tiny, stores, tmp_path):
    base, cpu = (str(tiny), "float32"), torch.device("cpu")
    rows, keys = read_data(tiny, stores / "float32", val_size=0).train_set, [bytes([1]) * 16] * 9

    def write(numbers, source=base):
        shards = {f"{number}": [ShardRow(number, keys[0], 400)] for number in numbers}
        return list(write_in_processes([cpu] * 2, source, (tmp_path, rows, (0,), "float32", 4, None, False), shards))

    assert [shard.num_rows for shard in write([0, 1, 2])] == [1, 1, 1]
    assert "no-such-base" in refusal(write, [0, 1], source=("no-such-base", "float32"))
    assert "a process has failed or was killed: run again" in refusal(write, [Killing(0)])


class Killing(int):
    """A number of a row that ends the process to which it is sent."""

    def __reduce__(self):
        return os._exit, (9,)


def flip_last_byte(path):
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


@pytest.mark.slow
def test_a_finished_store_is_not_written_again_but_for_a_shard_with_a_changed_byte(call, tiny, stores, tmp_path):
    folder = tmp_path / "store"
    shutil.copytree(stores / "float16", folder)
    before, names = state(folder), sorted(path.name for path in folder.glob("*.safetensors"))
    assert "to be written" not in call(run_drafters, *command(tiny, folder, dtype="float16")).succeeded().out
    flip_last_byte(folder / names[0])
    again = call(run_drafters, *command(tiny, folder, dtype="float16")).succeeded()
    assert "in 1 shards" in again.out and (folder / names[0]).read_bytes() == before[names[0]][0]
    assert state(folder)[names[-1]] == before[names[-1]], "the other shards were left alone"


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_names_a_shard_with_a_changed_byte_when_it_first_reads_it(
    call, write_recipe, stores, tmp_path, num_workers
):
    folder = shutil.copytree(stores / "float32", tmp_path / "store")
    flip_last_byte(damaged := folder / "shard-00001.safetensors")
    words = "fit", "--config", write_recipe(tmp_path, limit_val_batches=0), "--data.max_length", 400
    outcome = call(run_lightning, *words, "--data.features", folder, "--data.num_workers", num_workers)
    line = outcome.one_line_error("lightning")
    assert f"{damaged}: it is damaged" in line and "write the store again with `drafters features`" in line


@pytest.mark.slow
def test_a_shard_is_hashed_once_for_all_processes_that_load_batches_and_only_when_it_is_read(
    tiny, stores, tmp_path, monkeypatch
):
    hashed, whole = tmp_path / "hashed.txt", features.checksum

    def checksum(path):
        with hashed.open("a") as stream:  # the loaders are processes of their own
            stream.write(f"{path.name}\n")
        return whole(path)

    monkeypatch.setattr(features, "checksum", checksum)
    data = read_data(tiny, stores / "float32", num_workers=1)
    assert not hashed.exists(), "a large store would take long"
    for _ in range(2):  # epochs, for each of which a loader starts
        assert len(list(data.train_dataloader())) > 1
    assert sorted(hashed.read_text().split()) == [shard.file for shard in data.store.manifest.shards]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "int8"}, "another dtype (float32, not int8)"),
        ({"layers": "-1"}, "another layers"),
        ({"base": "other"}, "another base"),
        ({"out": "full"}, "holds other files: give another --out"),
        ({"layers": "0,7"}, "layer 7 is not there or given twice: the base has -1, 0, ..., 2"),
        ({"max_length": 4096}, "ends at 512: pass --max_length 512 or less"),
        ({"batch_size": 0}, "must be positive"),
        ({"out": "empty", "room": 1000}, "has 1.0 kB left: make room, or pass --dtype int8"),
    ],
)
def test_a_mistake_leaves_a_store_as_it_was(call, tiny, make_tiny, stores, tmp_path, monkeypatch, changes, said):
    folder = shutil.copytree(stores / "float32", tmp_path / "store")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("dear")
    before, changes = state(folder), dict(changes)
    if "base" in changes:
        changes["base"] = make_tiny("another", seed=3)
    if room := changes.pop("room", None):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=room))
    out = tmp_path / changes.pop("out", "store")
    error = call(run_drafters, *command(tiny, out, **changes)).one_line_error("drafters")
    assert said in error.replace("  ", " ")
    assert state(folder) == before and not (tmp_path / "empty").exists()


# ---- what a store holds


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_a_coarser_store_holds_the_same_up_to_rounding(tiny, stores, dtype):
    exact, coarse = (read_data(tiny, stores / name) for name in ("float32", dtype))
    for row, other in zip(*(StoredRows(data.store, data._places) for data in (exact, coarse)), strict=True):
        assert all(torch.equal(row[name], other[name]) for name in ("input_ids", "loss_mask", "labels"))
        states = row["hidden"].unflatten(-1, (len(LAYERS), -1))
        error = unpack(other["hidden"], other.get("hidden_scale"), torch.float32).view_as(states) - states
        relative = {"float16": 2**-11, "bfloat16": 2**-8, "int8": 1.001 / 254}[dtype]
        scale = states.abs().amax(-1, keepdim=True) if dtype == "int8" else states.abs()
        assert (error.abs() <= scale * relative + 1e-6).all(), "int8 has a scale for each token; batches differ too"
    manifest = coarse.store.manifest
    expected = manifest.num_tokens * bytes_per_token(len(LAYERS), manifest.hidden_size, dtype)
    headers = sum(path.stat().st_size for path in (stores / dtype).glob("*.safetensors")) - expected
    assert 0 <= headers - manifest.num_rows * BYTES_PER_ROW < 2000 * len(manifest.shards)


@pytest.mark.slow
def test_a_subset_of_the_layers_is_read_in_the_requested_order(tiny, stores):
    data = read_data(tiny, stores / "float32")
    store, place = data.store, data._places[0]
    parts = dict(zip(LAYERS, store.read(place)["hidden"].chunk(3, -1), strict=True))
    for layers in [(1, 0), (-1,), (0, -1)]:
        store.layers = layers
        row = store.read(place)
        assert torch.equal(row["hidden"], torch.cat([parts[layer] for layer in layers], -1))
        assert ("last_hidden" in row) == (-1 not in layers), "the last state comes once"
        if "last_hidden" in row:
            assert torch.equal(row["last_hidden"], parts[-1])


def test_int8_preserves_zeros_and_the_largest_value_of_every_token():
    states = torch.tensor([[0.0, 0.0, 0.0], [1e4, -3.0, 5.0], [1e-6, 2e-6, -4e-6]])
    packed, scale = pack(states, "int8")
    read = unpack(packed, scale[:, None], torch.float32)
    assert torch.equal(read[0], states[0]) and read.isfinite().all()
    assert torch.allclose(read[1, 0], states[1, 0]) and torch.allclose(read[2, 2], states[2, 2])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_hidden_states_out_of_the_range_of_the_dtype_are_refused(dtype):
    with pytest.raises(ValueError, match=r"hidden states reach 7e\+04, beyond float16: pass --dtype bfloat16"):
        pack(torch.tensor([[7e4]]), "float16")
    numbers = torch.arange(3)
    row = {"id": "first", **dict.fromkeys(("input_ids", "loss_mask", "labels"), numbers)}
    for value in ("nan", "inf"):
        rows = [row | {"hidden": torch.ones(3, 4)}, row | {"hidden": torch.full((3, 4), float(value))}]
        with pytest.raises(ValueError, match=r"conversation first, layer 0: .* not finite"):
            pack_shard([bytes(16)] * 2, rows, (0, -1), dtype)


@pytest.mark.slow
def test_the_key_of_a_row_depends_on_its_tokens_and_mask_only(tiny, stores):
    rows = read_data(tiny, stores / "float32").train_set
    names = row_keys(rows)
    assert len(set(names)) == len(rows) == 20
    assert row_keys(rows.select([5, 3])) == [names[5], names[3]], "not by their place"
    turned = rows.map(lambda row: {"loss_mask": [1 - value for value in row["loss_mask"]]})
    assert not set(row_keys(turned)) & set(names)


def test_shards_hold_each_row_once_with_the_longest_first():
    keys, lengths = (0, 1, 2, 1, 3, 4), (5, 9, 5, 9, 1, 30)
    rows = [
        ShardRow(number, bytes([key]), length) for number, (key, length) in enumerate(zip(keys, lengths, strict=True))
    ]
    shards = divide_into_shards(rows, token_bytes=100, shard_bytes=1500 + 2 * BYTES_PER_ROW)
    assert [[row.number for row in shard] for shard in shards] == [[5], [1, 0], [2, 4]], "row 3 is row 1 again"


@pytest.mark.slow
def test_a_store_that_does_not_fit_the_training_is_refused(tiny, make_tiny, stores, tmp_path):
    store = stores / "float32"

    def train(base=tiny, drafter=SMALL_CTC, features=store, dtype="float32"):
        module = DrafterTraining(str(base), drafter, base_dtype=dtype)
        data = ShareGPTData(str(base), val_size=4, batch_size=4, features=str(features), **DATA)
        L.Trainer(**QUIET, max_steps=1, enable_checkpointing=False).fit(module, data)

    assert "holds the layers 0,1,-1, but the drafter needs 2,0: write one with --layers 2,0" in refusal(
        train, drafter=partial(recipes.build, CTC, init_args=SMALL | {"hidden_layers": (2, 0)})
    )
    assert "in float32, not in bfloat16: pass --model.base_dtype float32" in refusal(train, dtype="bfloat16")
    assert "whose weights are not those of" in refusal(train, base=make_tiny("stranger", seed=9))
    run_drafters(command(tiny, tmp_path / "fused", layers="0,1"))
    assert "reads the base's last hidden states" in refusal(
        train, drafter=RECIPES["eagle3"], features=tmp_path / "fused"
    )
    fit(tiny, RECIPES["ctc over fused layers"], tmp_path / "fit", tmp_path / "fused", steps=1)


@pytest.mark.slow
def test_data_that_do_not_fit_the_store_and_damage_are_refused_by_name(tiny, stores, tmp_path):
    folder = shutil.copytree(stores / "float32", tmp_path / "store")

    def refused(features=folder, **options):
        return refusal(read_data, tiny, features, **options)

    assert "is not that of llama2_chat: pass --data.template tokenizer" in refused(template="llama2_chat")
    assert "max_length 400, not 100: pass --data.max_length 400" in refused(max_length=100)
    missing = refused(files=["embedded:12", "embedded:5:900"], val_size=0)
    assert "5 of 17 conversations are not in the feature store" in missing and "embedded-0-900" in missing
    replace(Manifest.read(folder), tokenizer="0").save(folder)
    assert f"by {tiny}, which has another tokenizer: pass --model.base {tiny}" in refused()
    assert "manifest.json: no such file or directory" in refused(tmp_path / "nowhere")
    shutil.copy(stores / "float32" / "manifest.json", folder)
    (folder / "shard-00001.safetensors").unlink()
    assert "shard-00001.safetensors: No such file or directory" in refused()
    validated = read_data(tiny, tmp_path / "nowhere", stage="validate")
    assert validated.store is None and next(iter(validated.val_dataloader()))["input_ids"].numel()


@pytest.mark.slow
def test_two_stores_train_as_one_with_the_text_of_both(tiny, stores, tmp_path):
    """The second was written later, of more text, and holds one layer more and one less."""
    parts = [tmp_path / "first", tmp_path / "second"]
    run_drafters(command(tiny, parts[0], files="[embedded:10]", layers="0,1,-1"))
    run_drafters(command(tiny, parts[1], files="[embedded:14:10]", layers="2,1,0"))
    whole = read_data(tiny, stores / "float32", val_size=0)
    files = ["embedded:10", "embedded:14:10"]
    both = read_data(tiny, parts, files=files, val_size=0)
    assert both.store.layers == (0, 1), "those of the first that the second has"
    whole.store.layers = (0, 1)
    for one, other in zip(whole.train_dataloader(), both.train_dataloader(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ("input_ids", "labels", "loss_mask"))
        torch.testing.assert_close(one["hidden"], other["hidden"])  # the base read them in other batches
    said = refusal(FeatureStore, parts[0], stores / "float16")
    assert f"float16 has another dtype than {parts[0]} (float16, not float32): train on stores" in said
    for part, day in zip(parts, ("2026-11-28", "2026-11-29"), strict=True):
        replace(Manifest.read(part), template_name=f"tokenizer:date={day}").save(part)
    said = refusal(FeatureStore, *parts)
    assert f"second has another template_date than {parts[0]} (2026-11-29, not 2026-11-28): train on" in said


@pytest.mark.slow
def test_a_config_trains_from_a_store_with_one_more_argument(call, write_recipe, stores, tmp_path):
    words = "fit", "--config", write_recipe(tmp_path, max_steps=2), "--data.max_length", 400
    call(run_lightning, *words, "--data.features", stores / "float16").succeeded()
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 2
    missing = call(run_lightning, *words, "--ckpt_path", "last", "--data.features", tmp_path / "none")
    assert "manifest.json: no such file or directory" in missing.one_line_error("lightning")


@pytest.mark.slow
def test_a_store_of_another_day_is_continued_and_trained_on_with_the_date_that_it_holds(
    call, tiny, tmp_path, monkeypatch
):
    """As Llama 3.2, gpt-oss, SmolLM3 and Granite, whose templates write today's date into the prompt."""
    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    tokenizer = load_tokenizer(str(base))
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + TEMPLATES["vicuna_v1.1"]
    tokenizer.save_pretrained(base)
    written = command(base, tmp_path / "store", cache_dir=tmp_path / "first")
    call(run_drafters, *written).succeeded()
    tomorrow = date.today() + timedelta(days=1)
    monkeypatch.setattr(
        "data.templates.date", SimpleNamespace(today=lambda: tomorrow, fromisoformat=date.fromisoformat)
    )
    assert "4 of 4 shards are there already" in call(run_drafters, *written).succeeded().out
    data = read_data(base, tmp_path / "store", cache_dir=str(tmp_path / "second"))
    first = tokenizer.decode(data.train_set[0]["input_ids"][:12])
    assert first.startswith(date.today().strftime("%d %b %Y")) and len(data.train_dataloader().dataset) == 20
    said = refusal(lambda: read_data(base, tmp_path / "store", template=f"tokenizer:date={tomorrow}"))
    assert "conversations are not in the feature store" in said
