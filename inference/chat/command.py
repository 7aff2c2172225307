"""``drafters chat``: talk to a base in the terminal, and watch what its drafter gains."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.text import Text

from data.files import SafeConsole, safe_text
from data.reasoning import decode_answer
from drafters.protocol import NoDrafter
from inference import drafter_specs
from inference.chat.answer_display import AnswerDisplay
from inference.chat.chat_session import ChatSession
from inference.generation import IncrementalDetokenizer
from inference.prompts import encode_messages
from inference.reporting.rows import number
from inference.results import metrics
from inference.verifier.base import Base
from inference.verifier.compiled import make_runner
from inference.verifier.options import ModelOptions, SamplingOptions
from inference.verifier.runner import Runner
from inference.verifier.sampling import Greedy, Sampler
from inference.verifier.session import RESERVED_FOR_DRAFTS, Generation, Session, check_prompt

WARM_UP_TOKENS = 4
HELP = {
    "/drafter NAME[=FILE][:key=value,...]": "use another drafter; none decodes without a drafter",
    "/compare": "decode the last answer again without a drafter, or the next one if there is none yet",
    "/system TEXT": "set the system message; without TEXT, remove it",
    "/max N": "set the maximum number of tokens of an answer",
    "/temperature T": "set the sampling temperature; 0 decodes greedily",
    "/reset": "begin a new chat",
    "/help": "list these commands",
    "/quit": "leave, as does the end of the input (Ctrl-D); Ctrl-C stops an answer",
}


@dataclass(frozen=True)
class LastAnswer:
    """The last answer, and what is needed to decode it again without a drafter.

    Args:
        prompt: Token ids of its prompt.
        num_cached: Tokens of the prompt that were in the cache already.
        generation: The answer.
        sampler: The sampler it was decoded with.
    """

    prompt: list[int]
    num_cached: int
    generation: Generation
    sampler: Sampler


class Chat:
    """A chat with one base, whose drafter and options may change between turns.

    Args:
        base: The base.
        console: Console to write to.
        drafter: Name of the drafter, as on the command line.
        template: Chat template, as in `encode_messages`.
        system: System message; empty for none.
        max_new_tokens: Maximum number of tokens of an answer.
        sampling: How the base's tokens are chosen.
        compile: Whether decoding steps are compiled.
    """

    def __init__(
        self,
        base: Base,
        console: Console,
        drafter: str = "joint",
        template: str = "tokenizer",
        system: str = "",
        max_new_tokens: int = 512,
        sampling: SamplingOptions | None = None,
        compile: bool = False,
    ) -> None:
        self.base, self.console, self.template, self.system = base, console, template, system
        self.messages: list[tuple[str, str]] = []
        self.last_answer: LastAnswer | None = None
        self.compares_next = False
        self._compile, self._runner = compile, make_runner(base, compile)
        self._set_max(str(max_new_tokens))
        self.sampling = sampling or SamplingOptions()
        self._sampler = make_chat_sampler(self.sampling)
        self.drafter, self._session = self._build(drafter)

    def handle_line(self, line: str) -> None:
        """Answer a line of input or execute its command; a mistake is reported in one line and changes nothing."""
        commands: dict[str, Callable[[str], None]] = {
            "drafter": self._set_drafter,
            "compare": self._compare,
            "system": self._set_system,
            "max": self._set_max,
            "temperature": self._set_temperature,
            "reset": self._reset,
            "help": self._help,
        }
        try:
            if not line.startswith("/"):
                self._answer(line)
                return
            word, _, rest = line[1:].partition(" ")
            if word not in commands:
                raise ValueError(f"there is no command /{word}: /help lists them all")
            commands[word](rest.strip())
        except (ValueError, OSError) as error:
            self.say(" ".join(str(error).split()), "red")

    # ---- commands

    def _set_drafter(self, spec: str) -> None:
        if not spec:
            raise ValueError(f"the drafter is {self.drafter}; known are {drafter_specs.known()}")
        self.drafter, self._session = self._build(spec)

    def _build(self, spec: str) -> tuple[str, ChatSession]:
        """Build a drafter and a session with it; return the drafter's label and the session."""
        session = ChatSession(drafter_specs.make_session(spec, self._runner, self._sampler))
        # The first steps of a process are slow; without a warm-up their time would count for the first answer.
        for _ in session.decode([min(self.base.eos, default=0)], WARM_UP_TOKENS):
            pass
        session.forget()
        return drafter_specs.label(spec), session

    def _set_system(self, text: str) -> None:
        self.system = text

    def _set_max(self, text: str) -> None:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"the maximum number of tokens must be a whole number of at least 1, not {text!r}")
        self.max_new_tokens = int(text)

    def _set_temperature(self, text: str) -> None:
        try:
            sampling = replace(self.sampling, temperature=float(text))
        except ValueError as error:
            raise ValueError(f"the temperature must be a number of at least 0, not {text!r}") from error
        self._sampler = make_chat_sampler(sampling)
        self.sampling = sampling
        self._session.session.sampler = self._sampler

    def _reset(self, _: str) -> None:
        self.messages, self.last_answer = [], None
        self._session.forget()

    def _help(self, _: str) -> None:
        for command, line in HELP.items():
            self.say(f"{command:<38}{line}")

    def _compare(self, _: str) -> None:
        if self.last_answer:
            self._compare_with_base(self.last_answer)
        else:
            self.compares_next = True
            self.say("the next answer will be compared")

    # ---- answers

    def _answer(self, text: str) -> None:
        system = [("system", self.system)] if self.system else []
        prompt = encode_messages(self.base, [*system, *self.messages, ("user", text)], self.template)
        try:
            check_prompt(self.base, prompt, self.max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{error}, or /reset for a new chat") from error
        generation, detokenizer, was_stopped = Generation(), IncrementalDetokenizer(self.base.tokenizer), False
        with AnswerDisplay(self.console) as display, interruptible() as is_stopped:
            for emitted, cost in self._session.decode(prompt, self.max_new_tokens, self.base.eos):
                generation.tokens += emitted
                generation.steps.append(cost)
                generation.seconds += sum(cost.seconds)
                display.add(detokenizer.add(emitted[: cost.accepted]), is_accepted=True)
                display.add(detokenizer.add(emitted[cost.accepted :]), is_accepted=False)
                display.refresh(self._figures(generation))
                if was_stopped := is_stopped():
                    break
            display.add(detokenizer.finish(), is_accepted=False)
        answer = decode_answer(generation.tokens, self.base.tokenizer).strip()
        self.messages += [("user", text), ("assistant", answer)]
        self.last_answer = LastAnswer(prompt, self._session.num_cached, generation, self._sampler)
        self.say(self._figures(generation) + self._why_it_ended(generation, len(prompt), was_stopped), "dim")
        if self.compares_next:
            self.compares_next = False
            self._compare_with_base(self.last_answer)

    def _figures(self, generation: Generation) -> str:
        """Acceptance length, speed and mean number of fed tokens of an answer, in one line."""
        speed = number(len(generation.tokens) / generation.seconds, places=1)
        length = number(metrics.acceptance_length([generation]))
        tokens, steps = len(generation.tokens), len(generation.steps)
        fed = number(sum(step.fed for step in generation.steps[1:]) / (steps - 1) if steps > 1 else None, places=1)
        return (
            f"{self.drafter}: acceptance length {length}, {speed} tokens/s, {tokens} tokens in {steps} steps, "
            f"{fed} fed per step"
        )

    @cached_property
    def _other_runner(self) -> Runner:
        """A runner for comparisons, which leave the cache of the chat as it is."""
        return make_runner(self.base, self._compile)

    def _why_it_ended(self, generation: Generation, prompt_length: int, was_stopped: bool) -> str:
        """What the line of figures adds about the end of an answer; nothing after an end-of-sequence token."""
        if generation.tokens[-1] in self.base.eos:
            return ""
        if was_stopped:
            return "; stopped"
        if prompt_length + len(generation.tokens) >= self.base.context_length:
            return "; the context is full: /reset begins a new chat"
        return "; cut short: /max N allows more"

    def _compare_with_base(self, answer: LastAnswer) -> None:
        """Decode an answer again without a drafter, and show both speeds and whether the texts are the same.

        What was in the cache before the answer is put there for the comparison too, and is not timed.
        """
        session = Session(self._other_runner, NoDrafter(), answer.sampler)
        session.begin(answer.prompt, reserve=len(answer.prompt) + RESERVED_FOR_DRAFTS)
        session.prefill(answer.num_cached)
        end = len(answer.prompt) + len(answer.generation.tokens)
        without_drafter = Generation()
        with interruptible() as is_stopped:
            for emitted, cost in session.steps(end, self.base.eos):
                without_drafter.tokens += emitted
                without_drafter.seconds += sum(cost.seconds)
                if is_stopped():
                    break
        compiling = "; the first step of each compiled shape includes its compilation" if self._compile else ""
        self.say(comparison(answer.generation, without_drafter, self._decode) + compiling, "dim")

    def _decode(self, tokens: list[int]) -> str:
        tokenizer: Any = self.base.tokenizer  # whose type also allows batches
        return tokenizer.decode(tokens)

    def say(self, line: str, style: str = "") -> None:
        """Print a line."""
        self.console.print(Text(line, style=style), soft_wrap=not self.console.is_terminal)


def make_chat_sampler(sampling: SamplingOptions) -> Sampler:
    """Create the sampler; unlike other commands, the chat allows top_k and top_p at temperature 0.

    They take effect after a later ``/temperature``.
    """
    return sampling.sampler() if sampling.temperature else Greedy()


def comparison(drafted: Generation, without_drafter: Generation, decode: Callable[[list[int]], str]) -> str:
    """Return one line that compares an answer with the same answer decoded without a drafter: speed and text."""
    speeds = [len(generation.tokens) / generation.seconds for generation in (drafted, without_drafter)]
    pairs = list(zip(drafted.tokens, without_drafter.tokens, strict=False))
    num_equal = next((index for index, (left, right) in enumerate(pairs) if left != right), len(pairs))
    if num_equal == len(drafted.tokens) == len(without_drafter.tokens):
        result = "the same text"
    else:
        left, right = (decode(each.tokens[num_equal : num_equal + 1]) for each in (drafted, without_drafter))
        result = f"another text after {num_equal} equal tokens, {right!r} where {left!r} was written"
    return f"the base alone: {speeds[1]:.1f} tokens/s, so {speeds[0] / speeds[1]:.2f}× with the drafter; {result}"


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Note the first Ctrl-C instead of raising KeyboardInterrupt, so that no step is interrupted halfway.

    Yields:
        A function that returns whether Ctrl-C was pressed. A second press raises KeyboardInterrupt.
    """
    was_pressed = False

    def note(number: int, _: object) -> None:
        nonlocal was_pressed
        if was_pressed:
            raise KeyboardInterrupt
        was_pressed = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: was_pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def chat(
    model: ModelOptions,
    sampling: SamplingOptions,
    drafter: str = "joint",
    system: str = "",
    max_new_tokens: int = 512,
    template: str = "tokenizer",
) -> None:
    """Talk to a base; accepted draft tokens are green, and acceptance length and speed are shown below each answer.

    In the chat, /help lists the commands: /drafter changes the drafter, /compare decodes an answer again without it.
    Questions may also come from a pipe, one per line.

    Args:
        model: The base.
        sampling: How the base's tokens are chosen.
        drafter: NAME[=FILE][:key=value,...], such as joint, anpd:order=4 or ctc=FOLDER; an unknown name lists all.
        system: System message before the first turn; empty for none.
        max_new_tokens: Maximum number of tokens of an answer.
        template: Chat template: vicuna_v1.1, llama2_chat, or tokenizer for the tokenizer's own, whose thinking switch
            tokenizer:thinking=on or tokenizer:thinking=off sets.
    """
    console = SafeConsole(highlight=False)
    base = model.load(may_compile=True)
    conversation = Chat(base, console, drafter, template, system, max_new_tokens, sampling, model.compile)
    with suppress(ImportError):
        import readline  # noqa: F401 (gives input() line editing and a history)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are not UTF-8 must not end the chat
    conversation.say(f"{model.base}, drafter {conversation.drafter}. /help lists the commands, /quit leaves.")
    while True:
        try:
            line = input("> ").strip()
            if not sys.stdin.isatty():
                print(safe_text(line))
            if line == "/quit":
                return
            if line:
                conversation.handle_line(line)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            console.print("\n/quit leaves")
