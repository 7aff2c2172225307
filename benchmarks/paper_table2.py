"""The CTC paper's Table 2 and Figure 3 (section 4.3): draft modules with and without the CTC transform, decoded live.

Rows are draft modules: linear heads + cross-entropy (Medusa), transformer + CTC, and transformer + cross-entropy
(Block), which the paper lacks. Each is decoded with trees that read its frames differently:

- plain tree verify: frame u is the u-th next token, and the most probable combinations form the tree. The paper leaves
  the blanks of a CTC module in the tree; the base never writes one, so they and the nodes below them are wasted
  (``blanks kept``). A milder reading gives the blank's probability to the tokens of its frame (``blanks dropped``).
- CTC verify: on every path of the tree, repeats are merged, then blanks dropped, and paths with the same text become
  one. For a module without a blank, this also removes the repeats of the text itself: "0 0" can no longer be drafted.

The last row of a CTC module, exact prefix search, spends the budget on texts from the start. The original code verifies
with the positions from before the transform and is not lossless. Here, all ways produce a tree of texts, so the same
verifier takes them all. ``benchmarks.learned_drafters --table2`` makes the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.experiment import Arm, GreedyAnswer, mean_and_range, remembered
from benchmarks.harness import ResultTable, alternate
from drafters import Limits, Medusa, checkpoint
from drafters.ctc.trees import BLANK, ctc_transform, paper_trees, with_blank
from drafters.protocol import NoDrafter
from drafters.tree import DraftTree
from drafters.trees.search import Candidates, SearchLimits, search
from inference.model_drafters import load_learned, with_draft_options
from inference.verifier.base import Base
from inference.verifier.graphed import make_runner
from inference.verifier.session import PHASES, Session, Step

NUM_NODES = 64  # of the draft, counted before the transform
MODULES = {
    "Medusa": "linear heads + cross-entropy",
    "Block": "transformer + cross-entropy",
    "CTC": "transformer + CTC",
}
PARTS = ("module", "LM head", "tree", "base")
NOTES = [
    "plain: frame u is token u; CTC: repeats of its paths are merged and blanks dropped; prefix: exact prefix search, "
    f"which the paper lacks. {NUM_NODES} nodes before the transform, as in the paper; fed counts those that are left.",
    "Speed-up: time per token without a drafter, by the median time of a step, relative to that with it, on the same "
    "questions in turns. The last columns are shares of the time of all steps (Figure 3): the draft module with the "
    "choice of candidates, its LM head, the tree with the CTC transform, and the base's forward pass.",
    "The paper (Vicuna-7B, MT-Bench, its own count of tokens per step, and speed-up): linear layers + cross-entropy "
    "2.58 and 2.13x plain, 2.38 and 1.71x with CTC verify; transformer + CTC 3.02 and 2.25x plain, 3.56 and 2.78x "
    "with CTC verify. Its Figure 3: draft model 14.93 %, CTC transform 5.36 %; Medusa's heads 3.71 %.",
]


# ---- ways to make a draft tree from frames


def transformed(candidates: Candidates, limits: SearchLimits) -> list[DraftTree]:
    """Apply the CTC transform to the most probable paths, for frames without a blank."""
    return [ctc_transform(tree) for tree in search(candidates, limits)]


def blanks_kept(candidates: Candidates, limits: SearchLimits) -> list[DraftTree]:
    """Read frame u as the u-th token, where a blank is one of the tokens.

    The base never writes a blank, so blanks and the nodes below them are then left out; with them, as many tokens would
    be accepted.
    """
    trees = search(Candidates(*with_blank(candidates)), SearchLimits(limits.num_nodes, candidates.probs.shape[1]))
    paths = [[*map(tree.path_tokens, range(len(tree)))] for tree in trees]
    return [DraftTree.from_paths([path for path in own if BLANK not in path]) for own in paths]


def blanks_dropped(candidates: Candidates, limits: SearchLimits) -> list[DraftTree]:
    """Read frame u as the u-th token, given that it is not the blank."""
    assert candidates.blank is not None
    written = np.maximum(1 - candidates.blank, np.finfo(candidates.blank.dtype).tiny)
    return search(Candidates(candidates.tokens, candidates.probs / written[..., None]), limits)


Build = Callable[[Candidates, SearchLimits], list[DraftTree]]


def trees_of_heads(drafter: Medusa, build: Build, parts: Sequence[np.ndarray], limits: Limits) -> list[DraftTree]:
    """What `Medusa.trees_from` returns, with another way to build the trees."""
    token_ids, probabilities = parts
    num_nodes = min(drafter.draft_options.num_nodes, limits.max_nodes)
    search_limits = SearchLimits(num_nodes, limits.max_depth, limits.eos)
    return build(Candidates(token_ids.astype(np.int64), probabilities), search_limits)


CROSS_ENTROPY: dict[str, Build] = {"plain": search, "CTC": transformed}
WAYS: dict[str, dict[str, Build]] = {
    "Medusa": CROSS_ENTROPY,
    "Block": CROSS_ENTROPY,
    "CTC": {
        "plain, blanks kept": blanks_kept,
        "plain, blanks dropped": blanks_dropped,
        "CTC": paper_trees,
        "prefix": search,
    },
}


# ---- the table


def fits(arm: Arm) -> bool:
    """Whether an arm has a place in the table: it has no bias between frames."""
    return arm.drafter in WAYS and not arm.arguments.get("markov_rank")


def measure(folder: Path, base: Base, answers: Sequence[GreedyAnswer]) -> dict[str, Any]:
    """Decode the base's own answers with an exported drafter in every way of building the tree, and without it.

    Returns:
        By way: ``length``, the acceptance length (tokens per base forward, including the bonus token); ``fed``, the
        number of draft tokens per step; ``speedup``; and the share of the steps' time that each of `PARTS` took.
    """
    config = with_draft_options(checkpoint.read_config(folder), {"num_nodes": NUM_NODES})
    runner = make_runner(replace(base, graphed=False))  # the parts of a draft are timed apart
    sessions, clocks = {"none": Session(runner, NoDrafter())}, dict[str, dict[str, float]]()
    kind = config.class_path.rpartition(".")[2]
    for way, build in WAYS[kind].items():
        drafter: Any = load_learned(folder, config, base)
        clock = clocks[way] = {"LM head": 0.0, "tree": 0.0}
        drafter.logits, build = timed(drafter.logits, clock, "LM head"), timed(build, clock, "tree")
        if kind == "Medusa":
            drafter.trees_from = partial(trees_of_heads, drafter, build)
        else:
            drafter.search = build
        sessions[way] = Session(runner, drafter)
    steps: dict[str, list[Step]] = {way: [] for way in sessions}
    for _, index, way in alternate(list(sessions), len(answers), 1, "decoding"):
        tokens, start = answers[index].tokens.tolist(), answers[index].start
        steps[way] += sessions[way].run(tokens[:start], len(tokens) - start, base.eos).steps[1:]
    if not steps["none"]:
        raise ValueError("the answers have a single token, which the prefill decides: raise max_new_tokens")
    medians = {way: median(sum(step.seconds) for step in own) for way, own in steps.items()}
    results: dict[str, Any] = {}
    for way, clock in clocks.items():
        phases = dict(zip(PHASES, map(sum, zip(*(step.seconds for step in steps[way]), strict=True)), strict=True))
        clock["module"] = phases["propose"] + phases["observe"] - clock["LM head"] - clock["tree"]
        clock["base"] = phases["forward"]
        length = mean(step.emitted for step in steps[way])
        results[way] = {"length": length, "fed": mean(step.fed_candidates for step in steps[way])}
        results[way] |= {"speedup": length * medians["none"] / medians[way]}
        results[way] |= {part: clock[part] / sum(phases.values()) for part in PARTS}
    return results


def timed(function: Callable[..., Any], clock: dict[str, float], part: str) -> Callable[..., Any]:
    """The same function, which adds the seconds of its calls to a part of the clock."""

    def call(*arguments: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments)
        clock[part] += time.perf_counter() - started
        return result

    return call


def repeats(answers: Sequence[GreedyAnswer]) -> float:
    """Return the share of the answers' tokens that repeat the token before, which no merged path can draft."""
    written = [answer.tokens[answer.start - 1 :] for answer in answers]
    return sum(int((text[1:] == text[:-1]).sum()) for text in written) / max(1, sum(len(text) - 1 for text in written))


def result_table(results: Sequence[tuple[Arm, list[Path]]], base: Base, answers: Sequence[GreedyAnswer]) -> ResultTable:
    """Return acceptance length, speed-up and the parts of a step's time of every module and way.

    Args:
        results: Arms that `fits`, and the exported drafters of each, one for each seed.
        base: The base.
        answers: Its own answers.
    """
    headings = ["arm", "draft module", "verify", "acceptance length", "to plain", "fed", "speed-up", *PARTS]
    notes = [f"{repeats(answers):.2%} of the answers' tokens repeat the token before them.", *NOTES]
    table = ResultTable("Draft module and verify", headings, notes=notes)
    for arm, exported in results:
        runs = [
            remembered(
                folder.parent / "table2.json", [NUM_NODES, PARTS], answers, partial(measure, folder, base, answers)
            )
            for folder in exported
        ]
        first = mean(run[next(iter(run))]["length"] for run in runs)
        for way in runs[0]:
            found = {key: mean(run[way][key] for run in runs) for key in runs[0][way]}
            cells = [mean_and_range([run[way]["length"] for run in runs]), f"{found['length'] / first:.3f}"]
            cells += [f"{found['fed']:.1f}", f"{found['speedup']:.2f}x", *(f"{found[part]:.1%}" for part in PARTS)]
            table.rows.append([arm.name, MODULES[arm.drafter], way, *cells])
    return table
