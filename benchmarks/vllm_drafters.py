"""Drafters inside vLLM: texts, steps of the base, and tokens per CPU second beside vLLM without a drafter.

It needs vLLM's environment, and the variables that `make test-engines` sets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time as clock
from typing import Any, NamedTuple

import torch

from benchmarks.harness import ResultTable, alternate, main, show
from data import benchmarks
from drafters import checkpoint
from drafters.parallel import ParallelDrafter
from drafters.protocol import Drafter
from drafters.registry import registered
from inference import drafter_specs
from inference.prompts import encode_messages
from inference.verifier.base import Base, BaseConfig, load_base
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from inference.vllm.served_drafter import chain_builder, read_parallel, spec_of
from train.export import export

ROOM = "inference.vllm"
NONE = "none"
BLOCK_SIZE = 32
HEADINGS = ["drafter", "batch", "= vLLM", "= generate", "base steps", "own chain", "acceptance", "tok / CPU s", "ratio"]
Build = Callable[[], Drafter]


class Run(NamedTuple):
    """What one engine did with all prompts."""

    texts: list[list[int]]  # token ids of the answers
    num_steps: int  # forwards of the base after the prefills, summed over the requests
    seconds: list[float]  # CPU seconds of each repeat


def vllm_drafters(
    drafter: list[str],
    base: str = "checkpoints/tiny-chat",
    prompts: int = 24,
    max_new_tokens: int = 128,
    num_tokens: int = 6,
    batches: list[int] = [1, 8],  # noqa: B006
    repeats: int = 1,
    out: str | None = None,
) -> None:
    """Decode greedily in vLLM in float32, with each drafter and without one, all in one process and in turns.

    Args:
        drafter: Drafters, as "[ctc=FOLDER,'joint:runner_up=0']": CTC, block, drafters that read only tokens, and
            Medusa, EAGLE and EAGLE-3, which are exported for vLLM's own methods.
        base: Folder of the base.
        prompts: Number of prompts, from the project's own benchmark.
        max_new_tokens: Largest number of tokens of an answer.
        num_tokens: Largest number of draft tokens per step; Medusa drafts at most one per head.
        batches: Numbers of requests that run at the same time; all prompts are queued at once for the largest.
        repeats: Runs of every drafter, which take turns.
        out: Markdown file to write the tables to.
    """
    if min(prompts, max_new_tokens, num_tokens, repeats, *batches) < 1:
        raise ValueError("prompts, max_new_tokens, num_tokens, batches and repeats must be at least 1")
    batches = list(dict.fromkeys(batches))  # each number once
    loaded = load_base(base, "float32", torch.device("cpu"))
    questions = benchmarks.load_questions("embedded")[:prompts]
    asked = [encode_messages(loaded, [("user", question.turns[0])], "tokenizer") for question in questions]
    expected = _generate(loaded, asked, max_new_tokens)
    with TemporaryDirectory() as scratch:
        specs = {name: spec_of(spec) for name, spec in drafter_specs.labels(drafter).items()}
        arms = {name: _arm(spec, loaded, num_tokens, Path(scratch) / name) for name, spec in specs.items()}
        options = {NONE: {}, **{name: own for name, (own, _) in arms.items()}}
        of_vllm = [name for name, own in options.items() if own and "additional_config" not in own]
        if of_vllm[1:] or (of_vllm and of_vllm[0] != list(options)[-1]):
            raise ValueError(
                f"{of_vllm[0]} runs by a method of vLLM's own, which counts for the last engine: pass it last"
            )
        sizes = max_new_tokens, max(batches), repeats
        with ProcessPoolExecutor(1, get_context("spawn")) as process:  # a process without the models of this one
            runs = process.submit(_serve, loaded.name, options, asked, batches, sizes).result()
    given = loaded, asked, expected, max_new_tokens
    own_steps = {NONE: sum(map(len, expected)) - prompts}
    own_steps |= {name: _count_own_steps(build, *given) for name, (_, build) in arms.items()}
    table = ResultTable(f"{loaded.name} in vLLM, float32, greedy", HEADINGS)
    for batch in batches:
        alone = runs[batch, NONE]
        for name in options:
            run = runs[batch, name]
            equal = [f"{sum(map(list.__eq__, run.texts, texts))}/{prompts}" for texts in (alone.texts, expected)]
            acceptance = (sum(map(len, run.texts)) - prompts) / run.num_steps
            speed = sum(map(len, run.texts)) / median(run.seconds)
            ratio = median(before / after for before, after in zip(alone.seconds, run.seconds, strict=True))
            cells = [name, str(batch), *equal, str(run.num_steps), str(own_steps[name])]
            table.rows.append([*cells, f"{acceptance:.3f}", f"{speed:.0f}", f"{ratio:.2f}×"])
    table.notes += [
        f"{prompts} prompts, at most {max_new_tokens} tokens each, chains of up to {num_tokens} tokens; = vLLM and "
        "= generate: answers that equal those of vLLM alone and of transformers' generate; base steps = forwards after "
        "the prefill, summed over the requests; own chain = the same of this project's engine with the same chain "
        "drafter, new for every text; acceptance = tokens per base step.",
        f"tok / CPU s = tokens per CPU second, prefills included: the median of {repeats} runs, in which all drafters "
        "and vLLM alone take turns in one process; ratio = to vLLM alone in the same turn.",
    ]
    show([table], torch.device("cpu"), out)


# ---- this project's engine, and transformers


def _generate(base: Base, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What transformers' own `generate` writes after each prompt, the end-of-sequence token included."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        (text,) = base.greedy(ids, torch.ones_like(ids), num_tokens).tolist()
        end = next((place for place, token in enumerate(text) if token in base.eos), len(text))
        texts.append(text[: end + 1])
    return texts


def _count_own_steps(
    build: Build, base: Base, prompts: list[list[int]], expected: list[list[int]], num_tokens: int
) -> int:
    """Steps after the prefills that this project's engine needs for the same texts."""
    runner, num_steps = Runner(base), 0
    for prompt, text in zip(prompts, expected, strict=True):
        session = Session(runner, build())
        session.begin(prompt)
        steps = list(session.steps(len(prompt) + num_tokens, base.eos, drafts_at_once=False))
        assert [token for emitted, _ in steps for token in emitted] == text
        num_steps += len(steps) - 1
    return num_steps


def _arm(spec: str, base: Base, num_tokens: int, exported: Path) -> tuple[dict[str, Any], Build]:
    """The options with which vLLM runs a drafter, and what builds the same chain drafter for the engine here.

    Medusa, EAGLE and EAGLE-3 are exported first.
    """
    name, folder, _ = parts = drafter_specs.split(spec)
    served = BaseConfig(base.name, base.tokenizer, base.model.config)
    learned = registered()[name].learned_class
    if learned is None:
        return _custom("text_proposer.TextProposer", spec, num_tokens), chain_builder(spec, served, num_tokens)
    if issubclass(learned, ParallelDrafter):
        path, config = read_parallel(spec, served, num_tokens)
        options = _custom("parallel_proposer.ParallelProposer", spec, num_tokens)
    else:
        config = drafter_specs.learned_config(parts, base)
        path, draft = Path(folder or ""), config.init_args["draft"]
        draft["tree"] = "chain"
        if "depth" in draft:
            draft["depth"] = num_tokens
        else:
            num_tokens = min(num_tokens, config.init_args["heads"]["num_heads"])
        export(str(path), str(exported), format="vllm", dtype="float32")
        speculative = {"method": name, "model": str(exported), "num_speculative_tokens": num_tokens}
        options = {"speculative_config": speculative}
    drafter = checkpoint.load(path, config=config)[0]
    drafter.attach_base_weights(base.base_weights)
    return options, lambda: drafter


def _custom(proposer: str, spec: str, num_tokens: int) -> dict[str, Any]:
    method = {"method": "custom_class", "model": f"{ROOM}.{proposer}", "num_speculative_tokens": num_tokens}
    return {"speculative_config": method, "additional_config": {"drafter": spec, "greedy_only": True}}


# ---- vLLM, in a process of its own


def _serve(
    base: str,
    options_of: dict[str, dict[str, Any]],
    prompts: list[list[int]],
    batches: Sequence[int],
    sizes: tuple[int, int, int],
) -> dict[tuple[int, str], Run]:
    """Decode the prompts with each engine, in turns, for each batch size."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, whose CPU time is measured
    num_tokens, largest_batch, repeats = sizes
    length = max(map(len, prompts)) + num_tokens + BLOCK_SIZE  # and room for drafts
    common = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": largest_batch,
        "max_model_len": length,
        "num_gpu_blocks_override": (largest_batch + 1) * (length // BLOCK_SIZE + 2),
        "enable_prefix_caching": False,  # each repeat reads the prompts again
        "disable_log_stats": False,
    }
    hidden = sys.modules.pop("llvmlite.binding.ffi")  # vLLM 0.32 reads all attributes of all modules, and fails at one
    from vllm import LLM, SamplingParams

    engines = {name: LLM(base, **common, **options) for name, options in options_of.items()}
    sys.modules["llvmlite.binding.ffi"] = hidden
    params = SamplingParams(temperature=0, max_tokens=num_tokens)

    def decode(name: str, batch: int) -> tuple[list[list[int]], float]:
        texts: list[list[int]] = []
        size, started = len(prompts) if batch == largest_batch else batch, clock()
        for at in range(0, len(prompts), size):
            if (followers := getattr(_proposer(engines[name]), "followers", None)) is not None:
                followers.forget()  # else the steps of drafters that read only tokens depend on the prompts before
            given = [{"prompt_token_ids": prompt} for prompt in prompts[at : at + size]]
            answers = engines[name].generate(given, params, use_tqdm=False)
            texts += [list(answer.outputs[0].token_ids) for answer in answers]
        return texts, clock() - started

    for llm in engines.values():  # the first tokens are slow
        llm.generate([{"prompt_token_ids": prompts[0]}], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    runs: dict[tuple[int, str], Run] = {}
    for _, item, name in alternate(list(engines), len(batches), repeats, "vLLM"):
        batch, before = batches[item], _count_steps(engines[name])
        texts, seconds = decode(name, batch)
        num_steps = _count_steps(engines[name]) - before
        if hasattr(_proposer(engines[name]), "num_drafts"):
            num_steps -= len(prompts)  # it is also asked after each prefill
        run = runs.setdefault((batch, name), Run(texts, num_steps or sum(map(len, texts)) - len(texts), []))
        assert texts == run.texts, "greedy decoding repeats itself"
        run.seconds.append(seconds)
    return runs


def _proposer(llm: Any) -> Any:
    return getattr(llm.llm_engine.model_executor.driver_worker.worker.model_runner, "drafter", None)


def _count_steps(llm: Any) -> int:
    """Chains asked for so far; vLLM's own methods are counted by vLLM. 0 without a drafter."""
    if hasattr(_proposer(llm), "num_drafts"):
        return _proposer(llm).num_drafts
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:spec_decode_num_drafts")


if __name__ == "__main__":
    main(vllm_drafters)
