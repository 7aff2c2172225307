"""Draft trees of one held-out answer, drawn at each validation with what the base would accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from rich.console import Group
from rich.text import Text
from torch import Tensor

from data.files import SafeConsole, write_text
from drafters.protocol import LearnedDrafter, Limits
from drafters.tree import DraftTree
from inference.verifier.base import Base
from train.module import DrafterTraining
from train.strategies import gathered
from train.validation.simulate import answer_spans
from train.validation.tree_text import tree_text, word

NUM_CONTEXT_TOKENS = 12  # shown before a root
TEXT_LOGGERS = (TensorBoardLogger, WandbLogger, MLFlowLogger, CSVLogger)


def choose_roots(span: tuple[int, int], num_roots: int) -> list[int]:
    """Return at most ``num_roots`` positions spread evenly over an answer, without its last token."""
    start, end = span
    num_roots = min(num_roots, end - 1 - start)
    return [start + place * (end - 1 - start) // num_roots for place in range(num_roots)]


def draw_trees(
    drafter: LearnedDrafter, base: Base, hidden: Tensor, input_ids: Tensor, span: tuple[int, int], num_roots: int
) -> list[Text]:
    """Draw for some roots of an answer the text before, the draft tree, and what the base accepts of it.

    Args:
        drafter: The drafter.
        base: The base that it drafts for.
        hidden: (S, F * D) hidden states of the base over the text.
        input_ids: (S,) the text.
        span: Half-open range of the answer.
        num_roots: Number of roots.
    """
    roots = choose_roots(span, num_roots)
    if not roots:
        return []
    limits = Limits(max_depth=span[1] - span[0], eos=base.eos)
    anchors = torch.tensor(roots, device=input_ids.device)
    trees = drafter.draft_at(hidden, input_ids, anchors, base.base_weights, limits)
    tokens = input_ids.tolist()[: span[1]]
    return [draw_tree(tree, base, tokens, root) for root, tree in zip(roots, trees, strict=True)]


def draw_tree(tree: DraftTree, base: Base, tokens: list[int], root: int) -> Text:
    """Draw one tree between the text before its root and a line that says what the base accepts.

    Args:
        tree: The draft tree.
        base: The base, whose tokenizer makes text of the tokens.
        tokens: The text up to the end of the answer.
        root: Position of the root in it.
    """
    path = tree.follow(tokens[root + 1 :])
    context = str(base.tokenizer.decode(tokens[max(0, root - NUM_CONTEXT_TOKENS) : root]))
    words = [word(base.tokenizer, token) for token in tree.tokens]
    bonus_token = tokens[root + 1 + len(path) :][:1]
    then = f", then {word(base.tokenizer, bonus_token[0])}" if bonus_token else ""
    lines = [
        Text(f"… {' '.join(context.split())}", style="dim"),
        tree_text(tree, word(base.tokenizer, tokens[root]), words, path),
        Text(f"{len(path)} accepted of {len(tree)}{then}", style="italic"),
    ]
    return Text("\n").join(lines)


def log_text(logger: Logger, name: str, text: str, step: int) -> None:
    """Write a Markdown text to one of `TEXT_LOGGERS`; other loggers have no place for it.

    Weights & Biases gets a table with the columns step and text. MLflow and CSV get a file ``NAME/STEP.md``, among the
    artifacts of the run or beside its metrics.
    """
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text(name, text, step)
    elif isinstance(logger, WandbLogger):
        logger.log_text(name, columns=["step", "text"], data=[[str(step), text]])
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_text(logger.run_id, text, f"{name}/{step}.md")
    elif isinstance(logger, CSVLogger):
        write_text(Path(logger.log_dir) / name / f"{step}.md", text + "\n")


class TreeSamples(L.Callback):
    """Draft trees at some roots of a held-out answer, written to the loggers of the run as the text ``val/trees``.

    Args:
        num_roots: Number of roots drawn at each validation; 0 draws none.
        is_printed: Whether the trees are also printed in colour.
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
        is_shown = self.is_printed or any(isinstance(logger, TEXT_LOGGERS) for logger in trainer.loggers)
        is_first = batch_idx == 0 and self.num_roots > 0 and not trainer.sanity_checking
        if not (is_shown and is_first and isinstance(pl_module, DrafterTraining)):
            return
        texts = pl_module.validation_texts(batch, batch_idx)
        spans = [(row, span) for row, mask in enumerate(texts["loss_mask"].tolist()) for span in answer_spans(mask)]
        if not spans:
            return
        row, span = max(spans, key=lambda row_and_span: row_and_span[1][1] - row_and_span[1][0])
        ids, mask = texts["input_ids"][row], texts["loss_mask"][row]
        # Every process draws, because the weights of the drafter may be sharded; the first one shows the trees.
        hidden = pl_module.compute_batch(ids[None], mask[None]).hidden[0]
        with gathered(pl_module.drafter):
            drawings = draw_trees(pl_module.drafter, pl_module.base, hidden, ids, span, self.num_roots)
        if drawings and trainer.is_global_zero:
            self._show(trainer, drawings)

    def _show(self, trainer: L.Trainer, drawings: list[Text]) -> None:
        step = trainer.global_step
        markdown = "\n\n".join("```\n" + drawing.plain.replace("```", "'''") + "\n```" for drawing in drawings)
        for logger in trainer.loggers:
            log_text(logger, "val/trees", markdown, step)
        if self.is_printed:
            console = SafeConsole()
            console.rule(f"draft trees at step {step}")
            texts = [Text("\n").join([drawing, Text()]) for drawing in drawings]
            console.print(Group(*texts), no_wrap=True, crop=False)
