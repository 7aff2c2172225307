"""Acceptance length of one trained drafter by the size of its draft vocabulary, simulated on the base's own answers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.experiment import decoded_answers, simulate
from benchmarks.harness import ResultTable, main, show
from data.module import ShareGPTData
from drafters import checkpoint, recipe
from inference.verifier.base import load_base
from train.draft_vocabulary import choose_draft_tokens


def vocabulary_sizes(
    drafter: str,
    sizes: list[int] = [512, 256],  # noqa: B006
    files: list[str] = ["embedded:2000"],  # noqa: B006
    limit: int = 12,
    max_new_tokens: int = 96,
    budgets: list[int] = [4, 12],  # noqa: B006
    out: str | None = None,
) -> None:
    """Give a trained drafter draft vocabularies of several sizes, without training it again.

    Args:
        drafter: Folder of a CTC or block drafter of the whole vocabulary, whose bias, if any, is made of the base's
            weights (``markov_factors: base``).
        sizes: Sizes V' of the draft vocabulary, which is chosen as training chooses it.
        files: Training text from which it is chosen.
        limit: Number of embedded questions whose greedy answers are decoded.
        max_new_tokens: Largest number of tokens of an answer.
        budgets: Numbers of nodes.
        out: Markdown file to write the table to.
    """
    trained, config = checkpoint.load(drafter)
    if "markov.left" in trained.state_dict() and "markov.blank" not in trained.state_dict():
        raise ValueError(f"{drafter} has a bias of its own tables: train one with markov_factors: base")
    base = load_base(config.base_name)
    data = ShareGPTData(config.base_name, files, val_size=0, max_length=config.training.get("max_length") or 2048)
    data.setup("fit")
    with tempfile.TemporaryDirectory() as folder:
        answers = decoded_answers(base, "embedded", "", 0, limit, max_new_tokens, Path(folder))
    table = ResultTable(f"{drafter}, {limit} questions", ["draft vocabulary", *(f"{nodes} nodes" for nodes in budgets)])
    for size in (None, *sizes):
        arguments = recipe.nested(config.init_args, recipe.groups(type(trained)))
        arguments = {**arguments, "trunk": {**arguments.get("trunk", {}), "draft_vocab_size": size}}
        limited = recipe.build(type(trained), config.base, arguments).eval().requires_grad_(False)
        limited.load_state_dict(trained.state_dict(), strict=False)
        choose_draft_tokens(limited, base, data.train_set)
        lengths = simulate(limited, base, answers, budgets).length.values()
        table.rows.append([f"{size or config.base.vocab_size:,}", *(f"{length:.3f}" for length in lengths)])
    table.notes.append(
        "tokens per forward of the base, bonus token included, prefill excluded; one seed, not retrained"
    )
    show([table], torch.device("cpu"), out)


if __name__ == "__main__":
    main(vocabulary_sizes)
