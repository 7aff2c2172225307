"""The numbers of evaluations as CSV, Parquet and LaTeX, and in the loggers of Lightning."""

import csv
import json
import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest
from matplotlib import image

from inference.reporting import exports, loggers, plots, report
from inference.results import records
from inference.results.draft_figures import GroupAcceptance
from inference.results.metrics import Summary, summarise
from inference.results.reasoning_figures import ReasoningFigures
from inference.results.records import Answer, Turn
from inference.verifier.session import StepCost

CONTEXT = {"base": "my_base", "dtype": "float32", "decoding": "greedy", "device": "cpu", "template": "tokenizer"}


def answer(drafter, question_id, emitted):
    costs = [StepCost(n, n - 1, 1, 4 * (drafter != "none"), 0, 0, (0.0, 0.1, 0.0, 0.0, 0.0)) for n in [1, *emitted]]
    turn = Turn("", [3] * (1 + sum(emitted)), 5, costs, 0.1 * len(costs))
    return Answer(question_id, f"kind {question_id % 2}", drafter, [turn], [True])


def write(folder, emitted):
    """Write an evaluation of twelve questions as `drafters eval` does."""
    answers = {
        name: [answer(name, at, steps) for at in range(12)] for name, steps in (("none", [1] * 9), ("ctc_1", emitted))
    }
    summaries = {"mt_bench": {name: summarise(own, answers["none"]) for name, own in answers.items()}}
    for name, own in answers.items():
        records.write(folder / "answers" / "mt_bench" / f"{name}.jsonl", own)
    report.write_results(folder, summaries, CONTEXT)
    return summaries


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    return old, new, write(old, [3, 3, 3]), write(new, [3, 3, 2, 1])


def test_every_format_has_the_same_numbers(folders, tmp_path, monkeypatch):
    from pyarrow import parquet

    monkeypatch.setattr(plots, "applicable", lambda summaries: [])  # to draw them takes longest
    report.report([str(folders[0])], out=str(tmp_path), format=["csv", "parquet", "latex"])
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    table = parquet.read_table(tmp_path / "results.parquet").to_pylist()
    assert [(row["drafter"], row["category"]) for row in table] == [
        (name, category) for name in ("none", "ctc_1") for category in (None, "kind 0", "kind 1")
    ]
    summary: Summary = folders[2]["mt_bench"]["ctc_1"]
    for row in (rows[3], table[3]):
        assert float(row["acceptance_length"]) == summary.acceptance_length == 3
        assert float(row["speedup_interval_low"]) == summary.speedup_interval[0]
        assert float(row["wasted_per_token"]) == summary.draft_tokens.wasted_per_token
        assert float(row["acceptance_rate_2"]) == 1
        assert (row["base"], row["benchmark"], int(row["identical"])) == ("my_base", "mt_bench", 12)
    latex = (tmp_path / "results.tex").read_text()
    assert latex.count(r"\toprule") == 1 and r"ctc\_1 & \textbf{3.00}" in latex and r"$\times$" in latex


def test_flat_figures_have_every_rate_and_interval_by_position_length_and_part():
    tokens = [[3, 3, 2], [1, 2, 4], [2, 2, 3]]
    base = [answer("none", at, [1] * 7) for at in range(3)]
    own = [answer("ctc", at, steps) for at, steps in enumerate(tokens)]
    summary = replace(summarise(own, base), reasoning=ReasoningFigures(2, *(GroupAcceptance(4, 2.5, (2.0, 3.0)),) * 2))
    found = exports.flat_figures(asdict(summary))
    for position, rate in enumerate(summary.draft_tokens.rates, 1):
        for name, value, bounds in (
            ("acceptance_rate", rate.rate, rate.interval),
            ("conditional_rate", rate.conditional_rate, rate.conditional_interval),
        ):
            names = [f"{name}_{position}{end}" for end in ("", "_low", "_high")]
            assert [found[each] for each in names] == [value, *bounds]
    assert position == 3 and found["acceptance_length_answer_low"] == 2 and found["steps_reasoning"] == 4
    (length,), (seconds,) = summary.lengths.by_position, summary.length_seconds.by_position
    assert found["acceptance_length_at_0"] == length.acceptance_length == 22 / 9 and found["steps_prompt_0"] == 9
    assert found["acceptance_length_at_0_high"] == length.acceptance_interval[1] > length.acceptance_length
    assert found["step_seconds_at_0"] == seconds == pytest.approx(0.1) == found["prefill_seconds_prompt_0"]
    assert found["forward_seconds"] == pytest.approx(0.9) and found["first_divergence_token"] == 8
    values = [value for value in found.values() if value is not None]
    assert all(isinstance(value, (int, float, str)) for value in values)


def test_latex_shows_the_intervals():
    emitted = [[3, 3, 3], [2, 2, 2], [4, 4], [1, 5]]
    base = [answer("none", at, [1] * 9) for at in range(4)]
    summary = summarise([answer("ctc", at, steps) for at, steps in enumerate(emitted)], base)
    latex = exports.latex_tables({"mt_bench": {"ctc": summary}})
    for value, (low, high) in (
        (f"{summary.acceptance_length:.2f}", summary.acceptance_interval),
        (rf"{summary.speedup:.2f}$\times$", summary.speedup_interval),
    ):
        assert rf"\textbf{{{value}}} {{\scriptsize ({low:.2f} -- {high:.2f})}}" in latex


def test_latex_and_csv_hold_hostile_names_as_text(tmp_path):
    row = exports.Row(["a_b\n50% \\input{x} $y$ #~^&\x1b", "1.0"], best={0})
    latex = exports.latex_table(["name", "value"], [row])
    escaped = r"\textbf{a\_b 50\% \textbackslash{}input\{x\} \$y\$ \#\textasciitilde{}\textasciicircum{}\&␛} & 1.0 \\"
    assert escaped in latex.splitlines()
    exports.export(tmp_path, "t", ["csv", "csv"], [{"name": 'a,"b\x1b', "value": None}], latex)
    assert (tmp_path / "t.csv").read_text().splitlines() == ['"name","value"', '"a,""b␛",']


def test_two_evaluations_are_compared_and_a_regression_ends_with_exit_code_1(folders, tmp_path, capsys):
    old, new = map(str, folders[:2])
    with pytest.raises(SystemExit) as caught:
        report.report([old, new], out=str(tmp_path), compare=True, format=["csv", "latex"])
    assert caught.value.code == 1
    content = json.loads((tmp_path / "comparison.json").read_text())
    length = content["differences"][0]
    assert (length["figure"], length["before"], length["after"], length["verdict"]) == (
        *("acceptance length", 3.0, 2.25, "regression"),
    )
    assert length["change"] == pytest.approx(-0.25) and length["change_high"] < 0
    assert (
        "| mt_bench | ctc_1 | acceptance length | 12 | 3.00 | 2.25 | -25.0 % |"
        in (tmp_path / "comparison.md").read_text()
    )
    assert (tmp_path / "comparison.csv").is_file() and "regression" in (tmp_path / "comparison.tex").read_text()
    report.report([new, new + "/."], compare=True)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "-25.0 %" in printed and "regression" in printed and "none found" in printed


def test_a_comparison_that_lacks_a_drafter_or_a_benchmark_of_the_first_folder_ends_with_exit_code_1(
    folders, tmp_path, capsys
):
    old = shutil.copytree(folders[0], tmp_path / "old")
    content = json.loads((old / "results.json").read_text())
    (of,) = content["results"].values()
    content["results"] = {"mt_bench": {**of, "eagle": of["ctc_1"] | {"drafter": "eagle"}}, "gsm8k": of}
    (old / "results.json").write_text(json.dumps(content))
    new = str(folders[0])
    with pytest.raises(SystemExit) as caught:
        report.report([str(old), new], out=str(tmp_path / "out"), compare=True)
    assert caught.value.code == 1
    told = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert told["only_before"] == ["the benchmark gsm8k", "mt_bench: the drafter eagle"] and told["only_after"] == []
    assert "regression" not in {each["verdict"] for each in told["differences"]}
    printed = " ".join(capsys.readouterr().out.split())
    assert "the benchmark gsm8k." in printed and "was not compared, so the exit code is 1" in printed
    assert f"{folders[0].name}: mt_bench: the drafter eagle\n" in (tmp_path / "out" / "comparison.md").read_text()
    report.report([new, str(old)], compare=True)
    assert "Only in" in capsys.readouterr().out, "what is new is no regression"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"folders": ["a"], "compare": True}, "--compare takes two folders"),
        ({"folders": ["a", "b"], "compare": True, "format": ["csv"]}, "give --out FOLDER"),
        ({"answers": ["a"], "baseline": "b", "format": ["csv"]}, "--format is for folders"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        report.report(**arguments)


@pytest.fixture
def image_folder(tmp_path):
    folder = tmp_path / "plots"
    folder.mkdir()
    image.imsave(folder / "speed.png", np.zeros((2, 3, 3)))
    return folder


def test_the_numbers_are_logged_to_csv_and_tensorboard(folders, tmp_path, image_folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summaries = {"mt_bench:x": {"ctc=a/b": replace(folders[2]["mt_bench"]["ctc_1"], quality={"BLEU": 12.5})}}
    for name in ("csv", "tensorboard"):
        loggers.log_evaluation(loggers.make_logger(name, tmp_path / name), summaries, CONTEXT, image_folder)
    with (tmp_path / "csv" / "logs" / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (
        float(row["mt_bench_x/ctc_a_b/acceptance_length"]) == 3
        and float(row["mt_bench_x/ctc_a_b/quality BLEU"]) == 12.5
        and float(row["mt_bench_x/ctc_a_b/acceptance_rate_2"]) == 1
    )
    events = EventAccumulator(str(tmp_path / "tensorboard" / "logs"))
    events.Reload()
    assert events.Scalars("mt_bench_x/ctc_a_b/acceptance_length")[0].value == 3
    assert (events.Images("plots/speed")[0].height, events.Images("plots/speed")[0].width) == (2, 3)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_without_its_package_is_refused_in_one_line(name, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(loggers, "find_spec", lambda module: None if module in ("wandb", "sqlalchemy") else True)
    with pytest.raises(ValueError, match=f"^--logger {name} needs the package {name}: pip install {name}$"):
        loggers.check_logger(name)
    loggers.check_logger("tensorboard")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:1")  # a server needs no database here
    loggers.check_logger("mlflow")


@pytest.mark.filterwarnings("ignore")  # of MLflow about the packages that it uses
def test_mlflow_gets_the_figures_the_plots_and_what_was_run(folders, tmp_path, image_folder, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logger = loggers.make_logger("mlflow", tmp_path)
    loggers.log_evaluation(logger, folders[2], CONTEXT, image_folder)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("drafters").experiment_id])
    assert run.data.metrics["mt_bench/ctc_1/acceptance_length"] == 3
    assert (run.data.params["base"], run.info.run_name, run.info.status) == ("my_base", tmp_path.name, "FINISHED")
    assert [path.name for path in (tmp_path / "mlruns").rglob("*.png")] == ["speed.png"]


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_gets_the_figures_the_plots_and_what_was_run(folders, tmp_path, image_folder, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = loggers.make_logger("wandb", tmp_path)
    run, logged = logger.experiment, {}
    finish = run.finish
    monkeypatch.setattr(run, "finish", lambda: (logged.update(run.summary), logged.update(run.config), finish()))
    loggers.log_evaluation(logger, folders[2], CONTEXT, image_folder)
    assert logged["mt_bench/ctc_1/acceptance_length"] == 3 and logged["base"] == "my_base"
    assert wandb.run is None  # the run has ended
    assert len([*(tmp_path / "wandb").glob("offline-run-*/files/media/images/plots/*.png")]) == 1
