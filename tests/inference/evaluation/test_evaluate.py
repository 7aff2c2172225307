"""Evaluations that are interrupted, repeated or split over processes give the same numbers."""

import json
import os
import queue
import shutil
import signal
import time
from dataclasses import asdict, replace

import pytest
import torch

import drafters
from data import benchmarks
from data.benchmarks import Question
from drafters.training_free.ngram import NgramPool
from inference import drafter_specs
from inference.evaluation import answering, processes
from inference.evaluation.answering import (
    answer_question,
    answer_questions,
    decoding_order,
    least_disturbed,
    without_times,
)
from inference.evaluation.collected import CollectedAnswers, collect, repeats_to_decode
from inference.evaluation.evaluate import evaluate, process_devices
from inference.evaluation.plan import EvaluationPlan
from inference.evaluation.results_folder import fingerprints
from inference.evaluation.worker import Worker
from inference.fingerprint import fingerprint
from inference.journal import Journal
from inference.reporting import report
from inference.results import folders, records
from inference.results.metrics import MEASURED
from inference.results.records import Answer, Turn
from inference.verifier import layers
from inference.verifier.base import load_base
from inference.verifier.draft_session import DraftModelSession
from inference.verifier.options import SamplingOptions
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler, Typical, make_sampler
from inference.verifier.session import PHASES, Session, StepCost
from train.cli.commands import grouped

FORGETFUL = ["anpd", "prompt_lookup"]
REMEMBERING = ["joint", "token_recycling", "self_draft"]


@pytest.fixture(scope="module")
def asked(make_base, toy_tokenizer, tmp_path_factory):
    """A folder with a toy base and a file of five questions, the last of which repeat the text of the first."""
    folder = tmp_path_factory.mktemp("asked")
    make_base(context=256).model.float().save_pretrained(folder / "base")
    toy_tokenizer.save_pretrained(folder / "base")
    texts = [["w5 w6 w7 w8", "w9 w9"], ["w10 w11 w12"], ["w5 w6 w7 w8"], ["w20 w21", "w22 w5"], ["w10 w11 w12 w13"]]
    rows = [{"question_id": 1 + at, "category": "ab"[at % 2], "turns": turns} for at, turns in enumerate(texts)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def run(asked):
    """Evaluate drafters on the questions, with fixed budgets unless it is said."""

    def run(out=None, specs=(*FORGETFUL, *REMEMBERING), **changes):
        arguments = {"max_new_tokens": 14, "device": "cpu", "repeats": 2, "out": out and str(out)}
        arguments["budget"] = "fixed"  # otherwise step counts depend on times
        arguments |= {"benchmark": ["mt_bench"], "questions": [str(asked / "questions.jsonl")]}
        evaluate(**grouped(evaluate, arguments | {"base": str(asked / "base"), "drafter": list(specs)} | changes))
        return out

    return run


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """The folder of an uninterrupted run."""
    return run(tmp_path_factory.mktemp("runs") / "whole")


def unmeasured(value):
    """Return results without the values that differ between runs."""
    if isinstance(value, dict):
        return {key: unmeasured(each) for key, each in value.items() if key not in MEASURED}
    return value


def results(folder):
    return unmeasured(json.loads((folder / "results.json").read_text())["results"])


def texts(folder):
    """Return the tokens and counts of all answers."""
    found = {}
    for path in sorted((folder / "answers").rglob("*.jsonl")):
        for line in path.read_text().splitlines():
            (choice,) = json.loads(line)["choices"]
            steps = [[step[:6] for step in turn] for turn in choice["steps"]]
            found[path.stem, json.loads(line)["question_id"]] = choice["token_ids"], steps
    return found


@pytest.fixture(scope="module")
def plan(asked):
    """The plan of the same run."""
    specs = ["none", *FORGETFUL, *REMEMBERING]
    questions = benchmarks.load_questions("mt_bench", str(asked / "questions.jsonl"))
    return EvaluationPlan(
        base=str(asked / "base"),
        drafters={spec: spec for spec in specs},
        questions={"mt_bench": questions},
        caps={"mt_bench": 14},
        sampling=SamplingOptions(),
        typical=False,
        template="tokenizer",
        dtype="float32",
        devices=("cpu",),
        threads=1,
        repeats=2,
    )


@pytest.mark.slow
def test_two_runs_give_the_same_numbers_except_for_times(run, whole, tmp_path):
    run(tmp_path / "again")
    assert results(tmp_path / "again") == results(whole)
    assert texts(tmp_path / "again") == texts(whole)
    measured = json.loads((whole / "results.json").read_text())["results"]["mt_bench"]["joint"]
    assert measured.keys() >= MEASURED and measured["acceptance_length"] > 1


@pytest.mark.slow
def test_the_automatic_budget_gives_the_same_texts_and_is_recorded(run, whole, tmp_path):
    specs = ["anpd", "joint:num_nodes=4", "prompt_lookup:num_nodes=auto"]
    recorded = json.loads((run(tmp_path / "auto", specs, budget="auto") / "results.json").read_text())
    assert recorded["context"]["budget"].endswith(": anpd, prompt_lookup:num_nodes=auto")
    assert "budget" not in json.loads((whole / "results.json").read_text())["context"]
    answers, expected = texts(tmp_path / "auto"), texts(whole)
    assert {key[1]: answer[0] for key, answer in answers.items() if key[0] == "anpd"} == {
        key[1]: answer[0] for key, answer in expected.items() if key[0] == "anpd"
    }
    with pytest.raises(ValueError, match="already holds results"):
        run(whole, budget="auto")


@pytest.mark.slow
def test_packed_weights_give_the_same_texts_and_are_recorded(run, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "MIN_PACKED_ELEMENTS", 1)
    recorded = json.loads((run(tmp_path / "packed", ["anpd"], packed=True, repeats=1) / "results.json").read_text())
    assert recorded["context"]["dtype"] == "float32, packed weights"
    expected = texts(whole)
    assert texts(tmp_path / "packed") == {key: expected[key] for key in expected if key[0] in {"none", "anpd"}}


def test_typical_acceptance_with_an_automatic_budget_is_refused(run):
    with pytest.raises(ValueError, match="the text would depend on the clock"):
        run(specs=["anpd:num_nodes=auto"], typical=True, temperature=1.0)


@pytest.mark.slow
def test_a_run_truncated_at_any_byte_continues_to_the_same_numbers(plan, whole, tmp_path):
    content = (whole / "journal" / "1.jsonl").read_bytes()
    first = content.index(b"\n") + 1
    for share in (0.0, 0.31, 0.62, 0.9, 1.0):
        folder, told = tmp_path / str(share), []
        folder.mkdir()
        (folder / "1.jsonl").write_bytes(content[: first + int(share * (len(content) - first))])
        processes.run(plan, folder, repeats_to_decode(folder, plan), lambda: None, told.append)
        found = collect(folder, plan)
        assert len(told) == 2 * 5 * 6 and told == sorted(told)
        assert found.num_starts == 1 + (0 < share < 1)
        for drafter, summary in found.summaries()["mt_bench"].items():
            assert json.loads(json.dumps(unmeasured(asdict(summary)))) == results(whole)["mt_bench"][drafter]
        assert [without_times(answer) for answer in found.median_answers()["mt_bench"]["joint"]] == [
            without_times(answer) for answer in records.read(whole / "answers" / "mt_bench" / "joint.jsonl")
        ]


@pytest.mark.slow
def test_a_run_continues_after_its_process_was_killed(run, whole, tmp_path, capsys):
    child = os.fork()
    if not child:
        run(tmp_path / "killed")
        os._exit(0)
    journal, lines = tmp_path / "killed" / "journal" / "1.jsonl", 0
    while lines < 12:
        time.sleep(0.01)
        lines = journal.read_bytes().count(b"\n") if journal.exists() else 0
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert not (tmp_path / "killed" / "results.json").exists()
    kept = journal.read_bytes()
    run(tmp_path / "killed")
    assert journal.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    assert results(tmp_path / "killed") == results(whole)


def test_typical_acceptance_is_used_for_the_drafters_and_not_for_the_base_alone(run, asked, tmp_path):
    sampling = {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "seed": 3}
    run(tmp_path, specs=["joint"], typical=True, repeats=1, **sampling)
    found = folders.read(tmp_path)
    assert found.context["decoding"].endswith("lossy") and found.length_cap("mt_bench") == 14
    assert found.context["base_fingerprint"] == fingerprint(asked / "base")
    base = load_base(str(asked / "base"))
    question = benchmarks.load_questions("mt_bench", str(asked / "questions.jsonl"))[0]
    for name, rule in (("none", KeyedSampler), ("joint", Typical)):
        session = Session(Runner(base), drafter_specs.make(name, Runner(base)), rule(**sampling))
        expected = answer_question(session, name, question, base, "tokenizer", 14)
        shown = name if rule is KeyedSampler else f"{name} (lossy)"
        assert without_times(found.answers["mt_bench"][shown][0]) == without_times(expected)


@pytest.mark.slow
def test_a_finished_run_is_not_decoded_again(run, whole, capsys):
    journal = whole / "journal" / "1.jsonl"
    before = journal.read_bytes()
    run(whole)
    assert "nothing was decoded" in " ".join(capsys.readouterr().out.split())
    assert journal.read_bytes() == before


@pytest.mark.slow
def test_a_closed_pipe_does_not_lose_the_results(run, tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(SystemExit), os.fdopen(writer, "w", buffering=1) as closed:  # how rich ends on a closed pipe
        monkeypatch.setattr("sys.stdout", closed)
        run(tmp_path / "piped", ["anpd"], repeats=1, limit=1)
    assert {"results.json", "results.md", "report.html"} <= {path.name for path in (tmp_path / "piped").iterdir()}


@pytest.mark.slow
def test_overwrite_starts_over(run, whole, tmp_path):
    journal = tmp_path / "old" / "journal" / "1.jsonl"
    shutil.copytree(whole, tmp_path / "old")
    before = journal.read_bytes()
    run(tmp_path / "old", ["anpd"], repeats=1, limit=2, overwrite=True)
    settings = before.partition(b"\n")[0]
    assert not journal.read_bytes().startswith(settings)
    assert journal.read_bytes().count(b'"answer"') == 4
    assert sorted(path.stem for path in (tmp_path / "old" / "answers").rglob("*.jsonl")) == ["anpd", "none"]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"max_new_tokens": 15}, "different max_new_tokens"),
        ({"specs": ["anpd"]}, "different drafters"),
        ({"limit": 3}, "different questions"),
        ({"repeats": 3}, "repeats"),
        ({"devices": 2}, "different devices"),
        ({"temperature": 0.5}, "temperature"),
        ({"packed": True}, "packed None instead of True"),
    ],
)
def test_other_arguments_are_refused_by_name(run, whole, changes, said):
    before = {path: path.read_bytes() for path in whole.rglob("*.json*")}
    with pytest.raises(ValueError, match=f"already holds results: .* was started with {said}.*--overwrite"):
        run(whole, **changes)
    assert before == {path: path.read_bytes() for path in whole.rglob("*.json*")}


def rewrite_settings(folder, change):
    journal = folder / "journal" / "1.jsonl"
    first, rest = journal.read_bytes().split(b"\n", 1)
    journal.write_bytes(json.dumps(change(json.loads(first))).encode() + b"\n" + rest)
    return journal


@pytest.mark.parametrize("changes", [{"processor": "another one"}, {"transformers": "5.0.0"}])
def test_a_run_does_not_continue_on_another_processor_or_with_another_version_of_transformers(
    run, whole, tmp_path, changes
):
    shutil.copytree(whole, tmp_path / "copy")
    rewrite_settings(tmp_path / "copy", lambda settings: settings | changes)
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=f"was started with {name} '{value}' instead of '.+': repeat"):
        run(tmp_path / "copy")


@pytest.mark.slow
def test_a_run_of_an_older_version_that_recorded_neither_continues(run, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    older = {"processor", "transformers"}
    journal = rewrite_settings(tmp_path / "copy", lambda all: {key: all[key] for key in all.keys() - older})
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-2]))
    run(tmp_path / "copy")
    assert results(tmp_path / "copy") == results(whole)


def test_invalid_arguments_with_overwrite_leave_the_old_results(run, whole):
    before = {path: path.read_bytes() for path in whole.rglob("*.json*")}
    with pytest.raises(ValueError, match="unknown drafter"):
        run(whole, specs=["nonsense"], overwrite=True)
    for wrong in ({"repeats": 0}, {"devices": 0}, {"repeats": "auto", "max_repeats": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            run(whole, **wrong)
    assert before == {path: path.read_bytes() for path in whole.rglob("*.json*")}


@pytest.mark.slow
def test_several_processes_give_the_numbers_of_one(run, plan, whole, tmp_path):
    """True for drafters without memory between texts; answers from before an interruption are kept."""
    specs = ["none", *FORGETFUL]
    shared = replace(plan, drafters={spec: spec for spec in specs}, devices=("cpu", "cpu"), repeats=1)
    first, second = (processes.journal_path(tmp_path / "journal", number) for number in range(2))
    assert list(Worker(shared, 0).run(first, None)) == [True] * 9
    before = first.read_bytes()
    run(tmp_path, FORGETFUL, repeats=1, devices=2)
    assert first.read_bytes() == before and second.read_bytes().count(b'"answer"') == 6
    expected = {drafter: found for drafter, found in results(whole)["mt_bench"].items() if drafter in specs}
    assert results(tmp_path) == {"mt_bench": expected}
    assert texts(tmp_path).items() <= texts(whole).items()


def test_a_refusal_in_a_process_becomes_a_value_error_and_a_failure_a_runtime_error():
    told = queue.Queue()
    for what, error in (("refused", ValueError), ("failed", RuntimeError)):
        told.put((0, "ready", None))
        told.put((1, what, "there is no such drafter"))
        with pytest.raises(error, match="there is no such drafter"):
            processes._listen([None, None], told, "ready", print)


# ---- memory of drafters between texts

QUESTIONS = [Question(at, "a", (f"w5 w6 w{7 + at} w5 w6",)) for at in range(4)]


def decoded(base, drafter, questions, sampler=None):
    session = Session(Runner(base), drafter, sampler)
    return [without_times(answer_question(session, "it", question, base, "tokenizer", 16)) for question in questions]


def every_drafter(base, make_drafter):
    """Return drafters of every kind, including some with a draft model."""
    runner = Runner(base)
    named = ["none", *FORGETFUL, *REMEMBERING, "lookahead", "self_speculative", "self_speculative:carry=true"]
    made = {name: drafter_specs.make(name, runner) for name in named}
    made |= {name: make_drafter(name, base, []) for name in ("ctc", "block", "eagle", "eagle3")}
    inner = {
        "draft_model": DraftModelSession(Runner(base)),
        "cascade": DraftModelSession(Runner(base), drafters.ANPD(order=3)),
        "cascade that remembers": DraftModelSession(Runner(base), drafters.Joint()),
        "draft_model that draws": DraftModelSession(Runner(base), sampler=KeyedSampler(0.9)),
    }
    made |= {name: drafters.DraftModel(session, 3) for name, session in inner.items()}
    pool = NgramPool(5)
    lookahead = drafters.Lookahead(4, 5, 5, pool=pool)
    made["ouroboros"] = drafters.Ouroboros(DraftModelSession(Runner(base), lookahead), pool, 3, level=4)
    return made


@pytest.mark.slow
def test_a_drafter_without_memory_drafts_as_after_a_reset(make_base, make_drafter, make_random_ctc):
    base = make_base(context=256)
    made = every_drafter(base, make_drafter) | {"ctc that draws": make_random_ctc(base, draws=2)}
    for name, drafter in made.items():
        if not drafter.remembers:
            sampler = make_sampler(1.0) if name.endswith("draws") else None
            again = [reset_and_decoded(base, drafter, [question], sampler)[0] for question in QUESTIONS]
            assert decoded(base, drafter, QUESTIONS, sampler) == again, name
    assert {name for name, drafter in made.items() if drafter.remembers} == {
        *REMEMBERING,
        *("ouroboros", "self_speculative:carry=true", "cascade that remembers"),
    }


def reset_and_decoded(base, drafter, questions, sampler=None):
    drafter.reset()
    return decoded(base, drafter, questions, sampler)


@pytest.mark.slow
def test_a_reset_returns_a_drafter_with_memory_to_its_initial_state(make_base, make_drafter):
    base = make_base(context=256)
    made = {name: drafter for name, drafter in every_drafter(base, make_drafter).items() if drafter.remembers}
    for name, drafter in made.items():
        first = reset_and_decoded(base, drafter, QUESTIONS[:2])
        assert reset_and_decoded(base, drafter, QUESTIONS[:2]) == first, name


@pytest.mark.slow
def test_a_drafter_that_decodes_differently_after_an_interruption_is_reported(make_base):
    base = make_base(context=256)
    sessions = {
        "none": Session(Runner(base), drafter_specs.make("none", None)),
        "joint": Session(Runner(base), drafters.Joint()),
    }
    whole = dict(
        zip(
            decoding_order(["none", "joint"], 4),
            answer_questions(base, sessions, QUESTIONS, "tokenizer", 12),
            strict=True,
        )
    )
    done = {place: whole[place] for place in list(whole)[:5]}
    again = list(answer_questions(base, sessions, QUESTIONS, "tokenizer", 12, done))
    assert [without_times(each) for each in again] == [without_times(each) for each in list(whole.values())[5:]]
    done[0, "joint"] = replace(done[0, "joint"], turns=done[1, "joint"].turns)
    with pytest.warns(UserWarning, match="joint decodes question 0 differently than before the interruption"):
        list(answer_questions(base, sessions, QUESTIONS, "tokenizer", 12, done))


# ---- order, repeats, devices, files


def test_a_cpu_is_one_device_unless_more_processes_are_requested():
    assert process_devices(torch.device("cpu"), "auto") == ("cpu",)
    assert process_devices(torch.device("cpu"), 3) == ("cpu",) * 3
    if torch.cuda.is_available():
        with pytest.raises(ValueError, match="GPUs here"):
            process_devices(torch.device("cuda"), 99)


def test_drafters_take_turns_to_decode_first_and_repeats_start_with_another():
    assert decoding_order(["none", "a", "b"], 2) == [(0, "none"), (0, "a"), (0, "b"), (1, "a"), (1, "b"), (1, "none")]
    assert decoding_order(["none", "a", "b"], 1, repeat=2) == [(0, "b"), (0, "none"), (0, "a")]


def test_the_fingerprints_of_the_base_and_of_a_drafters_files_are_recorded(plan, asked, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    drafter = f"ctc={tmp_path}"
    told = fingerprints(replace(plan, drafters={"none": "none", "anpd": "anpd", "ctc": drafter}).settings)
    files = {"base_fingerprint": fingerprint(asked / "base"), "drafter_fingerprints": f"ctc: {fingerprint(tmp_path)}"}
    assert told == files
    (asked / "base").rename(asked / "moved")
    moved = replace(plan, base=str(asked / "moved"), drafters={"none": "none"}).settings
    (asked / "moved").rename(asked / "base")
    assert fingerprints(moved) == {"base_fingerprint": files["base_fingerprint"]}


def test_a_raw_question_is_encoded_without_the_chat_template(make_base):
    base = make_base(context=256)
    raw = replace(QUESTIONS[0], is_raw=True)
    messages = [("user", "w5 w6")]
    assert answering.encode_question(base, raw, messages, "vicuna_v1.1") == base.tokenizer("w5 w6").input_ids
    assert answering.encode_question(base, QUESTIONS[0], messages, "vicuna_v1.1") != base.tokenizer("w5 w6").input_ids


def test_repeats_that_differ_are_reported(plan):
    def given(tokens, seconds):
        step = StepCost(len(tokens), 0, 3, 0, 0, 0, (0.0,) * len(PHASES))
        return Answer(7, "a", "none", [Turn("", tokens, 3, [step], seconds)], [False])

    plan = replace(plan, drafters={"none": "none"}, questions={"b": QUESTIONS[:1]}, repeats=3)
    found = {("b", repeat): {(0, "none"): given([1, 2], repeat)} for repeat in range(3)}
    assert CollectedAnswers(plan, found).repeat_differences() == []
    assert CollectedAnswers(plan, found).median_answers()["b"]["none"][0].seconds == 1
    found["b", 2] = {(0, "none"): given([1, 3], 2)}
    (line,) = CollectedAnswers(plan, found).repeat_differences()
    assert "none decodes 1 questions of b differently" in line and "question 7 first" in line


@pytest.mark.slow
def test_by_default_the_base_prompt_lookup_and_joint_decode_the_embedded_questions(asked, tmp_path):
    options = {"base": str(asked / "base"), "device": "cpu", "limit": 1, "max_new_tokens": 4, "out": str(tmp_path)}
    evaluate(**grouped(evaluate, options))
    by_benchmark = json.loads((tmp_path / "results.json").read_text())["results"]
    assert list(by_benchmark) == ["embedded"]
    assert list(by_benchmark["embedded"]) == ["none", "prompt_lookup", "joint"]
    for summary in by_benchmark["embedded"].values():
        assert summary["typical_seconds"] > 0 and summary["cpu_seconds"] > 0 and summary["core_share"] > 0
        assert summary["speedup"] > 0 and summary["wall_speedup"] > 0
    # Four tokens are too few steps for a timing error, so all repeats are made, and the results say so.
    context = json.loads((tmp_path / "results.json").read_text())["context"]
    assert context["timing"].startswith("every question decoded 5 times (until timing leaves at most 5 %")
    for text in (context["warnings"], (tmp_path / "report.html").read_text()):
        assert "on embedded are not yet within 5 % after 5 repeats, the limit: prompt_lookup unknown, joint" in text
    turns = [turn for path in (tmp_path / "answers").rglob("*.jsonl") for a in records.read(path) for turn in a.turns]
    assert turns and all(len(turn.cpu_seconds) == len(turn.steps) for turn in turns)
    report.report([str(tmp_path)])  # the answers and results are read back


# ---- clocks on a shared machine


def timed_answer(question, name, factor):
    """An answer whose steps take ``factor`` milliseconds each."""
    steps = [StepCost(1, 0, 1, 0, 0, 0, (0.0, 0.001 * factor, 0.0, 0.0, 0.0))] * 12
    return Answer(question, "a", name, [Turn("", [1] * 12, 1, steps, 0.012 * factor)], [False], core_share=0.9)


def test_a_benchmark_is_repeated_until_its_speedups_are_precise_or_the_limit_is_reached(plan, tmp_path):
    names = {"none": "none", "anpd": "anpd"}
    plan = replace(plan, drafters=names, repeats="auto", max_repeats=3)
    plan = replace(plan, questions={"calm": QUESTIONS, "noisy": QUESTIONS})

    def decode(repeat, benchmarks, spread):
        with Journal(processes.journal_path(tmp_path, 0), plan.settings) as journal:
            for name in benchmarks:
                for place, drafter in decoding_order(list(names), len(QUESTIONS)):
                    factor = 1.0 if drafter == "none" or name == "calm" else 1 + spread * (place % 2)
                    answer = records.to_json(timed_answer(place, drafter, factor))
                    journal.append(
                        {"benchmark": name, "repeat": repeat, "place": place, "load": None, "answer": answer}
                    )

    repeats = repeats_to_decode(tmp_path, plan)
    assert next(repeats) == (0, ["calm", "noisy"])
    decode(0, ["calm", "noisy"], 1.0)
    assert next(repeats) == (1, ["noisy"]), "questions of the other one agree"
    decode(1, ["noisy"], 0.0)
    assert next(repeats) == (2, ["noisy"]), "a question's repeats differ"
    (line,) = collect(tmp_path, plan).imprecise_speedups()
    assert "the speed-ups on noisy are not yet within 5 % after 2 repeats" in line and "anpd ±" in line
    decode(2, ["noisy"], 0.0)
    assert list(repeats) == [], "that was the last one"
    found = collect(tmp_path, plan)
    assert [found.num_repeats(name) for name in plan.questions] == [1, 3]
    assert found.summaries()["noisy"]["anpd"].speedup == pytest.approx(1.0), "most of the rounds agree"
    # Continued with the same answers, it asks for the same repeats, and with a higher limit for more.
    assert list(repeats_to_decode(tmp_path, plan)) == [(0, ["calm", "noisy"]), (1, ["noisy"]), (2, ["noisy"])]
    assert (3, ["noisy"]) in repeats_to_decode(tmp_path, replace(plan, max_repeats=4))
    assert list(repeats_to_decode(tmp_path, replace(plan, repeats=2))) == [(at, ["calm", "noisy"]) for at in range(2)]


@pytest.mark.parametrize(
    "shares, limit, kept", [([0.9, 0.5, 0.97], 3, 2), ([0.9, 0.5, 0.97], 2, 0), ([0.5, 0.8, 0.6], 3, 1), ([0.99], 3, 0)]
)
def test_an_answer_that_waited_for_a_core_is_decoded_again_within_a_limit(shares, limit, kept):
    first, *others = (replace(timed_answer(at, "anpd", 1.0), core_share=share) for at, share in enumerate(shares))
    answer = least_disturbed(first, iter(others).__next__, limit)
    assert (answer.question_id, answer.core_share) == (kept, shares[kept])
    assert answer.decodings == min(len(shares), limit)
