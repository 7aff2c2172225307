"""The two commands: their help, their arguments, and the configurations."""

import os
import re
from importlib import import_module
from inspect import signature

import pytest
import torch
import yaml

from tests.conftest import refusal
from train.arguments import option_groups, spelled_out
from train.cli import (
    COMMANDS,
    CONFIGS,
    LIGHTNING_HELP,
    find_config,
    parse,
    run_drafters,
    run_lightning,
    with_found_configs,
)

NAMES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))
OVERLAYS = "debug.yaml", "ctc_served.yaml", "qwen_coder_1.5b.yaml"
WHOLE = [name for name in NAMES if name not in OVERLAYS and not name.startswith("strategy/")]


# ---- help


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"], ["help"]])
def test_without_a_command_and_for_help_a_table_is_printed(call, args):
    listed = call(run_drafters, *args)
    assert (listed.code, listed.err) == (0, "")
    for name, command in COMMANDS.items():
        assert any(row.split() == [name, *command.summary.split()] for row in listed.out.splitlines())
    assert vars(call(run_lightning, *args)) == {"code": 0, "out": LIGHTNING_HELP, "err": ""}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_each_of_its_options(call, name):
    module, _, function = COMMANDS[name].target.partition(":")
    function = getattr(import_module(module), function)
    outcome = call(run_drafters, name, "--help")
    assert outcome.code == 0 and outcome.err == ""
    said, groups = " ".join(outcome.out.split()), option_groups(function)
    documented = dict.fromkeys(signature(function).parameters.keys() - groups.keys(), function.__doc__)
    for group in groups.values():
        inherited = "\n".join(parent.__doc__ or "" for parent in group.__mro__)
        documented |= dict.fromkeys(signature(group).parameters, inherited)
    for option, text in documented.items():
        line = text.partition(f" {option}: ")[2].split(".")[0].split(";")[0]
        assert f"--{option}" in said and line and " ".join(line.split()[:6]) in said, f"--{option} has no help line"


def test_a_drafter_that_does_not_exist_is_reported_before_anything_is_loaded(call):
    outcome = call(run_drafters, "eval", "--base", "nowhere", "--benchmark", "nothing", "--drafter", "nonsense")
    assert "unknown drafter 'nonsense'" in outcome.one_line_error("drafters")


@pytest.mark.slow
@pytest.mark.parametrize("subcommand", ["fit", "validate", "test"])
def test_every_subcommand_of_lightning_explains_its_keys(call, subcommand):
    assert re.search(rf"^  {subcommand} {{3,}}\S", LIGHTNING_HELP, re.MULTILINE)
    outcome = call(run_lightning, subcommand, "--help")
    assert outcome.code == 0 and outcome.err == ""
    assert all(key in outcome.out for key in ("--config", "--model.base", "--data.files", "--trainer.max_steps"))
    assert "Folder or hub id of the frozen base" in outcome.out, "the help of a key is its line in the docstring"


# ---- arguments of drafters


@pytest.mark.parametrize(
    "args, expected",
    [
        (["--max-new-tokens", "5"], ["--max_new_tokens=5"]),
        (["--drafter", "a", "--drafter=b:k=1"], ["--drafter+=a", "--drafter+=b:k=1"]),
        (["x.ckpt", "out", "--base", "b"], ["--ckpt=x.ckpt", "--out=out", "--base=b"]),
        (["--base", "b", "x.ckpt", "out"], ["--base=b", "--ckpt=x.ckpt", "--out=out"]),
        (["--offset", "-1"], ["--offset=-1"]),
        (["--limit", "5", "--help"], ["--help"]),
        (["--overwrite", "--limit", "2"], ["--overwrite=true", "--limit=2"]),
        (["--overwrite", "false", "--limit=2"], ["--overwrite=false", "--limit=2"]),
        (["--limit"], ["--limit"]),
    ],
)
def test_arguments_are_spelled_out_for_jsonargparse(args, expected):
    assert spelled_out(args, ["ckpt", "out"], {"drafter"}, {"overwrite"}) == expected


def test_the_last_positional_argument_may_be_a_list():
    spelled = ["--folders+=a", "--folders+=b", "--out=c"]
    assert spelled_out(["a", "b", "--out", "c"], ["folders"], {"folders"}, ()) == spelled


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--limit 1.5", "limit must be int, not 1.5"),
        ("--repeats x", "repeats must be int or 'auto', not x"),
        ("--concurrency 1.5", "concurrency must be int, not 1.5"),
        ("--dtype half", "dtype must be 'float32', 'bfloat16', 'float16', 'int8', 'nf4', not half"),
        ("--temperature hot", "temperature must be float, not hot"),
        ("--overwrite=maybe", "overwrite must be bool, not maybe"),
        ("--frob 3", "unrecognized arguments: --frob=3"),
        ("--limit", "argument --limit: expected one argument"),
    ],
)
def test_a_value_of_another_type_is_refused_in_words(words, said):
    assert refusal(parse, "eval", words.split()) == f"{said} (drafters eval --help lists the arguments)"


def test_options_of_a_group_are_flat_on_the_command_line_and_lists_are_repeated_or_in_brackets():
    function, values = parse("verify", ["--base", "b", "--drafter", "anpd", "--drafter", "[ngram,rest=x]"])
    assert values["drafter"] == ["anpd", "ngram", "rest=x"]
    (name, group), *_ = option_groups(function).items()
    assert values[name] == group(base="b") and "base" not in values


def test_an_option_is_written_out_and_a_misspelt_one_is_answered_by_the_nearest(call):
    for word, near in {"--limi": "--limit", "--bsae": "--base", "--max-new-token": "--max_new_tokens"}.items():
        line = call(run_drafters, "verify", word, "3").one_line_error("drafters")
        assert f"{word.replace('-n', '_n').replace('-t', '_t')}: did you mean {near}?" in line
    assert "did you mean" not in call(run_drafters, "verify", "--xyz", "3").one_line_error("drafters")


# ---- lightning


def printed(call, *args):
    outcome = call(run_lightning, "fit", *args, "--print_config").succeeded()
    return outcome.out


@pytest.mark.slow
def test_the_output_of_print_config_is_a_config_that_prints_the_same(call, tmp_path):
    first = printed(call, "--config", "ctc.yaml")
    (tmp_path / "again.yaml").write_text(first, encoding="utf-8")
    assert printed(call, "--config", tmp_path / "again.yaml") == first


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_every_shipped_config_parses(call, name):
    given = yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))
    values = yaml.safe_load(printed(call, "--config", name))
    assert all(values["data"][key] == value for key, value in given["data"].items())
    steps = {"max_steps", "max_epochs"} & given["trainer"].keys()
    assert all(values["trainer"][key] == given["trainer"][key] for key in steps)
    assert holds(values["model"]["drafter"]["init_args"], given["model"]["drafter"]["init_args"])


def holds(values, given):
    """Whether values have what an overlay gives, in the groups of a drafter, too."""
    if isinstance(given, dict):
        return all(holds(values[key], value) for key, value in given.items())
    return values == given


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WHOLE])
def test_every_overlay_overrides_the_config_of_the_paper(call, name):
    below, above = (yaml.safe_load((CONFIGS / each).read_text(encoding="utf-8")) for each in ("ctc.yaml", name))
    values = yaml.safe_load(printed(call, "--config", "ctc.yaml", "--config", name))
    for section, given in above.items():
        for key, value in given.items():
            assert holds(values[section][key], value) or (section == "trainer" and key == "strategy")
    kept = below["trainer"].keys() - above.get("trainer", {}).keys() - {"callbacks", "logger"}
    assert kept and all(values["trainer"][key] == below["trainer"][key] for key in kept)


def test_another_drafter_than_the_recipes_begins_with_a_config_that_empties_the_node(call, tmp_path):
    another = "--model.drafter", "drafters.Block", "--model.drafter.init_args.trunk.lookup", "true"
    line = call(run_lightning, "fit", "--config", "smollm2.yaml", *another).one_line_error("lightning")
    assert "'num_labels'" in line and "model: {drafter: null}" in line
    (tmp_path / "empty.yaml").write_text("model: {drafter: null}", encoding="utf-8")
    values = yaml.safe_load(printed(call, "--config", "smollm2.yaml", "--config", tmp_path / "empty.yaml", *another))
    assert values["model"]["drafter"]["class_path"] == "drafters.Block" and values["data"]["max_length"] == 384


IN_DRAFTER = "--model.drafter.init_args.loss."


@pytest.mark.slow
@pytest.mark.parametrize(
    "option, near",
    [
        (f"{IN_DRAFTER}num_a", "--loss.num_anchors"),  # begins with it
        (f"{IN_DRAFTER}num_ankers", "--loss.num_anchors"),
        ("--model.learning_rat", "--model.learning_rate"),
        ("--data.batchsize", "--data.batch_size"),
        ("--trainer.callbacks+=ModelCheckpoint --trainer.callbacks.dirpat", "--dirpath"),
        ("model: {lerning_rate: 3}", "--model.learning_rate"),
        ("model: {drafter: {init_args: {loss: {num_anchor: 3}}}}", "--loss.num_anchors"),
        ("model: {drafter: {init_args: {loss: {xyz: 3}}}}", None),
    ],
)
def test_no_key_is_abbreviated_at_any_depth_and_the_nearest_is_named(call, tmp_path, option, near):
    (tmp_path / "own.yaml").write_text(option)
    words = (*option.split(), "3") if option.startswith("--") else ("--config", tmp_path / "own.yaml")
    line = call(run_lightning, "fit", "--config", "ctc.yaml", *words, "--print_config").one_line_error("lightning")
    assert f": did you mean {near}?" in line if near else "xyz" in line and "did you mean" not in line
    assert "Namespace(" not in line


@pytest.mark.slow
def test_aliases_that_stand_for_too_much_are_refused_and_others_are_read(call, tmp_path):
    def nested(depth, last):
        inner = (f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, depth))
        rows = [*(["a0: &a0 [x, x]"] if depth else []), *inner, last]
        (tmp_path / "own.yaml").write_text("\n".join(rows))
        return call(run_lightning, "fit", "--config", "ctc.yaml", "--config", tmp_path / "own.yaml", "--print_config")

    for bomb in ("data: {files: *a29}", "data: {<<: [*a29]}"):
        assert "more than 20 aliases (*): write out" in nested(30, bomb).one_line_error("lightning")
    assert nested(0, "data: &d {files: *d}").one_line_error("lightning"), "an alias inside what it stands for"
    once = nested(0, "data: {files: &f [a.json, b.json], val_files: *f}").succeeded()
    assert yaml.safe_load(once.out)["data"]["val_files"] == ["a.json", "b.json"]


@pytest.mark.slow
@pytest.mark.parametrize("many", [False, True])
def test_a_logger_without_its_package_says_what_to_install(call, write_recipe, tmp_path, many):
    words = [f"--trainer.logger{'+' * many}=MLFlowLogger"]
    line = call(run_lightning, "fit", "--config", write_recipe(tmp_path), *words).one_line_error("lightning")
    assert re.search(r"error: lightning.pytorch.loggers.MLFlowLogger is not installed: pip install 'mlflow\S+'$", line)


def test_a_config_is_found_by_its_bare_name_and_by_its_path(tmp_path, monkeypatch):
    shipped = str(CONFIGS / "ctc.yaml")
    assert find_config("ctc.yaml") == find_config(shipped) == shipped
    words = ["fit", "--config", "ctc.yaml", "--config=strategy/ddp.yaml", "-c", "debug.yaml", "--a", "ctc.yaml"]
    overlays = f"--config={CONFIGS / 'strategy' / 'ddp.yaml'}", "-c", str(CONFIGS / "debug.yaml")
    assert with_found_configs(words) == ["fit", "--config", shipped, *overlays, "--a", "ctc.yaml"]
    (tmp_path / "ctc.yaml").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert find_config("ctc.yaml") == "ctc.yaml", "a file in the current folder comes first"


@pytest.mark.slow
def test_a_checkpoint_is_tested_from_the_command_line(call, trained):
    outcome = call(run_lightning, "test", "--config", trained.config, "--ckpt_path", trained.ckpt).succeeded()
    assert "val/acceptance_length" in outcome.out


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WHOLE if name != "ctc.yaml"])  # which the next one trains
def test_every_config_takes_a_step_with_the_debug_overlay(call, tmp_path, name):
    words = ["--config", name, "--config", "debug.yaml", "--trainer.default_root_dir", tmp_path]
    short = ["--trainer.max_steps", 1, "--trainer.val_check_interval", 1, "--trainer.limit_val_batches", 0]
    call(run_lightning, "fit", *words, *short, "--trainer.logger", "false").succeeded()
    assert any((tmp_path / "checkpoints").glob("*.ckpt"))


@pytest.mark.slow
def test_the_papers_config_trains_for_four_steps_with_the_debug_overlay(fork, tmp_path):
    words = ["fit", "--config", "ctc.yaml", "--config", "debug.yaml", "--trainer.default_root_dir", tmp_path]
    done = fork(*words)
    assert done.wait() == 0, done.log.read_text()[-2000:]
    said = done.log.read_text()
    assert "acceptance length" in said and "parameters of CTC; the base" in said
    assert "Tip" not in said and "LeafSpec" not in said and "FLOPs" not in said
    saved = torch.load(tmp_path / "checkpoints" / "best.ckpt", weights_only=True)
    assert saved["measured"]["step"] in (2, 4) and saved["measured"]["acceptance_length"] >= 1
    assert os.listdir(tmp_path / "tensorboard") == ["version_0"]
    again = fork(*words)
    assert again.wait() == 2 and "already holds checkpoints" in again.log.read_text()
