"""A draft tree as text: drawn from the root to the right, the accepted path in green, the rest grey."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from drafters.tree import ROOT, DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ACCEPTED, REJECTED = "bold green", "bright_black"


def tree_text(tree: DraftTree, root: str, words: Sequence[str], path: Collection[int], num_nodes: int = 16) -> Text:
    """Draw a tree; beside each token stands the probability of its path, where the drafter says one.

        the ─┬─ cat 0.61 ✓ ─── sat 0.40
             └─ dog 0.22

    Args:
        tree: What was proposed.
        root: The root, as it is to be read.
        words: One for each node.
        path: Accepted nodes, from the root down; they carry a tick, for where there are no colours.
        num_nodes: Nodes drawn, the first of the tree; accepted ones are drawn besides. How many are left out is said.
    """
    children: dict[int, list[int]] = {}
    shown = [node for node in range(len(tree)) if node < num_nodes or node in path]
    for node in shown:
        children.setdefault(tree.parents[node], []).append(node)

    def label(node: int) -> Text:
        if node == ROOT:
            return Text(root, style="bold")
        known = node < len(tree.probabilities)
        text = words[node] + (f" {tree.probabilities[node]:.2f}" if known else "") + (" ✓" if node in path else "")
        return Text(text, style=ACCEPTED if node in path else REJECTED)

    drawn: dict[int, list[Text]] = {}  # the lines of the tree below each node, itself included
    for node in [*reversed(shown), ROOT]:  # children come after their parents
        name, below = label(node), children.get(node, [])
        lines = [name]
        for number, child in enumerate(below):
            is_last = number == len(below) - 1
            for row, line in enumerate(drawn.pop(child)):
                if row == 0 and number == 0:
                    lines[0] = Text.assemble(name, " ─── " if is_last else " ─┬─ ", line)
                    continue
                joint = ("  └─ " if is_last else "  ├─ ") if row == 0 else "     " if is_last else "  │  "
                lines.append(Text.assemble(" " * name.cell_len + joint, line))
        drawn[node] = lines
    if len(shown) < len(tree):
        drawn[ROOT].append(Text(f"and {len(tree) - len(shown)} nodes more", style=REJECTED))
    return Text("\n").join(drawn[ROOT])


def word(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token as it is to be read in a drawing: on one line, ``▁`` where it begins with a space."""
    piece = tokenizer.convert_ids_to_tokens(token) or ""
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    text = ("▁" if piece.startswith(("Ġ", "▁")) else "") + text.removeprefix(" ")
    shown = "".join({"\n": "⏎", "\t": "⇥", " ": "▁"}.get(sign, sign) for sign in text)
    return "".join(sign if sign.isprintable() else "?" for sign in shown) or piece or "?"
