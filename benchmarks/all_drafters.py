"""Every drafter beside the others, from nothing: the base's own text, learned drafters for several seeds, decoding."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.experiment import Common, decoded_answers, train
from benchmarks.harness import Measured, main, run_command, show
from benchmarks.learned_drafters import ARMS, all_simulated
from benchmarks.training_rates import training_rates
from inference.engine.base import load_base

LEARNED = ["medusa", "hydra", "hydra++", "eagle", "eagle3", "block", "block_markov", "ctc", "ctc_markov", "ctc_deep"]
LIVE = ["medusa", "hydra", "eagle", "eagle3", "block_markov", "ctc_markov", "ctc_deep"]
BEST = {"Medusa": "best-first", "Block": "best-first", "CTC": "prefix"}
LAYERS = "-1,2,4"  # of the arms above


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
    threads: int = 0,
    table: str | None = None,
) -> None:
    """Let the base answer, store its states, train every learned drafter, simulate and decode with all: one table each.

    What is done already is kept: the same command goes on after a stop.

    Args:
        base: Folder or hub id of the base.
        gsm8k: GSM8K questions to decode.
        mt_bench: MT-Bench questions to decode.
        draft_model: Small model for draft-model speculation and Ouroboros.
        out: Folder for texts, states, drafters and figures.
        train_questions: Questions whose answers the base writes for the training.
        text: Training text that is there already, in place of such answers.
        store: Feature store of that text.
        arms: Learned drafters to train and simulate.
        live: Those of them that decode too, the first seed's.
        seeds: Of weights, anchors and order.
        steps: Training steps of each arm.
        num_texts: Training questions at most.
        offset: Skip so many GSM8K questions.
        limit: Questions of each benchmark that are simulated, at most.
        live_questions: Questions of each benchmark that are decoded, evenly spaced.
        max_new_tokens: Longest answer.
        budgets: Draft nodes.
        dtypes: Number formats to decode in.
        threads: Of torch; 0 leaves them as they are.
        table: Markdown file for the tables.
    """
    if threads:
        torch.set_num_threads(threads)
    folder = Path(out)
    text, store = prepared(base, folder, train_questions, text, store, num_texts, max_new_tokens)
    common = Common(base, [text], steps, features=store)
    trained = {(name, seed): train(ARMS[name], seed, common, folder) for seed in seeds for name in arms}
    rates = training_rates([ARMS[name] for name in arms], common)
    asked = {"gsm8k": (gsm8k, offset), "mt_bench": (mt_bench, 0)}
    frozen = load_base(base)
    found = {}
    for benchmark, (questions, skipped) in asked.items():
        answers = decoded_answers(frozen, benchmark, questions, skipped, limit, max_new_tokens, folder)
        found[benchmark] = {
            name: runs
            for (name, tree), runs in all_simulated(trained, frozen, answers).items()
            if tree == BEST.get(ARMS[name].drafter, tree)
        }
    tables = [simulated_table(arms, found, rates, budgets, common, seeds, max_new_tokens)]
    specs = [
        *("anpd", "prompt_lookup", "lookahead", "self_draft", "joint:num_nodes=4", "joint"),
        *(f"draft_model={draft_model}", f"ouroboros={draft_model}:num_draft=4,level=4,window=15"),
        *(
            f"{ARMS[name].drafter.lower()}={trained[name, seeds[0]]}:num_nodes={nodes}"
            for name in live
            for nodes in budgets
        ),
    ]
    for benchmark, (questions, skipped) in asked.items():
        results = {}
        for dtype in dtypes:
            kept = folder / "live" / f"{benchmark}-{dtype}"
            if not (kept / "results.json").exists():
                chosen = ["--offset", str(skipped), "--limit", str(live_questions), "--spaced"]
                run_command(
                    ["eval", "--base", base, "--benchmark", benchmark, "--questions", questions, *chosen]
                    + [f"--drafter={spec}" for spec in specs]
                    + ["--max-new-tokens", str(max_new_tokens), "--dtype", dtype, "--out", str(kept)]
                )
            results[dtype] = json.loads((kept / "results.json").read_text(encoding="utf-8"))["results"][benchmark]
        tables.append(live_table(benchmark, results, live_questions))
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
    """The training text and its feature store: those that are given, or the base's own answers to questions.

    Raises:
        ValueError: There are neither questions nor a text.
    """
    if (text is None) == (train_questions is None):
        raise ValueError("give --train-questions, for the base to answer, or --text, one of the two")
    if text is None:
        text = str(folder / "text.jsonl")
        if not Path(text).exists():
            sizes = ["--limit", str(num_texts), "--max-new-tokens", str(max_new_tokens)]
            run_command(["regenerate", "--base", base, "--files", str(train_questions), "--out", text, *sizes])
    if store is None:
        store = str(folder / "store")
        if not (Path(store) / "finished").exists():
            sizes = ["--max-length", str(Common.max_length), f"--layers={LAYERS}"]
            run_command(["features", "--base", base, "--files", text, "--out", store, *sizes])
            (Path(store) / "finished").touch()
    return text, store


def simulated_table(
    arms: Sequence[str],
    found: dict[str, dict[str, list[dict[str, Any]]]],
    rates: dict[str, float],
    budgets: Sequence[int],
    common: Common,
    seeds: Sequence[int],
    max_new_tokens: int,
) -> Measured:
    """Acceptance length of the learned drafters, by benchmark and budget."""
    places = [(benchmark, budget) for benchmark in found for budget in budgets]
    headings = [
        "drafter",
        "parameters",
        "training tokens/s",
        *(f"{benchmark}, {budget}" for benchmark, budget in places),
    ]
    measured = Measured("Learned drafters: acceptance length, simulated", headings)
    for name in arms:
        cells = [[run["length"][str(budget)] for run in found[benchmark][name]] for benchmark, budget in places]
        parameters = next(iter(found.values()))[name][0]["parameters"]
        spreads = [f"{mean(cell):.2f} ({min(cell):.2f} to {max(cell):.2f})" for cell in cells]
        measured.rows.append([name, f"{parameters / 1e6:.2f} M", f"{rates[name]:,.0f}", *spreads])
    measured.notes = [
        f"Base {common.base}; {common.steps} steps of {common.batch_size} conversations; mean over the seeds "
        f"{', '.join(map(str, seeds))}, the smallest and the largest.",
        f"Simulated on the base's own greedy answers of at most {max_new_tokens} tokens to first turns, prefill not "
        "counted, with each drafter's best tree.",
        "Training tokens/s: tokens of text, the base's forward among it, one batch after the other, median.",
    ]
    return measured


def shown(name: str) -> str:
    """``ctc (ctc_deep):num_nodes=16`` for a drafter that is named by its folder."""
    return re.sub(r"=[^:]*?([^/:]+)/seed\d+/drafter", r" (\1)", name)


def live_table(benchmark: str, results: dict[str, dict[str, dict[str, Any]]], num_questions: int) -> Measured:
    """What decoding with every drafter gave, by number format."""
    headings = [
        "drafter",
        *(f"{what}, {dtype}" for dtype in results for what in ("acceptance", "speed-up", "identical")),
        "fed tokens/step",
        "draft forwards/step",
    ]
    measured = Measured(f"All drafters on {benchmark}: decoded", headings)
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
        measured.rows.append(
            [shown(name), *cells, f"{summary['fed_per_step']:.1f}", f"{summary['draft_forwards_per_step']:.1f}"]
        )
    measured.notes = [
        f"{num_questions} questions, evenly spaced, all turns; greedy; one run, the drafters in turn on each question."
    ]
    return measured


if __name__ == "__main__":
    main(all_drafters)
