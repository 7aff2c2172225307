"""Train several drafters with the same base, text, steps and seeds, and simulate their decoding; resumable."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import lightning as L
import torch
import yaml
from torch import Tensor

import drafters
from benchmarks.recipes import grouped
from data.benchmarks import load_questions
from data.conversations import user_message
from data.files import read_json, write_text
from drafters import checkpoint
from drafters.protocol import LearnedDrafter
from inference.model_drafters import with_draft_options
from inference.prompts import encode_question
from inference.regenerate.answerers import decode_batch
from inference.verifier.base import Base, base_hash
from train import lightning_cli
from train.checkpoints import read_checkpoint
from train.commands import export
from train.resume import EXIT_CODES
from train.validation import draft_answer, simulated_steps

BUDGETS = (1, 2, 4, 8, 16, 32, 64)
TIME = "training.json"


@dataclass(frozen=True)
class Arm:
    """One arm of an experiment: a drafter and the settings of its training."""

    name: str  # in tables and folders
    drafter: str  # the drafter's class in `drafters`
    arguments: dict[str, Any] = field(default_factory=dict)  # of its constructor
    model: dict[str, Any] = field(default_factory=dict)  # what differs from the common settings, such as the optimizer
    method: str = ""  # if several arms train the same with other optimizers: what they train


@dataclass(frozen=True)
class SharedSettings:
    """The settings that all arms share."""

    base: str  # folder or hub id
    files: Sequence[str]  # training text
    steps: int
    seconds: int | None = None  # after which the training ends, instead of after its steps
    base_dtype: str = "float32"
    batch_size: int = 8  # conversations per step
    max_length: int = 384  # of a conversation, in tokens
    features: list[str] | str | None = None  # feature stores of the training text; None to run the base in training
    # Peak of AdamW, with a warm-up of a tenth of the steps, at most 30, and a cosine decay to zero.
    learning_rate: float = 2e-3

    def config(self, arm: Arm, seed: int, folder: Path) -> dict[str, Any]:
        """Return the configuration that trains an arm, as `lightning fit` reads it."""
        data = {"files": list(self.files), "val_size": 0, "max_length": self.max_length, "batch_size": self.batch_size}
        init_args = grouped(getattr(drafters, arm.drafter), arm.arguments)
        model = {
            "base": self.base,
            "base_dtype": self.base_dtype,
            "learning_rate": self.learning_rate,
            "warmup_steps": min(30, self.steps // 10),
            "schedule": "cosine",
            **arm.model,
            "drafter": {"class_path": f"drafters.{arm.drafter}", "init_args": init_args},
        }
        return {
            "seed_everything": seed,
            "model": model,
            "data": data | {"seed": seed} | ({"features": self.features} if self.features else {}),
            "trainer": {
                "accelerator": "auto",
                "devices": 1,
                **({"max_time": {"seconds": self.seconds}} if self.seconds else {"max_steps": self.steps}),
                "precision": "bf16-mixed" if model["base_dtype"] == "bfloat16" else "32-true",
                "limit_val_batches": 0,
                "gradient_clip_val": 0.5,
                "log_every_n_steps": 10,
                "default_root_dir": str(folder),
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "logger": {
                    "class_path": "lightning.pytorch.loggers.CSVLogger",
                    "init_args": {"save_dir": str(folder), "name": "", "version": "log"},
                },
                "callbacks": [
                    {
                        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                        "init_args": {"every_n_train_steps": 50, "save_last": True, "save_top_k": 1},
                    },
                    {"class_path": f"{__name__}.{TrainingTime.__name__}"},
                ],
            },
        }


class TrainingTime(L.Callback):
    """Adds up the CPU seconds of the training loop, over all parts of a resumed training, without its set-up.

    It also counts the tokens of the text that was read. A checkpoint holds what came up to it, so steps that are lost
    and trained again count once.
    """

    def __init__(self) -> None:
        self.cpu_seconds = self._mark = 0.0
        self.tokens = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._mark = time.process_time()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        now = time.process_time()
        self.cpu_seconds += now - self._mark
        self._mark = now
        self.tokens += int(batch["lengths"].sum())

    def state_dict(self) -> dict[str, float]:
        return {"cpu_seconds": self.cpu_seconds, "tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.cpu_seconds, self.tokens = state_dict["cpu_seconds"], int(state_dict["tokens"])


def train(arm: Arm, seed: int, common: SharedSettings, out: Path) -> Path:
    """Train an arm as ``lightning fit`` does and export it, unless that has been done already with these settings.

    Returns:
        The folder of the exported drafter. Next to it are ``config.yaml``, ``log/metrics.csv`` and ``training.json``
        with the CPU seconds of the training loop and the tokens that it read.
    """
    folder = out / arm.name / f"seed{seed}"
    exported, recipe = folder / "drafter", folder / "config.yaml"
    config = common.config(arm, seed, folder)
    if recipe.exists() and yaml.safe_load(recipe.read_text(encoding="utf-8")) != json.loads(json.dumps(config)):
        raise ValueError(f"{folder} was trained with other settings: give another --out, or delete it")
    if (exported / "model.safetensors").exists():
        return exported
    write_text(recipe, yaml.safe_dump(config, sort_keys=False))
    last = folder / "checkpoints" / "last.ckpt"
    arguments = ["fit", "--config", str(recipe), *(["--ckpt_path", "last"] if last.exists() else [])]
    with open(folder / "output.txt", "a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
        try:
            lightning_cli.run(arguments, command=f"lightning {' '.join(arguments)}")
        except SystemExit as stopped:
            if stopped.code in EXIT_CODES.values():  # a signal, which ends the whole program
                print(f"the training in {folder} was stopped: run the same command again", file=sys.__stderr__)
                raise
            if stopped.code:
                raise ValueError(f"the training in {folder} failed: see output.txt there") from stopped
        trained = read_checkpoint(last)
        if (done := trained["global_step"]) < common.steps and not common.seconds:
            raise ValueError(f"the training in {folder} was stopped at step {done}: run the same command again")
        write_text(folder / TIME, json.dumps(trained["callbacks"][TrainingTime.__name__]))
        export(str(last), str(exported))
    return exported


def mean_and_range(values: Sequence[float]) -> str:
    """Return the mean of the seeds, with the smallest and the largest."""
    return f"{mean(values):.3f}" + (f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else "")


class GreedyAnswer(NamedTuple):
    """A prompt with the base's greedy answer."""

    tokens: Tensor  # (S,) token ids of the prompt and the answer
    start: int  # index of the answer's first token


def own_answers(base: Base, prompts: Sequence[Sequence[int]], max_new_tokens: int, cache: Path) -> list[GreedyAnswer]:
    """Return the base's greedy answer to each prompt; the file ``cache`` stores them for the next call."""
    key = hashlib.sha256(json.dumps([base_hash(base), prompts, max_new_tokens]).encode()).hexdigest()
    known = read_json(cache) if cache.exists() else {}
    if known.get("key") != key:
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answers: list[list[int]] = [[]] * len(prompts)
        for first in range(0, len(order), 32):
            indices = order[first : first + 32]
            written = decode_batch(base, [prompts[index] for index in indices], [max_new_tokens] * len(indices))
            for index, answer in zip(indices, written, strict=True):
                answers[index] = answer
        known = {"key": key, "answers": answers}
        write_text(cache, json.dumps(known))
    pairs = zip(prompts, known["answers"], strict=True)
    return [GreedyAnswer(torch.tensor([*prompt, *answer]), len(prompt)) for prompt, answer in pairs]


def decoded_answers(
    base: Base, benchmark: str, questions: str, offset: int, limit: int | None, max_new_tokens: int, folder: Path
) -> list[GreedyAnswer]:
    """Return `own_answers` to the first turns of a benchmark's questions, stored in a folder."""
    chosen = load_questions(benchmark, None if benchmark == "embedded" else questions)[offset:][:limit]
    prompts = [encode_question(base, question, [user_message(question.turns[0])], "tokenizer") for question in chosen]
    return own_answers(base, prompts, max_new_tokens, folder / f"answers_{benchmark}.json")


@torch.inference_mode()
def simulate(
    drafter: LearnedDrafter, base: Base, answers: Sequence[GreedyAnswer], budgets: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Simulate decoding of the base's own answers with all budgets of nodes at once.

    Nodes are sorted by probability, so the tree of a smaller budget is the beginning of the largest tree, and a node
    counts for every budget above its index. The CTC paper's tree spends its budget on frames. Below the largest budget
    it is cut to as many nodes as are fed, which is more than that number of frames would give.

    Returns:
        ``length``, the acceptance length over all answers (tokens per base forward, including the bonus token), and
        ``fed``, the draft tokens per step, both by budget.
    """
    emitted, steps, fed = (dict.fromkeys(budgets, 0) for _ in range(3))
    for answer in answers:
        tokens, start = answer.tokens.to(base.model.device), answer.start
        end = len(tokens)
        if end - start < 2:
            continue
        hidden = base.hidden_states(tokens[None], drafter.required_outputs.hidden_layers)[0][0]
        trees = draft_answer(drafter, hidden, tokens, (start, end), base.base_weights, base.eos)
        text = answer.tokens.tolist()
        for budget in budgets:
            for tree, num_emitted in simulated_steps([tree.first(budget) for tree in trees], text, (start, end)):
                emitted[budget] += num_emitted
                steps[budget] += 1
                fed[budget] += len(tree)
    return {
        name: {str(budget): count[budget] / max(1, steps[budget]) for budget in budgets}
        for name, count in (("length", emitted), ("fed", fed))
    }


def simulate_exported(
    folder: Path, overrides: dict[str, Any], base: Base, answers: Sequence[GreedyAnswer], budgets: Sequence[int]
) -> dict[str, Any]:
    """`simulate` an exported drafter with other draft options; ``simulated.json`` next to it stores the results."""

    def measure() -> dict[str, Any]:
        config = with_draft_options(checkpoint.read_config(folder), overrides)
        drafter, _ = checkpoint.load(folder, base.model.dtype, config)
        result = simulate(drafter.to(base.model.device), base, answers, budgets)
        return {**result, "parameters": sum(weight.numel() for weight in drafter.parameters())}

    return remembered(folder.parent / "simulated.json", [overrides, list(budgets)], answers, measure)


def remembered(
    path: Path, settings: list[Any], answers: Sequence[GreedyAnswer], measure: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return what was measured with these settings on these answers; a JSON file stores it for the next call."""
    texts = json.dumps([[answer.tokens.tolist(), answer.start] for answer in answers])
    key = json.dumps([*settings, hashlib.sha256(texts.encode()).hexdigest()[:16]])
    known = read_json(path) if path.exists() else {}
    if key not in known:
        known[key] = measure()
        write_text(path, json.dumps(known, indent=1))
    return known[key]
