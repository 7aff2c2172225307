import re

import pytest
import yaml

from drafters import recipe
from train.cli import lightning_command

OVERLAYS = {"debug.yaml"}
CONFIGS = sorted(str(path.relative_to(lightning_command.CONFIGS)) for path in lightning_command.CONFIGS.rglob("*.yaml"))
WHOLE = [name for name in CONFIGS if name not in OVERLAYS and not name.startswith("strategy/")]


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"], ["help"]])
def test_bare_and_help_print_one_static_table(call, args):
    outcome = call(lightning_command.main, *args)
    assert (outcome.code, outcome.out, outcome.err) == (0, lightning_command.HELP, "")


def test_the_static_help_is_printed_without_importing_torch(fresh_python):
    code = (
        "import sys; from train.cli.lightning_command import main; main(['--help']); "
        "print('torch' in sys.modules, len(sys.modules))"
    )
    done = fresh_python("-c", code, timeout=5)
    assert done.returncode == 0 and done.stdout.startswith(lightning_command.HELP)
    assert done.stdout.splitlines()[-1].startswith("False")


def documented():
    return re.search(r"usage: lightning \{([^}]+)\}", lightning_command.HELP)[1].split(",")


def test_the_static_help_explains_every_subcommand_that_it_names():
    assert (
        re.findall(r"^  (\w+) {3,}\S", lightning_command.HELP, re.MULTILINE)
        == documented()
        == ["fit", "validate", "test"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("subcommand", documented())
def test_every_documented_subcommand_explains_its_keys(call, subcommand):
    outcome = call(lightning_command.main, subcommand, "--help")
    assert outcome.code == 0 and outcome.err == ""
    assert all(key in outcome.out for key in ("--config", "--model.base", "--data.files", "--trainer.max_steps"))
    assert "Folder or hub id of the frozen base" in outcome.out, "the help of a key is its line in the docstring"


@pytest.mark.slow
def test_python_m_train_is_the_same_command(fresh_python):
    assert fresh_python("-m", "train").stdout == lightning_command.HELP
    done = fresh_python("-m", "train", "fit", "--config", "ctc.yaml", "--model.learning_rat", "1")
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1


def printed(call, *args):
    outcome = call(lightning_command.main, "fit", *args, "--print_config")
    assert outcome.code == 0, outcome.err
    return outcome.out


@pytest.mark.slow
def test_the_output_of_print_config_is_a_config_that_prints_the_same(call, tmp_path):
    first = printed(call, "--config", "ctc.yaml")
    again = tmp_path / "again.yaml"
    again.write_text(first, encoding="utf-8")
    assert printed(call, "--config", again) == first
    assert yaml.safe_load(first)["model"]["drafter"]["class_path"].endswith("CTC")


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_every_shipped_config_parses(call, name):
    given = yaml.safe_load((lightning_command.CONFIGS / name).read_text(encoding="utf-8"))
    values = yaml.safe_load(printed(call, "--config", name))
    for key, value in given["data"].items():
        assert values["data"][key] == value
    for key in ("max_steps", "max_epochs", "val_check_interval"):
        if key in given["trainer"]:
            assert values["trainer"][key] == given["trainer"][key]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in WHOLE])
def test_every_overlay_overrides_the_config_of_the_paper(call, name):
    below, above = (
        yaml.safe_load((lightning_command.CONFIGS / each).read_text(encoding="utf-8")) for each in ("ctc.yaml", name)
    )
    values = yaml.safe_load(printed(call, "--config", "ctc.yaml", "--config", name))
    for section, given in above.items():
        for key, value in given.items():
            assert values[section][key] == value or (section == "trainer" and key == "strategy")
    kept = [
        key for key in below["trainer"] if key not in above.get("trainer", {}) and key not in ("callbacks", "logger")
    ]
    assert kept and all(values["trainer"][key] == below["trainer"][key] for key in kept)


@pytest.mark.slow
def test_later_configs_and_arguments_override_earlier_ones(call, tmp_path):
    overlay = tmp_path / "mine.yaml"
    overlay.write_text("model: {learning_rate: 0.5, warmup_steps: 7}", encoding="utf-8")
    trunk = (
        "--model.drafter.init_args.trunk.draft_vocab_size",
        "8",
        "--model.drafter.init_args.draft_vocab_size",
        "null",
    )
    arguments = "--config", "ctc.yaml", f"--config={overlay}", "--model.warmup_steps", "9", *trunk
    values = yaml.safe_load(printed(call, *arguments))
    assert (values["model"]["learning_rate"], values["model"]["warmup_steps"]) == (0.5, 9)
    trunk = values["model"]["drafter"]["init_args"]["trunk"]
    assert trunk["num_frames"] == 12 and trunk["draft_vocab_size"] is None
    swapped = yaml.safe_load(printed(call, "--config", overlay, "--config", "ctc.yaml"))
    assert (swapped["model"]["learning_rate"], swapped["model"]["warmup_steps"]) == (3e-5, 500)


@pytest.mark.slow
def test_an_argument_of_the_drafter_is_set_on_the_command_line(call):
    given = "--model.drafter.init_args.num_frames=16"
    values = yaml.safe_load(printed(call, "--config", "ctc.yaml", given))
    assert values["model"]["drafter"]["init_args"]["trunk"]["num_frames"] == 16
    assert values["model"]["drafter"]["init_args"]["loss"]["num_labels"] == 8


def test_a_config_is_found_by_its_bare_name_and_by_its_path(tmp_path, monkeypatch):
    shipped = str(lightning_command.CONFIGS / "ctc.yaml")
    assert lightning_command.find_config("ctc.yaml") == lightning_command.find_config(shipped) == shipped
    assert lightning_command.find_config("strategy/ddp.yaml") == str(
        lightning_command.CONFIGS / "strategy" / "ddp.yaml"
    )
    assert lightning_command.with_found_configs(
        ["fit", "--config", "ctc.yaml", "--config=debug.yaml", "--a", "ctc.yaml"]
    ) == [*("fit", "--config", shipped, f"--config={lightning_command.CONFIGS / 'debug.yaml'}", "--a", "ctc.yaml")]
    (tmp_path / "ctc.yaml").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert lightning_command.find_config("ctc.yaml") == "ctc.yaml", "a file in the current folder comes first"


MISTAKES = {
    "a subcommand": (["fti"], "fti"),
    "no subcommand": (["--config", "ctc.yaml"], "fit"),
    "a top-level key": (["fit", "--config", "ctc.yaml", "--modell.base", "x"], "modell"),
    "a model key": (["fit", "--config", "ctc.yaml", "--model.learning_rat", "1"], "learning_rat"),
    "a data key": (["fit", "--config", "ctc.yaml", "--data.fils", "[a]"], "fils"),
    "a trainer key": (["fit", "--config", "ctc.yaml", "--trainer.max_stepz", "1"], "max_stepz"),
    "a drafter argument": (["fit", "--config", "ctc.yaml", "--model.drafter.init_args.num_frame", "3"], "num_frame"),
    "a drafter": (["fit", "--config", "ctc.yaml", "--model.drafter", "drafters.CTCC"], "CTCC"),
    "a type": (["fit", "--config", "ctc.yaml", "--model.learning_rate", "fast"], "learning_rate"),
    "a drafter's type": (["fit", "--config", "ctc.yaml", "--model.drafter.init_args.num_frames", "x"], "num_frames"),
    "a choice": (["fit", "--config", "ctc.yaml", "--model.base_dtype", "float8"], "base_dtype"),
    "a config": (["fit", "--config", "cct.yaml"], "no config 'cct.yaml': give a file, or one of configs/: "),
    "a config by path": (["fit", "--config=/nowhere/ctc.yaml"], "no config '/nowhere/ctc.yaml'"),
    "a config without value": (["fit", "--config"], "config"),
    "no config": (["fit"], "model.base"),
}


@pytest.mark.slow
@pytest.mark.parametrize("args, said", MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_argument_ends_in_one_line(call, args, said):
    assert said in call(lightning_command.main, *args).one_line_error("lightning")


IN_FILES = {
    "a top-level key": ("modell: {base: x}", "modell"),
    "a model key": ("model: {learning_rat: 1}", "learning_rat"),
    "a trainer key": ("trainer: {max_stepz: 1}", "max_stepz"),
    "a drafter argument": ("model: {drafter: {class_path: drafters.CTC, init_args: {num_frame: 3}}}", "num_frame"),
    "a type": ("model: {warmup_steps: soon}", "warmup_steps"),
    "no YAML": ("model: [", "mine.yaml is not a readable YAML file"),
    "a list": ("[1, 2]", "mine.yaml holds no keys"),
    "a text": ("model", "mine.yaml holds no keys"),
}


@pytest.mark.slow
@pytest.mark.parametrize("text, said", IN_FILES.values(), ids=IN_FILES)
def test_a_wrong_key_in_a_config_ends_in_one_line(call, tmp_path, text, said):
    overlay = tmp_path / "mine.yaml"
    overlay.write_text(text, encoding="utf-8")
    outcome = call(lightning_command.main, "fit", "--config", "ctc.yaml", "--config", overlay)
    assert said in outcome.one_line_error("lightning")


@pytest.mark.slow
@pytest.mark.parametrize("subcommand", ["validate", "test"])
def test_a_checkpoint_is_validated_and_tested_from_the_command_line(call, trained, subcommand):
    outcome = call(lightning_command.main, subcommand, "--config", trained.config, "--ckpt_path", trained.ckpt)
    assert outcome.code == 0, outcome.err
    assert "val/acceptance_length" in outcome.out


FLAT = {
    "CTC": {"num_frames": 6, "num_labels": 4, "num_nodes": 9, "tree": "chain"},
    "Block": {"num_frames": 5, "frames_differ": True, "num_nodes": 9, "tree": "chain"},
    "Medusa": {"num_heads": 3, "decay": 0.7, "num_nodes": 9, "tree": "chain"},
    "Hydra": {"num_heads": 3, "distillation": True, "num_nodes": 9, "width": 4},
    "EAGLE": {"noise": 0.1, "depth": 3, "num_nodes": 9, "tree": "chain"},
    "EAGLE3": {"num_unroll": 2, "decay": 0.5, "depth": 3, "num_nodes": 9},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAT)
def test_a_config_whose_drafter_has_flat_keys_is_read(call, tmp_path, name):
    overlay = tmp_path / "flat.yaml"
    node = {"class_path": f"drafters.{name}", "init_args": FLAT[name]}
    overlay.write_text(yaml.safe_dump({"model": {"drafter": node}}), encoding="utf-8")
    flags = ("--model.drafter.init_args.num_nodes", "7", "--model.drafter.init_args.top_k=3")
    values = yaml.safe_load(printed(call, "--config", "ctc.yaml", "--config", overlay, *flags))
    given = recipe.flattened(values["model"]["drafter"]["init_args"])
    options = {key.rpartition(".")[2]: value for key, value in given.items()}
    assert options.items() >= (FLAT[name] | {"num_nodes": 7, "top_k": 3}).items()
    assert given["draft.num_nodes"] == 7
