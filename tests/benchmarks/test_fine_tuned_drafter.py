"""The shipped base is fine-tuned in three steps, and its drafter trained on the fine-tune's answers."""

import json

import pytest
import torch

from benchmarks.fine_tuned_drafter import fine_tuned_drafter
from data.conversations import load_conversations
from drafters import checkpoint
from inference.verifier.base import load_base


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft reads it
def test_a_base_is_fine_tuned_and_its_drafter_trained_on_the_answers_of_the_fine_tune(repository, tmp_path):
    base, shipped = (str(repository / "checkpoints" / name) for name in ("tiny-chat", "tiny-chat-ctc"))
    options = {"base": base, "drafter": shipped, "files": ["embedded:46"], "out": str(tmp_path), "scratch": [16]}
    options |= {"conversations": [8, 16], "steps": 2, "adapter_steps": 3, "questions": 4, "general": "embedded"}
    options |= {"max_new_tokens": 12, "dtype": "float32", "table": str(tmp_path / "table.md")}
    fine_tuned_drafter(**options)

    before, after = (load_base(place) for place in (base, tmp_path / "fine_tune"))
    values = [each.model.model.layers[0].self_attn.v_proj.weight for each in (before, after)]
    assert not torch.equal(*values)
    assert torch.equal(before.base_weights.head, after.base_weights.head), "the adapter leaves the LM head alone"
    texts = load_conversations(options["files"])[0]
    answered = [json.loads(line) for line in (tmp_path / "answers_16.jsonl").read_text().splitlines()]
    asked = [row["messages"][0]["content"] for row in answered]
    assert asked == [text.messages[0]["content"] for text in texts[4:20]], "the first four are the questions"
    assert (tmp_path / "answers_16.jsonl").read_text().startswith((tmp_path / "answers_8.jsonl").read_text())

    lines = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| ")]
    rows = [line[2:-2].split(" | ") for line in lines[2:]]
    assert [[row[0], row[1], row[3]] for row in rows] == [
        ["as it is, on its own base", "", ""],
        ["as it is", "", ""],
        ["trained further", "8", "2"],
        ["trained further", "16", "2"],
        ["from random weights", "16", "2"],
    ]
    lengths = [[float(cell) for cell in row[5:]] for row in rows]
    assert min(map(min, lengths)) >= 1
    assert max(lengths[-1]) < min(map(min, lengths[:-1])), "after two steps random weights hardly draft"
    initial = [
        checkpoint.read_config(path).training.get("initial_drafter") for path in tmp_path.glob("*/seed0/drafter")
    ]
    assert (initial.count(shipped), initial.count(None)) == (2, 1)

    trained = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    fine_tuned_drafter(**options | {"conversations": [8]})
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == trained
    with pytest.raises(ValueError, match="46 conversations, but 60 are needed"):
        fine_tuned_drafter(**options | {"scratch": [32]})
