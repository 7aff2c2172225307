"""Logs the numbers of an evaluation to TensorBoard, Weights & Biases, MLflow or CSV, through Lightning's loggers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from inference.reporting.tables import Summaries

LoggerName = Literal["tensorboard", "wandb", "mlflow", "csv"]
PACKAGES: dict[LoggerName, str] = {"wandb": "wandb", "mlflow": "mlflow-skinny", "tensorboard": "tensorboard"}
NAME = re.compile(r"[^\w./ -]")  # characters that MLflow refuses in the name of a metric


def make_logger(name: LoggerName, folder: Path) -> Any:
    """Make the logger of Lightning with this name.

    Args:
        name: Name of the logger.
        folder: Folder of the evaluation, below which everything is written. Weights & Biases and MLflow send to a
            server instead if their own environment variables (``WANDB_MODE``, ``MLFLOW_TRACKING_URI``) say so.

    Raises:
        ValueError: The package of the logger is not installed.
    """
    from lightning.pytorch import loggers

    try:
        if name == "tensorboard":
            return loggers.TensorBoardLogger(folder, name="logs", version="")
        if name == "csv":
            return loggers.CSVLogger(folder, name="logs", version="")
        if name == "wandb":
            return loggers.WandbLogger(folder.resolve().name, save_dir=folder, project="drafters")
        return loggers.MLFlowLogger("drafters", run_name=folder.resolve().name, save_dir=str(folder / "mlruns"))
    except ModuleNotFoundError as error:
        package = PACKAGES.get(name, name)
        raise ValueError(f"--logger {name} needs the package {package}: pip install {package}") from error


def log_evaluation(logger: Any, summaries: Summaries, context: Mapping[str, Any]) -> None:
    """Log every number of the summaries as ``BENCHMARK/DRAFTER/FIGURE``, and what was run as hyper-parameters.

    Args:
        logger: A logger of Lightning.
        summaries: The summaries, by benchmark and drafter.
        context: What was run.
    """
    logger.log_hyperparams(dict(context))
    logger.log_metrics(metrics(summaries), step=0)
    logger.save()
    logger.finalize("success")
    if type(logger).__name__ == "WandbLogger":  # else the next evaluation of this process would be logged into this run
        logger.experiment.finish()


def metrics(summaries: Summaries) -> dict[str, float]:
    """The numbers of the summaries by ``BENCHMARK/DRAFTER/FIGURE``; other characters than MLflow's become ``_``."""
    found: dict[str, float] = {}
    for benchmark, by_drafter in summaries.items():
        for drafter, summary in by_drafter.items():
            values = vars(summary) | (vars(summary.served) if summary.served else {})
            numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
            for key, value in {**numbers, **{f"quality {name}": of for name, of in summary.quality.items()}}.items():
                parts = (NAME.sub("_", part).replace("/", "_") for part in (benchmark, drafter, key))
                found["/".join(parts)] = float(value)
    return found
