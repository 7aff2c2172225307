"""What `lightning fit` shows in the terminal."""

import pytest

from train.cli import lightning_command


@pytest.mark.slow
def test_a_training_shows_full_metric_names_and_the_number_of_trained_parameters(call, write_recipe, tmp_path):
    config = write_recipe(tmp_path, enable_progress_bar=True, enable_model_summary=True, logger=None)
    outcome = call(lightning_command.main, "fit", "--config", config)
    assert outcome.code == 0, outcome.err
    assert "val/acceptance_length: " in outcome.out and "train/loss: " in outcome.out and "v_num" not in outcome.out
    assert "Epoch 1 " in outcome.out and "/-2" not in outcome.out
    assert "parameters of CTC; the base" in outcome.out and "FLOPs" not in outcome.out
    assert "Tip" not in outcome.err and "LeafSpec" not in outcome.err


@pytest.mark.slow
def test_a_progress_bar_of_the_config_replaces_ours(call, write_recipe, tmp_path):
    bar = {"class_path": "lightning.pytorch.callbacks.TQDMProgressBar"}
    config = write_recipe(tmp_path, max_steps=1, limit_val_batches=0, enable_progress_bar=True, callbacks=[bar])
    outcome = call(lightning_command.main, "fit", "--config", config)
    assert outcome.code == 0, outcome.err
