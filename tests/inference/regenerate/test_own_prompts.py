"""Prompts of the base's own: what it draws in a user's place, each once, also after an interruption."""

from copy import deepcopy
from dataclasses import replace

import pytest

from data.conversations import user_message
from drafters import NoDrafter
from inference.journal import Journal
from inference.options import AnswerOptions
from inference.regenerate import command
from inference.regenerate.answerers import NUM_SEEDS, LocalAnswerer, ServerAnswerer
from inference.regenerate.command import own_prompts, user_turn
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler, derived_seed
from inference.verifier.session import Session

TEMPLATE = (
    "{{- 'w3 ' }}{%- for m in messages -%}{{- m.content + ' w9' + '\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt %}{{- 'w7' }}{%- endif %}"
)
COUNT, SEED = 40, 5


@pytest.fixture(scope="module")
def chatting(make_base):
    """A toy base whose user messages end with w9."""
    tokenizer = deepcopy(make_base().tokenizer)
    tokenizer.chat_template = TEMPLATE
    return replace(make_base(), tokenizer=tokenizer)


def written(base, journal, batch_size=3):
    options = AnswerOptions(own_prompts=COUNT, batch_size=batch_size)
    return own_prompts(LocalAnswerer(base, 50), base.tokenizer, options, SEED, journal)


@pytest.mark.slow
def test_messages_are_what_the_base_draws_in_a_users_place_up_to_the_end_of_the_turn(chatting, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "OWN_PROMPTS", replace(command.OWN_PROMPTS, temperature=2.5))  # so that some end
    tokenizer, expected = chatting.tokenizer, {}
    before, end = user_turn(tokenizer, "tokenizer")
    assert (before.strip(), end) == ("w3", "w9")
    prompt = tokenizer(before, add_special_tokens=False).input_ids
    for place in range(COUNT):
        sampler = KeyedSampler(2.5, 0, 1.0, derived_seed(SEED, place) % NUM_SEEDS)
        tokens = Session(Runner(chatting), NoDrafter(), sampler).run(prompt, 50 - len(prompt), chatting.eos).tokens
        message, mark, _ = tokenizer.decode(tokens).partition(end)
        if mark and message.strip():
            expected.setdefault(message.strip().lower(), message.strip())
    assert 1 < len(expected) < COUNT
    with Journal(tmp_path / "a", {}) as journal:
        found = written(chatting, journal)
    assert [each.messages for each in found] == [(user_message(text),) for text in expected.values()]
    lines = (tmp_path / "a").read_text().splitlines(keepends=True)
    (tmp_path / "a").write_text("".join(lines[:5]))
    with Journal(tmp_path / "a", {}) as journal:
        assert written(chatting, journal) == found
    assert (tmp_path / "a").read_text() == "".join(lines), "what was there was not drawn again"


def test_a_server_continues_the_text_before_a_users_message(chatting, chat_server, tmp_path):
    answerer = ServerAnswerer(chat_server.url, "toy", 50)
    with Journal(tmp_path / "a", {}) as journal:
        options = AnswerOptions(own_prompts=COUNT, batch_size=8)
        found = own_prompts(answerer, chatting.tokenizer, options, SEED, journal)
    assert sorted(each.messages[0]["content"] for each in found) == ["number 0", "number 1", "number 2"]
    path, _, body = chat_server.seen[0]
    assert path == "/v1/completions" and len(chat_server.seen) == COUNT
    assert (body["prompt"], body["stop"]) == (chatting.tokenizer("w3", add_special_tokens=False).input_ids, ["w9"])
    assert len({body["seed"] for *_, body in chat_server.seen}) == COUNT


def test_a_template_that_ends_no_message_and_a_base_that_ends_none_are_refused(chatting, tmp_path, monkeypatch):
    tokenizer = deepcopy(chatting.tokenizer)
    tokenizer.chat_template = "{%- for m in messages -%}{{- m.content -}}{%- endfor -%}"
    with pytest.raises(ValueError, match="writes nothing behind a user's message"):
        user_turn(tokenizer, "tokenizer")
    monkeypatch.setattr(command, "MAX_PROMPT_TOKENS", 1)
    with pytest.raises(ValueError, match="the base ends none of 40 messages"), Journal(tmp_path / "a", {}) as journal:
        written(chatting, journal)
