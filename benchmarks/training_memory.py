"""Memory of trainings on random bases of real shapes: the estimate before the first step, and the peak."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from benchmarks.harness import SHAPES, ResultTable, drafter_recipe, llama_config, main, show
from data.tokenizer import load_tokenizer
from inference.verifier.base import Dtype

TOKENIZER = "checkpoints/tiny-chat"
SHARD_BYTES = 1e9
TRAIN = """
import sys
from benchmarks.harness import resident_bytes
from train.cli.lightning_command import main
main(sys.argv[1:])
print("peak", resident_bytes()[1])
"""


def training_memory(
    configs: list[str] = ["ctc.yaml", "ctc_deep.yaml", "eagle3.yaml"],  # noqa: B006
    shape: str = "7b",
    vocab_size: int = 32000,
    dtype: Dtype = "bfloat16",
    batch_size: int = 1,
    length: int = 256,
    steps: int = 2,
    bases: str = "runs/random_bases",
    options: list[str] = [],  # noqa: B006
    threads: int = 0,
    out: str | None = None,
) -> None:
    """Train some steps with each configuration on a random base, and compare the estimated memory with the peak.

    Every training is a process of its own on the CPU. The peak is that of the whole process, with Python and the
    libraries, which the estimate contains.

    Args:
        configs: Training configurations.
        shape: Shape of the base: 100m, 1b (LLaMA 3.2), 3b (LLaMA 3.2), or 7b (Vicuna).
        vocab_size: Vocabulary size V.
        dtype: Dtype of the base.
        batch_size: Batch size B.
        length: Length S of the texts.
        steps: Number of training steps.
        bases: Folder for the random bases, which are kept.
        options: Further options of `lightning fit`, such as --trainer.precision=32-true.
        threads: Number of torch threads; 0 keeps the default.
        out: Markdown file to write the table to.
    """
    base = Path(bases) / f"{shape}-{vocab_size}-{dtype}"
    write_random_llama(base, shape, vocab_size, dtype)
    title = f"{shape}, V = {vocab_size}, {dtype}, B = {batch_size}, S = {length}, {steps} steps"
    table = ResultTable(f"Memory of a training: {title}", ["configuration", "estimated GB", "peak GB", "ratio"])
    for config in configs:
        with TemporaryDirectory() as folder:
            texts = Path(folder) / "texts.json"
            texts.write_text(json.dumps(long_conversations(batch_size * steps, length)), encoding="utf-8")
            settings = {
                "config": config,
                "model.base": base,
                "model.base_dtype": dtype,
                "data.files": f"[{texts}]",
                "data.val_size": 0,
                "data.max_length": length,
                "data.batch_size": batch_size,
                "trainer.accelerator": "cpu",
                "trainer.devices": 1,
                "trainer.max_steps": steps,
                "trainer.limit_val_batches": 0,
                "trainer.logger": "false",
                "trainer.enable_progress_bar": "false",
                "trainer.default_root_dir": folder,
            }
            trunk = drafter_recipe(config, SHAPES[shape][2])[1].get("trunk", {})
            if layers := trunk.get("hidden_layers"):
                settings["model.drafter.init_args.trunk.hidden_layers"] = layers
            arguments = [f"--{name}={value}" for name, value in settings.items()]
            estimated, peak = train([*arguments, *options], threads)
        table.rows.append([config, f"{estimated / 1e9:.2f}", f"{peak / 1e9:.2f}", f"{estimated / peak:.3f}"])
        print("  ".join(table.rows[-1]), flush=True)
    table.notes.append("estimated = printed by lightning fit before its first step; peak = of the whole process")
    show([table], torch.device("cpu"), out)


def train(arguments: list[str], threads: int) -> tuple[float, float]:
    """Run ``lightning fit`` in a process of its own.

    Returns:
        The estimated memory and the peak in bytes.

    Raises:
        ValueError: The training failed.
    """
    set_threads = f"import torch\ntorch.set_num_threads({threads})\n" if threads else ""
    command = [sys.executable, "-c", set_threads + TRAIN, "fit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    estimated = re.search(r"at the worst moment\W+([\d.]+) (.B)", done.stdout)
    peak = re.search(r"^peak (\d+)$", done.stdout, re.MULTILINE)
    if not (estimated and peak):
        raise ValueError(f"the training failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(estimated[1]) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[estimated[2]], float(peak[1])


def long_conversations(number: int, length: int) -> list[dict]:
    """Conversations whose answers have more than a number of tokens."""
    answer = " ".join(str(word) for word in range(length))
    return [
        {"conversations": [{"from": "human", "value": f"Count, {index}."}, {"from": "gpt", "value": answer}]}
        for index in range(number)
    ]


def write_random_llama(folder: Path, shape: str, vocab: int, dtype: Dtype, context: int = 4096) -> None:
    """Write a base with random weights, one file of at most 1 GB at a time, unless the folder exists.

    Raises:
        ValueError: The shape is unknown.
    """
    from transformers import LlamaForCausalLM

    if folder.exists():
        return
    config = llama_config(shape, vocab, context)
    with torch.device("meta"):
        weights = LlamaForCausalLM(config).to(getattr(torch, dtype)).state_dict()
    files: list[list[str]] = [[]]
    size = 0
    for name, weight in weights.items():
        if files[-1] and size + weight.nbytes > SHARD_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += weight.nbytes
    unfinished = folder.with_suffix(".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        places |= dict.fromkeys(names, file)
        save_file({name: random_weight(weights[name]) for name in names}, unfinished / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": places}
    (unfinished / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = getattr(torch, dtype)
    config.save_pretrained(unfinished)
    load_tokenizer(TOKENIZER).save_pretrained(unfinished)
    unfinished.rename(folder)


def random_weight(like: torch.Tensor) -> torch.Tensor:
    """A weight of the shape and dtype of one without data: ones for a norm, else the same million small numbers."""
    if like.dim() == 1:
        return torch.ones(like.shape, dtype=like.dtype)
    block = torch.empty(2**20, dtype=like.dtype).normal_(0, 0.02)
    return block.repeat(-(-like.numel() // len(block)))[: like.numel()].view(like.shape)


if __name__ == "__main__":
    main(training_memory)
