"""A conversation whose answers are written anew, turn by turn, and the exact tokens that training then reads."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from data.conversation import Conversation, encode, encode_prompt, resolve_template
from data.sharegpt import Dropped
from data.tokenizer import short_hash, tokenizer_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Tally:
    """What became of the answers."""

    num_answers: int = 0
    num_tokens: int = 0
    num_cut: int = 0
    num_alike: int = 0  # answers whose text gives back their tokens; of a server's, as many as it counted
    num_other_prompts: int = 0  # that a server counted another number of tokens in
    num_lost: int = 0  # tokens that a later turn's prompt renders otherwise
    dropped: Dropped = field(default_factory=lambda: Dropped(what="answers"))


class Dialogue:
    """One conversation, answered so far.

    The row that training reads is the last prompt and its answer. An earlier answer stays in the loss as far as that
    prompt holds the tokens of its time: so every token in the loss is the one that was written after the row before it.

    Args:
        conversation: Gives the system message and the user's turns; its answers are not looked at.
        tokenizer: Of the base.
        template: Name of the chat template.
        num_turns: The first so many are answered, or None for all.
    """

    def __init__(
        self, conversation: Conversation, tokenizer: PreTrainedTokenizerBase, template: str, num_turns: int | None
    ) -> None:
        self.id, self.tokenizer, self.template = conversation.id, tokenizer, template
        self.messages = [message for message in conversation.messages if message[0] == "system"]
        self.asked = [text for role, text in conversation.messages if role == "user"][:num_turns]
        self.ids, self.mask = array("i"), array("b")
        self.is_cut: list[bool] = []
        self.is_open = True

    @property
    def num_left(self) -> int:
        """Turns that still wait for an answer."""
        return len(self.asked) - len(self.is_cut) if self.is_open else 0

    @property
    def waiting(self) -> list[tuple[str, str]]:
        """The messages up to the user's turn that is next."""
        return [*self.messages, ("user", self.asked[len(self.is_cut)])]

    def prompt(self) -> list[int]:
        """Their tokens.

        Raises:
            ValueError: The template refuses them.
        """
        return encode_prompt(self.waiting, self.tokenizer, self.template)

    def stop(self, reason: str, tally: Tally) -> None:
        """Leave the turns that are left unanswered."""
        tally.dropped.add(reason, f"conversation {self.id} turn {len(self.is_cut) + 1}")
        self.is_open = False

    def take_tokens(self, prompt: Sequence[int], answer: Sequence[int], eos: frozenset[int], tally: Tally) -> None:
        """Take the tokens that the base wrote after ``prompt``, the EOS among them where one ended the answer."""
        is_cut = answer[-1] not in eos
        decoded = self.tokenizer.decode(answer if is_cut else answer[:-1], skip_special_tokens=True)
        if not decoded.strip():
            return self.stop("the answer is empty", tally)
        row = [*prompt, *answer]
        # A template may write the space before an answer itself, and decoding may keep it: take the text that fits.
        texts = dict.fromkeys([decoded, decoded.removeprefix(" "), decoded.strip()])
        alike = next((text for text in texts if self._encoded(text)[0][: len(row)] == row), None)
        tally.num_alike += alike is not None
        self._extend(prompt, answer, decoded.strip() if alike is None else alike, is_cut, tally)

    def take_text(self, text: str, is_cut: bool, num_written: int | None, tally: Tally) -> None:
        """Take the text that a server answered; its tokens are those of the text.

        Of an answer that was cut short, neither the EOS that the template adds is kept nor the token before it, which
        may be half of the word's.
        """
        row, mask = self._encoded(text) if text.strip() else ([], [])
        if 1 not in mask:
            return self.stop("the answer is empty" if not text.strip() else "the template shows no answer", tally)
        end = len(mask) - mask[::-1].index(1)
        start = next((place + 1 for place in range(end - 1, -1, -1) if not mask[place]), 0)
        answer = row[start:end]
        num_words = len(answer) - (answer[-1] == self.tokenizer.eos_token_id)
        tally.num_alike += num_written in (num_words, num_words + 1)  # servers differ in whether the EOS counts
        if is_cut:
            answer = answer[: num_words - 1]
        return self._extend(row[:start], answer, text, is_cut, tally)

    def _encoded(self, answer: str) -> tuple[list[int], list[int]]:
        said = Conversation(self.id, (*self.waiting, ("assistant", answer)))
        try:
            return encode(said, self.tokenizer, self.template)
        except ValueError:  # a template that takes prompts only
            return [], []

    def _extend(self, prompt: Sequence[int], answer: Sequence[int], text: str, is_cut: bool, tally: Tally) -> None:
        pairs = enumerate(zip(self.ids, prompt, strict=False))
        same = next((place for place, (old, new) in pairs if old != new), min(len(self.ids), len(prompt)))
        tally.num_lost += sum(self.mask[same:])
        self.mask = self.mask[:same] + array("b", [0] * (len(prompt) - same) + [1] * len(answer))
        self.ids = array("i", [*prompt, *answer])
        self.messages = [*self.waiting, ("assistant", text)]
        self.is_cut.append(is_cut)
        tally.num_answers += 1
        tally.num_tokens += len(answer)
        tally.num_cut += is_cut

    def record(self) -> dict[str, Any]:
        """The conversation in OpenAI form, with the tokens of its row."""
        return {
            "id": self.id,
            "messages": [{"role": role, "content": text} for role, text in self.messages],
            "cut": self.is_cut,
            "tokenizer": tokenizer_hash(self.tokenizer),
            "template": short_hash(resolve_template(self.template, self.tokenizer)),
            "input_ids": self.ids.tolist(),
            "loss_mask": self.mask.tolist(),
        }
