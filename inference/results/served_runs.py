"""All answers of a benchmark from one server, and their comparison with those of the base alone."""

from __future__ import annotations

from dataclasses import dataclass

from inference.results.metrics import Summary, first_difference, pair_answers
from inference.results.records import Answer
from inference.results.served_figures import (
    ServedFigures,
    SpeculationCounts,
    count_drafts,
    draft_figures,
    first_token_seconds,
    inter_token_seconds,
    percentiles,
)


@dataclass(frozen=True)
class ServedRun:
    """The answers to all questions of a benchmark, with a fixed number of requests at once.

    Args:
        answers: The answers; their turns have no steps.
        seconds: Wall time from the first request to the end of the last answer.
        cpu_seconds: CPU time of all processes of the server meanwhile; None if it runs elsewhere.
        counts: What the server counted of its drafts meanwhile; None if it does not say.
    """

    answers: list[Answer]
    seconds: float
    cpu_seconds: float | None
    counts: SpeculationCounts | None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(len(turn.token_ids) for answer in self.answers for turn in answer.turns)

    @property
    def tokens_per_cpu_second(self) -> float | None:
        """Tokens / CPU seconds of the server."""
        return self.num_tokens / self.cpu_seconds if self.cpu_seconds else None


def summarise_run(run: ServedRun, baseline: ServedRun, engine: str, drafter: str, concurrency: int) -> Summary:
    """Compare a run with the baseline's run on the same questions, with as many requests at once.

    The wall speed-up is the ratio of tokens per second. There is none by step times, which no server tells.

    Args:
        run: The run.
        baseline: The baseline's run.
        engine: What decoded, and its version.
        drafter: Name of the drafter, without the number of requests.
        concurrency: Number of requests at once.
    """
    turns = [turn for answer in run.answers for turn in answer.turns]
    pairs = pair_answers(run.answers, baseline.answers)
    divergences = [(answer, place) for answer, base in pairs if (place := first_difference(answer, base)) is not None]
    counts = run.counts if run.counts and run.counts.are_possible(len(turns)) else None
    drafts = count_drafts(counts, len(turns), run.num_tokens) if counts else None
    figures = draft_figures(counts, drafts) if counts and drafts else None
    speed, base_speed = run.num_tokens / run.seconds, baseline.num_tokens / baseline.seconds
    cpu_speed, base_cpu_speed = run.tokens_per_cpu_second, baseline.tokens_per_cpu_second
    steps = drafts.steps if drafts else 0
    return Summary(
        drafter=run.answers[0].drafter,
        baseline=baseline.answers[0].drafter,
        questions=len(run.answers),
        identical=len(pairs) - len(divergences),
        first_divergence=(divergences[0][0].question_id, *divergences[0][1]) if divergences else None,
        tokens=run.num_tokens,
        seconds=run.seconds,
        acceptance_length=drafts.acceptance_length if drafts else None,
        acceptance_interval=None,
        acceptance_length_with_prefill=None,
        acceptance_length_mean=None,
        acceptance_mean_interval=None,
        acceptance_length_ended=None,
        fed_per_step=drafts.fed / steps if drafts and steps else None,
        scratch_per_step=None,
        draft_forwards_per_step=None,
        draft_hit_ratio=drafts.draft_efficiency if drafts else None,
        tokens_per_second=speed,
        speedup=None,
        speedup_interval=None,
        timing_error=None,
        wall_speedup=speed / base_speed if base_speed else None,
        wall_speedup_interval=None,
        speedup_median=None,
        noise=None,
        acceptance_by_depth=[rate.rate for rate in figures.rates] if figures else [],
        phase_seconds={},
        typical_seconds=None,
        cpu_seconds=run.cpu_seconds,
        core_share=None,
        peak_bytes=None,
        by_category={},
        draft_tokens=figures,
        served=ServedFigures(
            engine=engine,
            drafter=drafter,
            concurrency=concurrency,
            tokens_per_cpu_second=cpu_speed,
            cpu_speedup=cpu_speed / base_cpu_speed if cpu_speed and base_cpu_speed else None,
            first_token=percentiles(first_token_seconds(turns)),
            inter_token=percentiles(inter_token_seconds(turns)),
        ),
    )
