"""The benchmarks of single parts run in a tiny setting and print complete tables; no test depends on a time."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import harness, training_speed
from benchmarks.steps import by_nodes, compiled, overhead
from benchmarks.steps.timing import CHILD_PROBABILITY
from drafters import DraftTree, NoDrafter, RequiredOutputs
from inference.verifier import compiled as verifier_compiled
from inference.verifier.session import Session
from train.features import compute_features


def rows(markdown):
    """Return the cells of every row of every table."""
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in markdown.splitlines() if line[:1] == "|"]


def test_each_arm_starts_equally_often_and_every_run_happens_once():
    order = list(harness.alternate(["a", "b", "c"], num_items=2, repeats=3, title=""))
    assert len(set(order)) == len(order) == 3 * 2 * 3
    assert sorted(arm for _, _, arm in order[::3]) == ["a", "a", "b", "b", "c", "c"]
    assert all({arm for _, _, arm in order[turn : turn + 3]} == {"a", "b", "c"} for turn in range(0, 18, 3))


def test_spread_and_percentile_of_a_small_example():
    assert harness.spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
    assert harness.percentile(range(100), 0.99) == 98
    assert harness.percentile([3, 1, 2], 0.5) == 2


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
@pytest.mark.parametrize("num_kept", [1, 3])
def test_a_random_base_is_causal_and_reproducible(num_kept):
    base = harness.random_llama("draft", 50, "float32", torch.device("cpu"))
    tokens = torch.arange(3, 11)[None]
    whole = base.model(tokens).logits
    assert whole.isfinite().all() and whole[0, -1].std() > 0
    torch.testing.assert_close(base.model(tokens[:, :num_kept]).logits, whole[:, :num_kept])
    again = harness.random_llama("draft", 50, "float32", torch.device("cpu"))
    torch.testing.assert_close(again.model(tokens).logits, whole)


@pytest.mark.slow
def test_drafter_overhead_in_small(repository, monkeypatch, tmp_path):
    monkeypatch.chdir(repository)
    out = tmp_path / "out.md"
    overhead.drafter_overhead(
        ["anpd", "prompt_lookup:num_draft=3"], [64, 256], steps=12, repeats=2, data="embedded:40:0", out=str(out)
    )
    table = rows(out.read_text())
    cells = [(row[0], row[1]) for row in table if len(row) == len(overhead.HEADINGS)]
    names = "none", "anpd", "prompt_lookup:num_draft=3"
    assert cells[2:] == [(name, length) for name in names for length in ("64", "256")]
    assert [row[0] for row in table if len(row) == 3 and row[0] in names] == list(names)
    fed = {(row[0], row[1]): float(row[-1]) for row in table[2:] if len(row) == len(overhead.HEADINGS)}
    assert fed["none", "64"] == 1 and 1 < fed["prompt_lookup:num_draft=3", "256"] <= 4
    overhead.drafter_overhead(["joint"], [64], steps=4, repeats=2, data="embedded:40:0", max_nodes=0, out=str(out))
    idle = [row for row in rows(out.read_text())[2:] if len(row) == len(overhead.HEADINGS)]
    assert [(row[0], float(row[-1])) for row in idle] == [("none", 1.0), ("joint", 1.0)]


def test_every_offered_drafter_is_built_without_a_model_or_a_file():
    from inference import drafter_specs

    runner = overhead.RecitingRunner([3, 4, 5] * 20, vocab_size=40)
    offered = overhead.offered()
    assert {"none", "anpd", "prompt_lookup"} <= set(offered) and len(set(offered)) == len(offered)
    for spec in offered:
        session = Session(runner, drafter_specs.make(spec, runner))
        session.begin(runner.text[:10])
        while len(session.seq) < 40:
            session.step(40)
        assert session.seq == runner.text[:40]


def test_the_reciting_runner_recites_its_text_and_knows_which_nodes_are_on_it():
    text = [5, 6, 7, 5, 6, 8, 5, 6, 7, 9, 5, 6]
    runner = overhead.RecitingRunner(text, vocab_size=30)
    assert Session(runner, NoDrafter()).run(text[:4], 8).tokens == text[4:]
    runner.reset()
    tree = DraftTree([6, 7, 8, 5], [-1, 0, 0, 2])  # after 5 6 7 5: 6 is next, then 8; 7 is off the path
    picks = runner.forward(text[:4], tree, RequiredOutputs()).logits.topk(3).indices
    assert picks[[0, 1, 3, 4], 0].tolist() == [6, 8, 5, 6]
    assert picks[1, 1] == 7  # what else follows 6, and most often


def test_a_text_that_is_too_short_is_refused(repository, monkeypatch):
    monkeypatch.chdir(repository)
    with pytest.raises(ValueError, match="are needed: pass more --data"):
        overhead.drafter_overhead(lengths=[100000], data="embedded:2:0")


@pytest.mark.slow
def test_step_cost_in_small(monkeypatch, tmp_path):
    monkeypatch.setitem(harness.SHAPES, "tiny", (32, 64, 1, 2, 2))
    out = tmp_path / "out.md"
    by_nodes.step_cost(
        "tiny", ["float32", "bfloat16"], "cpu", nodes=[1, 5], contexts=[8, 9], repeats=2, bandwidth=10.0, out=str(out)
    )
    table = rows(out.read_text())
    arms = [row[0] for row in table if row[0] not in ("arm", "---")]
    assert arms == ["vanilla", "chain 1", "bushy 1", "chain 5", "bushy 5"] * 4
    assert all(row[2] == "1.00×" for row in table if row[0] == "vanilla")
    with pytest.raises(ValueError, match="the context of tiny ends at 4096"):
        by_nodes.step_cost("tiny", contexts=[4096])


def test_compiled_step_in_small(monkeypatch, tmp_path):
    monkeypatch.setitem(harness.SHAPES, "tiny", (32, 64, 1, 2, 2))
    monkeypatch.setattr(verifier_compiled, "BACKEND", "eager")
    out = tmp_path / "out.md"
    compiled.compiled_step(["tiny"], ["float32"], "cpu", nodes=[0, 5], contexts=[8, 600], repeats=2, out=str(out))
    table = rows(out.read_text())
    assert [row[0] for row in table if row[0] not in ("nodes", "---")] == ["0", "5"] * 2
    with pytest.raises(ValueError, match="nodes 0 to 64"):
        compiled.compiled_step(["tiny"], nodes=[65])


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 40])
def test_the_trees_of_step_cost_are_valid(num_nodes):
    for make in (by_nodes.chain, by_nodes.bushy):
        tree = make(num_nodes, 50)
        tree.validate(50)
        assert len(tree) == num_nodes
    assert max(by_nodes.chain(num_nodes, 50).depths) == num_nodes


def test_the_bushy_tree_contains_the_most_probable_nodes():
    tree, p = by_nodes.bushy(6, 50), CHILD_PROBABILITY
    # .6 | .6*.6=.36 | .4*.6=.24 | .216 | .6*.24=.144 (twice) | .1296: first child's line, second child, and so on
    assert p == 0.6 and tree.parents[:4] == [-1, 0, -1, 1]
    assert sorted(tree.parents[4:]) == [0, 2]


def test_the_bound_of_the_weights_leaves_out_an_embedding_that_is_not_the_head():
    base = harness.random_llama("draft", 50, "float32", torch.device("cpu"))
    num_read = sum(weight.numel() for weight in base.model.parameters()) - 50 * 256
    assert by_nodes._weight_seconds(base, 2.0) == pytest.approx(4 * num_read / 2e9)
    assert by_nodes._weight_seconds(base, None) is None


@pytest.mark.slow
def test_training_speed_in_small(tmp_path):
    out, configs = tmp_path / "out.md", ["eagle.yaml", "medusa.yaml"]
    sizes = {"shape": "draft", "vocab_size": 90, "length": 24, "anchors": [4, 8], "computed_shape": "draft"}
    training_speed.training_speed(configs, **sizes, device="cpu", repeats=2, out=str(out))
    measured, computed = [row for row in rows(out.read_text()) if row[0] == "medusa"][:2], rows(out.read_text())[-2:]
    assert [row[2] for row in measured] == ["4", "8"]
    assert all(sum(float(cell.strip("%")) for cell in row[5:9]) == pytest.approx(100, abs=3) for row in measured)
    assert [row[0] for row in computed] == ["eagle", "medusa"] and all(float(row[4]) > 0 for row in computed)


def test_the_operations_of_a_step_are_counted(tmp_path):
    config = harness.llama_config("draft", 90, 64)
    base = harness.random_llama("draft", 90, "float32", torch.device("cpu"))
    size = training_speed.BatchSize(2, 32)
    with FlopCounterMode(display=False) as counter:
        compute_features(base, [-1], torch.zeros(size, dtype=torch.long))
    attention = 2 * config.num_hidden_layers * size.num_positions * config.hidden_size * 64  # which was not counted
    assert training_speed.base_flops(config, size) - attention == counter.get_total_flops()
