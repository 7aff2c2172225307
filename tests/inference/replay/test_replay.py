"""Replay: the steps of live decoding from nothing but its text, and what recorded files may hold."""

import json
import random
from dataclasses import replace

import pytest
from inference.evaluation.answering import answer_question
from inference.results import metrics, records

import drafters
from data.benchmarks import Question, load_questions
from data.tokenizer import load_tokenizer
from drafters import DraftTree, RequiredOutputs, registry
from drafters.checkpoint import DrafterConfig, save
from inference import drafter_specs
from inference.replay import recordings
from inference.replay.recordings import NOT_RECORDED, Recorded, RecordedBase, Recording, ReplayRunner
from inference.replay.replay import ReplayedTurn, decode, make, measure, replay
from inference.verifier.base import tokenizer_hash
from inference.verifier.runner import Runner
from inference.verifier.session import Session, StepCost
from train.cli import grouped

EOS = 2
SPECS = [
    *("none", "anpd", "anpd:order=2,num_draft=3", "anpd:update=false"),
    *("prompt_lookup", "prompt_lookup:partial=false,num_draft=3", "joint:runner_up=0"),
]
SPECS += [
    name
    for name, kind in registry.registered().items()
    if not kind.file and not kind.learned_class and kind.build().history_only and name not in SPECS
]
QUESTIONS = [
    Question(7, "first", ("w5 w6 w7 w5 w6", "w9 w5")),
    Question(8, "second", ("w11", "w12 w11")),
    Question(9, "second", ("w30 w31 w30",)),
]


class Bushes(drafters.Drafter):
    """Trees with junk, duplicates and scratch that only the last tokens and the texts before decide."""

    history_only = True

    def __init__(self):
        self.reset()

    def reset(self):
        self.texts = 0

    def begin(self, prompt):
        self.texts += 1

    def propose(self, seq, limits):
        rng = random.Random(str((seq[-2:], self.texts)))
        tree = DraftTree.from_paths([[rng.randrange(12) for _ in range(rng.randrange(5))] for _ in range(12)])
        return tree.with_scratch([1, 2], [-1, len(tree) - 1])


@pytest.fixture
def runner(toy_tokenizer):
    return ReplayRunner(RecordedBase("a recording", toy_tokenizer))


@pytest.fixture
def live(base):
    """The toy base's answers to `QUESTIONS` with a drafter."""

    def live(spec, max_new_tokens=14):
        runner = Runner(base)
        session = Session(runner, drafter_specs.make(spec, runner))
        return [answer_question(session, spec, question, base, "tokenizer", max_new_tokens) for question in QUESTIONS]

    return live


@pytest.fixture
def files(tmp_path, toy_tokenizer):
    """Questions and tokenizer on disk, as arguments of the command."""
    toy_tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"question_id": q.question_id, "category": q.category, "turns": q.turns} for q in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "answers": str(tmp_path / "answers.jsonl"),
        "questions": str(tmp_path / "questions.jsonl"),
        "tokenizer": str(tmp_path / "tokenizer"),
        "template": "tokenizer",
    }


def fastchat(path, *lines):
    """Write lines of (question id, texts, new_tokens, idxs) as FastChat does."""
    rows = [
        {"question_id": i, "choices": [{"index": 0, "turns": texts, "new_tokens": counts, "idxs": steps}]}
        for i, texts, counts, steps in lines
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(**options):
    """Run the command with its options as flat as on the command line."""
    replay(**grouped(replay, options))


def refusal(function, *arguments, **named):
    with pytest.raises(ValueError) as caught:
        function(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("spec", [*SPECS, "bushes"])
@pytest.mark.parametrize(("seed", "noise"), [(3, 0.0), (11, 0.3)])
def test_a_replay_makes_the_steps_of_live_decoding(pseudo_runner, runner, spec, seed, noise):
    rng, cap = random.Random(0), 60
    alive = pseudo_runner(seed, context=90, noise=noise)
    alive.base.tokenizer = runner.base.tokenizer
    drafter = Bushes() if spec == "bushes" else drafter_specs.make(spec, alive)
    session = Session(alive, drafter)
    recorded, steps = [], []
    for turn in range(12):  # a drafter that keeps something across texts meets them in the same order
        prompt = [rng.randrange(12) for _ in range(rng.choice([1, 2, 9, 50]))]
        result = session.run(prompt, cap, frozenset({EOS}))
        recorded.append(Recording(turn, "any", 0, prompt, result.tokens, result.tokens[-1] == EOS))
        steps.append([(step.emitted, step.accepted, step.fed_pending, step.fed_candidates) for step in result.steps])
    assert {turn.ended for turn in recorded} == {True, False}
    replayed = list(decode(runner, Bushes() if spec == "bushes" else make(spec, runner), recorded, cap))
    assert [
        [(step.emitted, step.accepted, step.fed_pending, step.fed_candidates) for step in turn.steps]
        for turn in replayed
    ] == steps
    for turn, found in zip(recorded, replayed, strict=True):
        assert sum(step.emitted for step in found.steps) == len(turn.tokens)


def test_the_drafts_of_bushes_and_n_grams_are_accepted_sometimes(pseudo_runner):
    """Otherwise the test above would only compare steps of one token."""
    for drafter in (Bushes(), drafters.ANPD(), drafters.PromptLookup(), drafters.PromptLookup(3, 3, partial=False)):
        result = Session(pseudo_runner(seed=3), drafter).run([1, 2], 200)
        assert len(result.steps) < 190


@pytest.mark.parametrize(
    ("changes", "template", "prompt"),
    [({"system": "w12"}, "tokenizer", [12, 30, 31, 30]), ({"is_raw": True}, "vicuna_v1.1", [30, 31, 30])],
)
def test_a_recorded_prompt_has_the_system_prompt_and_a_raw_one_no_template(runner, tmp_path, changes, template, prompt):
    choice = {"turns": ["w3"], "token_ids": [[3]], "new_tokens": [1], "prompt_tokens": [len(prompt)]}
    (tmp_path / "answers.jsonl").write_text(json.dumps({"question_id": 9, "choices": [choice]}))
    asked = [replace(QUESTIONS[2], **changes)]
    recorded = recordings.read(tmp_path / "answers.jsonl", asked, runner.base, template)
    assert [turn.prompt for turn in recorded.turns] == [prompt]


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["anpd:order=3", "prompt_lookup"])
def test_answers_of_drafters_eval_are_replayed_with_their_own_tokens(live, runner, tmp_path, spec):
    alive = live(spec)
    records.write(tmp_path / "answers.jsonl", alive)
    recorded = recordings.read(tmp_path / "answers.jsonl", QUESTIONS, runner.base, "tokenizer", max_new_tokens=14)
    assert not recorded.mismatches
    assert [turn.tokens for turn in recorded.turns] == [turn.token_ids for a in alive for turn in a.turns]
    replayed = decode(runner, make(spec, runner), recorded.turns, max_new_tokens=14)
    costs = [[(step.emitted, step.fed) for step in turn.steps] for turn in replayed]
    assert costs == [[(step.emitted, step.fed) for step in turn.steps] for a in alive for turn in a.turns]


@pytest.mark.slow
def test_the_command_reports_the_metrics_of_live_decoding(live, files, tmp_path, capsys):
    records.write(files["answers"], live("none"))
    out = tmp_path / "out"
    run(**files, drafter=["anpd:order=3", "prompt_lookup"], max_new_tokens=14, out=str(out))
    results = json.loads((out / "results.json").read_text())
    for spec, found in results["results"].items():
        alive = live(spec)
        summary = metrics.summarise(alive, alive)
        steps = [step for a in alive for turn in a.turns for step in turn.steps]
        assert found["tokens_per_forward"] == pytest.approx(summary.tokens / len(steps))
        for name in ("acceptance_length", "acceptance_length_mean", "fed_per_step", "draft_hit_ratio", "tokens"):
            assert found[name] == pytest.approx(getattr(summary, name))
        for category, own in summary.by_category.items():
            assert found["by_category"][category]["acceptance_length"] == pytest.approx(own.acceptance_length)
    printed = " ".join(capsys.readouterr().out.split())
    assert "include the prefill" in printed and "5 of 5 turns were replayed" in printed
    written = (out / "results.md").read_text()
    assert "| prompt_lookup |" in written and "| second | 3 |" in written and "include the prefill" in written
    assert "already holds results" in refusal(run, **files, drafter=["anpd"], max_new_tokens=14, out=str(out))
    run(**files, drafter=["anpd"], max_new_tokens=14, out=str(out), overwrite=True, limit=1)
    assert list(json.loads((out / "results.json").read_text())["results"]) == ["anpd"]
    assert sorted(path.name for path in out.iterdir()) == ["results.json", "results.md"]


def test_rows_off_the_recorded_text_hold_no_token(runner):
    #      1 ─┬─ 5 ─┬─ 6          the recorded text goes on 5 6 7
    #         │     └─ 9 ── 7
    #         └─ 8 ── 6
    tree = DraftTree([5, 8, 6, 9, 6, 7], [-1, -1, 0, 0, 1, 3])
    runner.load([1, 5, 6, 7])
    rows = runner.forward([1], tree, RequiredOutputs())
    assert rows.logits.tolist() == [[5], [6], [NOT_RECORDED], [7], [NOT_RECORDED], [NOT_RECORDED], [NOT_RECORDED]]
    assert Recorded().accept(tree, rows.logits.tolist()) == ([0, 2], [5, 6, 7])
    runner.commit([0, 2])
    assert runner.cached == 3


def test_accepting_a_token_that_was_not_recorded_raises(runner):
    session = Session(runner, drafters.NoDrafter(), Recorded())
    runner.load([1, 5, 6])
    with pytest.raises(AssertionError, match="was accepted that was not recorded"):
        session.run([1], 3)
    with pytest.raises(AssertionError, match="not the recorded one"):
        session.run([4], 1)
    tree = DraftTree([5], [-1])
    with pytest.raises(AssertionError, match="was accepted that was not recorded"):
        Recorded().accept(tree, [[5], [NOT_RECORDED]])


@pytest.mark.parametrize("kind", ["model", "cascade", "learned", "hidden", "top", "told"])
def test_a_drafter_that_needs_the_base_is_refused_in_one_line(runner, base, tmp_path, monkeypatch, kind):
    class Hidden(drafters.NoDrafter):
        required_outputs = RequiredOutputs(hidden_layers=(-1,))

    class Top(drafters.NoDrafter):
        required_outputs = RequiredOutputs(top_k=1)

    class Told(drafters.NoDrafter):
        history_only = False

    for other in (Hidden, Top, Told):
        name = other.__name__.lower()
        monkeypatch.setitem(registry._REGISTRATIONS, name, registry.Registration(name, other))
    config = DrafterConfig(
        "drafters.CTC", {"num_frames": 4, "num_labels": 3}, base.shape, "toy", tokenizer_hash(base.tokenizer)
    )
    save(tmp_path / "ctc", config.build(), config)
    spec = {"model": "draft_model=nowhere", "cascade": "cascade=nowhere", "learned": f"ctc={tmp_path / 'ctc'}"}
    spec = spec.get(kind, kind)
    message = refusal(make, spec, runner)
    assert message.startswith(f"{spec} needs the base itself and cannot be replayed")


def test_fastchat_answers_are_tokenised_again_and_counted(runner, tmp_path):
    path = fastchat(
        tmp_path / "answers.jsonl",
        (7, ["w3 w4", "w3 w4 w5 w6"], [3, 4], [2, 3]),  # ended; cut by the cap of 4
        (8, ["w3 w4", "w3 w4 w5 w6"], [0, 5], [2, 4]),  # counted by idxs; two tokens of what it told are lost
        (9, ["w3 w4 w5"], [4], [3]),  # ended where the cap would have cut
    )
    fastchat(tmp_path / "lost.jsonl", (7, ["w3 w4"], [4], [3]), (8, ["w3 w4", "w9"], [2, 2], [1, 1]))
    with pytest.raises(ValueError, match="turn 2 has 5 tokens: pass its --max-new-tokens"):
        recordings.read(path, QUESTIONS, runner.base, "tokenizer", max_new_tokens=4)
    found = recordings.read(path, QUESTIONS, runner.base, "tokenizer", max_new_tokens=4, limit=1)
    first = [5, 6, 7, 5, 6]
    assert found.turns == [
        Recording(7, "first", 0, first, [3, 4, EOS], True),
        Recording(7, "first", 1, [*first, 3, 4, 9, 5], [3, 4, 5, 6], False),
    ]
    found = recordings.read(path, QUESTIONS, runner.base, "tokenizer", max_new_tokens=5)
    assert [(turn.question_id, turn.turn, turn.tokens) for turn in found.turns] == [
        (7, 0, [3, 4, EOS]),
        (8, 0, [3, 4, EOS]),
        (8, 1, [3, 4, 5, 6, EOS]),
        (9, 0, [3, 4, 5, EOS]),
    ]
    assert found.mismatches == [recordings.Mismatch(7, 1, recorded=4, retokenised=5)], "shorter than the cap, no end"
    found = recordings.read(tmp_path / "lost.jsonl", QUESTIONS, runner.base, "tokenizer", max_new_tokens=9)
    assert [(turn.question_id, turn.turn) for turn in found.turns] == [(8, 1)]
    assert found.turns[0].prompt == [11, 3, 4, 12, 11], "a turn left out still stands in the next prompt"
    assert [(m.question_id, m.turn, m.recorded, m.retokenised) for m in found.mismatches] == [
        (7, 0, 4, 3),
        (8, 0, 2, 3),
    ]


def test_turns_that_cannot_be_replayed_are_reported(files, tmp_path, capsys):
    fastchat(tmp_path / "answers.jsonl", (7, ["w3 w4"], [4], [3]), (8, ["w3 w4", "w9"], [2, 2], [1, 1]))
    run(**files, drafter=["anpd"], out=str(tmp_path / "out"))
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 of 3 turns were replayed" in printed
    assert "the first is question 7, turn 1, with 3 tokens instead of 4." in printed
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())["left_out"]) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: invalid JSON"),
        ("[]", "line 1: not a recorded answer"),
        ('{"question_id": 7, "choices": [{"turns": ["w3"]}]}', "line 1: not a recorded answer (KeyError: 'idxs'"),
        (
            '{"question_id": 70, "choices": [{"turns": ["w3"], "new_tokens": [2], "idxs": [1]}]}',
            "no such question 70: pass the --questions",
        ),
        (
            '{"question_id": 7, "choices": [{"turns": ["w3"], "token_ids": [[3]], "prompt_tokens": [6]}]}',
            "turn 1 had 6 prompt tokens, but 5 here: pass the --tokenizer, --template",
        ),
        ('{"question_id": 7, "choices": [{"turns": ["w3"], "new_tokens": [9], "idxs": [8]}]}', "no turn to replay; 1"),
        ("", "no turn to replay; 0"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(files, line, said):
    with open(files["answers"], "w") as file:
        file.write(line)
    assert said.partition(" (Key")[0] in refusal(run, **files, drafter=["anpd"])


def test_a_missing_file_and_an_end_inside_an_answer_are_refused(files, runner):
    assert "no such file" in refusal(run, **files, drafter=["anpd"])
    inside = Recording(7, "first", 0, [5], [6, EOS, 7], False)
    assert "question 7, turn 1 continues after" in refusal(list, decode(runner, drafters.ANPD(), [inside], 9))


def test_the_metrics_of_two_questions_computed_by_hand():
    def step(emitted, drafted):
        return StepCost(emitted, emitted - 1, 1, drafted, 0, 0, ())

    turns = [
        ReplayedTurn(1, "a", [step(2, 3), step(4, 3), step(1, 0)]),
        ReplayedTurn(2, "b", [step(1, 0)]),
        ReplayedTurn(1, "a", [step(1, 0), step(1, 2)]),
    ]
    found = measure(turns)
    assert (found.turns, found.tokens, found.tokens_per_forward) == (3, 10, 10 / 6)
    assert (found.acceptance_length, found.acceptance_length_mean) == (2.0, 2.0), "question 2 has only a prefill"
    assert (found.fed_per_step, found.draft_hit_ratio) == ((3 + 0 + 2 + 3) / 3, 3 / 5)


@pytest.mark.slow
def test_the_recorded_answers_of_vicuna_have_the_known_metrics(shared):
    """Section 8 of the reference: 146 of 160 turns, prefill counted as a step that may draft."""
    path = shared("data/base_outputs/ctc_drafter/vicuna-7b-mt_bench-greedy.jsonl")
    runner = ReplayRunner(RecordedBase("vicuna", load_tokenizer(str(shared("data/tokenizer")))))
    questions = load_questions("mt_bench", str(shared("data/mt_bench/question.jsonl")))
    recorded = recordings.read(path, questions, runner.base, "vicuna_v1.1")
    assert (len(recorded.turns), len(recorded.mismatches)) == (146, 14)
    known = {"anpd": 1.607, "anpd:update=false": 1.333, "prompt_lookup": 1.586, "prompt_lookup:partial=false": 1.579}
    for spec, expected in known.items():
        found = measure(list(decode(runner, make(spec, runner), recorded.turns, 512)))
        assert found.tokens == sum(len(turn.tokens) for turn in recorded.turns)
        assert found.tokens_per_forward == pytest.approx(expected, abs=0.002)
