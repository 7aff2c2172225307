"""``drafters regenerate``: let the base answer the prompts of a data set, so that a drafter learns the base's text."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversations import Conversation, load_conversations, user_message
from data.files import atomic_write, short_hash
from data.safe_text import safe_text
from data.templates import PRIVATE_USE, THINKING, render, resolve_template, template_hash, thinking_switch, with_date
from data.tokenizer import load_tokenizer, tokenizer_hash
from drafters.checks import check_at_least
from inference.journal import Journal, recorded_settings
from inference.options import GREEDY, AnswerOptions, ModelOptions, SamplingOptions, ServerOptions
from inference.regenerate.answerers import NUM_SEEDS, Answerer, LocalAnswerer, Request, ServerAnswerer
from inference.regenerate.dialogue import AnswerCounts, Dialogue
from inference.runs import new_file, progress_bars
from inference.verifier.sampling import derived_seed
from inference.verifier.session import check_prompt

OWN_PROMPTS = SamplingOptions(temperature=0.85)  # how prompts of the base's own are sampled
MAX_PROMPT_TOKENS = 192  # a longer one is left out


def regenerate(
    base_model: ModelOptions, answers: AnswerOptions, sampling: SamplingOptions, source: ServerOptions, out: str,
    files: list[str], overwrite: bool,
) -> None:  # fmt: skip
    """Run `drafters regenerate`, see `inference.commands.regenerate`."""
    numbers = {"limit": answers.limit, "max_length": answers.max_length, "concurrency": source.concurrency}
    numbers |= {name: getattr(answers, name) for name in ("max_new_tokens", "num_answers", "batch_size", "max_tokens")}
    check_at_least(1, **{name: number for name, number in numbers.items() if number is not None})
    check_at_least(0, own_prompts=answers.own_prompts)
    sampling.sampler()  # raises ValueError if a value is out of range
    if not files and not answers.own_prompts:
        raise ValueError("there is nothing to answer: give --files, or --own_prompts N for prompts of the base's own")
    if answers.num_answers > 1 and not sampling.temperature:
        raise ValueError(f"{answers.num_answers} greedy answers would be equal: give a temperature above 0")
    path = new_file(out, overwrite, files)
    if out.endswith(".json"):
        raise ValueError(f"--out {out} has a record on each line, but .json files are read whole: name it {out}l")
    conversations, dropped = load_conversations(files, answers.limit, requires_answers=False)
    if files:
        print(safe_text(f"{len(conversations):,} conversations read, {dropped}"), flush=True)
    tokenizer = load_tokenizer(base_model.base)
    begun = [path.with_name(f"{path.name}.{kind}") for kind in ("prompts", "partial") if not overwrite]
    dates = [str(recorded_settings(file).get("dated", "")) for file in begun]
    answers = replace(answers, template=with_date(answers.template, tokenizer, max(dates, default="")))
    settings: dict[str, Any] = {"tokenizer": tokenizer_hash(tokenizer)}
    if ":date=" in answers.template:
        settings["dated"] = answers.template
    settings["template"] = template_hash(answers.template, tokenizer)  # raises ValueError if there is no such template
    answerer = load_answerer(base_model, source, tokenizer, answers)
    settings["base"] = answerer.weights
    prompts: Journal | None = None  # holds the base's own prompts until they are answered
    if count := answers.own_prompts:
        details = {"own_prompts": count, "batch_size": answers.batch_size, "seed": sampling.seed}
        with Journal(path.with_name(f"{path.name}.prompts"), settings | details, overwrite) as prompts:
            conversations += own_prompts(answerer, tokenizer, answers, sampling.seed, prompts)
    num_turns = 1 if answers.turns == "first" else None
    dialogues = [
        Dialogue(conversation, tokenizer, answers.template, num_turns, number)
        for conversation in conversations
        for number in range(answers.num_answers)
    ]
    settings |= {  # now everything that determines the answers
        "format": 2,
        "conversations": short_hash(json.dumps([[text.id, text.messages] for text in conversations])),
        "turns": answers.turns,
        "max_new_tokens": answers.max_new_tokens,
        "max_length": answerer.max_length,
    }
    if sampling.temperature:
        settings |= asdict(sampling) | {"num_answers": answers.num_answers}
    with Journal(path.with_name(f"{path.name}.partial"), settings, overwrite) as journal:
        counts = answer_all(dialogues, answerer, journal, answers, sampling)
        if not counts.num_answers:
            journal.delete()  # so that the next run tries all prompts again
            raise ValueError(f"no prompt was answered: {counts.dropped}")
        with atomic_write(path) as new, new.open("w", encoding="utf-8", errors="backslashreplace") as stream:
            for dialogue in dialogues:
                if dialogue.is_cut:
                    stream.write(json.dumps(dialogue.record(), ensure_ascii=False, separators=(",", ":")) + "\n")
        journal.delete()
    if prompts:
        prompts.delete()
    if counts.dropped.counts:
        print(safe_text(counts.dropped))
    print(f"wrote {out}: {summary(dialogues, counts, is_served=source.server is not None)}")


def load_answerer(
    base_model: ModelOptions, source: ServerOptions, tokenizer: PreTrainedTokenizerBase, answers: AnswerOptions
) -> Answerer:
    """Connect to the server if one is named, otherwise load the base.

    Raises ValueError if the address of the server is malformed, a model is named without one, the base cannot be
    loaded, or its context is shorter than ``max_length``.
    """
    max_length = answers.max_length
    if source.server is not None:
        name, *options = answers.template.split(":")
        switch = thinking_switch(resolve_template(name, tokenizer))
        option = next((option for option in options if option in THINKING), "")
        arguments = {switch: option == "thinking=on"} if switch and option else {}  # for the server's template
        max_length = max_length or tokenizer.model_max_length
        return ServerAnswerer(source.server, source.model, max_length, arguments, source.concurrency)
    if source.model is not None:
        raise ValueError(f"--model {source.model} is the name of the base on a server: give --server URL, too")
    base = replace(base_model, bitwise=False).load()  # no drafts, so no bits to keep
    base.check_length(max_length or 0, "max_length")
    return LocalAnswerer(base, max_length or base.context_length)


class RecordedAnswers:
    """Answers requests in batches, without those whose replies a journal holds already.

    The journal has a line [turn, [[index of the conversation, reply], ...]] for each batch.
    """

    def __init__(self, answerer: Answerer, journal: Journal) -> None:
        self.answerer, self.journal = answerer, journal
        self._replies: dict[tuple[int, int], Any] = {}
        for turn, replies in journal.entries(lambda entry: (entry[0], [(i, answerer.read(r)) for i, r in entry[1]])):
            self._replies |= {(turn, index): reply for index, reply in replies}

    def answer(
        self, turn: int, requests: Mapping[int, Request], advance: Callable[[int], None] = lambda num_tokens: None
    ) -> dict[int, Any]:
        """Return the reply to each request of a batch, and call ``advance`` with each number of new tokens."""
        if new := [index for index in requests if (turn, index) not in self._replies]:
            replies = list(zip(new, self.answerer.answer([requests[index] for index in new], advance), strict=True))
            self.journal.append([turn, replies])
            self._replies |= {(turn, index): reply for index, reply in replies}
        return {index: self._replies.pop((turn, index)) for index in requests}


def answer_all(
    dialogues: Sequence[Dialogue],
    answerer: Answerer,
    journal: Journal,
    options: AnswerOptions,
    sampling: SamplingOptions = GREEDY,
) -> AnswerCounts:
    """Answer every conversation, turn by turn, in batches of prompts of similar length.

    The batches do not depend on the journal of `RecordedAnswers`, so an interrupted run ends in the same texts, bit for
    bit, as long as ``batch_size`` and ``max_tokens`` are the same.
    """
    recorded, counts, turn = RecordedAnswers(answerer, journal), AnswerCounts(), 0
    max_tokens = options.max_tokens if isinstance(answerer, LocalAnswerer) else sys.maxsize  # a server batches itself
    with progress_bars() as bars:
        bars.add_task("tokens", total=None)
        [task] = bars.tasks  # its fields are set directly, as `bars.update` of the total forgets the speed

        def advance(num_tokens: int) -> None:
            if task.speed:
                task.description = f"tokens ({task.speed:,.1f} per second)"
            bars.advance(task.id, num_tokens)

        while any(dialogue.num_remaining for dialogue in dialogues):
            requests: dict[int, Request] = {}
            for index, dialogue in enumerate(dialogues):
                if dialogue.num_remaining and (prompt := prompt_with_room(dialogue, answerer, counts)) is not None:
                    limit = min(options.max_new_tokens, answerer.max_length - len(prompt))
                    seed = derived_seed(sampling.seed, *divmod(index, options.num_answers), turn) % NUM_SEEDS
                    requests[index] = Request(dialogue.pending_messages, prompt, limit, replace(sampling, seed=seed))
            num_left = sum(dialogue.num_remaining for dialogue in dialogues) * options.max_new_tokens
            for batch in batches_of(requests, options.batch_size, max_tokens):
                task.total = task.completed + num_left
                num_left -= len(batch) * options.max_new_tokens
                for index, reply in recorded.answer(turn, batch, advance).items():
                    answerer.add(dialogues[index], batch[index].prompt, reply, counts)
            turn += 1
        task.total = task.completed
    return counts


def batches_of(requests: Mapping[int, Request], batch_size: int, max_tokens: int) -> Iterator[dict[int, Request]]:
    """Split requests into batches of similar length, under a limit of rows and one of tokens, padding included.

    The longest prompts come first, so that a lack of memory shows at once. One above ``max_tokens`` is read alone.
    """
    order = sorted(requests, key=lambda index: (-len(requests[index].prompt), index))
    while order:
        num_rows = max(1, min(batch_size, max_tokens // (len(requests[order[0]].prompt) or 1)))
        yield {index: requests[index] for index in order[:num_rows]}
        order = order[num_rows:]


def prompt_with_room(dialogue: Dialogue, answerer: Answerer, counts: AnswerCounts) -> list[int] | None:
    """The prompt of a conversation's next turn; None, and the conversation ends, if it cannot be answered."""
    try:
        prompt = dialogue.prompt()
        if len(prompt) >= answerer.max_length:
            raise ValueError("the prompt leaves no room for an answer")
        if isinstance(answerer, LocalAnswerer):
            check_prompt(answerer.base, prompt, 1)
    except ValueError as error:
        dialogue.stop(str(error), counts)
        return None
    return prompt


def summary(dialogues: Sequence[Dialogue], counts: AnswerCounts, is_served: bool) -> str:
    """One line on what was written, and on how well texts and tokens agree."""
    num_answered = sum(bool(dialogue.is_cut) for dialogue in dialogues)
    agree = "have as many tokens as the server reports" if is_served else "encode back to the same tokens"
    parts = [
        f"{num_answered:,} of {len(dialogues):,} conversations, {counts.num_answers:,} answers, "
        f"{counts.num_tokens:,} tokens",
        f"{counts.num_cut:,} answers cut short, which have no EOS",
        f"{counts.num_round_trip / counts.num_answers:.1%} of the answers {agree}",
    ]
    if counts.num_lost:
        parts.append(f"{counts.num_lost:,} tokens left out of the loss, as a later turn renders them differently")
    if counts.num_other_prompts:
        parts.append(
            f"{counts.num_other_prompts:,} prompts have another length on the server: does it use another chat "
            "template than --template?"
        )
    return "; ".join(parts)


# ---- prompts of the base's own


def own_prompts(
    answerer: Answerer, tokenizer: PreTrainedTokenizerBase, options: AnswerOptions, seed: int, journal: Journal
) -> list[Conversation]:
    """Let the base write user messages, and return those that it ended, each once; ValueError if there are none.

    The base continues what stands before a user's message (Magpie, arXiv 2406.08464), with a seed for each message. The
    journal is that of `RecordedAnswers`.
    """
    recorded, count = RecordedAnswers(answerer, journal), options.own_prompts
    before, end = user_turn(tokenizer, options.template)
    prompt = tokenizer(before, add_special_tokens=False).input_ids
    if (limit := min(MAX_PROMPT_TOKENS, answerer.max_length - len(prompt))) < 1:
        raise ValueError(f"max_length {answerer.max_length} leaves no room for prompts of the base's own: raise it")
    seeds = [derived_seed(seed, index) % NUM_SEEDS for index in range(count)]
    requests = [Request([], prompt, limit, replace(OWN_PROMPTS, seed=number), stop=end) for number in seeds]
    messages: dict[str, str] = {}
    with progress_bars() as bars:
        for first in bars.track(range(0, count, options.batch_size), description="batches of prompts"):
            batch = dict(enumerate(requests[first : first + options.batch_size], first))
            texts = [_ended(reply, tokenizer, end) for reply in recorded.answer(0, batch).values()]
            messages |= {text.lower(): text for text in texts if text}
    if not messages:
        raise ValueError(
            f"the base ends none of {count} messages within {MAX_PROMPT_TOKENS} tokens: give prompts by --files"
        )
    return [Conversation(f"own-{row}", (user_message(text),)) for row, text in enumerate(messages.values())]


def user_turn(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, str]:
    """What a chat template writes before a first user message, and the text behind it that ends one.

    Raises ValueError if it writes nothing behind it.
    """
    before, _, behind = render([user_message(PRIVATE_USE[0])], tokenizer, template).partition(PRIVATE_USE[0])
    before = before.rstrip(" ")  # a space is part of the message's first token
    first = tokenizer(behind, add_special_tokens=False).input_ids[:1]
    if set(first) & set(tokenizer.all_special_ids):
        return before, str(tokenizer.decode(first))
    if not behind.strip():
        raise ValueError(
            "the chat template writes nothing behind a user's message, so none ends: give prompts by --files"
        )
    return before, behind.strip().partition("\n")[0]


def _ended(reply: Any, tokenizer: PreTrainedTokenizerBase, end: str) -> str:
    """The message of a reply, or nothing if it was cut off or refused."""
    if isinstance(reply, dict):
        return "" if reply["is_cut"] or reply["refused"] else reply["text"].strip()
    text, mark, _ = str(tokenizer.decode(reply)).partition(end)
    return text.strip() if mark else ""
