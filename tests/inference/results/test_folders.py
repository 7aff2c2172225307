"""Merging evaluations whose drafters have one name."""

from inference.reporting.headline import headline
from inference.results.folders import EvaluationResults, merge
from inference.results.records import Answer, Turn
from inference.results.served_figures import served_name
from inference.results.served_runs import ServedRun, summarise_run


def evaluated(folder, seconds, weights, base="none"):
    """An evaluation in a server: the seconds of a drafter by number of requests at once, and 4 of the base."""
    runs = {
        (drafter, level): ServedRun(
            [Answer(1, "a", served_name(drafter, level), [Turn("x", [5, 6], 3, [], 1.0)], [False])], own, None, None
        )
        for level, taken in seconds.items()
        for drafter, own in ((base, 4.0), ("ctc", taken))
    }
    summaries = {
        served_name(drafter, level): summarise_run(run, runs[base, level], "vLLM 0", drafter, level)
        for (drafter, level), run in runs.items()
    }
    answers = {served_name(*key): run.answers for key, run in runs.items()}
    command = f"drafters eval --drafter ctc={weights}"
    return EvaluationResults(folder, {folder: {"command": command}}, {"mt_bench": summaries}, {"mt_bench": answers})


def test_drafters_of_a_server_with_one_name_but_other_weights_stay_two():
    merged = merge([evaluated("a", {1: 4.0, 2: 4.0}, "old"), evaluated("b", {2: 1.0, 8: 1.0}, "new")])
    found = merged.summaries["mt_bench"]
    speeds = {(s.served.drafter, s.served.concurrency): s.wall_speedup for s in found.values() if not s.is_baseline}
    assert speeds == {("ctc=old", 1): 1, ("ctc=old", 2): 1, ("ctc=new", 2): 4, ("ctc=new", 8): 4}
    assert list(found) == [summary.drafter for summary in found.values()] == list(merged.answers["mt_bench"])
    assert all(summary.baseline in found for summary in found.values())
    sentence = headline(merged.summaries)
    expected = "the base, at 4.00x and 4.00x its tokens per second with 2 and 8 requests at once"
    assert f"ctc=new writes the same text as {expected}" in sentence


def test_drafters_of_a_server_with_the_same_weights_are_distinguished_by_the_folder_of_their_results():
    merged = merge([evaluated("a", {1: 4.0}, "old"), evaluated("b", {1: 2.0, 8: 1.0}, "old")]).summaries["mt_bench"]
    drafters = {name: summary.served.drafter for name, summary in merged.items()}
    assert drafters == {
        **{"none @ 1": "none", "ctc @ 1": "ctc", "none @ 1 (b)": "none (b)", "none @ 8 (b)": "none (b)"},
        **{"ctc @ 1 (b)": "ctc (b)", "ctc @ 8 (b)": "ctc (b)"},
    }


def test_the_headline_names_a_baseline_without_the_number_of_requests_at_once():
    results = evaluated("a", {1: 4.0, 2: 2.0}, "old", base="vanilla")
    assert "ctc writes the same text as vanilla, at 1.00x and 2.00x" in headline(results.summaries)
