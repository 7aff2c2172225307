import json
from dataclasses import replace

import pytest
import torch

from data.features import (
    BYTES_PER_ROW,
    FeatureStore,
    Manifest,
    StoredRows,
    bytes_per_token,
    pack,
    row_keys,
    unpack,
    write_shard,
)
from data.files import short_hash
from data.module import ShareGPTData
from data.rows import lengths
from data.tokenizer import tokenizer_hash

LAYERS, WIDTH = (0, 2, -1), 8
DTYPES = ("float32", "float16", "bfloat16", "int8")


@pytest.fixture
def make_data(tokenizer_folder, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")

    def make(files=("embedded:12",), **arguments):
        options = {"val_size": 2, "batch_size": 4, "max_length": 240, "cache_dir": str(cache)} | arguments
        return ShareGPTData(tokenizer_folder, list(files), **options)

    return make


@pytest.fixture
def written(make_data, tmp_path):
    """Write random states of 12 conversations in three shards; return the folder and what was written."""

    def write(dtype="float32", layers=LAYERS, **changes):
        data = make_data(val_size=0)
        data.setup("fit")
        rows, random = data.train_set, torch.Generator().manual_seed(0)
        texts = []
        for row in rows:
            text = {name: torch.tensor(row[name]) for name in ("input_ids", "loss_mask")} | {"id": row["id"]}
            length = len(row["input_ids"])
            text["labels"] = torch.randint(600, (length,), generator=random)
            text["hidden"] = torch.randn(length, len(layers) * WIDTH, generator=random)
            texts.append(text)
        folder = tmp_path / f"store-{dtype}"
        folder.mkdir()
        names, order = row_keys(rows), [7, 2, 9, 0, 4, 11, 1, 3, 5, 6, 8, 10]
        shards = []
        for number in range(3):
            members = order[4 * number : 4 * number + 4]
            path = folder / f"shard-{number:05d}.safetensors"
            named = [names[row] for row in members]
            shards.append(write_shard(path, named, [texts[row] for row in members], layers, dtype))
        tokenizer = data.tokenizer_object
        values = dict(base="a-base", base_dtype="float32", base_hash="0", tokenizer=tokenizer_hash(tokenizer), rows="")
        values |= dict(template=short_hash(tokenizer.get_chat_template()), template_name="tokenizer", max_length=240)
        values |= dict(layers=layers, hidden_size=WIDTH, dtype=dtype, num_rows=len(rows), num_tokens=sum(lengths(rows)))
        values |= dict(shard_bytes=0, shards=tuple(shards), is_complete=True)
        Manifest(**values | changes).save(folder)
        return folder, texts

    return write


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_store_reads_what_was_written_up_to_rounding(written, make_data, dtype):
    folder, texts = written(dtype)
    data = make_data(features=str(folder), val_size=3)
    data.setup("fit")
    ids = [text["id"] for text in texts]
    for row, stored in zip(data.train_set, StoredRows(data.store, data._places), strict=True):
        text = texts[ids.index(row["id"])]
        for name in ("input_ids", "loss_mask", "labels"):
            assert torch.equal(stored[name].long(), text[name].long())
        read = unpack(stored["hidden"], stored.get("hidden_scale"), torch.float32)
        error = (read - text["hidden"]).unflatten(-1, (len(LAYERS), WIDTH)).abs()
        exact = text["hidden"].unflatten(-1, (len(LAYERS), WIDTH)).abs()
        steps = {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8}
        if dtype == "int8":
            assert (error <= exact.amax(-1, keepdim=True) / 254 * 1.001).all(), "half a step of each token's own scale"
        else:
            assert (error <= exact * steps[dtype]).all()
    num_tokens = sum(len(text["input_ids"]) for text in texts)
    expected = num_tokens * bytes_per_token(len(LAYERS), WIDTH, dtype) + len(texts) * BYTES_PER_ROW
    assert 0 <= sum(path.stat().st_size for path in folder.glob("*.safetensors")) - expected < 3 * 2000  # headers


def test_a_subset_of_the_layers_is_read_in_the_requested_order(written):
    folder, texts = written()
    store = FeatureStore(folder)
    parts = dict(zip(LAYERS, texts[7]["hidden"].chunk(3, -1), strict=True))
    for layers in [(2, 0), (-1,), (0, -1)]:
        store.layers = layers
        row = store.read((0, 0, len(texts[7]["input_ids"])))
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


def test_hidden_states_out_of_the_range_of_the_dtype_are_refused_and_leave_no_file(written, tmp_path):
    with pytest.raises(ValueError, match=r"hidden states reach 7e\+04, beyond float16: pass --dtype bfloat16"):
        pack(torch.tensor([[7e4]]), "float16")
    _, texts = written()
    (tmp_path / "full").mkdir()
    for dtype in DTYPES:
        for value in ("nan", "inf"):
            texts[1]["hidden"][3, 2] = float(value)
            with pytest.raises(ValueError, match=f"conversation {texts[1]['id']}, layer 0: .* not finite"):
                write_shard(tmp_path / "full" / "shard", [bytes(16)] * 2, texts[:2], LAYERS, dtype)
    assert not any((tmp_path / "full").iterdir())


def test_row_keys_depend_on_tokens_and_mask_only(make_data):
    data = make_data(val_size=0)
    data.setup("fit")
    rows = data.train_set
    names = row_keys(rows)
    assert len(set(names)) == len(rows) == 12
    assert row_keys(rows.select([5, 3])) == [names[5], names[3]], "not by their place"
    turned = rows.map(lambda row: {"loss_mask": [1 - value for value in row["loss_mask"]]})
    assert not set(row_keys(turned)) & set(names)


def refusal(make_data, folder, **arguments):
    data = make_data(features=str(folder), **arguments)
    with pytest.raises(ValueError) as error:
        data.setup("fit")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.slow
def test_each_mismatch_with_the_store_has_its_own_message(written, make_data):
    folder, _ = written()
    assert "is not that of llama2_chat: pass --data.template tokenizer" in refusal(
        make_data, folder, template="llama2_chat"
    )
    assert "max_length 240, not 100: pass --data.max_length 240" in refusal(make_data, folder, max_length=100)
    missing = refusal(make_data, folder, files=["embedded:12", "embedded:5:9"], val_size=0)
    assert "5 of 17 conversations are not in the feature store" in missing and "embedded-9-0" in missing
    manifest = Manifest.read(folder)
    replace(manifest, tokenizer="0").save(folder)
    assert "was written by a-base, which has another tokenizer: pass --model.base a-base" in refusal(make_data, folder)
    replace(manifest, is_complete=False).save(folder)
    assert "is not finished" in refusal(make_data, folder)


def test_validation_does_not_open_the_store(make_data, tmp_path):
    data = make_data(features=str(tmp_path / "gone"))
    data.setup("validate")
    assert data.store is None and next(iter(data.val_dataloader()))["input_ids"].numel()


@pytest.mark.slow
def test_a_damaged_store_is_refused_with_the_name_of_the_file(written, make_data, tmp_path):
    folder, _ = written()
    assert "no feature store at" in refusal(make_data, tmp_path / "nowhere")
    second = folder / "shard-00001.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-40])
    assert "shard-00001.safetensors is not of the size in the manifest" in refusal(make_data, folder)
    second.write_bytes(b"\xff" * len(whole))
    assert "shard-00001.safetensors: Error" in refusal(make_data, folder)
    second.unlink()
    assert "shard-00001.safetensors is missing" in refusal(make_data, folder)
    second.write_bytes(whole)
    make_data(features=str(folder)).setup("fit")
    manifest = json.loads((folder / "manifest.json").read_text())
    for broken in ("{", "[]", "{}", json.dumps(manifest | {"format": 99}), json.dumps(manifest | {"dtype": "int3"})):
        (folder / "manifest.json").write_text(broken)
        assert "write the store again with" in refusal(make_data, folder)
