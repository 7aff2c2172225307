"""Logs the figures and plots of an evaluation to TensorBoard, Weights & Biases, MLflow or CSV."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from inference.reporting.exports import flat_figures
from inference.reporting.tables import Summaries

LoggerName = Literal["tensorboard", "wandb", "mlflow", "csv"]
NAME = re.compile(r"[^\w./ -]")  # characters that MLflow refuses in the name of a metric


def check_logger(name: LoggerName) -> None:
    """Raise ValueError if the packages of a logger are not installed.

    MLflow alone, without a server, keeps its runs in a database, for which mlflow-skinny lacks sqlalchemy.
    """
    modules = {"tensorboard": ["tensorboard"], "wandb": ["wandb"], "mlflow": ["mlflow"], "csv": []}[name]
    if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
        modules = ["mlflow", "sqlalchemy"]
    if not all(map(find_spec, modules)):
        raise ValueError(f"--logger {name} needs the package {name}: pip install {name}")


def make_logger(name: LoggerName, folder: Path) -> Any:
    """Make the logger of Lightning with this name.

    Args:
        name: Name of the logger.
        folder: Folder of the evaluation, below which everything is written. Weights & Biases and MLflow send to a
            server instead if their own environment variables (``WANDB_MODE``, ``MLFLOW_TRACKING_URI``) say so.
    """
    from lightning.pytorch import loggers

    folder = folder.resolve()
    if name == "tensorboard":
        return loggers.TensorBoardLogger(folder, name="logs", version="")
    if name == "csv":
        return loggers.CSVLogger(folder, name="logs", version="")
    if name == "wandb":
        return loggers.WandbLogger(folder.name, save_dir=folder, project="drafters")
    server = os.environ.get("MLFLOW_TRACKING_URI")
    return loggers.MLFlowLogger(
        "drafters",
        run_name=folder.name,
        tracking_uri=server or f"sqlite:///{folder / 'mlflow.db'}",  # MLflow 3 no longer keeps runs in plain files
        artifact_location=None if server else (folder / "mlruns").as_uri(),
    )


def log_evaluation(logger: Any, summaries: Summaries, context: Mapping[str, Any], plots: Path | None = None) -> None:
    """Log every figure as ``BENCHMARK/DRAFTER/FIGURE``, the plots, and what was run as hyper-parameters.

    Args:
        logger: A logger of Lightning.
        summaries: The summaries, by benchmark and drafter.
        context: What was run.
        plots: A folder of PNG images. CSV has no place for them.
    """
    logger.log_hyperparams(dict(context))
    logger.log_metrics(metrics(summaries), step=0)
    for path in sorted(plots.glob("*.png")) if plots else []:
        log_image(logger, f"plots/{path.stem}", path)
    logger.save()
    logger.finalize("success")
    if type(logger).__name__ == "WandbLogger":  # else the next evaluation of this process would be logged into this run
        logger.experiment.finish()


def log_image(logger: Any, name: str, path: Path) -> None:
    """Log a PNG image; in MLflow it becomes an artifact of the run."""
    kind = type(logger).__name__
    if kind == "TensorBoardLogger":
        from matplotlib import image

        logger.experiment.add_image(name, image.imread(path), 0, dataformats="HWC")
    elif kind == "WandbLogger":
        logger.log_image(name, [str(path)])
    elif kind == "MLFlowLogger":
        logger.experiment.log_artifact(logger.run_id, str(path), str(Path(name).parent))


def metrics(summaries: Summaries) -> dict[str, float]:
    """The figures of the summaries by ``BENCHMARK/DRAFTER/FIGURE``; other characters than MLflow's become ``_``."""
    found: dict[str, float] = {}
    for benchmark, by_drafter in summaries.items():
        for drafter, summary in by_drafter.items():
            for key, value in flat_figures(asdict(summary)).items():
                if isinstance(value, (int, float)):
                    parts = (NAME.sub("_", part).replace("/", "_") for part in (benchmark, drafter, key))
                    found["/".join(parts)] = float(value)
    return found
