"""The CTC paper's Table 2 (section 4.3): what the draft module gains, and what the CTC transform does, apart.

Rows are draft modules: linear heads + cross-entropy (Medusa), transformer + CTC, and the one the paper lacks,
transformer + cross-entropy (Block). Columns are two ways of reading what the module gives, the law of each frame:

- plain tree verify: frame u is the u-th next token, and the most probable combinations are the tree. A CTC module's
  frames hold blanks too. The paper leaves them in the tree, where no base ever writes one: a blank and all below it
  are nodes spent for nothing (``blanks kept``). The milder reading gives the blank's share to the tokens of its frame
  (``blanks dropped``). Repeated frames stay wrong in both.
- CTC verify: on every path of the tree repeats are merged, then blanks dropped, and paths that spell one text become
  one. Without a blank that takes out every repeat, those of the text too: "0 0" cannot be drafted any more. What it can
  win is a path of which two frames guessed one and the same token.

The budget is counted before the transform, as in the paper, whose removed nodes stay in the batch; what is fed after it
is shown. The last row of a CTC module, exact prefix search, spends the budget on texts from the start.

The original code verifies with the positions of before the transform, and is not lossless. Here both ways end in a tree
of texts: no blank, distinct siblings, a node's depth its place in the text. So one engine verifies them all alike, and
emits what the base alone would.
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

from benchmarks.experiment import Answer, Common, decoded_answers, train
from benchmarks.frame_trees import WAYS, Build, frames_at
from benchmarks.harness import Measured, main, show
from benchmarks.learned_drafters import ARMS
from drafters import CTC, Block, Medusa, checkpoint
from drafters.atomic_write import atomic_write
from inference.engine.base import Base, load_base

MODULES = {
    "Medusa": "linear heads + cross-entropy",
    "Block": "transformer + cross-entropy",
    "CTC": "transformer + CTC",
}
NOTES = [
    "plain: frame u is token u, the most probable combinations are the tree. blanks kept: blanks are nodes of it, as "
    "in the paper; the base never writes one, so they and what is below them count in the budget and are not fed. "
    "blanks dropped: a blank's share goes to the tokens of its frame.",
    "CTC: on every path of the plain tree repeats are merged, then blanks dropped, and equal texts are one path; for "
    "transformer + CTC this is the paper's method. Without a blank no repeat of the text itself can be drafted.",
    "prefix: exact prefix search, which spends the budget on texts from the start; the paper has no such row.",
    "Nodes are counted before the transform, as in the paper, whose removed nodes stay in the batch; fed are those "
    "that are left. Each budget is simulated apart. All trees are of texts (no blank, distinct siblings, depth is the "
    "place in the text), so one engine verifies them alike and emits what the base alone would.",
    "The paper (Vicuna-7B, MT-Bench, its own count of tokens a step): linear layers + cross-entropy 2.58 plain, 2.38 "
    "with CTC verify; transformer + CTC 3.02 plain, 3.56 with CTC verify.",
]


def measure(
    drafter: Medusa | Block | CTC, base: Base, answers: Sequence[Answer], ways: dict[str, Build], budgets: Sequence[int]
) -> dict[str, dict[str, dict[str, float]]]:
    """Decode the base's own answers, each way and budget apart: what a transform leaves of a smaller tree is no
    beginning of what it leaves of a larger one. The frames are computed once.

    Returns:
        By way and budget the acceptance length (tokens a base forward, bonus included) over all answers and over
        those that end by an end-of-sequence token, and the draft tokens fed a step.
    """
    sums = {(way, budget): np.zeros((3, 2)) for way in ways for budget in budgets}  # emitted, steps, fed; all, ended
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
    found: dict[str, dict[str, dict[str, float]]] = {way: {} for way in ways}
    for (way, budget), ((emitted, emitted_ended), (steps, steps_ended), (fed, _)) in sums.items():
        length, ended = emitted / max(1, steps), emitted_ended / max(1, steps_ended)
        found[way][str(budget)] = {"length": length, "ended": ended, "fed": fed / max(1, steps)}
    return found


def measured(folder: Path, base: Base, answers: Sequence[Answer], budgets: Sequence[int]) -> dict[str, Any]:
    """`measure` an exported drafter in all ways that fit it; kept in ``table2.json`` beside it."""
    path = folder.parent / "table2.json"
    texts = json.dumps([[answer.tokens.tolist(), answer.start] for answer in answers])
    key = json.dumps([list(budgets), hashlib.sha256(texts.encode()).hexdigest()])
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if key not in known:
        drafter, config = checkpoint.load(folder, base.model.dtype)
        ways = WAYS[config.class_path.removeprefix("drafters.")]
        known[key] = measure(drafter.to(base.model.device), base, answers, ways, budgets)
        with atomic_write(path) as new:
            new.write_text(json.dumps(known, indent=1), encoding="utf-8")
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
    """The CTC paper's Table 2: draft modules, with and without the CTC transform, on the base's own greedy answers.

    What is done already is kept, arms that benchmarks/learned_drafters.py trained in the same folder too.

    Args:
        base: Folder or hub id of the base.
        files: Training text, best the base's own: drafters regenerate.
        questions: JSONL file of the questions whose answers are decoded.
        out: Folder for the trained drafters and their figures.
        benchmark: Form of the questions: gsm8k, mt_bench or embedded.
        offset: Skip so many questions.
        limit: Questions at most.
        max_new_tokens: Longest answer.
        arms: Of benchmarks/learned_drafters.py, of those without a Markov bias: Medusa, Block and CTC.
        seeds: Of weights, anchors and order.
        budgets: Draft nodes, counted before the transform.
        steps: Training steps of each arm.
        features: Feature store of the training text: drafters features.
        threads: Of torch; 0 leaves them as they are.
        table: Markdown file for the table.
    """
    fitting = [name for name, arm in ARMS.items() if arm.drafter in WAYS and not arm.arguments.get("markov_rank")]
    if unfit := [name for name in arms if name not in fitting]:
        raise ValueError(f"arms {', '.join(unfit)} have no place in this table: use some of {', '.join(fitting)}")
    if not arms or not seeds or not budgets or min(budgets) < 1:
        raise ValueError("arms, seeds and budgets must not be empty, and budgets at least 1")
    if threads:
        torch.set_num_threads(threads)
    common, folder = Common(base, files, steps, features=features), Path(out)
    trained = {name: [train(ARMS[name], seed, common, folder) for seed in seeds] for name in arms}
    frozen = load_base(base)
    answers = decoded_answers(frozen, benchmark, questions, offset, limit, max_new_tokens, folder)
    found = {name: [measured(exported, frozen, answers, budgets) for exported in trained[name]] for name in arms}
    notes = [
        f"Base {base}; {len(answers)} answers of at most {max_new_tokens} tokens, simulated on the base's own greedy "
        f"text, prefill not counted; {steps} steps of {common.batch_size} conversations, seeds "
        f"{', '.join(map(str, seeds))}: the mean, and in brackets the smallest and the largest.",
        f"{repeats(answers):.2%} of the answers' tokens repeat the token before them.",
        *NOTES,
    ]
    show([rows(found, budgets, notes)], torch.device("cpu"), table)


def repeats(answers: Sequence[Answer]) -> float:
    """The share of the answers' tokens that repeat the token before: what no merged path can draft."""
    written = [answer.tokens[answer.start - 1 :] for answer in answers]
    return sum(int((text[1:] == text[:-1]).sum()) for text in written) / max(1, sum(len(text) - 1 for text in written))


def rows(found: dict[str, list[dict[str, Any]]], budgets: Sequence[int], notes: list[str]) -> Measured:
    """The table: acceptance length of every module and way, by budget, and against the first way of its module."""
    largest = str(max(budgets))
    headings = ["arm", "draft module", "verify"]
    for budget in budgets:
        headings += [f"{budget} nodes", f"fed, {budget}"]
    result = Measured("Acceptance length by draft module and verify", [*headings, f"to plain, {largest}"], notes=notes)
    for name, runs in found.items():
        first = mean(run[next(iter(run))][largest]["length"] for run in runs)
        for way in runs[0]:
            cells = []
            for budget in map(str, budgets):
                lengths = [run[way][budget]["length"] for run in runs]
                cells.append(f"{mean(lengths):.3f} ({min(lengths):.3f} to {max(lengths):.3f})")
                cells.append(f"{mean(run[way][budget]['fed'] for run in runs):.1f}")
            last = mean(run[way][largest]["length"] for run in runs)
            result.rows.append([name, MODULES[ARMS[name].drafter], way, *cells, f"{last / first:.3f}"])
    return result


if __name__ == "__main__":
    main(table2)
