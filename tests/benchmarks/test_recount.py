"""Published answers counted again by every convention."""

import json
from pathlib import Path

import pytest

from benchmarks import recount
from inference.evaluate.answers import Answer, Turn, to_json
from inference.evaluate.figures import acceptance_length
from inference.verifier.session import Step
from tests.conftest import refusal

RECORDED = Path(__file__).parents[3] / "shared" / "data" / "base_outputs" / "ctc_drafter"
PAPERS, BASELINE = RECORDED / "vicuna-7b-mt_bench-ctc.jsonl", RECORDED / "vicuna-7b-mt_bench-greedy.jsonl"


def write(path, *rows):
    """Write a file of rows (question id, choice)."""
    lines = [{"question_id": number, "model_id": "m", "choices": [choice]} for number, choice in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def choice(turns, idxs, new_tokens, wall_time, **more):
    return {"turns": turns, "idxs": idxs, "new_tokens": new_tokens, "wall_time": wall_time} | more


@pytest.fixture
def files(tmp_path):
    """Two questions; the drafter writes 12 tokens in 4 steps, then 9 in 6; the base one token per step."""
    ours = write(
        tmp_path / "ours.jsonl",
        (1, choice(["a b", "c"], [1, 1], [8, 4], [1.0, 2.0])),
        (2, choice(["d"], [5], [9], [3.0])),
    )
    base = write(
        tmp_path / "base.jsonl",
        (2, choice(["e"], [9], [0], [5.0])),  # 0 tokens are recorded: 10, one for each step
        (1, choice(["a b", "z"], [5, 3], [6, 4], [4.0, 6.0])),
    )
    return ours, base


def count(files):
    return recount.figures(recount.pair(*map(recount.read, files)))


def test_every_convention_equals_a_count_by_hand(files, capsys):
    assert count(files) == {
        "beta, CTC paper": pytest.approx((12 / 2 + 9 / 5) / 2),
        "acceptance length, mean": pytest.approx((12 / 4 + 9 / 6) / 2),
        "acceptance length, micro": pytest.approx(21 / 10),
        "gamma, CTC paper": pytest.approx(((12 / 3) / (10 / 10) + (9 / 3) / (10 / 5)) / 2),
        "speed-up, Spec-Bench": pytest.approx((12 / 3 + 9 / 3) / (10 / 10 + 10 / 5)),
        "speed-up, micro": pytest.approx((21 / 6) / (20 / 15)),
    }
    recount.recount([str(files[0])], str(files[1]))
    printed = capsys.readouterr().out
    assert "3.90" in printed and "identical turns: 1 of 3 (33.3 %)" in printed


def test_step_lengths_are_counted_if_a_file_has_them(tmp_path, files):
    told = {"turns": ["a", "b"], "decoding_steps": [2, 1], "new_tokens": [6, 1], "wall_time": [1.0, 1.0]}
    path = write(tmp_path / "spec.jsonl", (1, told | {"accept_lengths": [4, 2, 1]}))
    assert recount.read(path)[1].index == 1 + 0, "decoding_steps are a count, idxs an index"
    found = count((path, files[1]))
    assert found["acceptance length, micro"] == pytest.approx(7 / 3)
    assert found["beta, CTC paper"] == pytest.approx(7 / 1)


def test_our_own_records_count_as_our_metrics_do(tmp_path):
    def answer(drafter, question_id, gains):
        steps = [Step(n, n - 1, 1, 3, 0, 0, (0.1,) * 5) for n in gains]
        turn = Turn("text", list(range(sum(gains))), 5, steps, 0.5 * len(gains), True)
        return Answer(question_id, "math", drafter, [turn, turn])

    given = [answer("ctc", 1, [1, 4, 3, 1]), answer("ctc", 2, [1, 2])]
    alone = [answer("none", 1, [1] * 9), answer("none", 2, [1] * 3)]
    files = tmp_path / "ctc.jsonl", tmp_path / "none.jsonl"
    for path, own in zip(files, (given, alone), strict=True):
        path.write_text("".join(json.dumps(to_json(answer)) + "\n" for answer in own))
    found = count(files)
    assert found["acceptance length, micro"] == acceptance_length(turn for each in given for turn in each.turns) == 2.5
    assert found["speed-up, micro"] == pytest.approx(12 / 6)


@pytest.mark.slow
@pytest.mark.skipif(not PAPERS.is_file(), reason="the recorded answers are not here")
def test_the_papers_own_files_give_the_papers_own_numbers(capsys):
    found = count((PAPERS, BASELINE))
    assert f"{found['beta, CTC paper']:.2f}" == "3.56", "Table 1, Vicuna-7B on MT-bench"
    assert f"{found['gamma, CTC paper']:.2f}" == "2.78"
    assert f"{found['acceptance length, micro']:.2f}" == "3.50"
    recount.recount([str(PAPERS)], str(BASELINE))
    printed = capsys.readouterr().out
    assert all(number in printed for number in ("3.56", "2.78", "3.50", "identical turns: 4 of 160 (2.5 %)"))


GOOD = choice(["a"], [1], [2], [1.0])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("[1]", "line 1: list indices must be integers"),
        ("\n\n[", "bad.jsonl line 3: invalid JSON"),
        ([(1, {"turns": ["a"], "idxs": [1]})], "line 1: no 'new_tokens'; it is not a recorded answer"),
        ([(1, choice(["a"], [1], [-2], [1.0]))], "a count is negative"),
        ([(3, GOOD)], "question 3: the baseline has no answer of as many turns: pass the same questions"),
        ([(1, GOOD)], "question 1: the baseline has no answer of as many turns"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(files, tmp_path, rows, said):
    path = tmp_path / "bad.jsonl"
    path.write_text(rows) if isinstance(rows, str) else write(path, *rows)
    assert said in refusal(recount.recount, [str(path)], str(files[1]))
