"""The experiments with learned drafters run in a tiny setting and print complete tables."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml

import drafters
from benchmarks import experiment, learned_drafters, recipes
from drafters import checkpoint
from drafters.protocol import BaseShape
from inference.verifier.base import load_base


def tables(markdown):
    """Return the rows of cells of every table, with its headings."""
    parts = (part for part in markdown.split("\n\n") if part.startswith("|"))
    return [[[cell.strip() for cell in line[1:-1].split("|")] for line in part.splitlines()] for part in parts]


@pytest.mark.parametrize("arm", learned_drafters.ARMS.values(), ids=lambda arm: arm.name)
def test_the_options_of_an_arm_fit_together(arm):
    smollm2 = BaseShape(576, 49_152, 30, 9, 64, 1536)
    with torch.device("meta"):
        recipes.build(getattr(drafters, arm.drafter), smollm2, arm.arguments)


@pytest.fixture(scope="module")
def learned_run(shared_folder, tmp_path_factory, repository):
    """Two arms trained for five and for ten steps on the shipped base, and the arguments that did it."""

    def arguments(folder):
        return {
            "base": str(repository / "checkpoints" / "tiny-chat"),
            "files": ["embedded:40"],
            "questions": "",
            "out": str(folder),
            "benchmark": "embedded",
            "limit": 2,
            "max_new_tokens": 12,
            "arms": ["medusa", "ctc"],
            "seeds": [0],
            "steps": [5, 10],
            "table2": True,
            "table": str(folder / "table.md"),
            "figure": str(folder / "curves.png"),
        }

    trained = shared_folder("learned", lambda folder: learned_drafters.learned_drafters(**arguments(folder)))
    folder = shutil.copytree(trained, tmp_path_factory.mktemp("learned") / "run")  # the tests add to it
    for config in folder.glob("*/*/seed*/config.yaml"):
        config.write_text(config.read_text().replace(str(trained), str(folder)))
    return folder, arguments(folder)


@pytest.fixture(scope="module")
def stored(learned_run):
    """The results in the files of an arm trained for ten steps, by the kind of tree or way."""

    def read(arm, name):
        return json.loads((learned_run[0] / "10" / arm / "seed0" / name).read_text())

    return read


@pytest.mark.slow
def test_learned_drafters_are_trained_and_simulated_by_number_of_nodes_and_tree(learned_run, stored):
    folder, _ = learned_run
    _, (headings, _, *arms), _, _ = tables((folder / "table.md").read_text())
    assert [arm[:2] for arm in arms] == [
        ["medusa", "best_first"],
        ["ctc", "prefix"],
        ["ctc", "paper"],
    ]
    minutes = stored("ctc", "training.json")["cpu_seconds"] / 60
    assert {arm[-1] for arm in arms if arm[0] == "ctc"} == {f"{minutes:.1f}"} and headings[-1] == "CPU minutes"
    for arm in arms:
        lengths = [float(cell) for cell in arm[3:6]]
        assert lengths == sorted(lengths) and lengths[0] >= 1, "more nodes accept no less"


@pytest.mark.slow
def test_table2_reads_each_module_as_tokens_and_as_frames(learned_run, stored):
    _, _, (_, _, *table), _ = tables((learned_run[0] / "table.md").read_text())
    linear, ctc = "linear heads + cross-entropy", "transformer + CTC"
    ways = ("plain, blanks kept", "plain, blanks dropped", "CTC", "prefix")
    assert [row[:3] for row in table] == [["medusa", linear, way] for way in ("plain", "CTC")] + [
        ["ctc", ctc, way] for way in ways
    ]
    for _, _, way, length, relative, fed, speed, *parts in table:
        assert float(length) >= 1 and 0 < float(fed) <= 64 and float(speed[:-1]) > 0
        assert relative == "1.000" or way not in ("plain", ways[0])
        shares = [float(part[:-1]) for part in parts]
        assert min(shares) > 0 and 90 < sum(shares) < 100, "what is left is to accept and to commit"
    for plain, transformed in ((table[0], table[1]), (table[2], table[4])):
        assert float(transformed[5]) < float(plain[5]), "paths with the same text are fed once"
    # Decoding and simulation agree, but for trees that the length cap makes less deep while they are built.
    drafted = {key: result["length"]["64"] for key, result in stored("ctc", "simulated.json").items()}
    (found,) = stored("ctc", "table2.json").values()
    for way, tree in (("CTC", "paper"), ("prefix", "prefix")):
        (simulated,) = (length for key, length in drafted.items() if f'"{tree}"' in key)
        assert found[way]["length"] == simulated or (tree == "prefix" and found[way]["length"] > simulated)


@pytest.mark.slow
def test_a_trained_arm_is_not_trained_again_and_other_settings_are_refused(learned_run):
    folder, arguments = learned_run
    paths = [*folder.rglob("model.safetensors"), *folder.rglob("table2.json"), *folder.rglob("simulated.json")]
    before = [path.stat().st_mtime_ns for path in paths]
    learned_drafters.learned_drafters(**arguments)
    assert [path.stat().st_mtime_ns for path in paths] == before and len(paths) == 4 + 2 + 4
    less = {"arms": ["medusa:5", "ctc"], "table2": False, "table": str(folder / "less.md")}
    learned_drafters.learned_drafters(**arguments | less)
    ten, (headings, _, medusa, ctc) = tables((folder / "less.md").read_text())[1:]
    assert {row[0] for row in ten[2:]} == {"ctc"} and headings[1:] == ["5 steps", "10 steps"]
    assert medusa[1] and not medusa[2] and all(ctc)
    with pytest.raises(ValueError, match="trained with other settings"):
        learned_drafters.learned_drafters(**arguments | {"files": ["embedded:41"]})
    with pytest.raises(ValueError, match="unknown arms"):
        learned_drafters.learned_drafters(**arguments | {"arms": ["ctcc"]})
    with pytest.raises(ValueError, match="must not be empty"):
        learned_drafters.learned_drafters(**arguments | {"seeds": []})


@pytest.mark.slow
def test_a_training_that_stopped_behind_its_last_step_has_the_time_of_its_checkpoint(learned_run, stored):
    folder, arguments = learned_run
    place, before = folder / "10" / "medusa" / "seed0", stored("medusa", "training.json")
    assert before["cpu_seconds"] > 0
    weights = (place / "drafter" / "model.safetensors").read_bytes()
    (place / "drafter" / "model.safetensors").unlink()
    (place / "training.json").unlink()
    common = experiment.SharedSettings(arguments["base"], arguments["files"], 10)
    experiment.train(learned_drafters.ARMS["medusa"], 0, common, folder / "10")
    assert stored("medusa", "training.json") == before
    assert (place / "drafter" / "model.safetensors").read_bytes() == weights


def test_the_time_and_the_tokens_of_a_resumed_training_are_those_of_the_steps_of_all_its_parts(monkeypatch):
    seconds = iter([100.0, 101.0, 103.0, 500.0, 504.0])  # the set-up before each part does not count
    monkeypatch.setattr(experiment, "time", SimpleNamespace(process_time=lambda: next(seconds)))
    first, second = experiment.TrainingTime(), experiment.TrainingTime()
    batch = None, None, None, {"lengths": torch.tensor([3, 7])}
    first.on_train_start(None, None)
    first.on_train_batch_end(*batch)
    first.on_train_batch_end(*batch)
    second.load_state_dict(first.state_dict())
    second.on_train_start(None, None)
    second.on_train_batch_end(*batch)
    assert (first.cpu_seconds, second.cpu_seconds) == (3.0, 7.0)
    assert (first.tokens, second.tokens) == (20, 30)


@pytest.mark.slow
def test_the_fair_comparison_searches_with_one_seed_and_repeats_the_best_optimizer_of_each_method(repository, tmp_path):
    """In steps and in seconds, on the same text; it continues where it stopped."""
    arms = ["ctc_copy_muon_0.008", "ctc_copy_adamw_0.001"]
    options = {"base": str(repository / "checkpoints" / "tiny-chat"), "files": ["embedded:40"], "questions": ""}
    options |= {"out": str(tmp_path), "benchmark": "embedded", "limit": 2, "max_new_tokens": 12, "arms": arms}
    options |= {"steps": [10], "seconds": [1], "seeds": [0, 1], "nodes": 16, "max_length": 64}
    options |= {"hidden_layers": [1, 4, 6]}
    options |= {"table": str(tmp_path / "table.md"), "figure": str(tmp_path / "curves.png")}
    learned_drafters.learned_drafters(**options)
    *_, curves = tables((tmp_path / "table.md").read_text())[-3:]
    assert curves[0] == ["drafter", "10 steps", "1 seconds"] and [row[0] for row in curves[2:]] == arms
    (other,) = (arm for arm in arms if not (tmp_path / "10" / arm / "seed1").exists())
    of_seed0 = {
        arm: next(iter(json.loads((tmp_path / "10" / arm / "seed0" / "simulated.json").read_text()).values()))
        for arm in arms
    }
    assert of_seed0[other]["length"]["16"] == min(of_seed0[arm]["length"]["16"] for arm in arms)
    configs = {path: yaml.safe_load(path.read_text()) for path in tmp_path.glob("*/*/seed*/config.yaml")}
    assert len(configs) == 2 * (2 + 1)
    for path, config in configs.items():
        assert config["model"]["warmup_steps"] == 1, "a tenth"
        assert ("max_time" in config["trainer"]) == (path.parts[-4] == "1s")
        assert config["model"]["drafter"]["init_args"]["trunk"]["hidden_layers"] == [1, 4, 6]
    read = {arm: json.loads((tmp_path / "10" / arm / "seed0" / "training.json").read_text())["tokens"] for arm in arms}
    assert len({*read.values()}) == 1, "they read the same text"
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    learned_drafters.learned_drafters(**options)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == before


@pytest.mark.slow
def test_simulated_lengths_of_a_smaller_budget_are_those_of_a_smaller_tree(learned_run):
    """One tree of 64 nodes gives the same results for a smaller budget as drafting with that many nodes."""
    folder, arguments = learned_run
    base, exported = load_base(arguments["base"]), folder / "10" / "ctc" / "seed0" / "drafter"
    answers = experiment.own_answers(base, [[1, 5, 9, 11], [1, 7, 8]], 12, folder / "others.json")
    together = experiment.simulate_exported(exported, {"num_nodes": 64}, base, answers, (2, 8, 64))
    config = checkpoint.read_config(exported)
    for budget in (2, 8, 64):
        smaller = replace(config, init_args=config.init_args | {"draft": {"num_nodes": budget}})
        separate = experiment.simulate(checkpoint.load(exported, config=smaller)[0], base, answers, (budget,))
        for name in ("length", "fed"):
            assert separate[name][str(budget)] == together[name][str(budget)]


@pytest.mark.slow
def test_a_drafter_without_its_blank_is_one_more_folder_with_results_of_its_own(learned_run):
    folder, arguments = learned_run
    base, exported = load_base(arguments["base"]), folder / "10" / "ctc" / "seed0" / "drafter"
    written = learned_drafters.without_its_blank(exported)
    answers = experiment.own_answers(base, [[1, 5, 9, 11]], 12, folder / "for_chains.json")
    found = [experiment.simulate_exported(each, {"tree": "chain"}, base, answers, (4,)) for each in (exported, written)]
    assert found[0]["parameters"] == found[1]["parameters"] + base.shape.hidden_size + 1  # the blank's row and bias
    assert checkpoint.read_config(written).class_path == "drafters.Block"


def test_results_are_remembered_for_the_same_answers_only(tmp_path):
    """The number of answers is the same, but not their text."""
    first, other = ([experiment.GreedyAnswer(torch.tensor(text), 1)] for text in ([3, 4, 5], [3, 4, 6]))
    path, found = tmp_path / "known.json", iter([{"length": 1}, {"length": 2}, {"length": 3}])
    given = [([16], first), ([16], other), ([64], first), ([16], first), ([64], first)]
    lengths = [experiment.remembered(path, [*key], answers, lambda: next(found))["length"] for key, answers in given]
    assert lengths == [1, 2, 3, 1, 3]
