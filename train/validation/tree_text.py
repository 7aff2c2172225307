"""A draft tree drawn as text, from the root to the right, with the accepted path in green and the rest in grey."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from drafters.tree import ROOT, DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ACCEPTED, REJECTED = "bold green", "bright_black"


def tree_text(tree: DraftTree, root: str, words: Sequence[str], path: Collection[int], num_nodes: int = 16) -> Text:
    """Draw a tree; if the drafter gives probabilities, each token is followed by the probability of its path.

        the ─┬─ cat 0.61 ✓ ─── sat 0.40
             └─ dog 0.22

    Args:
        tree: The draft tree.
        root: Text of the root token.
        words: Text of each node's token.
        path: Accepted nodes, from the root down. A tick marks them where there are no colours.
        num_nodes: Number of nodes to draw, the first of the tree; accepted nodes are always drawn. A last line says
            how many nodes are left out.
    """
    children: dict[int, list[int]] = {}
    drawn_nodes = [node for node in range(len(tree)) if node < num_nodes or node in path]
    for node in drawn_nodes:
        children.setdefault(tree.parents[node], []).append(node)

    def label(node: int) -> Text:
        if node == ROOT:
            return Text(root, style="bold")
        has_probability = node < len(tree.probabilities)
        probability = f" {tree.probabilities[node]:.2f}" if has_probability else ""
        text = words[node] + probability + (" ✓" if node in path else "")
        return Text(text, style=ACCEPTED if node in path else REJECTED)

    lines_below: dict[int, list[Text]] = {}  # of each node, its own line included
    for node in [*reversed(drawn_nodes), ROOT]:  # children come after their parents
        name, own_children = label(node), children.get(node, [])
        lines = [name]
        for number, child in enumerate(own_children):
            is_last = number == len(own_children) - 1
            for row, line in enumerate(lines_below.pop(child)):
                if row == 0 and number == 0:
                    lines[0] = Text.assemble(name, " ─── " if is_last else " ─┬─ ", line)
                    continue
                joint = ("  └─ " if is_last else "  ├─ ") if row == 0 else "     " if is_last else "  │  "
                lines.append(Text.assemble(" " * name.cell_len + joint, line))
        lines_below[node] = lines
    if len(drawn_nodes) < len(tree):
        lines_below[ROOT].append(Text(f"and {len(tree) - len(drawn_nodes)} nodes more", style=REJECTED))
    return Text("\n").join(lines_below[ROOT])


def word(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return a token's text for a drawing: on one line, with ``▁`` for a space and ``?`` for what cannot be printed."""
    piece = str(tokenizer.convert_ids_to_tokens(token) or "")
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    text = ("▁" if piece.startswith(("Ġ", "▁")) else "") + text.removeprefix(" ")
    visible = "".join({"\n": "⏎", "\t": "⇥", " ": "▁"}.get(sign, sign) for sign in text)
    return "".join(sign if sign.isprintable() else "?" for sign in visible) or piece or "?"
