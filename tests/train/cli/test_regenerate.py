"""Regenerated answers equal plain greedy decoding, survive interruptions and are read back token for token."""

import json
import os
import re
import shutil
import signal
import sys
import time
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from data import templates
from data.conversations import load_conversations, user_message
from data.module import ShareGPTData
from data.templates import encode, encode_prompt
from inference import runs
from inference.journal import Journal
from inference.options import AnswerOptions, SamplingOptions
from inference.regenerate import answerers
from inference.regenerate.answerers import LocalAnswerer
from inference.regenerate.command import answer_all
from inference.regenerate.dialogue import AnswerCounts, Dialogue
from inference.verifier.base import load_base
from tests.data.test_templates import THINKING
from tests.inference.evaluate.test_thinking_and_tools import Tomorrow
from train.cli import run_drafters

MAX_NEW_TOKENS = 12


@pytest.fixture(scope="module")
def exact(tiny_base):
    """The tiny base in float64, where no two logits are equal up to rounding, with more EOS tokens, so that some of
    its answers end."""
    model = deepcopy(tiny_base.model).double()
    model.generation_config.eos_token_id = [tiny_base.tokenizer.eos_token_id, *range(300, 330)]
    return replace(tiny_base, model=model)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Conversations with several turns, some without an answer, one with a system message."""
    said = load_conversations(["embedded:14:300"])[0]
    path = tmp_path_factory.mktemp("asked") / "asked.jsonl"
    rows = [{"id": each.id, "messages": [*each.messages]} for each in said]
    rows[3]["messages"] = rows[3]["messages"][:1]
    rows[5]["messages"].insert(0, {"role": "system", "content": "Be brief."})
    rows[6]["messages"] = [*rows[6]["messages"], {"role": "user", "content": "And then?"}]
    rows[7]["messages"][1]["content"] = ""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def answered(base, asked, folder, batch_size=3, num_turns=None, max_length=512, max_tokens=8192):
    dialogues = [
        Dialogue(c, base.tokenizer, "tokenizer", num_turns)
        for c in load_conversations([asked], requires_answers=False)[0]
    ]
    with Journal(folder / "journal", {}) as journal:
        answerer = LocalAnswerer(base, max_length)
        options = AnswerOptions(max_new_tokens=MAX_NEW_TOKENS, batch_size=batch_size, max_tokens=max_tokens)
        counts = answer_all(dialogues, answerer, journal, options)
    return dialogues, counts


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_answer_is_plain_greedy_decoding_after_the_new_answers_before_it(exact, asked, tmp_path, batch_size):
    dialogues, counts = answered(exact, asked, tmp_path, batch_size)
    conversations = load_conversations([asked], requires_answers=False)[0]
    assert max(len(dialogue.is_cut) for dialogue in dialogues) > 1
    ends = []
    for dialogue, conversation in zip(dialogues, conversations, strict=True):
        messages = [message for message in conversation.messages if message["role"] == "system"]
        for question in (message for message in conversation.messages if message["role"] == "user"):
            messages.append(question)
            prompt = torch.tensor([encode_prompt(messages, exact.tokenizer, "tokenizer")])
            ids = exact.greedy(prompt, torch.ones_like(prompt), MAX_NEW_TOKENS)[0].tolist()
            ended = ids[-1] in exact.eos
            text = exact.tokenizer.decode(ids[: len(ids) - ended], skip_special_tokens=True)
            if not text.strip():
                break
            messages.append(dialogue.messages[len(messages)])
            assert messages[-1]["content"].strip() == text.strip()
            ends.append(ended)
        assert dialogue.messages == messages[: len(dialogue.messages)]
        assert dialogue.ids.tolist()[-len(ids) :] == ids or not text.strip()
    assert set(ends) == {True, False}, "some answers end, some are cut"
    assert (counts.num_answers, counts.num_cut) == (len(ends), ends.count(False))


@pytest.mark.slow
def test_every_token_in_the_loss_is_the_bases_argmax_after_the_row_before_it(exact, asked, tmp_path):
    num_rows = 0
    for dialogue in answered(exact, asked, tmp_path)[0]:
        if dialogue.is_cut:
            num_rows += 1
            ids = dialogue.ids.tolist()
            picks = exact.model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
            seen = [place for place, bit in enumerate(dialogue.mask) if bit]
            assert seen and all(picks[place - 1] == ids[place] for place in seen)
    assert num_rows > 8


@pytest.mark.slow
def test_prompts_without_room_and_empty_answers_are_counted_and_named(exact, asked, tmp_path):
    lengths = sorted(
        len(encode_prompt(c.messages[: 1 + (c.messages[0]["role"] == "system")], exact.tokenizer, "tokenizer"))
        for c in load_conversations([asked], requires_answers=False)[0]
    )
    room = lengths[7] + 2
    dialogues, counts = answered(exact, asked, tmp_path / "b", max_length=room)
    assert sum(not d.is_cut for d in dialogues) >= sum(length >= room for length in lengths) > 0
    assert counts.dropped.counts["the prompt leaves no room for an answer"] > 0
    assert all(len(d.ids) <= room for d in dialogues)
    mute = replace(exact, model=deepcopy(exact.model))
    mute.model.generation_config.eos_token_id = list(range(400))
    dialogues, counts = answered(mute, asked, tmp_path / "c")
    assert counts.dropped.counts == {"the answer is empty": 14} and counts.num_answers == 0
    assert "turn 1: the answer is empty" in str(counts.dropped)


def test_a_limit_of_tokens_changes_batches_and_no_answer(tiny_base, asked, tmp_path):
    sizes, written = [], []
    for max_tokens in (1 << 30, 600, 1):
        dialogues, counts = answered(tiny_base, asked, tmp_path / str(max_tokens), 8, max_tokens=max_tokens)
        lines = (tmp_path / str(max_tokens) / "journal").read_text().splitlines()[1:]
        sizes.append([len(replies) for _, replies in map(json.loads, lines)])
        written.append([dialogue.record() for dialogue in dialogues])
    assert written[0] == written[1] == written[2]
    assert len(sizes[0]) < len(sizes[1]) < len(sizes[2]) == counts.num_answers == len(sizes[2]) * max(sizes[2])


def test_each_step_is_reported_by_its_tokens_and_the_time_left(tiny_base, asked, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "SECONDS_PER_LOG_LINE", 0)
    num_tokens = answered(tiny_base, asked, tmp_path, 3, num_turns=1)[1].num_tokens
    lines = capsys.readouterr().err.splitlines()
    pattern = r"tokens(?: \([\d,.]+ per second\))?: (\d+) of (\d+), [\d:?]+ left"
    found = [re.fullmatch(pattern, line) for line in lines]
    assert all("per second" in line and "?" not in line for line in lines[2:]), "also when a batch begins"
    done, totals = zip(*((int(each[1]), int(each[2])) for each in found), strict=True)
    assert done[:2] == (3, 6) and totals[0] == 14 * MAX_NEW_TOKENS, "from the first step on"
    assert done[-1] == num_tokens and sorted(done) == list(done)
    answered(tiny_base, asked, tmp_path, 3, num_turns=1)
    assert not capsys.readouterr().err, "nothing is decoded where the journal has all answers"


@pytest.mark.slow
def test_a_batch_that_does_not_fit_into_memory_is_halved(exact, asked, tmp_path, monkeypatch):
    whole = [d.record() for d in answered(exact, asked, tmp_path / "a", 8)[0] if d.is_cut]

    def in_little_memory(base, prompts, *given, decode_batch=answerers.decode_batch):
        if len(prompts) > 3:
            raise torch.OutOfMemoryError("too many")
        return decode_batch(base, prompts, *given)

    monkeypatch.setattr(answerers, "decode_batch", in_little_memory)
    assert [d.record() for d in answered(exact, asked, tmp_path / "b", 8)[0] if d.is_cut] == whole


QUICK = ("--max-new-tokens", MAX_NEW_TOKENS, "--batch-size", 3)


@pytest.fixture(scope="module")
def written(tiny, asked, tmp_path_factory):
    """What `drafters regenerate` writes for the tiny base."""
    out = tmp_path_factory.mktemp("written") / "own.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pytest"])
        run_drafters(["regenerate", "--base", str(tiny), "--files", asked, "--out", str(out), *map(str, QUICK)])
    return out


def test_training_reads_the_tokens_that_the_base_wrote(written, asked, tiny, tiny_base, tmp_path):
    rows = {row["id"]: row for row in map(json.loads, written.read_text().splitlines())}
    assert list(rows) == [each.id for each in load_conversations([asked], requires_answers=False)[0] if each.id in rows]
    assert [path.name for path in written.parent.iterdir()] == [written.name]
    data = ShareGPTData(str(tiny), [str(written)], val_size=0, max_length=512, cache_dir=str(tmp_path))
    data.setup("fit")
    assert len(data.train_set) == len(rows)
    for row in data.train_set:
        record = rows[row["id"]]
        assert (row["input_ids"], row["loss_mask"]) == (record["input_ids"], record["loss_mask"])
        if record["cut"][-1]:
            assert row["input_ids"][-1] != tiny_base.tokenizer.eos_token_id, "no EOS behind an answer cut short"
    assert any(record["cut"][-1] for record in rows.values())


@pytest.mark.slow
def test_the_printed_share_of_round_trips_is_that_of_encoding_the_texts(call, tiny, asked, tmp_path):
    out = tmp_path / "own.jsonl"
    words = "regenerate", "--base", tiny, "--files", asked, "--out", out, "--turns", "first"
    outcome = call(run_drafters, *words, *QUICK).succeeded()
    alike = []
    vocabulary = load_base(str(tiny)).tokenizer
    for row in map(json.loads, out.read_text().splitlines()):
        (as_text,), _ = load_conversations([write(tmp_path / "text.jsonl", {"messages": row["messages"]})])
        alike.append(encode(as_text, vocabulary, "tokenizer")[0][: len(row["input_ids"])] == row["input_ids"])
    assert f"{sum(alike) / len(alike):.1%} of the answers encode back to the same tokens" in outcome.out


@pytest.mark.slow
def test_without_files_the_base_answers_prompts_of_its_own(call, tmp_path):
    out = tmp_path / "own.jsonl"
    words = "regenerate", "--out", out, "--max-new-tokens", 4
    assert "--own_prompts N" in call(run_drafters, *words).one_line_error("drafters regenerate")
    refusal = call(run_drafters, *words, "--own_prompts", -1).one_line_error("drafters regenerate")
    assert "own_prompts must be at least 0" in refusal
    call(run_drafters, *words, "--own_prompts", 3).succeeded()
    rows = list(map(json.loads, out.read_text().splitlines()))
    assert [row["id"] for row in rows] == ["own-0", "own-1", "own-2"][: len(rows)] and rows
    assert all(row["messages"][0]["content"].strip() and row["input_ids"] for row in rows)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def write(path, row):
    path.write_text(json.dumps(row) + "\n")
    return str(path)


def slow_disk():
    """Every write that is to last takes a while, so that a run is interrupted before its end on a fast machine too."""
    fsync = os.fsync

    def slow_fsync(descriptor):
        time.sleep(0.05)
        fsync(descriptor)

    os.fsync = slow_fsync


@pytest.mark.slow
@pytest.mark.parametrize(("number", "ended"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_an_interrupted_run_that_is_repeated_writes_what_is_missing_and_the_same_file(
    written, tiny, asked, fork, tmp_path, monkeypatch, number, ended
):
    out = tmp_path / "own.jsonl"
    words = ["regenerate", "--base", str(tiny), "--files", asked, "--out", str(out), *map(str, QUICK)]
    partial = out.with_name("own.jsonl.partial")
    running = fork(*words, main=run_drafters, before=slow_disk)
    while running.is_alive() and (not partial.exists() or partial.read_bytes().count(b"\n") < 2):
        time.sleep(0.001)
    running.send(number)
    assert running.wait() == ended and not out.exists()
    said = running.log.read_text()
    assert "Traceback" not in said and ("stopped: repeat the command to go on" in said) == (number == signal.SIGINT)
    num_written = partial.read_bytes().count(b"\n") - 1  # below the line of the arguments
    with partial.open("ab") as stream:
        stream.write(b"[0,[[1,[5,")  # what a kill in the middle of writing leaves
    batches = []

    def counted(*given, decode_batch=answerers.decode_batch):
        batches.append(given)
        return decode_batch(*given)

    monkeypatch.setattr(answerers, "decode_batch", counted)
    run_drafters(words)
    assert out.read_bytes() == written.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    num_missing = len(batches)
    run_drafters([*words, "--overwrite"])
    assert len(batches) - num_missing == num_written + num_missing


@pytest.mark.slow
def test_a_run_that_goes_on_tomorrow_keeps_the_date_of_its_template(tiny, asked, tmp_path, monkeypatch):
    base = shutil.copytree(tiny, tmp_path / "base")
    own = load_base(str(tiny)).tokenizer.chat_template
    (base / "chat_template.jinja").write_text("{{ strftime_now('%Y') }} " + own)
    words = [
        "regenerate",
        "--base",
        str(base),
        "--files",
        asked,
        "--out",
        str(tmp_path / "out.jsonl"),
        *map(str, QUICK),
    ]
    batches, decode = [], answerers.decode_batch

    def interrupted(*given):
        batches.append(given)
        if len(batches) == 2:
            raise KeyboardInterrupt
        return decode(*given)

    monkeypatch.setattr(answerers, "decode_batch", interrupted)
    with pytest.raises(SystemExit):
        run_drafters(words)
    monkeypatch.setattr(templates, "date", Tomorrow)
    run_drafters(words)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    texts = [load_base(str(base)).tokenizer.decode(row["input_ids"]) for row in rows]
    assert texts and not any(text.startswith("2031") for text in texts)


def test_a_reply_that_the_base_cannot_have_given_is_refused(tiny_base, asked, tmp_path):
    for reply in ([1 << 30], [-1], [], ["x"], {"text": "y"}):
        (tmp_path / "journal").unlink(missing_ok=True)
        with Journal(tmp_path / "journal", {}) as journal:
            journal.append([0, [[0, reply]]])
        with pytest.raises(ValueError, match=r"journal line 2: .*; delete the file and start over"):
            answered(tiny_base, asked, tmp_path, 1)


@pytest.mark.slow
def test_a_partial_file_of_other_arguments_is_refused_or_replaced(call, tiny, asked, tmp_path):
    out = tmp_path / "own.jsonl"
    with Journal(tmp_path / "own.jsonl.partial", {"format": 1, "max_new_tokens": 3, "seed": 2}) as journal:
        journal.append([0, [[0, [1]]]])
    words = (run_drafters, "regenerate", "--base", tiny, "--files", asked, "--out", out, *QUICK)
    assert "max_new_tokens 3 instead of 12" in call(*words).one_line_error("drafters")
    sampled = call(*words, "--temperature", 0.7, "--seed", 1).one_line_error("drafters")
    assert "max_new_tokens 3 instead of 12" in sampled and "seed 2 instead of 1" in sampled
    assert call(*words, "--overwrite").code == 0
    assert "already there" in call(*words).one_line_error("drafters")


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--limit", 0], "limit must be at least 1, not 0"),
        (["--max-new-tokens", 0], "max_new_tokens must be at least 1"),
        (["--max-tokens", 0], "max_tokens must be at least 1, not 0"),
        (["--max-length", 513], "max_length is 513, but the context of"),
        (["--max-length", 8], "no prompt was answered: dropped 14 answers (14 x the prompt leaves no room"),
        (["--turns", "last"], "turns"),
        (["--template", "chatml"], "unknown chat template 'chatml'"),
        (["--model", "m"], "--model m is the name of the base on a server: give --server URL, too"),
        (["--server", "localhost", "--model", "m"], "--server must look like"),
        (["--num-answers", 2], "2 greedy answers would be equal: give a temperature above 0"),
        (["--num-answers", 0], "num_answers must be at least 1, not 0"),
        (["--top-p", 0.5], "top_p 0.5 is for sampling"),
        (["--temperature", -1], "temperature must be a number above 0"),
    ],
)
def test_a_wrong_option_is_reported_in_one_line(call, tiny, asked, tmp_path, words, reason):
    outcome = call(run_drafters, "regenerate", "--base", tiny, "--files", asked, "--out", tmp_path / "o.jsonl", *words)
    assert reason in outcome.one_line_error("drafters")
    assert not (tmp_path / "o.jsonl").exists()


# ---- a server


def served(call, server, tiny, file, out, *words):
    where = ("--server", server.url, "--model", "m", "--concurrency", 3)
    return call(run_drafters, "regenerate", "--base", tiny, "--files", file, "--out", out, *QUICK, *where, *words)


def test_a_server_can_answer_and_its_cut_answers_get_no_eos(call, chat_server, tiny, tiny_base, tmp_path):
    asked = [["one two", "three"], ["slow " + "far " * 20], ["slow 2"], ["slow 3"], ["fail 400 9"]]
    file = tmp_path / "asked.jsonl"
    file.write_text(
        "".join(json.dumps({"messages": sum(map(ask, turns), [])}) + "\n" for turns in asked)  # noqa: RUF017
    )
    outcome = served(call, chat_server, tiny, file, tmp_path / "out.jsonl").succeeded()
    assert "4 of 5 conversations, 5 answers" in outcome.out and "1 answers cut short" in outcome.out
    assert "1 x the server refuses: HTTP 400" in outcome.out and "another chat template than --template?" in outcome.out
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [[m["content"] for m in row["messages"][1::2]] for row in rows] == [
        ["two one", "three"],
        [" ".join(["far"] * MAX_NEW_TOKENS)],
        ["2 slow"],
        ["3 slow"],
    ]
    eos = tiny_base.tokenizer.eos_token_id
    for row in rows:
        assert (row["input_ids"][-1] == eos) == (not row["cut"][-1])
        if not any(row["cut"]):
            (text,), _ = load_conversations([write(tmp_path / "text.jsonl", {"messages": row["messages"]})])
            ids, mask = encode(text, tiny_base.tokenizer, "tokenizer")
            assert (ids, mask) == (row["input_ids"], row["loss_mask"])
    assert 1 < chat_server.most_open <= 3, "as many requests at a time as were asked for"


def ask(text):
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "-"}]


def test_training_reads_the_tokens_that_a_server_reports(call, chat_server, tiny, tiny_base, tmp_path):
    """Its tokens may be others than those that encode the text, and have no EOS where the answer is cut off."""
    encode, eos = tiny_base.tokenizer, tiny_base.tokenizer.eos_token_id

    def letter_by_letter(text):
        ids = sum((encode(letter, add_special_tokens=False).input_ids for letter in text), [])  # noqa: RUF017
        return ids if text.startswith("far") else [*ids, eos]

    chat_server.encode = letter_by_letter
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps({"messages": ask(text)}) + "\n" for text in ("one two", "far " * 20)))
    served(call, chat_server, tiny, file, tmp_path / "out.jsonl").succeeded()
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for row, text in zip(rows, ("two one", " ".join(["far"] * MAX_NEW_TOKENS)), strict=True):
        answer = letter_by_letter(text)
        assert row["input_ids"][-len(answer) :] == answer and sum(row["loss_mask"]) == len(answer)
    assert [row["cut"] for row in rows] == [[False], [True]]


@pytest.mark.slow
def test_a_server_that_fails_at_everything_stops_the_run_which_can_be_continued(call, chat_server, tiny, tmp_path):
    file, out = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    file.write_text(
        "".join(json.dumps({"messages": ask(f"fail 500 {n}" if n > 5 else f"a {n}")}) + "\n" for n in (6, 7, 8, 2, 3))
    )
    assert "fails at all of 3 requests" in served(call, chat_server, tiny, file, out).one_line_error("drafters")
    assert not out.exists()
    done = served(call, chat_server, tiny, file, out)
    assert done.code == 0 and len(out.read_text().splitlines()) == 5


def test_tokens_that_a_later_prompt_renders_differently_leave_the_loss(tiny_base):
    """The template shows earlier answers in capitals, so their tokens are no longer those that were written."""
    vocabulary = deepcopy(tiny_base.tokenizer)
    vocabulary.chat_template = (
        "{%- for m in messages -%}{%- if m['role'] == 'user' -%}{{- 'Q' + m['content'] + 'A' -}}"
        "{%- else -%}{%- generation -%}{{- (m['content'] if loop.last else m['content'] | upper) + eos_token -}}"
        "{%- endgeneration -%}{%- endif -%}{%- endfor -%}"
    )
    (conversation,) = load_conversations(["embedded:60:100"])[0][:1]
    conversation = replace(
        conversation, messages=(user_message("a"), {"role": "assistant", "content": "-"}, user_message("b"))
    )
    dialogue, counts, eos = (
        Dialogue(conversation, vocabulary, "tokenizer", None),
        AnswerCounts(),
        vocabulary.eos_token_id,
    )
    first = [*vocabulary("the cat").input_ids, eos]
    dialogue.add_tokens(dialogue.prompt(), first, frozenset([eos]), counts)
    assert sum(dialogue.mask) == len(first)
    second = [*vocabulary("a dog").input_ids, eos]
    dialogue.add_tokens(dialogue.prompt(), second, frozenset([eos]), counts)
    assert sum(dialogue.mask) == len(second) and counts.num_lost == len(first)
    assert [message["content"] for message in dialogue.messages] == ["a", "the cat", "b", "a dog"]


# ---- sampled answers


def sampled(base, folder, seed, num_answers=2, batch_size=64):
    """The records of a few conversations of two turns."""
    said = load_conversations(["embedded:4:300"], requires_answers=False)[0]
    dialogues = [Dialogue(each, base.tokenizer, "tokenizer", 2, n) for each in said for n in range(num_answers)]
    options = AnswerOptions(max_new_tokens=6, num_answers=num_answers, batch_size=batch_size)
    with Journal(folder / f"{seed} {num_answers} {batch_size}", {}) as journal:
        sampling = SamplingOptions(temperature=1.2, top_p=0.95, seed=seed)
        answer_all(dialogues, LocalAnswerer(base, 512), journal, options, sampling=sampling)
    return [dialogue.record() for dialogue in dialogues]


def test_sampled_answers_depend_on_the_seed_and_neither_on_batches_nor_on_the_number_of_answers(tiny_base, tmp_path):
    exact = replace(tiny_base, model=deepcopy(tiny_base.model).double())  # where rounding moves no draw
    pairs = sampled(exact, tmp_path, seed=5)
    assert sampled(exact, tmp_path, seed=5, batch_size=3) == pairs
    assert sampled(exact, tmp_path, seed=5, num_answers=1) == pairs[::2]
    assert [each["id"] for each in pairs[1::2]] == [f"{each['id']} answer 2" for each in pairs[::2]]
    others = sampled(exact, tmp_path, seed=6)
    answers = [each["messages"][-1]["content"] for each in (*pairs, *others) if each["cut"]]
    assert len(answers) == len(set(answers)) > 10, "no two of 16 are equal"


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
    served(call, chat_server, base, asked, out, *options).succeeded()
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
