"""The thinking switch of a chat template, as vLLM's clients set it for one request."""

from copy import deepcopy
from dataclasses import replace

import openai
import pytest

from inference import generate
from inference.serve.errors import ApiError
from inference.serve.requests import ChatRequest, TextLimits, read_request, texts_of

TEMPLATE = (
    "{%- for m in messages -%}{{- m.content + ' ' -}}{%- endfor -%}"
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false -%}"
    "{{- 'w30 w31 ' -}}{%- endif -%}"
)
MESSAGES = [{"role": "user", "content": "w3 w4 w5"}]
SWITCHES = (None, True, False)


@pytest.fixture(scope="module")
def thinking(make_base):
    """A toy base whose chat template has the switch."""
    tokenizer = deepcopy(make_base().tokenizer)
    tokenizer.chat_template = TEMPLATE
    return replace(make_base(), tokenizer=tokenizer)


def rendered(base, switch):
    """What transformers' own template renders."""
    options = {} if switch is None else {"enable_thinking": switch}
    return base.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False, **options)


def read(base, template, **fields):
    request = read_request(ChatRequest, {"model": "toy", "messages": MESSAGES, **fields})
    return texts_of(request, TextLimits(base, template, 100))[0].prompt


@pytest.mark.parametrize("template", ["tokenizer", "tokenizer:thinking=on", "tokenizer:thinking=off"])
def test_a_request_sets_the_switch_whatever_the_server_was_told(thinking, template):
    assert len(rendered(thinking, False)) == len(rendered(thinking, True)) + 2
    for switch in SWITCHES[1:]:
        asked = {"chat_template_kwargs": {"enable_thinking": switch}}
        assert read(thinking, template, **asked) == rendered(thinking, switch)
    own = {"on": True, "off": False}.get(template.rpartition("=")[2])
    for nothing in ({}, {"chat_template_kwargs": {}}, {"chat_template_kwargs": {"enable_thinking": None}}):
        assert read(thinking, template, **nothing) == rendered(thinking, own)


@pytest.mark.slow
def test_the_client_s_extra_body_reaches_the_template_and_mistakes_take_one_line(thinking, serve_base):
    with serve_base(thinking) as running, running.client() as client:

        def ask(**options):
            asked = {"model": "toy", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
            return client.chat.completions.create(**asked, extra_body={"chat_template_kwargs": options})

        for switch in SWITCHES[1:]:
            expected = generate(thinking, [rendered(thinking, switch)], "none", max_new_tokens=12, temperature=0.0)[0]
            assert ask(enable_thinking=switch).choices[0].message.content == expected.text
        for options, message in (
            ({"documents": []}, "chat_template_kwargs.documents is not supported: leave it out"),
            ({"enable_thinking": "yes"}, "chat_template_kwargs.enable_thinking: Input should be a valid boolean"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                ask(**options)


def test_a_template_without_the_switch_refuses_it(thinking):
    tokenizer, asked = deepcopy(thinking.tokenizer), {"chat_template_kwargs": {"enable_thinking": False}}
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ApiError, match="has no thinking switch"):
        read(replace(thinking, tokenizer=tokenizer), "tokenizer", **asked)
