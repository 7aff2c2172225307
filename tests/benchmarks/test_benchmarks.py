"""The benchmarks of single parts run in a tiny setting and print complete tables; no test depends on a time."""

import json

import pytest
import torch

from benchmarks import (
    against_transformers,
    harness,
    paper_figures,
    quantised,
    steps,
    training_speed,
)
from inference.options import QuestionOptions
from inference.verifier import int8
from inference.verifier.base import load_base


def rows(markdown):
    """Return the cells of every row of every table."""
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in markdown.splitlines() if line[:1] == "|"]


def test_each_arm_starts_equally_often_and_every_run_happens_once():
    order = list(harness.alternate(["a", "b", "c"], num_items=2, repeats=3, title=""))
    assert len(set(order)) == len(order) == 3 * 2 * 3
    assert sorted(arm for _, _, arm in order[::3]) == ["a", "a", "b", "b", "c", "c"]


def test_a_table_is_written_with_its_origin(tmp_path, capsys):
    table = harness.ResultTable("Title", ["arm", "ms"], [["a[b]", "1.0"]], ["a note"])
    harness.show([table], torch.device("cpu"), str(tmp_path / "new" / "out.md"))
    written = (tmp_path / "new" / "out.md").read_text()
    assert rows(written) == [["arm", "ms"], ["---", "---:"], ["a[b]", "1.0"]]
    for name in ("command", "machine", "date", "versions"):
        assert f"- {name}: `" in written
    assert "a note" in written and "a note" in capsys.readouterr().out


def test_the_command_line_accepts_dashes_and_flags_and_reports_mistakes(capsys):
    given = []

    def wanted(num_steps: int = 1, fast: bool = False, words: list[str] = ["default"]):  # noqa: B006
        """Take them."""
        given.append((num_steps, fast, words))
        if num_steps < 1:
            raise ValueError("num_steps must be at least 1")

    harness.main(wanted, ["--num-steps", "3", "--fast", "--words", "[a,b-c]"])
    harness.main(wanted, ["--num-steps=2", "--fast=false"])
    harness.main(wanted, [])
    harness.main(wanted, ["--words", "x=1:y=2,z", "--fast", "--words=b"])
    harness.main(wanted, ["--words=[a]", "--words", "b"])
    assert given == [
        (3, True, ["a", "b-c"]),
        *((2, False, ["default"]), (1, False, ["default"])),
        *((1, True, ["x=1:y=2,z", "b"]), (1, False, ["a", "b"])),
    ]
    with pytest.raises(SystemExit) as stop:
        harness.main(wanted, ["--num-steps", "0"])
    assert stop.value.code == 2 and capsys.readouterr().err == "wanted: error: num_steps must be at least 1\n"


@pytest.mark.slow
def test_a_random_base_is_reproducible_and_varies():
    tokens = torch.arange(3, 11)[None]
    first, again = (
        harness.random_llama("draft", 50, "float32", torch.device("cpu")).model(tokens).logits for _ in range(2)
    )
    assert torch.equal(first, again) and first.isfinite().all() and first[0, -1].std() > 0


@pytest.mark.parametrize("is_graphed", [False, True])
def test_steps_in_small(monkeypatch, tmp_path, is_graphed):
    monkeypatch.setitem(harness.SHAPES, "tiny", (32, 64, 1, 2, 2))
    out = tmp_path / "out.md"
    sizes = {"nodes": [1, 5], "contexts": [8, 600], "repeats": 2, "out": str(out)}
    steps.steps(["tiny"], ["float32", "bfloat16"], "cpu", graphed=is_graphed, **sizes)
    table = [row for row in rows(out.read_text()) if row[0] not in ("nodes", "---")]
    assert [row[0] for row in table] == ["0", "1", "5"] * 4
    assert {len(row) for row in table} == {7 if is_graphed else 4}
    assert all(row[2] == "1.00×" for row in table if row[0] == "0")


def test_a_step_reads_all_weights_but_the_embedding_and_the_cache():
    base = harness.random_llama("8b/16", 100, "bfloat16", torch.device("cpu"))
    head, layer = 100 * 256, 256 * (32 + 2 * 8 + 32) * 8 + 3 * 256 * 896 + 2 * 256
    weights = head + 32 * layer + 256
    assert steps.step_bytes(base, context=7) == 2 * (weights + 7 * 32 * 2 * 2 * 32)
    assert harness.times_bytes(0.5, num_bytes=100, bandwidth=400.0) == "2.00×"


def test_the_bushy_tree_contains_the_most_probable_nodes():
    tree, p = steps.bushy(6, 50), steps.CHILD_PROBABILITY
    # .6 | .6*.6=.36 | .4*.6=.24 | .216 | .6*.24=.144 (twice) | .1296: first child's line, second child, and so on
    assert p == 0.6 and tree.parents[:4] == [-1, 0, -1, 1]
    assert sorted(tree.parents[4:]) == [0, 2]


@pytest.mark.slow
def test_training_speed_in_small(tmp_path):
    out, configs = tmp_path / "out.md", ["eagle.yaml", "medusa.yaml", "ctc.yaml"]
    sizes = {"shape": "draft", "vocab_size": 90, "length": 24, "anchors": [4, 8]}
    training_speed.training_speed(configs, **sizes, device="cpu", repeats=2, out=str(out))
    _, _, *table = rows(out.read_text())
    sampled = [(name, anchors) for name in ("medusa", "ctc") for anchors in ("4", "8")]
    assert [(row[0], row[2]) for row in table] == [("eagle", ""), *sampled]
    assert all(sum(float(cell.strip("%")) for cell in row[5:8]) == pytest.approx(100, abs=3) for row in table)


def test_the_memory_of_a_step_is_near_its_estimate():
    base = harness.random_llama("draft", 4000, "float32", torch.device("cpu"))
    kind, arguments = training_speed.drafter_recipe("ctc.yaml", 2, num_anchors=32)
    counted, estimated = training_speed.TrainingStep(kind, arguments, base, (2, 64), "32").memory()
    assert counted > 1e6 and estimated == pytest.approx(counted, rel=0.1)


def test_the_figures_of_the_papers_with_the_base_as_its_own_draft_model(tmp_path):
    """All draft tokens match then. Words and tokens are counted by hand, and without noise the answers are the same."""
    asked = [{"question": "one two  three", "answer": "#### 3"}, {"question": "four", "answer": "#### 4"}]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
    model, benchmarks = "checkpoints/tiny-chat", [f"gsm8k={tmp_path / 'asked.jsonl'}", "embedded"]
    few = {"limit": 2, "max_new_tokens": 24, "num_draft": 4, "phrases": "num_draft=4,level=3,window=4"}
    paper_figures.paper_figures(model, model, benchmarks, **few, out=str(tmp_path / "out.md"))
    written, base = rows((tmp_path / "out.md").read_text()), load_base(model)
    num_tokens = sum(len(base.tokenizer(row["question"]).input_ids) for row in asked)
    assert ["gsm8k", "2.00", f"{num_tokens / 2:.2f}", f"{num_tokens / 4:.2f}"] in written
    assert ["gsm8k", "4.00", "4.00"] in written and ["embedded", "4.00", "4.00"] in written
    assert [row[0] for row in written[-4:-1]] == ["2 of a task in turn", "1 of a task in turn", "shuffled"]
    options = QuestionOptions(benchmarks, limit=2)
    found = paper_figures.noise(base, options.select(base, options.load()), 24, counts=(0, 16)).rows
    assert found[0] == ["0", "100.0", "100.0"] and float(found[1][1]) < 100


@pytest.mark.slow
def test_our_drafters_stand_beside_transformers_own_generate(capsys):
    base, options = "checkpoints/tiny-chat", {"limit": 2, "max_new_tokens": 12, "dtype": "float32"}
    against_transformers.against_transformers(base, ["prompt_lookup"], base, **options)
    _, _, *arms = rows(capsys.readouterr().out)
    ways = ["transformers: none", "transformers: prompt lookup", "transformers: draft model", "ours: none"]
    assert [row[0] for row in arms] == [*ways, "ours: prompt_lookup"]
    assert {row[4] for row in arms} == {"2 of 2"}
    alone, _, assisted, *_ = (float(row[1]) for row in arms)
    assert alone == 1 < assisted, "a base that drafts for itself is right"


needs_int8 = pytest.mark.skipif(not int8.can_multiply_int8(), reason="needs exact products of integers (VNNI)")


@pytest.mark.slow
@needs_int8
def test_a_base_in_8_bits_in_small(tmp_path):
    out = tmp_path / "out.md"
    sizes = {"tokens": 40, "template": "vicuna_v1.1", "nodes": [0, 3], "repeats": 2, "out": str(out)}
    quantised.quantised("checkpoints/tiny-chat", ["embedded:2"], **sizes)
    quality, times = (part.splitlines() for part in out.read_text().split("## ")[1:])
    cells = rows("\n".join(quality))[2:]
    assert [row[1] for row in cells] == ["float32", "bfloat16", "int8"]
    assert cells[0][3:] == ["1.0000", "0.00000", "100.0%"] and 0.9 < float(cells[2][3]) < 1.1
    assert len(rows("\n".join(times))) == 2 + 2
    with pytest.raises(ValueError, match="nodes at least 0"):
        quantised.quantised("checkpoints/tiny-chat", nodes=[-1])
