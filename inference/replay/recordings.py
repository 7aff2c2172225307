"""Recorded greedy answers, and stand-ins for the base that wrote them and for its runner."""

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
from inference.prompts import encode_question
from inference.results import answer_files
from inference.results.answer_files import RecordedTurn
from inference.verifier.acceptance import accept
from inference.verifier.runner import ForwardOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOT_RECORDED = -1  # the token of a row whose next token the recording does not contain


class NoModel(ValueError):
    """A drafter needs the model, of which there is only a recording."""


@dataclass(frozen=True)
class RecordedBase:
    """Stands in for `inference.verifier.base.Base`, of which only the tokenizer and recorded answers are known.

    Args:
        name: File of the recorded answers.
        tokenizer: The base's tokenizer.
        context_length: Longer than every recorded text, as the recording itself ends each answer.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    context_length: int = 1 << 30

    @cached_property
    def eos(self) -> frozenset[int]:
        """The end-of-sequence tokens."""
        token = self.tokenizer.eos_token_id
        return frozenset([] if token is None else [token])

    @property
    def model(self) -> NoReturn:
        raise NoModel(f"{self.name} contains tokens, but no model")

    shape = base_weights = model


class ReplayRunner:
    """Stands in for `inference.verifier.runner.Runner`; it knows the base's next token only along the recorded text.

    After any beginning of a greedy answer, the most probable token of the base is the next recorded one. So the row of
    a node on the recorded text holds that token, and every other row holds `NOT_RECORDED`, which is never accepted.

    Args:
        base: The base that was recorded.
    """

    def __init__(self, base: RecordedBase) -> None:
        self.base, self.context_length, self.vocab_size = base, base.context_length, len(base.tokenizer)
        self.load([])

    def load(self, text: Sequence[int], ended: bool = False) -> None:
        """Set the text to decode next.

        Args:
            text: Tokens of the prompt and of the recorded answer.
            ended: Whether the answer ended with its last token, rather than at the length cap.
        """
        self.text, self.ended = list(text), ended
        self.reset()

    def reset(self, reserve: int = 0) -> None:
        """Go back to the beginning of the text."""
        self.cached = self._num_pending = 0

    def forward(self, pending: Sequence[int], tree: DraftTree, required_outputs: RequiredOutputs) -> ForwardOutput:
        """Return token ids (1 + M, 1) instead of logits."""
        at = self.cached + len(pending)
        assert pending == self.text[self.cached : at], "the session's text is not the recorded one"
        self._num_pending = len(pending)
        picks = [[NOT_RECORDED] for _ in range(1 + len(tree))]
        continuation = self.text[at:]
        nodes = [ROOT, *tree.follow(continuation)]
        for node, token in zip(nodes, continuation, strict=False):
            picks[1 + node] = [token]
        if len(nodes) > len(continuation) and self.ended:
            picks[1 + nodes[-1]] = self.text[-1:]  # the session drops everything behind the end
        return ForwardOutput(torch.tensor(picks), None)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the pending tokens and the accepted nodes."""
        self.cached += self._num_pending + len(path)

    def prepare(self, length: int) -> int:
        """Return where the positions of draft trees must end: with the context."""
        return self.context_length

    def truncate(self, length: int) -> None:
        """Keep only the first ``length`` tokens."""
        assert length <= self.cached, "a text cannot be truncated to more than its length"
        self.cached = length


class Recorded:
    """The sampler of a `ReplayRunner`, whose rows are already token ids."""

    lossless, seed = True, 0

    def decide(
        self,
        logits: Tensor,
        tree: DraftTree,
        positions: Sequence[int],
        text: Sequence[int] = (),
        eos: frozenset[int] = frozenset(),
    ) -> Tensor:
        return logits

    def accept(self, tree: DraftTree, decisions: list[list[int]]) -> tuple[list[int], list[int]]:
        path, emitted = accept(tree, [row[0] for row in decisions])
        assert NOT_RECORDED not in emitted, "a token was accepted that was not recorded"
        return path, emitted


@dataclass(frozen=True)
class Recording:
    """One recorded turn.

    Args:
        question_id: Number of the question.
        category: Category of the question in its benchmark.
        turn: Index of the turn in the conversation.
        prompt: Tokens of the prompt, including the earlier recorded turns.
        tokens: Tokens of the answer, including the end-of-sequence token.
        ended: Whether the answer ended with that token, rather than at the length cap.
    """

    question_id: int
    category: str
    turn: int
    prompt: list[int]
    tokens: list[int]
    ended: bool


@dataclass(frozen=True)
class Mismatch:
    """A turn whose tokens are unknown, because its text has another number of tokens than was recorded."""

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
    """Read recorded answers; the prompt of each turn contains the recorded answers of the earlier turns.

    Answers of `drafters eval` contain token ids. FastChat's contain texts and counts: the text is tokenized again, and
    the turn is left out if the number of tokens is not the recorded one. If ``new_tokens`` is 0, as in some public
    baselines, that number is ``idxs`` + 1, as a base alone writes one token per step.

    Args:
        path: JSONL file with one question per line.
        questions: The questions that were answered.
        base: The base's tokenizer.
        template: Chat template of the recording.
        max_new_tokens: Maximum number of tokens of a turn in the recording.
        limit: Maximum number of lines to read; None reads all.

    Raises:
        ValueError: A line is not a recorded answer, or it answers another question or another prompt.
    """
    by_id = {question.question_id: question for question in questions}
    recordings = Recordings()
    for place, row in list(answer_files.lines(path))[:limit]:
        answer = answer_files.parse(place, row)
        question_id, question = answer.question_id, by_id.get(answer.question_id)
        if question is None or len(answer.turns) > len(question.turns):
            raise ValueError(f"{place}: no such question {question_id}: pass the --questions that were answered")
        messages: list[tuple[str, str]] = []
        for turn, recorded in enumerate(answer.turns):
            messages.append(("user", question.turns[turn]))
            prompt = encode_question(base, question, messages, template)
            messages.append(("assistant", recorded.text))
            if recorded.prompt_tokens not in (None, len(prompt)):
                raise ValueError(
                    f"{place}: turn {turn + 1} had {recorded.prompt_tokens} prompt tokens, but {len(prompt)} here: "
                    "pass the --tokenizer, --template and --questions of the recording"
                )
            if recorded.num_tokens > max_new_tokens:
                raise ValueError(
                    f"{place}: turn {turn + 1} has {recorded.num_tokens} tokens: pass its --max-new-tokens"
                )
            tokens = recorded.token_ids or _tokenize(recorded, base, max_new_tokens)
            if 0 < len(tokens) == recorded.num_tokens:
                ended = tokens[-1] in base.eos if recorded.ended is None else recorded.ended
                recordings.turns.append(Recording(question_id, question.category, turn, prompt, tokens, ended))
            else:
                recordings.mismatches.append(Mismatch(question_id, turn, recorded.num_tokens, len(tokens)))
    if not recordings.turns:
        raise ValueError(
            f"{path}: no turn to replay; {len(recordings.mismatches)} were left out: is --tokenizer the base's?"
        )
    return recordings


def _tokenize(recorded: RecordedTurn, base: RecordedBase, max_new_tokens: int) -> list[int]:
    """The tokens of the text, with the end-of-sequence token that it had unless it was cut at the length cap."""
    tokens = base.tokenizer(recorded.text, add_special_tokens=False, verbose=False).input_ids
    was_cut = recorded.num_tokens == max_new_tokens == len(tokens)
    return tokens if was_cut else [*tokens, *base.eos]
