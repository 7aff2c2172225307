"""What a CTC drafter gains from summing over alignments, by the kind of text that it drafts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.experiment import decoded_answers
from benchmarks.harness import ResultTable, main, show
from drafters import CTC, Block
from drafters.checkpoint import load
from drafters.ctc import alignment
from drafters.ctc.emissions import emit
from drafters.protocol import BaseWeights, LearnedDrafter
from inference.verifier.base import BareBase, Base, load_base

KINDS = "a token twice in a row", "a digit", "a line break", "anything else"


def alignments(
    base: str,
    drafter: list[str],
    questions: str,
    out: str,
    benchmark: str = "gsm8k",
    offset: int = 0,
    limit: int | None = None,
    max_new_tokens: int = 200,
    num_labels: int = 6,
    threads: int = 0,
    table: str | None = None,
) -> None:
    """Split the expected acceptance of CTC drafters into frame u = token u and all other alignments, by kind of text.

    At every position of the base's own greedy answers, the expected acceptance is sum_u P(the draft begins with the
    next u tokens), for the U next tokens. Block drafters, which have no other alignments, stand beside for comparison.

    Args:
        base: Folder or hub id of the base.
        drafter: Folders of CTC and block drafters with at least ``num_labels`` frames; the first one is the reference.
        questions: JSONL file with the questions that are answered.
        out: Folder for the answers.
        benchmark: Format of the questions: gsm8k, mt_bench or embedded.
        offset: Number of questions to skip at the beginning.
        limit: Maximum number of questions.
        max_new_tokens: Maximum number of tokens of an answer.
        num_labels: U, number of next tokens that are looked at.
        threads: Number of torch threads; 0 keeps the default.
        table: Markdown file to write the table to.
    """
    if threads:
        torch.set_num_threads(threads)
    frozen = load_base(base)
    loaded: dict[str, CTC | Block] = {}
    for number, folder in enumerate(drafter, 1):
        each, _ = load(folder)
        check(each, folder, num_labels)
        loaded[f"{type(each).__name__} {number}"] = cast(CTC | Block, each)
    answers = decoded_answers(frozen, benchmark, questions, offset, limit, max_new_tokens, Path(out))
    kinds: list[int] = []
    found: dict[str, list[Tensor]] = {name: [] for name in loaded}
    for answer in answers:
        if (last := len(answer.tokens) - num_labels) <= answer.start:
            continue
        anchors = torch.arange(answer.start, last)
        labels = answer.tokens[anchors[:, None] + 1 + torch.arange(num_labels)]
        kinds += [kind_of(row, frozen) for row in labels.tolist()]
        for name, each in loaded.items():
            hidden = frozen.hidden_states(answer.tokens[None], each.required_outputs.hidden_layers)[0]
            found[name].append(acceptance(each, hidden, answer.tokens, anchors, labels, frozen.base_weights))
    results = {name: torch.cat(parts) for name, parts in found.items()}
    notes = [
        f"Base {base}; {len(answers)} answers of at most {max_new_tokens} tokens, {len(kinds):,} positions, the "
        f"{num_labels} next tokens of each. Expected number of accepted tokens of a drawn draft.",
        *(f"{name}: {folder}" for name, folder in zip(loaded, drafter, strict=True)),
    ]
    show([alignment_table(torch.tensor(kinds), results, notes)], torch.device("cpu"), table)


def check(drafter: LearnedDrafter, folder: str, num_labels: int) -> None:
    """Refuse a drafter whose alignments cannot be split.

    Raises:
        ValueError: It is of another kind, has fewer frames than labels are looked at, or a draft vocabulary.
    """
    if not isinstance(drafter, CTC | Block):
        raise ValueError(f"{folder} is neither a CTC nor a block drafter")
    if not 1 <= num_labels <= drafter.num_frames - drafter.first_frame:
        raise ValueError(f"num_labels must be between 1 and the frames of {folder}, not {num_labels}")
    if drafter.draft_tokens is not None:
        raise ValueError(f"{folder} has a draft vocabulary, which is not supported here")


def kind_of(tokens: list[int], base: Base | BareBase) -> int:
    """The index in `KINDS` of some tokens' text."""
    if any(first == second for first, second in pairwise(tokens)):
        return 0
    text = base.tokenizer.decode(tokens)
    return 1 if any(letter.isdigit() for letter in text) else 2 if "\n" in text else 3


@torch.inference_mode()
def acceptance(
    drafter: CTC | Block, hidden: Tensor, tokens: Tensor, anchors: Tensor, labels: Tensor, base_weights: BaseWeights
) -> Tensor:
    """Expected acceptance at each anchor over all alignments, and over frame u = token u alone.

    Args:
        drafter: A CTC drafter, or a block drafter, of which both are equal; without a draft vocabulary.
        hidden: (1, S, F * D) hidden states of the drafter's layers.
        tokens: (S,) the text.
        anchors: (A,) positions of the roots.
        labels: (A, U) the tokens after them.
        base_weights: The base's embedding and LM head.

    Returns:
        (A, 2)
    """
    roots = tokens[anchors]
    frames = drafter(hidden, anchors[None], roots[None], base_weights.embedding, tokens[None])[0]
    _, markov, _ = drafter.output(base_weights)
    previous = torch.cat([roots[:, None], labels], dim=1)
    factors = () if markov is None else (F.embedding(previous, markov.left), markov.right)
    if isinstance(drafter, CTC):
        emissions = emit(frames, labels, base_weights.head, drafter.blank_row, drafter.blank_bias[0], *factors)
        states = alignment.states(emissions.enter, emissions.stay, emissions.blank, labels, drafter.merge_repeats)
        everywhere = alignment.expected_acceptance(alignment.exact_and_prefix(*states)[1])
        own = emissions.enter.diagonal(dim1=1, dim2=2).clone()  # (A, U): frame u enters label u
        if drafter.merge_repeats:  # without a blank, equal frames would collapse
            own[:, 1:][labels[:, 1:] == labels[:, :-1]] = -torch.inf
        return torch.stack([everywhere, alignment.expected_acceptance(own.cumsum(-1))], dim=-1)
    logits = drafter.logits(frames, base_weights)[:, : labels.shape[1]]
    if markov is not None:
        logits = logits + markov(previous[:, :-1])
    log_probs = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    return alignment.expected_acceptance(log_probs.cumsum(-1))[:, None].expand(-1, 2)


def alignment_table(kinds: Tensor, results: dict[str, Tensor], notes: list[str]) -> ResultTable:
    """Return the mean expected acceptance of each drafter by kind of text."""
    headings = ["next tokens hold", "positions", "drafter", "all alignments", "frame u = token u", "by shifts"]
    table = ResultTable("Expected acceptance by alignment", [*headings, "to the first"], notes=notes)
    for index, kind in [*enumerate(KINDS), (len(KINDS), "all")]:
        rows = (kinds == index) | torch.tensor(kind == "all")
        if not rows.any():
            continue
        means = {name: values[rows].mean(0).tolist() for name, values in results.items()}
        reference = next(iter(means.values()))[0]
        for name, (everywhere, own) in means.items():
            shifted = f"{1 - own / everywhere:.1%}"
            cells = [f"{everywhere:.3f}", f"{own:.3f}", shifted, f"{everywhere / reference:.3f}"]
            table.rows.append([kind, f"{rows.float().mean():.1%}", name, *cells])
    return table


if __name__ == "__main__":
    main(alignments)
