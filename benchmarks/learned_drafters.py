"""The learned drafters side by side: trained on the same text, decoded on the same answers, for several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.experiment import BUDGETS, Answer, Arm, Common, decoded_answers, simulated, train
from benchmarks.harness import Measured, main, show
from benchmarks.learned_drafter_plots import plot
from inference.engine.base import Base, load_base

TRUNK = {"root_everywhere": True, "frames_differ": True, "num_anchors": 24}  # the CTC drafter's, with cross-entropy
FRAMES = {"num_frames": 8, "num_labels": 6, "num_anchors": 24}
DEEP = {"num_layers": 3, "hidden_layers": [2, 4, -1]}
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
        Arm("eagle3", "EAGLE3", {"depth": 6, "hidden_layers": [2, 4, -1], "num_unroll": 5}),
        Arm("block", "Block", {"num_frames": 6, **TRUNK}),
        Arm("block_markov", "Block", {"num_frames": 6, "markov_rank": 64, **TRUNK}),
        Arm("ctc_paper", "CTC", {"objective": "ctc", **FRAMES}),
        Arm("ctc", "CTC", FRAMES),
        Arm("ctc_markov", "CTC", {"markov_rank": 64, **FRAMES}),
        Arm("ctc_deep", "CTC", {"markov_rank": 64, "num_frames": 12, "num_labels": 8, "num_anchors": 24, **DEEP}),
        Arm("ctc_distilled", "CTC", {"markov_rank": 64, "distillation": 1.0, **FRAMES}),
        Arm("ctc_96", "CTC", {"markov_rank": 64, **FRAMES, "num_anchors": 96}),
        Arm("block_96", "Block", {"num_frames": 6, "markov_rank": 64, **TRUNK, "num_anchors": 96}),
        Arm("medusa_96", "Medusa", {"num_heads": 5, "num_anchors": 96}),
        Arm("hydra_96", "Hydra", {"num_heads": 5, "num_anchors": 96}),
        Arm("ctc_survival", "CTC", {"markov_rank": 64, "weights": "survival", **FRAMES}),
        Arm("ctc_root_first", "CTC", {"root_everywhere": False, **FRAMES}),
        Arm("ctc_causal", "CTC", {"causal": True, **FRAMES}),
        Arm("ctc_12_8", "CTC", {"markov_rank": 64, "num_frames": 12, "num_labels": 8, "num_anchors": 24}),
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
    "options": ["ctc_markov", "ctc_distilled", "ctc_survival", "ctc_12_8", "ctc", "ctc_root_first", "ctc_causal"],
}


def trees_of(arm: Arm) -> dict[str, dict[str, Any]]:
    """The ways an arm's draft can become a tree: by name, arguments of decoding."""
    trees = TREES.get(arm.drafter, {"dynamic": {}})
    if arm.arguments.get("markov_rank"):  # the paper's tree knows no bias
        trees = {name: arguments for name, arguments in trees.items() if name != "paper"}
    return {name: arguments | {"num_nodes": BUDGETS[-1]} for name, arguments in trees.items()}


def learned(
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
    """Train drafters side by side and simulate decoding on the base's own greedy answers, by node budget and tree.

    What is done already is kept, so the same command goes on after a stop, and adds arms or seeds later.

    Args:
        base: Folder or hub id of the base.
        files: Training text, best the base's own: drafters regenerate.
        questions: JSONL file of the questions whose answers are decoded.
        out: Folder for the trained drafters and their figures.
        benchmark: Form of the questions: gsm8k, mt_bench or embedded.
        offset: Skip so many questions.
        limit: Questions at most.
        max_new_tokens: Longest answer.
        group: Arms to train: drafters, layers, anchors or options.
        arms: Arms by name instead.
        seeds: Of weights, anchors and order.
        steps: Training steps of each arm.
        features: Feature store of the training text: drafters features.
        baseline: Arm that others are divided by.
        only_train: Stop before the simulation.
        threads: Of torch; 0 leaves them as they are.
        table: Markdown file for the tables.
        figures: Folder for the plots.
    """
    names = arms or GROUPS.get(group, [])
    if unknown := [name for name in names if name not in ARMS] or not names:
        raise ValueError(f"unknown arms {unknown or group}: known are {', '.join(ARMS)}; groups {', '.join(GROUPS)}")
    if threads:
        torch.set_num_threads(threads)
    common, folder = Common(base, files, steps, features=features), Path(out)
    trained = {(name, seed): train(ARMS[name], seed, common, folder) for seed in seeds for name in names}
    if only_train:
        return
    frozen = load_base(base)
    answers = decoded_answers(frozen, benchmark, questions, offset, limit, max_new_tokens, folder)
    found = all_simulated(trained, frozen, answers)
    ended = sum(answer.ended for answer in answers)
    notes = [
        f"Base {base}; {len(answers)} answers of at most {max_new_tokens} tokens, {ended} ended by EOS; simulated on "
        f"the base's own greedy text, prefill not counted. {steps} steps of {common.batch_size} conversations, "
        f"{common.learning_rate:g} peak learning rate, seeds {', '.join(map(str, seeds))}.",
        "Mean over seeds, and in brackets the smallest and the largest.",
    ]
    show([lengths(found, baseline, notes)], torch.device("cpu"), table)
    if figures:
        plot(found, Path(figures))


def all_simulated(
    trained: dict[tuple[str, int], Path], frozen: Base, answers: Sequence[Answer]
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """`simulated` of exported drafters, by name and seed, with every tree they have: by name and tree, a run a seed."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (name, seed), exported in trained.items():
        for tree, arguments in trees_of(ARMS[name]).items():
            result = simulated(exported, tree, arguments, frozen, answers, BUDGETS)
            found.setdefault((name, tree), []).append(result | {"folder": exported.parent})
            print(f"{name} seed {seed} {tree}: {result['length']}", flush=True)
    return found


def lengths(found: dict[tuple[str, str], list[dict[str, Any]]], baseline: str, notes: list[str]) -> Measured:
    """Acceptance length of every arm and tree by node budget."""
    shown = (4, 16, 64)
    headings = [
        "drafter",
        "tree",
        "parameters",
        *(f"{b} nodes" for b in shown),
        "ended by EOS, 64",
        "fed, 64",
        "to baseline, 64",
    ]
    measured = Measured("Acceptance length by draft nodes", headings, notes=notes)
    at_baseline = [runs for (name, _), runs in found.items() if name == baseline]
    reference = mean(run["length"]["64"] for run in at_baseline[0]) if at_baseline else None
    for (name, tree), runs in found.items():
        cells = [[run["length"][str(budget)] for run in runs] for budget in shown]
        last = mean(cells[-1])
        measured.rows.append(
            [
                name,
                tree,
                f"{runs[0]['parameters'] / 1e6:.2f} M",
                *(f"{mean(cell):.3f} ({min(cell):.3f} to {max(cell):.3f})" for cell in cells),
                f"{mean(run['ended']['64'] for run in runs):.3f}",
                f"{mean(run['fed']['64'] for run in runs):.1f}",
                f"{last / reference:.3f}" if reference else "",
            ]
        )
    return measured


if __name__ == "__main__":
    main(learned)
