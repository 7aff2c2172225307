"""The LightningCLI behind the ``lightning`` command, imported only when something is run."""

import logging
import os
import re
import sys
import warnings
from argparse import ArgumentError
from contextlib import ExitStack
from pathlib import Path

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.callbacks import LambdaCallback, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from data.files import output_lock
from data.module import ShareGPTData
from drafters.registry import find_class
from inference.runs import folder_above
from train.arguments import ExactParser
from train.callbacks import ShortProgressBar, SkipNonFiniteSteps, Speed
from train.checkpoints import AtomicCheckpointIO, check_complete, newest_complete
from train.memory import MemoryEstimate
from train.module import DrafterTraining
from train.resume import ExactResume, Preemption

# What Lightning says of a logger, wrapped by jsonargparse.
NOT_INSTALLED = re.compile(r"given class_path '([\w.]+)': [^{}]*?HINT: Try running `pip install -U '?([^'`]+)")


class LightningParser(ExactParser, LightningArgumentParser):
    """The parser of ``lightning``."""


def run(
    args: list[str], command: str, module: type[L.LightningModule] = DrafterTraining, tokenizer: str = "model.base"
) -> None:
    """Parse the arguments after ``lightning``, and train or validate; ValueError if the arguments are wrong.

    ``command`` is the command line as the user wrote it, ``module`` what is trained, and ``tokenizer`` the option that
    names the tokenizer of the data.
    """
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # this and the next: what Lightning calls
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    for package in ("lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(f"{package}.utilities.rank_zero")
        logger.addFilter(lambda record: not record.getMessage().startswith(("💡 Tip", "TPU available: False")))
    sys.argv[1:] = args  # Lightning starts the other processes of a training with them
    try:
        DrafterCLI(command, module, tokenizer)
    except (ArgumentError, ValueError) as error:
        if missing := NOT_INSTALLED.search(" ".join(str(error).split())):
            raise ValueError(f"{missing[1]} is not installed: pip install '{missing[2]}'") from error
        if isinstance(error, ValueError):
            raise
        # A message about a drafter's options is wrapped in several about what a drafter may be.
        _, of_drafter, cause = str(error).rpartition("callable class: ")
        if of_drafter and "does not accept option" in cause:  # jsonargparse keeps options when the class changes
            cause += " (for another drafter than the recipe's, first give a config with model: {drafter: null})"
        hint = "lightning fit --help lists every key, --model.drafter.help CLASS a drafter's options"
        raise ValueError(f"{cause} ({hint})") from error


class DrafterCLI(LightningCLI):
    """A LightningCLI over a module and `ShareGPTData` that derives what other arguments already determine.

    The tokenizer of the data is the base's, and checkpoints and TensorBoard logs go below
    ``trainer.default_root_dir``. The arguments are those of `run`.
    """

    def __init__(self, command: str, module: type[L.LightningModule], tokenizer: str) -> None:
        self.tokenizer = tokenizer
        self.folders: list[str] = []  # of the checkpoints
        self.locks = ExitStack()  # of these folders
        for_the_card = LambdaCallback(on_save_checkpoint=lambda *args: args[-1].update(command=command))
        with self.locks:
            super().__init__(
                module,
                ShareGPTData,
                trainer_defaults={
                    "use_distributed_sampler": False,  # the data module distributes batches by length itself
                    "enable_model_summary": False,  # the memory estimate says what is trained
                    "callbacks": [Preemption(), Speed(), MemoryEstimate(), for_the_card],
                },
                save_config_kwargs={"overwrite": True},
                seed_everything_default=0,
                parser_class=LightningParser,
                auto_configure_optimizers=False,
            )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's subcommands fit, validate and test, or the one that the command line begins with.

        There is no predict for drafters. The parsers of further subcommands would take most of the time to parse.
        """
        commands = {name: skipped for name, skipped in LightningCLI.subcommands().items() if name != "predict"}
        return {name: commands[name] for name in sys.argv[1:2] if name in commands} or commands

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(ExactResume, "resume")
        parser.add_lightning_class_args(SkipNonFiniteSteps, "non_finite")
        parser.link_arguments(self.tokenizer, "data.tokenizer")

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning's method lets the hyper-parameters of a checkpoint override the command line."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        if drafter := config.model.get("drafter"):
            find_class(drafter.class_path)  # raises ValueError for another class or function, which would be called
        run = config.trainer.default_root_dir or "runs/default"
        # Lightning saves one there before SLURM starts the same command again.
        is_requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0" and any(Path(run).glob("hpc_ckpt_*.ckpt"))
        if self.subcommand == "fit" and is_requeued and not config.ckpt_path:
            config.ckpt_path = "last"
        for callback in config.trainer.callbacks or []:
            if callback.class_path.endswith("ModelCheckpoint"):
                options = callback.init_args
                options.dirpath = options.get("dirpath") or f"{run}/checkpoints"
                options.enable_version_counter = False  # the best drafter is best.ckpt, not best-v1.ckpt
                self._use_folder(options.dirpath, config)
        if config.ckpt_path == "last" and (newest := newest_complete([*self.folders, run])):
            config.ckpt_path = str(newest)
        elif Path(config.ckpt_path or "").is_file():
            check_complete(Path(config.ckpt_path))
        if config.trainer.logger in (None, True):
            logger = Namespace(save_dir=run, name="tensorboard", default_hp_metric=False)
            config.trainer.logger = Namespace(
                class_path="lightning.pytorch.loggers.TensorBoardLogger", init_args=logger
            )
        if config.weights_only is None:
            config.weights_only = True  # never run code from a checkpoint

    def _use_folder(self, folder: str, config: Namespace) -> None:
        """Let no other training write checkpoints to a folder, and a new one only if it holds none."""
        is_new = folder not in self.folders
        self.folders.append(folder)
        if self.subcommand != "fit" or "://" in folder:
            return
        if is_new and getattr(rank_zero_only, "rank", 0) == 0:  # one process of a distributed training holds the lock
            folder_above(Path(folder) / "last.ckpt")  # raises ValueError where nothing can be written
            self.locks.enter_context(output_lock(folder))
        if not config.ckpt_path and any(Path(folder).glob("*.ckpt")):
            raise ValueError(
                f"{folder} already holds checkpoints: go on with --ckpt_path last, or give another "
                "--trainer.default_root_dir"
            )

    def after_instantiate_classes(self) -> None:
        if type(self.trainer.strategy) is DDPStrategy:
            self.trainer.strategy._ddp_kwargs.setdefault("gradient_as_bucket_view", True)  # no second copy of them
        if type(self.trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            self.trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        callbacks: list[L.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [ShortProgressBar() if type(callback) is RichProgressBar else callback for callback in callbacks]
