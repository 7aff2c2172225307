"""Comparison of all drafters from scratch: training text by the base, training with several seeds, and decoding."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.experiment import SharedSettings, decoded_answers, train
from benchmarks.harness import ResultTable, main, run_command, show
from benchmarks.learned_drafters import ARMS, BEST_TREES, simulate_all
from benchmarks.training_speed import training_speeds
from inference.verifier.base import load_base

LEARNED = ["medusa", "hydra", "hydra++", "eagle", "eagle3", "block", "block_markov", "ctc", "ctc_markov", "ctc_deep"]
LIVE = ["medusa", "hydra", "eagle", "eagle3", "block_markov", "ctc_markov", "ctc_deep"]
LAYERS = "-1,2,4"  # the layers of the base that these arms read


def all_drafters(
    base: str,
    gsm8k: str,
    mt_bench: str,
    draft_model: str,
    out: str,
    train_questions: str | None = None,
    text: str | None = None,
    store: str | None = None,
    arms: list[str] = LEARNED,
    live: list[str] = LIVE,
    seeds: list[int] = [0, 1, 2],  # noqa: B006
    steps: int = 600,
    num_texts: int = 4096,
    offset: int = 1200,
    limit: int | None = None,
    live_questions: int = 20,
    max_new_tokens: int = 200,
    budgets: list[int] = [16, 64],  # noqa: B006
    dtypes: list[str] = ["float32", "bfloat16"],  # noqa: B006
    repeats: str = "auto",
    threads: int = 0,
    table: str | None = None,
) -> None:
    """Write training text, store hidden states, train every learned drafter, simulate, and decode with all drafters.

    Results that exist already are kept: repeat the command to continue an interrupted run.

    Args:
        base: Folder or hub id of the base.
        gsm8k: File with the GSM8K questions to decode.
        mt_bench: File with the MT-Bench questions to decode.
        draft_model: Small model for draft-model speculation and Ouroboros.
        out: Folder for texts, hidden states, drafters and results.
        train_questions: Questions that the base answers to make the training text.
        text: Existing training text to use instead.
        store: Existing feature store of that text.
        arms: Learned drafters to train and simulate.
        live: Arms whose drafter with the first seed also decodes.
        seeds: Seeds of the weights, the anchors and the order of the text.
        steps: Training steps of each arm.
        num_texts: Maximum number of training questions.
        offset: Number of GSM8K questions to skip.
        limit: Maximum number of questions of each benchmark to simulate.
        live_questions: Number of questions of each benchmark to decode, evenly spaced.
        max_new_tokens: Maximum number of tokens of an answer.
        budgets: Numbers of draft nodes.
        dtypes: Dtypes to decode in.
        repeats: How often every question is decoded, as for `drafters eval`.
        threads: Number of torch threads; 0 keeps the default.
        table: Markdown file to write the tables to.
    """
    if threads:
        torch.set_num_threads(threads)
    folder = Path(out)
    text, store = prepared(base, folder, train_questions, text, store, num_texts, max_new_tokens)
    common = SharedSettings(base, [text], steps, features=store)
    trained = {(name, seed): train(ARMS[name], seed, common, folder) for seed in seeds for name in arms}
    speeds = training_speeds([ARMS[name] for name in arms], common)
    question_files = {"gsm8k": (gsm8k, offset), "mt_bench": (mt_bench, 0)}
    frozen = load_base(base)
    results = {}
    for benchmark, (questions, skipped) in question_files.items():
        answers = decoded_answers(frozen, benchmark, questions, skipped, limit, max_new_tokens, folder)
        results[benchmark] = {
            name: runs for (name, _), runs in simulate_all(trained, frozen, answers, BEST_TREES).items()
        }
    tables = [simulated_table(arms, results, speeds, budgets, common, seeds, max_new_tokens)]
    specs = [
        *("anpd", "prompt_lookup", "lookahead", "self_draft", "joint:num_nodes=4", "joint"),
        *(f"draft_model={draft_model}", f"ouroboros={draft_model}:num_draft=4,level=4,window=15"),
        *(
            f"{ARMS[name].drafter.lower()}={trained[name, seeds[0]]}:num_nodes={nodes}"
            for name in live
            for nodes in budgets
        ),
    ]
    for benchmark, (questions, skipped) in question_files.items():
        decoded = {}
        for dtype in dtypes:
            evaluated = folder / "live" / f"{benchmark}-{dtype}"
            if not (evaluated / "results.json").exists():
                chosen = ["--offset", str(skipped), "--limit", str(live_questions), "--spaced"]
                run_command(
                    ["eval", "--base", base, "--benchmark", benchmark, "--questions", questions, *chosen]
                    + [f"--drafter={spec}" for spec in specs]
                    + ["--max-new-tokens", str(max_new_tokens), "--dtype", dtype]
                    + ["--repeats", repeats, "--out", str(evaluated)]
                )
            decoded[dtype] = json.loads((evaluated / "results.json").read_text(encoding="utf-8"))["results"][benchmark]
        tables.append(live_table(benchmark, decoded, live_questions))
    show(tables, torch.device("cpu"), table)


def prepared(
    base: str,
    folder: Path,
    train_questions: str | None,
    text: str | None,
    store: str | None,
    num_texts: int,
    max_new_tokens: int,
) -> tuple[str, str]:
    """Return the training text and its feature store, and create those that are not given.

    Raises:
        ValueError: Neither or both of the questions and the text are given.
    """
    if (text is None) == (train_questions is None):
        raise ValueError("give either --train-questions, for the base to answer, or --text")
    if text is None:
        text = str(folder / "text.jsonl")
        if not Path(text).exists():
            sizes = ["--limit", str(num_texts), "--max-new-tokens", str(max_new_tokens)]
            run_command(["regenerate", "--base", base, "--files", str(train_questions), "--out", text, *sizes])
    if store is None:
        store = str(folder / "store")
        if not (Path(store) / "finished").exists():
            sizes = ["--max-length", str(SharedSettings.max_length), f"--layers={LAYERS}"]
            run_command(["features", "--base", base, "--files", text, "--out", store, *sizes])
            (Path(store) / "finished").touch()
    return text, store


def simulated_table(
    arms: Sequence[str],
    results: dict[str, dict[str, list[dict[str, Any]]]],
    speeds: dict[str, float],
    budgets: Sequence[int],
    common: SharedSettings,
    seeds: Sequence[int],
    max_new_tokens: int,
) -> ResultTable:
    """Acceptance length of the learned drafters, by benchmark and budget."""
    places = [(benchmark, budget) for benchmark in results for budget in budgets]
    headings = [
        "drafter",
        "parameters",
        "training tokens/s",
        *(f"{benchmark}, {budget}" for benchmark, budget in places),
    ]
    table = ResultTable("Learned drafters: acceptance length, simulated", headings)
    for name in arms:
        cells = [[run["length"][str(budget)] for run in results[benchmark][name]] for benchmark, budget in places]
        parameters = next(iter(results.values()))[name][0]["parameters"]
        spreads = [f"{mean(cell):.2f} ({min(cell):.2f} to {max(cell):.2f})" for cell in cells]
        table.rows.append([name, f"{parameters / 1e6:.2f} M", f"{speeds[name]:,.0f}", *spreads])
    table.notes = [
        f"Base {common.base}; {common.steps} steps of {common.batch_size} conversations; mean over the seeds "
        f"{', '.join(map(str, seeds))}, with the smallest and the largest in brackets.",
        f"Simulated on the base's own greedy answers of at most {max_new_tokens} tokens to first turns, prefill not "
        "counted, with each drafter's best tree.",
        "Training tokens/s: tokens of text, including the base's forward; median over batches.",
    ]
    return table


def short_spec(name: str) -> str:
    """Shorten the spec of a trained drafter, for example to ``ctc (ctc_deep):num_nodes=16``."""
    return re.sub(r"=[^:]*?([^/:]+)/seed\d+/drafter", r" (\1)", name)


def live_table(benchmark: str, results: dict[str, dict[str, dict[str, Any]]], num_questions: int) -> ResultTable:
    """Return the results of decoding with every drafter, by dtype."""
    headings = [
        "drafter",
        *(f"{what}, {dtype}" for dtype in results for what in ("acceptance", "speed-up", "identical")),
        "fed tokens/step",
        "draft forwards/step",
    ]
    table = ResultTable(f"All drafters on {benchmark}: decoded", headings)
    first = next(iter(results.values()))
    for name, summary in first.items():
        cells = []
        for of in results.values():
            own = of[name]
            cells += [
                f"{own['acceptance_length']:.2f}",
                f"{own['speedup']:.2f}×",
                f"{own['identical']}/{own['questions']}",
            ]
        table.rows.append(
            [short_spec(name), *cells, f"{summary['fed_per_step']:.1f}", f"{summary['draft_forwards_per_step']:.1f}"]
        )
    table.notes = [
        f"{num_questions} questions, evenly spaced, all turns; greedy; one run in which the drafters alternate on each "
        "question."
    ]
    return table


if __name__ == "__main__":
    main(all_drafters)
