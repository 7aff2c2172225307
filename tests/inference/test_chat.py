"""The terminal chat: turns on one KV cache, the pieces of an answer, and conversations through standard input."""

import io
import re
import signal

import pytest
import torch
from rich.console import Console

import drafters
from data.conversations import user_message
from data.templates import decode_answer
from inference.chat import ACCEPTED, Chat, ChatSession, interruptible
from inference.commands import chat
from inference.options import ModelOptions, SamplingOptions
from inference.prompts import encode_messages
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler
from tests.inference.verifier.oracles import written_alone

LEARNED = ["ctc", "ctc, chain", "ctc_deep", "block", "eagle", "eagle3"]
TRAINING_FREE = {
    "anpd": drafters.ANPD,
    "prompt_lookup": drafters.PromptLookup,
    "lookahead": drafters.Lookahead,
    "token_recycling": drafters.TokenRecycling,
    "self_draft": drafters.SelfDraft,
    "joint": drafters.Joint,
}
TURNS = [[1, 5, 6, 7, 8], [9, 10, 11], [12, 5, 6]]


@pytest.fixture
def make(make_drafter):
    return lambda name, base: TRAINING_FREE[name]() if name in TRAINING_FREE else make_drafter(name, base, [])


def naive(base, prompt, num_tokens, sampler=None, eos=frozenset()):
    return written_alone(base, tuple(prompt), num_tokens, eos, sampler)


# ---- turns on one cache


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [None, KeyedSampler(0.8, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["none", *TRAINING_FREE, *LEARNED])
def test_each_turn_is_the_bases_own_text_and_feeds_only_new_tokens(make_base, make, name, sampler):
    base = make_base(context=256)
    turns, text = ChatSession(Runner(base), make(name, base), sampler), []
    for number, said in enumerate(TURNS):
        before, text = len(text), text + said
        expected = naive(base, text, 12, sampler)
        steps = list(turns.decode(text, 12))
        assert [token for emitted, _ in steps for token in emitted] == expected
        assert turns.num_cached == (before - 1 if number else 0)  # the last token of an answer is not cached yet
        assert steps[0][1].fed_pending == len(text) - turns.num_cached
        text += expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "joint", "ctc", "eagle"])
def test_turns_rendered_differently_are_read_again_from_the_first_difference(make_base, make, name):
    base = make_base(context=256)
    turns = ChatSession(Runner(base), make(name, base))
    first = [token for emitted, _ in turns.decode([1, 5, 6, 7], 20) for token in emitted]
    other = [1, 5, 6, 7, *first[:8], 30 + (first[8] == 30), *first[9:], 4]
    for prompt, cached in [
        (other, 11),  # twelve tokens are shared, and the last of them is a root again
        (other[:6], 5),
        ([1, 5, 6, 7], 3),
        ([2, 5], 0),
    ]:
        assert [t for emitted, _ in turns.decode(prompt, 15) for t in emitted] == naive(base, prompt, 15)
        assert turns.num_cached == cached
    turns.restart()
    list(turns.decode([2, 5, 6], 3))
    assert turns.num_cached == 0


# ---- the pieces of an answer


def test_accepted_tokens_are_green_and_the_text_is_printed_as_it_is_but_for_control_codes(make_base):
    coloured, plain = io.StringIO(), io.StringIO()
    shown = Chat(make_base(), Console(file=coloured, force_terminal=True, color_system="standard", width=40))
    shown.show("base")
    shown.show(" drafted", ACCEPTED)
    assert coloured.getvalue() == "base\x1b[32m drafted\x1b[0m"
    shown = Chat(make_base(), Console(file=plain, width=10))
    for piece in ("a long line that is not broken ", "[red]\x1b[2J[/red]\n", "end"):
        shown.show(piece, ACCEPTED)
    assert plain.getvalue() == "a long line that is not broken [red]␛[2J[/red]\nend"


# ---- Ctrl-C, and two texts next to each other


def test_the_first_ctrl_c_is_noted_and_the_second_interrupts():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible() as is_stopped:
        assert not is_stopped()
        signal.raise_signal(signal.SIGINT)
        assert is_stopped()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


class Impatient(io.StringIO):
    """A terminal whose user presses Ctrl-C when a word appears."""

    def __init__(self, word):
        super().__init__()
        self.word = word

    def write(self, text):
        if self.word and self.word in text:
            self.word = None
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


@pytest.mark.slow
def test_ctrl_c_ends_the_answer_and_the_chat_continues_after_it(make_base):
    base = make_base(context=512)
    whole = Chat(base, Console(file=io.StringIO()), "anpd", max_new_tokens=60)
    whole.handle_line("w3 w6")
    words = whole.messages[-1]["content"].split()
    word = next(word for index, word in enumerate(words) if index > 5 and word not in words[:index])
    stopped = Chat(base, Console(file=(screen := Impatient(word)), width=200), "anpd", max_new_tokens=60)
    stopped.handle_line("w3 w6")
    kept = stopped.messages[-1]["content"].split()
    assert 5 < len(kept) < len(words) and kept == words[: len(kept)]
    assert screen.getvalue().splitlines()[-1].endswith("; stopped")
    stopped.handle_line("w8")
    assert len(stopped.messages) == 4 and stopped._session.num_cached > len(kept)


def test_a_drafter_whose_warm_up_is_interrupted_leaves_no_foreign_cache(make_base, monkeypatch):
    base = make_base(context=512)
    expected = Chat(base, Console(file=io.StringIO()), "anpd", max_new_tokens=20)
    chatted = Chat(base, Console(file=io.StringIO()), "anpd", max_new_tokens=20)
    for each in (expected, chatted):
        each.handle_line("w3 w6")

    def interrupted(session, *arguments, decode=ChatSession.decode):
        yield next(decode(session, *arguments))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ChatSession, "decode", interrupted)
        chatted.handle_line("/drafter joint")
    for each in (expected, chatted):
        each.handle_line("w8")
    assert chatted.messages == expected.messages and chatted.drafter == "anpd"


# ---- whole conversations


@pytest.fixture(scope="module")
def folder(make_base, tmp_path_factory):
    folder, base = tmp_path_factory.mktemp("chat"), make_base(dtype=torch.float32, context=256)
    base.model.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def talk(folder, monkeypatch, capsys):
    """Returns a function that types lines and returns the output after each of them."""

    def talk(*lines, **arguments):
        typed = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8"))
        capsys.readouterr()
        model = ModelOptions(str(folder))
        chat(model, SamplingOptions(), **{"drafter": "anpd", "max_new_tokens": 20} | arguments)
        shown = capsys.readouterr().out
        banner, *parts = re.split(r"^> ?", shown, flags=re.M)
        assert "/help" in banner
        for line, part in zip(lines, parts, strict=False):
            assert part.startswith(line.strip().replace("\udcff", "\N{REPLACEMENT CHARACTER}") + "\n")
        return [part.split("\n", 1)[1].rstrip("\n") for part in parts[: len(lines)]]

    return talk


FIGURES = (
    r"(\S+): acceptance length (\d\.\d\d|–), \d+\.\d tokens/s, (\d+) tokens in (\d+) steps, "
    r"(?:\d+\.\d|–) fed per step(; [^:]+: .*)?"
)


@pytest.mark.slow
def test_a_conversation_through_standard_input(make_base, talk):
    base = make_base(dtype=torch.float32, context=256)
    text, shown = "", talk("w5 w6 w7", "w9 w10", "/drafter joint:num_nodes=4", "w11", "/quit")
    for said, part in zip(["w5 w6 w7", "w9 w10", "w11"], [shown[0], shown[1], shown[3]], strict=True):
        text = f"{text}\n{said}".strip()
        written = naive(base, base.tokenizer(text).input_ids, 20, eos=base.eos)
        answer, figures = part.rsplit("\n", 1)
        assert answer == base.tokenizer.decode(written, skip_special_tokens=True)
        name, _, tokens, steps, _ = re.fullmatch(FIGURES, figures).groups()
        assert name == ("joint:num_nodes=4" if said == "w11" else "anpd")
        assert int(tokens) == len(written) and 1 <= int(steps) <= len(written)
        text = f"{text}\n{answer}"


def test_mistakes_are_reported_in_one_line_and_the_chat_continues(talk):
    mistakes = {
        "/nope": "there is no command /nope: /help lists them all",
        "/drafter": "the drafter is anpd; known are anpd, ",
        "/drafter nix": "unknown drafter 'nix'; known are anpd, ",
        "/drafter anpd:ordr=3": "anpd takes order, num_draft, update, multi_level; not 'ordr=3'",
        "/drafter ctc=nowhere": "no drafter at nowhere",
        "/max": "the maximum number of tokens must be a whole number of at least 1, not ''",
        "/max -1": "a whole number of at least 1, not '-1'",
        "/temperature hot": "the temperature must be a number of at least 0, not 'hot'",
        "/temperature -1": "temperature must be a number above 0, or 0 to decode greedily, not -1.0",
        "/max \udcff": "of at least 1, not '\N{REPLACEMENT CHARACTER}'",
        " ".join(["w5"] * 300): "the prompt has 300 tokens and the context",
    }
    *parts, answer = talk(*mistakes, "w5 w6")
    for part, message in zip(parts, mistakes.values(), strict=True):
        assert message in part and len(part.splitlines()) == 1
    assert re.fullmatch(FIGURES, answer.splitlines()[-1])


@pytest.mark.slow
def test_changed_options_apply_to_the_next_answer(talk):
    lines = [
        "w3 w6",
        "/max 7",
        "/reset",
        "w3 w6",
        "/temperature 1.5",
        "/reset",
        "w3 w6",
        "/temperature 0",
        "/reset",
        "w3 w6",
    ]
    shown = talk(*lines, "", "/help")
    first, second, drawn, again = (shown[index].splitlines()[0].split() for index in (0, 3, 6, 9))
    assert second == first[: len(second)] and " 7 tokens in" in shown[3] and shown[3].endswith("/max N allows more")
    assert drawn != second == again
    assert {line.split()[0] for line in shown[-1].splitlines()} == {
        f"/{name}" for name in ("drafter", "system", "max", "temperature", "reset", "help", "quit")
    }


def test_a_full_context_ends_an_answer_and_reset_makes_room(talk):
    shown = talk(" ".join(["w5"] * 250), "w6", "/reset", "w6")
    assert shown[0].endswith("; the context is full: /reset begins a new chat")
    assert "and the context of" in shown[1] and shown[1].endswith("or /reset for a new chat")
    assert re.fullmatch(FIGURES, shown[3].splitlines()[-1])


@pytest.mark.slow
def test_the_system_message_comes_first(make_base, talk):
    base = make_base(dtype=torch.float32, context=256)
    shown = talk("w6", "/system w9 w9", "/reset", "w6", "/system", "/reset", "w6", system="w4")
    for part, text in [(shown[0], "w4\nw6"), (shown[3], "w9 w9\nw6"), (shown[6], "w6")]:
        written = naive(base, base.tokenizer(text).input_ids, 20, eos=base.eos)
        assert part.splitlines()[0] == base.tokenizer.decode(written, skip_special_tokens=True)


@pytest.mark.slow
def test_a_chat_model_gets_the_earlier_turns_through_its_template(repository, monkeypatch, capsys):
    typed = b"Tell me about lamps.\nWhy is that important?\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8"))
    model = ModelOptions(str(repository / "checkpoints" / "tiny-chat"))
    chat(model, SamplingOptions(), "joint", max_new_tokens=24)
    shown, base = capsys.readouterr().out, model.load()
    assert len(re.findall(FIGURES, shown)) == 2
    parts = re.split(r"^> ", shown, flags=re.M)[1:3]
    first, second = (part.split("\n", 1)[1].rsplit("\njoint: ", 1)[0].strip() for part in parts)
    messages = [user_message("Tell me about lamps."), {"role": "assistant", "content": first}]
    prompt = encode_messages(base, [*messages, user_message("Why is that important?")], "tokenizer")
    assert second == decode_answer(naive(base, prompt, 24, eos=base.eos), base.tokenizer).strip()
