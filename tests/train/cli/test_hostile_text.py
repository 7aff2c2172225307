"""Text from files, models, servers and folder names does nothing to the terminal or to what a command writes."""

import json
import shutil
import sys

import pytest

from drafters.checkpoint import read_config
from train.cli import commands
from train.export.export import model_card

HOSTILE = "\x1b]0;title\x0e\x9b2J\x7f\u202e[/]"


def is_harmless(text):
    return not any(mark in text for mark in ("\x1b", "\x0e", "\x9b", "\x7f", "\u202e"))


def test_show_mask_shows_control_characters_and_brackets_of_a_conversation(call, tiny, tmp_path):
    turns = [{"from": "human", "value": f"hello {HOSTILE}"}, {"from": "gpt", "value": HOSTILE}]
    records = [{"id": f"first{HOSTILE}", "conversations": turns}, {"conversations": [{"from": HOSTILE, "value": ""}]}]
    (tmp_path / "some.json").write_text(json.dumps(records))
    outcome = call(commands.main, "show-mask", "--tokenizer", tiny, "--files", tmp_path / "some.json")
    assert outcome.code == 0, outcome.err
    assert "first␛]0;title␎" in outcome.out and outcome.out.count("[/]") >= 3
    assert is_harmless(outcome.out + outcome.err)


def test_an_error_of_a_template_is_harmless(call, tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "base")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('" + HOSTILE + "') }}")
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hello"}]
    (tmp_path / "some.json").write_text(json.dumps([{"conversations": turns}]))
    error = call(commands.main, "show-mask", "--tokenizer", folder, "--files", tmp_path / "some.json").one_line_error(
        "drafters"
    )
    assert "␛]0;title␎" in error and is_harmless(error)


def test_an_error_names_a_hostile_folder_harmlessly(call):
    error = call(commands.main, "verify", "--base", f"./{HOSTILE}", "--drafter", "anpd").one_line_error("drafters")
    assert "␛]0;title␎" in error and is_harmless(error)


def test_a_count_of_recorded_answers_shows_hostile_names(call, tmp_path):
    answers = tmp_path / f"a{HOSTILE.replace('[/]', '[red]')}.jsonl"
    choice = {"turns": ["x"], "new_tokens": [20], "idxs": [9], "wall_time": [1.0]}
    answers.write_text(json.dumps({"question_id": 1, "category": f"{HOSTILE}|\rx", "choices": [choice]}))
    line = ("report", "--answers", answers, "--baseline", answers, "--out", tmp_path / "out")
    outcome = call(commands.main, *line)
    assert outcome.code == 0, outcome.err
    page = (tmp_path / "out.md").read_text()
    assert "a␛]0;ti" in outcome.out and "a␛\\]0;title␎" in page
    assert is_harmless(outcome.out) and is_harmless(page) and "\r" not in page


@pytest.mark.parametrize("name", ["owner/base", f"owner/{HOSTILE}`x`\n- injected: yes\r# Title", "a: b"])
def test_a_model_card_names_its_base_without_becoming_another_card(name, trained):
    import yaml

    config = read_config(trained.folder)
    object.__setattr__(config, "base_name", name)
    card = model_card(config, 1)
    plain = model_card(read_config(trained.folder), 1)
    assert is_harmless(card) and len(card.splitlines()) == len(plain.splitlines())
    header = yaml.safe_load(card.split("---\n")[1])
    assert header.keys() == {"base_model", "library_name", "tags"} and header["base_model"].startswith(name[:6])
    assert all(line.count("`") % 2 == 0 for line in card.splitlines())


def test_a_key_that_a_server_echoes_is_not_stored_or_printed(call, chat_server, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-123456")
    turns = [{"from": "human", "value": "say sk-123456"}]
    (tmp_path / "asked.json").write_text(json.dumps([{"conversations": turns}]))
    out = tmp_path / "out.jsonl"
    line = ("regenerate", "--base", tiny, "--endpoint", chat_server.url, "--model", "m", "--out", out)
    outcome = call(commands.main, *line, "--files", tmp_path / "asked.json")
    assert outcome.code == 0, outcome.err
    answer = json.loads(out.read_text())["messages"][1]["content"]
    assert answer == "[OPENAI_API_KEY] say"
    assert "sk-123456" not in outcome.out + outcome.err


@pytest.mark.slow
def test_a_traceback_with_debug_on_holds_no_key(call, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-123456")
    monkeypatch.setenv("DRAFTERS_DEBUG", "1")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(ValueError) as raised:
        call(commands.main, "verify", "--base", "./sk-123456", "--drafter", "anpd")
    sys.excepthook(raised.type, raised.value, raised.tb)
    said = capsys.readouterr().err
    assert "Traceback" in said and "[OPENAI_API_KEY]" in said and "sk-123456" not in said
