"""``drafters verify``: check that drafters change neither the base's tokens nor, in sampling, their distribution."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from rich.table import Table
from rich.text import Text

from data.files import SafeConsole
from drafters.protocol import NoDrafter
from inference import drafter_specs
from inference.equality import (
    ERROR_RATE,
    POWER,
    REFERENCE_FACTOR,
    EqualityResult,
    compare_distributions,
    sample_base,
    sample_drafted,
)
from inference.evaluation.question_options import QuestionOptions
from inference.progress import progress_bars
from inference.verifier.base import Base
from inference.verifier.compiled import make_runner
from inference.verifier.options import ModelOptions, SamplingOptions
from inference.verifier.sampling import Greedy, Sampler
from inference.verifier.session import Session, check_prompt

MAX_SHOWN_DIVERGENCES = 3  # of each drafter
MAX_TESTED_PROMPTS = 4  # in the test of the distribution


@dataclass(frozen=True)
class PromptOptions(QuestionOptions):
    """The prompts that are decoded: the first turns of a benchmark's questions."""

    limit: int | None = 20


@dataclass(frozen=True)
class Divergence:
    """The first difference between two answers to the same prompt.

    Args:
        prompt: Index of the prompt.
        position: Position of the first token that differs, in the answer.
        base_token: The token that the base writes there alone.
        drafted_token: The token that was written with the drafter.
        logit_gap: The base's logit of its own token minus that of the other.
    """

    prompt: int
    position: int
    base_token: int
    drafted_token: int
    logit_gap: float


@dataclass(frozen=True)
class Comparison:
    """What decoding some prompts with a drafter gave, compared with the base alone.

    Args:
        num_identical: Number of prompts with identical answers.
        acceptance_length: Acceptance length over all prompts.
        divergences: The first difference of each other prompt.
    """

    num_identical: int
    acceptance_length: float
    divergences: list[Divergence]


def generate_reference(base: Base, prompt: list[int], max_new_tokens: int, sampler: Sampler) -> list[int]:
    """Return the tokens that the base writes without a drafter.

    Greedy tokens come from transformers' own `generate`, which shares no code with this project's engine; sampled ones
    from the engine, as only its draws depend on nothing but the seed and the position.

    Args:
        base: The base.
        prompt: Token ids of the prompt.
        max_new_tokens: Maximum number of tokens to write.
        sampler: How the next token is chosen.

    Raises:
        ValueError: The prompt is empty or too long, or `max_new_tokens` is less than 1.
    """
    check_prompt(base, prompt, max_new_tokens)
    if not isinstance(sampler, Greedy):
        return Session(make_runner(base), NoDrafter(), sampler).run(prompt, max_new_tokens, base.eos).tokens
    ids = torch.tensor([prompt], device=base.model.device)
    num_tokens = min(max_new_tokens, base.context_length - len(prompt))
    return base.greedy(ids, torch.ones_like(ids), num_tokens)[0].tolist()


@torch.inference_mode()
def first_divergence(base: Base, index: int, prompt: list[int], expected: list[int], got: list[int]) -> Divergence:
    """Describe the first difference of two answers, with the logits of one plain forward over their common beginning.

    Args:
        base: The base.
        index: Index of the prompt.
        prompt: Token ids of the prompt.
        expected: The tokens that the base writes alone.
        got: The tokens that were written with a drafter; they differ somewhere.
    """
    pairs = zip([*expected, -1], [*got, -1], strict=False)
    position = next(i for i, (own, drafted) in enumerate(pairs) if own != drafted)
    ids = torch.tensor([[*prompt, *expected[:position]]], device=base.model.device)
    logits = base.model(ids).logits[0, -1].float()
    own, drafted = (text[position] if position < len(text) else min(base.eos, default=0) for text in (expected, got))
    return Divergence(index, position, own, drafted, (logits[own] - logits[drafted]).item())


def compare(
    session: Session, prompts: Sequence[list[int]], expected: Sequence[list[int]], max_new_tokens: int
) -> Comparison:
    """Decode every prompt with a drafter and compare the tokens with those of the base alone.

    Args:
        session: Decodes with the drafter.
        prompts: Token ids of N prompts.
        expected: The tokens that the base writes alone, for each of the N prompts.
        max_new_tokens: Maximum number of tokens of an answer.
    """
    base = session.runner.base
    num_tokens = num_steps = 0
    divergences = []
    for index, (prompt, wanted) in enumerate(zip(prompts, expected, strict=True)):
        result = session.run(prompt, max_new_tokens, base.eos)
        num_tokens += sum(step.emitted for step in result.steps[1:])  # the first step is the prefill
        num_steps += len(result.steps) - 1
        if result.tokens != wanted:
            divergences.append(first_divergence(base, index, prompt, wanted, result.tokens))
    return Comparison(len(prompts) - len(divergences), num_tokens / max(1, num_steps), divergences)


@dataclass(frozen=True)
class DistributionOptions:
    """The test of the distribution of sampled texts.

    Args:
        texts: Number of texts of each drafter, each with a seed of its own, for a test of their distribution with a
            --temperature above 0; 0 leaves it out. More texts find smaller differences.
        text_tokens: Number of tokens of such a text.
    """

    texts: int = 400
    text_tokens: int = 4


def verify(
    model: ModelOptions,
    selection: PromptOptions,
    sampling: SamplingOptions,
    distribution: DistributionOptions,
    drafter: list[str],
) -> None:
    """Decode prompts with and without each drafter, and compare the answers token by token.

    Greedy answers are compared with transformers' own generate, sampled ones with this project's decoding without a
    drafter under the same seed. The exit code is 1 if a float32 answer differs. In bfloat16, tokens with almost equal
    logits may be exchanged; the logit gap shows how close they were.

    With a temperature, a two-sample test also compares the distribution of short texts with that of the base alone, on
    at most four of the prompts, and says how small a bias it would have found. It alone decides about drafters that
    sample their drafts, because these write other texts under the same seed. The exit code is 1 if it finds a
    difference, which happens by chance in 1 % of runs.

    Args:
        drafter: NAME[=FILE][:key=value,...], such as joint, anpd:order=4 or ctc=FOLDER; an unknown name lists all of
            them. May be repeated.
    """
    if min(distribution.texts, distribution.text_tokens - 1) < 0:
        raise ValueError("texts must be at least 0, and text_tokens at least 1")
    questions = selection.load()
    base = model.load(may_compile=True)
    sampler = sampling.sampler()
    selected = selection.select(base, questions)
    prompts, max_new_tokens = selected.prompts, selection.max_new_tokens
    runner = make_runner(base, model.compile)
    sessions = {spec: drafter_specs.make_session(spec, runner, sampler) for spec in drafter}
    expected = [generate_reference(base, prompt, max_new_tokens, sampler) for prompt in prompts]
    console = SafeConsole()
    decoding = f"temperature {sampling.temperature}, seed {sampling.seed}" if sampling.temperature > 0 else "greedy"
    console.print(f"{model.base} · {model.dtype} · {decoding} · {len(prompts)} prompts", markup=False)
    for line in selected.notes():
        console.print(f"left out: {line}", markup=False, highlight=False)
    tests: dict[str, EqualityResult] = {}
    with progress_bars(transient=True) as bars:
        comparisons = {
            spec: compare(session, prompts, expected, max_new_tokens)
            for spec, session in bars.track(sessions.items(), description="verify")
        }
        if sampling.temperature > 0 and distribution.texts:
            tested = prompts[:MAX_TESTED_PROMPTS]
            requests = [*_requests(base, tested, distribution, sampling)]
            references = [
                sample_base(base, prompt, num_tokens, options, REFERENCE_FACTOR * num_texts)
                for prompt, num_tokens, options, num_texts in requests
            ]
            for spec, session in bars.track(sessions.items(), description="distribution"):
                drafted = [sample_drafted(session, *each) for each in requests]
                tests[spec] = compare_distributions(references, drafted, ERROR_RATE / len(sessions))
    console.print(_table(comparisons, tests, len(prompts)))
    is_different = False
    for spec, comparison in comparisons.items():
        name = drafter_specs.label(spec)
        if sampling.temperature > 0 and sessions[spec].drafter.samples_drafts:
            untested = "" if spec in tests else ", and its distribution was not tested (--texts 0)"
            said = f"{name} samples its drafts: its texts are others under the same seed{untested}."
            console.print(said, markup=False)
            continue
        is_different |= bool(comparison.divergences)
        for divergence in comparison.divergences[:MAX_SHOWN_DIVERGENCES]:
            console.print(_describe(divergence, name, base), style="red", markup=False)
    biased = [spec for spec, test in tests.items() if test.p_value <= ERROR_RATE / len(tests)]
    for spec, test in tests.items():
        style = "red" if spec in biased else ""
        console.print(_describe_test(test, drafter_specs.label(spec), spec in biased), style=style, markup=False)
    if not is_different and not biased:
        lost = "every answer is the base's own, token for token"
        if sampling.temperature > 0 and any(each.drafter.samples_drafts for each in sessions.values()):
            lost = "no difference from the base was found" if tests else "where it was compared"
        console.print(f"Nothing is lost: {lost}.", style="green")
    elif biased or model.dtype == "float32":
        sys.exit(1)


def _requests(
    base: Base, prompts: Sequence[list[int]], distribution: DistributionOptions, sampling: SamplingOptions
) -> Iterator[tuple[list[int], int, SamplingOptions, int]]:
    """The arguments that sample the texts after each prompt; each gets seeds that no other prompt has."""
    num_texts = -(-distribution.texts // len(prompts))
    for index, prompt in enumerate(prompts):
        num_tokens = min(distribution.text_tokens, base.context_length - len(prompt))
        yield prompt, num_tokens, replace(sampling, seed=sampling.seed + index * num_texts), num_texts


def _table(comparisons: dict[str, Comparison], tests: dict[str, EqualityResult], num_prompts: int) -> Table:
    table = Table()
    for column in ("drafter", "identical answers", "acceptance length", *(["p-value"] if tests else [])):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for spec, comparison in comparisons.items():
        colour = "red" if comparison.divergences else "green"
        identical = Text(f"{comparison.num_identical}/{num_prompts}", style=colour)
        p_value = [f"{tests[spec].p_value:.2g}"] if tests else []
        table.add_row(drafter_specs.label(spec), identical, f"{comparison.acceptance_length:.2f}", *p_value)
    return table


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


def _describe(divergence: Divergence, drafter: str, base: Base) -> str:
    own, drafted = (repr(base.tokenizer.decode([token])) for token in (divergence.base_token, divergence.drafted_token))
    return (
        f"{drafter}: prompt {divergence.prompt} differs from token {divergence.position} on: the base writes {own}, "
        f"with the drafter {drafted}; logit gap {divergence.logit_gap:.3g}"
    )
