"""Questions with a system prompt and tools, and reasoning in answers, from the file of questions to the results."""

import json
import shutil
from copy import deepcopy
from datetime import date

import pytest
import torch

from data import templates
from data.benchmarks import Question, load_questions
from data.conversations import user_message
from data.templates import ReasoningMarks
from drafters import NoDrafter
from inference.commands import evaluate
from inference.evaluate import plots
from inference.evaluate.own_loop import answer_question
from inference.evaluate.results import read
from inference.evaluate.run import marks_of
from inference.options import QuestionOptions
from inference.prompts import encode_first_prompt, encode_question
from inference.verifier.base import Base, load_base_info
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from train.arguments import grouped

TOOLS = [{"name": "w20"}, {"name": "w21"}]
ROWS = [
    {"turns": ["w9 w10", "w11"], "system": "w12 w13", "tools": TOOLS},
    {"turns": ["w9 w10"], "system": "w12 w13"},
    {"turns": ["w9 w10"], "tools": TOOLS},
    {"turns": ["w9 w10"], "system": None, "tools": None},
]


@pytest.fixture(scope="module")
def folder(make_base, thinking_tokenizer, tmp_path_factory):
    """A folder with a base whose texts contain the marks, and a file of questions."""
    folder = tmp_path_factory.mktemp("thinking")
    make_base(dtype=torch.float32, predictable=True).model.save_pretrained(folder / "base")
    thinking_tokenizer.save_pretrained(folder / "base")
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def test_system_prompts_and_tools_are_rendered_by_the_template_in_every_turn(folder, thinking_tokenizer):
    base, questions = load_base_info(str(folder / "base")), load_questions("file", str(folder / "questions.jsonl"))
    prompts = QuestionOptions(["file"], max_new_tokens=8).select(base, {"file": questions})["file"].prompts
    for row, prompt in zip(ROWS, prompts, strict=True):
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        messages, tools = [*system, {"role": "user", "content": row["turns"][0]}], row.get("tools")
        options = {"tools": tools, "add_generation_prompt": True, "return_dict": False}
        assert prompt == thinking_tokenizer.apply_chat_template(messages, **options)
    assert len(set(map(tuple, prompts))) == 4 and prompts[3] == thinking_tokenizer("w9 w10 w31").input_ids
    chat = [user_message("w9 w10"), {"role": "assistant", "content": "w14"}, user_message("w11")]
    later = encode_question(base, questions[0], chat, "tokenizer")
    assert later == thinking_tokenizer("w20 w21 w30 w12 w13 w9 w10 w14 w11 w31").input_ids


@pytest.mark.parametrize(
    ("row", "template", "said"),
    [
        (2, "vicuna_v1.1", "file, question 2: it has a list of tools, but the chat template ignores it: leave it out"),
        (1, "no system", "file, question 1: it has a system prompt, but the chat template ignores it: leave it out"),
    ],
)
def test_what_the_template_ignores_is_refused(folder, monkeypatch, row, template, said):
    base, questions = load_base_info(str(folder / "base")), load_questions("file", str(folder / "questions.jsonl"))
    if template == "no system":
        monkeypatch.setattr(base.tokenizer, "chat_template", "{{ messages[-1]['content'] }}")
        template = "tokenizer"
    with pytest.raises(ValueError, match=said):
        options = QuestionOptions(["file"], max_new_tokens=8, template=template)
        options.select(base, {"file": questions[row : row + 1]})
    default = "{% if messages[0]['role'] != 'system' %}w20 {% endif %}"
    default += "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    monkeypatch.setattr(base.tokenizer, "chat_template", default)
    asked = Question(1, "a", ("w9",), system="w20")  # which the template writes by default: it is not ignored
    assert encode_first_prompt(base, asked, "tokenizer") == base.tokenizer("w20 w9").input_ids


def test_a_raw_prompt_does_not_begin_the_reasoning():
    opened, raw = ReasoningMarks(("<think>", "</think>"), (5,), (8,), True), Question(1, "a", ("w9",), is_raw=True)
    assert marks_of([raw], opened).span([3, 4]) is None and marks_of([raw], opened).span([3, 8, 4]) == (0, 2)
    assert marks_of([Question(1, "a", ("w9",))], opened) == opened


def test_later_turns_see_the_marks_of_earlier_reasoning_where_they_are_special_tokens(make_base, thinking_tokenizer):
    tokenizer = deepcopy(thinking_tokenizer)
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'].split('<think>')[0] + ' ' }}{% endfor %}w31"
    base = Base("toy", make_base(dtype=torch.float32, predictable=True).model, tokenizer)
    session, asked = Session(Runner(base), NoDrafter()), Question(1, "a", ("w9 w10", "w11"))
    first, second = answer_question(session, "none", asked, "tokenizer", 9).turns
    assert first.token_ids[7] == 5 and first.text.split()[7] == "<think>"
    assert second.prompt_tokens == len(["w9", "w10", *first.token_ids[:7], "w11", "w31"])


def test_an_evaluation_tells_reasoning_from_the_rest_and_names_the_switch(folder, capsys, monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda summaries, colours: {})  # to draw them takes longest
    values = {"base": str(folder / "base"), "benchmark": [f"file={folder / 'questions.jsonl'}"]}
    values |= {"drafter": ["prompt_lookup"], "max_new_tokens": 24, "device": "cpu", "repeats": 1}
    evaluate(**grouped(evaluate, values | {"template": "tokenizer:thinking=on", "out": str(folder / "out")}))
    results = read(folder / "out")
    (by_drafter,) = results.summaries.values()
    for drafter, summary in by_drafter.items():
        turns = [turn for answer in results.answers["file"][drafter] for turn in answer.turns]
        marked = [turn for turn in turns if {5, 8} & set(turn.token_ids)]
        assert 0 < summary.reasoning.turns == len(marked)
        steps = sum(len(turn.steps) - 1 for turn in marked)
        assert summary.reasoning.inside_steps + summary.reasoning.outside_steps == steps
    assert by_drafter["prompt_lookup"].reasoning.outside.value > 1
    assert results.conditions.template == "tokenizer:thinking=on"
    assert "Template: tokenizer:thinking=on" in capsys.readouterr().out
    assert "in reasoning" in (folder / "out" / "results.md").read_text()


class Tomorrow(date):
    @classmethod
    def today(cls):
        return cls(2031, 2, 3)


def test_the_results_keep_the_date_that_a_template_wrote_and_go_on_with_it_tomorrow(
    folder, thinking_tokenizer, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(plots, "draw_all", lambda summaries, colours: {})
    dated = shutil.copytree(folder / "base", tmp_path / "base")
    tokenizer = deepcopy(thinking_tokenizer)
    tokenizer.chat_template = "{{ strftime_now('w%d') }} {% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(dated)
    asked = {"base": str(dated), "benchmark": ["embedded"], "limit": 1, "drafter": ["anpd"], "max_new_tokens": 3}
    asked |= {"device": "cpu", "repeats": 1, "out": str(tmp_path / "out")}
    evaluate(**grouped(evaluate, asked))
    name = f"tokenizer:date={date.today()}"
    assert read(tmp_path / "out").conditions.template == name and f"Template: {name}" in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"was started with template '{name}' instead of 'tokenizer:date=2025-03-04'"):
        evaluate(**grouped(evaluate, asked | {"template": "tokenizer:date=2025-03-04"}))
    monkeypatch.setattr(templates, "date", Tomorrow)
    for again in (asked, asked | {"template": name}):
        evaluate(**grouped(evaluate, again))
        assert "already held every answer" in capsys.readouterr().out
