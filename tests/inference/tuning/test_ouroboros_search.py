"""The search of Ouroboros' hyper-parameters: its order, its result on known landscapes, and its file of trials."""

import json
import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from data import embedded
from data.benchmarks import Question
from inference import drafter_specs
from inference.evaluation.question_options import QuestionOptions
from inference.results.records import Turn
from inference.tuning import ouroboros_search as module
from inference.tuning.ouroboros_search import (
    LEVEL,
    NUM_DRAFT,
    WINDOW,
    OuroborosOptions,
    Setting,
    ouroboros_search,
    search,
)
from inference.tuning.trials import Trial, TrialFile
from inference.verifier.base import load_base
from inference.verifier.options import ModelOptions
from inference.verifier.session import StepCost

TRIAL = Trial(tokens=20, seconds=4.0, base_forwards=8, draft_forwards=30, steps=6, gained=15, step_drafts=24)


def algorithm_1(time, gammas, windows, betas, window, beta):
    """The paper's Algorithm 1 line by line; returns the settings in the order they are timed, and the result."""
    timed = []

    def clock_time(setting):
        timed.append(setting)
        return time(setting)

    gamma_0 = min(gammas, key=lambda gamma: clock_time((gamma, window, beta)))
    window_0 = min(windows, key=lambda window: clock_time((gamma_0, window, beta)))
    beta_0 = min(betas, key=lambda beta: clock_time((gamma_0, window_0, beta)))
    return timed, (gamma_0, window_0, beta_0)


@pytest.mark.parametrize("homogeneity", ["high", "low"])
@pytest.mark.parametrize("seed", range(20))
def test_settings_are_timed_in_the_order_of_the_paper(homogeneity, seed):
    rng = random.Random(seed)
    start = Setting(3, rng.choice(WINDOW), rng.choice(LEVEL))
    landscape = {place: rng.random() for place in product(NUM_DRAFT[homogeneity], WINDOW, LEVEL)}
    timed = []

    def time(setting):
        timed.append((setting.num_draft, setting.window, setting.level))
        return landscape[timed[-1]]

    best = search(time, {"num_draft": NUM_DRAFT[homogeneity], "window": WINDOW, "level": LEVEL}, start)
    expected = algorithm_1(landscape.get, NUM_DRAFT[homogeneity], WINDOW, LEVEL, start.window, start.level)
    assert (timed, (best.num_draft, best.window, best.level)) == expected
    assert len(set(timed)) == {"high": 15, "low": 12}[homogeneity]


@pytest.mark.parametrize("seed", range(20))
def test_if_the_parameters_are_independent_the_search_finds_the_best_of_the_complete_grid(seed):
    rng = random.Random(seed)
    ranges = {"num_draft": NUM_DRAFT["low"], "window": WINDOW, "level": LEVEL}
    parts = {name: {value: rng.random() for value in values} for name, values in ranges.items()}

    def time(setting):
        return sum(part[getattr(setting, name)] for name, part in parts.items())

    grid = [Setting(*place) for place in product(*ranges.values())]
    assert len(grid) == 90
    assert search(time, ranges, rng.choice(grid)) == min(grid, key=time)


def test_a_setting_is_a_spec_of_the_drafter():
    assert Setting(5, 17, 6).spec("some/model", 3) == (
        "ouroboros=some/model:num_draft=5,num_phrases=3,level=6,window=17"
    )


def test_a_trial_sums_up_all_steps_and_the_steps_after_the_prefill():
    def step(emitted, drafts):
        return StepCost(emitted, emitted - 1, 1, 4, 0, drafts, (0.0,) * 5)

    turns = [
        Turn("", [0] * 6, 9, [step(1, 9), step(2, 4), step(3, 5)], 2.0),
        Turn("", [0] * 5, 9, [step(4, 7), step(1, 1)], 1.5),
    ]
    assert Trial.of(turns) == Trial(11, 3.5, 5, 26, 3, 6, 10)


def test_the_objectives_are_time_per_token():
    assert TRIAL.clock_time() == 0.2
    assert TRIAL.modelled_time(0.0) == 0.4
    assert TRIAL.modelled_time(0.1) == pytest.approx((8 + 3) / 20)


# ---- the file of trials


def test_trials_are_stored_by_their_arguments_and_read_back(tmp_path):
    file = str(tmp_path / "trials.json")
    for arguments, spec, seconds in [(("a", 1), "x", 1.0), (("a", 2), "x", 2.0), (("a", 1), "y", 3.0)]:
        TrialFile(file, arguments).add(spec, replace(TRIAL, seconds=seconds))
    assert TrialFile(file, ("a", 1)).get("x").seconds == 1.0
    assert TrialFile(file, ("a", 2)).get("x") == replace(TRIAL, seconds=2.0)
    assert TrialFile(file, ("a", 1)).get("y").seconds == 3.0
    assert TrialFile(file, ("a", 2)).get("y") is None
    assert TrialFile(file, ("b", 1)).get("x") is None
    assert [path.name for path in tmp_path.iterdir()] == ["trials.json"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": {"b": {"tokens": 1}}}', '{"a": {"b": 3}}'])
def test_a_file_with_other_content_is_refused_and_not_changed(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json holds no trials of ouroboros-search: give another --out"):
        TrialFile(str(file), ())
    assert file.read_text() == text


def test_a_file_that_cannot_be_written_is_refused_before_any_work(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        TrialFile(str(tmp_path / "no" / "trials.json"), ())
    with pytest.raises(ValueError, match="holds no trials"):
        TrialFile(str(tmp_path), ())


# ---- the command


@pytest.fixture(scope="module")
def folder(make_base, tmp_path_factory):
    """The folder of a base that is also its own draft model."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = embedded.train_tokenizer(embedded.conversations(30, seed=7), vocab_size=300)
    make_base(dtype=torch.float32, context=512, vocab=300).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run_search(folder, out=None, draft_cost=None, num_phrases=3, **questions):
    options = OuroborosOptions(draft_cost=draft_cost, num_phrases=num_phrases)
    ouroboros_search(ModelOptions(folder), QuestionOptions(**questions), options, folder, out)


def places(spec):
    """Gamma, window and level of a spec."""
    named = dict(pair.split("=") for pair in drafter_specs.split(spec)[2].split(","))
    return tuple(int(named[name]) for name in ("num_draft", "window", "level"))


@pytest.fixture
def decoded(monkeypatch):
    """The specs that are decoded, in order."""
    specs, decode = [], module.decode
    monkeypatch.setattr(module, "decode", lambda runner, spec, *rest: specs.append(spec) or decode(runner, spec, *rest))
    return specs


@pytest.mark.slow
def test_the_command_prints_the_fastest_setting_and_continues_an_interrupted_search(folder, decoded, tmp_path, capsys):
    out = tmp_path / "trials.json"
    arguments = {"limit": 1, "max_new_tokens": 8, "draft_cost": 0.1, "out": str(out)}
    run_search(folder, **arguments)
    printed = capsys.readouterr().out
    assert len(decoded) == len(set(decoded)) == 12
    (page,) = json.loads(out.read_text()).values()
    assert list(page) == decoded
    best = printed.strip().splitlines()[-1]
    cost = {places(spec): Trial(**trial).modelled_time(0.1) for spec, trial in page.items()}
    _, window, level = places(decoded[0])
    timed, found = algorithm_1(cost.get, NUM_DRAFT["low"], WINDOW, LEVEL, window, level)
    assert list(dict.fromkeys(timed)) == list(map(places, decoded))
    assert places(best) == found

    whole = out.read_text()
    for kept in (12, 7):  # a finished search asks nothing; a broken one only what it lacks
        out.write_text(json.dumps({key: dict(list(page.items())[:kept]) for key, page in json.loads(whole).items()}))
        decoded.clear()
        run_search(folder, **arguments)
        assert len(decoded) == 12 - kept
        assert capsys.readouterr().out.strip().splitlines()[-1] == best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"draft_cost": -1.0}, "--draft-cost must be at least 0 and finite, not -1.0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"num_phrases": 0}, "num_phrases >= 1"),
        ({"questions": "no/such/file"}, "no such file"),
        ({"out": "no/such/folder/trials.json"}, "there is no folder no/such/folder"),
    ],
)
def test_impossible_searches_are_refused(folder, arguments, said):
    with pytest.raises(ValueError, match=said):
        run_search(folder, **{"limit": 1, "max_new_tokens": 8} | arguments)


@pytest.mark.slow
def test_no_phrases_of_the_warm_up_remain(folder, monkeypatch):
    from inference.verifier.runner import Runner

    base = load_base(folder)
    spec = Setting(5, 15, 4).spec(folder, 3)
    sizes, make = [], drafter_specs.make

    def watched(spec, runner):
        drafter = make(spec, runner)
        begin = drafter.begin
        drafter.begin = lambda prompt: sizes.append(len(drafter.pool)) or begin(prompt)
        return drafter

    monkeypatch.setattr(drafter_specs, "make", watched)
    questions = [Question(index, "", (f"How many apples are {index} apples?",)) for index in (2, 3)]
    list(module.decode(Runner(base), spec, questions, QuestionOptions(max_new_tokens=24)))
    warm_up, first, second = sizes
    assert warm_up == first == 0
    assert second > 0, "the phrases of the first question live on in the second"
