"""Learned drafters trained on the same text and compared on the same answers, by nodes, tree, seed and training."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

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
from data.dtypes import Dtype
from data.files import read_json
from drafters import CTC, checkpoint
from drafters.checks import spread_layers
from inference.evaluate.plots import FADED, PALETTE
from inference.verifier.base import load_base
from train.formats.block import without_blank

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
REAL = {**TOKENS, "hidden_layers": [2, 9, 16, 23, 28], "markov_rank": 128, "markov_factors": "base", "num_frames": 8}
REAL |= {"draft_vocab_size": 16384, "num_anchors": 64, "num_columns": 4096}  # for SmolLM2, as in smollm2.yaml
REAL_CTC = {**REAL, **LOOKUP, "num_labels": 6}
REAL_EAGLE3 = {"depth": 6, "num_unroll": 6, "own_head": True, "draft_vocab_size": 16384}
SERVED: dict[str, Any] = {"frames_differ": False, "root_everywhere": False, "num_frames": 7}  # for llama.cpp
SERVED |= {"markov_rank": 128, "markov_factors": "base", "num_anchors": 64, "num_columns": 4096}
SERVED_EAGLE3 = {"depth": 6, "num_unroll": 4, "own_head": False, "draft_vocab_size": 8192}
PAPER = {"lookup": False, "markov_rank": 0, "objective": "ctc", "hidden_layers": [-1], "tokens_in_context": False}
REAL_ADAMW = {"base_dtype": "bfloat16"}
REAL_MUON = {**REAL_ADAMW, "optimizer": "muon", "learning_rate": 8e-3}
ARMS = {
    arm.name: arm
    for arm in (
        Arm("medusa", "Medusa", HEADS),
        Arm("hydra", "Hydra", HEADS),
        Arm("eagle", "EAGLE", {"depth": 6}),
        Arm("eagle_8", "EAGLE", {"depth": 8}),
        Arm("block", "Block", {"num_frames": 6, **TRUNK}),
        Arm("block_muon", "Block", {"num_frames": 8, **BASE_BIAS, **TRUNK, **FUSED, **TOKENS}, MUON),
        Arm("block_10_muon", "Block", {"num_frames": 10, **BASE_BIAS, **TRUNK, **TOKENS}, MUON),
        Arm("block_deep_muon", "Block", {"num_frames": 12, **BASE_BIAS, **TRUNK, **DEEP, **TOKENS}, MUON),
        Arm("ctc_paper", "CTC", {"objective": "ctc", **FRAMES}),
        Arm("ctc_paper_layer", "CTC", {"objective": "ctc", **FRAMES, **LLAMA}),
        Arm("ctc_paper_code", "CTC", {"objective": "ctc", **CODE, **LLAMA}),
        Arm("ctc", "CTC", FRAMES),
        Arm("ctc_markov", "CTC", {**BIAS, **FRAMES}),
        Arm("ctc_markov_base", "CTC", {**BASE_BIAS, **FRAMES}),
        Arm("ctc_fused_base", "CTC", {**BASE_BIAS, **FRAMES, **FUSED}),
        Arm("ctc_muon", "CTC", {**BASE_BIAS, **FRAMES, **FUSED, **TOKENS}, MUON),
        Arm("ctc_10_8_muon", "CTC", {**BASE_BIAS, **TEN_FRAMES, **TOKENS}, MUON),
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
        Arm("block_served", "Block", SERVED, REAL_MUON),
        Arm("ctc_served", "CTC", {**SERVED, "num_labels": 7}, REAL_MUON),
        Arm("eagle3_served", "EAGLE3", SERVED_EAGLE3, REAL_MUON),
        Arm("eagle3_smollm2", "EAGLE3", REAL_EAGLE3, {**REAL_ADAMW, "learning_rate": 1e-3}),
    )
}
# A fair comparison: every method with each optimizer, the base's frozen head, as many anchors where they are sampled
# (EAGLE and EAGLE-3 take all positions), and the same layers where any are fused. Only CTC and block can have a lookup
# and copies, which give each frame the token in its place of the passage that was found.
FAIR_HEADS = {"num_heads": 6, "own_heads": False, "num_anchors": 64}
FAIR_FRAMES = {name: value for name, value in REAL.items() if name != "hidden_layers"}
COPIES = {**LOOKUP, "copy": True}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("Medusa", FAIR_HEADS),
    "hydra": ("Hydra", FAIR_HEADS),
    "hydra++": ("Hydra", {**FAIR_HEADS, "num_layers": 4, "prefix_attention": True, "distillation": True}),
    "eagle": ("EAGLE", {"depth": 6}),
    "eagle3": ("EAGLE3", {**REAL_EAGLE3, "own_head": False}),
    "block": ("Block", {**TRUNK, **FAIR_FRAMES}),
    "block_copy": ("Block", {**TRUNK, **FAIR_FRAMES, **COPIES}),
    "ctc": ("CTC", {**FAIR_FRAMES, "num_labels": 6}),
    "ctc_copy": ("CTC", {**FAIR_FRAMES, **COPIES, "num_labels": 6}),
}
FUSING = "EAGLE3", "Block", "CTC"
OPTIMIZERS = ("muon", 4e-3), ("muon", 8e-3), ("adamw", 1e-3), ("adamw", 2e-3)
FAIR_ARMS = [
    Arm(f"{method}_{optimizer}_{rate:g}", *METHODS[method], {"optimizer": optimizer, "learning_rate": rate}, method)
    for method, (optimizer, rate) in product(METHODS, OPTIMIZERS)
]
FAIR = {arm.name: arm for arm in FAIR_ARMS}
ARMS |= FAIR
FEWER_ANCHORS = METHODS["ctc"][1] | {"num_anchors": 16}
ARMS["ctc_16_anchors"] = Arm("ctc_16_anchors", "CTC", FEWER_ANCHORS, FAIR["ctc_muon_0.008"].model, "ctc")
GROUPS = {
    "fair": [*FAIR],
    **{f"fair_{method}": [name for name, arm in FAIR.items() if arm.method == method] for method in METHODS},
    "best": ["medusa", "hydra", "eagle", "ctc_paper", "block_muon", "ctc_muon", "block_deep_muon", "ctc_deep_muon"],
    "served": ["block_served", "ctc_served", "eagle3_served"],
    "module": ["ctc_paper", "ctc_paper_layer", "ctc_paper_code"],
    "best_long": ["medusa", "hydra", "eagle_8", "ctc_paper", "block_10_muon", "ctc_10_8_muon"],
}
SHOWN = (4, 16, 64)  # numbers of nodes in the tables

Runs = dict[tuple[str, str], list[dict[str, Any]]]  # by arm and tree, a result for each seed
Results = dict[str, Runs]  # by the length of the training: "600 steps" or "300 seconds"


def trees_of(arm: Arm) -> dict[str, dict[str, Any]]:
    """Return the ways to build a tree from an arm's draft: by name, arguments of the drafter. The first is the best."""
    if arm.name in GROUPS["served"]:
        return {"chain": {"tree": "chain"}}
    if arm.drafter not in ("CTC", "Medusa", "Block"):
        return {"dynamic": {"num_nodes": BUDGETS[-1]}}
    trees = ["prefix"] if arm.drafter == "CTC" else ["best_first"]
    if arm.drafter == "CTC" and paper_table2.fits(arm):
        trees.append("paper")
    return {tree: {"tree": tree, "num_nodes": BUDGETS[-1]} for tree in trees}


def without_its_blank(folder: Path) -> Path:
    """Write the block drafter that `drafters export` makes of a CTC drafter for engines, and return its folder."""
    drafter, config = checkpoint.load(folder)
    assert isinstance(drafter, CTC)
    written = folder.parent / "without_blank" / folder.name
    checkpoint.save(written, *without_blank(drafter, config))
    return written


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
    seconds: list[int] = [],  # noqa: B006
    features: list[str] | str | None = None,
    max_length: int = 384,
    base_dtype: Dtype = "float32",
    hidden_layers: list[int] = [],  # noqa: B006
    nodes: int = SHOWN[-1],
    table2: bool = False,
    table: str | None = None,
    figure: str | None = None,
) -> None:
    """Train drafters and simulate decoding on the base's own greedy answers, by number of nodes and kind of tree.

    Every number of steps is a training of its own, whose learning rate decays to zero at its last step. Results that
    exist already are kept: repeat the command to continue an interrupted run, or to add arms, seeds or steps.

    The arms of the group ``fair`` are each method with two rates of Muon and two of AdamW. All are trained with the
    first seed; the further seeds are for the best of each method, and so are the curves.

    Args:
        base: Folder or hub id of the base.
        files: Training text, best the base's own text, from `drafters regenerate`.
        questions: JSONL file with the questions whose answers are decoded.
        out: Folder for the trained drafters and their results, in a folder for each number of steps.
        benchmark: Format of the questions: gsm8k, mt_bench or embedded.
        offset: Number of questions to skip at the beginning.
        limit: Maximum number of questions.
        max_new_tokens: Maximum number of tokens of an answer.
        arms: Names of the arms to train, or of groups of them: best, best_long, module, served, fair, and
            fair_METHOD for one of its methods. NAME:60 is trained for 60 steps at most, where a step takes long.
        seeds: Seeds of the weights, the anchors and the order of the text.
        steps: Numbers of training steps of each arm, which read the same text; several give learning curves.
        seconds: Times that each arm is trained for, too; the machine should be idle.
        features: Feature store of the training text, from `drafters features`, or several that hold it together.
        max_length: Largest number of tokens of a conversation in training.
        base_dtype: Dtype of the base; with bfloat16, drafters are trained in mixed precision.
        hidden_layers: Base layers that the arms of ``fair`` and ``served`` fuse; by default five, evenly spaced.
        nodes: Number of draft nodes in the learning curves: 1, 2, 4, 8, 16, 32 or 64.
        table2: Also make Table 2 of the CTC paper, decoded live: the Medusa, Block and CTC drafters without a bias.
        table: Markdown file to write the tables to.
        figure: PNG file for the learning curves.
    """
    most = {name: int(number) for name, _, number in (arm.partition(":") for arm in arms) if number}  # steps
    names = list(dict.fromkeys(name for arm in arms for name in GROUPS.get(arm, [arm.partition(":")[0]])))
    if unknown := [name for name in names if name not in ARMS]:
        raise ValueError(f"unknown arms {', '.join(unknown)}: known are {', '.join([*ARMS, *GROUPS])}")
    if not names or not seeds or not steps:
        raise ValueError("--arms, --seeds and --steps must not be empty")
    if nodes not in BUDGETS:
        raise ValueError(f"--nodes is {nodes}, not one of {', '.join(map(str, BUDGETS))}")
    folder, frozen = Path(out), load_base(base, base_dtype)
    layers = {"hidden_layers": hidden_layers or [*spread_layers(frozen.shape.num_layers)]}
    answers = decoded_answers(frozen, benchmark, questions, offset, limit, max_new_tokens, folder)
    common = SharedSettings(base, files, min(steps), None, base_dtype, max_length=max_length, features=features)
    lengths = {f"{count:,} steps": replace(common, steps=count) for count in sorted(steps)}
    lengths |= {f"{time} seconds": replace(common, seconds=time) for time in sorted(seconds)}
    results: Results = {length: {} for length in lengths}
    exported: dict[tuple[str, str, int], Path] = {}
    for chosen, of in ((names, seeds[:1]), (None, seeds[1:])):
        for (length, settings), seed, name in product(lengths.items(), of, chosen or best_arms(results, nodes)):
            if not settings.seconds and settings.steps > most.get(name, settings.steps):
                continue
            arm = ARMS[name]
            if arm.method and arm.drafter in FUSING:
                arm = replace(arm, arguments=arm.arguments | layers)
            elif name in GROUPS["served"]:  # EAGLE-3 fuses three layers there
                fused = layers["hidden_layers"][:: 2 if arm.drafter == "EAGLE3" else 1]
                arm = replace(arm, arguments=arm.arguments | {"hidden_layers": fused})
            place = folder / (f"{settings.seconds}s" if settings.seconds else str(settings.steps))
            drafter = exported[length, name, seed] = train(arm, seed, settings, place)
            measured = read_json(drafter.parent / TIME)
            further = {"minutes": measured["cpu_seconds"] / 60, "tokens": measured["tokens"]}
            ways = [(tree, drafter, arguments) for tree, arguments in trees_of(arm).items()]
            if name == "ctc_served":
                ways.append(("chain without the blank", without_its_blank(drafter), ways[0][2]))
            for tree, exported_to, arguments in ways:
                result = simulate_exported(exported_to, arguments, frozen, answers, BUDGETS)
                results[length].setdefault((name, tree), []).append(result | further)
                print(f"{name} seed {seed} {length} {tree}: {result['length']}", flush=True)
    ended = sum(int(answer.tokens[-1]) in frozen.eos for answer in answers)
    notes = [
        f"Base {base}; {len(answers)} answers of at most {max_new_tokens} tokens, {ended} ended by EOS; simulated on "
        f"the base's own greedy text, prefill not counted. Steps of {common.batch_size} conversations, "
        f"{common.learning_rate:g} peak learning rate of AdamW unless the name says another, seeds "
        f"{', '.join(map(str, seeds))}. Tokens: of the text that was read in training, repeated or not.",
        "Means over the seeds, with the smallest and the largest in brackets.",
    ]
    if FAIR.keys() & names:
        notes.append(
            f"EAGLE-3, block and CTC fuse layers {layers['hidden_layers']}, the others read the last state. The "
            "head is the base's, frozen. Only block and CTC can have a lookup and copies (`_copy`)."
        )
    tables = [acceptance_table(length, results[length], notes) for length in results]
    if table2:
        fitting = [ARMS[name] for name in names if paper_table2.fits(ARMS[name]) and not ARMS[name].method]
        longest = f"{max(steps):,} steps"
        exported_of = [(arm, [exported[longest, arm.name, seed] for seed in seeds]) for arm in fitting]
        tables.append(paper_table2.result_table(exported_of, frozen, answers))
    if len(results) > 1:
        tables.append(curve_table(results, nodes, notes))
    show(tables, torch.device("cpu"), table)
    if figure:
        plot(results, nodes, Path(figure))


def acceptance_table(length: str, results: Runs, notes: list[str]) -> ResultTable:
    """Return the acceptance length of every arm and kind of tree by number of nodes, and the cost of its training."""
    headings = ["drafter", "tree", "parameters", *(f"{nodes} nodes" for nodes in SHOWN), "fed, 64"]
    headings += ["tokens", "CPU minutes"]
    table = ResultTable(f"Acceptance length by draft nodes, {length}", headings, notes=notes)
    for (name, tree), runs in results.items():
        cells = [name, tree, f"{runs[0]['parameters'] / 1e6:.2f} M"]
        cells += [mean_and_range([run["length"][str(nodes)] for run in runs]) for nodes in SHOWN]
        cells += [f"{mean(run['fed']['64'] for run in runs):.1f}", f"{mean(run['tokens'] for run in runs):,.0f}"]
        table.rows.append([*cells, f"{mean(run['minutes'] for run in runs):.1f}"])
    return table


# ---- learning curves


class Point(NamedTuple):
    """An arm after one length of training."""

    lengths: list[float]  # acceptance length of each seed
    tokens: float  # that were read, mean
    minutes: float  # of training, mean


def curves(results: Results, nodes: int) -> dict[str, dict[str, Point]]:
    """Return the points of each arm with its best tree, by the length of the training."""
    points: dict[str, dict[str, Point]] = {}
    for length, arms in results.items():
        for (name, tree), runs in arms.items():
            if tree == next(iter(trees_of(ARMS[name]))):
                values = [run["length"][str(nodes)] for run in runs]
                cost = mean(run["tokens"] for run in runs), mean(run["minutes"] for run in runs)
                points.setdefault(name, {})[length] = Point(values, *cost)
    return points


def best_arms(results: Results, nodes: int) -> list[str]:
    """Return the arms, of each method the one alone that accepts most at the end of the most steps."""
    last = {name: list(by.values())[-1] for name, by in curves(_by_steps(results), nodes).items()}
    ranked = sorted(last, key=lambda name: -mean(last[name].lengths))
    best = {ARMS[name].method or name: name for name in reversed(ranked)}
    return [name for name in last if name in best.values()]


def _by_steps(results: Results) -> Results:
    return {length: runs for length, runs in results.items() if length.endswith("steps")}


def curve_table(results: Results, nodes: int, notes: list[str]) -> ResultTable:
    """Return the acceptance length of every arm by the length of the training."""
    table = ResultTable(f"Acceptance length by training, {nodes} nodes", ["drafter", *results], notes=notes)
    for name, by in curves(results, nodes).items():
        table.rows.append([name, *(mean_and_range(by[each].lengths) if each in by else "" for each in results)])
    return table


def plot(results: Results, nodes: int, path: Path) -> None:
    """Plot acceptance length by tokens read and by CPU time, as means over seeds, shaded from least to most.

    A line joins trainings of more and more steps; a hollow marker is one that ended with its time.
    """
    figure = Figure(figsize=(9.6, 4.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, label in zip(panels, ("tokens read in training", "CPU time of the training, minutes"), strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#d8dce2", linewidth=0.6)
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0].set_ylabel(f"acceptance length, {nodes} nodes")
    panels[0].xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[1].xaxis.set_major_formatter("{x:g}")
    points, is_by_steps = curves(results, nodes), _by_steps(results).__contains__
    for name, colour in zip(best_arms(results, nodes), cycle(PALETTE + FADED), strict=False):
        by_steps = [point for length, point in points[name].items() if is_by_steps(length)]
        timed = [point for length, point in points[name].items() if not is_by_steps(length)]
        label = name.replace("_", " ") if ARMS[name].method else name
        for place, axes in enumerate(panels, start=1):
            axes.minorticks_off()
            values, lengths = ([point[place] for point in by_steps], [point.lengths for point in by_steps])
            axes.plot(values, [*map(mean, lengths)], marker="o", markersize=3, color=colour, label=label)
            axes.fill_between(values, [*map(min, lengths)], [*map(max, lengths)], color=colour, alpha=0.15)
            where = [point[place] for point in timed], [mean(point.lengths) for point in timed]
            axes.plot(*where, marker="o", markersize=5, fillstyle="none", linestyle="", color=colour)
    title = None if all(map(is_by_steps, results)) else "hollow: to the same time"
    panels[1].legend(title=title, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    main(learned_drafters)
