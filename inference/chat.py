"""``drafters chat``: talk to a base in the terminal, and watch what its drafter gains."""

import io
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from data.conversations import Message, user_message
from data.safe_text import SafeConsole, safe_text
from data.templates import decode_answer
from drafters.protocol import NoDrafter
from drafters.tree import common_prefix
from inference import drafter_specs
from inference.generation import IncrementalDetokenizer
from inference.options import GREEDY, ModelOptions, SamplingOptions
from inference.prompts import encode_messages
from inference.verifier.base import Base
from inference.verifier.graphed import make_runner
from inference.verifier.sampling import Greedy, Sampler
from inference.verifier.session import RESERVED_FOR_DRAFTS, Generation, Session, Step, check_prompt

ACCEPTED = "green"
WARM_UP_TOKENS = 4
CHAT_POSITIONS = 4096  # that the cache has at first, as a chat goes on
HELP = {
    "/drafter NAME[=FILE][:key=value,...]": "use another drafter; none decodes without a drafter",
    "/system TEXT": "set the system message; without TEXT, remove it",
    "/max N": "set the maximum number of tokens of an answer",
    "/temperature T": "set the sampling temperature; 0 decodes greedily",
    "/reset": "begin a new chat",
    "/help": "list these commands",
    "/quit": "leave, as does the end of the input (Ctrl-D); Ctrl-C stops an answer",
}


class ChatSession(Session):
    """Decodes the turns of a chat on one KV cache: each prompt usually continues the text of the turn before.

    The cache keeps what the prompt shares with the text before it. If the chat template renders an earlier answer in
    other tokens than the base wrote, only the text before that answer is shared.
    """

    num_cached = 0  # tokens of the last prompt that were in the cache already

    def restart(self) -> None:
        """Start a new chat, and reset what the drafter keeps across texts."""
        self.forget()
        self.drafter.reset()

    def decode(
        self, prompt: Sequence[int], max_new_tokens: int, eos: frozenset[int] = frozenset()
    ) -> Iterator[tuple[list[int], Step]]:
        """Yield the tokens that each step emits and its cost, as `Session.decode`; it may stop between two steps."""
        end, num_shared = self.end_of(prompt, max_new_tokens), common_prefix(self.seq, prompt)
        if num_shared > 1:
            self.resume(prompt, num_shared)
        else:  # the root is always fed again, so a single shared token is not worth keeping
            room = min(max(end, CHAT_POSITIONS), self.runner.context_length)
            self.begin(prompt, reserve=room + RESERVED_FOR_DRAFTS)
        self.num_cached = self.runner.cached
        # The drafter has not seen the base's hidden states of the new message, so it waits for one step.
        yield from self.steps(end, eos, drafts_at_once=not self.num_cached)


class Chat:
    """A chat with one base, whose drafter and options may change between turns; the arguments are those of `chat`."""

    def __init__(
        self,
        base: Base,
        console: Console,
        drafter: str = "joint",
        template: str = "tokenizer",
        system: str = "",
        max_new_tokens: int = 512,
        sampling: SamplingOptions = GREEDY,
    ) -> None:
        self.base, self.console, self.template, self.system = base, console, template, system
        self.messages: list[Message] = []
        self._runner = make_runner(base)
        self._session = ChatSession(self._runner, NoDrafter())
        self.sampling = sampling
        self._execute("max", str(max_new_tokens))
        self._execute("drafter", drafter)

    def say(self, line: str, style: str = "") -> None:
        """Print a line about the chat."""
        self.console.print(Text(line, style), soft_wrap=not self.console.is_terminal)

    def show(self, piece: str, style: str = "") -> None:
        """Print the next piece of an answer."""
        self.console.print(Text(safe_text(piece), style), end="", soft_wrap=True)

    def handle_line(self, line: str) -> None:
        """Answer a line of input or execute its command; a mistake is reported in one line and changes nothing."""
        try:
            if line.startswith("/"):
                word, _, text = line[1:].partition(" ")
                self._execute(word, text.strip())
            else:
                self._answer(line)
        except (ValueError, OSError) as error:
            self.say(" ".join(str(error).split()), "red")

    def _execute(self, command: str, text: str) -> None:
        match command:
            case "drafter" if text:
                self._session.forget()  # the warm-up of the next one overwrites its cache
                self.drafter, self._session = drafter_specs.label(text), self._build(text)
            case "drafter":
                raise ValueError(f"the drafter is {self.drafter}; known are {drafter_specs.usages()}")
            case "system":
                self.system = text
            case "max":
                if not text.isdecimal() or int(text) < 1:
                    raise ValueError(f"the maximum number of tokens must be a whole number of at least 1, not {text!r}")
                self.max_new_tokens = int(text)
            case "temperature":
                try:
                    sampling = replace(self.sampling, temperature=float(text))
                except ValueError as error:
                    raise ValueError(f"the temperature must be a number of at least 0, not {text!r}") from error
                self._session.sampler = chat_sampler(sampling)
                self.sampling = sampling
            case "reset":
                self.messages = []
                self._session.restart()
            case "help":
                for usage, meaning in HELP.items():
                    self.say(f"{usage:<38}{meaning}")
            case _:
                raise ValueError(f"there is no command /{command}: /help lists them all")

    def _build(self, spec: str) -> ChatSession:
        session = ChatSession(self._runner, drafter_specs.make(spec, self._runner), chat_sampler(self.sampling))
        # The first steps of a process are slow; without a warm-up their time would count for the first answer.
        for _ in session.decode([min(self.base.eos, default=0)], WARM_UP_TOKENS):
            pass
        session.restart()
        return session

    # ---- answers

    def _answer(self, text: str) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        question = user_message(text)
        prompt = encode_messages(self.base, [*system, *self.messages, question], self.template)
        try:
            check_prompt(self.base, prompt, self.max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{error}, or /reset for a new chat") from error
        generation, detokenizer, was_stopped = Generation(), IncrementalDetokenizer(self.base.tokenizer), False
        with interruptible() as is_stopped:
            for emitted, cost in self._session.decode(prompt, self.max_new_tokens, self.base.eos):
                generation.tokens += emitted
                generation.steps.append(cost)
                generation.seconds += sum(cost.seconds)
                self.show(detokenizer.add(emitted[: cost.accepted]), ACCEPTED)
                self.show(detokenizer.add(emitted[cost.accepted :]))
                if was_stopped := is_stopped():
                    break
        self.show(detokenizer.finish() + "\n")
        answer = decode_answer(generation.tokens, self.base.tokenizer).strip()
        self.messages += [question, {"role": "assistant", "content": answer}]
        end = ""
        if generation.tokens[-1] not in self.base.eos:
            is_full = len(prompt) + len(generation.tokens) >= self.base.context_length
            end = "; the context is full: /reset begins a new chat" if is_full else "; cut short: /max N allows more"
        end = "; stopped" if end and was_stopped else end
        self.say(f"{self.drafter}: {figures(generation)}{end}", "dim")


def chat_sampler(sampling: SamplingOptions) -> Sampler:
    """The sampler; in a chat, top_k and top_p may be given at temperature 0, for a later ``/temperature``."""
    return sampling.sampler() if sampling.temperature else Greedy()


def figures(generation: Generation) -> str:
    """Acceptance length, speed and mean number of fed tokens of an answer; the first step is the prefill."""
    tokens, steps, later = len(generation.tokens), len(generation.steps), generation.steps[1:]
    length = f"{sum(step.emitted for step in later) / len(later):.2f}" if later else "–"
    fed = f"{sum(step.fed for step in later) / len(later):.1f}" if later else "–"
    speed = tokens / generation.seconds
    return f"acceptance length {length}, {speed:.1f} tokens/s, {tokens} tokens in {steps} steps, {fed} fed per step"


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed, so that no step is interrupted halfway.

    A second press raises KeyboardInterrupt.
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
    model: ModelOptions, sampling: SamplingOptions, drafter: str, system: str, max_new_tokens: int, template: str
) -> None:
    """Run `drafters chat`, see `inference.commands.chat`."""
    console = SafeConsole(highlight=False)
    base = model.load()
    conversation = Chat(base, console, drafter, template, system, max_new_tokens, sampling)
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
