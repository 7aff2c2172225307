"""Learned drafters trained on the same text and compared on the same answers, by nodes, tree, seed and training."""

from __future__ import annotations

from itertools import cycle, product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks import paper_table2
from benchmarks.experiment import (
    BUDGETS,
    TIME,
    Arm,
    SharedSettings,
    decoded_answers,
    mean_and_range,
    simulate_exported,
    train,
)
from benchmarks.harness import ResultTable, main, show
from data.files import read_json
from inference.evaluate.plots import FADED, PALETTE
from inference.verifier.base import load_base

HEADS = {"num_heads": 5, "num_anchors": 24}
TRUNK = {"root_everywhere": True, "frames_differ": True, "num_anchors": 24}  # that of CTC, for cross-entropy
FRAMES = {"num_frames": 8, "num_labels": 6, "num_anchors": 24}
TEN_FRAMES = {"num_frames": 10, "num_labels": 8, "num_anchors": 24}
LONG_FRAMES = {"num_frames": 12, "num_labels": 8, "num_anchors": 24}
LLAMA = {"llama_layer": True}  # the paper's draft module
CODE = {"num_frames": 6, "num_labels": 3, "num_anchors": 0}  # the sizes of its authors' code, every position an anchor
BIAS = {"markov_rank": 64}
BASE_BIAS = {**BIAS, "markov_factors": "base"}
FUSED = {"hidden_layers": [2, 4, -1]}
DEEP = {"num_layers": 3, **FUSED}
TOKENS = {"tokens_in_context": True}
LOOKUP = {"lookup": True}
MUON = {"optimizer": "muon", "learning_rate": 4e-3}
EAGLE3 = {"depth": 6, **FUSED, "num_unroll": 5}
REAL = {**TOKENS, "hidden_layers": [2, 9, 16, 23, 28], "markov_rank": 128, "markov_factors": "base", "num_frames": 8}
REAL |= {"draft_vocab_size": 16384, "num_anchors": 64, "num_columns": 4096}  # for SmolLM2, as in smollm2.yaml
REAL_CTC = {**REAL, **LOOKUP, "num_labels": 6}
REAL_MEDUSA = {"num_heads": 5, "own_heads": False, "num_anchors": 64}
REAL_EAGLE3 = {"depth": 6, "num_unroll": 6, "own_head": True, "draft_vocab_size": 16384}
PAPER = {"lookup": False, "markov_rank": 0, "objective": "ctc", "hidden_layers": [28], "tokens_in_context": False}
REAL_ADAMW = {"base_dtype": "bfloat16"}
REAL_MUON = {**REAL_ADAMW, "optimizer": "muon", "learning_rate": 8e-3}
ARMS = {
    arm.name: arm
    for arm in (
        Arm("medusa", "Medusa", HEADS),
        Arm("hydra", "Hydra", HEADS),
        Arm("hydra++", "Hydra", {**HEADS, "num_layers": 4, "prefix_attention": True, "distillation": True}),
        Arm("eagle", "EAGLE", {"depth": 6}),
        Arm("eagle_8", "EAGLE", {"depth": 8}),
        Arm("eagle3", "EAGLE3", EAGLE3),
        Arm("block", "Block", {"num_frames": 6, **TRUNK}),
        Arm("block_markov", "Block", {"num_frames": 6, **BIAS, **TRUNK}),
        Arm("block_muon", "Block", {"num_frames": 8, **BASE_BIAS, **TRUNK, **FUSED, **TOKENS}, MUON),
        Arm("block_muon_lookup", "Block", {"num_frames": 8, **BASE_BIAS, **TRUNK, **FUSED, **TOKENS, **LOOKUP}, MUON),
        Arm("block_10_tokens", "Block", {"num_frames": 10, **BASE_BIAS, **TRUNK, **TOKENS}),
        Arm("block_10_muon", "Block", {"num_frames": 10, **BASE_BIAS, **TRUNK, **TOKENS}, MUON),
        Arm("block_deep_muon", "Block", {"num_frames": 12, **BASE_BIAS, **TRUNK, **DEEP, **TOKENS}, MUON),
        Arm("ctc_paper", "CTC", {"objective": "ctc", **FRAMES}),
        Arm("ctc_paper_layer", "CTC", {"objective": "ctc", **FRAMES, **LLAMA}),
        Arm("ctc_paper_code", "CTC", {"objective": "ctc", **CODE, **LLAMA}),
        Arm("ctc", "CTC", FRAMES),
        Arm("ctc_markov", "CTC", {**BIAS, **FRAMES}),
        Arm("ctc_markov_base", "CTC", {**BASE_BIAS, **FRAMES}),
        Arm("ctc_kl", "CTC", {**BASE_BIAS, "distillation": 1.0, **FRAMES}),
        Arm("ctc_fused_base", "CTC", {**BASE_BIAS, **FRAMES, **FUSED}),
        Arm("ctc_fused_tokens", "CTC", {**BASE_BIAS, **FRAMES, **FUSED, **TOKENS}),
        Arm("ctc_muon", "CTC", {**BASE_BIAS, **FRAMES, **FUSED, **TOKENS}, MUON),
        Arm("ctc_muon_lookup", "CTC", {**BASE_BIAS, **FRAMES, **FUSED, **TOKENS, **LOOKUP}, MUON),
        Arm("ctc_10_8_base", "CTC", {**BASE_BIAS, **TEN_FRAMES}),
        Arm("ctc_10_8_tokens", "CTC", {**BASE_BIAS, **TEN_FRAMES, **TOKENS}),
        Arm("ctc_10_8_muon", "CTC", {**BASE_BIAS, **TEN_FRAMES, **TOKENS}, MUON),
        Arm("ctc_deep", "CTC", {**BIAS, **LONG_FRAMES, **DEEP}),
        Arm("ctc_deep_base", "CTC", {**BASE_BIAS, **LONG_FRAMES, **DEEP}),
        Arm("ctc_deep_muon", "CTC", {**BASE_BIAS, **LONG_FRAMES, **DEEP, **TOKENS}, MUON),
        Arm("block_smollm2", "Block", {**TRUNK, **REAL, **LOOKUP}, REAL_MUON),
        Arm("block_smollm2_copy", "Block", {**TRUNK, **REAL, **LOOKUP, "copy": True}, REAL_MUON),
        Arm("ctc_smollm2", "CTC", REAL_CTC, REAL_MUON),
        Arm("ctc_smollm2_copy", "CTC", {**REAL_CTC, "copy": True}, REAL_MUON),
        Arm("ctc_smollm2_adamw", "CTC", REAL_CTC, REAL_ADAMW),
        Arm("ctc_smollm2_no_lookup", "CTC", {**REAL_CTC, "lookup": False}, REAL_MUON),
        Arm("ctc_smollm2_no_bias", "CTC", {**REAL_CTC, "markov_rank": 0}, REAL_MUON),
        Arm("ctc_smollm2_paper_loss", "CTC", {**REAL_CTC, "objective": "ctc"}, REAL_MUON),
        Arm("ctc_smollm2_paper", "CTC", {**REAL_CTC, **PAPER}, REAL_ADAMW),
        Arm("ctc_smollm2_paper_layer", "CTC", {**REAL_CTC, **PAPER, **LLAMA}, REAL_ADAMW),
        Arm("medusa_smollm2", "Medusa", REAL_MEDUSA, {**REAL_ADAMW, "learning_rate": 1e-3}),
        Arm("eagle3_smollm2", "EAGLE3", REAL_EAGLE3, {**REAL_ADAMW, "learning_rate": 1e-3}),
    )
}
GROUPS = {
    "best": ["medusa", "hydra", "eagle", "ctc_paper", "block_muon", "ctc_muon", "block_deep_muon", "ctc_deep_muon"],
    "module": ["ctc_paper", "ctc_paper_layer", "ctc_paper_code"],
    "best_long": ["medusa", "hydra", "eagle_8", "ctc_paper", "block_10_muon", "ctc_10_8_muon"],
}
SHOWN = (4, 16, 64)  # numbers of nodes in the tables

Runs = dict[tuple[str, str], list[dict[str, Any]]]  # by arm and tree, a result for each seed


def trees_of(arm: Arm) -> dict[str, dict[str, Any]]:
    """Return the ways to build a tree from an arm's draft: by name, arguments of the drafter. The first is the best."""
    if arm.drafter not in ("CTC", "Medusa", "Block"):
        return {"dynamic": {"num_nodes": BUDGETS[-1]}}
    trees = ["prefix"] if arm.drafter == "CTC" else ["best_first"]
    if arm.drafter == "CTC" and paper_table2.fits(arm):
        trees.append("paper")
    return {tree: {"tree": tree, "num_nodes": BUDGETS[-1]} for tree in trees}


def learned_drafters(
    base: str,
    files: list[str],
    questions: str,
    out: str,
    benchmark: str = "gsm8k",
    offset: int = 0,
    limit: int | None = None,
    max_new_tokens: int = 200,
    arms: list[str] = ["best"],  # noqa: B006
    seeds: list[int] = [0, 1, 2],  # noqa: B006
    steps: list[int] = [600],  # noqa: B006
    features: str | None = None,
    max_length: int = 384,
    table2: bool = False,
    table: str | None = None,
    figure: str | None = None,
) -> None:
    """Train drafters and simulate decoding on the base's own greedy answers, by number of nodes and kind of tree.

    Every number of steps is a training of its own, whose learning rate decays to zero at its last step. Results that
    exist already are kept: repeat the command to continue an interrupted run, or to add arms, seeds or steps.

    Args:
        base: Folder or hub id of the base.
        files: Training text, best the base's own text, from `drafters regenerate`.
        questions: JSONL file with the questions whose answers are decoded.
        out: Folder for the trained drafters and their results, in a folder for each number of steps.
        benchmark: Format of the questions: gsm8k, mt_bench or embedded.
        offset: Number of questions to skip at the beginning.
        limit: Maximum number of questions.
        max_new_tokens: Maximum number of tokens of an answer.
        arms: Names of the arms to train, or of groups of them: best, best_long and module. NAME:60 is trained for 60
            steps at most, where a step takes long.
        seeds: Seeds of the weights, the anchors and the order of the text.
        steps: Numbers of training steps of each arm; several give learning curves.
        features: Feature store of the training text, from `drafters features`.
        max_length: Largest number of tokens of a conversation in training.
        table2: Also make Table 2 of the CTC paper, decoded live: the Medusa, Block and CTC drafters without a bias.
        table: Markdown file to write the tables to.
        figure: PNG file for the learning curves.
    """
    most = {name: int(number) for name, _, number in (arm.partition(":") for arm in arms) if number}  # steps
    names = [name for arm in arms for name in GROUPS.get(arm, [arm.partition(":")[0]])]
    if unknown := [name for name in names if name not in ARMS]:
        raise ValueError(f"unknown arms {', '.join(unknown)}: known are {', '.join([*ARMS, *GROUPS])}")
    if not names or not seeds or not steps:
        raise ValueError("--arms, --seeds and --steps must not be empty")
    folder, exported = Path(out), {}
    for count, seed, name in product(sorted(steps), seeds, names):
        if count > most.get(name, count):
            continue
        common = SharedSettings(base, files, count, max_length=max_length, features=features)
        exported[count, name, seed] = train(ARMS[name], seed, common, folder / str(count))
    frozen = load_base(base)
    answers = decoded_answers(frozen, benchmark, questions, offset, limit, max_new_tokens, folder)
    results: dict[int, Runs] = {count: {} for count in sorted(steps)}
    for (count, name, seed), drafter in exported.items():
        for tree, arguments in trees_of(ARMS[name]).items():
            result = simulate_exported(drafter, arguments, frozen, answers, BUDGETS)
            minutes = read_json(drafter.parent / TIME)["cpu_seconds"] / 60
            results[count].setdefault((name, tree), []).append(result | {"minutes": minutes})
            print(f"{name} seed {seed} {count} steps {tree}: {result['length']}", flush=True)
    ended = sum(int(answer.tokens[-1]) in frozen.eos for answer in answers)
    notes = [
        f"Base {base}; {len(answers)} answers of at most {max_new_tokens} tokens, {ended} ended by EOS; simulated on "
        f"the base's own greedy text, prefill not counted. Steps of {common.batch_size} conversations, "
        f"{common.learning_rate:g} peak learning rate of AdamW, seeds {', '.join(map(str, seeds))}.",
        "Means over the seeds, with the smallest and the largest in brackets.",
    ]
    tables = [acceptance_table(count, results[count], notes) for count in results]
    if table2:
        fitting = [ARMS[name] for name in names if paper_table2.fits(ARMS[name])]
        exported_of = [(arm, [exported[max(steps), arm.name, seed] for seed in seeds]) for arm in fitting]
        tables.append(paper_table2.result_table(exported_of, frozen, answers))
    if len(steps) > 1:
        tables.append(curve_table(results, notes))
    show(tables, torch.device("cpu"), table)
    if figure:
        plot(results, Path(figure))


def acceptance_table(steps: int, results: Runs, notes: list[str]) -> ResultTable:
    """Return the acceptance length of every arm and kind of tree by number of nodes, and the time of its training."""
    headings = ["drafter", "tree", "parameters", *(f"{nodes} nodes" for nodes in SHOWN), "fed, 64", "CPU minutes"]
    table = ResultTable(f"Acceptance length by draft nodes, {steps:,} steps", headings, notes=notes)
    for (name, tree), runs in results.items():
        cells = [name, tree, f"{runs[0]['parameters'] / 1e6:.2f} M"]
        cells += [mean_and_range([run["length"][str(nodes)] for run in runs]) for nodes in SHOWN]
        cells.append(f"{mean(run['fed']['64'] for run in runs):.1f}")
        table.rows.append([*cells, f"{mean(run['minutes'] for run in runs):.1f}"])
    return table


# ---- learning curves


def curves(results: dict[int, Runs]) -> dict[str, tuple[list[list[float]], list[float]]]:
    """Return by arm, for each number of steps, the acceptance length of each seed and the mean minutes of training.

    The trees are the arm's best ones, of most nodes.
    """
    points: dict[str, tuple[list[list[float]], list[float]]] = {}
    for arms in results.values():
        for (name, tree), runs in arms.items():
            if tree == next(iter(trees_of(ARMS[name]))):
                lengths, minutes = points.setdefault(name, ([], []))
                lengths.append([run["length"][str(SHOWN[-1])] for run in runs])
                minutes.append(mean(run["minutes"] for run in runs))
    return points


def curve_table(results: dict[int, Runs], notes: list[str]) -> ResultTable:
    """Return the acceptance length of every arm by number of training steps."""
    headings = ["drafter", *(f"{count:,} steps" for count in results)]
    table = ResultTable(f"Acceptance length by training, {SHOWN[-1]} nodes", headings, notes=notes)
    for name, (lengths, _) in curves(results).items():
        table.rows.append([name, *map(mean_and_range, lengths), *[""] * (len(results) - len(lengths))])
    return table


def plot(results: dict[int, Runs], path: Path) -> None:
    """Plot acceptance length by training steps and by CPU time, as means over seeds, shaded from least to most."""
    figure = Figure(figsize=(9.6, 4.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, label in zip(panels, ("training steps", "CPU time of the training, minutes"), strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#d8dce2", linewidth=0.6)
        axes.set_xscale("log")
        axes.set_xlabel(label)
    panels[0].set_xticks([*results], [f"{count:,}" for count in results])
    panels[0].set_ylabel(f"acceptance length, {SHOWN[-1]} nodes")
    panels[1].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[1].xaxis.set_major_formatter("{x:g}")
    for (name, (lengths, minutes)), colour in zip(curves(results).items(), cycle(PALETTE + FADED), strict=False):
        for axes, values in zip(panels, ([*results][: len(lengths)], minutes), strict=True):
            axes.minorticks_off()
            axes.plot(values, [*map(mean, lengths)], marker="o", markersize=3, color=colour, label=name)
            axes.fill_between(values, [*map(min, lengths)], [*map(max, lengths)], color=colour, alpha=0.15)
    panels[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    main(learned_drafters)
