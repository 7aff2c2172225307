"""``drafters show-mask``: what the loss is taken on, to be seen before a training."""

from __future__ import annotations

from data.conversation import encode, masked_text
from data.sharegpt import load
from data.tokenizer import load_tokenizer


def show_mask(
    tokenizer: str, files: list[str], template: str = "tokenizer", max_length: int = 2048, limit: int = 2
) -> None:
    """Print conversations with the tokens the loss is taken on in green; all else is only read.

    Args:
        tokenizer: Folder or hub id of the base or its tokenizer.
        files: ShareGPT files, or embedded.
        template: Chat template: the tokenizer's own, vicuna_v1.1 or llama2_chat.
        max_length: Tokens of a conversation at most.
        limit: Conversations printed.
    """
    from rich.console import Console

    vocabulary = load_tokenizer(tokenizer)
    conversations, dropped = load(files, limit)
    console = Console()
    if dropped.total:
        console.print(str(dropped), markup=False)
    total = 0
    for conversation in conversations:
        ids, mask = encode(conversation, vocabulary, template, max_length)
        total += sum(mask)
        console.rule(f"{conversation.id}: {len(ids)} tokens, {sum(mask)} of the assistant")
        console.print(masked_text(ids, mask, vocabulary))
    if not total:
        raise ValueError("the loss mask is zero everywhere: check --template and --max_length")
