"""Microseconds that drafters spend a step beside the base: propose and observe, at several lengths of the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean, median
from time import perf_counter as clock
from typing import TYPE_CHECKING

import torch

from benchmarks.harness import Measured, in_turn, main, percentile, show, spread
from data import sharegpt
from data.tokenizer import load_tokenizer
from drafters import DraftTree, RequiredOutputs
from inference.engine.runner import ForwardOutput
from inference.engine.session import PHASES, Session, StepCost
from inference.registry import catalogue

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROPOSE, OBSERVE = PHASES.index("propose"), PHASES.index("observe")
NUM_FOLLOWERS = 16  # ranked words that a row shows
WITH_MODEL = {"self_speculative"}  # drafts with layers of the base


class WrittenBase:
    """What a drafter or a session asks of a base that only recites."""

    name = "a written text"

    def __init__(self, context_length: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.context_length, self.tokenizer = context_length, tokenizer


class WrittenRunner:
    """A runner without a model: it recites one text, at a cost that does not grow with it.

    A row on the text's own path shows the text's next token; below it, and off the path, stand the words that follow
    the fed one most often in the text, so that what drafters learn from rows is as plausible as from a base.

    Args:
        text: Tokens; the prompt is its beginning.
        vocab_size: V.
        tokenizer: What made the text, for drafters that hold a file of it.
    """

    def __init__(self, text: list[int], vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.text, self.vocab_size, self.context_length = text, vocab_size, len(text)
        self.base = WrittenBase(len(text), tokenizer)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self._followers = _followers(text, vocab_size)
        self._scores = torch.arange(NUM_FOLLOWERS, 0, -1).float()
        self.reset()

    def reset(self, reserve: int = 0) -> None:
        self.cached = self._num_pending = 0

    def forward(self, pending: list[int], tree: DraftTree, required_outputs: RequiredOutputs) -> ForwardOutput:
        self._num_pending = len(pending)
        root = self.cached + len(pending) - 1
        fed = torch.tensor([self.text[root], *tree.tokens])
        logits = torch.zeros(1 + len(tree), self.vocab_size).scatter_(
            1, self._followers[fed], self._scores.expand(1 + len(tree), -1)
        )
        on_path = [True]
        for token, parent, depth in zip(tree.tokens, tree.parents, tree.depths, strict=True):
            at = root + depth
            on_path.append(on_path[1 + parent] and at < len(self.text) and token == self.text[at])
        for row, depth in enumerate([0, *tree.depths]):
            if on_path[row] and root + depth + 1 < len(self.text):
                logits[row, self.text[root + depth + 1]] = NUM_FOLLOWERS + 1
        return ForwardOutput(logits, None)

    def commit(self, path: list[int]) -> None:
        self.cached += self._num_pending + len(path)

    def truncate(self, length: int) -> None:
        self.cached = length


def _followers(text: list[int], vocab_size: int) -> torch.Tensor:
    """(V, NUM_FOLLOWERS) words that follow each word in the text, the most frequent first, then the most frequent."""
    pairs = torch.tensor(text[:-1]) * vocab_size + torch.tensor(text[1:])
    pairs, counts = pairs.unique(return_counts=True)
    common = torch.bincount(torch.tensor(text), minlength=vocab_size).argsort(descending=True)[: 2 * NUM_FOLLOWERS]
    ranked: list[list[int]] = [[] for _ in range(vocab_size)]
    for pair in pairs[counts.argsort(descending=True)].tolist():
        row = ranked[pair // vocab_size]
        if len(row) < NUM_FOLLOWERS:
            row.append(pair % vocab_size)
    for row in ranked:
        row += [word for word in common.tolist() if word not in row][: NUM_FOLLOWERS - len(row)]
    return torch.tensor(ranked)


@dataclass
class Costs:
    """What one drafter took at one length; one entry a repeat, in microseconds a step, but for ``begin``, in all."""

    begin: list[float] = field(default_factory=list)
    propose: list[list[float]] = field(default_factory=list)
    observe: list[list[float]] = field(default_factory=list)
    emitted: int = 0
    fed: int = 0

    def means(self) -> list[float]:
        """Propose and observe together."""
        return [mean(propose) + mean(observe) for propose, observe in zip(self.propose, self.observe, strict=True)]


def drafter_overhead(
    drafter: list[str] | None = None,
    lengths: list[int] = [1024, 4096, 16384, 65536],  # noqa: B006
    steps: int = 256,
    repeats: int = 5,
    data: str = "embedded:4000:0",
    tokenizer: str = "checkpoints/tiny-chat",
    out: str | None = None,
) -> None:
    """Time of propose and observe of table drafters in the real loop, on a base without a model that recites a text.

    Args:
        drafter: As in `drafters eval`, for example "[anpd,'corpus=FILE']"; without it all that can do without model
            and file.
        lengths: Tokens of the text before the first step measured.
        steps: Steps measured a repeat.
        repeats: Runs of every drafter at every length, after one of a few steps to warm up.
        data: Conversations that make the text: a ShareGPT file, or embedded:COUNT:SEED.
        tokenizer: Folder of the tokenizer.
        out: Markdown file for the tables.
    """
    if min(steps, repeats, *lengths) < 2:
        raise ValueError("steps, repeats and lengths must be at least 2")
    writer = load_tokenizer(tokenizer)
    text = _text(data, writer, max(lengths) + 16 * steps)
    runner = WrittenRunner(text, len(writer), writer)
    specs = catalogue.labels(["none", *(spec for spec in drafter or offered() if spec != "none")])
    sessions = {name: Session(runner, catalogue.make(spec, runner)) for name, spec in specs.items()}
    found = {(name, length): Costs() for name in sessions for length in lengths}
    for session in sessions.values():
        _run(session, text, min(lengths), 8, Costs())
    for _, item, name in in_turn(list(sessions), len(lengths), repeats, "drafters"):
        _run(sessions[name], text, lengths[item], steps, found[name, lengths[item]])
    table = Measured("Microseconds a step beside the base", HEADINGS, [_row(*key, found[key]) for key in found])
    growth = Measured("Mean of propose and observe by length of the text", ["drafter", *map(str, lengths)])
    for name in sessions:
        growth.rows.append([name, *(f"{median(found[name, length].means()):.1f}" for length in lengths)])
    table.notes += [
        f"{steps} steps after a prompt of so many tokens of {data} (tokenizer {tokenizer}); {repeats} repeats, "
        "drafters in turn, another one first each time, each with empty tables. Medians of the repeats' means; p99 "
        "over all steps; noise = (largest - smallest) / median of the repeats' means; begin = reading the prompt, ms.",
        "propose holds the check of the tree against the limits: none shows what that and the clock take. No model "
        "runs between, so caches are warmer than in real decoding.",
    ]
    show([table, growth], torch.device("cpu"), out)


HEADINGS = ["drafter", "length", "propose", "p99", "observe", "p99", "noise", "begin", "accepted", "fed"]


def _row(name: str, length: int, costs: Costs) -> list[str]:
    cells = [name, str(length)]
    for phase in (costs.propose, costs.observe):
        cells.append(f"{median(mean(run) for run in phase):.1f}")
        cells.append(f"{percentile([step for run in phase for step in run], 0.99):.1f}")
    num_steps = sum(map(len, costs.propose))
    return [
        *cells,
        f"{spread(costs.means()):.0%}",
        f"{median(costs.begin) / 1000:.1f}",
        f"{costs.emitted / num_steps:.2f}",
        f"{costs.fed / num_steps:.1f}",
    ]


def _run(session: Session, text: list[int], length: int, num_steps: int, costs: Costs) -> None:
    """Go on from the first ``length`` tokens; assert that the loop writes the very text."""
    session.drafter.reset()
    started = clock()
    session.begin(text[:length])
    costs.begin.append(1e6 * (clock() - started))
    session.step(len(text))  # the prefill, which is no step like the others
    taken: list[StepCost] = []
    while len(taken) < num_steps and len(session.seq) < len(text):
        taken.append(session.step(len(text))[1])
    assert session.seq == text[: len(session.seq)], "the loop writes what the base writes"
    assert len(taken) == num_steps, "the text is long enough"
    costs.propose.append([1e6 * step.seconds[PROPOSE] for step in taken])
    costs.observe.append([1e6 * step.seconds[OBSERVE] for step in taken])
    costs.emitted += sum(step.emitted for step in taken)
    costs.fed += sum(step.fed for step in taken)


def offered() -> list[str]:
    """The drafters that can do without a model and a file; of prompt lookup both rules."""
    free = [name for name, kind in catalogue.TRAINING_FREE.items() if not kind.named or kind.optional]
    specs = [name for name in free if name not in WITH_MODEL]
    return [*specs, "prompt_lookup:partial=false"]


def _text(data: str, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> list[int]:
    """Tokens of conversations one after the other.

    Raises:
        ValueError: They are too few.
    """
    text: list[int] = []
    for conversation in sharegpt.load([data])[0]:
        text += tokenizer("\n".join(words for _, words in conversation.messages)).input_ids
        if len(text) >= num_tokens:
            return text[:num_tokens]
    raise ValueError(f"{data} holds {len(text)} tokens and {num_tokens} are needed: pass more --data or less --lengths")


if __name__ == "__main__":
    main(drafter_overhead)
