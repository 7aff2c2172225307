"""The files of an evaluation's results."""

from inference.evaluation.conclusion import Outcome, write_results
from inference.results import records
from inference.results.records import Answer, Turn
from inference.results.served_runs import ServedRun, summarise_run


def outcome_of(drafters):
    """An evaluation in a server that wrote one answer with each drafter; the first is the baseline."""
    runs = {
        drafter: ServedRun([Answer(1, "a", drafter, [Turn("x", [5, 6], 3, [], 1.0)], [False])], 1.0, None, None)
        for drafter in drafters
    }
    summaries = {name: summarise_run(run, runs[drafters[0]], "a server", name, 1) for name, run in runs.items()}
    answers = {name: run.answers for name, run in runs.items()}
    return Outcome({"template": "plain"}, {}, {"mt_bench": summaries}, {"mt_bench": answers}, [], [])


def decode(tokens, **options):
    return "x"


def test_drafters_whose_names_are_alike_have_files_of_their_own(tmp_path):
    drafters = ["a b", "a_b", "a:b"]
    write_results(tmp_path, outcome_of(drafters), decode)
    files = (tmp_path / "answers" / "mt_bench").iterdir()
    assert sorted(records.read(file)[0].drafter for file in files) == sorted(drafters)


def test_plots_of_an_earlier_evaluation_are_gone(tmp_path):
    stale = tmp_path / "plots" / "gsm8k-speedup.png"
    stale.parent.mkdir()
    stale.touch()
    write_results(tmp_path, outcome_of(["none", "ctc"]), decode)
    assert [path.name for path in stale.parent.iterdir()] == ["mt_bench-concurrency.png"]
