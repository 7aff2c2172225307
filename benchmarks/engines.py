"""Servers of several engines on one machine, asked the same questions in turns: what would you run instead?"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.harness import ResultTable, alternate, main, show
from data.benchmarks import Question
from data.conversations import user_message
from data.files import hash_of, reading, validated
from inference.evaluate import intervals
from inference.evaluate.server import Server
from inference.journal import Journal
from inference.options import QuestionOptions
from inference.runs import fingerprint
from inference.server_process import free_port, running_server
from inference.timing import processor_name
from inference.verifier.base import load_base_info

START_SECONDS = 600.0
REST_SECONDS = 3.0  # before each request: right after vLLM's answers others took up to a second longer
WITH = " + "  # between the name of an engine and that of its drafter
HEADINGS = ["server", "tokens/s", "× the first", "interval", "first token, s", "answers as without drafts"]


class Timed(NamedTuple):
    """An answer: its tokens, the seconds from the request to the end, and those to its first token."""

    tokens: list[int]
    seconds: float
    first: float


Entry = tuple[str, str, int, Timed]  # of the file that keeps answers: benchmark, server, index of the question, answer


def engines(
    base: str,
    servers: str = "benchmarks/engines.txt",
    only: list[str] = [],  # noqa: B006
    benchmark: list[str] = ["embedded"],  # noqa: B006
    rows: str = ":",
    limit: int = 8,
    max_new_tokens: int = 128,
    out: str | None = None,
    overwrite: bool = False,
) -> None:
    """Start OpenAI-compatible servers, ask them for greedy answers to the same first turns in turns, and compare times.

    All servers run at once, and one request is on its way at any time. Each line of the file has a name, a colon and
    the shell command that starts a server at $PORT. Other variables are the user's; a line with an unset one is left
    out. The answers of `X + DRAFTER` are compared with those of `X`.

    With ``out`` the command continues when it is repeated: servers whose answers are all there are not started again,
    and a drafter that remembers texts has forgotten those before.

    Args:
        base: Folder or hub id of the base, whose tokenizer encodes prompts and counts tokens.
        servers: File of servers.
        only: Names of the servers to take; by default all.
        benchmark: NAME[:STYLE][=FILE] as in `drafters eval`; may be repeated.
        rows: Rows of each benchmark, as in `drafters eval`.
        limit: Maximum number of questions of each benchmark.
        max_new_tokens: Maximum number of tokens of an answer.
        out: Markdown file to write; the answers are kept beside it, in a file with .jsonl behind this name.
        overwrite: Replace answers that are there under other conditions.
    """
    info, options = load_base_info(base), QuestionOptions(benchmark, limit, rows, max_new_tokens)
    selected, commands, tables = options.select(info, options.load()), read_servers(servers, only), []
    conditions = {
        "base": [base, fingerprint(base)],
        "servers": {name: [command, identity(command)] for name, command in commands.items()},
        "questions": {name: hash_of([each.as_dict() for each in asked.questions]) for name, asked in selected.items()},
        "max_new_tokens": max_new_tokens,
        "machine": processor_name(),
    }
    with ExitStack() as stack:
        journal = stack.enter_context(Journal(f"{out}.jsonl", conditions, overwrite)) if out else None
        answers: dict[str, dict[tuple[str, int], Timed]] = {title: {} for title in selected}
        for title, name, item, timed in journal.entries(partial(validated, Entry)) if journal else ():
            answers[title][name, item] = timed
        num_known = Counter(name for known in answers.values() for name, _ in known)
        started = dict[str, Server]()
        for name, command in commands.items():
            if num_known[name] == sum(len(asked.questions) for asked in selected.values()):
                continue
            port, log = free_port(), Path("runs/engines") / f"{re.sub(r'[^a-zA-Z0-9.]+', '_', name)}.log"
            server = started[name] = Server(f"http://127.0.0.1:{port}", info, "tokenizer", is_ours=True)
            client = stack.enter_context(closing(server.client))
            is_ready = partial(client.get, "/v1/models")
            variables = os.environ | {"PORT": str(port)}
            stack.enter_context(running_server(name, command, log, is_ready, variables, START_SECONDS))
        for title, asked in selected.items():
            questions, prompts = [replace(each, turns=each.turns[:1]) for each in asked.questions], asked.prompts
            for server in started.values():
                server.probe(questions[0], prompts[0][::-1])  # the first request is slow
            for _, item, name in alternate([*commands], len(questions), 1, title):
                if (name, item) not in answers[title]:
                    timed = ask(started[name], questions[item], prompts[item], max_new_tokens)
                    answers[title][name, item] = timed
                    if journal:
                        journal.append([title, name, item, timed])
            tables.append(comparison(title, [*commands], answers[title], len(questions)))
    tables[-1].notes += [f"{name}: `{command}`" for name, command in commands.items()]
    show(tables, torch.device("cpu"), out)


def read_servers(path: str, only: Sequence[str] = ()) -> dict[str, str]:
    """The command of each server in a file; raises ValueError if a line is none or a name is unknown."""
    found, names = dict[str, str](), list[str]()
    with reading(path):
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if not line or line.startswith("#"):
            continue
        name, colon, command = line.partition(": ")
        if not colon or "$PORT" not in command:
            raise ValueError(f"{path}: a line is NAME: COMMAND with $PORT in it, not {line!r}")
        names.append(name)
        if only and name not in only:
            continue
        unset = {*re.findall(r"\$(\w+)", command)} - {*os.environ, "PORT"}
        if unset:
            print(f"{name} is left out: {', '.join(sorted(unset))} is not set")
        else:
            found[name] = command
    if not found or {*only} - {*names}:
        raise ValueError(f"{path} has no server to start: it knows {', '.join(names)}; --only names {[*only]}")
    return found


def identity(command: str) -> str:
    """A hash of a command with the values of its variables, and of the files and folders whose paths it names."""
    line = os.path.expandvars(command)
    return hash_of([line, *(fingerprint(path) for path in re.split(r"[\s=:'\"]+", line) if "/" in path)], 16)


def ask(server: Server, question: Question, prompt: list[int], max_new_tokens: int) -> Timed:
    """Ask a server for the answer to a question of one turn, when the server before it has come to rest."""
    time.sleep(REST_SECONDS)
    turn = server.complete(question, [user_message(question.turns[0])], prompt, max_new_tokens)
    return Timed(turn.token_ids, turn.seconds, turn.arrivals[0][0] if turn.arrivals else turn.seconds)


def comparison(title: str, names: Sequence[str], answers: dict[tuple[str, int], Timed], num_items: int) -> ResultTable:
    """The speed of each server in comparison with the first, over the same questions."""
    table = ResultTable(title, HEADINGS)
    for name in names:
        own, first = ([answers[each, item] for item in range(num_items)] for each in (name, names[0]))
        columns = [[float(len(each.tokens)) for each in own], [each.seconds for each in own]]
        columns += [[float(len(each.tokens)) for each in first], [each.seconds for each in first]]
        tokens, seconds, first_tokens, first_seconds = map(sum, columns)
        between = intervals.interval(columns, (1, -1, -1, 1))
        cells = [f"{tokens / seconds:.1f}", f"{tokens / seconds / (first_tokens / first_seconds):.2f}"]
        cells += ["" if between is None else "{:.2f}-{:.2f}".format(*between)]
        cells += [f"{median(each.first for each in own):.2f}"]
        engine, is_with, _ = name.partition(WITH)
        if is_with and engine in names:
            equal = sum(each.tokens == answers[engine, item].tokens for item, each in enumerate(own))
            cells.append(f"{equal} of {num_items}")
        table.rows.append([name, *cells, *[""] * (len(HEADINGS) - 1 - len(cells))])
    table.notes.append(
        f"{num_items} questions, first turns, one request at a time, all servers in turns; prefill and HTTP included. "
        "Intervals are of 95 % over the questions; the time to the first token is a median."
    )
    return table


if __name__ == "__main__":
    main(engines)
