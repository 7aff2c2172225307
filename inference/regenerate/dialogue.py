"""A conversation whose answers are regenerated turn by turn, and the exact tokens that training reads from it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversations import REASONING, Conversation, Dropped, Message
from data.templates import decode_answer, encode, encode_prompt, end_tokens, resolve_template, template_hash
from data.tokenizer import tokenizer_hash
from drafters.tree import common_prefix


@dataclass
class AnswerCounts:
    """Statistics of the answers of all conversations."""

    num_answers: int = 0
    num_tokens: int = 0
    num_cut: int = 0  # answers cut off at the token limit
    num_round_trip: int = 0  # whose text encodes back to their tokens; of a server, to as many as it reports
    num_other_prompts: int = 0  # prompts for which a server reports another number of tokens
    num_lost: int = 0  # tokens left out of the loss because the prompt of a later turn renders them differently
    dropped: Dropped = field(default_factory=lambda: Dropped(what="answers"))  # turns without an answer, by reason


class Dialogue:
    """One conversation and the answers written so far.

    Training reads one row of tokens: the prompt of the last turn and its answer. An earlier answer stays in the loss
    as far as that prompt repeats the tokens originally written. So every token in the loss was written by the base
    after exactly the tokens that precede it in the row.

    The conversation provides the system message and the user's turns, of which the first ``num_turns`` are answered, or
    all; its own answers are ignored. ``number`` says which of several answers to it this is, from 0.
    """

    def __init__(
        self,
        conversation: Conversation,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        num_turns: int | None,
        number: int = 0,
    ) -> None:
        self.id = f"{conversation.id} answer {number + 1}" if number else conversation.id
        self.tokenizer, self.template = tokenizer, template
        self.messages = [message for message in conversation.messages if message["role"] == "system"]
        self.user_turns = [message for message in conversation.messages if message["role"] == "user"][:num_turns]
        self.ids, self.mask = array("i"), array("b")
        self.is_cut: list[bool] = []
        self.is_open = True

    @property
    def num_remaining(self) -> int:
        """Number of turns that are still to be answered."""
        return len(self.user_turns) - len(self.is_cut) if self.is_open else 0

    @property
    def pending_messages(self) -> list[Message]:
        """The messages up to and including the next turn of the user."""
        return [*self.messages, self.user_turns[len(self.is_cut)]]

    def prompt(self) -> list[int]:
        """Return the tokens of `pending_messages`; raises ValueError if the chat template rejects them."""
        return encode_prompt(self.pending_messages, self.tokenizer, self.template)

    def stop(self, reason: str, counts: AnswerCounts) -> None:
        """Leave the remaining turns unanswered."""
        counts.dropped.add(reason, f"conversation {self.id} turn {len(self.is_cut) + 1}")
        self.is_open = False

    def add_tokens(
        self, prompt: Sequence[int], answer: Sequence[int], eos: frozenset[int], counts: AnswerCounts
    ) -> None:
        """Add the tokens that the base wrote after ``prompt``, including the EOS token if one ended the answer."""
        is_cut = answer[-1] not in eos
        decoded = decode_answer(answer if is_cut else answer[:-1], self.tokenizer)
        if not decoded.strip():
            return self.stop("the answer is empty", counts)
        row = [*prompt, *answer]
        # Some templates write the space before an answer themselves, and some tokenizers keep it when they decode:
        # use the text that encodes back to the same tokens.
        texts = dict.fromkeys([decoded, decoded.removeprefix(" "), decoded.strip()])
        same = next((text for text in texts if self._encoded(text)[0][: len(row)] == row), None)
        counts.num_round_trip += same is not None
        message = {"role": "assistant", "content": decoded.strip() if same is None else same}
        self._extend(prompt, answer, message, is_cut, counts)

    def add_text(
        self, text: str, is_cut: bool, num_written: int | None, counts: AnswerCounts, reasoning: str = ""
    ) -> None:
        """Add the text that a server answered, and its reasoning, as the tokens that the template makes of them.

        If the answer was cut off, the EOS token that the template appends is removed, and the token before it, which
        may be half of a word's token.
        """
        message = {"role": "assistant", "content": text} | ({"reasoning_content": reasoning} if reasoning else {})
        row, mask = self._encoded(text, reasoning) if text.strip() else ([], [])
        if 1 not in mask:
            return self.stop("the answer is empty" if not text.strip() else "the template shows no answer", counts)
        end = len(mask) - mask[::-1].index(1)
        start = next((place + 1 for place in range(end - 1, -1, -1) if not mask[place]), 0)
        answer = row[start:end]
        ends = end_tokens(self.tokenizer, resolve_template(self.template, self.tokenizer))
        num_without_eos = len(answer) - (answer[-1] in ends)
        # Some servers count the EOS token, others do not.
        counts.num_round_trip += num_written in (num_without_eos, num_without_eos + 1)
        if is_cut:
            answer = answer[: num_without_eos - 1]
        self._extend(row[:start], answer, message, is_cut, counts)

    def _encoded(self, answer: str, reasoning: str = "") -> tuple[list[int], list[int]]:
        message = {"role": "assistant", "content": answer} | (dict.fromkeys(REASONING, reasoning) if reasoning else {})
        try:
            answered = Conversation(self.id, (*self.pending_messages, message))
            return encode(answered, self.tokenizer, self.template)
        except ValueError:  # the template accepts prompts only
            return [], []

    def _extend(
        self, prompt: Sequence[int], answer: Sequence[int], message: Message, is_cut: bool, counts: AnswerCounts
    ) -> None:
        num_same = common_prefix(self.ids, prompt)
        counts.num_lost += sum(self.mask[num_same:])
        self.mask = self.mask[:num_same] + array("b", [0] * (len(prompt) - num_same) + [1] * len(answer))
        self.ids = array("i", [*prompt, *answer])
        self.messages = [*self.pending_messages, message]
        self.is_cut.append(is_cut)
        counts.num_answers += 1
        counts.num_tokens += len(answer)
        counts.num_cut += is_cut

    def record(self) -> dict[str, Any]:
        """Return the conversation in OpenAI form, together with the tokens and the loss mask of its row."""
        return {
            "id": self.id,
            "messages": self.messages,
            "cut": self.is_cut,
            "tokenizer": tokenizer_hash(self.tokenizer),
            "template": template_hash(self.template, self.tokenizer),
            "input_ids": self.ids.tolist(),
            "loss_mask": self.mask.tolist(),
        }
