"""The score of a base alone, from answers decoded together."""

import json
import re
from functools import partial

import pytest

from benchmarks import task_quality
from data.conversations import user_message
from data.templates import decode_answer, encode_prompt
from inference.regenerate import answerers
from inference.verifier.base import load_base
from tests.conftest import refusal

BASE, CAP = "checkpoints/tiny-chat", 60


@pytest.fixture(scope="module")
def answers():
    """Answers to three questions, each decoded alone, and how many of them were cut."""
    base, found = load_base(BASE), {}
    for question in ("Count from 1 to 5.", "What is 2 plus 2?", "List three numbers."):
        prompt = encode_prompt([user_message(question)], base.tokenizer, "tokenizer")
        found[question] = answerers.decode_batch(base, [prompt], [CAP])[0]
    num_cut = sum(answer[-1] not in base.eos for answer in found.values())
    return {question: decode_answer(answer, base.tokenizer) for question, answer in found.items()}, num_cut


@pytest.fixture
def run(answers, tmp_path):
    """Asks them; the references of the first and the last are the last numbers of these answers."""
    first, *_, last = ((question, re.findall(r"\d+", text)[-1]) for question, text in answers[0].items())
    rows = [
        {"question": text, "answer": f"#### {number}"} for text, number in (first, ("What is 2 plus 2?", "x"), last)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"dtype": "float32", "device": "cpu", "max_new_tokens": CAP, "batch_size": 2}
    options["out"] = str(tmp_path / "out.md")
    return partial(task_quality.task_quality, BASE, [f"gsm8k={tmp_path / 'questions.jsonl'}"], **options)


def test_the_score_is_that_of_each_question_alone(run, answers, tmp_path):
    run()
    row = next(line for line in (tmp_path / "out.md").read_text().splitlines() if line.startswith("| gsm8k"))
    _, count, quality, cut = row.strip("| ").split(" | ")
    assert (count, cut) == ("3", f"{100 * answers[1] / 3:.1f}")
    assert re.fullmatch(r"exact match 66\.7 \([\d.]+-[\d.]+\)", quality)


def test_a_run_that_was_stopped_decodes_only_what_is_missing(run, monkeypatch, tmp_path):
    run()
    kept, out = tmp_path / "out.md.jsonl", tmp_path / "out.md"
    whole, table = kept.read_bytes(), out.read_text().partition("##")[2]
    kept.write_bytes(whole[:-5])  # within the last batch
    decoded, decode = [], answerers.decode_batch
    monkeypatch.setattr(answerers, "decode_batch", lambda *args: decoded.append(len(args[1])) or decode(*args))
    run()
    assert decoded == [1] and kept.read_bytes() == whole and out.read_text().partition("##")[2] == table
    run()
    assert decoded == [1], "nothing is left"
    assert "different caps" in refusal(run, max_new_tokens=3) and kept.read_bytes() == whole
