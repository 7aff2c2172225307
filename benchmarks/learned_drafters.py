"""Learned drafters trained on the same text and compared on the same answers, for several seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.experiment import (
    BUDGETS,
    Arm,
    GreedyAnswer,
    SharedSettings,
    decoded_answers,
    minutes_of,
    simulate_exported,
    train,
)
from benchmarks.harness import ResultTable, main, show
from benchmarks.learned_drafter_plots import plot
from inference.verifier.base import Base, load_base

# The trunk of the CTC drafter, for cross-entropy.
TRUNK = {"root_everywhere": True, "frames_differ": True, "num_anchors": 24}
FRAMES = {"num_frames": 8, "num_labels": 6, "num_anchors": 24}
LONG_FRAMES = {"num_frames": 12, "num_labels": 8, "num_anchors": 24}
BASE_BIAS = {"markov_rank": 64, "markov_factors": "base"}
LK = {"divergence": "lk", "distillation": 0.9, "label_weight": 0.1}
HYBRID = {"divergence": "lk_hybrid", "distillation": 1.0, "label_weight": 0.1}
TOKENS = {"tokens_in_context": True}
FUSED = {"hidden_layers": [2, 4, -1]}
DEEP = {"num_layers": 3, **FUSED}
MUON = {"optimizer": "muon", "learning_rate": 4e-3}
ARMS = {
    arm.name: arm
    for arm in (
        Arm("medusa", "Medusa", {"num_heads": 5, "num_anchors": 24}),
        Arm("hydra", "Hydra", {"num_heads": 5, "num_anchors": 24}),
        Arm(
            "hydra++",
            "Hydra",
            {"num_heads": 5, "num_anchors": 24, "num_layers": 4, "prefix_attention": True, "distillation": True},
        ),
        Arm("eagle", "EAGLE", {"depth": 6}),
        Arm("eagle_8", "EAGLE", {"depth": 8}),
        Arm("eagle3", "EAGLE3", {"depth": 6, **FUSED, "num_unroll": 5}),
        Arm("medusa_lk", "Medusa", {"num_heads": 5, "num_anchors": 24, "distillation": True, "divergence": "lk"}),
        Arm("eagle_lk", "EAGLE", {"depth": 6, "divergence": "lk"}),
        Arm("eagle3_lk", "EAGLE3", {"depth": 6, **FUSED, "num_unroll": 5, "divergence": "lk"}),
        Arm("block", "Block", {"num_frames": 6, **TRUNK}),
        Arm("block_markov", "Block", {"num_frames": 6, "markov_rank": 64, **TRUNK}),
        Arm("block_markov_base", "Block", {"num_frames": 6, **BASE_BIAS, **TRUNK}),
        Arm("block_8_base", "Block", {"num_frames": 8, **BASE_BIAS, **TRUNK}),
        Arm("block_10_base", "Block", {"num_frames": 10, **BASE_BIAS, **TRUNK}),
        Arm("block_lk", "Block", {"num_frames": 6, **BASE_BIAS, **LK, **TRUNK}),
        Arm("ctc_paper", "CTC", {"objective": "ctc", **FRAMES}),
        Arm("ctc", "CTC", FRAMES),
        Arm("ctc_markov", "CTC", {"markov_rank": 64, **FRAMES}),
        Arm("ctc_markov_base", "CTC", {**BASE_BIAS, **FRAMES}),
        Arm("ctc_10_8_base", "CTC", {**BASE_BIAS, "num_frames": 10, "num_labels": 8, "num_anchors": 24}),
        Arm("ctc_12_10_base", "CTC", {**BASE_BIAS, "num_frames": 12, "num_labels": 10, "num_anchors": 24}),
        Arm("ctc_10_8_tokens", "CTC", {**BASE_BIAS, "num_frames": 10, "num_labels": 8, "num_anchors": 24, **TOKENS}),
        Arm("block_10_tokens", "Block", {"num_frames": 10, **BASE_BIAS, **TRUNK, **TOKENS}),
        Arm("ctc_fused_tokens", "CTC", {**BASE_BIAS, **FRAMES, **FUSED, **TOKENS}),
        Arm("ctc_kl", "CTC", {**BASE_BIAS, "distillation": 1.0, **FRAMES}),
        Arm("ctc_lk", "CTC", {**BASE_BIAS, **LK, **FRAMES}),
        Arm("ctc_lk_hybrid", "CTC", {**BASE_BIAS, **HYBRID, **FRAMES}),
        Arm("ctc_fused_base", "CTC", {**BASE_BIAS, **FRAMES, **FUSED}),
        Arm("ctc_deep_base", "CTC", {**BASE_BIAS, **LONG_FRAMES, **DEEP}),
        Arm("medusa_muon", "Medusa", {"num_heads": 5, "num_anchors": 24}, MUON),
        Arm("hydra_muon", "Hydra", {"num_heads": 5, "num_anchors": 24}, MUON),
        Arm("eagle_muon", "EAGLE", {"depth": 6}, {"optimizer": "muon", "learning_rate": 1e-2}),
        Arm("block_muon", "Block", {"num_frames": 8, **BASE_BIAS, **TRUNK, **FUSED, **TOKENS}, MUON),
        Arm("ctc_muon", "CTC", {**BASE_BIAS, **FRAMES, **FUSED, **TOKENS}, MUON),
        Arm("block_10_muon", "Block", {"num_frames": 10, **BASE_BIAS, **TRUNK, **TOKENS}, MUON),
        Arm(
            "ctc_10_8_muon", "CTC", {**BASE_BIAS, "num_frames": 10, "num_labels": 8, "num_anchors": 24, **TOKENS}, MUON
        ),
        Arm(
            "ctc_10_selfless_muon",
            "CTC",
            {**BASE_BIAS, "num_frames": 10, "num_labels": 10, "merge_repeats": False, "num_anchors": 24, **TOKENS},
            MUON,
        ),
        Arm("ctc_selfless_muon", "CTC", {**BASE_BIAS, **FRAMES, "merge_repeats": False, **FUSED, **TOKENS}, MUON),
        Arm("block_deep_muon", "Block", {"num_frames": 12, **BASE_BIAS, **TRUNK, **DEEP, **TOKENS}, MUON),
        Arm("ctc_deep_muon", "CTC", {**BASE_BIAS, **LONG_FRAMES, **DEEP, **TOKENS}, MUON),
        Arm("ctc_deep", "CTC", {"markov_rank": 64, **LONG_FRAMES, **DEEP}),
        Arm("ctc_distilled", "CTC", {"markov_rank": 64, "distillation": 1.0, **FRAMES}),
        Arm("ctc_96", "CTC", {"markov_rank": 64, **FRAMES, "num_anchors": 96}),
        Arm("block_96", "Block", {"num_frames": 6, "markov_rank": 64, **TRUNK, "num_anchors": 96}),
        Arm("medusa_96", "Medusa", {"num_heads": 5, "num_anchors": 96}),
        Arm("hydra_96", "Hydra", {"num_heads": 5, "num_anchors": 96}),
        Arm("ctc_survival", "CTC", {"markov_rank": 64, "weights": "survival", **FRAMES}),
        Arm("ctc_root_first", "CTC", {"root_everywhere": False, **FRAMES}),
        Arm("ctc_causal", "CTC", {"causal": True, **FRAMES}),
        Arm("ctc_12_8", "CTC", {"markov_rank": 64, **LONG_FRAMES}),
        *(
            Arm(f"{name}_{layers}", kind, {"num_layers": layers, **arguments})
            for layers in (2, 4)
            for name, kind, arguments in (
                ("block", "Block", {"num_frames": 6, **TRUNK}),
                ("ctc_paper", "CTC", {"objective": "ctc", **FRAMES}),
                ("ctc", "CTC", FRAMES),
            )
        ),
    )
}


TREES = {"Medusa": {"best-first": {"tree": "best_first"}, "chain": {"tree": "chain"}}}
TREES["Block"] = TREES["Medusa"]
TREES["CTC"] = {"prefix": {"tree": "prefix"}, "paper": {"tree": "paper"}, "chain": {"tree": "chain"}}
BEST_TREES = ("best-first", "prefix", "dynamic")
GROUPS = {
    "drafters": [
        "medusa",
        "hydra",
        "hydra++",
        "eagle",
        "eagle3",
        "block",
        "block_markov",
        "ctc_paper",
        "ctc",
        "ctc_markov",
        "ctc_deep",
    ],
    "layers": [f"{name}{layers}" for layers in ("", "_2", "_4") for name in ("block", "ctc_paper", "ctc")],
    "anchors": ["medusa_96", "hydra_96", "block_96", "ctc_96"],
    "losses": [
        "medusa",
        "medusa_lk",
        "block_markov_base",
        "block_lk",
        "ctc_markov_base",
        "ctc_kl",
        "ctc_lk",
        "ctc_lk_hybrid",
        "eagle",
        "eagle_lk",
        "eagle3",
        "eagle3_lk",
    ],
    "bias": ["block_markov_base", "ctc_markov_base", "ctc_fused_base", "ctc_deep_base"],
    "muon": ["medusa_muon", "hydra_muon", "eagle_muon", "block_muon", "ctc_muon", "ctc_deep_muon"],
    "best": [
        "medusa",
        "hydra",
        "eagle",
        "ctc_paper",
        "block_muon",
        "ctc_muon",
        "block_deep_muon",
        "ctc_deep_muon",
    ],
    "best_long": ["medusa", "hydra", "eagle_8", "ctc_paper", "block_10_muon", "ctc_10_8_muon", "ctc_10_selfless_muon"],
    "tokens": ["ctc_10_8_base", "ctc_10_8_tokens", "block_10_base", "block_10_tokens"],
    "long": ["eagle_8", "block_8_base", "block_10_base", "ctc_10_8_base", "ctc_12_10_base"],
    "options": ["ctc_markov", "ctc_distilled", "ctc_survival", "ctc_12_8", "ctc", "ctc_root_first", "ctc_causal"],
}


def fits_paper(arm: Arm) -> bool:
    """Whether the paper's tree can be built from an arm's frames: it has no bias, and it merges repeats."""
    return not arm.arguments.get("markov_rank") and arm.arguments.get("merge_repeats", True)


def trees_of(arm: Arm) -> dict[str, dict[str, Any]]:
    """Return the ways to build a tree from an arm's draft: by name, arguments of the drafter."""
    trees = TREES.get(arm.drafter, {"dynamic": {}})
    if not fits_paper(arm):
        trees = {name: arguments for name, arguments in trees.items() if name != "paper"}
    return {name: arguments | {"num_nodes": BUDGETS[-1]} for name, arguments in trees.items()}


def learned_drafters(
    base: str,
    files: list[str],
    questions: str,
    out: str,
    benchmark: str = "gsm8k",
    offset: int = 0,
    limit: int | None = None,
    max_new_tokens: int = 200,
    group: str = "drafters",
    arms: list[str] | None = None,
    seeds: list[int] = [0, 1, 2],  # noqa: B006
    steps: int = 600,
    features: str | None = None,
    baseline: str = "medusa",
    only_train: bool = False,
    threads: int = 0,
    table: str | None = None,
    figures: str | None = None,
) -> None:
    """Train drafters and simulate decoding on the base's own greedy answers, by number of nodes and kind of tree.

    Results that exist already are kept: repeat the command to continue an interrupted run, or to add arms or seeds.

    Args:
        base: Folder or hub id of the base.
        files: Training text, best the base's own text, from `drafters regenerate`.
        questions: JSONL file with the questions whose answers are decoded.
        out: Folder for the trained drafters and their results.
        benchmark: Format of the questions: gsm8k, mt_bench or embedded.
        offset: Number of questions to skip at the beginning.
        limit: Maximum number of questions.
        max_new_tokens: Maximum number of tokens of an answer.
        group: Group of arms to train: drafters, layers, anchors, losses, bias, muon, best, best_long, tokens, long
            or options.
        arms: Names of single arms to train instead of a group.
        seeds: Seeds of the weights, the anchors and the order of the text.
        steps: Training steps of each arm.
        features: Feature store of the training text, from `drafters features`.
        baseline: Arm that the other arms are compared with.
        only_train: Stop before the simulation.
        threads: Number of torch threads; 0 keeps the default.
        table: Markdown file to write the table to.
        figures: Folder for the plots.
    """
    names = arms or GROUPS.get(group, [])
    if unknown := [name for name in names if name not in ARMS] or not names:
        raise ValueError(f"unknown arms {unknown or group}: known are {', '.join(ARMS)}; groups {', '.join(GROUPS)}")
    if threads:
        torch.set_num_threads(threads)
    common, folder = SharedSettings(base, files, steps, features=features), Path(out)
    trained = {(name, seed): train(ARMS[name], seed, common, folder) for seed in seeds for name in names}
    if only_train:
        return
    frozen = load_base(base)
    answers = decoded_answers(frozen, benchmark, questions, offset, limit, max_new_tokens, folder)
    results = simulate_all(trained, frozen, answers)
    ended = sum(answer.ended for answer in answers)
    notes = [
        f"Base {base}; {len(answers)} answers of at most {max_new_tokens} tokens, {ended} ended by EOS; simulated on "
        f"the base's own greedy text, prefill not counted. {steps} steps of {common.batch_size} conversations, "
        f"{common.learning_rate:g} peak learning rate, seeds {', '.join(map(str, seeds))}.",
        "Means over the seeds, with the smallest and the largest in brackets.",
    ]
    show([acceptance_table(results, baseline, notes)], torch.device("cpu"), table)
    if figures:
        plot(results, Path(figures))


def simulate_all(
    trained: dict[tuple[str, int], Path],
    frozen: Base,
    answers: Sequence[GreedyAnswer],
    kinds: Sequence[str] | None = None,
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Simulate exported drafters with every kind of tree, or with some.

    Args:
        trained: Folders of the drafters, by name and seed.
        frozen: The base.
        answers: The base's own answers.
        kinds: The kinds of trees; None for all.

    Returns:
        By name and kind of tree, a result for each seed.
    """
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (name, seed), exported in trained.items():
        for tree, arguments in trees_of(ARMS[name]).items():
            if kinds is not None and tree not in kinds:
                continue
            result = simulate_exported(exported, tree, arguments, frozen, answers, BUDGETS)
            results.setdefault((name, tree), []).append(result | {"folder": exported.parent})
            print(f"{name} seed {seed} {tree}: {result['length']}", flush=True)
    return results


def acceptance_table(
    results: dict[tuple[str, str], list[dict[str, Any]]], baseline: str, notes: list[str]
) -> ResultTable:
    """Return the acceptance length of every arm and kind of tree by number of nodes, and the time of its training."""
    budgets = (4, 16, 64)
    headings = [
        "drafter",
        "tree",
        "parameters",
        *(f"{b} nodes" for b in budgets),
        "ended by EOS, 64",
        "fed, 64",
        "to baseline, 64",
        "CPU minutes",
    ]
    table = ResultTable("Acceptance length by draft nodes", headings, notes=notes)
    at_baseline = [runs for (name, _), runs in results.items() if name == baseline]
    reference = mean(run["length"]["64"] for run in at_baseline[0]) if at_baseline else None
    for (name, tree), runs in results.items():
        cells = [[run["length"][str(budget)] for run in runs] for budget in budgets]
        last = mean(cells[-1])
        table.rows.append(
            [
                name,
                tree,
                f"{runs[0]['parameters'] / 1e6:.2f} M",
                *(f"{mean(cell):.3f} ({min(cell):.3f} to {max(cell):.3f})" for cell in cells),
                f"{mean(run['ended']['64'] for run in runs):.3f}",
                f"{mean(run['fed']['64'] for run in runs):.1f}",
                f"{last / reference:.3f}" if reference else "",
                "–" if math.isnan(minutes := minutes_of([run["folder"] for run in runs])) else f"{minutes:.1f}",
            ]
        )
    return table


if __name__ == "__main__":
    main(learned_drafters)
