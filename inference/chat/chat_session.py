"""A chat on one KV cache: a turn does not read again what was read for the turns before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from inference.verifier.session import RESERVED_FOR_DRAFTS, Session, StepCost, common_prefix


class ChatSession:
    """Decodes the turns of a chat, each prompt of which usually continues the text of the turn before.

    The cache keeps what the prompt shares with the text before it. If the chat template renders an earlier answer in
    other tokens than the base wrote, only the text before that answer is shared.

    Args:
        session: The decoding session of the base and the drafter.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.num_cached = 0  # tokens of the last prompt that were in the cache already

    def forget(self) -> None:
        """Start a new chat, and reset what the drafter keeps across texts."""
        self.session.forget()
        self.session.drafter.reset()

    def decode(
        self, prompt: Sequence[int], max_new_tokens: int, eos: frozenset[int] = frozenset()
    ) -> Iterator[tuple[list[int], StepCost]]:
        """Yield the tokens that each step emits and its cost; the caller may stop between two steps.

        Raises:
            ValueError: As `Session.decode`.
        """
        session = self.session
        end = session.end_of(prompt, max_new_tokens)
        num_shared = common_prefix(session.seq, prompt)
        if num_shared > 1:
            session.resume(prompt, num_shared)
        else:  # the root is always fed again, so a single shared token is not worth keeping
            session.begin(prompt, reserve=end + RESERVED_FOR_DRAFTS)
        self.num_cached = session.runner.cached
        # The drafter has not seen the base's hidden states of the new message, so it waits for one step.
        yield from session.steps(end, eos, drafts_at_once=not self.num_cached)
