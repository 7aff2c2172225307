"""Training on hidden states in the files of vLLM and speculators, written here by the base as vLLM's server does."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.conversations import load_conversations
from data.rows import tokenise
from inference.verifier.base import Base
from inference.verifier.layers import capture_hidden_states
from tests.conftest import refusal
from tests.train.test_features import DATA, RECIPES, fit
from train.cli import run_drafters
from train.features import compute_features
from train.served import ServedStates

LAYERS = (0, 1, 2)  # of the tiny base, which has two


@pytest.fixture(scope="module")
def rows(tiny_base):
    """Every conversation as speculators' prepare_data.py takes it: docs/training.md has these lines."""
    conversations, _ = load_conversations(DATA["files"])
    return tokenise(conversations, tiny_base.tokenizer, "tokenizer", DATA["max_length"])


def test_the_rows_for_the_server_hold_tokens_and_loss_masks(rows, tmp_path):
    rows.to_json(tmp_path / "rows.jsonl")
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[3])
    assert row == rows[3] and {"input_ids", "loss_mask"} <= set(row)


@pytest.fixture(scope="module")
def serve(tiny_base, rows, tmp_path_factory):
    """Writes the files of all conversations: layers as vLLM counts them, the last one before the norm."""

    @torch.no_grad()
    def write(dtype=torch.float32, layers=LAYERS, longer=0):
        folder = tmp_path_factory.mktemp("hidden_states")
        for number, row in enumerate(rows):
            ids = torch.tensor(row["input_ids"] + row["input_ids"][:longer])
            with capture_hidden_states(tiny_base.model.model, LAYERS) as states:
                tiny_base.model.model(ids[None], use_cache=False)
            stacked = torch.stack([states[layer][0] for layer in layers], 1).to(dtype).contiguous()
            save_file({"hidden_states": stacked, "token_ids": ids}, folder / f"hs_{number}.safetensors")
        return folder

    return write


@pytest.fixture(scope="module")
def served(serve):
    return serve()


def command(tiny, folder, out, **changes):
    options = {"base": tiny, "files": "[embedded:24]", "max_length": 400, "dtype": "float32", "shard_megabytes": 1}
    options |= {"layers": "0,1,-1", "served": folder, "served_layers": "0,1,2", "out": out} | changes
    return ["features", *(f"--{name}={value}" for name, value in options.items())]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ctc over fused layers", "eagle3"])
def test_training_on_served_states_gives_the_losses_of_training_with_the_base_in_process(
    call, tiny, serve, served, tmp_path, name
):
    online = fit(tiny, RECIPES[name], tmp_path / "online")
    for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 2e-2)):
        folder = served if dtype == "float32" else serve(torch.bfloat16)
        call(run_drafters, *command(tiny, folder, tmp_path / dtype, dtype=dtype)).succeeded()
        stored = fit(tiny, RECIPES[name], tmp_path / f"stored-{dtype}", tmp_path / dtype)
        assert stored.tokens == online.tokens and stored.base_forwards == 0
        assert stored.losses == pytest.approx(online.losses, rel=tolerance, abs=0)


def test_served_states_are_those_of_the_base_and_the_last_is_normed(tiny_base, rows, serve):
    served = ServedStates.scan(serve(longer=7), LAYERS, tiny_base, (2, 0, -1), 400)
    for row in rows.with_format("torch").select(range(3)):
        texts = row["input_ids"][None], row["loss_mask"][None]
        found, expected = served.compute(tiny_base, (2, 0, -1), *texts), compute_features(tiny_base, (2, 0, -1), *texts)
        for name in ("hidden", "last_hidden"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
        assert torch.equal(found.labels, expected.labels) and torch.equal(found.input_ids, texts[0])


def test_with_served_states_only_embedding_norm_and_head_of_the_base_are_moved_to_the_device(
    call, tiny, served, tmp_path, monkeypatch
):
    moved = []
    monkeypatch.setattr(Base, "move_to", lambda base, _: moved.extend(dict(base.model.named_parameters())))
    said = call(run_drafters, *command(tiny, served, tmp_path / "store", layers="-1")).succeeded().out
    assert "layers -1 in float32" in said
    monkeypatch.undo()
    call(run_drafters, *command(tiny, served, tmp_path / "two", layers="-1", devices=2)).succeeded()
    assert {path.read_bytes() for path in (tmp_path / "two").iterdir()} == {
        path.read_bytes() for path in (tmp_path / "store").iterdir()
    }
    assert moved == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"served_layers": "1,2"}, "hidden_states is [{S}, 3, 32], not [{S}, 2, 32] (tokens, the layers 1,2, hidden"),
        ({"base": {"hidden_size": 48}}, "[{S}, 3, 32], not [{S}, 3, 48]"),
        ({"base": {"vocab_size": 300}}, "has 0 to 299: pass the served base"),
        (
            {"layers": "0,1", "served_layers": "1,2"},
            "the served layers 1,2 must ascend and hold 0,1,2 (the labels need 2)",
        ),
        ({"served_layers": "2,1,0"}, "must ascend and hold"),
        ({"served_layers": "last"}, "layers is 'last': give numbers with commas between them"),
        ({"files": "[embedded:26]"}, "2 of 26 conversations have no hidden states in"),
        ({"max_length": 300}, None),  # what the server read of a text may be longer
        ({"template": "llama2_chat"}, "24 of 24 conversations have no hidden states"),
        ({"served": "/nowhere"}, "/nowhere has no hs_*.safetensors: give the --output of data_generation_offline.py"),
    ],
)
def test_served_states_that_do_not_fit_are_refused(call, tiny, make_tiny, rows, served, tmp_path, changes, said):
    changes = {"layers": "-1"} | changes
    if "base" in changes:
        changes["base"] = make_tiny("another", **changes["base"])
    outcome = call(run_drafters, *command(tiny, served, tmp_path / "store", **changes))
    if said is None:
        outcome.succeeded()
    else:
        error = outcome.one_line_error("drafters").replace("  ", " ")
        assert said.replace("{S}", str(len(rows[0]["input_ids"]))) in error
        assert not (tmp_path / "store").exists()


def test_missing_and_damaged_files_are_named(tiny_base, rows, served, tmp_path):
    folder = shutil.copytree(served, tmp_path / "hidden_states")

    def scan():
        ServedStates.scan(folder, LAYERS, tiny_base, (-1,), 400).check(rows)

    scan()
    path = folder / "hs_5.safetensors"
    whole = path.read_bytes()
    path.unlink()
    assert f"1 of 24 conversations have no hidden states in {folder}, the first is {rows[5]['id']}" in refusal(scan)
    path.write_bytes(whole[:-100])
    said = refusal(scan)
    assert said.startswith(f"{path}: ") and "delete it, and run data_generation_offline.py again" in said
    save_file({"token_ids": load_file(folder / "hs_0.safetensors")["token_ids"]}, path)
    assert "hidden_states" in refusal(scan)


def test_a_base_whose_final_norm_is_not_known_is_refused(tmp_path):
    model, config = SimpleNamespace(base_model=object()), SimpleNamespace(model_type="gpt_neox")
    base = SimpleNamespace(model=model, config=config, shape=SimpleNamespace(num_layers=2))
    said = refusal(ServedStates.scan, tmp_path, (2,), base, (-1,), 400)
    assert said == "the final norm of a gpt_neox base is not known: leave served out"
