"""Regenerated answers that are sampled, several for a prompt, or reasoned by a server."""

import json
from copy import deepcopy
from dataclasses import replace

import pytest

from data.conversations import load_conversations
from data.templates import encode
from inference.journal import Journal
from inference.regenerate.answerers import LocalAnswerer
from inference.regenerate.command import AnswerOptions, answer_all
from inference.regenerate.dialogue import Dialogue
from inference.verifier.options import SamplingOptions
from train.cli import run_drafters

THINKING = (
    "{%- for m in messages -%}{{- '[' + m.role + ']' -}}"
    "{%- if m.role == 'assistant' -%}"
    "{%- if loop.last and m.reasoning_content -%}{{- '<think>' + m.reasoning_content + '</think>' -}}{%- endif -%}"
    "{{- m.content + eos_token -}}{%- else -%}{{- m.content -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '[assistant]' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think></think>' -}}{%- endif -%}"
    "{%- endif -%}"
)


@pytest.fixture(scope="module")
def exact(tiny_base):
    """The tiny base in float64, where rounding moves no draw."""
    return replace(tiny_base, model=deepcopy(tiny_base.model).double())


def answered(base, folder, seed, num_answers=2, batch_size=64):
    """The records of a few conversations of two turns."""
    said = load_conversations(["embedded:4:3"], requires_answers=False)[0]
    dialogues = [Dialogue(each, base.tokenizer, "tokenizer", 2, n) for each in said for n in range(num_answers)]
    options = AnswerOptions(max_new_tokens=6, num_answers=num_answers, batch_size=batch_size)
    with Journal(folder / f"{seed} {num_answers} {batch_size}", {}) as journal:
        sampling = SamplingOptions(temperature=1.2, top_p=0.95, seed=seed)
        answer_all(dialogues, LocalAnswerer(base, 512), journal, options, sampling=sampling)
    return [dialogue.record() for dialogue in dialogues]


def test_sampled_answers_depend_on_the_seed_and_neither_on_batches_nor_on_the_number_of_answers(exact, tmp_path):
    pairs = answered(exact, tmp_path, seed=5)
    assert answered(exact, tmp_path, seed=5, batch_size=3) == pairs
    assert answered(exact, tmp_path, seed=5, num_answers=1) == pairs[::2]
    assert [each["id"] for each in pairs[1::2]] == [f"{each['id']} answer 2" for each in pairs[::2]]
    others = answered(exact, tmp_path, seed=6)
    answers = [each["messages"][-1]["content"] for each in (*pairs, *others) if each["cut"]]
    assert len(answers) == len(set(answers)) > 10, "no two of 16 are equal"


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--num-answers", 2], "2 greedy answers would be equal: give a temperature above 0"),
        (["--num-answers", 0], "num_answers must be at least 1, not 0"),
        (["--top-p", 0.5], "top_p 0.5 is for sampling"),
        (["--temperature", -1], "temperature must be a number above 0"),
    ],
)
def test_a_wrong_sampling_option_is_reported_in_one_line(call, tiny, tmp_path, words, reason):
    out = tmp_path / "o.jsonl"
    outcome = call(run_drafters, "regenerate", "--base", tiny, "--files", "embedded:2", "--out", out, *words)
    assert reason in outcome.one_line_error("drafters")


@pytest.mark.parametrize("is_on", [True, False])
def test_a_server_is_told_how_to_sample_and_to_reason_and_its_reasoning_is_learned(
    call, chat_server, make_tiny, tiny_tokenizer, tmp_path, is_on
):
    tokenizer = deepcopy(tiny_tokenizer)
    tokenizer.chat_template = THINKING
    base, asked, out = make_tiny(f"thinking {is_on}", tokenizer), tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    asked.write_text(json.dumps({"messages": [{"role": "user", "content": "one two"}]}) + "\n")
    switch = "on" if is_on else "off"
    options = ("--temperature", 0.7, "--top-p", 0.8, "--seed", 3, "--template", f"tokenizer:thinking={switch}")
    where = ("--endpoint", chat_server.url, "--model", "m")
    done = call(run_drafters, "regenerate", "--base", base, "--files", asked, "--out", out, *options, *where)
    assert done.code == 0, done.err
    ((_, _, body),) = chat_server.seen
    assert (body["temperature"], body["top_p"]) == (0.7, 0.8) and 0 <= body["seed"] < 2**31
    assert body["chat_template_kwargs"] == {"enable_thinking": is_on}
    record = json.loads(out.read_text())
    learned = [token for token, bit in zip(record["input_ids"], record["loss_mask"], strict=True) if bit]
    answer = "two one</s>"
    assert tokenizer.decode(learned) == (f"<think>the other way round</think>{answer}" if is_on else answer)
    assert record["messages"][-1].get("reasoning_content") == ("the other way round" if is_on else None)
    (again,), _ = load_conversations([str(out)])
    assert encode(again, tokenizer, f"tokenizer:thinking={switch}") == (record["input_ids"], record["loss_mask"])
