"""The experiments with learned drafters run in a tiny setting and print complete tables."""

import json
import shutil
import time
from dataclasses import replace

import lightning as L
import pytest
import torch

from benchmarks import experiment, learned_drafters, paper_table2
from drafters import checkpoint
from inference.verifier.base import load_base


def tables(markdown):
    """Return the rows of cells of every table, with its headings."""
    parts = (part for part in markdown.split("\n\n") if part.startswith("|"))
    return [[[cell.strip() for cell in line[1:-1].split("|")] for line in part.splitlines()] for part in parts]


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
    assert [arm[:2] for arm in arms] == [["medusa", "best_first"], ["ctc", "prefix"], ["ctc", "paper"]]
    minutes = stored("ctc", "training.json")["cpu_seconds"] / 60
    assert {arm[-1] for arm in arms if arm[0] == "ctc"} == {f"{minutes:.1f}"} and headings[-1] == "CPU minutes"
    for arm in arms:
        lengths = [float(cell) for cell in arm[3:6]]
        assert lengths == sorted(lengths) and lengths[0] >= 1, "more nodes accept no less"


@pytest.mark.slow
def test_learning_curves_show_every_training_by_steps_and_by_time(learned_run):
    folder, _ = learned_run
    five, ten, _, (headings, _, *curves) = tables((folder / "table.md").read_text())
    assert headings == ["drafter", "5 steps", "10 steps"]
    best = [[row for row in table if row[1] in ("best_first", "prefix")] for table in (five, ten)]
    assert curves == [[early[0], early[5], late[5]] for early, late in zip(*best, strict=True)]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_table2_reads_each_module_as_tokens_and_as_frames(learned_run, stored):
    _, _, (_, _, *table), _ = tables((learned_run[0] / "table.md").read_text())
    linear, ctc = "linear heads + cross-entropy", "transformer + CTC"
    assert [row[:3] for row in table] == [["medusa", linear, way] for way in ("plain", "CTC")] + [
        ["ctc", ctc, way] for way in ("plain, blanks kept", "plain, blanks dropped", "CTC", "prefix")
    ]
    for _, _, _, small, fed_small, large, fed_large, _ in table:
        assert 1 <= float(small) <= float(large) and float(fed_small) <= 16 and float(fed_large) <= 64
    assert [row[-1] for row in table if row[2].startswith("plain")][::2] == ["1.000", "1.000"]
    # For trees that the drafters build themselves, two independent simulations agree.
    for arm, way, tree in (("medusa", "plain", "best_first"), ("ctc", "prefix", "prefix")):
        (found,) = stored(arm, "table2.json").values()
        (drafted,) = (result for key, result in stored(arm, "simulated.json").items() if f'"{tree}"' in key)
        for budget in ("16", "64"):
            assert found[way][budget] == {name: drafted[name][budget] for name in ("length", "fed")}


@pytest.mark.slow
def test_a_trained_arm_is_not_trained_again_and_other_settings_are_refused(learned_run):
    folder, arguments = learned_run
    paths = [*folder.rglob("model.safetensors"), *folder.rglob("table2.json"), *folder.rglob("simulated.json")]
    before = [path.stat().st_mtime_ns for path in paths]
    learned_drafters.learned_drafters(**arguments)
    assert [path.stat().st_mtime_ns for path in paths] == before and len(paths) == 4 + 2 + 4
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
    def fit(steps, start=None):
        counted, quiet = experiment.TrainingTime(), dict.fromkeys(("logger", "enable_progress_bar"), False)
        folder = tmp_path / str(steps)
        trainer = L.Trainer(accelerator="cpu", max_steps=steps, callbacks=counted, default_root_dir=folder, **quiet)
        trainer.fit(Burning(), ckpt_path=start)
        return folder / "checkpoints" / "last.ckpt", counted.state_dict()["cpu_seconds"]

    first, seconds = fit(3)
    assert 3 * 0.02 <= seconds < 3 * 0.02 + 0.2, "without the set-up"
    _, together = fit(5, first)
    assert 2 * 0.02 <= together - seconds < 2 * 0.02 + 0.2


@pytest.fixture
def simulate(learned_run):
    """Simulate an exported drafter on the answers to some prompts."""
    folder, arguments = learned_run
    base = load_base(arguments["base"])

    def simulate(arm, prompts, budgets, stored=True, **options):
        exported = folder / "10" / arm / "seed0" / "drafter"
        answers = experiment.own_answers(base, prompts, 12, folder / "others.json")
        if stored:
            return experiment.simulate_exported(exported, options, base, answers, budgets)
        config = checkpoint.read_config(exported)
        drafter, _ = checkpoint.load(exported, config=replace(config, init_args=config.init_args | options))
        return experiment.simulate(drafter, base, answers, budgets)

    return simulate


@pytest.mark.slow
def test_simulated_lengths_of_a_smaller_budget_are_those_of_a_smaller_tree(simulate):
    """One tree of 64 nodes gives the same results for a smaller budget as drafting with that many nodes."""
    prompts = [[1, 5, 9, 11], [1, 7, 8]]
    together = simulate("ctc", prompts, (2, 8, 64), num_nodes=64)
    for budget in (2, 8, 64):
        separate = simulate("ctc", prompts, (budget,), stored=False, num_nodes=budget)
        for name in ("length", "fed"):
            assert separate[name][str(budget)] == together[name][str(budget)]


@pytest.mark.slow
def test_other_answers_are_simulated_again(simulate, stored):
    """The number of answers is the same, but not their text."""
    prompts, others, before = (
        [[1, 5, 9, 11], [1, 7, 8]],
        [[1, 30, 12], [1, 44, 3, 8]],
        len(stored("medusa", "simulated.json")),
    )
    for number, given in ((1, prompts), (2, others), (2, prompts)):
        simulate("medusa", given, (1, 4), tree="chain")
        assert len(stored("medusa", "simulated.json")) == before + number


def test_table2_counts_the_tokens_that_repeat_the_one_before():
    texts = [([3, 3, 4, 4, 4], 2), ([5, 5, 6], 1)]
    answers = [experiment.GreedyAnswer(torch.tensor(tokens), start) for tokens, start in texts]
    assert paper_table2.repeats(answers) == 3 / 5


def test_arms_that_do_not_fit_are_left_out_of_table2():
    fitting = [name for name, arm in learned_drafters.ARMS.items() if paper_table2.fits(arm)]
    assert {"medusa", "block", "ctc_paper", "ctc"} <= {*fitting}
    assert not {"hydra", "eagle", "ctc_markov", "ctc_10_selfless_muon"} & {*fitting}
