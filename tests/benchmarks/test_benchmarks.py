"""The benchmarks run in a tiny setting and print what they promise; nothing here looks at a time."""

import importlib.util
import json

import pytest
import torch

from drafters import DraftTree, NoDrafter, RequiredOutputs
from inference.engine.session import Session
from inference.tuning.step_cost import CHILD_PROBABILITY


def load(name):
    return importlib.import_module(f"benchmarks.{name}")


@pytest.fixture(scope="module")
def harness():
    return load("harness")


@pytest.fixture(scope="module")
def overhead(harness):
    return load("drafter_overhead")


def rows(markdown):
    """The cells of every line of every table."""
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in markdown.splitlines() if line[:1] == "|"]


def test_each_arm_is_first_as_often_as_another_and_every_run_happens_once(harness):
    order = list(harness.in_turn(["a", "b", "c"], num_items=2, repeats=3, title=""))
    assert len(set(order)) == len(order) == 3 * 2 * 3
    assert sorted(arm for _, _, arm in order[::3]) == ["a", "a", "b", "b", "c", "c"]
    assert all({arm for _, _, arm in order[turn : turn + 3]} == {"a", "b", "c"} for turn in range(0, 18, 3))


def test_spread_and_percentile_of_a_small_example(harness):
    assert harness.spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
    assert harness.percentile(range(100), 0.99) == 98
    assert harness.percentile([3, 1, 2], 0.5) == 2


def test_a_table_is_written_with_its_origin(harness, tmp_path, capsys):
    table = harness.Measured("Title", ["arm", "ms"], [["a[b]", "1.0"]], ["a note"])
    harness.show([table], torch.device("cpu"), str(tmp_path / "new" / "out.md"))
    written = (tmp_path / "new" / "out.md").read_text()
    assert rows(written) == [["arm", "ms"], ["---", "---:"], ["a[b]", "1.0"]]
    for name in ("command", "machine", "date", "versions"):
        assert f"- {name}: `" in written
    assert "a note" in written and "a note" in capsys.readouterr().out


def test_dashes_flags_and_mistakes_of_the_command_line(harness, capsys):
    given = []

    def wanted(num_steps: int = 1, fast: bool = False, words: list[str] = []):  # noqa: B006
        """Take them."""
        given.append((num_steps, fast, words))
        if num_steps < 1:
            raise ValueError("num_steps must be at least 1")

    harness.main(wanted, ["--num-steps", "3", "--fast", "--words", "[a,b-c]"])
    harness.main(wanted, ["--num-steps=2", "--fast=false"])
    harness.main(wanted, [])
    assert given == [(3, True, ["a", "b-c"]), (2, False, []), (1, False, [])]
    with pytest.raises(SystemExit) as stop:
        harness.main(wanted, ["--num-steps", "0"])
    assert stop.value.code == 2 and capsys.readouterr().err == "wanted: error: num_steps must be at least 1\n"


@pytest.mark.parametrize("num_kept", [1, 3])
def test_a_random_base_writes_on_from_what_it_has_read(harness, num_kept):
    base = harness.random_llama("draft", 50, "float32", torch.device("cpu"))
    tokens = torch.arange(3, 11)[None]
    whole = base.model(tokens).logits
    assert whole.isfinite().all() and whole[0, -1].std() > 0
    torch.testing.assert_close(base.model(tokens[:, :num_kept]).logits, whole[:, :num_kept])
    again = harness.random_llama("draft", 50, "float32", torch.device("cpu"))
    torch.testing.assert_close(again.model(tokens).logits, whole)


def test_against_transformers_in_small(harness, repository, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(repository)
    bench = load("against_transformers")
    sizes = {"max_new_tokens": 10, "num_prompts": 2, "repeats": 2, "num_lookup": 4, "num_draft": 3}
    monkeypatch.setitem(harness.SHAPES, "100m", (32, 64, 1, 2, 2))
    out = tmp_path / "out.md"
    bench.against_transformers(**sizes, dtypes=["float32"], out=str(out))
    found = [row for row in rows(out.read_text()) if row[0] in bench.PAIRS]
    assert [row[0] for row in found] == [*bench.PAIRS, *bench.PAIRS]
    assert all(row[-1] == "2/2" for row in found)  # texts alike
    assert all(float(row[1]) > 0 and float(row[2]) > 0 for row in found)
    assert found[0][-2] == "1.00" and float(found[2][-2]) > 1  # its own first layers guess some words
    assert "tiny-chat" in capsys.readouterr().out


def test_another_text_stops_the_comparison(harness, make_base):
    bench = load("against_transformers")
    base = make_base(dtype=torch.float32)
    with pytest.raises(ValueError, match="another text"):
        bench._gaps(base, [[1, 5, 6]], {0: [7, 8]}, {0: [7, 9]}, "vanilla", "float32")
    assert bench._gaps(base, [[1, 5, 6]], {0: [7, 8]}, {0: [7, 8]}, "vanilla", "float32") == []


def test_drafter_overhead_in_small(overhead, repository, monkeypatch, tmp_path):
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


def test_every_offered_drafter_is_built_without_a_model_or_a_file(overhead):
    from inference.registry import catalogue

    runner = overhead.WrittenRunner([3, 4, 5] * 20, vocab_size=40)
    offered = overhead.offered()
    assert {"none", "anpd", "prompt_lookup"} <= set(offered) and len(set(offered)) == len(offered)
    for spec in offered:
        session = Session(runner, catalogue.make(spec, runner))
        session.begin(runner.text[:10])
        while len(session.seq) < 40:
            session.step(40)
        assert session.seq == runner.text[:40]


def test_the_written_base_recites_its_text_and_knows_which_nodes_are_on_it(overhead):
    text = [5, 6, 7, 5, 6, 8, 5, 6, 7, 9, 5, 6]
    runner = overhead.WrittenRunner(text, vocab_size=30)
    assert Session(runner, NoDrafter()).run(text[:4], 8).tokens == text[4:]
    runner.reset()
    tree = DraftTree([6, 7, 8, 5], [-1, 0, 0, 2])  # after 5 6 7 5: 6 is next, then 8; 7 is off the path
    picks = runner.forward(text[:4], tree, RequiredOutputs()).logits.topk(3).indices
    assert picks[[0, 1, 3, 4], 0].tolist() == [6, 8, 5, 6]
    assert picks[1, 1] == 7  # what else follows 6, and most often


def test_too_short_a_text_is_said(overhead, repository, monkeypatch):
    monkeypatch.chdir(repository)
    with pytest.raises(ValueError, match="are needed: pass more --data"):
        overhead.drafter_overhead(lengths=[100000], data="embedded:2:0")


def test_step_cost_in_small(harness, monkeypatch, tmp_path):
    bench = load("step_cost_by_nodes")
    monkeypatch.setitem(harness.SHAPES, "tiny", (32, 64, 1, 2, 2))
    out = tmp_path / "out.md"
    bench.step_cost(
        "tiny", ["float32", "bfloat16"], "cpu", nodes=[1, 5], contexts=[8, 9], repeats=2, bandwidth=10.0, out=str(out)
    )
    table = rows(out.read_text())
    arms = [row[0] for row in table if row[0] not in ("arm", "---")]
    assert arms == ["vanilla", "chain 1", "bushy 1", "chain 5", "bushy 5"] * 4
    assert all(row[2] == "1.00×" for row in table if row[0] == "vanilla")
    with pytest.raises(ValueError, match="the context of tiny ends at 4096"):
        bench.step_cost("tiny", contexts=[4096])


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 40])
def test_the_trees_of_step_cost_keep_the_rules(harness, num_nodes):
    bench = load("step_cost_by_nodes")
    for make in (bench.chain, bench.bushy):
        tree = make(num_nodes, 50)
        tree.validate(50)
        assert len(tree) == num_nodes
    assert max(bench.chain(num_nodes, 50).depths) == num_nodes


def test_the_bushy_tree_holds_the_most_probable_nodes(harness):
    bench = load("step_cost_by_nodes")
    tree, p = bench.bushy(6, 50), CHILD_PROBABILITY
    # .6 | .6*.6=.36 | .4*.6=.24 | .216 | .6*.24=.144 (twice) | .1296: first child's line, second child, and so on
    assert p == 0.6 and tree.parents[:4] == [-1, 0, -1, 1]
    assert sorted(tree.parents[4:]) == [0, 2]


def test_the_bound_of_the_weights_leaves_out_an_embedding_that_is_not_the_head(harness):
    bench = load("step_cost_by_nodes")
    base = harness.random_llama("draft", 50, "float32", torch.device("cpu"))
    num_read = sum(weight.numel() for weight in base.model.parameters()) - 50 * 256
    assert bench._weight_seconds(base, 2.0) == pytest.approx(4 * num_read / 2e9)
    assert bench._weight_seconds(base, None) is None


def test_tree_building_in_small(harness, tmp_path):
    bench = load("tree_building")
    out = tmp_path / "out.md"
    bench.tree_building([1, 6], num_frames=4, top_k=3, vocab_size=50, num_blocks=2, repeats=2, out=str(out))
    table = [row for row in rows(out.read_text()) if row[0] not in ("arm", "---")]
    assert [row[0] for row in table] == [*bench.BUILDS, *bench.BUILDS]
    assert all(row[2] == "1.00×" for row in table if row[0] == bench.OURS)
    ours, *others = (float(row[-1]) for row in table[5:] if row[-1])
    assert all(gain <= ours + 0.001 for gain in others), "no other tree of as many nodes gains more"
    with pytest.raises(ValueError, match="repeats at least 2"):
        bench.tree_building(repeats=1)


def test_the_plain_beam_finds_our_tree_where_nothing_is_cut(harness):
    """All tokens are candidates of every frame and the beam holds every text, so both are exact."""
    bench = load("tree_building")
    for seed in range(3):
        frames = bench.Frames(num_frames=4, top_k=3, vocab_size=3, seed=seed)
        plain, ours = bench.prefix_beam(frames, 500), bench.BUILDS[bench.OURS](frames, 500)
        paths = [{tuple(tree.path_tokens(node)) for node in range(len(tree))} for tree in (plain, ours)]
        assert paths[0] == paths[1] and len(plain) == len(ours) > 50
        found = bench.prefix.search(frames.probs, frames.blank, frames.tokens, 9, 4)[1].sum()
        assert bench.gain(frames, bench.BUILDS[bench.OURS](frames, 9)) == pytest.approx(found, rel=1e-5)


def test_loss_memory_in_small(harness, tmp_path):
    bench = load("loss_memory")
    out = tmp_path / "out.md"
    sizes = {"num_anchors": 6, "num_frames": 5, "num_labels": 3, "hidden_size": 8, "vocab_size": 50, "rank": 2}
    bench.loss_memory(**sizes, max_bytes=4000, arms=[*bench.ARMS], device="cpu", repeats=1, out=str(out))
    table = [row for row in rows(out.read_text()) if row[0] in bench.ARMS]
    assert [row[0] for row in table] == [*bench.ARMS, *bench.ARMS]
    assert all(float(row[3]) >= 0 and row[4] == "1.00" for row in table if row[0] == bench.PLAIN)
    with pytest.raises(ValueError, match="known are plain"):
        bench.loss_memory(arms=["ctx"])


def test_a_training_step_beside_the_base_in_small(harness, tmp_path):
    bench = load("training_step")
    out = tmp_path / "out.md"
    bench.training([8], 4, 3, shape="draft", vocab_size=64, length=24, device="cpu", repeats=1, out=str(out))
    found = [row for row in rows(out.read_text()) if row[0] in (*bench.ARMS, "8")]
    assert [row[0] for row in found] == [*bench.ARMS, "8"]
    assert found[0][2] == "1.00"
    assert all(float(row[1]) > 0 for row in found)
    assert int(found[4][-1]) > 1, "a batch of so small a base fits on a card"


def test_the_plain_route_of_loss_memory_has_our_loss_and_our_gradients(harness):
    bench = load("loss_memory")
    anchors = bench.Anchors((6, 5, 3, 8, 50), "float32", torch.device("cpu"), 4000, 2)
    losses = [anchors.loss(arm) for arm in (bench.PLAIN, bench.CTC)]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, anchors.leaves) for loss in losses), rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def learned_run(harness, tmp_path_factory, repository):
    """Two arms trained for ten steps on the shipped base, and the arguments that did it."""
    load("experiment")
    load("learned_drafter_plots")
    module, folder = load("learned_drafters"), tmp_path_factory.mktemp("learned")
    arguments = {
        "base": str(repository / "checkpoints" / "tiny-chat"),
        "files": ["embedded:40"],
        "questions": "",
        "out": str(folder),
        "benchmark": "embedded",
        "limit": 2,
        "max_new_tokens": 12,
        "arms": ["medusa", "ctc"],
        "seeds": [0],
        "steps": 10,
        "table": str(folder / "table.md"),
        "figures": str(folder / "plots"),
    }
    module.learned(**arguments)
    return module, folder, arguments


def test_the_learned_drafters_are_trained_and_decoded_by_node_budget_and_tree(learned_run):
    _, folder, _ = learned_run
    headings, _, *arms = rows((folder / "table.md").read_text())
    assert [arm[:2] for arm in arms] == [["medusa", tree] for tree in ("best-first", "chain")] + [
        ["ctc", tree] for tree in ("prefix", "paper", "chain")
    ]
    assert "64 nodes" in headings and float(arms[0][-1]) == 1.0, "the baseline is one time itself"
    for arm in arms:
        lengths = [float(cell.split()[0]) for cell in arm[3:6]]
        assert lengths == sorted(lengths) and lengths[0] >= 1, "more nodes accept no less"
    assert {path.name for path in (folder / "plots").iterdir()} == {"budget.png", "depth.png", "blank_share.png"}


def test_what_is_trained_is_not_trained_again_and_other_settings_are_refused(learned_run):
    module, folder, arguments = learned_run
    weights = folder / "medusa" / "seed0" / "drafter" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    module.learned(**arguments)
    assert weights.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="trained with other settings"):
        module.learned(**arguments | {"steps": 11})
    with pytest.raises(ValueError, match="unknown arms"):
        module.learned(**arguments | {"arms": ["ctcc"]})


def test_simulated_lengths_of_a_smaller_budget_are_those_of_a_smaller_tree(learned_run):
    """One tree of 64 nodes serves all budgets: the same as drafting with so many nodes."""
    from benchmarks import experiment
    from drafters import checkpoint
    from inference.engine.base import load_base

    _, folder, arguments = learned_run
    base = load_base(arguments["base"])
    prompts = [[1, 5, 9, 11], [1, 7, 8]]
    answers = experiment.own_answers(base, prompts, 12, folder / "other.json")
    exported = folder / "ctc" / "seed0" / "drafter"
    together = experiment.simulated(exported, "prefix", {"num_nodes": 64}, base, answers, (2, 8, 64))
    for budget in (2, 8, 64):
        config = checkpoint.read_config(exported)
        drafter, _ = checkpoint.load(
            exported,
            config=checkpoint.DrafterConfig(**vars(config) | {"init_args": config.init_args | {"num_nodes": budget}}),
        )
        alone = experiment.simulate(drafter, base, answers, (budget,))
        assert alone.length[str(budget)] == together["length"][str(budget)]
        assert alone.fed[str(budget)] == together["fed"][str(budget)]


@pytest.fixture(scope="module")
def table2_run(learned_run):
    """The table of the same two arms: nothing is trained for it."""
    _, folder, arguments = learned_run
    load("frame_trees")
    kept = {key: value for key, value in arguments.items() if key != "figures"}
    given = kept | {"table": str(folder / "table2.md"), "budgets": [8, 64]}
    module = load("ctc_paper_table2")
    module.table2(**given)
    return module, folder, given


def test_table2_reads_each_module_as_tokens_and_as_frames(table2_run):
    _, folder, _ = table2_run
    _, _, *table = rows((folder / "table2.md").read_text())
    linear, ctc = "linear heads + cross-entropy", "transformer + CTC"
    assert [row[:3] for row in table] == [["medusa", linear, way] for way in ("plain", "CTC")] + [
        ["ctc", ctc, way] for way in ("plain, blanks kept", "plain, blanks dropped", "CTC", "prefix")
    ]
    for _, _, _, small, fed_small, large, fed_large, _ in table:
        assert 1 <= float(small.split()[0]) <= float(large.split()[0])
        assert float(fed_small) <= 8 and float(fed_large) <= 64
    assert [row[-1] for row in table if row[2].startswith("plain")][::2] == ["1.000", "1.000"]


def test_table2_finds_the_lengths_that_the_drafters_have(table2_run, learned_run):
    """Where a way of reading is a tree of the shipped drafters, two simulations meet."""
    _, folder, _ = table2_run
    for arm, way, tree in (("medusa", "plain", "best-first"), ("ctc", "prefix", "prefix")):
        seed = folder / arm / "seed0"
        (found,) = json.loads((seed / "table2.json").read_text()).values()
        simulated = json.loads((seed / "simulated.json").read_text())
        (drafted,) = (result for key, result in simulated.items() if key.startswith(f'["{tree}"') and "2, 4" in key)
        for budget in ("8", "64"):
            assert found[way][budget]["length"] == drafted["length"][budget]
            assert found[way][budget]["ended"] == drafted["ended"][budget]
            assert found[way][budget]["fed"] == drafted["fed"][budget]


def test_table2_goes_on_where_it_stopped_and_says_what_does_not_fit(table2_run):
    module, folder, given = table2_run
    kept = folder / "ctc" / "seed0" / "table2.json"
    before = kept.stat().st_mtime_ns
    module.table2(**given)
    assert kept.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="arms hydra, ctc_markov have no place in this table"):
        module.table2(**given | {"arms": ["hydra", "ctc_markov"]})
    with pytest.raises(ValueError, match="budgets at least 1"):
        module.table2(**given | {"budgets": [0]})


def test_table2_counts_the_tokens_that_repeat_the_one_before(table2_run):
    from benchmarks import experiment

    module, _, _ = table2_run
    answers = [
        experiment.Answer(torch.tensor([3, 3, 4, 4, 4]), 2, True),
        experiment.Answer(torch.tensor([5, 5, 6]), 1, False),
    ]
    assert module.repeats(answers) == 3 / 5


def test_lines_may_be_more_than_the_colours_are(tmp_path):
    plots = load("learned_drafter_plots")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "metrics.csv").write_text("step,train/loss\n1,2.0\n")
    run = {"length": {"1": 1.5, "2": 1.75}, "by_depth": [0.5, 0.25], "folder": tmp_path}
    found = {(f"arm {number}", "prefix"): [run] for number in range(30)}
    assert [path.name for path in plots.plot(found, tmp_path / "plots")] == ["budget.png", "depth.png"]


def test_what_was_decoded_of_other_answers_is_decoded_again(learned_run):
    """As many answers, but other ones."""
    from benchmarks import experiment
    from inference.engine.base import load_base

    _, folder, arguments = learned_run
    base, exported = load_base(arguments["base"]), folder / "medusa" / "seed0" / "drafter"
    found = []
    for prompts in ([[1, 5, 9, 11], [1, 7, 8]], [[1, 30, 12], [1, 44, 3, 8]]):
        answers = experiment.own_answers(base, prompts, 12, folder / "others.json")
        found.append(experiment.simulated(exported, "chain", {"tree": "chain"}, base, answers, (1, 4)))
        assert found[-1] == experiment.simulated(exported, "chain", {"tree": "chain"}, base, answers, (1, 4))
    assert found[0]["answers"] != found[1]["answers"]


@pytest.fixture(scope="module")
def all_run(learned_run, tmp_path_factory, repository):
    """From nothing to the tables, with one arm, a few questions and a few tokens."""
    module, folder = load("all_drafters"), tmp_path_factory.mktemp("all")
    problems = [{"question": f"Tell me about the {word}.", "answer": "#### 1"} for word in ("compass", "clock", "map")]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    asked = [{"question_id": n, "category": "all", "turns": [f"Name a {w}.", "Why?"]} for n, w in enumerate("abcd")]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    base = str(repository / "checkpoints" / "tiny-chat")
    arguments = {
        "base": base,
        "train_questions": str(folder / "problems.jsonl"),
        "gsm8k": str(folder / "problems.jsonl"),
        "mt_bench": str(folder / "asked.jsonl"),
        "draft_model": base,
        "out": str(folder / "run"),
        "arms": ["medusa"],
        "live": ["medusa"],
        "seeds": [0],
        "steps": 4,
        "offset": 1,
        "limit": 2,
        "live_questions": 2,
        "max_new_tokens": 8,
        "budgets": [4, 16],
        "dtypes": ["float32"],
        "table": str(folder / "table.md"),
    }
    module.all_drafters(**arguments)
    return module, folder, arguments


def test_all_drafters_are_trained_simulated_and_decoded(all_run):
    _, folder, _ = all_run
    learned, *live = [row for row in rows((folder / "table.md").read_text()) if row[0] not in ("drafter", "---")]
    assert learned[0] == "medusa" and len(learned) == 3 + 2 * 2
    assert len(live) == 2 * (1 + 8 + 2), "on each benchmark vanilla, the training-free, and medusa with each budget"
    first, *others = live[: len(live) // 2]
    assert first[:4] == ["none", "1.00", "1.00×", "2/2"] and all(row[3] == "2/2" for row in others)
    answers = folder / "run" / "live" / "mt_bench-float32" / "answers" / "mt_bench" / "none.jsonl"
    asked = [json.loads(line)["question_id"] for line in answers.read_text().splitlines()]
    assert asked == [0, 2], "evenly spaced"


def test_all_drafters_goes_on_where_it_stopped(all_run):
    module, folder, arguments = all_run
    kept = [folder / "run" / "text.jsonl", folder / "run" / "medusa" / "seed0" / "drafter" / "model.safetensors"]
    kept += [folder / "run" / "live" / "gsm8k-float32" / "results.json", folder / "run" / "store" / "manifest.json"]
    before = [path.stat().st_mtime_ns for path in kept]
    (folder / "run" / "live" / "mt_bench-float32" / "results.json").unlink()
    module.all_drafters(**arguments)
    assert [path.stat().st_mtime_ns for path in kept] == before
    assert (folder / "run" / "live" / "mt_bench-float32" / "results.json").exists()
