"""Acceptance, step time and memory in long contexts, on a small base whose rotary embedding is stretched."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal, cast

import torch

from benchmarks.harness import ResultTable, call_in_new_process, main, resident_bytes, show
from data import embedded
from data.benchmarks import Question
from data.conversation import ROLES
from data.files import SafeConsole, read_json, write_text
from data.shipped import find_base
from drafters import DraftTree, LearnedDrafter, Limits, RequiredOutputs, StepResult
from inference import drafter_specs
from inference.evaluation.conclusion import write_results
from inference.evaluation.evaluate import decode, outcome_of
from inference.evaluation.plan import EvaluationPlan
from inference.evaluation.results_folder import results_folder
from inference.reporting import report
from inference.reporting.answer_viewer import Decode
from inference.verifier.base import BaseInfo, load_base, load_base_info
from inference.verifier.options import SamplingOptions
from inference.verifier.runner import Runner

BENCHMARK = "long"
MIB = 2**20
DRAFTS = 30


def long_context(
    base: str = "checkpoints/tiny-chat",
    drafter: list[str] | None = None,
    scaling: Literal["yarn", "linear"] = "yarn",
    factor: float = 8.0,
    lengths: list[int] = [500, 1000, 2000, 4000, 8000],  # noqa: B006
    per_length: int = 2,
    max_new_tokens: int = 96,
    prefill_chunks: list[int] = [0, 512],  # noqa: B006
    threads: int = 1,
    out: str = "runs/long_context",
) -> None:
    """Stretch a base's rotary embedding, and decode behind long chats with several drafters.

    The chats are conversations of the embedded data, one after the other, and a held-out question; the base was trained
    on single ones. The results are written as `drafters eval` writes them: the page has the plots by length.

    Args:
        base: Folder of the base.
        drafter: NAME[=FOLDER][:key=value,...] as in `drafters eval`, such as ctc=FOLDER:window=256; may be repeated. By
            default joint and prompt_lookup.
        scaling: Kind of scaling, by transformers' name for it.
        factor: How many times as long the context becomes.
        lengths: Approximate lengths of the prompts, in tokens.
        per_length: Number of prompts of each length.
        max_new_tokens: Number of tokens of an answer, unless it ends before.
        prefill_chunks: Values of --prefill-chunk whose memory is compared on the longest prompt; 0 reads it at once and
            [] leaves this out.
        threads: Number of torch threads.
        out: Folder for the stretched base, the results and the tables of memory.
    """
    if min(per_length, max_new_tokens, *lengths) < 1 or min(prefill_chunks, default=0) < 0:
        raise ValueError("lengths, per_length and max_new_tokens must be at least 1, and prefill_chunks at least 0")
    torch.set_num_threads(threads)
    folder = Path(out)
    stretched = stretch(base, folder / "base", scaling, factor)
    reader = load_base_info(str(stretched))
    questions = [question for length in lengths for question in _questions(reader, length, per_length, max_new_tokens)]
    plan = EvaluationPlan(
        base=str(stretched),
        dtype="float32",
        drafters=drafter_specs.labels(["none", *(drafter or ["joint", "prompt_lookup"])]),
        questions={BENCHMARK: questions},
        caps={BENCHMARK: max_new_tokens},
        template="tokenizer",
        sampling=SamplingOptions(),
        typical=False,
        devices=("cpu",),
        threads=threads,
        repeats=1,
    )
    results = results_folder(str(folder / "results"), False, plan.settings)
    assert results is not None
    outcome = outcome_of(*decode(plan, results, overwrite=False))
    page = write_results(results, outcome, cast("Decode", reader.tokenizer.decode))
    for part in report.table(outcome.summaries):
        SafeConsole().print(part)
    longest = list(reader.tokenizer(questions[-1].turns[0]).input_ids)
    tables = [_draft_table(plan, lengths)]
    if prefill_chunks:
        tables.append(_prefill_table(str(stretched), longest, prefill_chunks))
    show(tables, torch.device("cpu"), str(folder / "memory.md"))
    print(f"Report: {page}")


def stretch(base: str, folder: Path, scaling: str, factor: float) -> Path:
    """Copy a base to a folder, with a rotary embedding and a context that are longer by a factor.

    Args:
        base: Folder of the base.
        folder: Folder to write to; what it already holds is replaced.
        scaling: ``yarn`` or ``linear``.
        factor: The factor.

    Raises:
        ValueError: The base's rotary embedding is already scaled.
    """
    shutil.copytree(find_base(base), folder, dirs_exist_ok=True)
    config = read_json(folder / "config.json")
    length, rope = config["max_position_embeddings"], config["rope_parameters"]
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{base} already has {rope['rope_type']} scaling: give a base without")
    rope |= {"rope_type": scaling, "factor": factor, "original_max_position_embeddings": length}
    config["max_position_embeddings"] = int(length * factor)
    tokenizer = read_json(folder / "tokenizer_config.json") | {"model_max_length": config["max_position_embeddings"]}
    for name, values in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        write_text(folder / name, json.dumps(values, indent=2) + "\n")
    return folder


def _questions(base: BaseInfo, length: int, count: int, max_new_tokens: int) -> Iterator[Question]:
    """Raw prompts of about so many tokens, each a chat that ends with a question; the category is the length."""
    render = partial(base.tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    limit = min(length, base.context_length - max_new_tokens)
    for index, asked in enumerate(embedded.questions(count, seed=length)):
        ending = [{"role": "user", "content": asked["turns"][0]}]
        messages: list[dict[str, str]] = []
        for record in embedded.conversations(2 + length // 50, seed=1000 * length + index):
            more = [{"role": ROLES[each["from"]], "content": each["value"]} for each in record["conversations"]]
            if len(base.tokenizer(str(render([*messages, *more, *ending])), verbose=False).input_ids) > limit:
                break
            messages += more
        text = str(render([*messages, *ending]))
        yield Question(length * count + index, f"{length}", (text,), is_raw=True)


def _draft_table(plan: EvaluationPlan, lengths: list[int]) -> ResultTable:
    """Time and cache of one draft behind texts of these lengths, of every learned drafter with a cache."""
    base = load_base(plan.base)
    runner = Runner(base)
    made = {name: drafter_specs.make(spec, runner) for name, spec in plan.drafters.items()}
    drafters = {name: each for name, each in made.items() if isinstance(each, LearnedDrafter)}
    shape, config = base.shape, base.model.config
    bytes_per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * shape.head_dim
    headings = [heading for name in drafters for heading in (f"{name}: ms", "MiB")]
    table = ResultTable("One draft, and the caches", ["tokens", "base's cache MiB", *headings])
    for length in lengths:
        cells = [f"{length:,}", f"{length * bytes_per_token / MIB:.1f}"]
        for drafter in drafters.values():
            seconds, num_bytes = _time_draft(drafter, length, shape.hidden_size)
            cells += [f"{1000 * seconds:.2f}", f"{num_bytes / MIB:.2f}"]
        table.rows.append(cells)
    table.notes += [
        f"ms: CPU time of one draft, median of {DRAFTS}, behind random hidden states.",
        "MiB: in float32; of a drafter, what its buffers reserve.",
    ]
    return table


def _time_draft(drafter: LearnedDrafter, length: int, hidden_size: int) -> tuple[float, int]:
    """CPU seconds of one draft behind a text of random hidden states, and the bytes of the drafter's cache."""
    hidden = torch.randn(length, len(drafter.required_outputs.hidden_layers) * hidden_size)
    text = [5] * (length + 1)
    drafter.begin([])
    drafter.observe(StepResult(length, DraftTree(), hidden, [], [5]))
    seconds = []
    for _ in range(3 + DRAFTS):  # the first ones fill the cache, and are warm-up
        started = time.thread_time()
        drafter.propose(text, Limits(max_depth=64))
        seconds.append(time.thread_time() - started)
    cache = getattr(drafter, "_cache", None)
    return median(seconds[3:]), 0 if cache is None else cache.num_bytes


def _prefill_table(base: str, prompt: list[int], chunks: list[int]) -> ResultTable:
    """Peak memory of reading a prompt and a draft tree, by --prefill-chunk, each in a process of its own."""
    table = ResultTable(
        f"Reading a prompt of {len(prompt):,} tokens", ["--prefill-chunk", "MiB", "with a draft MiB", "s"]
    )
    tokens = set()
    for chunk in chunks:
        (alone, seconds, token), (drafted, _, other) = (
            call_in_new_process(_read_prompt, base, prompt, chunk, nodes) for nodes in (0, 8)
        )
        tokens |= {token, other}
        table.rows.append([f"{chunk or 'none'}", f"{alone / MIB:.0f}", f"{drafted / MIB:.0f}", f"{seconds:.1f}"])
    assert len(tokens) == 1, "the base picks the same token after the prompt"
    table.notes.append("MiB: peak of the process beyond what it used before, the base's cache included. s: CPU time.")
    return table


def _read_prompt(name: str, prompt: list[int], chunk: int, num_nodes: int) -> tuple[int, float, int]:
    """Bytes, CPU seconds, and the base's token after the prompt."""
    torch.set_num_threads(1)
    runner = Runner(load_base(name, prefill_chunk=chunk))
    runner.reset(len(prompt) + num_nodes)
    before, started = resident_bytes()[0], time.process_time()
    tree = DraftTree(prompt[:num_nodes], list(range(-1, num_nodes - 1)))
    token = int(runner.forward(prompt, tree, RequiredOutputs()).logits[0].argmax())
    return resident_bytes()[1] - before, time.process_time() - started, token


if __name__ == "__main__":
    main(long_context)
