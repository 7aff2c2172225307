"""Microseconds per step that drafters spend in propose and observe, at several lengths of the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean, median
from time import perf_counter as clock
from typing import TYPE_CHECKING, cast

import torch

from benchmarks.harness import ResultTable, alternate, main, percentile, show, spread
from data.conversations import load_conversations
from data.tokenizer import load_tokenizer
from drafters import DraftTree, RequiredOutputs
from drafters.registry import registered
from inference import drafter_specs
from inference.verifier.runner import ForwardOutput, Runner
from inference.verifier.session import PHASES, Session, StepCost

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROPOSE, OBSERVE = PHASES.index("propose"), PHASES.index("observe")
NUM_FOLLOWERS = 16  # tokens with a score above 0 in the logits of a node
WITH_MODEL = {"self_speculative"}  # drafters that run layers of the base


class RecitingBase:
    """The attributes of a base that drafters and sessions read."""

    name = "a fixed text"

    def __init__(self, context_length: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.context_length, self.tokenizer = context_length, tokenizer


class RecitingRunner:
    """A runner without a model that recites one text, at a cost that does not grow with the text.

    On the path of the text, the most probable token is the text's next one. The other probable tokens, and all of them
    off that path, are those that most often follow the fed token in the text, so that drafters learn from logits as
    plausible as a base's.

    Args:
        text: Token ids; a prompt is a beginning of the text.
        vocab_size: V.
        tokenizer: Tokenizer of the text, for drafters whose files record it.
    """

    def __init__(self, text: list[int], vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.text, self.vocab_size, self.context_length = text, vocab_size, len(text)
        self.base = RecitingBase(len(text), tokenizer)
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

    def prepare(self, length: int) -> int:
        return self.context_length

    def truncate(self, length: int) -> None:
        self.cached = length


def _followers(text: list[int], vocab_size: int) -> torch.Tensor:
    """Return (V, NUM_FOLLOWERS) tokens: those that follow each token in the text, the most frequent first.

    Tokens with fewer followers are filled up with the most frequent tokens of the text.
    """
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
    """The times of one drafter at one length.

    Args:
        begin: Microseconds for reading the prompt, by repeat.
        propose, observe: Microseconds of each step, by repeat.
        emitted: Tokens emitted in all steps.
        fed: Tokens fed to the base in all steps.
    """

    begin: list[float] = field(default_factory=list)
    propose: list[list[float]] = field(default_factory=list)
    observe: list[list[float]] = field(default_factory=list)
    emitted: int = 0
    fed: int = 0

    def means(self) -> list[float]:
        """Return the mean time of propose and observe together for each repeat."""
        return [mean(propose) + mean(observe) for propose, observe in zip(self.propose, self.observe, strict=True)]


def drafter_overhead(
    drafter: list[str] | None = None,
    lengths: list[int] = [1024, 4096, 16384, 65536],  # noqa: B006
    steps: int = 256,
    repeats: int = 5,
    data: str = "embedded:4000:0",
    tokenizer: str = "checkpoints/tiny-chat",
    max_nodes: int = 1024,
    out: str | None = None,
) -> None:
    """Measure propose and observe in the real loop, with a base that has no model and recites a text.

    Args:
        drafter: Drafters as in `drafters eval`, for example "[anpd,'corpus=FILE']"; by default all drafters that need
            neither a model nor a file.
        lengths: Numbers of tokens before the first measured step.
        steps: Measured steps per repeat.
        repeats: Runs of every drafter at every length, after a short warm-up run.
        data: Conversations that form the text: a ShareGPT file, or embedded:COUNT:SEED.
        tokenizer: Folder of the tokenizer.
        max_nodes: Largest number of draft tokens of a step. With 0, steps have no draft, as under an automatic budget
            that has stopped drafting.
        out: Markdown file to write the tables to.
    """
    if min(steps, repeats, *lengths) < 2:
        raise ValueError("steps, repeats and lengths must be at least 2")
    loaded = load_tokenizer(tokenizer)
    text = _text(data, loaded, max(lengths) + 16 * steps)
    # Drafters without a model and sessions use only what a RecitingRunner has.
    runner = cast(Runner, RecitingRunner(text, len(loaded), loaded))
    specs = drafter_specs.labels(["none", *(spec for spec in drafter or offered() if spec != "none")])
    sessions = {
        name: Session(runner, drafter_specs.make(spec, runner), max_nodes=max_nodes) for name, spec in specs.items()
    }
    costs = {(name, length): Costs() for name in sessions for length in lengths}
    for session in sessions.values():
        _run(session, text, min(lengths), 8, Costs())
    for _, item, name in alternate(list(sessions), len(lengths), repeats, "drafters"):
        _run(sessions[name], text, lengths[item], steps, costs[name, lengths[item]])
    table = ResultTable("Microseconds per step outside the base", HEADINGS, [_row(*key, costs[key]) for key in costs])
    growth = ResultTable("Mean of propose and observe by length of the text", ["drafter", *map(str, lengths)])
    for name in sessions:
        growth.rows.append([name, *(f"{median(costs[name, length].means()):.1f}" for length in lengths)])
    table.notes += [
        f"{steps} steps after a prompt of the given number of tokens of {data} (tokenizer {tokenizer}); {repeats} "
        "repeats; the drafters alternate, starting with another one each time, each with empty tables. Medians of the "
        "repeats' means; p99 over all steps; noise = (largest - smallest) / median of the repeats' means; begin = "
        f"reading the prompt, ms. At most {max_nodes} draft tokens a step.",
        "propose includes the check of the tree against the limits: the drafter none shows the time of this and of the "
        "clock. No model runs in between, so the processor's caches are warmer than in real decoding.",
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
    """Decode after the first ``length`` tokens, and check that the loop writes the text."""
    session.drafter.reset()
    started = clock()
    session.begin(text[:length])
    costs.begin.append(1e6 * (clock() - started))
    session.step(len(text))  # the prefill, which is not measured
    measured: list[StepCost] = []
    while len(measured) < num_steps and len(session.seq) < len(text):
        measured.append(session.step(len(text))[1])
    assert session.seq == text[: len(session.seq)], "the loop writes what the base writes"
    assert len(measured) == num_steps, "the text is long enough"
    costs.propose.append([1e6 * step.seconds[PROPOSE] for step in measured])
    costs.observe.append([1e6 * step.seconds[OBSERVE] for step in measured])
    costs.emitted += sum(step.emitted for step in measured)
    costs.fed += sum(step.fed for step in measured)


def offered() -> list[str]:
    """Return the drafters that need neither a model nor a file, with both rules of prompt lookup."""
    free = [
        name
        for name, known in registered().items()
        if not known.learned_class and (known.is_optional or not known.file)
    ]
    specs = [name for name in free if name not in WITH_MODEL]
    return [*specs, "prompt_lookup:partial=false"]


def _text(data: str, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> list[int]:
    """Return the tokens of conversations, joined to one text.

    Raises:
        ValueError: The conversations have too few tokens.
    """
    text: list[int] = []
    for conversation in load_conversations([data])[0]:
        text += tokenizer("\n".join(words for _, words in conversation.messages)).input_ids
        if len(text) >= num_tokens:
            return text[:num_tokens]
    raise ValueError(f"{data} holds {len(text)} tokens and {num_tokens} are needed: pass more --data or less --lengths")


if __name__ == "__main__":
    main(drafter_overhead)
