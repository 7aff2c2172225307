"""Our loop on a CPU, alone and with drafters, beside llama.cpp alone with the same GGUF file."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.harness import ResultTable, alternate, main, show
from data.dtypes import Dtype
from inference import drafter_specs
from inference.evaluate import intervals
from inference.options import QuestionOptions
from inference.verifier.base import load_base, prepare_process
from inference.verifier.graphed import make_runner
from inference.verifier.session import Session

LLAMA_CPP, NONE = "llama.cpp", "none"
HEADINGS = ["decoded by", "acceptance length", "tokens/s", "x llama.cpp alone", "interval", "answers as without drafts"]


def against_llama_cpp(
    gguf: str,
    llama_bench: str,
    base: str | None = None,
    dtypes: list[Dtype] = ["bfloat16", "int8"],  # noqa: B006
    drafter: list[str] = ["joint:num_nodes=7"],  # noqa: B006
    benchmark: list[str] = ["embedded"],  # noqa: B006
    rows: str = ":",
    limit: int = 10,
    max_new_tokens: int = 128,
    threads: int = 1,
    out: str | None = None,
) -> None:
    """Answer first turns greedily, in turns; llama.cpp writes as many tokens behind as many, which takes equal time.

    Args:
        gguf: GGUF file of the base.
        llama_bench: llama.cpp's program `llama-bench`.
        base: Folder of the same base, which is read faster; by default the GGUF file.
        dtypes: Dtypes of our base; bfloat16 has packed weights.
        drafter: NAME[=FOLDER][:key=value,...] as in `drafters eval`; may be repeated.
        benchmark: NAME[:STYLE][=FILE] as in `drafters eval`; may be repeated.
        rows: Rows of each benchmark, as in `drafters eval`.
        limit: Maximum number of questions of each benchmark.
        max_new_tokens: Maximum number of tokens of an answer.
        threads: Number of threads.
        out: Markdown file to write.
    """
    for path in (gguf, llama_bench):
        if not Path(path).is_file():
            raise ValueError(f"{path} is no file: give the GGUF file of the base, and llama.cpp's llama-bench")
    torch.set_num_threads(threads)
    prepare_process(sums_alike=True)
    sessions: dict[str, Session] = {}
    loaded = None
    for dtype in dtypes:
        loaded = load_base(base or gguf, dtype, packed=dtype in ("float32", "bfloat16"))
        for label, spec in drafter_specs.labels([NONE, *drafter]).items():
            runner = make_runner(loaded)
            sessions[f"{dtype}: {label}"] = Session(runner, drafter_specs.make(spec, runner))
    if loaded is None:
        raise ValueError("dtypes is empty: give bfloat16, int8 or both")
    options = QuestionOptions(benchmark, limit, rows, max_new_tokens)
    tables = []
    for name, asked in options.select(loaded, options.load()).items():
        command = [llama_bench, "-m", gguf, "-t", str(threads), "-p", "0", "-r", "1", "-o", "json"]
        tables.append(
            _compare(f"{name}, {threads} threads", sessions, asked.prompts, loaded.eos, max_new_tokens, command)
        )
    show(tables, torch.device("cpu"), out)


def _compare(
    title: str,
    sessions: dict[str, Session],
    prompts: list[list[int]],
    eos: frozenset[int],
    max_new_tokens: int,
    command: list[str],
) -> ResultTable:
    """Answer each prompt in every way, after one that does not count."""
    for session in sessions.values():
        session.run(prompts[0], 16, eos)
    results = {}
    seconds_per_token = dict[int, float]()  # of llama.cpp
    for _, item, arm in alternate([LLAMA_CPP, *sessions], len(prompts), 1, title):
        if arm == LLAMA_CPP:
            seconds_per_token[item] = _llama_cpp(command, len(prompts[item]), max_new_tokens)
        else:
            results[arm, item] = sessions[arm].run(prompts[item], max_new_tokens, eos)
    table, texts = ResultTable(title, HEADINGS), defaultdict[str, int](int)
    speed = len(prompts) / sum(seconds_per_token.values())
    table.rows.append([f"{LLAMA_CPP}: alone", "1.00", f"{speed:.1f}", "1.00", "", ""])
    for arm in sessions:
        terms, num_steps = [], 0
        for item in range(len(prompts)):
            result = results[arm, item]
            steps = result.steps[1:]  # without the prefill
            num_tokens = sum(step.emitted for step in steps)
            terms.append((num_tokens * seconds_per_token[item], sum(sum(step.seconds) for step in steps), num_tokens))
            num_steps += len(steps)
            texts[arm] += result.tokens == results[f"{arm.partition(':')[0]}: {NONE}", item].tokens
        num_tokens, seconds = sum(term[2] for term in terms), sum(term[1] for term in terms)
        ratio = intervals.ratio((theirs, ours) for theirs, ours, _ in terms)
        between = "" if ratio.interval is None else "{:.2f}-{:.2f}".format(*ratio.interval)
        cells = [f"{num_tokens / num_steps:.2f}", f"{num_tokens / seconds:.1f}", f"{ratio.value:.2f}", between]
        table.rows.append([arm, *cells, f"{texts[arm]} of {len(prompts)}"])
    table.notes.append(
        f"{len(prompts)} questions, answers of at most {max_new_tokens} tokens, decoding without the prefill; all arms "
        "alternate on each question. Intervals are of 95 % over the questions."
    )
    return table


def _llama_cpp(command: list[str], num_cached: int, num_tokens: int) -> float:
    """Seconds for each of so many tokens that llama.cpp writes behind others."""
    sizes = ["-d", str(num_cached), "-n", str(num_tokens)]
    run = subprocess.run([*command, *sizes], capture_output=True, text=True, check=False)
    if run.returncode:
        raise ValueError(f"{command[0]} fails: {run.stderr.strip().splitlines()[-1:]}")
    return json.loads(run.stdout)[-1]["avg_ns"] / 1e9 / num_tokens


if __name__ == "__main__":
    main(against_llama_cpp)
