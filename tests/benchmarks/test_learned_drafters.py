"""The experiments with learned drafters run in a tiny setting and print complete tables."""

import json
import math
import shutil
import time

import lightning as L
import pytest
import torch

from benchmarks import (
    experiment,
    learned_drafter_plots,
    learned_drafters,
)
from benchmarks.ctc import learning_curves, paper_table2
from drafters import checkpoint
from inference.verifier.base import load_base


def rows(markdown):
    """Return the cells of every row of every table."""
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in markdown.splitlines() if line[:1] == "|"]


@pytest.fixture(scope="module")
def learned_run(shared_folder, tmp_path_factory, repository):
    """Two arms trained for ten steps on the shipped base, and the arguments that did it."""

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
            "steps": 10,
            "table": str(folder / "table.md"),
            "figures": str(folder / "plots"),
        }

    trained = shared_folder("learned", lambda folder: learned_drafters.learned_drafters(**arguments(folder)))
    folder = shutil.copytree(trained, tmp_path_factory.mktemp("learned") / "run")  # the tests add to it
    for config in folder.glob("*/seed*/config.yaml"):
        config.write_text(config.read_text().replace(str(trained), str(folder)))
    return folder, arguments(folder)


@pytest.mark.slow
def test_learned_drafters_are_trained_and_simulated_by_number_of_nodes_and_tree(learned_run):
    folder, _ = learned_run
    headings, _, *arms = rows((folder / "table.md").read_text())
    assert [arm[:2] for arm in arms] == [["medusa", tree] for tree in ("best-first", "chain")] + [
        ["ctc", tree] for tree in ("prefix", "paper", "chain")
    ]
    assert "64 nodes" in headings and float(arms[0][-2]) == 1.0, "the baseline relative to itself"
    minutes = json.loads((folder / "ctc" / "seed0" / "training.json").read_text())["cpu_seconds"] / 60
    assert {arm[-1] for arm in arms if arm[0] == "ctc"} == {f"{minutes:.1f}"} and headings[-1] == "CPU minutes"
    for arm in arms:
        lengths = [float(cell.split()[0]) for cell in arm[3:6]]
        assert lengths == sorted(lengths) and lengths[0] >= 1, "more nodes accept no less"
    assert {path.name for path in (folder / "plots").iterdir()} == {"budget.png", "depth.png", "blank_share.png"}


def test_the_time_of_trainings_is_unknown_if_that_of_one_is(tmp_path):
    records = {"new": {"cpu_seconds": 120.0}, "resumed": {"cpu_seconds": None}, "old": {"seconds": 60.0}, "none": None}
    for name, record in records.items():
        (tmp_path / name).mkdir()
        if record is not None:
            (tmp_path / name / "training.json").write_text(json.dumps(record))
    assert experiment.minutes_of([tmp_path / "new"] * 2) == 2.0
    for name in ("resumed", "old", "none"):
        assert math.isnan(experiment.minutes_of([tmp_path / "new", tmp_path / name]))


@pytest.mark.slow
def test_a_trained_arm_is_not_trained_again_and_other_settings_are_refused(learned_run):
    folder, arguments = learned_run
    weights = folder / "medusa" / "seed0" / "drafter" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    learned_drafters.learned_drafters(**arguments)
    assert weights.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="trained with other settings"):
        learned_drafters.learned_drafters(**arguments | {"steps": 11})
    with pytest.raises(ValueError, match="unknown arms"):
        learned_drafters.learned_drafters(**arguments | {"arms": ["ctcc"]})


@pytest.mark.slow
def test_a_training_that_stopped_behind_its_last_step_has_the_time_of_its_checkpoint(learned_run, tmp_path):
    folder, arguments = learned_run
    out = shutil.copytree(folder, tmp_path / "run")
    place = out / "medusa" / "seed0"
    common = experiment.SharedSettings(arguments["base"], arguments["files"], arguments["steps"])
    recipe, checkpoints = place / "config.yaml", place / "checkpoints"
    recipe.write_text(recipe.read_text().replace(str(folder), str(out)))
    before = json.loads((place / "training.json").read_text())
    assert before["cpu_seconds"] > 0
    for expected in (before, before | {"cpu_seconds": None}):
        (place / "drafter" / "model.safetensors").unlink()
        (place / "training.json").unlink()
        experiment.train(learned_drafters.ARMS["medusa"], 0, common, out)
        assert json.loads((place / "training.json").read_text()) == expected
        assert (place / "drafter" / "model.safetensors").exists()
        saved = torch.load(checkpoints / "last.ckpt", weights_only=True)
        saved["callbacks"].pop("TrainingTime", None)  # as in a checkpoint of an older version
        torch.save(saved, checkpoints / "last.ckpt")


class Burning(L.LightningModule):
    """A module that uses the CPU for a while when it is set up, and for a shorter while in each step."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def burn(self, seconds):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    def setup(self, stage):
        self.burn(0.2)

    def training_step(self, batch, batch_idx):
        self.burn(0.02)
        return self.weight

    def train_dataloader(self):
        return range(100)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.slow
def test_the_time_of_a_resumed_training_is_that_of_the_steps_of_all_its_parts(tmp_path):
    def fit(steps, start=None, callbacks=1):
        counted = [experiment.TrainingTime() for _ in range(callbacks)]
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        trainer = L.Trainer(accelerator="cpu", max_steps=steps, callbacks=counted, **quiet)
        trainer.fit(Burning(), ckpt_path=start)
        trainer.save_checkpoint(path := tmp_path / f"{steps}.ckpt")
        return path, counted[0].state_dict()["cpu_seconds"] if counted else None

    first, seconds = fit(3)
    assert 3 * 0.02 <= seconds < 3 * 0.02 + 0.2, "without the set-up"
    _, together = fit(5, first)
    assert 2 * 0.02 <= together - seconds < 2 * 0.02 + 0.2
    uncounted, _ = fit(1, callbacks=0)
    assert fit(2, uncounted)[1] is None, "the time of the first step is not known"


@pytest.mark.slow
def test_simulated_lengths_of_a_smaller_budget_are_those_of_a_smaller_tree(learned_run):
    """One tree of 64 nodes gives the same results for a smaller budget as drafting with that many nodes."""
    folder, arguments = learned_run
    base = load_base(arguments["base"])
    prompts = [[1, 5, 9, 11], [1, 7, 8]]
    answers = experiment.own_answers(base, prompts, 12, folder / "other.json")
    exported = folder / "ctc" / "seed0" / "drafter"
    together = experiment.simulate_exported(exported, "prefix", {"num_nodes": 64}, base, answers, (2, 8, 64))
    for budget in (2, 8, 64):
        config = checkpoint.read_config(exported)
        drafter, _ = checkpoint.load(
            exported,
            config=checkpoint.DrafterConfig(**vars(config) | {"init_args": config.init_args | {"num_nodes": budget}}),
        )
        separate = experiment.simulate(drafter, base, answers, (budget,))
        assert separate.length[str(budget)] == together["length"][str(budget)]
        assert separate.fed[str(budget)] == together["fed"][str(budget)]


@pytest.mark.slow
def test_learning_curves_show_every_training_by_steps_and_by_time(learned_run, tmp_path):
    folder, arguments = learned_run
    steps = arguments["steps"]
    shutil.copytree(folder, tmp_path / str(steps))
    for config in tmp_path.glob("*/*/seed*/config.yaml"):
        config.write_text(config.read_text().replace(str(folder), str(tmp_path / str(steps))))
    for name, seconds in (("medusa", 90), ("ctc", 150)):
        (tmp_path / str(steps) / name / "seed0" / "training.json").write_text(json.dumps({"cpu_seconds": seconds}))
    shared = {
        key: arguments[key] for key in ("base", "files", "questions", "benchmark", "limit", "max_new_tokens", "arms")
    }
    table, figure = tmp_path / "table.md", tmp_path / "curves.png"
    learning_curves.learning_curves(
        **shared, out=str(tmp_path), steps=[steps], nodes=64, table=str(table), figure=str(figure)
    )
    headings, _, medusa, ctc = rows(table.read_text())
    assert headings[1:] == ["10 steps", "minutes, 10"] and [medusa[0], ctc[0]] == ["medusa", "ctc"]
    assert [medusa[2], ctc[2]] == ["1.5", "2.5"]
    for name, tree, row in (("medusa", "best-first", medusa), ("ctc", "prefix", ctc)):
        simulated = json.loads((folder / name / "seed0" / "simulated.json").read_text())
        budgets = list(experiment.BUDGETS)  # another test simulates with others
        [length] = [
            value["length"]["64"]
            for key, value in simulated.items()
            if json.loads(key)[0] == tree and json.loads(key)[2] == budgets
        ]
        assert float(row[1]) == pytest.approx(length, abs=6e-4)
    assert figure.read_bytes().startswith(b"\x89PNG")
    (tmp_path / str(steps) / "medusa" / "seed0" / "training.json").write_text(json.dumps({"seconds": 90}))
    (tmp_path / str(steps) / "ctc" / "seed0" / "training.json").unlink()
    learning_curves.learning_curves(
        **shared, out=str(tmp_path), steps=[steps], nodes=64, table=str(table), figure=str(figure)
    )
    assert [row[2] for row in rows(table.read_text())[2:]] == ["–", "–"], "the times are unknown"
    with pytest.raises(ValueError, match="3 nodes are not simulated"):
        learning_curves.learning_curves(**shared, out=str(tmp_path), nodes=3)
    with pytest.raises(ValueError, match="unknown arms ctcc"):
        learning_curves.learning_curves(**shared | {"arms": ["ctcc"]}, out=str(tmp_path))


@pytest.fixture(scope="module")
def table2_run(learned_run):
    """The table of the same two arms, for which nothing is trained again."""
    folder, arguments = learned_run
    kept = {key: value for key, value in arguments.items() if key != "figures"}
    given = kept | {"table": str(folder / "table2.md"), "budgets": [8, 64]}
    paper_table2.table2(**given)
    return folder, given


@pytest.mark.slow
def test_table2_reads_each_module_as_tokens_and_as_frames(table2_run):
    folder, _ = table2_run
    _, _, *table = rows((folder / "table2.md").read_text())
    linear, ctc = "linear heads + cross-entropy", "transformer + CTC"
    assert [row[:3] for row in table] == [["medusa", linear, way] for way in ("plain", "CTC")] + [
        ["ctc", ctc, way] for way in ("plain, blanks kept", "plain, blanks dropped", "CTC", "prefix")
    ]
    for _, _, _, small, fed_small, large, fed_large, _ in table:
        assert 1 <= float(small.split()[0]) <= float(large.split()[0])
        assert float(fed_small) <= 8 and float(fed_large) <= 64
    assert [row[-1] for row in table if row[2].startswith("plain")][::2] == ["1.000", "1.000"]


@pytest.mark.slow
def test_table2_has_the_same_acceptance_lengths_as_the_drafters(table2_run, learned_run):
    """For trees that the drafters build themselves, two independent simulations agree."""
    folder, _ = table2_run
    for arm, way, tree in (("medusa", "plain", "best-first"), ("ctc", "prefix", "prefix")):
        seed = folder / arm / "seed0"
        (found,) = json.loads((seed / "table2.json").read_text()).values()
        simulated = json.loads((seed / "simulated.json").read_text())
        (drafted,) = (result for key, result in simulated.items() if key.startswith(f'["{tree}"') and "2, 4" in key)
        for budget in ("8", "64"):
            assert found[way][budget]["length"] == drafted["length"][budget]
            assert found[way][budget]["ended"] == drafted["ended"][budget]
            assert found[way][budget]["fed"] == drafted["fed"][budget]


@pytest.mark.slow
def test_table2_continues_after_an_interruption_and_names_unsuitable_arms(table2_run):
    folder, given = table2_run
    kept = folder / "ctc" / "seed0" / "table2.json"
    before = kept.stat().st_mtime_ns
    paper_table2.table2(**given)
    assert kept.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="arms hydra, ctc_markov do not fit into this table"):
        paper_table2.table2(**given | {"arms": ["hydra", "ctc_markov"]})
    with pytest.raises(ValueError, match="budgets at least 1"):
        paper_table2.table2(**given | {"budgets": [0]})


def test_table2_counts_the_tokens_that_repeat_the_one_before():
    answers = [
        experiment.GreedyAnswer(torch.tensor([3, 3, 4, 4, 4]), 2, True),
        experiment.GreedyAnswer(torch.tensor([5, 5, 6]), 1, False),
    ]
    assert paper_table2.repeats(answers) == 3 / 5


@pytest.mark.slow
def test_there_can_be_more_lines_than_colours(tmp_path):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "metrics.csv").write_text("step,train/loss\n1,2.0\n")
    run = {"length": {"1": 1.5, "2": 1.75}, "by_depth": [0.5, 0.25], "folder": tmp_path}
    results = {(f"arm {number}", "prefix"): [run] for number in range(30)}
    assert [path.name for path in learned_drafter_plots.plot(results, tmp_path / "plots")] == [
        "budget.png",
        "depth.png",
    ]


@pytest.mark.slow
def test_other_answers_are_simulated_again(learned_run):
    """The number of answers is the same, but not their text."""
    folder, arguments = learned_run
    base, exported = load_base(arguments["base"]), folder / "medusa" / "seed0" / "drafter"
    found = []
    for prompts in ([[1, 5, 9, 11], [1, 7, 8]], [[1, 30, 12], [1, 44, 3, 8]]):
        answers = experiment.own_answers(base, prompts, 12, folder / "others.json")
        found.append(experiment.simulate_exported(exported, "chain", {"tree": "chain"}, base, answers, (1, 4)))
        assert found[-1] == experiment.simulate_exported(exported, "chain", {"tree": "chain"}, base, answers, (1, 4))
    assert found[0]["answers"] != found[1]["answers"]
