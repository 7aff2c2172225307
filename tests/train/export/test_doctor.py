import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import CTC, DraftTree, recipe
from train.cli import commands, lightning_command
from train.export.examine import probability_difference


@pytest.fixture(scope="module")
def best(trained, tmp_path_factory):
    """The checkpoint of the fixture ``trained`` after a validation at its last step, and the exported folder."""
    runs = tmp_path_factory.mktemp("best")
    monitored = {"dirpath": str(runs), "filename": "best", "monitor": "val/acceptance_length", "mode": "max"}
    callback = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": monitored}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["pytest"])
        lightning_command.main(["fit", "--config", str(trained.config), "--trainer.callbacks", json.dumps([callback])])
        commands.main(["export", str(runs / "best.ckpt"), str(runs / "drafter")])
    return runs / "best.ckpt", runs / "drafter"


@pytest.fixture
def copy(best, tmp_path):
    """A copy of the exported folder that a test may damage; without checksums, which would name only the file."""
    copy = shutil.copytree(best[1], tmp_path / "drafter")
    (copy / "SHA256SUMS").unlink()
    return copy


def rows(outcome):
    """Return the finding about each subject."""
    lines = [line.split(maxsplit=1) for line in outcome.out.splitlines() if line[:5] in ("right", "WRONG", "-----")]
    return {said.split(":")[0]: (mark, said) for mark, said in lines}


@pytest.mark.slow
def test_a_correct_export_passes_and_reproduces_the_recorded_acceptance_length(call, best):
    outcome = call(commands.main, "doctor", *best)
    assert outcome.code == 0, outcome.out + outcome.err
    found = rows(outcome)
    assert list(found) == ["files", "configuration", "weights", "base", "drafts", "acceptance length"]
    assert {mark for mark, _ in found.values()} == {"right"}
    recorded = torch.load(best[0], weights_only=True)["measured"]
    assert found["acceptance length"][1].startswith(f"acceptance length: {recorded['acceptance_length']:.4f}, recorded")
    assert "weights" in found["base"][1] and "bit for bit" in found["weights"][1]


@pytest.mark.slow
def test_a_damaged_weight_is_named_and_its_trees_differ(call, best, copy):
    weights = load_file(copy / "model.safetensors")
    name = "frame_embedding"
    weights[name][2, 5] += 8.0
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    outcome = call(commands.main, "doctor", best[0], copy, "--acceptance", "false")
    found = rows(outcome)
    assert outcome.code == 1 and found["weights"][0] == found["drafts"][0] == "WRONG"
    assert f"{name} differs by up to 8" in found["weights"][1]
    assert "other trees at" in found["drafts"][1] and "differ by up to" in found["drafts"][1]
    assert found["files"][0] == found["base"][0] == "right" and "acceptance length" not in found


def test_missing_and_foreign_weights_and_files_are_named(call, best, copy):
    weights = load_file(copy / "model.safetensors")
    weights["other.weight"] = weights.pop("frame_embedding")
    weights["blank_row"] = weights["blank_row"].half()
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    (copy / "README.md").unlink()
    (copy / "optimizer.bin").write_bytes(b"")
    outcome = call(commands.main, "doctor", best[0], copy)
    found = rows(outcome)
    assert outcome.code == 1
    assert "README.md is missing, optimizer.bin does not belong there" in found["files"][1]
    assert "frame_embedding is missing; other.weight does not belong there" in found["weights"][1]
    assert "blank_row is float16 (32,), in the checkpoint float32 (32,)" in found["weights"][1]
    assert found["drafts"][0] == "WRONG" and "does not fit" in found["drafts"][1]


@pytest.mark.slow
def test_a_changed_argument_is_named(call, best, copy):
    config = json.loads((copy / "config.json").read_text())
    config["init_args"]["draft"]["num_nodes"] = 3
    (copy / "config.json").write_text(json.dumps(config))
    found = rows(call(commands.main, "doctor", best[0], copy, "--acceptance", "false"))
    assert found["configuration"] == ("WRONG", "configuration: draft.num_nodes is 3, in the checkpoint 8")
    assert found["weights"][0] == "right" and found["drafts"][0] == "WRONG"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, said",
    [
        ({"hidden_size": 64}, "hidden_size"),
        ({"seed": 5}, "the weights of"),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_theta"),
    ],
    ids=["size", "weights", "rope"],
)
def test_a_wrong_base_is_recognised_by_its_shape_and_its_weights(call, best, make_tiny, changes, said):
    outcome = call(commands.main, "doctor", *best, "--base", make_tiny("other-base", **changes))
    found = rows(outcome)
    assert outcome.code == 1 and found["base"][0] == "WRONG" and said in found["base"][1]
    assert found["drafts"] == ("-----", "drafts: not compared: it is another base")
    assert found["weights"][0] == "right"


def test_truncated_weights_are_reported_and_other_checkpoints_are_refused(call, best, copy, tmp_path):
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-40])
    found = rows(call(commands.main, "doctor", best[0], copy))
    assert found["weights"][0] == found["drafts"][0] == "WRONG" and "cannot be read" in found["weights"][1]
    missing = call(commands.main, "doctor", best[0], tmp_path / "nowhere").one_line_error("drafters")
    assert "no folder" in missing
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    assert "holds no drafter" in call(commands.main, "doctor", tmp_path / "other.ckpt", copy).one_line_error("drafters")


@pytest.mark.slow
def test_an_acceptance_length_of_another_step_is_not_compared(call, best, tmp_path):
    saved = torch.load(best[0], weights_only=True)
    saved["measured"]["step"] += 1
    torch.save(saved, tmp_path / "later.ckpt")
    outcome = call(commands.main, "doctor", tmp_path / "later.ckpt", best[1])
    assert outcome.code == 0 and rows(outcome)["acceptance length"][0] == "-----"
    saved["measured"] = {"step": saved["global_step"], "acceptance_length": 2 * saved["measured"]["acceptance_length"]}
    torch.save(saved, tmp_path / "later.ckpt")
    outcome = call(commands.main, "doctor", tmp_path / "later.ckpt", best[1])
    assert outcome.code == 1 and rows(outcome)["acceptance length"][0] == "WRONG"


def test_probabilities_of_two_trees_are_compared_on_the_paths_of_both():
    one = DraftTree([5, 6, 7], [-1, 0, -1], probabilities=[0.5, 0.25, 0.125])
    other = DraftTree([7, 5, 6], [-1, -1, 1], probabilities=[0.25, 0.5, 0.5])
    assert probability_difference(one, other) == 0.25
    assert probability_difference(one, DraftTree([8], [-1], probabilities=[0.5])) == 0.0
    assert probability_difference(one, DraftTree([5], [-1])) == 0.0


def test_a_pruned_tree_keeps_the_probabilities_of_its_paths(tiny_base):
    drafter = recipe.build(CTC, tiny_base.shape, {"num_frames": 4, "num_labels": 3, "num_nodes": 12, "top_k": 3}).eval()
    text = torch.randint(3, 400, (12,), generator=torch.Generator().manual_seed(0))
    hidden = tiny_base.hidden_states(text[None], (-1,))[0][0]
    (tree,) = drafter.draft_at(hidden, text, torch.tensor([6]), tiny_base.base_weights)
    probabilities = dict(zip(map(tuple, map(tree.path_tokens, range(len(tree)))), tree.probabilities, strict=True))
    assert len(probabilities) == 12 and list(tree.probabilities) == sorted(tree.probabilities, reverse=True)
    pruned = tree.pruned(max_depth=1, max_nodes=5, eos=())
    pruned.validate(tiny_base.shape.vocab_size)
    assert 0 < len(pruned) < len(tree)
    assert all(probabilities[token,] == p for token, p in zip(pruned.tokens, pruned.probabilities, strict=True))
