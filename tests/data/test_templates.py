"""Prompts, loss masks and the marks of reasoning, with templates as those of real models."""

import json
import signal
import threading
from array import array
from copy import deepcopy
from dataclasses import replace
from datetime import date
from itertools import groupby

import pytest

from data import templates
from data.conversations import Conversation, RecordedTokens, parse, user_message
from data.files import short_hash
from data.templates import (
    TEMPLATES,
    ReasoningMarks,
    decode_answer,
    encode,
    encode_prompt,
    end_tokens,
    find_marks,
    masked_text,
    render,
    resolve_template,
    template_hash,
    thinking_switch,
    with_date,
)
from data.tokenizer import load_tokenizer, tokenizer_hash
from train.commands import show_mask

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def talk(*pairs):
    """Messages with these roles and texts."""
    return tuple({"role": role, "content": text} for role, text in pairs)


CHAT = Conversation(
    "chat",
    talk(
        ("user", "How many legs has a spider?"),
        ("assistant", "Eight.\n\nInsects have 6."),
        ("user", "And  two spiders?"),
        ("assistant", " 16 in total"),
    ),
)
CHATML = (
    "{%- for message in messages -%}{{- '[' + message['role'] + ']\\n' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}{{- '\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '[assistant]\\n' -}}{%- endif -%}"
)


def unmarked(template: str) -> str:
    for mark in ("{%- generation -%}", "{%- endgeneration -%}"):
        template = template.replace(mark, "")
    return template


def learned(conversation, tokenizer, template):
    """The texts inside the loss mask, and all others."""
    ids, mask = encode(conversation, tokenizer, template)
    runs = {0: [], 1: []}
    for is_learned, run in groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0]):
        runs[is_learned].append(tokenizer.decode([token for _, token in run], clean_up_tokenization_spaces=False))
    return runs[1], runs[0]


def fastchat_add_colon_two(messages, system=VICUNA_SYSTEM, seps=(" ", "</s>")):
    """Render messages by the rule of FastChat's SeparatorStyle.ADD_COLON_TWO."""
    text = "<s>" + system + seps[0]
    for n, (role, message) in enumerate((each["role"], each["content"]) for each in messages):
        text += f"{role.upper()}: {message}{seps[n % 2]}" if message is not None else f"{role.upper()}:"
    return text


def llama2_official(messages, system=None):
    """Render messages by Meta's rule: the system text is in the first user turn, every pair has its own BOS and EOS."""
    texts = [message["content"] for message in messages]
    if system:
        texts[0] = f"<<SYS>>\n{system}\n<</SYS>>\n\n{texts[0]}"
    pairs = [texts[n : n + 2] for n in range(0, len(texts), 2)]
    return "".join(f"<s>[INST] {pair[0]} [/INST]" + "".join(f" {answer} </s>" for answer in pair[1:]) for pair in pairs)


@pytest.mark.parametrize(
    ("template", "official"), [("vicuna_v1.1", fastchat_add_colon_two), ("llama2_chat", llama2_official)]
)
def test_the_templates_render_the_official_prompts(tokenizer, template, official):
    def rendered(messages, **options):
        return tokenizer.apply_chat_template(messages, chat_template=TEMPLATES[template], tokenize=False, **options)

    assert rendered(CHAT.messages) == official(CHAT.messages)
    with_system = (*talk(("system", "Be brief.")), *CHAT.messages)
    assert rendered(with_system) == official(CHAT.messages, system="Be brief.")
    asked = CHAT.messages[:3]
    prompt = (*asked, *talk(("assistant", None))) if template == "vicuna_v1.1" else asked
    assert rendered(asked, add_generation_prompt=True) == official(prompt)


@pytest.mark.parametrize(("template", "before_eos"), [("vicuna_v1.1", ""), ("llama2_chat", " ")])
def test_the_mask_covers_the_answers_and_their_eos_and_nothing_else(tokenizer, template, before_eos, monkeypatch):
    answers = [f" {text}{before_eos}</s>" for text in (each["content"] for each in CHAT.messages[1::2])]
    assert learned(CHAT, tokenizer, template)[0] == answers
    monkeypatch.setitem(TEMPLATES, "unmarked", unmarked(TEMPLATES[template]))
    ids, mask = encode(CHAT, tokenizer, template)
    assert encode(CHAT, tokenizer, "unmarked") == (ids, mask), "with and without the marks of transformers"
    assert encode(CHAT, tokenizer, template, 50) == (ids[:50], mask[:50])


@pytest.mark.parametrize("first", ["", "{{- messages | length -}}"], ids=["extends its prompt", "rewrites it"])
def test_what_a_template_adds_after_eos_is_outside_the_mask(tokenizer, monkeypatch, first):
    monkeypatch.setitem(TEMPLATES, "chatml", first + CHATML)
    assert learned(CHAT, tokenizer, "chatml")[0] == ["Eight.\n\nInsects have 6.</s>", " 16 in total</s>"]
    for answer in ("\nEight", "  Eight", "\n\n\nEight"):  # which may share a token with the prompt
        ((found,), _) = learned(Conversation("", talk(("user", "Hi"), ("assistant", answer))), tokenizer, "chatml")
        assert found.strip("\n ") == "Eight</s>"


def test_a_template_that_rewrites_its_prompt_with_the_answers_is_refused(tokenizer, monkeypatch):
    monkeypatch.setitem(TEMPLATES, "counting", "{{- messages | map(attribute='content') | join | length -}}" + CHATML)
    with pytest.raises(ValueError, match="does not extend its own prompt"):
        encode(CHAT, tokenizer, "counting")
    monkeypatch.setitem(TEMPLATES, "refusing", "{{- raise_exception('no system message') -}}")
    with pytest.raises(ValueError, match="the chat template refuses the conversation: no system message"):
        encode(CHAT, tokenizer, "refusing")


@pytest.mark.slow
@pytest.mark.parametrize("template", list(TEMPLATES))
def test_a_prompt_is_a_prefix_of_the_conversation_with_its_answer_and_has_one_bos(
    tokenizer, llama_tokenizer, template, monkeypatch
):
    monkeypatch.setitem(TEMPLATES, "unmarked", unmarked(TEMPLATES[template]))
    for each in (tokenizer, llama_tokenizer):
        for turn in (1, 3):
            prompt = encode_prompt(CHAT.messages[:turn], each, template)
            ids, mask = encode(Conversation("", CHAT.messages[: turn + 1]), each, template)
            assert ids[: len(prompt)] == prompt and all(mask[len(prompt) :]) and not mask[len(prompt) - 1]
        assert encode(CHAT, each, template) == encode(CHAT, each, "unmarked")
        assert encode_prompt(CHAT.messages[:1], each, template).count(each.bos_token_id) == 1


def test_named_templates_without_a_default_are_refused_in_our_own_words(tokenizer, monkeypatch):
    own = {"rag": "{{ messages }}", "tool_use": "{{ tools }}"}
    monkeypatch.setattr(tokenizer, "chat_template", own)
    for name in ("tokenizer", "tokenizer:thinking=on"):
        with pytest.raises(ValueError, match=r"no default \(rag, tool_use\): set tokenizer.chat_template to one"):
            resolve_template(name, tokenizer)
        with pytest.raises(ValueError, match="no default"):
            with_date(name, tokenizer)
    assert resolve_template("vicuna_v1.1", tokenizer) == TEMPLATES["vicuna_v1.1"]
    monkeypatch.setattr(tokenizer, "chat_template", own | {"default": "{{ messages }}!"})
    assert resolve_template("tokenizer", tokenizer) == "{{ messages }}!"


def test_templates_are_chosen_by_name(tokenizer, monkeypatch):
    assert resolve_template("vicuna_v1.1", tokenizer) == TEMPLATES["vicuna_v1.1"]
    assert resolve_template("tokenizer", tokenizer) == tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", None)
    for name, said in {
        "alpaca": r"'alpaca'.*vicuna_v1.1, llama2_chat",
        "alpaca:thinking=on": "unknown chat template 'alpaca'",
        "tokenizer": r"no chat template of its own; choose one of: vicuna_v1.1",
        "vicuna_v1.1:thinking=off": r"no thinking switch \(enable_thinking\): write vicuna_v1.1 without thinking=off",
        "vicuna_v1.1:thinking=maybe": "unknown option 'thinking=maybe' .* write vicuna_v1.1:thinking=on or",
    }.items():
        with pytest.raises(ValueError, match=said):
            resolve_template(name, tokenizer)


SWITCH = (
    "\n{%- for message in messages %}{{ '[' + message.role + ']' + message.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '[assistant]' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{%- endif %}{%- endif %}"
)


@pytest.mark.parametrize("text", [SWITCH, SWITCH.strip(), SWITCH.replace("enable_thinking", "thinking")])
def test_the_thinking_switch_is_the_templates_own(tokenizer, monkeypatch, text):
    monkeypatch.setattr(tokenizer, "chat_template", text)
    prompts = {}
    for option, value in (("", None), (":thinking=on", True), (":thinking=off", False)):
        switch = {} if value is None else {"enable_thinking": value, "thinking": value}
        expected = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Why?"}], add_generation_prompt=True, return_dict=False, **switch
        )
        prompts[option] = encode_prompt(talk(("user", "Why?")), tokenizer, f"tokenizer{option}")
        assert prompts[option] == expected
    assert prompts[""] == prompts[":thinking=on"] != prompts[":thinking=off"]


def test_the_answers_are_shown_in_green_within_the_complete_text(tokenizer):
    text = masked_text(*encode(CHAT, tokenizer, "vicuna_v1.1"), tokenizer)
    assert text.plain == fastchat_add_colon_two(CHAT.messages)
    green = [text.plain[span.start : span.end] for span in text.spans if span.style == "bold green"]
    assert green == [" Eight.\n\nInsects have 6.</s>", "  16 in total</s>"]


def test_recorded_tokens_are_used_as_they_are_with_the_tokenizer_and_template_they_belong_to(tokenizer):
    own = tokenizer_hash(tokenizer), short_hash(TEMPLATES["vicuna_v1.1"])
    recorded = replace(CHAT, recorded=RecordedTokens(array("i", [5, 6, 7]), array("b", [0, 1, 1]), *own))
    assert encode(recorded, tokenizer, "vicuna_v1.1", 2) == ([5, 6], [0, 1])
    for tokens, said in (
        (replace(recorded.recorded, tokenizer="0"), "another tokenizer: use that one, or remove input_ids"),
        (replace(recorded.recorded, template="0"), "another chat template: use that one"),
        (replace(recorded.recorded, input_ids=array("i", [5, 6, 9999])), "tokens that the tokenizer does not know"),
    ):
        with pytest.raises(ValueError, match=said):
            encode(replace(CHAT, recorded=tokens), tokenizer, "vicuna_v1.1")


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
    said = Conversation("", talk(("user", "a"), ("assistant", "<i>b</i>"), ("user", "c"), ("assistant", "d")))
    found, others = learned(said, tokenizer, "tokenizer:thinking=off")
    assert [text.strip() for text in found] == ["<i>b</i></s>", "d</s>"] and others[-2].endswith("<think></think>")


def test_private_use_characters_in_a_text_hide_no_answer(tokenizer, monkeypatch):
    monkeypatch.setitem(TEMPLATES, "tried", THINKING)
    said = Conversation("", talk(("user", "a\ue000"), ("assistant", "b"), ("user", "c\ue001"), ("assistant", "d")))
    found, _ = learned(said, tokenizer, "tried")
    assert found == ["b</s>", "<think></think>d</s>"]


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


def test_results_of_tools_that_the_template_leaves_out_are_refused(tokenizer, monkeypatch):
    said = talk(("user", "a"), ("assistant", "<call>"), ("tool", "RESULT"), ("assistant", "b"))
    with pytest.raises(ValueError, match="the chat template leaves out what a tool returned"):
        encode(Conversation("", said), tokenizer, "vicuna_v1.1")
    shown = "{%- for m in messages -%}[{{ m.role }}]{{ m.content }}</s>{%- endfor -%}"
    monkeypatch.setitem(TEMPLATES, "tried", f"{shown}{{{{ '[assistant]' if add_generation_prompt }}}}")
    assert learned(Conversation("", said), tokenizer, "tried")[0] == ["<call></s>", "b</s>"]


def test_an_answer_without_an_end_token_is_learned_where_a_character_is_several_tokens(monkeypatch):
    tokenizer = load_tokenizer("checkpoints/tiny-chat")
    template = "{%- for m in messages -%}{{ m.role }}: {{ m.content }}\n{% endfor -%}"
    monkeypatch.setitem(TEMPLATES, "tried", f"{template}{{{{ 'assistant: ' if add_generation_prompt }}}}")
    answer = "今天天气很好，阳光明媚，适合外出。"
    said = Conversation("", talk(("user", "你好，请告诉我今天的天气怎么样"), ("assistant", answer)))
    ids, mask = encode(said, tokenizer, "tried")
    assert tokenizer.decode([token for token, is_in in zip(ids, mask, strict=True) if is_in]).strip() == answer


MARKS = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("answer", "is_open", "span"),
    [
        ([7, 5, 1, 2, 8, 3], False, (1, 5)),
        ([5, 8, 3, 5, 8], False, (0, 2)),  # a second pair belongs to the answer
        ([5, 1, 2], False, (0, 3)),  # cut within the reasoning
        ([1, 2, 8, 3], False, (0, 3)),  # the prompt ended with the start
        ([1, 8, 5, 3], False, (0, 2)),
        ([1, 2, 3], False, None),
        ([1, 2, 3], True, (0, 3)),
        ([1, 8, 3], True, (0, 2)),
        ([], False, None),
    ],
)
def test_the_reasoning_lies_between_its_marks(answer, is_open, span):
    assert ReasoningMarks(MARKS, (5,), (8,), is_open).span(answer) == span


def test_a_mark_of_several_tokens_is_found_as_a_whole():
    marks = ReasoningMarks(MARKS, (5, 6), (5, 6, 7), False)
    assert marks.span([5, 7, 5, 6, 1, 5, 6, 7, 5, 6]) == (2, 8)


@pytest.mark.parametrize(
    ("ending", "is_open"),
    [("w31", False), ("w31 <think>", True), ("w31 <think> </think>", False), ("</think> <think>", True)],
)
def test_the_marks_are_those_of_the_template_and_the_prompt_says_whether_an_answer_begins_inside(
    thinking_tokenizer, ending, is_open
):
    template = "{{ messages[0]['content'] }} ... </think>"
    prompt = thinking_tokenizer(f"w9 {ending}").input_ids
    assert find_marks(template, thinking_tokenizer, prompt) == ReasoningMarks(MARKS, (5,), (8,), is_open)
    assert find_marks("{{ messages[0]['content'] }}", thinking_tokenizer, prompt) is None


@pytest.mark.parametrize(
    ("text", "is_open", "said"),
    [
        ("<think>\nIs it 4?\n</think>\n\nIt is 5.", False, "It is 5."),
        ("Is it 4?</think> It is 5.", True, "It is 5."),
        ("Is it 4?</think> It is 5.", False, "It is 5."),  # the prompt ended with the start
        ("<think></think>The marks are <think> and </think>", False, "The marks are <think> and </think>"),
        ("<think>Is it 4?", False, ""),  # cut within the reasoning
        ("Is it 4?", True, ""),
        ("It is 5. ", False, "It is 5. "),
    ],
)
def test_what_an_answer_says_after_its_reasoning(text, is_open, said):
    assert ReasoningMarks(MARKS, (5,), (8,), is_open).without_reasoning(text) == said


@pytest.mark.parametrize("are_special", [False, True])
def test_an_answer_is_decoded_with_the_marks_of_its_reasoning(thinking_tokenizer, are_special):
    tokenizer = deepcopy(thinking_tokenizer)
    tokenizer.add_tokens([*MARKS, "<other>"], special_tokens=are_special)
    other = tokenizer.convert_tokens_to_ids("<other>")
    expected = "<think> w9 </think> w10" if are_special else "<think> w9 </think> <other> w10"
    assert decode_answer([1, 5, 9, 8, other, 10, 2], tokenizer) == expected
    assert decode_answer([9, 10, 2], tokenizer) == "w9 w10" and decode_answer([], tokenizer) == ""


# As DeepSeek-R1's, which joins the arguments of a call as a text; and one that writes an object as Python does.
JOINED = (
    "{%- for m in messages -%}[{{ m.role }}]{{ m.content }}{%- for c in m.tool_calls or [] -%}"
    "{{ '<' + c.function.name + ' ' JOIN c.function.arguments + '>' }}{%- endfor -%}"
    "{{ '</s>' if m.role == 'assistant' }}{%- endfor -%}{{ '[assistant]' if add_generation_prompt }}"
)


@pytest.mark.parametrize("join", ["+", "~"])
@pytest.mark.parametrize("arguments", ['{"a":2,"b":  "ü"}', {"a": 2, "b": "ü"}, "{}", {}])
def test_a_template_that_takes_arguments_for_a_text_gets_the_records_own(tokenizer, monkeypatch, join, arguments):
    monkeypatch.setitem(TEMPLATES, "joined", JOINED.replace(" JOIN ", f" {join} ").replace("+ '>'", f"{join} '>'"))
    call = {"function": {"name": "add", "arguments": arguments}}
    asks = {"messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT, SIX]}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    assert learned(parse(asks, 0), tokenizer, "joined")[0] == [f"<add {text}></s>", "<b>6</b></s>"]


def test_arguments_stay_objects_if_a_message_quotes_a_dictionary_of_python(tokenizer, monkeypatch):
    monkeypatch.setitem(
        TEMPLATES, "tried", JOINED.replace(" JOIN c.function.arguments", " ~ (c.function.arguments | tojson)")
    )
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    asked = {"role": "user", "content": "Call it with {'a': 2}."}
    asks = {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT, SIX]}
    assert learned(parse(asks, 0), tokenizer, "tried")[0] == ['<add {"a": 2}></s>', "<b>6</b></s>"]


@pytest.mark.parametrize(
    ("text", "switch"),
    [
        ("{%- if message.thinking -%}{{ message.thinking }}{%- endif -%}", None),
        ("{%- for m in messages -%}{{ m['enable_thinking'] }}{%- endfor -%}", None),
        ("{%- set thinking = true -%}{{ thinking }}", None),
        ("{{ 'thinking' }}{# enable_thinking #}", None),
        ("{%- macro show(thinking) -%}{{ thinking }}{%- endmacro -%}{{ show(1) }}", None),
        ("{%- if not thinking is defined -%}{%- set thinking = false -%}{%- endif -%}{{ thinking }}", "thinking"),
        ("{%- if enable_thinking is defined and enable_thinking -%}x{%- endif -%}", "enable_thinking"),
        ("{%- generation -%}{{ x if thinking }}{%- endgeneration -%}", "thinking"),
        (
            "{%- for m in messages -%}{%- break -%}{%- endfor -%}{{ enable_thinking | default(true) }}",
            "enable_thinking",
        ),
    ],
)
def test_a_thinking_switch_is_a_variable_that_the_template_reads_from_outside(text, switch):
    assert thinking_switch(text) == switch


GEMMA = (
    "{{ bos_token }}{%- for m in messages -%}{{ '<turn>' + m.role + '\n' }}{{ m.content | trim }}{{ '<end>' }}"
    "{{ '\n' }}{%- endfor -%}{{ '<turn>assistant\n' if add_generation_prompt }}"
)


@pytest.mark.parametrize("first", ["", "{{- messages | length -}}"], ids=["extends its prompt", "rewrites it"])
@pytest.mark.parametrize("space", ["", " "])
def test_the_loss_ends_with_the_token_that_ends_a_turn_where_that_is_not_eos(tokenizer, monkeypatch, first, space):
    own = deepcopy(tokenizer)
    own.add_tokens(["<turn>", "<end>"], special_tokens=True)
    template = first + GEMMA.replace("'<end>'", f"'{space}<end>'")
    monkeypatch.setitem(TEMPLATES, "gemma", template)
    found, _ = learned(CHAT, own, "gemma")
    assert found == [f"Eight.\n\nInsects have 6.{space}<end>", f"16 in total{space}<end>"]
    assert end_tokens(own, template) == tuple(sorted([own.eos_token_id, own.convert_tokens_to_ids("<end>")]))


@pytest.mark.parametrize("flag", [{"weight": 0}, {"weight": 0.0}, {"loss": False}, {"train": False}])
@pytest.mark.parametrize("template", ["vicuna_v1.1", "unmarked"])
def test_a_turn_that_is_marked_not_to_be_learned_is_outside_the_mask(tokenizer, monkeypatch, template, flag):
    monkeypatch.setitem(TEMPLATES, "unmarked", unmarked(TEMPLATES["vicuna_v1.1"]))
    turns = [dict(message) for message in CHAT.messages]
    kept = {"weight": 1, "loss": True, "train": True}
    whole = learned(parse({"messages": turns}, 0), tokenizer, template)[0]
    turns[1] |= flag
    turns[3] |= kept
    assert learned(parse({"messages": turns}, 0), tokenizer, template)[0] == whole[1:]
    turns[1], turns[3] = turns[1] | kept, turns[3] | flag
    assert learned(parse({"messages": turns}, 0), tokenizer, template)[0] == whole[:1]


DATED = "{{ strftime_now('%d %b %Y') }}|{{ strftime_now( \"%Y\" ) }}" + CHATML


def test_a_date_that_a_template_writes_is_named_and_can_be_fixed(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", DATED)
    today = date.today()
    for name, day in (
        ("tokenizer", today),
        ("tokenizer:date=2025-03-04", date(2025, 3, 4)),
        (with_date("tokenizer", tokenizer), today),
        (with_date("tokenizer", tokenizer, stored="tokenizer:date=2025-03-04"), date(2025, 3, 4)),
    ):
        ids, _ = encode(CHAT, tokenizer, name)
        assert tokenizer.decode(ids).startswith(day.strftime("%d %b %Y|%Y"))
        assert template_hash(name, tokenizer) == short_hash(DATED)
    assert with_date("tokenizer:date=2025-03-04", tokenizer) == "tokenizer:date=2025-03-04"
    assert with_date("tokenizer", tokenizer, stored="vicuna_v1.1") == f"tokenizer:date={today}"
    assert with_date("vicuna_v1.1", tokenizer) == "vicuna_v1.1"
    for name, said in (
        ("tokenizer:date=4 March", "'4 March' is no date"),
        ("vicuna_v1.1:date=2025-03-04", "unknown option"),
    ):
        with pytest.raises(ValueError, match=said):
            resolve_template(name, tokenizer)


def test_show_mask_names_a_refused_conversation_and_goes_on(tmp_path, capsys):
    said = {"messages": [user_message("Hi"), {"role": "assistant", "content": "Hello."}], "passage": "Once."}
    rows = [said | {"id": "a"}, WITH_TOOLS | {"id": "b"}, said | {"id": "c"}, "text"]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    show_mask("checkpoints/tiny-chat", [str(tmp_path / "x.jsonl")], "vicuna_v1.1", limit=4)
    printed = " ".join(capsys.readouterr().out.split())
    assert "3 conversations read, dropped 1 records (1 x not a JSON object)" in printed and "passage (2)" in printed
    places = [printed.index(part) for part in (" a: ", "b is left out: the chat template has no place", " c: ")]
    assert places == sorted(places)


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% for a in range(99) %}{{ f(n - 1) if n }}{% endfor %}{% endmacro %}{{ f(50) }}",
}


@pytest.mark.parametrize("loop", ENDLESS)
def test_a_template_that_does_not_end_ends_the_command_and_no_other_timer(tokenizer, monkeypatch, loop):
    monkeypatch.setattr(templates, "RENDER_SECONDS", 0.05)
    handlers = [signal.getsignal(number) for number in (signal.SIGVTALRM, signal.SIGALRM)]
    conversation = Conversation("one", talk(("user", "Hi"), ("assistant", "Hello")))
    for template in (ENDLESS[loop], ENDLESS[loop] + "{% generation %}{% endgeneration %}"):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        with pytest.raises(TimeoutError, match="the chat template does not end within"):
            encode(conversation, tokenizer, "tokenizer")
    assert handlers == [signal.getsignal(number) for number in (signal.SIGVTALRM, signal.SIGALRM)]
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_templates_are_rendered_in_other_threads_too(tokenizer):
    texts = []
    thread = threading.Thread(target=lambda: texts.append(render(talk(("user", "Hi")), tokenizer, "vicuna_v1.1")))
    thread.start()
    thread.join()
    assert texts == [render(talk(("user", "Hi")), tokenizer, "vicuna_v1.1")]
