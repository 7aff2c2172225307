"""Figures of a server's answers, against those of our own decoding loop and against every single token's time."""

import random
from dataclasses import replace

import numpy as np
import pytest

from inference import drafter_specs
from inference.results import draft_figures
from inference.results.records import Answer, Turn, from_json, to_json
from inference.results.served_figures import (
    SpeculationCounts,
    count_drafts,
    first_token_seconds,
    inter_token_seconds,
    percentiles,
)
from inference.results.served_figures import draft_figures as served_draft_figures
from inference.results.served_runs import ServedRun, summarise_run
from inference.verifier.sampling import Greedy
from inference.verifier.session import Session


@pytest.fixture(scope="module")
def texts(pseudo_runner):
    """The steps of some texts, with a drafter of chains that often has no draft."""
    runner, texts = pseudo_runner(), []
    for seed in range(8):
        session = Session(runner, drafter_specs.make("anpd:order=3", runner), Greedy())
        texts.append([cost for _, cost in session.decode([seed, seed + 1, 3], 60, frozenset())])
    return texts


def test_acceptance_length_and_rates_by_position_are_those_of_the_steps_that_were_counted(texts):
    steps = [step for text in texts for step in text[1:]]
    num_tokens = sum(step.emitted for text in texts for step in text)
    drafted, accepted = sum(step.fed_candidates for step in steps), sum(step.accepted for step in steps)
    drafting = sum(step.fed_candidates > 0 for step in steps)
    assert accepted > 0 and drafting < len(steps)
    by_position = [sum(step.accepted > at for step in steps) for at in range(12)]
    own = draft_figures.count_drafts(texts)
    for counts in (
        SpeculationCounts(drafted, accepted, forwards=len(steps) + len(texts), by_position=by_position),
        SpeculationCounts(drafted, accepted, drafting, by_position=by_position),
    ):
        found = count_drafts(counts, len(texts), num_tokens)
        # At the length cap a step may end with an accepted token, without the bonus token that the formula assumes.
        num_cut = sum(text[-1].accepted == text[-1].emitted for text in texts) if counts.forwards is None else 0
        assert found.steps == own.steps - num_cut
        assert (found.emitted, found.accepted, found.drafted) == (own.emitted, own.accepted, own.drafted)
        rates = served_draft_figures(counts, found).rates
        expected = draft_figures.acceptance_rates([text[1:] for text in texts])
        if not num_cut:
            assert [rate.rate for rate in rates] == pytest.approx([rate.rate for rate in expected])
        shares = [rate.conditional_rate for rate in expected[1:]]
        assert [rate.conditional_rate for rate in rates[1:]] == pytest.approx(shares)


def test_a_counter_that_only_grows_is_the_difference_of_two_readings():
    before, after = SpeculationCounts(10, 4, 5, None, [3, 1]), SpeculationCounts(30, 9, 9, None, [6, 3])
    assert after - before == SpeculationCounts(20, 5, 4, None, [3, 2])


def test_positions_that_appear_between_two_readings_began_at_zero():
    before, after = SpeculationCounts(0, 0, 0), SpeculationCounts(30, 9, 9, by_position=[6, 3])
    assert after - before == SpeculationCounts(30, 9, 9, by_position=[6, 3])


@pytest.mark.parametrize(
    ("counts", "length"),
    [
        (SpeculationCounts(6, 2, 2, by_position=[2, 0]), 2.0),
        (SpeculationCounts(0, 0, 0), 1.0),
        (SpeculationCounts(6, 2, forwards=4), 2.0),
        (SpeculationCounts(6, 4, 0, by_position=[4]), None),
        (SpeculationCounts(6, 4, 3, by_position=[4]), None),
        (SpeculationCounts(6, 7, 7, by_position=[7]), None),
        (SpeculationCounts(-6, -7, -7), None),
        (SpeculationCounts(6, 2, forwards=1), None),
    ],
)
def test_counts_that_the_texts_cannot_have_are_left_out(counts, length):
    base = run_of("none @ 2", 4.0, [[1, 2, 3], [4, 5, 6]])
    summary = summarise_run(replace(base, counts=counts), base, "a server", "none", 2)
    assert summary.acceptance_length == length
    assert (summary.draft_tokens is None) == (length is None)


def test_latencies_are_those_of_tokens_that_come_at_an_even_pace_between_events():
    chance, turns, gaps = random.Random(0), [], []
    for _ in range(20):
        arrivals, now, times = [], 0.0, []
        for _ in range(chance.randrange(1, 9)):
            before, now, count = now, now + chance.random(), chance.randrange(1, 5)
            times += [now] * count if not arrivals else np.linspace(before, now, count + 1)[1:].tolist()
            arrivals.append((now, count))
        turns.append(Turn("", [0] * len(times), 3, [], now, arrivals=arrivals))
        gaps += np.diff(times)[arrivals[0][1] - 1 :].tolist()
    assert sorted(inter_token_seconds(turns)) == pytest.approx(sorted(gaps))
    assert first_token_seconds(turns) == [turn.arrivals[0][0] for turn in turns]
    assert percentiles(gaps) == pytest.approx((np.percentile(gaps, 50), np.percentile(gaps, 95)))
    assert percentiles([]) is None
    assert inter_token_seconds([Turn("", [1, 2], 3, [], 1.0, arrivals=[(0.5, 0), (1.0, 0)])]) == []


def run_of(name, seconds, texts, cpu_seconds=None):
    turns = [[Turn(str(ids), ids, 4, [], 0.5, arrivals=[(0.1, 1), (0.5, len(ids) - 1)])] for ids in texts]
    return ServedRun([Answer(at, "a", name, own, [False]) for at, own in enumerate(turns)], seconds, cpu_seconds, None)


def test_throughput_is_compared_with_as_many_requests_at_once_and_texts_token_by_token():
    base, own = run_of("none @ 2", 4.0, [[1, 2, 3], [4, 5]], 2.0), run_of("ctc @ 2", 2.0, [[1, 2, 3], [4, 6]], 0.5)
    summary = summarise_run(own, base, "vLLM 0", "ctc", 2)
    assert (summary.tokens_per_second, summary.wall_speedup, summary.served.cpu_speedup) == (2.5, 2.0, 4.0)
    assert (summary.identical, summary.questions, summary.first_divergence) == (1, 2, (1, 0, 1))
    assert (summary.acceptance_length, summary.speedup, summary.served.tokens_per_cpu_second) == (None, None, 10.0)
    assert summary.served.first_token == pytest.approx((0.1, 0.1))
    assert summarise_run(base, base, "vLLM 0", "none", 2).is_baseline


def test_the_times_of_events_are_read_back_from_an_answer():
    (answer,) = run_of("ctc @ 1", 1.0, [[1, 2, 3]]).answers
    assert from_json(to_json(answer)) == answer
