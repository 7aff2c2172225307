"""``drafters verify``: check that drafters change neither the base's tokens nor, in sampling, their distribution."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from rich.table import Table
from rich.text import Text as RichText
from scipy import special, stats
from transformers import PreTrainedTokenizerBase

from data.safe_text import SafeConsole
from drafters.protocol import NoDrafter
from drafters.tree import common_prefix
from inference import drafter_specs
from inference.options import ModelOptions, SamplingOptions, VerifyQuestions
from inference.runs import progress_bars
from inference.verifier.base import Base
from inference.verifier.graphed import make_runner
from inference.verifier.layers import model_logits
from inference.verifier.sampling import Greedy, KeyedSampler, Sampler
from inference.verifier.session import Session, Step, acceptance_length, check_prompt

MAX_SHOWN_DIVERGENCES = 3  # of each drafter
MAX_TESTED_PROMPTS = 4  # in the test of the distribution
ERROR_RATE = 0.01  # probability that the command finds a difference in distribution where there is none
POWER = 0.9  # the probability for which the detectable bias is stated
REFERENCE_FACTOR = 4  # texts of the base for each of a drafter: they cost far less
MIN_EXPECTED = 5  # texts of the drafter expected in a cell of the table
BATCH_SIZE = 32

CappedPrompt = tuple[list[int], int]  # token ids, and the maximum number of new tokens
Text = tuple[int, ...]
TextCounts = Mapping[Text, int]  # how often each text was written


def verify(
    model: ModelOptions, selection: VerifyQuestions, sampling: SamplingOptions, drafter: list[str], texts: int,
    text_tokens: int,
) -> None:  # fmt: skip
    """Run `drafters verify`, see `inference.commands.verify`."""
    if min(texts, text_tokens - 1) < 0:
        raise ValueError("texts must be at least 0, and text_tokens at least 1")
    questions = selection.load()
    base, sampler, caps = model.load(), sampling.sampler(), selection.caps()
    selected = selection.select(base, questions)
    prompts = [(prompt, caps[name]) for name, benchmark in selected.items() for prompt in benchmark.prompts]
    runner, is_sampled = make_runner(base), sampling.temperature > 0
    specs = drafter_specs.labels(drafter)
    sessions = {name: drafter_specs.make_session(spec, runner, sampler) for name, spec in specs.items()}
    drawing = {name for name, session in sessions.items() if is_sampled and session.drafter.samples_drafts}
    console = SafeConsole()
    decoding = f"temperature {sampling.temperature}, seed {sampling.seed}" if is_sampled else "greedy"
    console.print(f"{model.base} · {model.dtype} · {decoding} · {len(prompts)} prompts")
    for line in (line for benchmark in selected.values() for line in benchmark.notes()):
        console.print(f"left out: {line}", highlight=False)

    alone = list[DecodedText]()  # what our own loop writes without a drafter, if its bits are to be compared
    if runner.row_multiple:
        alone = [decode(Session(runner, NoDrafter(), sampler), *prompt) for prompt in prompts]
        feeding = f", fed in multiples of {runner.row_multiple}" if runner.row_multiple > 1 else ""
        console.print(f"bit-identical rows: yes{feeding}", highlight=False)
    elif model.dtype != "float32":
        console.print("bit-identical rows: no")
    expected = [text.tokens for text in alone]
    if not (alone and is_sampled):  # sampled texts of the base come from our own loop in either case
        generated = [generate_reference(base, *prompt, sampler) for prompt in prompts]
        if alone:
            count = f"{sum(map(list.__eq__, expected, generated))} of the base's {len(alone)} answers"
            console.print(f"transformers' generate writes {count}", highlight=False)
        expected = expected or generated

    tests: dict[str, EqualityResult] = {}
    with progress_bars(transient=True) as bars:
        comparisons = {
            name: compare(session, prompts, expected, [] if name in drawing else alone)
            for name, session in bars.track(sessions.items(), description="verify")
        }
        if is_sampled and texts:
            tested = [prompt for prompt, _ in prompts[:MAX_TESTED_PROMPTS]]
            num_texts = -(-texts // len(tested))  # after each prompt, with seeds that no other prompt has
            samplings = [replace(sampling, seed=sampling.seed + index * num_texts) for index in range(len(tested))]
            pairs = list(zip(tested, samplings, strict=True))
            references = [sample_base(base, *pair, REFERENCE_FACTOR * num_texts, text_tokens) for pair in pairs]
            for name, session in bars.track(sessions.items(), description="distribution"):
                drafted = [sample_drafted(session, *pair, num_texts, text_tokens) for pair in pairs]
                tests[name] = compare_distributions(references, drafted, ERROR_RATE / len(sessions))

    console.print(_table(comparisons, tests, len(prompts)))
    are_different = False
    for name, comparison in comparisons.items():
        if name in drawing:
            untested = "" if name in tests else ", and its distribution was not tested (--texts 0)"
            console.print(f"{name} samples its drafts: its texts are others under the same seed{untested}.")
        for line in [] if name in drawing else comparison.differences(name, base.tokenizer):
            console.print(line, style="red")
            are_different = True
    are_biased = False
    for name, test in tests.items():
        is_biased = test.p_value <= ERROR_RATE / len(tests)
        console.print(_describe(test, name, is_biased), style="red" if is_biased else "")
        are_biased |= is_biased
    if not (are_different or are_biased):
        result = "every answer is the base's own, token for token"
        if drawing:
            result = "no difference from the base was found" if tests else "where it was compared"
        console.print(f"Nothing is lost: {result}.", style="green")
    elif are_biased or alone or model.dtype == "float32":
        sys.exit(1)


def _table(comparisons: dict[str, Comparison], tests: dict[str, EqualityResult], num_prompts: int) -> Table:
    table = Table()
    is_bitwise = any(comparison.num_equal_logits is not None for comparison in comparisons.values())
    columns = ["drafter", "identical answers", *["equal logits"] * is_bitwise, "acceptance length"]
    for column in (*columns, *["p-value"] * bool(tests)):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for name, comparison in comparisons.items():
        style = "red" if comparison.divergences else "green"
        identical = RichText(f"{comparison.num_identical}/{num_prompts}", style=style)
        equal = "" if comparison.num_equal_logits is None else f"{comparison.num_equal_logits}/{num_prompts}"
        p_value = [f"{tests[name].p_value:.2g}"] if tests else []
        table.add_row(name, identical, *[equal] * is_bitwise, f"{comparison.acceptance_length:.2f}", *p_value)
    return table


# ---- texts


@dataclass(frozen=True)
class Divergence:
    """The first difference between two answers to the same prompt."""

    prompt: int  # index of the prompt
    position: int  # of the first token that differs, in the answer
    base_token: int  # that the base writes there alone
    drafted_token: int
    logit_gap: float  # the base's logit of its own token minus that of the other


@dataclass(frozen=True)
class Comparison:
    """What decoding some prompts with a drafter gave, compared with the base alone."""

    num_identical: int  # prompts with identical answers
    acceptance_length: float  # over all prompts
    divergences: list[Divergence]  # of each other prompt
    num_equal_logits: int | None = None  # prompts with the same logits bit for bit; None if that is not asked

    def differences(self, drafter: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """A line for each of the first divergences, or one if only logits differ."""
        lines = []
        for divergence in self.divergences[:MAX_SHOWN_DIVERGENCES]:
            tokens = divergence.base_token, divergence.drafted_token
            base_text, drafted = (repr(tokenizer.decode([token])) for token in tokens)
            lines.append(
                f"{drafter}: prompt {divergence.prompt} differs from token {divergence.position} on: the base writes "
                f"{base_text}, with the drafter {drafted}; logit gap {divergence.logit_gap:.3g}"
            )
        if not lines and self.num_equal_logits is not None and self.num_equal_logits < self.num_identical:
            lines.append(f"{drafter}: texts are equal, and logits differ in a bit")
        return lines


class DecodedText(NamedTuple):
    """A text, the steps that wrote it, and a hash of the logits of each token."""

    tokens: list[int]
    steps: list[Step]
    hashes: list[bytes]


def decode(session: Session, prompt: list[int], max_new_tokens: int) -> DecodedText:
    """Decode a text, and hash its logits."""
    text = DecodedText([], [], [])
    for emitted, step in session.decode(prompt, max_new_tokens, session.runner.base.eos):
        text.tokens.extend(emitted)
        text.steps.append(step)
        for row in session.last.emitted_logits().cpu():
            text.hashes.append(hashlib.blake2b(row.contiguous().view(torch.uint8).numpy()).digest())
    return text


def generate_reference(base: Base, prompt: list[int], max_new_tokens: int, sampler: Sampler) -> list[int]:
    """The tokens that the base writes without a drafter.

    Greedy tokens come from transformers' own `generate`, which shares no code with our engine; sampled ones from the
    engine, as only its draws depend on nothing but the seed and the position.
    """
    check_prompt(base, prompt, max_new_tokens)
    if not isinstance(sampler, Greedy):
        return Session(make_runner(base), NoDrafter(), sampler).run(prompt, max_new_tokens, base.eos).tokens
    ids = torch.tensor([prompt], device=base.model.device)
    num_tokens = min(max_new_tokens, base.context_length - len(prompt))
    return base.greedy(ids, torch.ones_like(ids), num_tokens)[0].tolist()


def compare(
    session: Session, prompts: Sequence[CappedPrompt], expected: Sequence[list[int]], alone: Sequence[DecodedText] = ()
) -> Comparison:
    """Decode N prompts with a drafter and compare them with the N texts that the base writes alone.

    ``alone`` are these texts with their logits, which are compared bit for bit; empty without bit-identical rows.
    """
    base = session.runner.base
    texts = [decode(session, *prompt) for prompt in prompts]
    divergences = [
        first_divergence(base, index, prompts[index][0], tokens, text.tokens)
        for index, (tokens, text) in enumerate(zip(expected, texts, strict=True))
        if text.tokens != tokens
    ]
    length = acceptance_length(text.steps for text in texts) or 0.0
    num_equal = sum(text.hashes == other.hashes for text, other in zip(texts, alone, strict=True)) if alone else None
    return Comparison(len(prompts) - len(divergences), length, divergences, num_equal)


@torch.inference_mode()
def first_divergence(base: Base, index: int, prompt: list[int], expected: list[int], got: list[int]) -> Divergence:
    """Describe the first difference of two answers, by the logits of one plain forward over their common beginning."""
    position, end = common_prefix(expected, got), min(base.eos, default=0)
    ids = torch.tensor([[*prompt, *expected[:position]]], device=base.model.device)
    logits = model_logits(base.model, ids, 1)[0, 0].float()
    token, drafted = (text[position] if position < len(text) else end for text in (expected, got))
    return Divergence(index, position, token, drafted, (logits[token] - logits[drafted]).item())


# ---- distributions


@torch.inference_mode()
def next_probabilities(
    base: Base, prompt: Sequence[int], texts: Sequence[Text], sampler: KeyedSampler
) -> Iterator[np.ndarray]:
    """The distribution (V,) of the token after the prompt and each text of one length, by a forward without a cache."""
    for start in range(0, len(texts), BATCH_SIZE):
        ids = torch.tensor([[*prompt, *text] for text in texts[start : start + BATCH_SIZE]], device=base.model.device)
        yield from sampler.probabilities(model_logits(base.model, ids, 1)[:, 0]).cpu().numpy()


def sample_base(
    base: Base, prompt: Sequence[int], sampling: SamplingOptions, num_texts: int, num_tokens: int
) -> TextCounts:
    """Sample texts of the base alone, by the model's own forward: no code of the decoding loop takes part.

    Equal beginnings are read once, and how often each token follows is drawn for all texts that share one. Texts that
    end with an end-of-sequence token, or with the context, are shorter than ``num_tokens``.
    """
    rng = np.random.default_rng((sampling.seed, num_texts, *prompt))
    sampler = KeyedSampler(sampling.temperature, sampling.top_k, sampling.top_p)
    ended: dict[Text, int] = {}
    growing: dict[Text, int] = {(): num_texts}
    for _ in range(min(num_tokens, base.context_length - len(prompt))):
        longer: dict[Text, int] = {}
        rows = next_probabilities(base, prompt, list(growing), sampler)
        for (text, count), probabilities in zip(growing.items(), rows, strict=True):
            counts = rng.multinomial(count, probabilities / probabilities.sum())
            for token in np.flatnonzero(counts).tolist():
                extended = (*text, token)
                (ended if token in base.eos else longer)[extended] = int(counts[token])
        growing = longer
    return ended | growing


def sample_drafted(
    session: Session, prompt: Sequence[int], sampling: SamplingOptions, num_texts: int, num_tokens: int
) -> TextCounts:
    """Sample texts with the drafter of a session, as `sample_base` does; each is a request with a seed of its own."""
    counts: Counter[Text] = Counter()
    sampler, eos = session.sampler, session.runner.base.eos
    for seed in range(sampling.seed, sampling.seed + num_texts):
        session.sampler = replace(sampling, seed=seed).sampler()
        counts[tuple(session.run(prompt, num_tokens, eos).tokens)] += 1
    session.sampler = sampler
    return counts


@dataclass(frozen=True)
class EqualityResult:
    """The outcome of `compare_distributions`.

    The detectable bias is the smallest that is found with a probability of about 0.9: the share of texts in place of
    which the drafter writes the base's most frequent text, a total variation distance. None if none is found so often.
    """

    p_value: float  # probability of a chi-squared at least as large if both distributions are equal
    chi_squared: float  # Pearson's statistic of the tables of texts, added up over the prompts
    freedom: int  # its degrees of freedom
    detectable: float | None


def compare_distributions(
    reference: Sequence[TextCounts], drafted: Sequence[TextCounts], level: float = ERROR_RATE
) -> EqualityResult:
    """Test by Pearson's chi-squared whether two samples of texts come from the same distribution, prompt by prompt.

    With probability ``level`` the p-value is at most ``level`` if the distributions are equal.
    """
    tables = [cell_counts(*samples) for samples in zip(reference, drafted, strict=True)]
    results = [stats.chi2_contingency(table, correction=False) for table in tables]
    chi_squared, freedom = sum(float(result.statistic) for result in results), sum(result.dof for result in results)
    p_value = float(stats.chi2.sf(chi_squared, freedom)) if freedom else 1.0
    return EqualityResult(p_value, chi_squared, freedom, detectable_bias(tables, level))


def cell_counts(reference: TextCounts, drafted: TextCounts) -> np.ndarray:
    """The counts (2, C) of the base's and the drafter's texts in C cells.

    A text is a cell if at least `MIN_EXPECTED` of it are expected among the drafter's; any other counts for the text
    without its last token.
    """
    cells: dict[Text, np.ndarray] = {}
    for row, counts in enumerate((reference, drafted)):
        for text, count in counts.items():
            cells.setdefault(text, np.zeros(2, int))[row] += count
    enough = MIN_EXPECTED * sum(map(sum, cells.values())) / sum(drafted.values())
    for length in range(max(map(len, cells)), 0, -1):
        for text in [text for text, counts in cells.items() if len(text) == length and counts.sum() < enough]:
            cells[text[:-1]] = cells.get(text[:-1], 0) + cells.pop(text)
    return np.array(list(cells.values())).T


def detectable_bias(tables: Sequence[np.ndarray], level: float) -> float | None:
    """The smallest bias that the test of this error rate finds with a probability of about `POWER`.

    A drafter moves a share b of its texts to the base's most frequent one. Each table (2, C) then adds its share of
    b^2 * sensitivity to the noncentrality of the statistic's chi-squared distribution.
    """
    freedom, bias = sum(table.shape[1] - 1 for table in tables), 0.0
    if freedom == 0:
        return None
    noncentrality = special.chndtrinc(stats.chi2.isf(level, freedom), freedom, 1 - POWER)
    rare = [1 - float(table[0].max() / table[0].sum()) for table in tables]  # the share of all other texts
    for _ in range(8):  # the shares of both samples together depend on the bias: a fixed point
        sensitivity = 0.0
        for table, share in zip(tables, rare, strict=True):
            num_base, num_drafted = table.sum(axis=1)
            moved = bias * num_drafted / (num_base + num_drafted)
            terms = share**2 / (1 - share + moved * share) + share / (1 - moved)
            sensitivity += float(num_base * num_drafted / (num_base + num_drafted) * terms)
        bias = min(1.0, float(np.sqrt(noncentrality / max(sensitivity, 1e-12))))
    return bias * float(np.mean(rare)) if bias < 1 else None


def _describe(test: EqualityResult, drafter: str, is_biased: bool) -> str:
    outcome = "another distribution than the base's" if is_biased else "no difference from the base's distribution"
    power = "it could find no bias: the base writes hardly more than one text here, so raise the temperature"
    if test.detectable is not None:
        power = (
            f"it finds with a probability of about {POWER} a drafter that writes the base's most frequent text in "
            f"place of {100 * test.detectable:.1f} % of the texts"
        )
    return (
        f"{drafter}: {outcome} (chi-squared {test.chi_squared:.1f}, {test.freedom} degrees of freedom, p = "
        f"{test.p_value:.2g}). The test errs in {100 * ERROR_RATE:.0f} % of runs; {power}."
    )
