"""What a chat template reads of a request: messages with all that they hold, and tools."""

import json
from copy import deepcopy
from dataclasses import replace

import openai
import pytest

TEMPLATE = (
    "{%- for tool in tools or [] -%}{{- 'tool ' + tool.function.name + ' ' -}}{%- endfor -%}"
    "{%- for m in messages -%}{{- m.role + ' ' + m.content + ' ' -}}"
    "{%- for key in ['reasoning_content', 'name', 'tool_call_id', 'tool_plan'] -%}"
    "{%- if m[key] -%}{{- key + ' ' + m[key] + ' ' -}}{%- endif -%}{%- endfor -%}"
    "{%- for call in m.tool_calls or [] -%}"
    "{{- (call.id or '') + ' ' + call.function.name + ' ' -}}"
    "{%- for key, value in call.function.arguments.items() -%}{{- key + ' ' + value + ' ' -}}{%- endfor -%}"
    "{%- endfor -%}{%- endfor -%}{%- if add_generation_prompt -%}{{- 'assistant ' -}}{%- endif -%}"
)
CALL = {"id": "w20", "type": "function", "function": {"name": "w21", "arguments": '{"w22": "w23"}'}}
TOOL = {"type": "function", "function": {"name": "w21", "parameters": {"type": "object", "properties": {}}}}
USER, BEGIN = {"role": "user", "content": "w3"}, "user w3 "
CHATS = {
    "text parts": ([{"role": "user", "content": [{"type": "text", "text": "w3"}, {"type": "text", "text": "w4"}]}],
        "user w3\nw4 "),
    "a developer": ([{"role": "developer", "content": "w5"}, USER], "system w5 " + BEGIN),
    "a name": ([USER | {"name": "w6"}], BEGIN + "name w6 "),
    "reasoning": ([USER, {"role": "assistant", "content": "w5", "reasoning_content": "w6"}, USER],
        BEGIN + "assistant w5 reasoning_content w6 " + BEGIN),
    "what only some templates read": ([USER, {"role": "assistant", "content": "w5", "tool_plan": "w6"}, USER],
        BEGIN + "assistant w5 tool_plan w6 " + BEGIN),
    "a call and its result": ([USER, {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "content": "w9", "tool_call_id": "w20"}],
        BEGIN + "assistant  w20 w21 w22 w23 tool w9 tool_call_id w20 "),
    "calls of OpenAI's older form": ([USER, {"role": "assistant", "content": None, "function_call": CALL["function"]
        }, {"role": "function", "content": "w9", "name": "w21"}],
        BEGIN + "assistant w21 w22 w23 tool w9 name w21 "),
}  # fmt: skip


@pytest.fixture(scope="module")
def chatting(make_base):
    """A toy base whose tokenizer has a template that writes what messages hold."""
    tokenizer = deepcopy(make_base().tokenizer)
    tokenizer.chat_template = TEMPLATE
    words = ["system", "user", "assistant", "tool", "name", "reasoning_content", "tool_call_id", "tool_plan"]
    vocab = json.loads(tokenizer.backend_tokenizer.to_str())
    for index, word in enumerate(words, 30):  # in the places of w30 to w37
        del vocab["model"]["vocab"][f"w{index}"]
        vocab["model"]["vocab"][word] = index
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(vocab))
    return replace(make_base(context=512), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def prompts(chatting, serve_base):
    """Asks a server, and returns the text of the prompt that it has read."""
    with serve_base(chatting) as running:
        read, steps = [], running.decoder.steps

        def recorded(asked, prompt):
            read.append(prompt)
            return steps(asked, prompt)

        running.decoder.steps = recorded

        def ask(**asked):
            reply = running.client().chat.completions.create(model="toy", max_tokens=2, temperature=0, **asked)
            assert reply.usage.prompt_tokens == len(read[-1])
            return chatting.tokenizer.decode(read[-1])

        yield ask


@pytest.mark.parametrize("name", CHATS)
def test_a_template_reads_what_a_message_holds(prompts, name):
    messages, expected = CHATS[name]
    assert prompts(messages=messages) == " ".join(f"{expected}assistant".split())


def test_tools_reach_the_template_unless_none_may_be_called(prompts):
    chat = [USER]
    assert prompts(messages=chat, tools=[TOOL]) == "tool w21 user w3 assistant"
    assert prompts(messages=chat, tools=[TOOL], tool_choice="auto") == "tool w21 user w3 assistant"
    assert prompts(messages=chat, tools=[TOOL], tool_choice="none") == "user w3 assistant"
    assert prompts(messages=chat, tools=[], parallel_tool_calls=True) == "user w3 assistant"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tools": [5]}, "tools is not a list of objects"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [5]}]}, "tool_calls is not a list of objects like"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "tool_calls is not a list"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "a turn has no text"),
        ({"messages": [USER | {"content": [{"type": "input_audio"}]}]}, "parts that are not texts"),
    ],
)
def test_what_no_template_could_read_is_refused_in_one_line(prompts, asked, message):
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        prompts(**{"messages": [USER]} | asked)
    assert "\n" not in refused.value.body["message"]
