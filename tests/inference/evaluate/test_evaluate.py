"""Evaluations that are interrupted or repeated give the same numbers."""

import json
import os
import shutil
from dataclasses import asdict, replace

import pytest

import drafters
from data import benchmarks
from data.benchmarks import Question
from drafters.training_free.ngram import NgramPool
from inference import commands, drafter_specs
from inference.evaluate import own_loop
from inference.evaluate import results as folders
from inference.evaluate.answers import Answer, AnswerFiles, Turn, comparable
from inference.evaluate.own_loop import answer_question, answer_questions, decoding_order
from inference.options import EvaluationOptions, ModelOptions, QuestionOptions, SamplingOptions
from inference.runs import fingerprint
from inference.verifier.base import load_base, load_base_info
from inference.verifier.draft_model import DraftModelSession
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler
from inference.verifier.session import PHASES, Session, Step
from tests.conftest import full_disk
from train.arguments import grouped
from train.cli import run_drafters

CLOCK = {"speed", "speedup", "wall", "step_seconds"}  # figures that differ between runs
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
    """Evaluate drafters on the questions."""

    def run(out=None, specs=(*FORGETFUL, *REMEMBERING), **changes):
        arguments = {"max_new_tokens": 14, "device": "cpu", "repeats": 2, "out": out and str(out)}
        arguments |= {"benchmark": [f"mt_bench={asked / 'questions.jsonl'}"]}
        arguments |= {"base": str(asked / "base"), "drafter": list(specs)} | changes
        commands.evaluate(**grouped(commands.evaluate, arguments))
        return out

    return run


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """The folder of an uninterrupted run."""
    return run(tmp_path_factory.mktemp("runs") / "whole")


def unmeasured(value):
    """Return results without the values that differ between runs."""
    if isinstance(value, dict):
        return {key: unmeasured(each) for key, each in value.items() if key not in CLOCK}
    return list(map(unmeasured, value)) if isinstance(value, list) else value


def results(folder):
    """The figures of each drafter that are the same in every run."""
    (own,) = json.loads((folder / "results.json").read_text())["results"].values()
    return {summary["drafter"]: unmeasured(summary) for summary in own}


def texts(folder):
    """Return the tokens and counts of all answers."""
    found = {}
    for path in sorted((folder / "answers").glob("*/*.jsonl")):
        for line in path.read_text().splitlines():
            (choice,) = json.loads(line)["choices"]
            steps = [[step[:6] for step in turn] for turn in choice["steps"]]
            found[path.stem, json.loads(line)["question_id"]] = choice["token_ids"], steps
    return found


@pytest.fixture(scope="module")
def make_loop(asked):
    """Make the loop of the same run, with other options."""
    selection = QuestionOptions([f"mt_bench={asked / 'questions.jsonl'}"], max_new_tokens=14)
    model = ModelOptions(str(asked / "base"), device="cpu")
    prompts = selection.select(load_base_info(model.base), selection.load())

    def make_loop(specs=(*FORGETFUL, *REMEMBERING), repeats=2, questions=None):
        options = EvaluationOptions(list(specs), repeats=repeats)
        loop = own_loop.OwnLoop(model, selection, prompts, SamplingOptions(), options)
        loop.questions = questions or loop.questions
        return loop

    return make_loop


@pytest.mark.slow
def test_a_run_truncated_at_any_byte_continues_to_the_same_numbers(make_loop, whole, tmp_path):
    loop = make_loop()
    lines = {path: path.read_bytes() for path in (whole / "answers").rglob("*.jsonl")}
    for share in (0.0, 0.31, 0.62, 0.9, 1.0):
        for path, content in lines.items():
            copy = tmp_path / str(share) / path.relative_to(whole)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content if path.name == "run.jsonl" else content[: int(share * len(content))])
        files = AnswerFiles(tmp_path / str(share), asdict(loop.conditions))
        num_kept = len(files.all_answers())
        assert (num_kept == 0) == (share == 0) and loop.run(files) == 2 * 5 * 6 - num_kept
        files.finish()
        found = loop.results(AnswerFiles(tmp_path / str(share), asdict(loop.conditions)))
        assert found.record.starts == 1 + (share < 1)
        for drafter, summary in found.summaries["mt_bench"].items():
            assert json.loads(json.dumps(unmeasured(asdict(summary)))) == results(whole)[drafter]
        assert texts(tmp_path / str(share)) == texts(whole)
        assert list(map(comparable, found.answers["mt_bench"]["joint"])) == list(
            map(comparable, folders.read(whole).answers["mt_bench"]["joint"])
        )


def test_texts_are_drawn_as_the_options_say(run, asked, tmp_path):
    sampling = {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "seed": 3}
    run(tmp_path, specs=["joint"], repeats=1, **sampling)
    found = folders.read(tmp_path)
    assert found.conditions.same()["decoding"] == "temperature 0.8, top_k 12, top_p 0.9, seed 3"
    assert found.conditions.caps == {"mt_bench": 14}
    assert found.conditions.base_fingerprint == fingerprint(asked / "base")
    base = load_base(str(asked / "base"))
    question = benchmarks.load_questions("mt_bench", str(asked / "questions.jsonl"))[0]
    for name in ("none", "joint"):
        session = Session(Runner(base), drafter_specs.make(name, Runner(base)), KeyedSampler(**sampling))
        expected = answer_question(session, name, question, "tokenizer", 14)
        assert comparable(found.answers["mt_bench"][name][0]) == comparable(expected)


@pytest.mark.slow
def test_a_closed_pipe_does_not_lose_the_results(run, tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(SystemExit), os.fdopen(writer, "w", buffering=1) as closed:  # how rich ends on a closed pipe
        monkeypatch.setattr("sys.stdout", closed)
        run(tmp_path / "piped", ["anpd"], repeats=1, limit=1)
    written = {path.name for path in (tmp_path / "piped").iterdir()}
    assert {"results.json", "results.csv", "results.md", "report.html"} <= written


@pytest.mark.slow
def test_overwrite_starts_over(run, whole, tmp_path):
    journal = tmp_path / "old" / "answers" / "run.jsonl"
    shutil.copytree(whole, tmp_path / "old")
    for name in ("answers", "plots", "report.html", "results.csv"):
        (tmp_path / f"has {name}" / name).mkdir(parents=True)
        with pytest.raises(ValueError, match=f"already holds {name}: give another --out, or --overwrite"):
            run(tmp_path / f"has {name}")
    before = journal.read_bytes()
    run(tmp_path / "old", ["anpd"], repeats=1, limit=2, overwrite=True)
    settings = before.partition(b"\n")[0]
    assert not journal.read_bytes().startswith(settings)
    lines = {path.stem: path.read_bytes().count(b"\n") for path in (tmp_path / "old" / "answers").rglob("*.jsonl")}
    assert lines == {"anpd": 2, "none": 2, "run": 2} and not (tmp_path / "old" / "answers.old").exists()


@pytest.mark.slow
def test_overwrite_loses_nothing_before_a_new_answer_is_on_the_disk(run, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "old")

    def contents():
        return {path: path.read_bytes() for path in (tmp_path / "old").rglob("*") if path.is_file()}

    before = contents()
    for _ in range(2):
        with full_disk(100), pytest.raises(ValueError, match="what was there before is kept"):
            run(tmp_path / "old", ["anpd"], repeats=1, limit=2, overwrite=True)
    with pytest.raises(ValueError, match="started with different drafters"):  # which puts the journals back
        run(tmp_path / "old", ["anpd"])
    assert contents() == before
    run(tmp_path / "old")
    assert "already held every answer" in capsys.readouterr().out
    assert contents().keys() == before.keys()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"max_new_tokens": 15}, "different benchmarks"),
        ({"specs": ["anpd"]}, "different drafters"),
        ({"repeats": 3}, "repeats 2 instead of 3"),
        ({"temperature": 0.5, "dtype": "bfloat16"}, "dtype 'float32' instead of 'bfloat16' and different sampling"),
    ],
)
def test_other_arguments_are_refused_by_name(run, whole, changes, said):
    before = {path: path.read_bytes() for path in whole.rglob("*.json*")}
    with pytest.raises(ValueError, match=f"was started with {said}.*--overwrite"):
        run(whole, **changes)
    assert before == {path: path.read_bytes() for path in whole.rglob("*.json*")}


def test_invalid_arguments_with_overwrite_leave_the_old_results(run, whole):
    before = {path: path.read_bytes() for path in whole.rglob("*.json*")}
    with pytest.raises(ValueError, match="unknown drafter"):
        run(whole, specs=["nonsense"], overwrite=True)
    for wrong in ({"repeats": 0}, {"limit": 0}, {"server": ["vllm"], "concurrency": [0]}):
        with pytest.raises(ValueError, match="at least 1"):
            run(whole, **wrong)
    assert before == {path: path.read_bytes() for path in whole.rglob("*.json*")}


# ---- memory of drafters between texts

QUESTIONS = [Question(at, "a", (f"w5 w6 w{7 + at} w5 w6",)) for at in range(4)]


def decoded(base, drafter, questions, sampler=None):
    session = Session(Runner(base), drafter, sampler)
    return [comparable(answer_question(session, "it", question, "tokenizer", 16)) for question in questions]


def every_drafter(base, make_drafter):
    """Return drafters of every kind, including some with a draft model."""
    runner = Runner(base)
    named = ["none", *FORGETFUL, *REMEMBERING, "lookahead", "self_speculative"]
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
            sampler = SamplingOptions(1.0).sampler() if name.endswith("draws") else None
            again = [reset_and_decoded(base, drafter, [question], sampler)[0] for question in QUESTIONS]
            assert decoded(base, drafter, QUESTIONS, sampler) == again, name
    assert {name for name, drafter in made.items() if drafter.remembers} == {
        *REMEMBERING,
        *("ouroboros", "cascade that remembers"),
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
        "none": Session(Runner(base), drafters.NoDrafter()),
        "joint": Session(Runner(base), drafters.Joint()),
    }

    def decode(done):
        answers = answer_questions(sessions, QUESTIONS, "tokenizer", 12, done)
        return {(answer.question_id, answer.drafter): answer for answer in answers}

    whole = decode({})
    assert list(whole) == decoding_order(["none", "joint"], range(4))
    done = {place: whole[place] for place in list(whole)[:5]}
    again = decode(done)
    assert {at: comparable(each) for at, each in again.items()} == {at: comparable(whole[at]) for at in list(whole)[5:]}
    done[0, "joint"] = replace(done[0, "joint"], turns=done[1, "joint"].turns)
    with pytest.warns(UserWarning, match="joint decodes question 0 differently than before the interruption"):
        decode(done)


@pytest.mark.slow
def test_an_evaluation_of_several_benchmarks_survives_an_interruption_in_any_of_them(run, asked, tmp_path):
    file, names = asked / "questions.jsonl", ["joint", "self_draft", "anpd"]
    options = {"benchmark": [f"file={file}", f"mt_bench={file}"], "max_new_tokens": 16, "repeats": 1}
    base, questions = load_base(str(asked / "base")), benchmarks.load_questions("mt_bench", str(file))
    expected = {name: 2 * decoded(base, drafter_specs.make(name, Runner(base)), questions) for name in names}
    run(tmp_path, names, **options)
    lines = {path: path.read_bytes().splitlines(keepends=True) for path in (tmp_path / "answers").glob("*/*.jsonl")}
    for num_kept in (0, 2, 7):  # answers of each drafter, five to each benchmark
        for path, answers in lines.items():
            path.write_bytes(b"".join(answers[: max(0, num_kept - 5 * (path.parent.name == "mt_bench"))]))
        run(tmp_path, names, **options)
        found = folders.read(tmp_path).answers.values()
        assert {name: [comparable(each) for own in found for each in own[name]] for name in names} == expected


# ---- order, repeats, devices, files


def test_drafters_take_turns_to_decode_first_and_repeats_start_with_another():
    first, second = [(0, "none"), (0, "a"), (0, "b")], [(1, "a"), (1, "b"), (1, "none")]
    assert decoding_order(["none", "a", "b"], range(2)) == first + second
    assert decoding_order(["none", "a", "b"], range(1), repeat=2) == [(0, "b"), (0, "none"), (0, "a")]


def test_the_fingerprints_of_the_base_and_of_a_drafters_files_are_recorded(make_loop, asked, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    cascade, own = f"cascade={tmp_path}:inner={tmp_path}+{asked / 'base'}", fingerprint(tmp_path)
    made = make_loop(["anpd", f"ctc={tmp_path}", cascade]).conditions
    assert made.base_fingerprint == fingerprint(asked / "base")
    prints = {name: drafter.fingerprint for name, drafter in made.drafters.items()}
    assert list(prints.values()) == ["", "", own, f"{own}+{own}+{made.base_fingerprint}"]


def test_repeats_that_differ_are_reported(make_loop):
    def given(repeat, tokens):
        step = Step(len(tokens), 0, 3, 0, 0, 0, (0.0,) * len(PHASES))
        return Answer(0, "a", "none", [Turn("", tokens, 3, [step], repeat, False)], repeat=repeat)

    loop, files = make_loop(["none"], 3, {"b": QUESTIONS[:1]}), AnswerFiles(None, {})
    for repeat in range(3):
        files.add("b", given(repeat, [1, 2]))
    found = loop.results(files)
    assert found.record.warnings == [] and found.answers["b"]["none"][0].seconds == 1
    files.add("b", given(2, [1, 3]))
    (line,) = loop.results(files).record.warnings
    assert "none decodes 1 questions of b differently" in line and "question 0 first" in line


@pytest.mark.slow
def test_by_default_tiny_chat_prompt_lookup_and_joint_decode_the_embedded_questions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_drafters(["eval", "--limit", "1", "--max-new-tokens", "4", "--out", str(tmp_path)])
    found = folders.read(tmp_path)
    assert found.conditions.base.endswith("tiny-chat")
    assert {name: list(by_drafter) for name, by_drafter in found.summaries.items()} == {
        "embedded": ["none", "prompt_lookup", "joint"]
    }
    # Four tokens are too few steps for a timing error, so all repeats are made, and the results say so.
    assert found.record.repeats == {"embedded": 5}
    said = "on embedded are not yet within 5 % after 5 repeats: prompt_lookup unknown, joint"
    assert said in " ".join(found.record.warnings) and said in (tmp_path / "report.html").read_text()
    commands.report([str(tmp_path)])  # the answers and results are read back


# ---- clocks on a shared machine


def timed_answer(question, name, repeat, factor):
    """An answer whose steps take ``factor`` milliseconds each."""
    steps = [Step(1, 0, 1, 0, 0, 0, (0.0, 0.001 * factor, 0.0, 0.0, 0.0))] * 12
    return Answer(question, "a", name, [Turn("", [1] * 12, 1, steps, 0.012 * factor, False)], repeat=repeat)


def test_a_benchmark_is_repeated_until_its_speedups_are_precise_or_the_limit_is_reached(make_loop, monkeypatch):
    names = ["none", "anpd"]
    loop = make_loop(["anpd"], "auto", {"calm": QUESTIONS, "noisy": QUESTIONS})
    monkeypatch.setattr(own_loop, "MAX_REPEATS", 3)
    files = AnswerFiles(None, {})

    def decode(repeat, benchmarks, spread):
        for name in benchmarks:
            for place, drafter in decoding_order(names, range(len(QUESTIONS))):
                factor = 1.0 if drafter == "none" or name == "calm" else 1 + spread * (place % 2)
                files.add(name, timed_answer(place, drafter, repeat, factor))

    repeats = loop.repeats(files)
    assert next(repeats) == (0, ["calm", "noisy"])
    decode(0, ["calm", "noisy"], 1.0)
    assert next(repeats) == (1, ["noisy"]), "questions of the other one agree"
    decode(1, ["noisy"], 0.0)
    assert next(repeats) == (2, ["noisy"]), "a question's repeats differ"
    line = loop.results(files).record.warnings[-1]
    assert "the speed-ups on noisy are not yet within 5 % after 2 repeats" in line and "anpd ±" in line
    decode(2, ["noisy"], 0.0)
    assert list(repeats) == [], "that was the last one"
    found = loop.results(files)
    assert found.record.repeats == {"calm": 1, "noisy": 3}
    assert found.summaries["noisy"]["anpd"].speed.speedup.value == pytest.approx(1.0), "most of the rounds agree"
    # Continued with the same answers, it asks for the same repeats.
    assert list(loop.repeats(files)) == [(0, ["calm", "noisy"]), (1, ["noisy"]), (2, ["noisy"])]
    assert list(make_loop(["anpd"], 2, loop.questions).repeats(files)) == [(at, ["calm", "noisy"]) for at in range(2)]
