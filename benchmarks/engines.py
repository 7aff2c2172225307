"""Servers of several engines on one machine, asked the same questions in turns: what would you run instead?"""

from __future__ import annotations

import os
import re
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
from data.files import reading
from inference.evaluate import intervals
from inference.evaluate.server import Server
from inference.options import QuestionOptions
from inference.server_process import free_port, running_server
from inference.verifier.base import load_base_info

START_SECONDS = 600.0
WITH = " + "  # between the name of an engine and that of its drafter
HEADINGS = ["server", "tokens/s", "× the first", "interval", "first token, s", "answers as without drafts"]


class Timed(NamedTuple):
    """An answer: its tokens, the seconds from the request to the end, and those to its first token."""

    tokens: list[int]
    seconds: float
    first: float


def engines(
    base: str,
    servers: str = "benchmarks/engines.txt",
    only: list[str] = [],  # noqa: B006
    benchmark: list[str] = ["embedded"],  # noqa: B006
    rows: str = ":",
    limit: int = 8,
    max_new_tokens: int = 128,
    out: str | None = None,
) -> None:
    """Start OpenAI-compatible servers, ask them for greedy answers to the same first turns in turns, and compare times.

    All servers run at once, and one request is on its way at any time. Each line of the file has a name, a colon and
    the shell command that starts a server at $PORT. Other variables are the user's; a line with an unset one is left
    out. The answers of `X + DRAFTER` are compared with those of `X`.

    Args:
        base: Folder or hub id of the base, whose tokenizer encodes prompts and counts tokens.
        servers: File of servers.
        only: Names of the servers to take; by default all.
        benchmark: NAME[:STYLE][=FILE] as in `drafters eval`; may be repeated.
        rows: Rows of each benchmark, as in `drafters eval`.
        limit: Maximum number of questions of each benchmark.
        max_new_tokens: Maximum number of tokens of an answer.
        out: Markdown file to write.
    """
    info, options = load_base_info(base), QuestionOptions(benchmark, limit, rows, max_new_tokens)
    selected, commands, tables = options.select(info, options.load()), read_servers(servers, only), []
    with ExitStack() as stack:
        started = dict[str, Server]()
        for name, command in commands.items():
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
            answers = {
                (name, item): ask(started[name], questions[item], prompts[item], max_new_tokens)
                for _, item, name in alternate([*started], len(questions), 1, title)
            }
            tables.append(comparison(title, [*started], answers, len(questions)))
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


def ask(server: Server, question: Question, prompt: list[int], max_new_tokens: int) -> Timed:
    """Ask a server for the answer to a question of one turn."""
    turn, _ = server.complete(question, [user_message(question.turns[0])], prompt, max_new_tokens)
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
