"""``drafters chat``: talk to a base in the terminal, and see what its drafter is worth."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

from drafters.protocol import NoDrafter
from inference.api.generation import IncrementalDetokenizer, make_drafter
from inference.api.prompts import encode_messages
from inference.chat.answer_display import AnswerDisplay
from inference.chat.chat_session import ChatSession
from inference.engine.base import Base, Dtype, load_base, resolve_device
from inference.engine.runner import Runner
from inference.engine.sampling import Sampler, make_sampler
from inference.engine.session import RESERVED_FOR_DRAFTS, Generation, Session, check_prompt
from inference.registry import catalogue
from inference.reporting.tables import number
from inference.results import metrics

WARM_UP = 4  # tokens
HELP = {
    "/drafter NAME[=FILE][:key=value,...]": "go on with another drafter; none is the base alone",
    "/compare": "let the base alone write the last answer too, or the next where there is none yet",
    "/system TEXT": "say who the base shall be; without TEXT, nothing",
    "/max N": "tokens of an answer at most",
    "/temperature T": "0 decodes greedily, above it samples",
    "/reset": "begin a new chat",
    "/help": "these lines",
    "/quit": "leave, as does the end of the input (Ctrl-D); Ctrl-C stops an answer",
}


@dataclass(frozen=True)
class LastAnswer:
    """The last answer, how it was picked, and how many tokens of its prompt were in the cache before."""

    prompt: list[int]
    num_cached: int
    written: Generation
    sampler: Sampler


class Chat:
    """A chat with one base, whose drafter may be another at every turn.

    Args:
        base: The base.
        console: Where it is shown.
        drafter: Name of the drafter, as on the command line.
        template: Chat template.
        system: What the base is told before the first turn; empty for nothing.
        max_new_tokens: Tokens of an answer at most.
        temperature, top_k, top_p, seed: Of the sampling.
    """

    def __init__(
        self,
        base: Base,
        console: Console,
        drafter: str = "joint",
        template: str = "tokenizer",
        system: str = "",
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.base, self.console, self.template, self.system = base, console, template, system
        self.top_k, self.top_p, self.seed = top_k, top_p, seed
        self.messages: list[tuple[str, str]] = []
        self.last_answer: LastAnswer | None = None
        self.compares_next = False
        self._runner = Runner(base)
        self._turns: ChatSession | None = None
        self._set_max(str(max_new_tokens))
        self._set_temperature(str(temperature))
        self._set_drafter(drafter)

    def handle_line(self, line: str) -> None:
        """Answer a line, or do what it commands; a mistake is said in one line and changes nothing."""
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
            raise ValueError(f"the drafter is {self.drafter}; known are {catalogue.known()}")
        made = make_drafter(spec, self._runner, self.seed if self.temperature > 0 else None)
        self._turns, self.drafter = ChatSession(Session(self._runner, made, self._sampler)), catalogue.label(spec)
        for _ in self._turns.decode([min(self.base.eos, default=0)], WARM_UP):
            pass  # the first steps of a process are slow, and would be told of the first answer
        self._turns.forget()

    def _set_system(self, text: str) -> None:
        self.system = text

    def _set_max(self, text: str) -> None:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"an answer may have a whole number of tokens, at least 1, not {text!r}")
        self.max_new_tokens = int(text)

    def _set_temperature(self, text: str) -> None:
        try:
            temperature = float(text)
        except ValueError as error:
            raise ValueError(f"a temperature is a number of at least 0, not {text!r}") from error
        warping = (self.top_k, self.top_p, self.seed) if temperature else ()  # kept for a later /temperature
        self._sampler = make_sampler(temperature, *warping)
        self.temperature = temperature
        if self._turns:
            self._turns.session.sampler = self._sampler

    def _reset(self, _: str) -> None:
        self.messages, self.last_answer = [], None
        self._turns.forget()

    def _help(self, _: str) -> None:
        for command, line in HELP.items():
            self.say(f"{command:<38}{line}")

    def _compare(self, _: str) -> None:
        if self.last_answer:
            self._compare_last()
        else:
            self.compares_next = True
            self.say("the next answer is compared")

    # ---- answers

    def _answer(self, text: str) -> None:
        before = [("system", self.system)] if self.system else []
        prompt = encode_messages(self.base, [*before, *self.messages, ("user", text)], self.template)
        try:
            check_prompt(self.base, prompt, self.max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{error}, or /reset for a new chat") from error
        written, growing, was_stopped = Generation(), IncrementalDetokenizer(self.base.tokenizer), False
        with AnswerDisplay(self.console) as screen, interruptible() as is_stopped:
            for emitted, cost in self._turns.decode(prompt, self.max_new_tokens, self.base.eos):
                written.tokens += emitted
                written.steps.append(cost)
                written.seconds += sum(cost.seconds)
                screen.add(growing.add(emitted[: cost.accepted]), is_accepted=True)
                screen.add(growing.add(emitted[cost.accepted :]), is_accepted=False)
                screen.draw(self._figures(written))
                if was_stopped := is_stopped():
                    break
            screen.add(growing.finish(), is_accepted=False)
        answer = self.base.tokenizer.decode(written.tokens, skip_special_tokens=True).strip()
        self.messages += [("user", text), ("assistant", answer)]
        self.last_answer = LastAnswer(prompt, self._turns.num_cached, written, self._sampler)
        self.say(self._figures(written) + self._why_it_ended(written, len(prompt), was_stopped), "dim")
        if self.compares_next:
            self.compares_next = False
            self._compare_last()

    def _figures(self, written: Generation) -> str:
        speed = number(len(written.tokens) / written.seconds, places=1)
        length = number(metrics.acceptance_length([written]))
        tokens, steps = len(written.tokens), len(written.steps)
        return f"{self.drafter}: acceptance length {length}, {speed} tokens/s, {tokens} tokens in {steps} steps"

    def _why_it_ended(self, written: Generation, num_prompt: int, was_stopped: bool) -> str:
        if written.tokens[-1] in self.base.eos:
            return ""
        if was_stopped:
            return "; stopped"
        if num_prompt + len(written.tokens) >= self.base.context_length:
            return "; the context is full: /reset begins a new chat"
        return "; cut short: /max N allows more"

    def _compare_last(self) -> None:
        """Let the base alone write as many tokens; what was cached for the answer is cached for it too, untimed."""
        said = self.last_answer
        session = Session(Runner(self.base), NoDrafter(), said.sampler)
        session.begin(said.prompt, reserve=len(said.prompt) + RESERVED_FOR_DRAFTS)
        session.prefill(said.num_cached)
        alone, end = Generation(), len(said.prompt) + len(said.written.tokens)
        with interruptible() as is_stopped:
            for emitted, cost in session.steps(end, self.base.eos):
                alone.tokens += emitted
                alone.seconds += sum(cost.seconds)
                if is_stopped():
                    break
        self.say(comparison(said.written, alone, self.base.tokenizer.decode), "dim")

    def say(self, line: str, style: str = "") -> None:
        self.console.print(Text(line, style=style), soft_wrap=not self.console.is_terminal)


def comparison(drafted: Generation, alone: Generation, decode: Callable[[list[int]], str]) -> str:
    """One line on an answer and what the base alone wrote: how fast, and whether it is the same text."""
    speeds = [len(one.tokens) / one.seconds for one in (drafted, alone)]
    pairs = list(zip(drafted.tokens, alone.tokens, strict=False))
    same = next((index for index, (ours, its) in enumerate(pairs) if ours != its), len(pairs))
    if same == len(drafted.tokens) == len(alone.tokens):
        verdict = "the same text"
    else:
        ours, its = (decode(one.tokens[same : same + 1]) for one in (drafted, alone))
        verdict = f"another text after {same} equal tokens, {its!r} where {ours!r} was written"
    return f"the base alone: {speeds[1]:.1f} tokens/s, so {speeds[0] / speeds[1]:.2f}× with the drafter; {verdict}"


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields what tells whether Ctrl-C was pressed meanwhile, so that no step is torn; the second press interrupts."""
    presses: list[int] = []

    def note(number: int, _: object) -> None:
        if presses:
            raise KeyboardInterrupt
        presses.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(presses)
    finally:
        signal.signal(signal.SIGINT, before)


def chat(
    base: str,
    drafter: str = "joint",
    system: str = "",
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    template: str = "tokenizer",
    dtype: Dtype = "float32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Talk to a base; accepted draft tokens are green, and acceptance length and speed stand below the answer.

    In the chat /help lists the commands: /drafter takes another drafter, /compare lets the base alone write the same.
    Questions may come from a pipe as well, one a line.

    Args:
        base: Folder or hub id of the base.
        drafter: NAME[=FILE][:key=value,...], such as joint, anpd:order=4 or ctc=FOLDER; a wrong name lists all.
        system: What the base is told before the first turn.
        max_new_tokens: Tokens of an answer at most.
        temperature: 0 decodes greedily, above it samples, each draw keyed by the seed and its position.
        top_k: Sampling keeps the k most probable tokens; 0 keeps all.
        top_p: Sampling keeps the most probable tokens up to this probability.
        seed: Of the sampling.
        template: Chat template: the tokenizer's own, vicuna_v1.1 or llama2_chat.
        dtype: Number format of base and drafter.
        device: auto takes the GPU where there is one.
    """
    loaded, console = load_base(base, dtype, resolve_device(device)), Console(highlight=False)
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    talk = Chat(loaded, console, drafter, template, system, max_new_tokens, **sampling)
    with suppress(ImportError):
        import readline  # noqa: F401 (input() then edits lines and remembers them)
    sys.stdin.reconfigure(errors="replace")  # what is no UTF-8 shall not end the chat
    talk.say(f"{base}, drafter {talk.drafter}. /help lists the commands, /quit leaves.")
    while True:
        try:
            line = input("> ").strip()
            if not sys.stdin.isatty():
                print(line)
            if line == "/quit":
                return
            if line:
                talk.handle_line(line)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            console.print("\n/quit leaves")
