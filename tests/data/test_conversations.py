"""Records of many forms become conversations; broken ones are counted by reason and named."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from data.conversations import Conversation, Dropped, load_conversations, parse

HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}
HI = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"})
FORMS = [
    {"conversations": [HUMAN, GPT]},
    {"conversations": [{"from": "user", "value": "Hi"}, {"from": "chatgpt", "value": "Hello!"}]},
    {"conversations": [{"from": "gpt", "value": "left over"}, HUMAN, {"from": "bard", "value": "Hello!"}]},
    {"conversation": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]},
    {"question": "Hi", "answer": "Hello!"},
    {"instruction": "Hi", "input": "", "output": "Hello!"},
    {"instruction": "Hi", "response": "Hello!"},
    {"history": [{"user": "Hi", "bot": "Hello!"}]},
]


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_form_of_a_record_is_read_with_and_without_null_columns(tmp_path, form, kind):
    file, rows = tmp_path / f"talk.{kind}", [form | {"id": "a", "score": 1.5}, form | {"id": None, "answers": None}]
    if kind == "parquet":
        every_key = dict.fromkeys({key for form in FORMS for key in form} | {"input_ids", "tools"})
        parquet.write_table(pa.Table.from_pylist([every_key | row for row in rows]), file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    conversations, dropped = load_conversations([str(file)])
    assert conversations == [Conversation("a", HI), Conversation("2", HI)] and not dropped.counts


def test_what_a_table_holds_as_empty_texts_of_json_counts_as_missing():
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": "[]"}]
    said[1]["function_call"] = {"name": None, "arguments": None}
    expected = parse({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, 1)
    assert parse({"messages": said, "tools": "null"}, 1) == expected
    assert parse({"question": "a", "answer": "b", "history": "[]"}, 1) == expected
    assert parse({"data": json.dumps(["a", "b"])}, 1) == expected


def test_id_and_system_message_are_kept_and_an_input_follows_its_instruction():
    record = {"id": "x_0", "messages": [{"role": "system", "content": "s"}, GPT, HUMAN, GPT]}
    assert parse(record, 5) == Conversation("x_0", ({"role": "system", "content": "s"}, *HI))
    asked = parse({"instruction": "Sort.", "input": "3 1", "output": "1 3"}, 0)
    assert [message["content"] for message in asked.messages] == ["Sort.\n\n3 1", "1 3"]


def test_files_of_different_kinds_are_read_as_one_set_up_to_the_limit(tmp_path):
    parquet.write_table(pa.Table.from_pylist([FORMS[0]] * 600), tmp_path / "many.parquet")
    (tmp_path / "a.json").write_text(json.dumps(FORMS))
    files = [str(tmp_path / "a.json"), str(tmp_path / "many.parquet"), "embedded:3"]
    assert len(load_conversations(files)[0]) == len(FORMS) + 600 + 3
    assert len(load_conversations(files, limit=500)[0]) == 500


def turns(*messages):
    return {"conversations": messages}


TOKENS = FORMS[0] | {"input_ids": [1, 2], "loss_mask": [0, 1], "tokenizer": "a", "template": "b"}
BROKEN = [
    ("text", "not a JSON object"),
    (turns(), "no turns"),
    ({"conversations": "Hi"}, "no turns"),
    (turns("a"), "a turn is not a JSON object"),
    ({"question": "a", "answer": "b", "context": {"title": ["x"]}}, "its question, context or answer is not a text"),
    ({"instruction": "Double it.", "input": 0, "output": "0"}, "its question, context or answer is not a text"),
    ({"question": {"text": "a"}, "context": "b", "answer": "c"}, "its question, context or answer is not a text"),
    ({"question": "Capital?", "answer": ["Paris", "paris"]}, "its question, context or answer is not a text"),
    (turns(HUMAN, GPT) | {"tools": json.loads("[" * 900 + "]" * 900)}, "it is nested too deeply"),
    ({"history": ["a"]}, "history is not a list of exchanges"),
    ({"question": "a", "answers": ["b"]}, "tool_calls is not a list"),
    ({"question": "a", "answers": "b"}, "`answers` is not JSON"),
    ({"conversations": "[{"}, "`conversations` or `messages` is not JSON"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}, GPT]}, "parts that are not texts"),
    (turns(HUMAN, {"from": "gpt", "value": "Smile \ud83d"}), "half of a character"),
    (turns(HUMAN, GPT) | {"id": "\ude00"}, "half of a character"),
    (turns(HUMAN, GPT) | {"tools": "[{"}, "tools is not JSON"),
    (turns(HUMAN, GPT) | {"tools": [3]}, "tools is not a list of objects"),
    (turns({"from": "tool", "value": "5"}, HUMAN, GPT), "a call of a tool and its result"),
    (turns({"speaker": "human", "said": "Hi"}, GPT), "unknown speaker None"),
    (turns({"from": "narrator", "value": "Hi"}, GPT), "unknown speaker 'narrator'"),
    (turns({"from": "human", "value": 5}, GPT), "a turn has no text"),
    (turns(HUMAN, {"from": "gpt", "value": " \n"}), "an assistant turn is empty"),
    (turns(HUMAN), "no assistant turn after a user turn"),
    (turns(HUMAN, HUMAN, GPT), "user and assistant do not alternate"),
    (turns(HUMAN, GPT, GPT), "user and assistant do not alternate"),
    (turns(HUMAN, {"from": "system", "value": "Be brief."}, GPT), "user and assistant do not alternate"),
    (TOKENS | {"input_ids": ["1", "2"]}, "input_ids or loss_mask is not a list of whole numbers"),
    (TOKENS | {"tokenizer": None}, "input_ids without the tokenizer"),
    (TOKENS | {"loss_mask": [1, 2]}, "loss_mask is not as many zeros and ones"),
]


@pytest.mark.parametrize(("record", "reason"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_record_is_named_with_its_reason_and_the_others_are_read(tmp_path, record, reason):
    (tmp_path / "mixed.json").write_text(json.dumps([FORMS[0], record, FORMS[0]]))
    conversations, dropped = load_conversations([str(tmp_path / "mixed.json")])
    assert [each.id for each in conversations] == ["1", "3"] and dropped.counts.total() == 1
    assert dropped.examples[0].startswith("mixed.json record 2: ") and reason in dropped.examples[0]


def test_dropped_records_are_counted_by_reason_in_a_short_text_however_many_they_are(tmp_path):
    mute = turns(HUMAN)
    (tmp_path / "mixed.json").write_text(json.dumps([FORMS[0], mute, "text", mute, mute, mute]))
    lines = str(load_conversations([str(tmp_path / "mixed.json")])[1]).splitlines()
    assert lines[0].startswith("dropped 5 records (4 x no assistant turn")
    assert "  mixed.json record 3: not a JSON object" in lines
    assert sum("no assistant turn" in line for line in lines[1:]) == 3
    dropped = Dropped()
    for number in range(5000):
        dropped.add(f"unknown speaker 'nobody-{number}'", f"record {number}")
    assert "4988 for other reasons" in str(dropped) and len(str(dropped).splitlines()) < 50


@pytest.mark.parametrize("content", ["[]", '["a"]'])
def test_a_file_without_a_conversation_is_refused_with_an_example_of_a_record(tmp_path, content):
    (tmp_path / "none.json").write_text(content)
    with pytest.raises(ValueError, match=r"none.json: no usable conversation \(no.*\); expected records like"):
        load_conversations([str(tmp_path / "none.json")])


ASKED, ANSWER = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}
RESULT = {"role": "tool", "tool_call_id": "call1", "content": "5"}
TOOL = {"type": "function", "function": {"name": "add"}}


def calls(*called, **more):
    return {"role": "assistant", "content": None, "tool_calls": list(called), **more}


def test_tool_calls_and_reasoning_are_kept_as_templates_read_them():
    call = {"id": "call1", "function": {"name": "add", "arguments": '{"a": 2}'}}
    asked = {"messages": [ASKED, calls(call, thinking="Add."), RESULT, ANSWER], "tools": json.dumps([TOOL])}
    parsed = parse(asked, 0)
    assert parsed == parse(asked | {"tools": [TOOL]}, 0) and parsed.tools == (TOOL,)
    expected = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Add.",
        "thinking": "Add.",
        "tool_calls": [call],
    }
    assert parsed.messages == (ASKED, expected, RESULT, ANSWER)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([ASKED, RESULT, ANSWER], "a call of a tool and its result"),
        ([ASKED, calls(TOOL), ANSWER], "a call of a tool and its result"),
        ([ASKED, calls({"title": "add"})], "tool_calls is not a list"),
        ([ASKED, calls({"function": {"name": "f", "arguments": "{"}})], "arguments as JSON"),
        ([ASKED, ANSWER | {"reasoning_content": ["a"]}], "the reasoning of a turn is not a text"),
    ],
)
def test_broken_tool_calls_give_their_reason(messages, reason):
    with pytest.raises(ValueError, match=reason):
        parse({"messages": messages}, 0)


def test_prompts_to_be_answered_anew_hold_neither_answers_nor_tools_nor_their_results(tmp_path):
    said = {"messages": [ASKED, calls(TOOL), RESULT, ANSWER]}
    records = (FORMS[0] | {"tools": []}, turns(HUMAN), FORMS[0] | {"tools": [TOOL]}, said, said | {"tools": [TOOL]})
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    kept, dropped = load_conversations([str(tmp_path / "chats.jsonl")], requires_answers=False)
    assert [each.messages[0] for each in kept] == [HI[0]] * 2
    assert dropped.counts == {"it holds tools or their results, which new answers cannot ask for": 3}
