"""A record of each public kind gives the text that its data set means, from JSON lines, tables and the hub alike."""

import json

import datasets
import pyarrow as pa
import pytest
from datasets.packaged_modules.json.json import Json
from pyarrow import parquet

from data.conversations import load_conversations
from data.sources import read_rows
from data.templates import TEMPLATES, encode, render

# Shows everything that a record may hold. Objects are written with sorted keys, as tables do not keep their order.
SHOWS_ALL = (
    "{%- for t in tools or [] -%}({{ t.function.name }}: {{ t.function.parameters | tojson(sort_keys=true) }})"
    "{%- endfor -%}"
    "{%- for m in messages -%}[{{ m.role }}]"
    "{%- if m.reasoning_content -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}{{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}<{{ c.function.name }} {{ c.function.arguments | tojson(sort_keys=true) }}>"
    "{%- endfor -%}{{ '</s>' if m.role == 'assistant' }}{%- endfor -%}{{ '[assistant]' if add_generation_prompt }}"
)
USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "The weather.", "parameters": CITY}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}
SHOWN_WEATHER = '(weather: {"properties": {"city": {"type": "string"}}, "type": "object"})'
SHOWN_CLOCK = '(clock: {"properties": {"zone": {"type": "string"}}, "type": "object"})'
CALLED = '{"name": "weather", "arguments": {"city": "Rome"}}'


def openai_call(name, arguments):
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


SIMPLE = "[user]Hi[assistant]Hello.</s>"
KINDS = {
    "ShareGPT": ({"id": "a", "conversations": [HUMAN, GPT]}, SIMPLE),
    "OpenAI": (
        {"messages": [{"role": "developer", "content": "Be brief."}, USER, ASSISTANT]},
        f"[system]Be brief.{SIMPLE}",
    ),
    "OpenAI, parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ASSISTANT]},
        SIMPLE,
    ),
    "OpenAI, reasoning": (
        {"messages": [USER, ASSISTANT | {"reasoning_content": "A greeting."}]},
        "[user]Hi[assistant]<think>A greeting.</think>Hello.</s>",
    ),
    "OpenAI, tools": (
        {
            "messages": [
                USER,
                openai_call("weather", '{"city": "Rome"}'),
                {"role": "tool", "tool_call_id": "c1", "content": "Sun"},
                ASSISTANT,
            ],
            "tools": [{"type": "function", "function": WEATHER}],
        },
        f'{SHOWN_WEATHER}[user]Hi[assistant]<weather {{"city": "Rome"}}></s>[tool]Sun[assistant]Hello.</s>',
    ),
    "OpenAI, functions": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
                {"role": "function", "name": "weather", "content": "Sun"},
                ASSISTANT,
            ],
        },
        "[user]Hi[assistant]<weather {}></s>[tool]Sun[assistant]Hello.</s>",
    ),
    "Alpaca": ({"instruction": "Sort.", "input": "3 1", "output": "1 3"}, "[user]Sort.\n\n3 1[assistant]1 3</s>"),
    "LLaMA-Factory": (
        {"instruction": "c", "input": "", "output": "d", "system": "S", "history": [["a", "b"]]},
        "[system]S[user]a[assistant]b</s>[user]c[assistant]d</s>",
    ),
    "LLaMA-Factory, tools": (
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": CALLED},
                {"from": "observation", "value": "Sun"},
                GPT,
            ],
            "system": "S",
            "tools": json.dumps([WEATHER]),
        },
        f'{SHOWN_WEATHER}[system]S[user]Hi[assistant]<weather {{"city": "Rome"}}></s>[tool]Sun[assistant]Hello.</s>',
    ),
    "Dolly": (
        {"instruction": "When?", "context": "It opened in 1932.", "response": "In 1932.", "category": "closed_qa"},
        "[user]When?\n\nIt opened in 1932.[assistant]In 1932.</s>",
    ),
    "OpenOrca": (
        {"id": "niv.1", "system_prompt": "Be brief.", "question": "Hi", "response": "Hello."},
        f"[system]Be brief.{SIMPLE}",
    ),
    "UltraChat": (
        {"id": "0", "data": ["Hi", "Hello.", "Bye", "See you."]},
        f"{SIMPLE}[user]Bye[assistant]See you.</s>",
    ),
    "UltraChat 200k": ({"prompt": "Hi", "prompt_id": "f0e37e", "messages": [USER, ASSISTANT]}, SIMPLE),
    "OpenThoughts": (
        {"system": "Think.", "conversations": [HUMAN | {"from": "user"}, GPT | {"from": "assistant"}]},
        f"[system]Think.{SIMPLE}",
    ),
    "SmolTalk": ({"messages": [USER, ASSISTANT], "source": "smol-magpie"}, SIMPLE),
    "GSM8K": ({"question": "2 + 3?", "answer": "5"}, "[user]2 + 3?[assistant]5</s>"),
    "GSM8K, passage": (
        {"question": "When?", "context": "In 1932.", "answer": "1932"},
        "[user]When?\n\nIn 1932.[assistant]1932</s>",
    ),
    "MetaMath": ({"query": "2 + 3?", "response": "5", "type": "GSM"}, "[user]2 + 3?[assistant]5</s>"),
    "TRL": ({"prompt": "Hi", "completion": "Hello."}, SIMPLE),
    "TRL, messages": ({"prompt": [USER], "completion": [ASSISTANT]}, SIMPLE),
    "Capybara": ({"conversation": [{"input": "Hi", "output": "Hello."}], "source": "x"}, SIMPLE),
    "MT-Bench-101": ({"history": [{"user": "Hi", "bot": "Hello."}], "task": "GR"}, SIMPLE),
    "xLAM": (
        {"id": 0, "query": "Hi", "answers": f"[{CALLED}]", "tools": json.dumps([WEATHER])},
        f'{SHOWN_WEATHER}[user]Hi[assistant]<weather {{"city": "Rome"}}></s>',
    ),
    "Hermes": (
        {
            "conversations": [
                {"from": "system", "value": f"You call functions. <tools>[{json.dumps(WEATHER)}]</tools>"},
                HUMAN,
                {"from": "gpt", "value": f"<tool_call>\n{CALLED}\n</tool_call>"},
                {"from": "tool", "value": "Sun"},
                GPT,
            ],
            "tools": json.dumps([{"type": "function", "function": WEATHER}]),
            "task": "Weather",
        },
        f"[system]You call functions. <tools>[{json.dumps(WEATHER)}]</tools>[user]Hi[assistant]<tool_call>\n{CALLED}\n"
        "</tool_call></s>[tool]Sun[assistant]Hello.</s>",
    ),
}
# Others of each kind, whose keys differ, so that a table fills up either of them with nulls.
OTHERS = [
    {"messages": [USER, ASSISTANT | {"weight": 0}]},
    {"messages": [USER | {"content": [{"type": "text", "text": "Hi"}]}, ASSISTANT]},
    {"messages": [USER, openai_call("clock", {"zone": "CET", "format": {"hours": 24}})]},
    {"messages": [USER, ASSISTANT], "tools": [{"type": "function", "function": CLOCK}]},
]


def shown(file, tokenizer):
    """What a template writes for the first conversation of a file."""
    conversations, dropped = load_conversations([file])
    assert not dropped.counts
    first = conversations[0]
    ids, mask = encode(first, tokenizer, "all")
    text = render(first.messages, tokenizer, "all", first.tools).removesuffix("[assistant]")
    assert ids == tokenizer(text, add_special_tokens=False).input_ids and any(mask)
    return text


@pytest.fixture(autouse=True)
def template(monkeypatch):
    monkeypatch.setitem(TEMPLATES, "all", SHOWS_ALL)


@pytest.mark.parametrize("kind", KINDS)
def test_json_lines_and_a_table_of_a_public_kind_give_its_text(tokenizer, tmp_path, kind):
    record, expected = KINDS[kind]
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    assert shown(str(tmp_path / "a.jsonl"), tokenizer) == expected
    if kind == "OpenAI, parts":  # Arrow itself has no column of texts and lists
        return
    every_key = dict.fromkeys([*record, "scores", "system", "history", "tools", "context"])
    parquet.write_table(pa.Table.from_pylist([every_key | record]), tmp_path / "a.parquet")
    assert shown(str(tmp_path / "a.parquet"), tokenizer) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_hub_and_its_tables_give_the_same_text_beside_records_of_other_keys(tokenizer, tmp_path, monkeypatch, kind):
    record, expected = KINDS[kind]
    written = tmp_path / "all.jsonl"
    written.write_text("".join(json.dumps(each) + "\n" for each in (record, *OTHERS)))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    table = datasets.load_dataset("json", data_files=str(written), split="train")
    table.to_parquet(tmp_path / "all.parquet")
    builder = Json(dataset_name="all", hash="0", data_files={"train": [str(written)]})
    builder.download_and_prepare()
    (tmp_path / "cache" / "someone___all").mkdir()
    folder = tmp_path / "cache" / "all" / builder.config_id
    folder.rename(tmp_path / "cache" / "someone___all" / "default")
    for source in (str(tmp_path / "all.parquet"), "hub:someone/all"):
        assert shown(source, tokenizer) == expected
        assert len(list(read_rows(source))) == 1 + len(OTHERS)


def test_a_table_adds_no_nulls_to_calls_and_definitions_of_tools(tokenizer, tmp_path):
    calls = [openai_call("weather", {"city": "Rome"}), openai_call("clock", {"zone": "CET", "as": {"hours": 24}})]
    tools = [[{"type": "function", "function": tool}] for tool in (WEATHER, CLOCK)]
    rows = [{"messages": [USER, call, ASSISTANT | {"role": "tool"}, ASSISTANT], "tools": tool}
            for call, tool in zip(calls, tools, strict=True)]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    conversations, _ = load_conversations([str(tmp_path / "t.parquet")])
    said = [render(each.messages, tokenizer, "all", each.tools) for each in conversations]
    assert said[0].startswith(f'{SHOWN_WEATHER}[user]Hi[assistant]<weather {{"city": "Rome"}}></s>')
    assert said[1].startswith(f'{SHOWN_CLOCK}[user]Hi[assistant]<clock {{"as": {{"hours": 24}}, "zone": "CET"}}></s>')


def test_columns_that_are_not_read_are_named_with_their_number(tmp_path):
    rows = [
        {"messages": [USER, ASSISTANT], "passage": "The bridge opened in 1932.", "score": 3, "prompt": "Hi"},
        {"messages": [USER, ASSISTANT], "passage": "", "source": "web", "id": "b", "instruction": "Sort."},
        {"conversations": [HUMAN, GPT], "passage": "Another.", "options": {"thinking": "off"}, "score": None},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, report = load_conversations([str(tmp_path / "a.jsonl")])
    assert report.unread == {"passage": 2, "source": 1, "instruction": 1, "options": 1}
    assert "columns not read, with the number of their records: passage (2)," in str(report)


def test_a_system_prompt_of_two_places_is_read_once_or_refused(tmp_path):
    system = {"role": "system", "content": "S"}
    rows = [{"system": text, "messages": [system, USER, ASSISTANT]} for text in ("S", "", None, "T", ["S"])]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    conversations, dropped = load_conversations([str(tmp_path / "a.jsonl")])
    assert [each.messages for each in conversations] == [(system, USER, ASSISTANT)] * 3
    assert dropped.counts.total() == 2 and "system prompt" in dropped.examples[0]
