"""Where an answer ends: before the first stop string, whatever steps and pieces it comes in, and within a character."""

import random
from dataclasses import replace
from functools import cache

import pytest
from transformers import PreTrainedTokenizerBase

from inference import generate
from inference.serve.app import AnswerText

PROMPT = "w3 w4 w5 w6 w7 w8 w3 w4"
NUM_TOKENS = 40
STOPS = [
    ["w9"],
    [" w1"],  # within a word, with the space before it
    ["w", "w9"],  # at once
    ["w36 w37 w38 w33", "37"],  # the second is complete first
    ["7 w38", "7 w38 w"],
    ["w35 w3", "nowhere"],
    ["w5 w6 w7 w8"],  # deep in the text
    ["w3 w4 w5 w6 w7 w8 w3 and"],  # begins, but is never complete
]


@cache
def tokens_alone(base, sampling):
    return generate(base, PROMPT, "none", max_new_tokens=NUM_TOKENS, **dict(sampling))[0].token_ids


def text_alone(base, stops, **sampling):
    """The text and number of tokens that the base alone writes, token by token, until a stop string is complete."""
    tokens = tokens_alone(base, tuple(sampling.items()))
    for count in range(1, len(tokens) + 1):
        text = base.tokenizer.decode(tokens[:count], skip_special_tokens=True)
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        if ends:
            return text[: min(ends)[1]], count, "stop"
    return text, len(tokens), "length"


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.5, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: ",".join(stop))
def test_an_answer_ends_where_that_of_the_base_alone_does(server, client, stop, sampling):
    expected = text_alone(server.base, stop, **sampling)
    asked = {"model": "toy", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": NUM_TOKENS, **sampling}
    asked |= {"stop": stop[0] if len(stop) == 1 else stop}
    for uses_drafter in (True, False):
        extra = {"use_drafter": uses_drafter}
        reply = client.chat.completions.create(extra_body=extra, **asked)
        choice = reply.choices[0]
        assert (choice.message.content, reply.usage.completion_tokens, choice.finish_reason) == expected
        chunks = client.chat.completions.create(extra_body=extra | {"include_steps": True}, stream=True, **asked)
        parts = [part for chunk in chunks for part in chunk.choices]
        assert "".join(part.delta.content or "" for part in parts) == expected[0]
        assert parts[-1].finish_reason == expected[2]
        steps = [step for part in parts for step in (part.model_extra or {}).get("steps", [])]
        assert sum(step["num_tokens"] for step in steps) == expected[1]
        assert sum(step["num_accepted"] == len(step["path"]) for step in steps) == len(steps)


def test_a_step_may_pass_over_a_stop_string(server):
    """Otherwise the test above would prove nothing of that."""
    steps = generate(server.base, PROMPT, "anpd:order=2", max_new_tokens=NUM_TOKENS)[0].steps
    ends = [sum(step.emitted for step in steps[: index + 1]) for index in range(len(steps))]
    assert any(text_alone(server.base, stop)[1] not in ends for stop in STOPS)


class Pieces(PreTrainedTokenizerBase):
    """A tokenizer whose tokens are these texts."""

    def __init__(self, texts):
        self.texts = texts

    def decode(self, tokens, **options):
        return "".join(self.texts[token] for token in tokens)


def test_nothing_is_shown_that_may_belong_to_a_stop_string_and_nothing_else_is_held_back():
    numbers, ended = random.Random(0), 0
    for _ in range(2000):
        pieces = ["".join(numbers.choices("ab", k=numbers.randint(1, 4))) for _ in range(numbers.randint(1, 8))]
        stops = ["".join(numbers.choices("abc", k=numbers.randint(1, 5))) for _ in range(numbers.randint(0, 3))]
        whole = "".join(pieces)
        found = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
        written, shown, read = AnswerText(Pieces(pieces), stops), "", ""
        for token, piece in enumerate(pieces):
            shown, read = shown + written.add(token, token == len(pieces) - 1), read + piece
            if written.is_stopped:
                break
            held = read[len(shown) :]
            assert token == len(pieces) - 1 or not held or any(stop.startswith(held) for stop in stops)
        assert shown == (whole[: min(found)[1]] if found else whole)
        assert written.is_stopped == bool(found)
        ended += bool(found)
    assert 200 < ended < 1800


@pytest.fixture(scope="module")
def bytewise(make_base):
    """A base whose tokens are the bytes of some characters, so that most cuts fall within one."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    some = [*"a bc", *(f"<0x{byte:02X}>" for byte in dict.fromkeys("€𝄞é".encode() * 2))]
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *some])}
    vocab |= {f"x{index}": index for index in range(len(vocab), 40)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    return replace(make_base(seed=4), tokenizer=tokenizer)


def test_a_text_cut_within_a_character_is_the_same_in_pieces(bytewise, serve_base):
    asked = {"model": "toy", "messages": [{"role": "user", "content": "abc a"}], "temperature": 1.0, "seed": 1}
    with serve_base(bytewise) as running:
        create, texts = running.client().chat.completions.create, []
        for max_tokens in range(1, 16, 3):
            whole = create(max_tokens=max_tokens, **asked).choices[0].message.content
            chunks = create(max_tokens=max_tokens, stream=True, **asked)
            assert "".join(part.delta.content or "" for chunk in chunks for part in chunk.choices) == whole
            texts.append(whole)
    assert any(text.endswith("\N{REPLACEMENT CHARACTER}") for text in texts), "some are cut within a character"
