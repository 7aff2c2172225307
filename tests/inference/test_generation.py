"""`generate` and `stream`: all forms of prompts, complete texts and pieces, and the runners kept with a model."""

import copy
import dataclasses
import gc
import random
import subprocess
import sys
import weakref
from functools import cache

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import LogitsProcessor, PreTrainedTokenizerFast

import inference
from inference import generate, generation, stream
from inference.generation import IncrementalDetokenizer, acquire_runner
from inference.verifier.sampling import Greedy, KeyedSampler
from inference.verify import generate_reference
from tests.conftest import refusal

TEXTS = ["naïve café — 3 × 4 € 😀👩‍🚀", "漢字かな交じり文。한국어 ไทย", "plain", "a\u0301\ufffdb \U0001f1e9\U0001f1ea"]


@pytest.fixture(scope="module")
def babbler(make_base, chat):
    """A random base with the real tokenizer: it writes complete and incomplete characters."""
    base = make_base(vocab=len(chat.tokenizer), context=256)
    return type(base)("babbler", base.model, chat.tokenizer)


# ---- texts


def test_the_cost_of_a_text_is_counted(base):
    (one,) = generate(base, [3, 4, 3, 4, 3], max_new_tokens=30, eos=[])
    assert sum(step.emitted for step in one.steps) == len(one.token_ids) == 30
    assert one.acceptance_length == (30 - one.steps[0].emitted) / (len(one.steps) - 1)
    assert one.tokens_per_second == 30 / one.seconds
    assert generate(base, [3], max_new_tokens=1)[0].acceptance_length is None


@pytest.mark.slow
def test_prompt_i_is_sampled_with_seed_plus_i(base):
    prompts, arguments = [[3, 4], [3, 4]], {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "max_new_tokens": 20}
    written = generate(base, prompts, seed=5, **arguments)
    expected = [generate_reference(base, [3, 4], 20, KeyedSampler(0.9, 20, 0.95, seed)) for seed in (5, 6)]
    assert [one.token_ids for one in written] == expected and expected[0] != expected[1]


def test_a_text_ends_at_the_given_end_tokens_or_else_at_the_bases_own(base):
    free = generate(base, [3, 4, 5], max_new_tokens=20, eos=[])[0].token_ids
    end = free[6]
    assert generate(base, [3, 4, 5], max_new_tokens=20, eos=end)[0].token_ids == free[: free.index(end) + 1]
    assert generate(base, [3, 4, 5], max_new_tokens=20)[0].token_ids == generate_reference(
        base, [3, 4, 5], 20, Greedy()
    )


# ---- prompts


@pytest.mark.slow
def test_texts_chat_messages_and_token_ids_may_be_asked_together(chat):
    text = "Name a colour."
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    plain = chat.tokenizer(text).input_ids
    rendered = chat.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    expected = [generate_reference(chat, prompt, 8, Greedy()) for prompt in (plain, rendered)]
    assert expected[0] != expected[1]
    written = generate(chat, [text, messages, plain, rendered], max_new_tokens=8)
    assert [one.token_ids for one in written] == expected + expected


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}
CALL_IN_TEXT = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
# As templates of public models write them: names, reasoning, calls with arguments as objects, and definitions.
TEMPLATE = (
    "{%- for tool in tools or [] -%}{{ '[' + (tool | tojson) + ']' }}{%- endfor -%}"
    "{%- for message in messages -%}{{ '<' + message.role + ' ' + (message.name or '') + '>' }}"
    "{{- '(' + message.reasoning_content + ')' if message.reasoning_content }}{{- message.content or '' }}"
    "{%- for call in message.tool_calls or [] -%}{{ call.function.name }}"
    "{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{%- endfor -%}{%- endfor -%}{{ '<assistant>' if add_generation_prompt }}"
)


def function_tool(city: str) -> str:
    """The weather.

    Args:
        city: Where.
    """


@pytest.mark.parametrize("tools", [None, [], TOOLS, tuple(TOOLS), [function_tool]], ids=lambda each: str(each)[:12])
@pytest.mark.parametrize(
    "answer",
    [
        {"content": "Sunny.", "reasoning_content": "It is June."},
        {"content": None, "tool_calls": [CALL]},
        {"content": "", "tool_calls": [CALL, CALL], "reasoning_content": "Look."},
        {"tool_calls": [CALL_IN_TEXT]},
        {"content": "Sunny.", "name": "otto"},
    ],
    ids=str,
)
def test_a_prompt_is_what_the_template_writes_of_all_that_messages_hold_and_of_tools(chat, answer, tools):
    tokenizer = copy.deepcopy(chat.tokenizer)
    tokenizer.chat_template = TEMPLATE
    base = dataclasses.replace(chat, tokenizer=tokenizer)
    results = [{"role": "tool", "name": "weather", "content": "21"}] if "tool_calls" in answer else []
    messages = [{"role": "user", "name": "ann", "content": "Rome?"}, {"role": "assistant", **answer}, *results]
    seen = []
    before = copy.deepcopy(messages)
    (one,) = generate(base, messages, tools=tools, max_new_tokens=2, logits_processor=[Recorder(seen)])
    as_object = [
        message | ({"tool_calls": [CALL] * len(message["tool_calls"])} if "tool_calls" in message else {})
        for message in messages
    ]
    rendered = tokenizer.apply_chat_template(as_object, tools=tools or None, add_generation_prompt=True)
    assert seen[0] == rendered["input_ids"] and messages == before
    assert "".join(stream(base, messages, tools=tools, max_new_tokens=2)) == one.text


def test_tools_that_would_be_lost_are_refused(chat):
    for prompt, said in (("Rome?", "without tools"), ([3, 4], "without tools")):
        assert said in refusal(generate, chat, prompt, tools=TOOLS)
    assert "ignores tools" in refusal(stream, chat, [{"role": "user", "content": "Rome?"}], tools=TOOLS)


class Recorder(LogitsProcessor):
    """Keeps the token ids before each new token."""

    def __init__(self, seen):
        self.seen = seen

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        return scores


# ---- pieces


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(3))
def test_pieces_are_complete_characters_and_join_to_the_text(chat, text, seed):
    rng, ids = random.Random(seed), chat.tokenizer(text).input_ids
    growing, shown = IncrementalDetokenizer(chat.tokenizer), ""
    while ids:
        size = rng.randrange(1, 4)
        shown += growing.add(ids[:size])
        ids = ids[size:]
        assert text.startswith(shown)
    assert shown + growing.finish() == text


@cache
def byte_fallback():
    """A tokenizer like LLaMA's: characters that it does not know are written as their bytes, and spaces as a mark."""
    vocab = {
        token: index for index, token in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁Helo"])
    }
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.mark.parametrize("text", ["Hello 👋🏽 Hello", "👩‍🚀é 漢字", "é", "Hello"])
def test_a_text_cut_anywhere_is_the_same_in_pieces_of_any_size(text):
    tokenizer = byte_fallback()
    ids = tokenizer(text).input_ids
    for end in range(len(ids) + 1):
        texts = set()
        for size in (1, 2, 3, 4, len(ids)):
            detokenizer = IncrementalDetokenizer(tokenizer)
            pieces = [detokenizer.add(ids[start : min(start + size, end)]) for start in range(0, end, size)]
            assert all(text.startswith(piece) for piece in ("".join(pieces[:count]) for count in range(len(pieces))))
            texts.add("".join(pieces) + detokenizer.finish())
        (cut,) = texts
        complete = cut.rstrip("\N{REPLACEMENT CHARACTER}")
        missing = text.encode()[len(complete.encode()) :]
        assert text.startswith(complete) and len(cut) - len(complete) < max(2, len(missing[:4]))
    assert cut == text


@pytest.mark.parametrize("num_tokens", range(4, 16))
def test_pieces_join_to_the_text_of_generate_where_characters_are_bytes(make_base, oracle, num_tokens):
    base, tokenizer = make_base(vocab=262), byte_fallback()
    base = type(base)("bytes", base.model, tokenizer)
    answer = tokenizer("Hello 👋🏽").input_ids
    arguments = {"max_new_tokens": num_tokens, "logits_processor": [Writes(answer)], "eos": []}
    (one,) = generate(base, [3], oracle([3, *answer]), **arguments)
    assert one.token_ids == answer[:num_tokens]
    for drafter in ("none", oracle([3, *answer], 3), oracle([3, *answer])):
        assert "".join(stream(base, [3], drafter, **arguments)) == one.text
    assert one.text.rstrip("\N{REPLACEMENT CHARACTER}") in (
        "Hello 👋",
        "Hello ",
        "Hello 👋🏽",
        *("Hello"[:i] for i in range(6)),
    )


class Writes(LogitsProcessor):
    """Makes a base write a text behind a prompt of one token."""

    def __init__(self, text):
        self.text = text

    def __call__(self, input_ids, scores):
        scores[:, self.text[min(input_ids.shape[1], len(self.text)) - 1]] = 1e6
        return scores


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_streamed_pieces_join_to_the_text_of_generate_even_with_broken_characters(babbler, seed):
    arguments = {"temperature": 1.0, "seed": seed, "max_new_tokens": 150, "eos": []}
    pieces = list(stream(babbler, [5, 6, 7], "anpd", **arguments))
    (one,) = generate(babbler, [5, 6, 7], "anpd", **arguments)
    assert "".join(pieces) == one.text and "\ufffd" in one.text
    assert all(pieces) and len(pieces) > 10


def test_a_decoder_that_puts_spaces_between_tokens_streams_them_too(base):
    pieces = list(stream(base, "w3 w4 w5", max_new_tokens=20))
    assert "".join(pieces) == generate(base, "w3 w4 w5", max_new_tokens=20)[0].text
    assert " " in "".join(pieces)


# ---- runners


@pytest.mark.slow
def test_interleaved_streams_do_not_disturb_each_other(base):
    prompts = [[3, 4, 5], [9, 8, 9, 8]]
    expected = [one.text for one in generate(base, prompts, max_new_tokens=25, eos=[])]
    streams = [stream(base, prompt, max_new_tokens=25, eos=[]) for prompt in prompts]
    shown = ["", ""]
    for _ in range(30):
        for index, pieces in enumerate(streams):
            shown[index] += next(pieces, "")
    assert shown == expected


def test_a_model_that_was_cast_or_given_another_head_gets_a_new_runner(make_base):
    base = make_base(seed=1, dtype=torch.float32)
    model = copy.deepcopy(base.model)
    mine = type(base)("copy", model, base.tokenizer)
    with acquire_runner(mine) as first, acquire_runner(mine) as other:
        assert other is not first, "one call at a time uses it"
    with acquire_runner(mine) as again:
        assert again is first
    with acquire_runner(type(base)("cast", model.to(torch.float64), base.tokenizer)) as second:
        assert second is not first and second.attention.dtype == torch.float64
    model.resize_token_embeddings(44)
    with acquire_runner(mine) as third:
        assert third is not second and third.vocab_size == 44


@pytest.mark.slow
def test_a_kept_runner_neither_outlives_its_model_nor_goes_into_copies(make_base):
    base = make_base(seed=1)
    model = copy.deepcopy(base.model)
    generate(model, [3, 4], tokenizer=base.tokenizer, max_new_tokens=3)
    assert generation._idle[model] and copy.deepcopy(model) not in generation._idle
    assert not vars(model).keys() - vars(base.model).keys()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# ---- the package


@pytest.mark.slow
def test_the_package_lists_and_exports_its_names_and_imports_lazily(repository):
    code = (
        "import sys, inference; print({*inference.__all__, '__doc__'} <= set(dir(inference)), 'torch' in sys.modules); "
        "from inference import generate; slow = {'torch._dynamo', 'transformers.modeling_utils', 'datasets'}; "
        "print(slow.isdisjoint(sys.modules)); import inference.generation, inference.speculation; "
        "from inference import generate, speculate; print(callable(generate), callable(speculate))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "True", "True", "True"]
    assert all(getattr(inference, name) for name in inference.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        inference.nothing  # noqa: B018
