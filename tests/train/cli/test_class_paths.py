"""Class paths of earlier versions in configs and on the command line."""

import pytest
import yaml

import train
from train.cli import lightning_command
from train.cli.class_paths import NEW_CLASS_PATHS


def print_config(call, *args):
    outcome = call(lightning_command.main, "fit", *args, "--print_config")
    assert outcome.code == 0, outcome.err
    return yaml.safe_load(outcome.out)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["train.BaseTraining", "train.base_module.BaseTraining"])
def test_a_base_is_trained_by_its_class_path_of_today_and_of_earlier_versions(call, tmp_path, path):
    config = tmp_path / "base.yaml"
    config.write_text(f"model: {{class_path: {path}, init_args: {{tokenizer: t}}}}", encoding="utf-8")
    assert print_config(call, "--config", config)["model"]["class_path"].endswith("BaseTraining")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["train.FSDP2", "train.strategies.FSDP2", "train.strategies.FSDP2"])
def test_fsdp_is_found_under_its_class_paths_of_today_and_of_earlier_versions(call, tmp_path, path):
    overlay = tmp_path / "fsdp.yaml"
    overlay.write_text(f"trainer: {{strategy: {{class_path: {path}, init_args: {{timeout: 7}}}}}}", encoding="utf-8")
    for args in (["--config", overlay], ["--trainer.strategy", path, "--trainer.strategy.timeout", "7"]):
        strategy = print_config(call, "--config", "ctc.yaml", *args)["trainer"]["strategy"]
        assert strategy["class_path"].endswith("FSDP2") and strategy["init_args"]["timeout"] == 7


@pytest.mark.slow
def test_a_drafter_training_may_be_named_by_its_earlier_class_path(call, tmp_path):
    config = tmp_path / "drafter.yaml"
    drafter = "{class_path: drafters.CTC, init_args: {num_frames: 5}}"
    model = f"{{class_path: train.module.DrafterTraining, init_args: {{base: b, drafter: {drafter}}}}}"
    config.write_text(f"model: {model}", encoding="utf-8")
    model = print_config(call, "--config", config)["model"]
    assert model["class_path"].endswith("DrafterTraining")
    assert model["init_args"]["drafter"]["init_args"]["trunk"]["num_frames"] == 5


def test_every_class_path_of_today_is_a_public_class():
    later = {"AveragedWeights"}  # which never had another name
    assert {path.removeprefix("train.") for path in NEW_CLASS_PATHS.values()} == set(train.__all__) - later
    assert all(isinstance(getattr(train, name), type) for name in train.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        train.Nothing  # noqa: B018
