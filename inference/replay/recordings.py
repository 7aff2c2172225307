"""Recorded greedy answers, and what stands in for the base that wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from data.benchmarks import Question
from drafters.protocol import RequiredOutputs
from drafters.tree import ROOT, DraftTree
from inference.api.prompts import encode_messages
from inference.engine.acceptance import accept
from inference.engine.runner import ForwardOutput
from inference.results import answer_files
from inference.results.answer_files import RecordedTurn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POISON = -1


class NoModel(ValueError):
    """Something asked a recording for the model that wrote it."""


@dataclass(frozen=True)
class RecordedBase:
    """What is left of a base whose answers were recorded; stands where `inference.engine.base.Base` stands.

    Args:
        name: Where the answers come from.
        tokenizer: The base's tokenizer.
        context_length: Beyond every recorded text: the recording ended where it ended.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    context_length: int = 1 << 30

    @cached_property
    def eos(self) -> frozenset[int]:
        """Tokens that end a text."""
        token = self.tokenizer.eos_token_id
        return frozenset([] if token is None else [token])

    @property
    def model(self) -> NoReturn:
        raise NoModel(f"{self.name} holds tokens and no model")

    shape = base_weights = model


class ReplayRunner:
    """Stands where `inference.engine.runner.Runner` stands, and knows the base's next token only where it was recorded.

    After any beginning of a greedy answer the base's argmax is the next recorded token. So the row of a node on the
    recorded text holds that token, and every other row poison: to be accepted, a node must have been recorded.

    Args:
        base: The tokenizer of the base that was recorded.
    """

    def __init__(self, base: RecordedBase) -> None:
        self.base, self.context_length, self.vocab_size = base, base.context_length, len(base.tokenizer)
        self.load([])

    def load(self, text: Sequence[int], ended: bool = False) -> None:
        """Take a recorded text, prompt and answer, as the next to be decoded; whether its last token ended it."""
        self.text, self.ended = list(text), ended
        self.reset()

    def reset(self, reserve: int = 0) -> None:
        """Start the text again."""
        self.cached = self._num_pending = 0

    def forward(self, pending: Sequence[int], tree: DraftTree, required_outputs: RequiredOutputs) -> ForwardOutput:
        """Rows (1 + M, 1) of token ids in the place of logits."""
        at = self.cached + len(pending)
        assert pending == self.text[self.cached : at], "the session's text is not the recorded one"
        self._num_pending = len(pending)
        picks = [[POISON] for _ in range(1 + len(tree))]
        continuation = self.text[at:]
        nodes = [ROOT, *tree.follow(continuation)]
        for node, token in zip(nodes, continuation, strict=False):
            picks[1 + node] = [token]
        if len(nodes) > len(continuation) and self.ended:
            picks[1 + nodes[-1]] = self.text[-1:]  # of what follows the end the session keeps nothing
        return ForwardOutput(torch.tensor(picks), None)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the pending tokens and the accepted nodes."""
        self.cached += self._num_pending + len(path)

    def truncate(self, length: int) -> None:
        """Keep only the first ``length`` tokens."""
        assert length <= self.cached, "a text cannot be cut to more than it holds"
        self.cached = length


class Recorded:
    """The sampler of a `ReplayRunner`, whose rows are the picks. To accept poison raises AssertionError."""

    lossless = True

    def decide(self, logits: Tensor, tree: DraftTree, positions: Sequence[int]) -> Tensor:
        return logits

    def accept(self, tree: DraftTree, decisions: list[list[int]]) -> tuple[list[int], list[int]]:
        path, emitted = accept(tree, [row[0] for row in decisions])
        assert POISON not in emitted, "the text goes on where nothing was recorded"
        return path, emitted


@dataclass(frozen=True)
class Recording:
    """One recorded turn.

    Args:
        question_id: Number of the question.
        category: The benchmark's name for this kind of question.
        turn: Its place in the conversation, from zero.
        prompt: Tokens the base read, the earlier recorded turns among them.
        tokens: Tokens it wrote, the end-of-sequence token among them.
        ended: Whether it ended with that token, not with the length cap.
    """

    question_id: int
    category: str
    turn: int
    prompt: list[int]
    tokens: list[int]
    ended: bool


@dataclass(frozen=True)
class Mismatch:
    """A turn whose text does not give back as many tokens as were recorded, so that its tokens are not known."""

    question_id: int
    turn: int
    recorded: int
    retokenised: int


@dataclass
class Recordings:
    """The turns of a file that can be replayed, in its order, and those that cannot."""

    turns: list[Recording] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)


def read(
    path: str | Path,
    questions: Sequence[Question],
    base: RecordedBase,
    template: str,
    max_new_tokens: int = 512,
    limit: int | None = None,
) -> Recordings:
    """Read recorded answers; each turn's prompt holds the recorded text of the turns before it.

    Lines of `inference.results.records` hold token ids and are taken as they are. FastChat's hold text and counts: the
    text is tokenised again, and the turn left out where the counts disagree. Where ``new_tokens`` is 0, as some public
    baselines have it, ``idxs`` + 1 is the count of a base that writes one token a step.

    Args:
        path: JSON lines, one question each.
        questions: The questions that were asked.
        base: The base's tokenizer.
        template: Chat template the base was asked with.
        max_new_tokens: The recording's cap on a turn: a shorter turn ended with an end-of-sequence token.
        limit: Lines to read at most.

    Raises:
        ValueError: A line is no recorded answer, is to another question, or was given to another prompt.
    """
    asked = {question.question_id: question for question in questions}
    found = Recordings()
    for place, row in list(answer_files.lines(path))[:limit]:
        answer = answer_files.parse(place, row)
        question_id, question = answer.question_id, asked.get(answer.question_id)
        if question is None or len(answer.turns) > len(question.turns):
            raise ValueError(f"{place}: no such question {question_id}: pass the --questions that were answered")
        messages: list[tuple[str, str]] = []
        for turn, told in enumerate(answer.turns):
            messages.append(("user", question.turns[turn]))
            prompt = encode_messages(base, messages, template)
            messages.append(("assistant", told.text))
            if told.prompt_tokens not in (None, len(prompt)):
                raise ValueError(
                    f"{place}: turn {turn + 1} followed {told.prompt_tokens} prompt tokens, and {len(prompt)} here: "
                    "pass the --tokenizer, --template and --questions of the recording"
                )
            if told.num_tokens > max_new_tokens:
                raise ValueError(f"{place}: turn {turn + 1} has {told.num_tokens} tokens: pass its --max-new-tokens")
            tokens = told.token_ids or _tokenised(told, base, max_new_tokens)
            if 0 < len(tokens) == told.num_tokens:
                ended = tokens[-1] in base.eos if told.ended is None else told.ended
                found.turns.append(Recording(question_id, question.category, turn, prompt, tokens, ended))
            else:
                found.mismatches.append(Mismatch(question_id, turn, told.num_tokens, len(tokens)))
    if not found.turns:
        raise ValueError(
            f"{path}: no turn to replay; {len(found.mismatches)} were left out: is --tokenizer the base's?"
        )
    return found


def _tokenised(told: RecordedTurn, base: RecordedBase, max_new_tokens: int) -> list[int]:
    """The text's tokens, and the end-of-sequence token that was stripped unless the length cap cut the text."""
    tokens = base.tokenizer(told.text, add_special_tokens=False, verbose=False).input_ids
    was_cut = told.num_tokens == max_new_tokens == len(tokens)
    return tokens if was_cut else [*tokens, *base.eos]
