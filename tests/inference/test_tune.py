"""``drafters tune``: its space, its trials, which equal decoding, and the files that it makes for drafters."""

import json
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from optuna import get_all_study_names

from inference import drafter_specs, tune
from inference.options import SearchOptions
from inference.tune import Tuner, first_trials, in_words, read_space
from inference.verifier.base import load_base
from inference.verifier.layer_skipping import read_skips
from inference.verifier.runner import Runner
from tests.conftest import full_disk, refusal
from train.cli import run_drafters as main

NUM_TOKENS = 40


@pytest.fixture(scope="module")
def folder(make_base, tmp_path_factory):
    """A base, and four questions made of its words."""
    folder, base = tmp_path_factory.mktemp("tune"), make_base(context=256, dtype=torch.float32)
    base.model.save_pretrained(folder / "base")
    base.tokenizer.save_pretrained(folder / "base")
    rng = np.random.default_rng(0)
    with (folder / "questions.jsonl").open("w") as file:
        for number in range(4):
            turns = [" ".join(f"w{word}" for word in rng.integers(3, 12, 12))]
            file.write(json.dumps({"question_id": number, "category": "words", "turns": turns}) + "\n")
    return folder


@pytest.fixture(scope="module")
def base(folder):
    return load_base(str(folder / "base"))


@pytest.fixture(scope="module")
def prompts(base, folder):
    rows = (folder / "questions.jsonl").read_text().splitlines()
    return [base.tokenizer(json.loads(row)["turns"][0]).input_ids for row in rows]


def run(folder, out, drafter, *space, objective="acceptance_length", search="grid", more=()):
    """Run the command, and return its results."""
    words = ["--base", str(folder / "base"), "--benchmark", f"mt_bench={folder / 'questions.jsonl'}"]
    words += ["--max-new-tokens", str(NUM_TOKENS), "--objective", objective, "--sampler", search, "--out", str(out)]
    main(["tune", "--drafter", drafter, *(f"--space={each}" for each in space), *words, *more])
    results = json.loads((out / "tune.json").read_text())
    results["trials"] = [each | each.pop("measured", {}) for each in results["trials"]]
    return results


def acceptance_length(base, prompts, spec):
    session = drafter_specs.make_session(spec, Runner(base))
    texts = [session.run(prompt, NUM_TOKENS, base.eos) for prompt in prompts]
    steps = [step for text in texts for step in text.steps[1:]]
    return sum(step.emitted for step in steps) / len(steps)


# ---- the space


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("order=2,4,8", {"order": [2, 4, 8]}),
        ("fade=0.5,1", {"fade": [0.5, 1]}),
        ("tree=paper,chain", {"tree": ["paper", "chain"]}),
        ("file=../runs/a..b,c=d", {"file": ["../runs/a..b", "c=d"]}),
        ("gap=-1..1", {"gap": [-1, 0, 1]}),
    ],
)
def test_the_values_of_an_option_are_listed_or_a_range(text, expected, base):
    places = first_trials(read_space([text], "anpd", base), SearchOptions([], "grid"))
    assert places == [{name: value} for name, values in expected.items() for value in values]


def test_a_range_of_real_numbers_is_searched_and_the_last_option_of_a_grid_varies_fastest(base):
    fade = read_space(["fade=0.0..0.5"], "anpd", base)["fade"]
    assert (fade.low, fade.high) == (0.0, 0.5)
    places = first_trials(read_space(["a=1,2", "b=x,y"], "anpd", base), SearchOptions([], "grid"))
    assert [tuple(place.values()) for place in places] == list(product([1, 2], "xy"))


@pytest.mark.parametrize(
    ("texts", "drafter", "said"),
    [
        *(([text], "anpd", f"{text!r} is no space") for text in ("order", "order=", "=2", "order=2,,3", "order=2,2")),
        (["order=2", "order=3"], "anpd", "is given twice"),
        (["order=2"], "anpd:update=true,order=4", "is given twice"),
        (["file=a"], "ctc=b", "is given twice"),
        (["skips"], "self_speculative=skips.json", "is given twice"),
        (["skips"], "anpd", "skips is for the drafter self_speculative"),
    ],
)
def test_a_text_that_is_no_space_or_an_option_that_is_given_twice_is_refused(texts, drafter, said, base):
    assert said in refusal(read_space, texts, drafter, base)


# ---- trials


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The folder of a finished search, and its results."""
    out = tmp_path_factory.mktemp("whole") / "new"
    return out, run(folder, out, "anpd", "order=2,3", "num_draft=1,4", objective="speedup")


@pytest.mark.slow
def test_a_trial_is_what_decoding_measures_and_the_best_is_printed(whole, folder, base, prompts, capsys):
    out, results = whole
    assert len(results["trials"]) == 4
    for trial in results["trials"]:
        spec = "anpd:order={order},num_draft={num_draft}".format(**trial["options"])
        assert trial["acceptance_length"] == acceptance_length(base, prompts, spec)
        assert trial["identical"] == 4 and trial["speedup"] > 0 < trial["tokens_per_second"]
    speedups = [trial["speedup"] for trial in results["trials"]]
    assert speedups == sorted(speedups, reverse=True)
    assert results["best"] == "anpd:order={order},num_draft={num_draft}".format(**results["trials"][0]["options"])
    assert {path.name for path in out.iterdir()} == {"study.db", "tune.json"}
    again = run(folder, out, "anpd", "order=2,3", "num_draft=1,4", objective="speedup")
    assert again == results, "nothing is measured again"
    output = capsys.readouterr().out
    assert results["best"] in output.splitlines()[-1] and "the 4 best trials by speedup" in output


@pytest.mark.parametrize(
    ("objective", "factor", "last"),
    [
        (
            "speedup",
            0.5,
            "no setting is faster than the base alone: anpd:order=2, the best, decodes at 0.5 times its speed",
        ),
        ("speedup", 1.5, "--drafter anpd:order=2"),
        ("acceptance_length", 0.5, "--drafter anpd:order=2"),  # the base alone is not measured
    ],
)
def test_a_setting_is_recommended_unless_the_base_alone_is_faster(
    objective, factor, last, folder, tmp_path, capsys, monkeypatch
):
    measure = Tuner.measure
    monkeypatch.setattr(Tuner, "measure", lambda self, params: measure(self, params) | {"speedup": factor})
    run(folder, tmp_path, "anpd", "order=2", objective=objective, more=["--limit", "1"])
    assert capsys.readouterr().out.splitlines()[-1] == last


@pytest.mark.slow
def test_an_interrupted_search_continues_and_a_larger_grid_measures_only_what_is_new(folder, tmp_path, monkeypatch):
    measured, measure = [], Tuner.measure

    def interrupted(self, params):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(params)
        return measure(self, params)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Tuner, "measure", interrupted)
        run(folder, tmp_path, "anpd", "order=2,3,4")
    assert [params["order"] for params in measured] == [2, 3]
    monkeypatch.setattr(Tuner, "measure", lambda self, params: measured.append(params) or measure(self, params))
    assert len(run(folder, tmp_path, "anpd", "order=2,3,4")["trials"]) == 3
    assert len(run(folder, tmp_path, "anpd", "order=4,5")["trials"]) == 2
    assert [params["order"] for params in measured] == [2, 3, 4, 5]
    run(folder, tmp_path, "anpd", "order=5", objective="speedup")
    run(folder, tmp_path, "anpd", "order=5", more=["--limit", "2"])
    assert [params["order"] for params in measured[4:]] == [5, 5], "other questions, and a speed-up, are measured anew"


@pytest.mark.slow
@pytest.mark.parametrize("search", ["gp", "tpe"])
def test_every_search_ends_after_its_trials_and_repeats_with_its_seed(search, folder, tmp_path):
    found = [
        run(folder, tmp_path / name, "anpd", "order=2..4", "num_draft=1..5", search=search, more=["--trials", "6"])
        for name in "ab"
    ]
    options = [[trial["options"] for trial in each["trials"]] for each in found]
    assert options[0] == options[1] and 1 < len(options[0]) <= 6


@pytest.mark.slow
def test_an_impossible_combination_is_left_out_and_a_wrong_option_refused(folder, tmp_path, capsys):
    results = run(folder, tmp_path / "a", "self_draft", "branch_len=2,6", "gram=4")
    assert [trial["options"] for trial in results["trials"] if "error" in trial] == [{"branch_len": 2, "gram": 4}]
    assert "left out: branch_len 2, gram 4: branch_len must be" in capsys.readouterr().out
    for space, message in (("branchlen=4,6", "takes branch_len"), ("gram=x", "gram must be int, not 'x'")):
        with pytest.raises(SystemExit):
            run(folder, tmp_path / "b", "self_draft", space)
        assert message in capsys.readouterr().err
    assert not (tmp_path / "b" / "tune.json").exists()


@pytest.mark.slow
def test_a_full_disk_ends_a_search_in_one_line_and_loses_no_trial(folder, tmp_path, capsys):
    done = run(folder, tmp_path / "out", "anpd", "order=2,3")
    with full_disk(3000), pytest.raises(SystemExit) as ended:
        run(folder, tmp_path / "out", "anpd", "order=2,3,4")
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and "the trials in it are kept: make room" in error
    assert run(folder, tmp_path / "out", "anpd", "order=2,3") == done


def test_without_optuna_the_command_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(tune, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["tune", "--base", "nowhere", "--drafter", "anpd", "--space", "order=2", "--out", "o"])
    assert "pip install 'ctc-drafters[tune]'" in capsys.readouterr().err


# ---- skipped sublayers


@pytest.mark.slow
def test_all_sets_of_skipped_sublayers_are_tried_and_the_best_is_written(folder, base, prompts, tmp_path):
    drafter = "self_speculative:num_draft=2,threshold=0,adaptive=false"
    results = run(folder, tmp_path / "all", drafter, "skips", more=["--trials", "16"])
    assert len(results["trials"]) == 2**4
    best = results["trials"][0]
    assert best["acceptance_length"] == max(trial["acceptance_length"] for trial in results["trials"])
    assert results["best"] == drafter.replace(":", f"={tmp_path}/all/skips.json:", 1)
    attention, mlp = read_skips(tmp_path / "all" / "skips.json", 2)
    skipped = {f"attention {layer}" for layer in attention} | {f"mlp {layer}" for layer in mlp}
    assert skipped == {name for name, value in best["options"].items() if value}
    assert acceptance_length(base, prompts, results["best"]) == best["acceptance_length"]
    searched = run(folder, tmp_path / "gp", drafter, "skips", search="gp", more=["--trials", "8"])
    everything = {json.dumps(trial["options"]): trial["acceptance_length"] for trial in results["trials"]}
    assert all(everything[json.dumps(t["options"])] == t["acceptance_length"] for t in searched["trials"])


@pytest.mark.slow
def test_the_gaussian_process_finds_the_best_of_64_sets_of_sublayers_in_12_trials(make_base, tmp_path):
    """The objective is a sum over the skipped sublayers; with this seed, random sets and TPE miss its maximum."""
    space = read_space(["skips"], "self_speculative", make_base(layers=3))
    gains = dict(zip(space, (3, -1, 2, -4, 1.5, -2), strict=True))
    tuner = SimpleNamespace(
        drafter="self_speculative",
        settings={},
        key=lambda params: json.dumps(sorted(params.items())),
        measure=lambda params: {"acceptance_length": sum(gains[name] for name, skipped in params.items() if skipped)},
    )
    search = SearchOptions(["skips"], "gp", trials=12, objective="acceptance_length", search_seed=1)
    best, *_ = tune.run(tmp_path / "study.db", space, tuner, search)
    assert best["options"] == {name: gain > 0 for name, gain in gains.items()}


def test_what_was_measured_in_another_way_is_measured_again(folder, tmp_path):
    for forward in ("eager", "packed"):
        run(folder, tmp_path, "anpd", "num_draft=2", more=["--forward", forward])
    assert len(get_all_study_names(f"sqlite:///{tmp_path}/study.db")) == 2


class Counted:
    """Stands in for a `Tuner` whose drafter has a file; the measurement is the value of the option."""

    drafter, settings = "anpd", {}

    def __init__(self):
        self.version, self.measured = 1, []

    def key(self, params):
        return json.dumps([self.version, *sorted(params.items())])

    def measure(self, params):
        self.measured.append(params["order"])
        return {"acceptance_length": params["order"] * self.version}


def test_after_a_drafter_was_trained_again_nothing_old_is_reported(tmp_path):
    tuner, search = Counted(), SearchOptions(["order=2,3"], "grid", objective="acceptance_length")
    for version in (1, -1):
        tuner.version = version
        trials = tune.run(tmp_path / "study.db", read_space(["order=2,3"], "anpd", None), tuner, search)
        assert [trial["measured"]["acceptance_length"] for trial in trials] == sorted([2 * version, 3 * version])[::-1]
    assert tuner.measured == [2, 3, 2, 3]


def test_a_random_search_that_goes_on_tries_other_options(tmp_path):
    tuner, space = Counted(), read_space(["order=2..100000"], "anpd", None)
    for trials in (4, 8):
        search = SearchOptions(["order=2..100000"], "random", trials=trials, objective="acceptance_length")
        tune.run(tmp_path / "study.db", space, tuner, search)
    assert len(tuner.measured) == len(set(tuner.measured)) == 8


@pytest.mark.parametrize("in_space", [False, True])
def test_what_was_measured_with_another_file_of_an_option_is_measured_again(in_space, tmp_path):
    file = tmp_path / "static.json"
    drafter, params = ("medusa", {"static": str(file)}) if in_space else (f"medusa:static={file}", {})
    tuner = Tuner(*[None] * 5, drafter, "speedup", tmp_path, {})
    keys = {tuner.key(params) for text in ("[[0]]", "[[0]]", "[[0], [1]]") if file.write_text(text)}
    assert len(keys) == 2


def test_a_search_of_skips_begins_with_no_sublayer_and_with_the_default(make_base):
    space = read_space(["skips"], "self_speculative", make_base(layers=3))
    nothing, default = first_trials(space, SearchOptions([], "gp"))
    assert not any(nothing.values()) and len(nothing) == 6
    assert [name for name, value in default.items() if value] == ["attention 1", "mlp 1"]
    assert in_words(default | {"num_draft": 3}) == "num_draft 3, attention 1, mlp 1"
