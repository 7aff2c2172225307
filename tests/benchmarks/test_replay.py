"""Replay: the steps of live decoding from nothing but its text, and what recorded files may hold."""

import json
import random

import pytest

import drafters
from benchmarks.replay import NOT_RECORDED, RecordedRunner, RecordedSampler, RecordedTurn, decode, measure, read, replay
from data.benchmarks import Question, load_questions
from data.tokenizer import load_tokenizer
from drafters import DraftTree, RequiredOutputs
from inference import drafter_specs
from inference.verifier.base import BaseConfig
from inference.verifier.session import Session, Step
from tests.conftest import refusal

EOS = 2
QUESTIONS = [
    Question(7, "first", ("w5 w6 w7 w5 w6", "w9 w5")),
    Question(8, "second", ("w11", "w12 w11")),
    Question(9, "second", ("w30 w31 w30",)),
]


class Bushes(drafters.Drafter):
    """Trees with junk, duplicates and scratch that only the last tokens and the texts before decide."""

    texts = 0

    def begin(self, prompt):
        self.texts += 1

    def propose(self, seq, limits):
        rng = random.Random(str((seq[-2:], self.texts)))
        tree = DraftTree.from_paths([[rng.randrange(12) for _ in range(rng.randrange(5))] for _ in range(12)])
        return tree.with_scratch([1, 2], [-1, len(tree) - 1])


def config_of(tokenizer):
    from transformers import PretrainedConfig

    return BaseConfig("a recording", tokenizer, PretrainedConfig.from_dict({"max_position_embeddings": 1 << 30}))


@pytest.fixture
def recorded_base(toy_tokenizer):
    return config_of(toy_tokenizer)


@pytest.fixture
def files(tmp_path, toy_tokenizer):
    """Questions and tokenizer on disk, as arguments of the command."""
    toy_tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"question_id": q.question_id, "category": q.category, "turns": q.turns} for q in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"questions": "questions.jsonl", "tokenizer": "tokenizer", "answers": "answers.jsonl"}
    return {option: str(tmp_path / name) for option, name in names.items()} | {"template": "tokenizer"}


def line(number=7, **choice):
    return json.dumps({"question_id": number, "choices": [{"turns": ["w3"]} | choice]}) + "\n"


@pytest.mark.parametrize(
    "spec", ["none", "anpd:order=2,num_draft=3", "anpd:update=false", "prompt_lookup", "joint:runner_up=0", "bushes"]
)
@pytest.mark.parametrize(("seed", "noise"), [(3, 0.0), (11, 0.3)])
def test_a_replay_makes_the_steps_of_live_decoding(pseudo_runner, recorded_base, spec, seed, noise):
    def make():
        return Bushes() if spec == "bushes" else drafter_specs.builder_from_tokens(spec, recorded_base)()

    rng, cap, recorded, live = random.Random(0), 60, [], []
    session = Session(pseudo_runner(seed, context=90, noise=noise), make())
    for turn in range(12):  # a drafter that keeps something across texts meets them in the same order
        prompt = [rng.randrange(12) for _ in range(rng.choice([1, 2, 9, 50]))]
        result = session.run(prompt, cap, frozenset({EOS}))
        recorded.append(RecordedTurn(Question(turn, "any", ("",)), prompt, result.tokens, result.tokens[-1] == EOS))
        live.append(result.steps)
    assert {ended for *_, ended in recorded} == {True, False}
    assert any(step.accepted for steps in live for step in steps) or spec == "none"
    counts = [
        [[(s.emitted, s.accepted, s.fed_pending, s.fed_candidates, s.fed_scratch) for s in steps] for steps in each]
        for each in (live, decode(recorded_base, make(), recorded, cap))
    ]
    assert counts[0] == counts[1]


def test_rows_off_the_recorded_text_hold_no_token(recorded_base):
    #      1 ─┬─ 5 ─┬─ 6          the recorded text goes on 5 6 7
    #         │     └─ 9 ── 7
    #         └─ 8 ── 6
    tree = DraftTree([5, 8, 6, 9, 6, 7], [-1, -1, 0, 0, 1, 3])
    runner = RecordedRunner(recorded_base, [1, 5, 6, 7])
    runner.reset()
    rows = runner.forward([1], tree, RequiredOutputs())
    assert rows.logits.tolist() == [[5], [6], [NOT_RECORDED], [7], [NOT_RECORDED], [NOT_RECORDED], [NOT_RECORDED]]
    assert RecordedSampler().accept(tree, rows.logits.tolist()) == ([0, 2], [5, 6, 7])
    runner.commit([0, 2])
    assert runner.cached == 3


def test_fastchat_answers_are_tokenised_again_and_counted(recorded_base, tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(
        line(7, turns=["w3 w4", "w3 w4 w5 w6"], new_tokens=[3, 4], idxs=[2, 3])  # ended; cut by the cap of 4
        # counted by idxs; a token of what it told is lost
        + line(8, turns=["w3 w4", "w9"], new_tokens=[0, 3], idxs=[2, 2])
    )
    asked, first = {question.question_id: question for question in QUESTIONS}, [5, 6, 7, 5, 6]
    assert list(read(str(path), asked, recorded_base, "tokenizer", 4)) == [
        (QUESTIONS[0], first, [3, 4, EOS], True),
        (QUESTIONS[0], [*first, 3, 4, 9, 5], [3, 4, 5, 6], False),
        (QUESTIONS[1], [11], [3, 4, EOS], True),
        (QUESTIONS[1], [11, 3, 4, 12, 11], [], True),
    ]
    assert [tokens for _, _, tokens, _ in read(str(path), asked, recorded_base, "tokenizer", 5)][1] == [], (
        "no cut, no end"
    )


def test_answers_of_drafters_eval_are_replayed_with_their_own_tokens(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with open(files["answers"], "w") as file:
        file.write(line(9, token_ids=[[3, 3, 3, 3]], ended=[False], prompt_tokens=[3]))
    for spec in ("draft_model=nowhere", "self_speculative", "ctc=nowhere", "token_recycling", "joint"):
        with pytest.raises(ValueError, match="and here are only tokens"):
            replay(**files, drafter=[spec])
    replay(**files, drafter=["none", "prompt_lookup"], max_new_tokens=4)
    printed = capsys.readouterr().out
    assert "prompt_lookup" in printed and "1 of 1 turns; tokens per forward count the prefill." in printed


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (line(), "line 1: no 'new_tokens'; it is no recorded answer to --questions"),
        (line(token_ids=[[3]], ended=[True], prompt_tokens=[6]), "other lengths: pass its --tokenizer, --template"),
        (line(new_tokens=[9], idxs=[8]), "none of 1 turns can be replayed"),
        (line(new_tokens=[600], idxs=[8]), "--max_new_tokens"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(files, recorded_base, line, said):
    with open(files["answers"], "w") as file:
        file.write(line)
    assert said in refusal(replay, **files, drafter=["anpd"])
    with pytest.raises(ValueError, match="an answer to 7 goes on after 2"):
        list(decode(recorded_base, drafters.ANPD(), [RecordedTurn(QUESTIONS[0], [5], [6, EOS, 7], False)], 9))


def test_the_figures_of_two_questions_computed_by_hand():
    def step(emitted, drafted):
        return Step(emitted, emitted - 1, 1, drafted, 0, 0, ())

    one, two = QUESTIONS[0], QUESTIONS[1]
    turns = [(one, [step(2, 3), step(4, 3), step(1, 0)]), (two, [step(1, 0)]), (one, [step(1, 0), step(1, 2)])]
    assert list(measure(turns).values()) == [10 / 6, 2.0, 2.0, (3 + 0 + 2 + 3) / 3, 3 / 5], (
        "question 8 has only a prefill"
    )


@pytest.mark.slow
def test_the_recorded_answers_of_vicuna_have_the_known_figures(shared):
    """Section 8 of the reference: 146 of 160 turns, prefill counted as a step that may draft."""
    path = shared("data/base_outputs/ctc_drafter/vicuna-7b-mt_bench-greedy.jsonl")
    base = config_of(load_tokenizer(str(shared("data/tokenizer"))))
    questions = load_questions("mt_bench", str(shared("data/mt_bench/question.jsonl")))
    found = list(read(str(path), {each.question_id: each for each in questions}, base, "vicuna_v1.1", 512))
    recorded = [turn for turn in found if turn[2]]
    assert (len(recorded), len(found)) == (146, 160)
    known = {"anpd": (1.607, 1.605), "prompt_lookup": (1.586, 1.584), "joint:runner_up=0": (1.874, 1.869)}
    for spec, expected in known.items():
        steps = decode(base, drafter_specs.builder_from_tokens(spec, base)(), recorded, 512)
        figures = measure([(turn[0], own) for turn, own in zip(recorded, steps, strict=True)])
        assert [round(figure, 3) for figure in list(figures.values())[:2]] == list(expected)
