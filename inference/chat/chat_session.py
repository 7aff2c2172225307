"""The turns of a chat on one cache: what was read for the turns before is not read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from drafters.protocol import RequiredOutputs
from drafters.tree import DraftTree
from inference.engine.session import Session, StepCost, check_prompt


class ChatSession:
    """Decodes prompts each of which goes on, as a rule, from the text before.

    What a prompt and the text before begin with alike stays in the cache; the rest of the text is taken back. Where
    the tokens of an answer are rendered otherwise in the next prompt, only what lies before them stays.

    Args:
        session: Of the base and the drafter.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.num_cached = 0  # tokens of the last prompt that were in the cache already

    def forget(self) -> None:
        """Begin a new chat; what the drafter keeps across texts is forgotten too."""
        self.session.seq = []
        self.session.drafter.reset()

    def decode(
        self, prompt: Sequence[int], max_new_tokens: int, eos: frozenset[int] = frozenset()
    ) -> Iterator[tuple[list[int], StepCost]]:
        """Yield what each step emits and its cost, as `Session.decode`; it may be left between two steps.

        Raises:
            ValueError: The prompt is empty or does not fit into the context, or no token may be written.
        """
        session = self.session
        check_prompt(session.runner.base, prompt, max_new_tokens)
        end = min(len(prompt) + max_new_tokens, session.runner.context_length)
        budget = session.max_nodes
        if self._go_back_to(prompt, end):
            session.max_nodes = 0  # the drafter has not seen the states of what was said since: it waits for a step
        while len(session.seq) < end:
            try:
                emitted, cost = session.step(end, eos)
            except BaseException:  # Ctrl-C too: half a step leaves text, cache and drafter at odds
                session.seq = []
                raise
            finally:
                session.max_nodes = budget
            yield emitted, cost
            if emitted[-1] in eos:
                return

    def _go_back_to(self, prompt: Sequence[int], end: int) -> bool:
        """Make the session's text ``prompt``; whether some of it is in the cache already."""
        session, runner = self.session, self.session.runner
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(session.seq, prompt, strict=False)))
        if same < 2 or not runner.cached:
            session.begin(prompt, reserve=end + 64)
        else:
            runner.truncate(min(runner.cached, same - 1))  # the last token both share is a root again
            if same < len(session.seq):
                session.drafter.rewind(same)
            session.seq = list(prompt)
        self.num_cached = runner.cached
        return runner.cached > 0


def read_ahead(session: Session, prompt: Sequence[int], length: int) -> None:
    """Begin a text whose first ``length`` tokens stand in the cache before its first step."""
    session.begin(prompt, reserve=len(prompt) + 64)
    if length:
        session.runner.forward(prompt[:length], DraftTree(), RequiredOutputs())
        session.runner.commit([])
