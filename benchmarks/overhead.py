"""Microseconds per step that drafters spend in propose and observe, at several lengths of the text."""

from __future__ import annotations

from statistics import mean, median
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import torch

from benchmarks.harness import ResultTable, alternate, main, show, spread
from data.conversations import load_conversations
from data.tokenizer import load_tokenizer
from drafters import DraftTree, RequiredOutputs
from drafters.registry import registered
from inference import drafter_specs
from inference.verifier.runner import ForwardOutput, Runner
from inference.verifier.session import PHASES, Session, StepCost

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WITH_MODEL = {"self_speculative"}  # drafters that run layers of the base


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
        self.base = SimpleNamespace(name="a fixed text", context_length=len(text), tokenizer=tokenizer)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        tokens, one = torch.tensor(text), torch.ones(())
        self._follow = torch.zeros(vocab_size, vocab_size)  # how often a token follows another, and how often at all
        self._follow.index_put_((tokens[:-1], tokens[1:]), one, accumulate=True)
        self._follow += torch.bincount(tokens, minlength=vocab_size) / len(text)
        self.reset()

    def reset(self, reserve: int = 0) -> None:
        self.cached = self._num_pending = 0

    def forward(self, pending: list[int], tree: DraftTree, required_outputs: RequiredOutputs) -> ForwardOutput:
        self._num_pending = len(pending)
        root = self.cached + len(pending) - 1
        logits = self._follow[torch.tensor([self.text[root], *tree.tokens])]
        on_path = [True]
        for token, parent, depth in zip(tree.tokens, tree.parents, tree.depths, strict=True):
            at = root + depth
            on_path.append(on_path[1 + parent] and at < len(self.text) and token == self.text[at])
        for row, depth in enumerate([0, *tree.depths]):
            if on_path[row] and root + depth + 1 < len(self.text):
                logits[row, self.text[root + depth + 1]] = len(self.text)
        return ForwardOutput(logits, None)

    def commit(self, path: list[int]) -> None:
        self.cached += self._num_pending + len(path)

    def prepare(self, length: int) -> int:
        return self.context_length

    def truncate(self, length: int) -> None:
        self.cached = length


def drafter_overhead(
    drafter: list[str] | None = None,
    lengths: list[int] = [1024, 4096, 16384, 65536],  # noqa: B006
    steps: int = 256,
    repeats: int = 5,
    data: str = "embedded:4000:0",
    tokenizer: str = "checkpoints/tiny-chat",
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
        out: Markdown file to write the table to.
    """
    if min(steps, repeats, *lengths) < 2:
        raise ValueError("steps, repeats and lengths must be at least 2")
    loaded = load_tokenizer(tokenizer)
    text = _text(data, loaded, max(lengths) + 16 * steps)
    # Drafters without a model and sessions use only what a RecitingRunner has.
    runner = cast(Runner, RecitingRunner(text, len(loaded), loaded))
    specs = drafter_specs.labels(["none", *(spec for spec in drafter or offered() if spec != "none")])
    sessions = {name: drafter_specs.make_session(spec, runner) for name, spec in specs.items()}
    costs: dict[tuple[str, int], list[list[StepCost]]] = {(name, length): [] for name in sessions for length in lengths}
    for session in sessions.values():
        _run(session, text, min(lengths), 8)
    for _, item, name in alternate(list(sessions), len(lengths), repeats, "drafters"):
        costs[name, lengths[item]].append(_run(sessions[name], text, lengths[item], steps))
    headings = ["drafter", *map(str, lengths), "noise", "accepted", "fed"]
    table = ResultTable("Microseconds of propose and observe per step, by length of the text", headings)
    for name in sessions:
        means = [[mean(map(_microseconds, run)) for run in costs[name, length]] for length in lengths]
        measured = [step for length in lengths for run in costs[name, length] for step in run]
        cells = [f"{median(each):.1f}" for each in means] + [f"{max(map(spread, means)):.0%}"]
        cells += [f"{mean(step.emitted for step in measured):.2f}", f"{mean(step.fed for step in measured):.1f}"]
        table.rows.append([name, *cells])
    table.notes += [
        f"{steps} steps after a prompt of the given number of tokens of {data} (tokenizer {tokenizer}); medians of "
        f"{repeats} repeats' means; the drafters alternate, each with empty tables; noise = largest (largest - "
        "smallest) / median of the repeats' means; accepted and fed: tokens per step.",
        "propose includes the check of the tree against the limits: the drafter none shows the time of this and of the "
        "clock. No model runs in between, so the processor's caches are warmer than in real decoding.",
    ]
    show([table], torch.device("cpu"), out)


def _run(session: Session, text: list[int], length: int, num_steps: int) -> list[StepCost]:
    """Decode after the first ``length`` tokens, and check that the loop writes the text."""
    session.drafter.reset()
    session.begin(text[:length])
    session.step(len(text))  # the prefill, which is not measured
    measured: list[StepCost] = []
    while len(measured) < num_steps and len(session.seq) < len(text):
        measured.append(session.step(len(text))[1])
    assert session.seq == text[: len(session.seq)], "the loop writes what the base writes"
    assert len(measured) == num_steps, "the text is long enough"
    return measured


def _microseconds(step: StepCost) -> float:
    return 1e6 * sum(step.seconds[PHASES.index(phase)] for phase in ("propose", "observe"))


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
