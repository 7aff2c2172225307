"""The CTC paper's Table 2 (section 4.3): the effects of the draft module and of the CTC transform, separately.

Rows are draft modules: linear heads + cross-entropy (Medusa), transformer + CTC, and transformer + cross-entropy
(Block), which the paper lacks. Columns are two ways to read the distributions of the frames that a module predicts:

- plain tree verify: frame u is the u-th next token, and the most probable combinations form the tree. The frames of a
  CTC module also contain blanks. The paper leaves them in the tree, although the base never writes a blank, so a blank
  and all nodes below it are wasted (``blanks kept``). A milder reading gives the blank's probability to the tokens of
  its frame (``blanks dropped``). In both, repeated frames remain errors.
- CTC verify: on every path of the tree, repeats are merged, then blanks dropped, and paths with the same text become
  one. For a module without a blank, this also removes the repeats of the text itself: "0 0" can no longer be drafted.
  It gains where two frames of a path predict the same token.

Nodes are counted before the transform, as in the paper, whose removed nodes stay in the batch; the table also shows how
many nodes are left. The last row of a CTC module, exact prefix search, spends the budget on texts from the start.

The original code verifies with the positions from before the transform and is not lossless. Here, all ways produce a
tree of texts: without blanks, with distinct siblings, and with each node's depth as its position in the text. So the
same engine verifies them all, and emits the text of plain decoding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from benchmarks.ctc.frame_trees import WAYS, Build, frames_at
from benchmarks.experiment import GreedyAnswer, SharedSettings, decoded_answers, train
from benchmarks.harness import ResultTable, main, show
from benchmarks.learned_drafters import ARMS, fits_paper
from data.files import write_text
from drafters import CTC, Block, Medusa, checkpoint
from inference.verifier.base import Base, load_base

MODULES = {
    "Medusa": "linear heads + cross-entropy",
    "Block": "transformer + cross-entropy",
    "CTC": "transformer + CTC",
}
NOTES = [
    "plain: frame u is token u, and the most probable combinations form the tree. blanks kept: blanks are nodes, as in "
    "the paper; the base never writes one, so they and the nodes below them count in the budget and are not fed. "
    "blanks dropped: a blank's probability goes to the tokens of its frame.",
    "CTC: on every path of the plain tree, repeats are merged, then blanks dropped, and equal texts become one path; "
    "for transformer + CTC this is the paper's method. Without a blank, no repeat of the text itself can be drafted.",
    "prefix: exact prefix search, which spends the budget on texts from the start; the paper has no such row.",
    "Nodes are counted before the transform, as in the paper, whose removed nodes stay in the batch; fed counts the "
    "nodes that are left. Each budget is simulated separately. All trees are trees of texts (no blank, distinct "
    "siblings, depth is the position in the text), so the same engine verifies them and emits the text of plain "
    "decoding.",
    "The paper (Vicuna-7B, MT-Bench, its own count of tokens per step): linear layers + cross-entropy 2.58 plain, 2.38 "
    "with CTC verify; transformer + CTC 3.02 plain, 3.56 with CTC verify.",
]


def measure(
    drafter: Medusa | Block | CTC,
    base: Base,
    answers: Sequence[GreedyAnswer],
    ways: dict[str, Build],
    budgets: Sequence[int],
) -> dict[str, dict[str, dict[str, float]]]:
    """Simulate decoding of the base's own answers for every way of building the tree and every budget.

    The budgets are simulated separately because the transform of a smaller tree is not a part of the transform of a
    larger one. The frames are computed once.

    Returns:
        By way and budget: the acceptance length (tokens per base forward, including the bonus token) over all answers,
        and over those that end with an EOS token, and the number of draft tokens per step.
    """
    # For each way and budget: (emitted, steps, fed) x (all answers, answers ended by EOS).
    sums = {(way, budget): np.zeros((3, 2)) for way in ways for budget in budgets}
    for answer in answers:
        tokens, start = answer.tokens.to(base.model.device), answer.start
        end = len(tokens)
        if end - start < 2:
            continue
        with torch.inference_mode():
            hidden = base.hidden_states(tokens[None], drafter.required_outputs.hidden_layers)[0][0]
        anchors = torch.arange(start, end - 1, device=tokens.device)
        frames, text = frames_at(drafter, hidden, tokens, anchors, base.base_weights), answer.tokens.tolist()
        for (way, budget), counts in sums.items():
            root = start
            while root < end - 1:
                tree = ways[way](frames[root - start], budget, end - start, base.eos)
                gained = min(len(tree.follow(text[root + 1 :])) + 1, end - 1 - root)
                counts += np.outer((gained, 1, len(tree)), (1, answer.ended))
                root += gained
    results: dict[str, dict[str, dict[str, float]]] = {way: {} for way in ways}
    for (way, budget), ((emitted, emitted_ended), (steps, steps_ended), (fed, _)) in sums.items():
        length, ended = emitted / max(1, steps), emitted_ended / max(1, steps_ended)
        results[way][str(budget)] = {"length": length, "ended": ended, "fed": fed / max(1, steps)}
    return results


def measure_exported(
    folder: Path, base: Base, answers: Sequence[GreedyAnswer], budgets: Sequence[int]
) -> dict[str, Any]:
    """`measure` an exported drafter in all ways that fit it; the results are stored in ``table2.json`` next to it."""
    path = folder.parent / "table2.json"
    texts = json.dumps([[answer.tokens.tolist(), answer.start] for answer in answers])
    key = json.dumps([list(budgets), hashlib.sha256(texts.encode()).hexdigest()])
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if key not in known:
        drafter, config = checkpoint.load(folder, base.model.dtype)
        assert isinstance(drafter, (Medusa, Block, CTC))  # the only ones that `table2` accepts
        ways = WAYS[config.class_path.removeprefix("drafters.")]
        known[key] = measure(drafter.to(base.model.device), base, answers, ways, budgets)
        write_text(path, json.dumps(known, indent=1))
    return known[key]


def table2(
    base: str,
    files: list[str],
    questions: str,
    out: str,
    benchmark: str = "gsm8k",
    offset: int = 0,
    limit: int | None = None,
    max_new_tokens: int = 200,
    arms: list[str] = ["medusa", "block", "ctc_paper"],  # noqa: B006
    seeds: list[int] = [0, 1, 2],  # noqa: B006
    budgets: list[int] = [16, 64],  # noqa: B006
    steps: int = 600,
    features: str | None = None,
    threads: int = 0,
    table: str | None = None,
) -> None:
    """The CTC paper's Table 2: draft modules with and without the CTC transform, on the base's own greedy answers.

    Results that exist already are kept, also drafters that benchmarks.learned_drafters trained in the same folder.

    Args:
        base: Folder or hub id of the base.
        files: Training text, best the base's own text, from `drafters regenerate`.
        questions: JSONL file with the questions whose answers are decoded.
        out: Folder for the trained drafters and their results.
        benchmark: Format of the questions: gsm8k, mt_bench or embedded.
        offset: Number of questions to skip at the beginning.
        limit: Maximum number of questions.
        max_new_tokens: Maximum number of tokens of an answer.
        arms: Arms of benchmarks.learned_drafters, from Medusa, Block and CTC without a Markov bias.
        seeds: Seeds of the weights, the anchors and the order of the text.
        budgets: Numbers of draft nodes, counted before the transform.
        steps: Training steps of each arm.
        features: Feature store of the training text, from `drafters features`.
        threads: Number of torch threads; 0 keeps the default.
        table: Markdown file to write the table to.
    """
    fitting = [name for name, arm in ARMS.items() if arm.drafter in WAYS and fits_paper(arm)]
    if unfit := [name for name in arms if name not in fitting]:
        raise ValueError(f"arms {', '.join(unfit)} do not fit into this table: use some of {', '.join(fitting)}")
    if not arms or not seeds or not budgets or min(budgets) < 1:
        raise ValueError("arms, seeds and budgets must not be empty, and budgets at least 1")
    if threads:
        torch.set_num_threads(threads)
    common, folder = SharedSettings(base, files, steps, features=features), Path(out)
    trained = {name: [train(ARMS[name], seed, common, folder) for seed in seeds] for name in arms}
    frozen = load_base(base)
    answers = decoded_answers(frozen, benchmark, questions, offset, limit, max_new_tokens, folder)
    results = {name: [measure_exported(each, frozen, answers, budgets) for each in trained[name]] for name in arms}
    notes = [
        f"Base {base}; {len(answers)} answers of at most {max_new_tokens} tokens, simulated on the base's own greedy "
        f"text, prefill not counted; {steps} steps of {common.batch_size} conversations, seeds "
        f"{', '.join(map(str, seeds))}: the mean, and in brackets the smallest and the largest.",
        f"{repeats(answers):.2%} of the answers' tokens repeat the token before them.",
        *NOTES,
    ]
    show([result_table(results, budgets, notes)], torch.device("cpu"), table)


def repeats(answers: Sequence[GreedyAnswer]) -> float:
    """Return the share of the answers' tokens that repeat the token before, which no merged path can draft."""
    written = [answer.tokens[answer.start - 1 :] for answer in answers]
    return sum(int((text[1:] == text[:-1]).sum()) for text in written) / max(1, sum(len(text) - 1 for text in written))


def result_table(results: dict[str, list[dict[str, Any]]], budgets: Sequence[int], notes: list[str]) -> ResultTable:
    """Return the acceptance length of every module and way by budget, also relative to the module's first way."""
    largest = str(max(budgets))
    headings = ["arm", "draft module", "verify"]
    for budget in budgets:
        headings += [f"{budget} nodes", f"fed, {budget}"]
    headings.append(f"to plain, {largest}")
    table = ResultTable("Acceptance length by draft module and verify", headings, notes=notes)
    for name, runs in results.items():
        first = mean(run[next(iter(run))][largest]["length"] for run in runs)
        for way in runs[0]:
            cells = []
            for size in map(str, budgets):
                lengths = [run[way][size]["length"] for run in runs]
                cells.append(f"{mean(lengths):.3f} ({min(lengths):.3f} to {max(lengths):.3f})")
                cells.append(f"{mean(run[way][size]['fed'] for run in runs):.1f}")
            last = mean(run[way][largest]["length"] for run in runs)
            table.rows.append([name, MODULES[ARMS[name].drafter], way, *cells, f"{last / first:.3f}"])
    return table


if __name__ == "__main__":
    main(table2)
