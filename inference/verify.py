"""``drafters verify``: check that drafters change neither the base's tokens nor, in sampling, their distribution."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Table
from rich.text import Text as RichText
from scipy import optimize, stats

from data.safe_text import SafeConsole
from drafters.protocol import NoDrafter
from inference import drafter_specs
from inference.prompts import QuestionOptions
from inference.runs import progress_bars
from inference.verifier.base import Base
from inference.verifier.compiled import make_runner
from inference.verifier.layers import takes_argument, unwrap
from inference.verifier.options import ModelOptions, SamplingOptions
from inference.verifier.sampling import Greedy, KeyedSampler, Sampler
from inference.verifier.session import Session, Step, acceptance_length, check_prompt, common_prefix

MAX_SHOWN_DIVERGENCES = 3  # of each drafter
MAX_TESTED_PROMPTS = 4  # in the test of the distribution
ERROR_RATE = 0.01  # probability that the command finds a difference in distribution where there is none
POWER = 0.9  # the probability for which the detectable bias is stated
REFERENCE_FACTOR = 4  # texts of the base for each of a drafter: they cost far less
MIN_EXPECTED = 5  # texts of the drafter expected in a cell of the table
NUM_PERMUTATIONS = 9999
BATCH_SIZE = 32

Prompt = tuple[list[int], int]  # token ids, and the maximum number of new tokens
Text = tuple[int, ...]
Counts = Mapping[Text, int]  # how often each text was written


@dataclass(frozen=True)
class PromptOptions(QuestionOptions):
    """The prompts that are decoded: the first turns of the benchmarks' questions."""

    limit: int | None = 20
    max_new_tokens: int | None = 128


def verify(
    model: ModelOptions,
    selection: PromptOptions,
    sampling: SamplingOptions,
    drafter: list[str],
    texts: int = 400,
    text_tokens: int = 4,
) -> None:
    """Decode prompts with and without each drafter, and compare the answers token by token.

    Greedy answers are compared with transformers' own generate, sampled ones with this project's decoding without a
    drafter under the same seed. So are greedy ones where rows are bit-identical (in bfloat16, on most CPUs), and their
    logits bit for bit. The exit code is 1 if such an answer or its logits differ, or an answer in float32. Without
    bit-identical rows, tokens with almost equal logits may be exchanged in bfloat16; the logit gap shows how close
    they were.

    With a temperature, a two-sample test also compares the distribution of short texts with that of the base alone, on
    at most four of the prompts, and says how small a bias it would have found. It alone decides about drafters that
    sample their drafts, because these write other texts under the same seed. The exit code is 1 if it finds a
    difference, which happens by chance in 1 % of runs.

    Args:
        drafter: NAME[=FILE][:key=value,...], such as joint, anpd:order=4 or ctc=FOLDER; an unknown name lists all of
            them. May be repeated.
        texts: Number of texts of each drafter for the test with a --temperature above 0; 0 leaves it out.
        text_tokens: Number of tokens of such a text.
    """
    if min(texts, text_tokens - 1) < 0:
        raise ValueError("texts must be at least 0, and text_tokens at least 1")
    questions = selection.load()
    base, sampler, caps = model.load(may_compile=True), sampling.sampler(), selection.caps()
    selected = selection.select(base, questions)
    prompts = [(prompt, caps[name]) for name, asked in selected.items() for prompt in asked.prompts]
    runner, is_sampled = make_runner(base, model.compile), sampling.temperature > 0
    specs = drafter_specs.labels(drafter)
    sessions = {name: drafter_specs.make_session(spec, runner, sampler) for name, spec in specs.items()}
    console = SafeConsole()
    decoding = f"temperature {sampling.temperature}, seed {sampling.seed}" if is_sampled else "greedy"
    console.print(f"{model.base} · {model.dtype} · {decoding} · {len(prompts)} prompts")
    for line in (line for asked in selected.values() for line in asked.notes()):
        console.print(f"left out: {line}", highlight=False)
    own, expected = list[Written](), list[list[int]]()
    if runner.row_multiple:
        own = [write(Session(runner, NoDrafter(), sampler), *prompt) for prompt in prompts]
        console.print(f"bit-identical rows: yes, fed in multiples of {runner.row_multiple}", highlight=False)
    elif model.dtype != "float32":
        console.print("bit-identical rows: no")
    if not (own and is_sampled):  # sampled texts of the base come from our own loop in either case
        expected = [generate_reference(base, prompt, cap, sampler) for prompt, cap in prompts]
    if own and not is_sampled:
        same = sum(alone.tokens == tokens for alone, tokens in zip(own, expected, strict=True))
        console.print(f"transformers' generate writes {same} of the base's {len(own)} answers", highlight=False)
    expected = [alone.tokens for alone in own] or expected
    tests: dict[str, EqualityResult] = {}
    with progress_bars(transient=True) as bars:
        tracked = bars.track(sessions.items(), description="verify")
        comparisons = {
            name: compare(session, prompts, expected, [] if is_sampled and session.drafter.samples_drafts else own)
            for name, session in tracked
        }
        if is_sampled and texts:
            tested = [prompt for prompt, _ in prompts[:MAX_TESTED_PROMPTS]]
            num_texts, requests = -(-texts // len(tested)), list[tuple[list[int], int, SamplingOptions, int]]()
            for index, prompt in enumerate(tested):  # each has seeds that no other one has
                own_sampling = replace(sampling, seed=sampling.seed + index * num_texts)
                requests.append((prompt, min(text_tokens, base.context_length - len(prompt)), own_sampling, num_texts))
            references = [sample_base(base, *request[:3], REFERENCE_FACTOR * request[3]) for request in requests]
            for name, session in bars.track(sessions.items(), description="distribution"):
                drafted = [sample_drafted(session, *request) for request in requests]
                tests[name] = compare_distributions(references, drafted, ERROR_RATE / len(sessions))
    console.print(_table(comparisons, tests, len(prompts)))
    drawn = {name for name, session in sessions.items() if is_sampled and session.drafter.samples_drafts}
    for name in drawn:
        untested = "" if name in tests else ", and its distribution was not tested (--texts 0)"
        console.print(f"{name} samples its drafts: its texts are others under the same seed{untested}.")
    different = {name: own.divergences for name, own in comparisons.items() if own.divergences and name not in drawn}
    rounded = [name for name, each in comparisons.items() if name not in {*drawn, *different} and each.is_rounded]
    for name, divergences in different.items():
        for divergence in divergences[:MAX_SHOWN_DIVERGENCES]:
            console.print(_describe(divergence, name, base), style="red")
    for name in rounded:
        console.print(f"{name}: texts are equal, and logits differ in a bit", style="red")
    biased = [name for name, test in tests.items() if test.p_value <= ERROR_RATE / len(tests)]
    for name, test in tests.items():
        console.print(_describe_test(test, name, name in biased), style="red" if name in biased else "")
    if not (different or biased or rounded):
        lost = "every answer is the base's own, token for token"
        if drawn:
            lost = "no difference from the base was found" if tests else "where it was compared"
        console.print(f"Nothing is lost: {lost}.", style="green")
    elif biased or own or model.dtype == "float32":
        sys.exit(1)


def _table(comparisons: dict[str, Comparison], tests: dict[str, EqualityResult], num_prompts: int) -> Table:
    table = Table()
    is_bitwise = any(comparison.num_equal_logits is not None for comparison in comparisons.values())
    columns = ["drafter", "identical answers", *["equal logits"] * is_bitwise, "acceptance length"]
    for column in (*columns, *["p-value"] * bool(tests)):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for name, own in comparisons.items():
        identical = RichText(f"{own.num_identical}/{num_prompts}", style="red" if own.divergences else "green")
        equal = "" if own.num_equal_logits is None else f"{own.num_equal_logits}/{num_prompts}"
        p_value = [f"{tests[name].p_value:.2g}"] if tests else []
        table.add_row(name, identical, *[equal] * is_bitwise, f"{own.acceptance_length:.2f}", *p_value)
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

    @property
    def is_rounded(self) -> bool:
        """Whether logits differ, bit by bit, though the texts are equal."""
        return self.num_equal_logits is not None and self.num_equal_logits < self.num_identical


class Written(NamedTuple):
    """A text, the steps that wrote it, and a hash of the logits of each token."""

    tokens: list[int]
    steps: list[Step]
    hashes: list[bytes]


def write(session: Session, prompt: list[int], max_new_tokens: int) -> Written:
    """Decode a text, and hash its logits."""
    written = Written([], [], [])
    for emitted, step in session.decode(prompt, max_new_tokens, session.runner.base.eos):
        written.tokens.extend(emitted)
        written.steps.append(step)
        for row in session.last.emitted_logits().cpu():
            written.hashes.append(hashlib.blake2b(row.contiguous().view(torch.uint8).numpy()).digest())
    return written


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
    session: Session, prompts: Sequence[Prompt], expected: Sequence[list[int]], own: Sequence[Written] = ()
) -> Comparison:
    """Decode N prompts with a drafter and compare them with the N texts that the base writes alone.

    ``own`` are these texts with their logits, which are compared bit for bit; empty without bit-identical rows.
    """
    base, num_equal = session.runner.base, 0
    divergences, texts = [], []
    for index, ((prompt, max_new_tokens), wanted) in enumerate(zip(prompts, expected, strict=True)):
        written = write(session, prompt, max_new_tokens)
        texts.append(written.steps)
        num_equal += bool(own) and written.hashes == own[index].hashes
        if written.tokens != wanted:
            divergences.append(first_divergence(base, index, prompt, wanted, written.tokens))
    num_identical = len(prompts) - len(divergences)
    return Comparison(num_identical, acceptance_length(texts) or 0.0, divergences, num_equal if own else None)


@torch.inference_mode()
def first_divergence(base: Base, index: int, prompt: list[int], expected: list[int], got: list[int]) -> Divergence:
    """Describe the first difference of two answers, by the logits of one plain forward over their common beginning."""
    position = common_prefix(expected, got)
    ids = torch.tensor([[*prompt, *expected[:position]]], device=base.model.device)
    logits = base.model(ids).logits[0, -1].float()
    own, drafted = (text[position] if position < len(text) else min(base.eos, default=0) for text in (expected, got))
    return Divergence(index, position, own, drafted, (logits[own] - logits[drafted]).item())


def _describe(divergence: Divergence, drafter: str, base: Base) -> str:
    own, drafted = (repr(base.tokenizer.decode([token])) for token in (divergence.base_token, divergence.drafted_token))
    return (
        f"{drafter}: prompt {divergence.prompt} differs from token {divergence.position} on: the base writes {own}, "
        f"with the drafter {drafted}; logit gap {divergence.logit_gap:.3g}"
    )


# ---- distributions


@dataclass(frozen=True)
class EqualityResult:
    """The outcome of `compare_distributions`.

    The detectable bias is the smallest that is found with probability 0.9: the share of texts in place of which the
    drafter writes the base's most frequent text, a total variation distance. None if no bias is found so often.
    """

    p_value: float  # probability of a chi-squared at least as large if both distributions are equal, by permutation
    chi_squared: float  # Pearson's statistic of the tables of texts, added up over the prompts
    freedom: int  # its degrees of freedom
    detectable: float | None


@torch.inference_mode()
def next_probabilities(
    base: Base, prompt: Sequence[int], texts: Sequence[Text], sampler: KeyedSampler
) -> Iterator[np.ndarray]:
    """The distribution (V,) of the token after the prompt and each text of one length, by a forward without a cache."""
    keep = {"logits_to_keep": 1} if takes_argument(unwrap(base.model).__class__, "logits_to_keep") else {}
    for start in range(0, len(texts), BATCH_SIZE):
        ids = torch.tensor([[*prompt, *text] for text in texts[start : start + BATCH_SIZE]], device=base.model.device)
        logits = base.model(ids, use_cache=False, **keep).logits[:, -1]
        yield from sampler.probabilities(logits).cpu().numpy()


def sample_base(
    base: Base, prompt: Sequence[int], num_tokens: int, sampling: SamplingOptions, num_texts: int
) -> Counts:
    """Sample texts of the base alone, by the model's own forward: no code of the decoding loop takes part.

    Equal beginnings are read once, and how often each token follows is drawn for all texts that share one. Texts that
    end with an end-of-sequence token are shorter than ``num_tokens``.
    """
    rng = np.random.default_rng((sampling.seed, num_texts, *prompt))
    sampler = KeyedSampler(sampling.temperature, sampling.top_k, sampling.top_p)
    ended: dict[Text, int] = {}
    growing: dict[Text, int] = {(): num_texts}
    for _ in range(num_tokens):
        longer: dict[Text, int] = {}
        rows = next_probabilities(base, prompt, list(growing), sampler)
        for (text, count), probabilities in zip(growing.items(), rows, strict=True):
            drawn = rng.multinomial(count, probabilities / probabilities.sum())
            for token in np.flatnonzero(drawn).tolist():
                extended = (*text, token)
                (ended if token in base.eos else longer)[extended] = int(drawn[token])
        growing = longer
    return ended | growing


def sample_drafted(
    session: Session, prompt: Sequence[int], num_tokens: int, sampling: SamplingOptions, num_texts: int
) -> Counts:
    """Sample texts with the drafter of a session, as `sample_base` does; each is a request with a seed of its own."""
    counts: Counter[Text] = Counter()
    sampler, eos = session.sampler, session.runner.base.eos
    for seed in range(sampling.seed, sampling.seed + num_texts):
        session.sampler = replace(sampling, seed=seed).sampler()
        counts[tuple(session.run(prompt, num_tokens, eos).tokens)] += 1
    session.sampler = sampler
    return counts


def compare_distributions(
    reference: Sequence[Counts], drafted: Sequence[Counts], level: float = ERROR_RATE
) -> EqualityResult:
    """Test whether two samples of texts come from the same distribution, prompt by prompt.

    A text counts for its longest beginning of which at least `MIN_EXPECTED` are expected among the drafter's. As these
    cells depend on both samples together only, the permutation test is exact: with probability ``level`` its p-value is
    at most ``level`` if the distributions are equal.
    """
    tables = [cell_counts(*both) for both in zip(reference, drafted, strict=True)]
    rng = np.random.default_rng(0)
    observed, permuted = 0.0, np.zeros(NUM_PERMUTATIONS)
    for table in tables:
        totals, num_drafted = table.sum(axis=0), int(table[1].sum())
        observed += float(_chi_squared(table[1:], totals)[0])
        permuted += _chi_squared(rng.multivariate_hypergeometric(totals, num_drafted, size=NUM_PERMUTATIONS), totals)
    num_larger = int((permuted >= observed * (1 - 1e-9)).sum())
    freedom = sum(table.shape[1] - 1 for table in tables)
    p_value = (1 + num_larger) / (1 + NUM_PERMUTATIONS)
    return EqualityResult(p_value, observed, freedom, detectable_bias(tables, level))


def cell_counts(reference: Counts, drafted: Counts) -> np.ndarray:
    """The counts (2, C) of the base's and the drafter's texts in C cells, each a beginning that is frequent enough."""
    beginnings: Counter[Text] = Counter()
    for counts in (reference, drafted):
        for text, count in counts.items():
            beginnings.update({text[:length]: count for length in range(len(text) + 1)})
    enough = MIN_EXPECTED * beginnings[()] / sum(drafted.values())
    table: dict[Text, list[int]] = {}
    for row, counts in enumerate((reference, drafted)):
        for text, count in counts.items():
            length = next((n for n in range(len(text), 0, -1) if beginnings[text[:n]] >= enough), 0)
            table.setdefault(text[:length], [0, 0])[row] += count
    return np.array(list(table.values())).T


def detectable_bias(tables: Sequence[np.ndarray], level: float) -> float | None:
    """The smallest bias that the test of this error rate finds with probability `POWER`; see `EqualityResult`.

    The tables (2, C) of the prompts count the base's and the drafter's texts; the base's are the truth.
    """
    if bias_power(tables, level, 1.0) < POWER:
        return None
    bias = float(optimize.brentq(lambda bias: bias_power(tables, level, bias) - POWER, 0.0, 1.0, xtol=1e-4))
    return bias * float(np.mean([1 - table[0].max() / table[0].sum() for table in tables]))


def bias_power(tables: Sequence[np.ndarray], level: float, bias: float) -> float:
    """Probability that a bias is found, by the noncentral chi-squared distribution.

    The bias is the share of all texts that are the most frequent one, besides those that should be.
    """
    freedom, noncentrality = sum(table.shape[1] - 1 for table in tables), 0.0
    if freedom == 0:
        return 0.0
    for table in tables:
        num_base, num_drafted = table.sum(axis=1)
        fair = (table[0] + 0.5) / (table[0] + 0.5).sum()  # no cell is impossible
        biased = (1 - bias) * fair
        biased[fair.argmax()] += bias
        pooled = (num_base * fair + num_drafted * biased) / (num_base + num_drafted)
        weight = num_base * num_drafted / (num_base + num_drafted)
        noncentrality += float(weight * ((biased - fair) ** 2 / pooled).sum())
    critical = stats.chi2.isf(level, freedom)
    return float(stats.ncx2.sf(critical, freedom, noncentrality) if noncentrality else level)


def _chi_squared(drafted: np.ndarray, totals: Any) -> np.ndarray:
    """Pearson's statistic (N,) of N two-row tables with these column totals (C,), from their second rows (N, C)."""
    total, num_drafted = totals.sum(), drafted.sum(axis=1, keepdims=True)
    excess = drafted - num_drafted * totals / total
    return (excess**2 / totals).sum(axis=1) * total**2 / (num_drafted * (total - num_drafted))[:, 0]


def _describe_test(test: EqualityResult, drafter: str, is_biased: bool) -> str:
    found = "another distribution than the base's" if is_biased else "no difference from the base's distribution"
    power = "it could find no bias: the base writes hardly more than one text here, so raise the temperature"
    if test.detectable is not None:
        power = (
            f"it finds with probability {POWER} a drafter that writes the base's most frequent text in place of "
            f"{100 * test.detectable:.1f} % of the texts"
        )
    return (
        f"{drafter}: {found} (chi-squared {test.chi_squared:.1f}, {test.freedom} degrees of freedom, p = "
        f"{test.p_value:.2g}). The test errs in {100 * ERROR_RATE:.0f} % of runs; {power}."
    )
