"""What a training run shows in the terminal: its progress bar, and the size of what it trains."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelSummary, ProgressBar, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.progress import BarColumn, ProgressColumn
from rich.table import Column

from train.module import DrafterTraining

ADVERTISEMENTS = "💡 Tip", "TPU available: False"


class TrainingProgressBar(RichProgressBar):
    """Lightning's progress bar, in which the bar gets narrower so that names and values are never cut off."""

    def __init__(self) -> None:
        super().__init__(theme=RichProgressBarTheme(metrics_text_delimiter="\n"))

    def _init_progress(self, trainer: L.Trainer) -> None:
        super()._init_progress(trainer)
        if self._metric_component is not None:
            _keep_on_one_line(self._metric_component)

    def configure_columns(self, trainer: L.Trainer) -> list:
        columns = super().configure_columns(trainer)
        for column in columns:
            if not isinstance(column, BarColumn):
                _keep_on_one_line(column)
        return columns

    def _get_train_description(self, current_epoch: int) -> str:
        if self.trainer.max_epochs is not None and self.trainer.max_epochs > 0:
            return super()._get_train_description(current_epoch)
        # The number of steps ends the run, so the number of epochs is not known.
        return f"Epoch {current_epoch}".ljust(len(self.validation_description))

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """Return the metrics of the progress bar, without the logger's version number."""
        return {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}


def _keep_on_one_line(column: ProgressColumn) -> None:
    column._table_column = Column(no_wrap=True)


class ParameterCount(L.Callback):
    """Prints how many parameters are trained, and the base they are trained for.

    Lightning's own summary counts floating-point operations, which are always 0 for a drafter: it has no single
    forward pass, and the base stays outside of the module.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        text = f"training {num_parameters(pl_module):,} parameters of {type(pl_module).__name__}"
        if isinstance(pl_module, DrafterTraining):
            base = pl_module.base
            text = (
                f"training {num_parameters(pl_module.drafter):,} parameters of {type(pl_module.drafter).__name__}; "
                f"the base {base.name} stays frozen ({num_parameters(base.model):,} parameters, "
                f"{str(base.model.dtype).removeprefix('torch.')})"
            )
        rank_zero_only(print)(text)


def num_parameters(module: Any) -> int:
    """Return the number of parameters of a module, also if DeepSpeed's stage 3 has partitioned them."""
    return sum(getattr(weight, "ds_numel", weight.numel()) for weight in module.parameters())


def console_callbacks(callbacks: list[L.Callback], has_progress_bar: bool, has_summary: bool) -> list[L.Callback]:
    """The callbacks that replace Lightning's progress bar and summary.

    Args:
        callbacks: Callbacks of the config; a progress bar or a summary among them is used instead of ours.
        has_progress_bar: Whether the run shows a progress bar.
        has_summary: Whether the run prints what it trains.
    """
    ours: list[L.Callback] = []
    if has_progress_bar and not any(isinstance(callback, ProgressBar) for callback in callbacks):
        ours.append(TrainingProgressBar())
    if has_summary and not any(isinstance(callback, ModelSummary) for callback in callbacks):
        ours.append(ParameterCount())
    return ours


def quieten_libraries() -> None:
    """Hide Lightning's advertisements, and warnings about deprecated functions that Lightning itself calls."""
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(f"{package}.utilities.rank_zero").addFilter(_is_no_advertisement)


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(ADVERTISEMENTS)
