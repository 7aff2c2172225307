"""Loss masks of templates that write earlier turns in another way, and of conversations with reasoning and tools.

``DRAFTERS_TEMPLATES=FOLDER pytest tests/data/test_loss_mask.py`` also checks the chat templates of real models, which
the folder holds as NAME.jinja.
"""

import json
import os
from itertools import groupby
from pathlib import Path

import pytest

from data.conversation import TEMPLATES, Conversation, encode, parse
from data.sharegpt import load_conversations, tokenise

SYSTEM = "{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}"
# As Qwen3: only the answer to the last question shows its reasoning, which is empty if there is none.
THINKING = (
    "{%- set last = namespace(user=0) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{{- '[' + m.role + ']' -}}{%- if m.role != 'assistant' -%}{{- m.content + '\n' -}}"
    "{%- else -%}"
    "{%- if loop.index0 > last.user and (loop.last or m.reasoning_content) -%}"
    "{{- '<think>' + (m.reasoning_content or '') + '</think>' -}}{%- endif -%}"
    "{{- m.content -}}"
    "{%- for call in m.tool_calls or [] -%}"
    "{{- '<call>' + call.function.name + ' ' + call.function.arguments | tojson + '</call>' -}}{%- endfor -%}"
    "{{- eos_token + '\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '[assistant]' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think></think>' -}}{%- endif -%}"
    "{%- endif -%}"
)
# As gpt-oss: channels, of which the reasoning is shown before the last answer only, and another end of earlier answers.
CHANNELS = (
    "{%- set state = namespace(called='') -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{{- '[user]' + m.content + '[end]' -}}"
    "{%- elif m.role == 'tool' -%}{%- if not state.called -%}{{- raise_exception('no call') -}}{%- endif -%}"
    "{{- '[' + state.called + ']' + m.content + '[end]' -}}"
    "{%- elif m.tool_calls -%}"
    "{%- if m.thinking and loop.last -%}{{- '[assistant][analysis]' + m.thinking + '[end]' -}}{%- endif -%}"
    "{%- set state.called = m.tool_calls[0].function.name -%}"
    "{{- '[assistant] to=' + state.called + '[commentary]' + m.tool_calls[0].function.arguments | tojson + '[call]' -}}"
    "{%- elif loop.last -%}"
    "{%- if m.thinking -%}{{- '[assistant][analysis]' + m.thinking + '[end]' -}}{%- endif -%}"
    "{{- '[assistant][final]' + m.content + eos_token -}}"
    "{%- else -%}{{- '[assistant][final]' + m.content + '[end]' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '[assistant]' -}}{%- endif -%}"
)
# As Mistral: the system message and the tools stand before the last question, and turns must alternate.
MOVING = (
    SYSTEM + "{%- set n = namespace(turns=0, users=messages | selectattr('role', 'equalto', 'user') | list) -%}"
    "{{- bos_token -}}{%- for m in messages -%}"
    "{%- if m.role in ('user', 'assistant') and not m.tool_calls -%}"
    "{%- if (m.role == 'user') != (n.turns % 2 == 0) -%}{{- raise_exception('turns must alternate') -}}{%- endif -%}"
    "{%- set n.turns = n.turns + 1 -%}{%- endif -%}"
    "{%- if m.role == 'user' -%}"
    "{%- if tools and m == n.users[-1] -%}{{- '[TOOLS]' + tools | tojson + '[/TOOLS]' -}}{%- endif -%}"
    "{{- '[INST]' + (system + '\n' if system and loop.last else '') + m.content + '[/INST]' -}}"
    "{%- elif m.tool_calls -%}{{- '[CALLS]' + m.tool_calls[0].function | tojson + eos_token -}}"
    "{%- elif m.role == 'tool' -%}{{- '[RESULT]' + m.content + '[/RESULT]' -}}"
    "{%- elif m.role == 'assistant' -%}{{- m.content + eos_token -}}{%- endif -%}{%- endfor -%}"
)
CALL = {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
QUESTION, THANKS = {"role": "user", "content": "What is 2 + 3?"}, {"role": "user", "content": "And 5 + 1?"}
FIVE = {"role": "assistant", "content": "It is 5.", "reasoning_content": "Add them."}
SIX = {"role": "assistant", "content": "<b>6</b>", "reasoning": "Once more."}
ASKS = {"role": "assistant", "content": None, "tool_calls": [CALL], "thinking": "I need a tool."}
RESULT = {"role": "tool", "tool_call_id": "call12345", "content": "5"}
PLAIN = {"messages": [{"role": "system", "content": "Be brief."}, QUESTION, FIVE, THANKS, SIX]}
WITH_TOOLS = {"messages": [QUESTION, ASKS, RESULT, FIVE, THANKS, SIX], "tools": [TOOL]}


def learned(conversation, tokenizer, template):
    """The texts inside the loss mask, and all others."""
    ids, mask = encode(conversation, tokenizer, template)
    runs = {0: [], 1: []}
    for is_learned, run in groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0]):
        runs[is_learned].append(tokenizer.decode([token for _, token in run], clean_up_tokenization_spaces=False))
    return runs[1], runs[0]


CALLED = '{"a": 2, "b": 3}'


@pytest.mark.parametrize(
    ("template", "record", "expected"),
    [
        (THINKING, PLAIN, ["It is 5.</s>", "<think>Once more.</think><b>6</b></s>"]),
        (
            THINKING,
            WITH_TOOLS,
            [f"<call>add {CALLED}</call></s>", "It is 5.</s>", "<think>Once more.</think><b>6</b></s>"],
        ),
        (CHANNELS, PLAIN, ["[final]It is 5.", "[analysis]Once more.[end][assistant][final]<b>6</b></s>"]),
        (
            CHANNELS,
            WITH_TOOLS,
            [
                f" to=add[commentary]{CALLED}[call]",
                "[final]It is 5.",
                "[analysis]Once more.[end][assistant][final]<b>6</b></s>",
            ],
        ),
        (MOVING, PLAIN, ["It is 5.</s>", "<b>6</b></s>"]),
        (
            MOVING,
            WITH_TOOLS,
            [f'[CALLS]{{"name": "add", "arguments": {CALLED}}}</s>', "It is 5.</s>", "<b>6</b></s>"],
        ),
    ],
    ids=["thinking", "thinking-tools", "channels", "channels-tools", "moving", "moving-tools"],
)
def test_answers_and_tool_calls_are_learned_and_nothing_else_is(tokenizer, monkeypatch, template, record, expected):
    monkeypatch.setitem(TEMPLATES, "tried", template)
    found, others = learned(parse(record, 0), tokenizer, "tried")
    assert [text.strip() for text in found] == [text.strip() for text in expected]
    assert any("2 + 3?" in text for text in others) and any("5 + 1?" in text for text in others)
    if record is WITH_TOOLS:
        assert any("5" in text.replace("5 + 1", "") for text in others), "the result of the tool is there, not learned"


@pytest.mark.parametrize("template", [CHANNELS, MOVING], ids=["channels", "moving"])
def test_equal_tool_calls_are_each_learned_where_they_are(tokenizer, monkeypatch, template):
    monkeypatch.setitem(TEMPLATES, "tried", template)
    (first, *_), _ = learned(parse(WITH_TOOLS, 0), tokenizer, "tried")
    again = [QUESTION, ASKS, RESULT, ASKS, RESULT, FIVE, THANKS, ASKS, RESULT, SIX]
    found, others = learned(parse({"messages": again, "tools": [TOOL]}, 0), tokenizer, "tried")
    assert [text == first for text in found] == [True, True, False, True, False]
    assert "".join(others).count("5 + 1") == 1 and CALLED not in "".join(others)


def test_a_tool_call_that_the_user_quotes_is_not_taken_for_the_answer(tokenizer, monkeypatch):
    monkeypatch.setitem(TEMPLATES, "tried", CHANNELS)
    quoted = {"role": "user", "content": f"What does [assistant] to=add[commentary]{CALLED}[call] mean?"}
    with pytest.raises(ValueError, match="answers cannot be found"):
        encode(parse({"messages": [quoted, ASKS, RESULT, FIVE, THANKS, SIX]}, 0), tokenizer, "tried")


def test_without_thinking_the_last_answer_begins_after_the_empty_reasoning(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", THINKING)
    said = Conversation("", (("user", "a"), ("assistant", "<i>b</i>"), ("user", "c"), ("assistant", "d")))
    found, others = learned(said, tokenizer, "tokenizer:thinking=off")
    assert [text.strip() for text in found] == ["<i>b</i></s>", "d</s>"] and others[-2].endswith("<think></think>")


def test_private_use_characters_in_a_text_hide_no_answer(tokenizer, monkeypatch):
    monkeypatch.setitem(TEMPLATES, "tried", THINKING)
    said = Conversation("", (("user", "a\ue000"), ("assistant", "b"), ("user", "c\ue001"), ("assistant", "d")))
    found, _ = learned(said, tokenizer, "tried")
    assert found == ["b</s>", "<think></think>d</s>"]


def test_tool_calls_are_refused_by_a_template_that_does_not_show_them(tokenizer):
    with pytest.raises(ValueError, match="the chat template has no place for tool calls"):
        encode(parse(WITH_TOOLS, 0), tokenizer, "vicuna_v1.1")


def test_a_call_that_the_template_leaves_out_is_refused(tokenizer, monkeypatch):
    """DeepSeek-R1-Distill's writes a call only where the text is null, and transformers makes that an empty text.

    The tools before it have its name too, so that the name alone does not show the call.
    """
    shown = "{{ c.function.name if m.content is none }}"
    template = (
        "{{ tools }}{%- for m in messages -%}[{{ m.role }}]{{ m.content }}"
        "{%- for c in m.tool_calls -%}SHOWN{%- endfor -%}{{ '</s>' if m.role == 'assistant' }}{%- endfor -%}"
        "{{ '[assistant]' if add_generation_prompt }}"
    )
    monkeypatch.setitem(TEMPLATES, "tried", template.replace("SHOWN", "{{ c.function.name }}"))
    assert learned(parse(WITH_TOOLS, 0), tokenizer, "tried")[0] == ["add</s>", "It is 5.</s>", "<b>6</b></s>"]
    monkeypatch.setitem(TEMPLATES, "tried", template.replace("SHOWN", shown))
    with pytest.raises(ValueError, match="the chat template leaves out a tool call"):
        encode(parse(WITH_TOOLS, 0), tokenizer, "tried")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([QUESTION, RESULT, FIVE], "a call of a tool and its result"),
        ([QUESTION, ASKS, FIVE], "a call of a tool and its result"),
        ([QUESTION, ASKS | {"tool_calls": [{"name": "add"}]}], "tool_calls is not a list"),
        ([QUESTION, ASKS | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "call are not JSON"),
        ([QUESTION, ASKS | {"tool_calls": [{"function": {"name": "\ud83d"}}]}], "a tool call is not valid Unicode"),
        ([QUESTION, FIVE | {"reasoning_content": ["a"]}], "the reasoning of a turn is not a text"),
    ],
)
def test_broken_tool_calls_give_their_reason(messages, reason):
    with pytest.raises(ValueError, match=reason):
        parse({"messages": messages}, 0)


def test_tools_may_be_a_json_text_as_in_tables():
    assert parse(WITH_TOOLS | {"tools": json.dumps([TOOL])}, 0) == parse(WITH_TOOLS, 0)
    assert parse(PLAIN | {"tools": ""}, 0) == parse(PLAIN, 0)
    with pytest.raises(ValueError, match="tools is not a list of objects"):
        parse(PLAIN | {"tools": [3]}, 0)


def test_prompts_to_be_answered_anew_hold_neither_tools_nor_their_results(tmp_path):
    path, offering = tmp_path / "chats.jsonl", PLAIN | {"tools": [TOOL]}
    records = (PLAIN | {"tools": []}, offering, {"messages": WITH_TOOLS["messages"]}, WITH_TOOLS)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (kept,), dropped = load_conversations([str(path)], requires_answers=False)
    assert not kept.details and not kept.tools
    assert dropped.counts == {"it holds tools or their results, which new answers cannot ask for": 3}


def test_the_cache_tells_conversations_with_other_reasoning_apart(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setitem(TEMPLATES, "tried", THINKING)
    one, two = (parse({"messages": [QUESTION, FIVE | {"reasoning_content": text}]}, 0) for text in ("Hm.", "Ah."))
    rows = [tokenise([each], tokenizer, "tried", 512, str(tmp_path))[0]["input_ids"] for each in (one, two)]
    assert rows[0] != rows[1]


REAL = sorted(Path(os.environ.get("DRAFTERS_TEMPLATES", "no folder")).glob("*.jinja"))
ENDS = "<|im_end|>", "<|eot_id|>", "<|return|>", "<end_of_turn>", "<|end|>\n<|endoftext|>", "<｜end▁of▁sentence｜>"


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
@pytest.mark.parametrize("record", [PLAIN, WITH_TOOLS], ids=["plain", "tools"])
def test_masks_of_a_real_template(tokenizer, monkeypatch, path, record):
    """The template is that of the model; the tokenizer is not, so the ends of answers are replaced by its own."""
    text = path.read_text()
    for end in ENDS:
        text = text.replace(end, "</s>")
    monkeypatch.setitem(TEMPLATES, "real", text)
    try:
        found, others = learned(parse(record, 0), tokenizer, "real")
    except ValueError as error:
        if record is WITH_TOOLS and "the chat template" in str(error) and "does not extend" not in str(error):
            pytest.skip(str(error))
        raise
    seen, rest = "".join(found), "".join(others)
    assert "It is 5." in seen and "<b>6</b>" in seen and found[-1].rstrip().endswith("</s>")
    assert "It is 5." not in rest and "<b>6</b>" not in rest
    assert all(question not in seen for question in ("2 + 3?", "5 + 1?", "Be brief."))
    if record is WITH_TOOLS:
        assert len(found) == 3 and "add" in found[0] and "3" in found[0]
