"""Answers that our own server gives to `drafters regenerate`."""

from copy import deepcopy
from dataclasses import replace

import pytest

from data.conversations import parse
from inference.journal import Journal
from inference.options import GREEDY, AnswerOptions, SamplingOptions
from inference.regenerate.answerers import LocalAnswerer, ServerAnswerer
from inference.regenerate.command import answer_all
from inference.regenerate.dialogue import Dialogue

TEMPLATE = (
    "{%- for m in messages -%}{{- m.content + ' ' -}}"
    "{%- if m.role == 'assistant' -%}{{- eos_token + ' ' -}}{%- endif -%}{%- endfor -%}"
)
UNKNOWN = 0  # a special token, which no text shows
ASKED = [("w3 w4 w5", "w9"), ("w12", "w7 w8"), ("w20 w21",)]


@pytest.fixture(scope="module")
def chatting(make_base):
    """A toy base whose tokenizer has a chat template."""
    tokenizer = deepcopy(make_base().tokenizer)
    tokenizer.chat_template = TEMPLATE
    return replace(make_base(), tokenizer=tokenizer)


@pytest.mark.slow
def test_our_server_writes_what_the_base_in_this_process_writes(chatting, serve_base, tmp_path):
    said = [parse({"history": [[text, "-"] for text in texts]}, n) for n, texts in enumerate(ASKED)]

    def written(answerer, name, sampling, num_answers):
        options = AnswerOptions(max_new_tokens=9, num_answers=num_answers, batch_size=4)
        dialogues = [
            Dialogue(each, chatting.tokenizer, "tokenizer", None, n) for each in said for n in range(num_answers)
        ]
        with Journal(tmp_path / name, {}) as journal:
            counts = answer_all(dialogues, answerer, journal, options, sampling=sampling)
        assert not counts.num_other_prompts
        return dialogues

    with serve_base(chatting) as running:
        answerers = LocalAnswerer(chatting, 60), ServerAnswerer(running.url, "toy", 60, concurrency=3)
        for index, (sampling, num_answers) in enumerate([(GREEDY, 1), (SamplingOptions(1.5, top_p=0.9, seed=4), 2)]):
            local, served = (written(each, f"{index} {n}", sampling, num_answers) for n, each in enumerate(answerers))
            assert [each.messages for each in local] == [each.messages for each in served]
            assert [each.is_cut for each in local] == [each.is_cut for each in served]
            pairs = [
                pair
                for pair in zip(local, served, strict=True)
                if not any(pair[0].is_cut) and UNKNOWN not in pair[0].ids
            ]
            assert len(pairs) > index and all(one.ids == other.ids for one, other in pairs), "as tokens too"
    assert [each.id for each in local] == ["0", "0 answer 2", "1", "1 answer 2", "2", "2 answer 2"]
    assert local[0].messages != local[1].messages, "two answers to one prompt differ"
