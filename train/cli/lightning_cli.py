"""The LightningCLI behind the ``lightning`` command, imported only when something is run."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from pydoc import locate
from typing import Any, NoReturn

import lightning as L
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from data.files import output_lock
from data.module import ShareGPTData
from drafters import recipe, registry
from drafters.protocol import LearnedDrafter
from inference.runs import folder_above
from inference.timing import num_cores
from train.callbacks.console import console_callbacks, quieten_libraries
from train.callbacks.estimate import Estimate
from train.callbacks.freed_memory import FreedMemory
from train.callbacks.preemption import Preemption
from train.callbacks.resume import ExactResume
from train.callbacks.skip_non_finite_steps import SkipNonFiniteSteps
from train.callbacks.training_speed import Optimisation, Speed
from train.callbacks.tree_samples import TreeSamples
from train.checkpointing.checkpoints import AtomicCheckpointIO, check_complete, newest_complete, remove_unfinished
from train.cli import class_paths
from train.cli.wrong_values import in_plain_words
from train.module import DrafterTraining

MIN_PROCESSES = 8  # that a machine without a GPU may start for trainer.devices, however few cores it has


class OneLineParser(LightningArgumentParser):
    """Reports a wrong key or value in one line instead of a usage page, and does not accept abbreviated keys."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"allow_abbrev": False})
        self._drafter_options: dict[str, type] = {}  # of a parser for one drafter's arguments, its groups of options

    def add_class_arguments(self, theclass: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(theclass, type) and issubclass(theclass, LearnedDrafter):
            self._drafter_options = recipe.groups(theclass)
        return super().add_class_arguments(theclass, *args, **kwargs)

    def parse_object(self, obj: Any, namespace: Namespace | None = None, *args: Any, **kwargs: Any) -> Namespace:
        """Parse a drafter's arguments from a config; keys that older recipes had flat are moved into their groups."""
        if self._drafter_options:
            obj = recipe.nested(as_dict(self._without_unknown(obj)), self._drafter_options)
            namespace = self._without_unknown(namespace)
        return super().parse_object(obj, namespace, *args, **kwargs)

    def parse_args(self, args: Any = None, namespace: Any = None, *rest: Any, **kwargs: Any) -> Any:
        """Parse arguments; a drafter's ``--num_nodes=12`` is taken as ``--draft.num_nodes=12``."""
        if self._drafter_options:
            args, namespace = [self._with_group(arg) for arg in args], self._without_unknown(namespace)
        return super().parse_args(args, namespace, *rest, **kwargs)

    def _with_group(self, arg: str) -> str:
        key, equals, value = arg.removeprefix("--").partition("=")
        value = "null" if value == "None" else value  # jsonargparse has read null, and hands on Python's None
        (path,) = recipe.flattened(recipe.nested({key.removesuffix("+"): value}, self._drafter_options))
        return f"--{path}{'+' if key.endswith('+') else ''}{equals}{value}"

    def _without_unknown(self, values: Any) -> Any:
        """Values parsed earlier, without options of another drafter whose class_path has been replaced since.

        jsonargparse drops a replaced class's arguments, but not what is inside a group that both classes have. Groups
        that have not been parsed yet are dictionaries; they stay, so that a mistake in them is reported.
        """
        if not isinstance(values, Namespace):
            return values
        known = values.clone()
        for name, group in self._drafter_options.items():
            if isinstance(parsed := known.get(name), Namespace):
                options = {field.name for field in fields(group)}
                known[name] = Namespace(**{key: value for key, value in vars(parsed).items() if key in options})
        return known

    def error(self, message: str, *args: Any, **kwargs: Any) -> NoReturn:
        text = in_plain_words(str(message))
        text = re.sub(r"^--(?=\w+ takes)", "", text)  # jsonargparse names the argument without the keys above it
        if self._drafter_options:
            text = text.removeprefix("--")  # likewise for an option in one of the drafter's groups
        class_path = re.search(r"model\.drafter\": .*Got value: (?:Namespace\(class_path=')?(drafters\.\w+)", text)
        if class_path and class_path[1] not in drafters_to_train():
            text = no_drafter_to_train(class_path[1])
        causes = re.findall(
            r"Option '[^']+' is not accepted|No module named '[^']+'|Subcommand '[^']+' does not accept[^.]*\S+", text
        )
        self.exit(2, f"lightning: error: {causes[-1] if causes else text} (lightning fit --help lists every key)\n")


def as_dict(values: Namespace | dict[str, Any]) -> dict[str, Any]:
    """The top level of a namespace or dictionary; groups of options become dictionaries."""
    items = vars(values) if isinstance(values, Namespace) else values
    return {name: as_dict(value) if isinstance(value, Namespace) else value for name, value in items.items()}


class DrafterCLI(LightningCLI):
    """A LightningCLI that derives what other arguments already determine.

    The tokenizer of the data is the base's, and checkpoints and TensorBoard logs go below
    ``trainer.default_root_dir``.
    """

    command: str
    locks: ExitStack  # of the folders that checkpoints are written to

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's subcommands fit, validate and test, or the one that the command line begins with.

        There is no predict for drafters. The parsers of further subcommands would take most of the time to parse.
        """
        known = {name: skipped for name, skipped in LightningCLI.subcommands().items() if name != "predict"}
        return {name: known[name] for name in sys.argv[1:2] if name in known} or known

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(ExactResume, "resume")
        parser.add_lightning_class_args(SkipNonFiniteSteps, "faults")
        parser.add_lightning_class_args(TreeSamples, "trees")

    def _parse_ckpt_path(self) -> None:
        """Check the checkpoint. Lightning's method would let its hyper-parameters override the command line."""
        path = Path(self.config[self.config.subcommand].get("ckpt_path") or "")
        if path.is_file():
            check_complete(path)

    def before_instantiate_classes(self) -> None:
        config = self.config.get(self.subcommand, self.config) if self.subcommand else self.config
        check_trainer(config.trainer)
        model = config.model.get("init_args") or config.model
        if isinstance(model.get("drafter"), Namespace):
            check_drafter(model.drafter.class_path)
        if config.data.tokenizer is None:
            config.data.tokenizer = model.get("base") or model.get("tokenizer")
        run = config.trainer.default_root_dir or "runs/default"
        self.checkpoint_folders = []
        for callback in config.trainer.callbacks or []:
            if callback.class_path.endswith("ModelCheckpoint"):
                callback.init_args.dirpath = callback.init_args.get("dirpath") or f"{run}/checkpoints"
                self._lock(callback.init_args.dirpath)
                callback.init_args.enable_version_counter = False  # the best drafter is best.ckpt, not best-v1.ckpt
                if self.subcommand == "fit" and "://" not in callback.init_args.dirpath:
                    folder_above(Path(callback.init_args.dirpath) / "last.ckpt")
                self.checkpoint_folders.append(callback.init_args.dirpath)
                self._require_empty(Path(callback.init_args.dirpath), config)
        if config.get("ckpt_path") == "last" and (path := newest_complete(self.checkpoint_folders)):
            config.ckpt_path = str(path)
        if config.trainer.logger in (None, True):
            logger = Namespace(save_dir=run, name="tensorboard", default_hp_metric=False)
            config.trainer.logger = Namespace(
                class_path="lightning.pytorch.loggers.TensorBoardLogger", init_args=logger
            )

        if config.get("weights_only") is None and "weights_only" in config:
            config.weights_only = True  # never run code from a checkpoint

    def _lock(self, folder: str) -> None:
        """Let no other training write checkpoints to a folder; one process of a distributed training holds the lock."""
        is_writer = self.subcommand == "fit" and getattr(rank_zero_only, "rank", 0) == 0
        if is_writer and "://" not in folder and folder not in self.checkpoint_folders:
            self.locks.enter_context(output_lock(folder))

    def _require_empty(self, folder: Path, config: Namespace) -> None:
        is_new = self.subcommand == "fit" and not config.get("ckpt_path")
        if is_new and any(folder.glob("*.ckpt")):
            raise ValueError(
                f"{folder} already holds checkpoints: go on with --ckpt_path last, or give another "
                "--trainer.default_root_dir"
            )

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        settings = self._get(self.config_init, "trainer")
        callbacks = console_callbacks(
            settings.callbacks or [],
            has_progress_bar=settings.enable_progress_bar is not False,
            has_summary=settings.enable_model_summary is not False,
        )
        self.trainer_defaults["callbacks"] = [*self.trainer_defaults["callbacks"], *callbacks]
        try:
            return super().instantiate_trainer(**kwargs | {"enable_model_summary": False})
        except (MisconfigurationException, TypeError) as error:
            if "backend found" in str(error):
                raise ValueError(f"{error} Pass --trainer.accelerator cpu or auto") from error
            if "`devices` selected" in str(error):
                raise ValueError(f"{error} Pass --trainer.devices 1 or auto") from error
            raise

    def after_instantiate_classes(self) -> None:
        self.model.command = self.command
        self.model.is_resumed = self._get(self.config, "ckpt_path") not in (None, "last")  # "last": there is none yet
        if type(self.trainer.strategy._checkpoint_io) in (type(None), TorchCheckpointIO):
            self.trainer.strategy._checkpoint_io = AtomicCheckpointIO()
        if self.subcommand == "fit" and self.trainer.is_global_zero:
            for folder in self.checkpoint_folders:
                remove_unfinished(folder)


def drafters_to_train() -> list[str]:
    """Return the class paths of the registered learned drafters."""
    return [registry.class_path(kind) for kind in registry.learned().values()]


def no_drafter_to_train(path: str) -> str:
    return f"{path} is no drafter to train: give --model.drafter one of {', '.join(drafters_to_train())}"


def check_drafter(class_path: str) -> None:
    """Check that a config names the class of a learned drafter; jsonargparse would also call any function.

    Raises:
        ValueError: It names something else.
    """
    kind = locate(class_path)
    if not isinstance(kind, type) or not issubclass(kind, LearnedDrafter):
        raise ValueError(no_drafter_to_train(class_path))


def check_trainer(trainer: Namespace) -> None:
    """Check values that Lightning would divide by, or start processes for.

    Raises:
        ValueError: A value is out of range.
    """
    for name in ("val_check_interval", "accumulate_grad_batches"):
        value = trainer.get(name)
        if isinstance(value, (int, float)) and not value > 0:
            raise ValueError(f"trainer.{name} must be above 0, not {value}")
    is_cpu = trainer.get("accelerator") == "cpu" or not torch.cuda.is_available()
    devices = trainer.get("devices")
    count = int(devices) if str(devices).isdecimal() else 1
    if is_cpu and count > max(MIN_PROCESSES, num_cores()):
        raise ValueError(
            f"trainer.devices is {count}, which starts as many processes on {num_cores()} cores: pass at most "
            f"{max(MIN_PROCESSES, num_cores())}"
        )


def read_configs(args: list[str]) -> list[dict]:
    """Return the contents of the files after ``--config``."""
    paths = [value for flag, value in pairwise(args) if flag == "--config"]
    paths += [arg.partition("=")[2] for arg in args if arg.startswith("--config=")]
    return [read_config(path) for path in paths]


def names_a_class(configs: list[dict]) -> bool:
    """Whether a config names the class of its model, as configs/base/tiny.yaml does, instead of `DrafterTraining`.

    If none does, the keys of `DrafterTraining` are directly under ``model``, where --help and errors name them.
    """
    models = [config.get("model") for config in configs]
    return any(isinstance(model, dict) and "class_path" in model for model in models)


def read_config(path: str) -> dict:
    """Return the contents of a YAML file, or raise ValueError if it is not a mapping."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise ValueError(f"{path} is not a readable YAML file: {error}") from error
    if not isinstance(values, dict | None):
        raise ValueError(f"{path} holds no keys: a config looks like configs/ctc.yaml")
    return values or {}


def run(args: list[str], command: str) -> None:
    """Parse the arguments and run the command.

    Args:
        args: Arguments after ``lightning``, with paths of configs.
        command: The command line as the user wrote it.
    """
    quieten_libraries()
    class_paths.in_configs()
    DrafterCLI.command, DrafterCLI.locks = command, ExitStack()
    sys.argv[1:] = class_paths.in_arguments(args)
    configs = read_configs(args)
    has_class = names_a_class(configs)
    with DrafterCLI.locks:
        DrafterCLI(
            L.LightningModule if has_class else DrafterTraining,
            ShareGPTData,
            subclass_mode_model=has_class,
            trainer_defaults={
                "use_distributed_sampler": False,  # the data module distributes batches by length itself
                "callbacks": [Preemption(), Speed(), Optimisation(), Estimate(), FreedMemory()],
            },
            save_config_kwargs={"overwrite": True},
            parser_class=OneLineParser,
            seed_everything_default=0,
        )
