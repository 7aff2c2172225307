"""CPU time of a draft from the whole vocabulary and from a draft vocabulary, without a base."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import process_time

import torch

from benchmarks.harness import ResultTable, alternate, main, show
from drafters import CTC, BaseShape, BaseWeights, Block, DraftTree, StepResult, recipe
from drafters.protocol import UNLIMITED, LearnedDrafter

KINDS: dict[str, tuple[type[LearnedDrafter], bool]] = {  # with a bias between neighbouring tokens
    "ctc": (CTC, False),
    "ctc, bias": (CTC, True),
    "block": (Block, False),
    "block, bias": (Block, True),
}


def draft_vocabulary(
    vocab_size: int = 128256,
    draft_vocab_size: int = 32000,
    hidden_size: int = 1024,
    num_frames: int = 8,
    num_nodes: int = 32,
    rank: int = 64,
    context: int = 256,
    repeats: int = 20,
    out: str | None = None,
) -> None:
    """Measure how much CPU time a draft takes with all tokens of a vocabulary, and with a part of them.

    Args:
        vocab_size: Vocabulary V of the base.
        draft_vocab_size: Tokens V' of the draft vocabulary.
        hidden_size: Width D of the base.
        num_frames: Number of frames T.
        num_nodes: Nodes M of a tree.
        rank: Rank of the bias between neighbouring tokens.
        context: Positions before the root.
        repeats: Drafts of each arm; the arms alternate.
        out: Markdown file to write the table to.
    """
    if not 1 <= draft_vocab_size <= vocab_size or repeats < 2:
        raise ValueError("draft_vocab_size must be from 1 to vocab_size, and repeats at least 2")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab_size, hidden_size, generator=generator)
    shape = BaseShape(hidden_size, vocab_size, 2, num_heads=8, head_dim=hidden_size // 8, intermediate_size=hidden_size)
    base_weights = BaseWeights(weight, weight)
    states = torch.randn(context, hidden_size, generator=generator)
    recipes = {
        (name, size): {
            "trunk": {
                "num_frames": num_frames,
                "draft_vocab_size": size,
                **({"markov_rank": rank, "markov_factors": "base"} if KINDS[name][1] else {}),
            },
            "draft": {"num_nodes": num_nodes},
        }
        for name in KINDS
        for size in (None, draft_vocab_size)
    }
    propose: dict[tuple[str, int | None], Callable[[], DraftTree]] = {}
    for arm, arguments in recipes.items():
        drafter = recipe.build(KINDS[arm[0]][0], shape, arguments).eval().requires_grad_(False)
        drafter.attach_base_weights(base_weights)
        drafter.begin([])
        drafter.observe(StepResult(context, DraftTree(), states, [], [0]))
        propose[arm] = partial(drafter.propose, [0] * (context + 1), UNLIMITED)
        propose[arm]()  # caches the context, and compiles the search
    seconds: dict[tuple[str, int | None], list[float]] = {arm: [] for arm in recipes}
    for _, _, arm in alternate(list(recipes), 1, repeats, "drafts"):
        started = process_time()
        propose[arm]()
        seconds[arm].append(process_time() - started)
    table = ResultTable(
        f"V = {vocab_size:,}, D = {hidden_size}, T = {num_frames}, M = {num_nodes}, rank {rank}, float32",
        ["drafter", f"{vocab_size:,} tokens", f"{draft_vocab_size:,} tokens", "ratio"],
    )
    for name in KINDS:
        whole, part = (1e3 * median(seconds[name, size]) for size in (None, draft_vocab_size))
        table.rows.append([name, f"{whole:.1f} ms", f"{part:.1f} ms", f"{part / whole:.2f}"])
    table.notes.append(f"median CPU time of {repeats} proposals, all threads added up; arms alternate; random weights")
    show([table], torch.device("cpu"), out)


if __name__ == "__main__":
    main(draft_vocabulary)
