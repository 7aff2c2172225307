"""``drafters show-mask``: show which tokens the loss is computed on, before a training."""

from __future__ import annotations

from data.conversations import load_conversations
from data.templates import encode, masked_text
from data.tokenizer import load_tokenizer


def show_mask(
    tokenizer: str, files: list[str], template: str = "tokenizer", max_length: int = 2048, limit: int = 2
) -> None:
    """Print conversations and show in green the tokens on which the loss is computed.

    Args:
        tokenizer: Folder or hub id of the base or of its tokenizer.
        files: Conversations, as data.files of a training, such as chats.json or embedded.
        template: Chat template: vicuna_v1.1, llama2_chat, or tokenizer for the tokenizer's own, whose thinking switch
            tokenizer:thinking=on or tokenizer:thinking=off sets.
        max_length: Maximum number of tokens of a conversation; the rest is cut off.
        limit: Number of conversations to print.
    """
    from data.files import SafeConsole

    loaded = load_tokenizer(tokenizer)
    conversations, dropped = load_conversations(files, limit)
    console = SafeConsole()
    if dropped.total:
        console.print(str(dropped), markup=False)
    num_masked = 0
    for conversation in conversations:
        ids, mask = encode(conversation, loaded, template, max_length)
        num_masked += sum(mask)
        console.rule(f"{conversation.id}: {len(ids)} tokens, {sum(mask)} of the assistant")
        console.print(masked_text(ids, mask, loaded))
    if not num_masked:
        raise ValueError("the loss mask is zero everywhere: check --template and --max_length")
