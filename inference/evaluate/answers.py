"""Answers with the cost of every step, and the files that keep them: JSON lines that grow while an evaluation runs.

The lines have the form of FastChat, which Spec-Bench's tools read too.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from data.benchmarks import Question
from data.conversations import Message, user_message
from data.files import validated
from inference.evaluate.intervals import Count, Figure
from inference.journal import Journal
from inference.runs import folder_above
from inference.verifier.session import PHASES, Step

COUNTS = ("emitted", "accepted", "fed_pending", "fed_candidates", "fed_scratch", "draft_forwards")
RUN = Path("answers", "run.jsonl")  # in the folder of the results
REPLACED = "answers.old"
WRITES = "answers", "plots", "results.json", "results.csv", "results.md", "report.html"

Key = tuple[int, int]  # how often all questions were answered before, and the id of a question


@dataclass(frozen=True)
class Turn:
    """One answered turn of a conversation. One that a server wrote has no steps, but arrivals."""

    text: str
    token_ids: list[Count]  # with the end-of-sequence token
    prompt_tokens: Count  # with the earlier turns
    steps: list[Step]  # the first one is the prefill
    seconds: Figure  # wall time
    is_ended: bool  # with an end-of-sequence token, rather than at the length cap
    cpu_seconds: list[Figure] = field(default_factory=list)  # of the decoding thread for each step; none on a GPU
    # Seconds from the request to each event, and the number of tokens that came with it (0 if the server does not say).
    arrivals: list[tuple[Figure, Count]] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """A question answered with one drafter."""

    question_id: int
    category: str
    drafter: str  # the name in the tables
    turns: list[Turn]
    peak_bytes: Count | None = None  # peak of allocated GPU memory, with the base and all drafters of the run
    repeat: Count = 0  # how often all questions were answered before
    load: Figure | None = None  # `load_average` at its end

    @property
    def seconds(self) -> float:
        """Wall time of all turns."""
        return sum(turn.seconds for turn in self.turns)


def answer_turns(
    question: Question,
    encode: Callable[[list[Message]], list[int]],
    context_length: int,
    write: Callable[[list[Message], list[int]], Turn],
) -> list[Turn]:
    """Answer all turns of a question; ``write`` writes a turn after a prompt.

    Each prompt contains the earlier answers. A later turn that no longer fits into the context ends the answer early.
    """
    messages: list[Message] = []
    turns: list[Turn] = []
    for text in question.turns:
        messages.append(user_message(text))
        prompt = encode(messages)
        if len(prompt) >= context_length and turns:
            break
        turns.append(write(messages, prompt))
        messages.append({"role": "assistant", "content": turns[-1].text})
    return turns


def comparable(answer: Answer) -> list[Any]:
    """Tokens and step counts of an answer, which are equal for two decodings unless the device is nondeterministic."""
    tokens = [turn.token_ids for turn in answer.turns]
    steps = [[(step.emitted, step.accepted, step.fed, step.draft_forwards) for step in t.steps] for t in answer.turns]
    return [tokens, steps]


def turns_of(answers: Iterable[Answer]) -> list[Turn]:
    """All turns of the answers."""
    return [turn for answer in answers for turn in answer.turns]


def count_tokens(turns: Iterable[Turn]) -> int:
    """Number of tokens of some turns."""
    return sum(len(turn.token_ids) for turn in turns)


def decode_steps(turns: Iterable[Turn]) -> list[Step]:
    """All steps except the prefill, which is the first step of each turn."""
    return [step for turn in turns for step in turn.steps[1:]]


def median_answers(repeats: Sequence[Sequence[Answer]]) -> list[Answer]:
    """The answer of median time to each question, or the faster one of two; all repeats have the same order."""
    by_question = (sorted(rounds, key=lambda answer: answer.seconds) for rounds in zip(*repeats, strict=True))
    return [rounds[(len(rounds) - 1) // 2] for rounds in by_question]


# ---- JSON lines


def to_json(answer: Answer) -> dict[str, Any]:
    """The answer in FastChat's form.

    ``idxs`` is the zero-based index of each turn's last step, as FastChat-style tools expect it, and
    ``accept_lengths`` what Spec-Bench averages: tokens emitted by each step, prefills excluded.
    """
    turns = answer.turns
    choice = {
        "index": 0,
        "turns": [turn.text for turn in turns],
        "token_ids": [list(turn.token_ids) for turn in turns],
        "idxs": [len(turn.steps) - 1 if turn.steps else None for turn in turns],
        "new_tokens": [len(turn.token_ids) for turn in turns],
        "wall_time": [round(turn.seconds, 7) for turn in turns],
        "accept_lengths": [step.emitted for turn in turns for step in turn.steps[1:]],
        "prompt_tokens": [turn.prompt_tokens for turn in turns],
        "ended": [turn.is_ended for turn in turns],
        "steps": [list(map(_step_to_json, turn.steps)) for turn in turns],
        "step_cpu_times": [[round(seconds, 7) for seconds in turn.cpu_seconds] for turn in turns],
        "arrivals": [[(round(seconds, 7), count) for seconds, count in turn.arrivals] for turn in turns],
        "peak_bytes": answer.peak_bytes,
    }
    return {
        "question_id": answer.question_id,
        "answer_id": f"{answer.drafter}-{answer.question_id}",
        "model_id": answer.drafter,
        "category": answer.category,
        "choices": [choice],
        "repeat": answer.repeat,
        "load": answer.load,
        "tstamp": time.time(),
    }


def from_json(record: dict[str, Any]) -> Answer:
    """The inverse of `to_json`; raises one of `data.files.MALFORMED` if the record is not such an answer."""
    choice = record["choices"][0]
    names = ("turns", "token_ids", "prompt_tokens", "steps", "wall_time", "ended", "step_cpu_times", "arrivals")
    fields = ("text", "token_ids", "prompt_tokens", "steps", "seconds", "is_ended", "cpu_seconds", "arrivals")
    turns = [dict(zip(fields, values, strict=True)) for values in zip(*(choice[name] for name in names), strict=True)]
    for turn in turns:
        turn["steps"] = list(map(_step_from_json, turn["steps"]))
        if turn["cpu_seconds"] and len(turn["cpu_seconds"]) != len(turn["steps"]):
            raise ValueError("its steps and their CPU times differ in number")
    answer = {"question_id": record["question_id"], "category": record["category"], "drafter": record["model_id"]}
    answer |= {"turns": turns, "peak_bytes": choice["peak_bytes"]}
    return validated(Answer, answer | {name: record[name] for name in ("repeat", "load") if name in record})


def _step_to_json(step: Step) -> list[float]:
    return [*(getattr(step, name) for name in COUNTS), *(round(seconds, 7) for seconds in step.seconds)]


def _step_from_json(row: list[float]) -> dict[str, Any]:
    if len(row) != len(COUNTS) + len(PHASES) or min(row) < 0:
        raise ValueError(f"a step has {len(COUNTS)} counts and {len(PHASES)} times, none of them negative")
    return {**dict(zip(COUNTS, row, strict=False)), "seconds": row[len(COUNTS) :]}


# ---- files


class AnswerFiles:
    """The answers of an evaluation: in memory, and in ``answers/`` of its folder, where each is on the disk at once.

    ``run.jsonl`` begins with the conditions and holds what happened, such as the starts of the command. Each drafter
    has a file for each benchmark, with a line for each answer. An evaluation that was interrupted continues with what
    its folder holds. Nothing in the folder changes before the first new line. Without a folder nothing is written.

    Args:
        folder: The folder of the results; it need not exist yet.
        conditions: The conditions of the evaluation, as JSON values.
        overwrite: Replace what the folder holds. Until `finish` it is kept beside the new answers.

    Raises ValueError if the folder cannot be created, or holds results under other conditions or of no evaluation.
    """

    def __init__(self, folder: Path | None, conditions: Mapping[str, Any], overwrite: bool = False) -> None:
        self.events: list[dict[str, Any]] = []
        self._by_drafter: dict[tuple[str, str], dict[Key, Answer]] = {}  # by benchmark and drafter
        self._journals: dict[tuple[str, str], Journal] = {}
        self.folder, self._conditions = folder, conditions
        self._run: Journal | None = None
        if folder is None:
            return
        folder_above(folder / "results.json")
        if not overwrite:
            if (folder / REPLACED).exists() and not (folder / RUN).exists():
                _delete(folder / "answers")  # the run that was to replace them ended without an answer
                (folder / REPLACED).rename(folder / "answers")
            names = [name for name in WRITES if (folder / name).exists()]
            if names and not (folder / RUN).exists():
                listed = ", ".join(names)
                raise ValueError(f"{folder} already holds {listed}: give another --out, or --overwrite to replace them")
            self._run = Journal(folder / RUN, conditions)
            self.events = list(self._run)
            for benchmark, journal, answers in read_answers(folder):
                name = answers[0].drafter
                self._journals[benchmark, name] = journal
                self._by_drafter[benchmark, name] = {_key(answer): answer for answer in answers}

    def answers(self, benchmark: str, drafter: str) -> Mapping[Key, Answer]:
        """All answers of a drafter to the questions of a benchmark."""
        return self._by_drafter.get((benchmark, drafter), {})

    def all_answers(self) -> list[Answer]:
        """All answers of all drafters."""
        return [answer for answers in self._by_drafter.values() for answer in answers.values()]

    def rounds(self, benchmark: str, drafters: Sequence[str], ids: Sequence[int]) -> dict[str, list[list[Answer]]]:
        """Each drafter's answers of each repeat, in the order of the ids; only repeats that are complete for all."""
        rounds = {name: complete_repeats(self.answers(benchmark, name), ids) for name in drafters}
        num_complete = min(map(len, rounds.values()))
        return {name: repeats[:num_complete] for name, repeats in rounds.items()}

    def add(self, benchmark: str, answer: Answer) -> None:
        """Add an answer; it is on the disk when this returns. An event must have been added before."""
        record = to_json(answer)
        kept = from_json(record)  # with times as they are read back
        if journal := self._journal(benchmark, answer.drafter):
            journal.append(record)
        self._by_drafter.setdefault((benchmark, answer.drafter), {})[_key(kept)] = kept

    def add_event(self, event: dict[str, Any]) -> None:
        """Add what happened; it is on the disk when this returns."""
        if self.folder:
            self._started().append(event)
        self.events.append(event)

    def finish(self) -> None:
        """Close all files, and delete the answers that were replaced."""
        for journal in (self._run, *self._journals.values()):
            if journal:
                journal.close()
        if self.folder:
            _delete(self.folder / REPLACED)

    def _started(self) -> Journal:
        """The journal of the run; what is replaced is set aside first."""
        assert self.folder is not None
        if self._run is None:
            place, replaced = self.folder / "answers", self.folder / REPLACED
            if replaced.exists():  # a run that was to replace it was interrupted, and is replaced too
                _delete(place)
            elif place.exists():
                place.rename(replaced)
            self._run = Journal(self.folder / RUN, self._conditions)
        return self._run

    def _journal(self, benchmark: str, drafter: str) -> Journal | None:
        if self.folder and (benchmark, drafter) not in self._journals:
            self._started()
            name = "".join(c if c.isalnum() or c in "._-=" else "_" for c in drafter)
            path = self.folder / "answers" / benchmark / f"{name}.jsonl"
            while path in {journal.path for journal in self._journals.values()}:
                path = path.with_name(f"{path.stem}_.jsonl")  # another drafter, whose name differs in such characters
            self._journals[benchmark, drafter] = Journal(path)
        return self._journals.get((benchmark, drafter))


def _key(answer: Answer) -> Key:
    return answer.repeat, answer.question_id


def complete_repeats(answers: Mapping[Key, Answer], ids: Sequence[int]) -> list[list[Answer]]:
    """The answers of each repeat, in the order of the ids, up to the first repeat that lacks some; none without ids."""
    repeats = takewhile(lambda repeat: bool(ids) and all((repeat, number) in answers for number in ids), count())
    return [[answers[repeat, number] for number in ids] for repeat in repeats]


def read_answers(folder: Path) -> Iterator[tuple[str, Journal, list[Answer]]]:
    """Each file of answers in the folder of an evaluation: its benchmark, the file, and the answers.

    Raises ValueError if a line is not such an answer.
    """
    for path in sorted((folder / "answers").glob("*/*.jsonl")):
        journal = Journal(path)
        if answers := list(journal.entries(from_json)):
            yield path.parent.name, journal, answers


def _delete(place: Path) -> None:
    """Delete the answers of an evaluation in a folder, but no files of others."""
    for path in place.glob("*/*.jsonl"):
        with path.open("rb") as stream:
            is_ours = b'"model_id"' in stream.readline()
        if is_ours:
            path.unlink()
    (place / RUN.name).unlink(missing_ok=True)
    for folder in (*place.glob("*/"), place):
        with suppress(OSError):  # as it holds files of others, or does not exist
            folder.rmdir()
