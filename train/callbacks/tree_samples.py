"""Draft trees of one held-out answer, drawn at each validation: what the drafter proposes, what would be accepted."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console, Group
from rich.text import Text
from torch import Tensor

from drafters.protocol import BaseWeights, LearnedDrafter, Limits
from inference.engine.base import Base
from train.validation.simulate import answer_spans
from train.validation.tree_text import tree_text, word

TAIL = 12  # tokens shown before a root


def roots_of(span: tuple[int, int], num_roots: int) -> list[int]:
    """At most ``num_roots`` positions spread evenly over an answer, its last token left out: nothing follows that."""
    start, end = span
    num_roots = min(num_roots, end - 1 - start)
    return [start + place * (end - 1 - start) // num_roots for place in range(num_roots)]


def drawings(
    drafter: LearnedDrafter, base: Base, hidden: Tensor, input_ids: Tensor, span: tuple[int, int], num_roots: int
) -> list[Text]:
    """For some roots of one answer the text before, the draft tree, and what a verifier makes of it.

    Args:
        hidden: (S, F * D). input_ids: (S,). span: Where the answer stands.
    """
    roots = roots_of(span, num_roots)
    if not roots:
        return []
    base_weights: BaseWeights = base.base_weights
    limits = Limits(max_depth=span[1] - span[0], eos=base.eos)
    trees = drafter.draft_at(hidden, input_ids, torch.tensor(roots, device=input_ids.device), base_weights, limits)
    tokens, drawn = input_ids.tolist(), []
    for root, tree in zip(roots, trees, strict=True):
        path = tree.follow(tokens[root + 1 : span[1]])
        words = [word(base.tokenizer, token) for token in tree.tokens]
        before = " ".join(base.tokenizer.decode(tokens[max(0, root - TAIL) : root]).split())
        follows = tokens[root + 1 + len(path) : span[1]][:1]
        then = f", then {word(base.tokenizer, follows[0])}" if follows else ""
        count = f"{len(path)} accepted of {len(tree)}{then}"
        drawn.append(
            Text("\n").join(
                [
                    Text(f"… {before}", style="dim"),
                    tree_text(tree, word(base.tokenizer, tokens[root]), words, path),
                    Text(count, style="italic"),
                ]
            )
        )
    return drawn


class TreeSamples(L.Callback):
    """Draft trees at some roots of the first held-out answer, written to TensorBoard as text ``val/trees``.

    Args:
        num_roots: Roots drawn at each validation; 0 draws none.
        is_printed: Whether they are printed in colour too.
    """

    def __init__(self, num_roots: int = 4, is_printed: bool = False) -> None:
        if num_roots < 0:
            raise ValueError(f"num_roots must be at least 0, not {num_roots}")
        self.num_roots, self.is_printed = num_roots, is_printed

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        wanted = self.is_printed or any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers)
        is_first = batch_idx == 0 and self.num_roots and not trainer.sanity_checking
        if not (wanted and is_first and hasattr(pl_module, "drafter")):
            return
        batch = pl_module.answered(batch, batch_idx)
        spans = [(row, span) for row, mask in enumerate(batch["loss_mask"].tolist()) for span in answer_spans(mask)]
        if not spans:
            return
        row, span = max(spans, key=lambda at: at[1][1] - at[1][0])
        ids, mask = batch["input_ids"][row], batch["loss_mask"][row]
        hidden = pl_module.extract_features(ids[None], mask[None]).hidden[
            0
        ]  # by every process: the drafter may be shared out
        drawn = drawings(pl_module.drafter, pl_module.base, hidden, ids, span, self.num_roots)
        if drawn and trainer.is_global_zero:
            self._show(trainer, drawn)

    def _show(self, trainer: L.Trainer, drawn: list[Text]) -> None:
        step = trainer.global_step
        markdown = "\n\n".join("```\n" + drawing.plain.replace("```", "'''") + "\n```" for drawing in drawn)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("val/trees", markdown, step)
        if self.is_printed:
            console = Console()
            console.rule(f"draft trees at step {step}")
            console.print(Group(*(Text("\n").join([drawing, Text()]) for drawing in drawn)), no_wrap=True, crop=False)
