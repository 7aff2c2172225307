"""Every call of the Python interface gives the text of the base alone, or a line that names the wrong argument."""

import array
import fractions
import pathlib
from collections import UserList
from functools import cache
from types import MappingProxyType

import numpy as np
import pytest
import torch
from transformers import AutoModel, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

import drafters
from data.tokenizer import tokenizer_hash
from drafters.checkpoint import DrafterConfig, save
from inference import Base, IncrementalDetokenizer, Speculation, generate, load_base, speculate, stream
from inference.options import SamplingOptions
from inference.verifier.runner import Runner
from inference.verifier.sampling import Greedy, KeyedSampler
from inference.verifier.session import Session

TEXT, NUM_TOKENS, HALF = "Name a colour.", 5, "Smile \ud83d"
MESSAGES = [{"role": "user", "content": TEXT}]
PENALTY = RepetitionPenaltyLogitsProcessor(1.3)
CHECKPOINT = pathlib.Path(__file__).parents[2] / "checkpoints" / "tiny-chat"


@pytest.fixture(scope="module")
def alone(chat):
    """The text of the base alone after token ids."""

    @cache
    def write(ids, max_new_tokens=NUM_TOKENS, eos=chat.eos, processors=(), **sampling):
        sampler = KeyedSampler(processors=processors, **sampling) if sampling else Greedy(processors)
        return Session(Runner(chat), drafters.NoDrafter(), sampler).run(ids, max_new_tokens, frozenset(eos)).tokens

    return lambda ids, **options: chat.tokenizer.decode(write(tuple(ids), **options), skip_special_tokens=True)


@pytest.fixture(scope="module")
def ids(chat):
    return tuple(chat.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"])


class Part(str):
    """Part of the line of a refusal."""


def outcome(call):
    """What a call returns, or the one line with which it refuses; any other exception fails the test."""
    try:
        return call()
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 700
        return error


def assert_as_expected(got, expected):
    """An exception of which the expected name is part, or the very text."""
    if isinstance(got, ValueError):
        assert isinstance(expected, Part) and expected in str(got), got
    else:
        assert got == expected


def both(base, prompt, drafter="anpd", **options):
    """The outcome of `generate`, which is that of `stream`."""
    (first, second) = (
        outcome(lambda: generate(base, prompt, drafter, **options)[0].text),
        outcome(lambda: "".join(stream(base, prompt, drafter, **options))),
    )
    assert str(first) == str(second)
    return first


# ---- options


OPTIONS = [
    # accepted, with what they mean
    ({}, {}),
    *(({"max_new_tokens": number}, {"max_new_tokens": 4}) for number in (4, np.int64(4), np.uint8(4), torch.tensor(4))),
    ({"max_new_tokens": 1}, {"max_new_tokens": 1}),
    *(({name: None}, {}) for name in ("temperature", "top_k", "top_p", "seed", "check", "graphed", "bitwise", "eos")),
    ({"logits_processor": None}, {}),
    ({"tokenizer": None, "tools": None}, {}),
    *(({"temperature": value}, {}) for value in (0, 0.0, np.float32(0), 1e-7, False or 0)),
    ({"seed": 3}, {}),
    *(
        ({"temperature": value, "seed": 3}, {"temperature": 1.5, "seed": 3})
        for value in (1.5, np.float64(1.5), np.float32(1.5), torch.tensor(1.5))
    ),
    ({"temperature": 1}, {"temperature": 1.0}),
    ({"temperature": 2.0, "seed": np.int64(2**40)}, {"temperature": 2.0, "seed": 2**40}),
    ({"temperature": 2.0, "top_k": np.int32(3)}, {"temperature": 2.0, "top_k": 3}),
    ({"temperature": 2.0, "top_k": 10**6}, {"temperature": 2.0}),
    ({"temperature": 2.0, "top_p": np.float32(0.5)}, {"temperature": 2.0, "top_p": 0.5}),
    ({"temperature": 2.0, "top_p": 1}, {"temperature": 2.0}),
    ({"temperature": 2.0, "top_k": None, "top_p": None, "seed": None}, {"temperature": 2.0}),
    *(({"eos": eos}, {"eos": ()}) for eos in ([], (), set(), frozenset())),
    *(
        ({"eos": eos}, {"eos": (2, 70)})
        for eos in ([2, 70], (2, 70), {2, 70}, np.array([2, 70]), [np.int64(2), 70], torch.tensor([2, 70]))
    ),
    *(({"eos": eos}, {"eos": (1023,)}) for eos in (1023, np.int64(1023), [1023])),
    *(({"logits_processor": kind}, {"processors": (PENALTY,)}) for kind in ([PENALTY], (PENALTY,))),
    ({"logits_processor": LogitsProcessorList([PENALTY])}, {"processors": (PENALTY,)}),
    ({"logits_processor": [lambda ids, scores: PENALTY(ids, scores)]}, {"processors": (PENALTY,)}),
    ({"check": False}, {}),
    ({"check": np.True_, "bitwise": False}, {}),
    # refused
    *(({"max_new_tokens": value}, "max_new_tokens") for value in (0, -1, "4", 4.0, 4.5, True, [4], b"4", float("nan"))),
    *(
        ({"temperature": value}, "temperature")
        for value in ("0.7", -1, -0.5, float("nan"), float("inf"), [1], 1j, True)
    ),
    *(({"temperature": 1.0, "top_k": value}, "top_k") for value in (-1, "5", 2.5, True, [5])),
    *(({"temperature": 1.0, "top_p": value}, "top_p") for value in (0, -0.1, 1.1, "0.9", float("nan"), True)),
    *(({"temperature": 1.0, "seed": value}, "seed") for value in (-1, "0", 1.5, True, [1])),
    *(({name: value}, name) for name, value in (("top_k", 5), ("top_p", 0.5))),
    *(
        ({"eos": value}, "eos")
        for value in ("</s>", b"</s>", ["</s>"], -5, [-5], 1.5, [1.5], [2, None], 10**7, [2, 1024], 2**70, True, {2: 1})
    ),
    *(
        ({"eos": value}, "eos")
        for value in (np.array([1.5]), range(2, 4), object(), iter([2]), [[2]], fractions.Fraction(2))
    ),
    *(({name: value}, name) for name in ("check", "graphed", "bitwise") for value in ("yes", 1, [True], 0.0)),
    *(({"logits_processor": value}, "logits_processor") for value in (PENALTY, [None], ["x"], "x", 3, {PENALTY})),
    *(({"tokenizer": value}, "tokenizer") for value in ("path", CHECKPOINT, 3, object())),
    *(
        ({"tools": value}, "tools")
        for value in ("weather", ["weather"], 3, {"type": "function"}, [{"type": "function"}])
    ),
    ({"max_tokens": 4}, "max_tokens: did you mean max_new_tokens?"),
    ({"temprature": 1.0}, "temprature: did you mean temperature?"),
    ({"topk": 4}, "topk: did you mean top_k?"),
    ({"do_sample": True}, "no option do_sample"),
    ({"eos_token_id": 2}, "eos_token_id: did you mean"),
    ({"self": 2}, "self"),
]


@pytest.mark.parametrize(("options", "meaning"), OPTIONS)
def test_an_option_means_what_it_says_or_is_refused_by_name(chat, alone, ids, options, meaning):
    got = both(chat, MESSAGES, **{"max_new_tokens": NUM_TOKENS, **options})
    assert_as_expected(got, Part(meaning) if isinstance(meaning, str) else alone(ids, **meaning))


# ---- prompts


def text_part(text):
    return {"type": "text", "text": text}


ACCEPTED_PROMPTS = {
    "messages": MESSAGES,
    "a tuple of messages": tuple(MESSAGES),
    "a list of one prompt": [MESSAGES],
    "mapping proxies": [MappingProxyType(MESSAGES[0])],
    "a user's list": UserList(MESSAGES),
    "parts that are texts": [{"role": "user", "content": [text_part(TEXT)]}],
    "a text of numpy": [{"role": "user", "content": np.str_(TEXT)}],
}
ACCEPTED_TOKENS = {
    "list": list,
    "tuple": tuple,
    "array of numpy": np.array,
    "matrix of numpy": lambda ids: np.array([ids]),
    "tensor": torch.tensor,
    "batch of one": lambda ids: torch.tensor([ids]),
    "list of numpy's numbers": lambda ids: [np.int32(each) for each in ids],
    "list of lists": lambda ids: [list(ids)],
    "array": lambda ids: array.array("q", ids),
    "a user's list": UserList,
}
REFUSED_PROMPTS = {
    "none": (None, "prompt"),
    "a number": (3, "prompt"),
    "empty text": ("", "prompt"),
    "empty tokens": ([[]], "prompt"),
    "bytes": (b"Name", "prompt"),
    "a bytearray": (bytearray(b"Name"), "prompt"),
    "a view of bytes": (memoryview(b"Name"), "prompt"),
    "a list of bytes": ([b"Name"], "prompt"),
    "a set": ({3, 4}, "prompt"),
    "a generator": ((each for each in (3, 4)), "prompt"),
    "a path": (pathlib.Path("prompt.txt"), "prompt"),
    "a message alone": (MESSAGES[0], "prompt"),
    "an encoding": ({"input_ids": [3, 4]}, "prompt"),
    "no role": ([{"content": TEXT}], "prompt"),
    "a role that is a number": ([{"role": 3, "content": TEXT}], "prompt"),
    "no content": ([{"role": "user"}], "prompt"),
    "content none": ([{"role": "user", "content": None}], "prompt"),
    "content that is a number": ([{"role": "user", "content": 5}], "prompt"),
    "content of bytes": ([{"role": "user", "content": b"Name"}], "prompt"),
    "an image": ([{"role": "user", "content": [{"type": "image"}]}], "prompt"),
    "tool calls without a template for them": (
        [*MESSAGES, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
        "no place for tool calls",
    ),
    "pairs": ([("user", TEXT)], "prompt"),
    "half a character": (HALF, "the prompt: a text holds half"),
    "half a character in a list": ([HALF], "the prompt: a text holds half"),
    "half a character in a message": ([{"role": "user", "content": HALF}], "the prompt: a text holds half"),
    "half a character in a part": ([{"role": "user", "content": [text_part(HALF)]}], "the prompt: a text holds half"),
    "half a character in a role": ([{"role": HALF, "content": TEXT}], "the prompt: a text holds half"),
    "a negative id": ([3, -1], "the prompt has t"),
    "an id beyond the vocabulary": ([3, 1024], "the prompt has t"),
    "a huge id": ([3, 10**30], "the prompt has t"),
    "floats": ([3.0, 4.0], "prompt"),
    "an array of floats": (np.array([3.0, 4.0]), "prompt"),
    "truth values": ([True, False], "prompt"),
    "an array of truth values": (np.array([True, False]), "prompt"),
    "numbers as texts in a list of ids": ([3, "4"], "prompt"),
    "none among ids": ([3, None], "prompt"),
    "ids three deep": ([[[3, 4]]], "prompt"),
    "beyond the context": ([3] * 1024, "shorten the prompt"),
}


@pytest.mark.parametrize("kind", ACCEPTED_PROMPTS)
def test_messages_of_every_kind_are_read(chat, alone, ids, kind):
    assert both(chat, ACCEPTED_PROMPTS[kind], max_new_tokens=NUM_TOKENS) == alone(ids)


@pytest.mark.parametrize("kind", ACCEPTED_TOKENS)
def test_token_ids_of_every_kind_are_read(chat, alone, ids, kind):
    assert both(chat, ACCEPTED_TOKENS[kind](ids), max_new_tokens=NUM_TOKENS) == alone(ids)


@pytest.mark.parametrize("prompt", [TEXT, [TEXT], (TEXT,), np.str_(TEXT), "\x00\x1b[2J\n", "漢字 👋🏽", "</s>"])
def test_texts_of_every_kind_are_read_as_they_stand(chat, alone, prompt):
    (text,) = prompt if isinstance(prompt, list | tuple) else [prompt]
    assert both(chat, prompt, max_new_tokens=NUM_TOKENS) == alone(chat.tokenizer(str(text)).input_ids)


@pytest.mark.parametrize("kind", REFUSED_PROMPTS)
def test_anything_else_is_refused_as_a_prompt(chat, kind):
    prompt, said = REFUSED_PROMPTS[kind]
    assert_as_expected(both(chat, prompt, max_new_tokens=NUM_TOKENS), Part(said))


def test_a_base_without_chat_template_refuses_messages_but_reads_texts(base):
    assert "no chat template" in str(both(base, [{"role": "user", "content": "w3"}]))
    assert generate(base, []) == []
    for prompts in ([], [[3], [4]]):
        said = str(outcome(lambda prompts=prompts: stream(base, prompts)))
        assert f"pass one prompt, not {len(prompts)}" in said


# ---- drafters


@pytest.fixture(scope="module")
def folder(chat, tmp_path_factory):
    """A folder of a drafter for the base, untrained, and one that is none."""
    folder = tmp_path_factory.mktemp("drafters") / "ctc"
    arguments = {"trunk": {"num_frames": 3}, "loss": {"num_labels": 2}, "draft": {"num_nodes": 4, "top_k": 3}}
    config = DrafterConfig("drafters.CTC", arguments, chat.shape, "tiny-chat", tokenizer_hash(chat.tokenizer))
    torch.manual_seed(0)
    save(folder, config.build(), config)
    return folder


DRAFTERS = [
    *(lambda name=name: name for name in ("anpd", "none", "anpd:order=3,num_draft=2", "prompt_lookup", "joint")),
    lambda: drafters.ANPD(order=3),
    lambda: drafters.NoDrafter(),
    lambda: np.str_("anpd"),
]
REFUSED_DRAFTERS = [
    *((value, "drafter") for value in (None, 3, b"anpd", ["anpd"], object(), drafters.ANPD, {"anpd": 1}, True)),
    *((value, "drafter") for value in ("", "anpd:", "a b", "ANPD", " anpd", "runs/ctc", "anpd\n", HALF)),
    (pathlib.Path("no/such/folder"), "no drafter at"),
    (CHECKPOINT, "tiny-chat"),
    ("anpd:order=-1", "order"),
    ("anpd:num_draft=0", "num_draft"),
    ("nothing", "environment variable DRAFTERS_MODULES"),
]


@pytest.mark.parametrize("make", DRAFTERS)
def test_a_drafter_by_name_or_object_drafts_the_same_text(chat, alone, ids, make):
    assert both(chat, MESSAGES, make(), max_new_tokens=NUM_TOKENS) == alone(ids)
    tensor = torch.tensor([ids])
    written = chat.model.generate(tensor, max_new_tokens=NUM_TOKENS, custom_generate=Speculation(make()))
    assert chat.tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True) == alone(ids)


def test_the_folder_of_a_trained_drafter_may_be_a_path(chat, alone, ids, folder):
    for drafter in (folder, f"ctc={folder}", f"ctc={folder}:num_nodes=2"):
        assert both(chat, MESSAGES, drafter, max_new_tokens=NUM_TOKENS) == alone(ids)


@pytest.mark.parametrize(("drafter", "said"), REFUSED_DRAFTERS)
def test_anything_else_is_refused_as_a_drafter(chat, ids, drafter, said):
    assert_as_expected(both(chat, MESSAGES, drafter, max_new_tokens=NUM_TOKENS), Part(said))

    def inside():
        return chat.model.generate(
            torch.tensor([ids]), max_new_tokens=3, custom_generate=Speculation(drafter, chat.tokenizer)
        )

    assert_as_expected(outcome(inside), Part(said))


# ---- speculation


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tokenizer": "path"}, "tokenizer"),
        ({"check": "yes"}, "check"),
        ({"graphed": 1}, "graphed"),
        ({"drafters": "anpd"}, "drafters: did you mean drafter?"),
        ({"temperature": 1.0}, "no option temperature"),
    ],
)
def test_speculation_refuses_wrong_arguments_when_it_is_made(arguments, said):
    assert_as_expected(outcome(lambda: Speculation(**arguments)), Part(said))


def test_speculate_by_itself_says_that_generate_must_call_it(chat, ids):
    got = outcome(
        lambda: speculate(
            chat.model, torch.tensor([ids]), logits_processor=[], stopping_criteria=[], generation_config=None
        )
    )
    assert_as_expected(got, Part("speculation was not called by the generate"))


# ---- bases


@pytest.mark.parametrize(
    ("base", "said"),
    [
        *(
            (value, "base must")
            for value in (None, "checkpoints/tiny-chat", CHECKPOINT, 3, object(), torch.nn.Linear(2, 2))
        ),
        (AutoModel, "base must"),
    ],
)
def test_anything_but_a_base_or_a_model_is_refused(base, said):
    assert_as_expected(both(base, MESSAGES), Part(said))


def test_a_model_needs_its_tokenizer_and_an_lm_head(chat, alone, ids):
    options = {"max_new_tokens": NUM_TOKENS, "tokenizer": chat.tokenizer}
    assert both(chat.model, MESSAGES, **options) == alone(ids)
    assert "pass tokenizer=" in str(both(chat.model, MESSAGES))
    assert "leave tokenizer out" in str(both(chat, MESSAGES, **options))
    headless = AutoModel.from_pretrained(CHECKPOINT)
    assert "no LM head: load it with AutoModelForCausalLM" in str(both(headless, MESSAGES, **options))
    assert "no LM head" in str(both(Base("bare", headless, chat.tokenizer), MESSAGES))
    assert "base must" in str(both(type(chat.model), MESSAGES, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"name": CHECKPOINT, "dtype": "float32", "device": torch.device("cpu")},
        {"name": CHECKPOINT, "dtype": None, "device": None, "check": None, "prefill_chunk": np.int64(7)},
        {"name": "checkpoints/tiny-chat", "prefill_chunk": 0, "bitwise": False},
    ],
)
def test_a_base_is_loaded_from_a_path_or_a_name(arguments, alone, ids):
    loaded = load_base(**arguments)
    assert both(loaded, MESSAGES, max_new_tokens=NUM_TOKENS) == alone(ids)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(({"name": value}, "name") for value in (None, 3, b"checkpoints/tiny-chat", ["checkpoints/tiny-chat"], True)),
        *(({"name": value}, "no base") for value in ("no/such/folder/here", pathlib.Path("no/such/folder"), "\x00")),
        ({"name": HALF}, "no base"),
        ({"name": ""}, "folder without config.json"),
        *(({"dtype": value}, "dtype") for value in ("fp16", 16, b"float32", torch.float32, "", float)),
        *(({"device": value}, "device") for value in ("gpu", 0, "", "cpu:x", b"cpu", ["cpu"])),
        *(({name: value}, name) for name in ("check", "packed", "bitwise") for value in ("yes", 1)),
        *(({"prefill_chunk": value}, "prefill_chunk") for value in (-1, "4096", 2.5, True)),
        ({"devise": "cpu"}, "devise: did you mean device?"),
        ({"torch_dtype": "float32"}, "torch_dtype: did you mean dtype?"),
    ],
)
def test_load_base_refuses_anything_else_by_name(arguments, said):
    assert_as_expected(outcome(lambda: load_base(**{"name": CHECKPOINT, **arguments})), Part(said))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_a_device_that_is_not_there_is_refused(device):
    assert_as_expected(outcome(lambda: load_base(CHECKPOINT, device=device)), Part("device cuda"))


# ---- texts from tokens, options of sampling


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        *((value, "tokens") for value in ("abc", b"abc", None, 3, [1.5], ["3"], [None], [-1], [2**40], [True], {3})),
        *((value, None) for value in ([3, 4], (3, 4), np.array([3, 4]), torch.tensor([3, 4]), [np.int64(3), 4], [])),
        ([10**6], None),  # padding of the vocabulary, which has no text
    ],
)
def test_a_detokenizer_takes_token_ids_of_every_kind_and_nothing_else(chat, tokens, said):
    detokenizer = IncrementalDetokenizer(chat.tokenizer)
    got = outcome(lambda: detokenizer.add(tokens) + detokenizer.finish())
    assert_as_expected(got, Part(said) if said else chat.tokenizer.decode(list(tokens)))


@pytest.mark.parametrize("tokenizer", [None, "path", object(), CHECKPOINT])
def test_a_detokenizer_needs_a_tokenizer(tokenizer):
    got = outcome(lambda: IncrementalDetokenizer(tokenizer))
    assert_as_expected(got, Part("tokenizer must be an instance of PreTrainedTokenizerBase, not "))
    assert "_empty" not in str(got)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, SamplingOptions(0.0, 0, 1.0, 0)),
        ({"temperature": None, "top_k": None, "top_p": None, "seed": None}, SamplingOptions()),
        ({"temperature": np.float64(0.5), "seed": np.int64(3)}, SamplingOptions(0.5, seed=3)),
        ({"temperature": "0.5"}, Part("temperature")),
        ({"temp": 1}, Part("temp: did you mean temperature?")),
    ],
)
def test_sampling_options_are_numbers(arguments, expected):
    assert_as_expected(outcome(lambda: SamplingOptions(**arguments)), expected)
