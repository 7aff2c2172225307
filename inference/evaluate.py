"""``drafters eval``: the same prompts with several drafters in one run, measured side by side."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import torch

from data import benchmarks
from data.benchmarks import Question
from inference import metrics, record, report, zoo
from inference.base import Base, Dtype, load_base, resolve_device
from inference.outputs import new_folder
from inference.prompts import prompt_ids
from inference.record import Answer, Turn
from inference.runner import Runner
from inference.sampling import Typical, make_sampler
from inference.session import Session, check_prompt
from inference.tables import COUNTING_RULE


def answer(session: Session, name: str, question: Question, base: Base, template: str, max_new_tokens: int) -> Answer:
    """Decode all turns of a question; the base reads its own earlier answers."""
    messages: list[tuple[str, str]] = []
    turns, ended = [], []
    for text in question.turns:
        messages.append(("user", text))
        prompt = prompt_ids(base, messages, template)
        if len(prompt) >= base.context_length and turns:
            break  # a later turn that no longer fits: `evaluate` says how many were left out
        result = session.run(prompt, max_new_tokens, base.eos)
        ended.append(bool(result.tokens) and result.tokens[-1] in base.eos)
        written = base.tokenizer.decode(result.tokens, skip_special_tokens=True).strip()
        turns.append(Turn(written, result.tokens, len(prompt), result.steps, result.seconds))
        messages.append(("assistant", written))
    return Answer(question.question_id, question.category, name, turns, ended)


def answers(
    base: Base, sessions: dict[str, Session], questions: list[Question], template: str, max_new_tokens: int
) -> Iterator[Answer]:
    """Answer every question with every drafter, question by question, so that all meet the same machine.

    The order of the drafters turns from question to question, and each is warmed up on the first question.
    """
    names = list(sessions)
    for name in names:
        answer(sessions[name], name, questions[0], base, template, min(16, max_new_tokens))
        sessions[name].drafter.reset()  # what it remembers across texts begins with the first question
    for index, question in enumerate(questions):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            yield answer(sessions[name], name, question, base, template, max_new_tokens)


def evaluate(
    base: str,
    drafter: list[str],
    benchmark: list[str],
    questions: list[str] | None = None,
    offset: int = 0,
    limit: int | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    typical: bool = False,
    template: str = "tokenizer",
    dtype: Dtype = "float32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    out: str | None = None,
    overwrite: bool = False,
) -> None:
    """Decode the questions of benchmarks with several drafters and compare speed, acceptance and text.

    Prints a table; with --out also writes answers as FastChat-style JSONL, results.json, results.md and report.html.

    Args:
        base: Folder or hub id of the base.
        drafter: NAME[=FILE][:key=value,...], such as joint, anpd:order=4 or ctc=FOLDER; a wrong name lists all; may be
            repeated. none, the base alone, is always run: all else is measured against it.
        benchmark: embedded, mt_bench or gsm8k; may be repeated.
        questions: A local file for each benchmark, in the same order, where it is not to come from the hub.
        offset: Leave out the first questions of each benchmark.
        limit: Questions of each benchmark at most.
        max_new_tokens: Tokens of an answer at most.
        temperature: 0 decodes greedily, above it samples, each draw keyed by the seed and its position.
        top_k: Sampling keeps the k most probable tokens; 0 keeps all.
        top_p: Sampling keeps the most probable tokens up to this probability.
        seed: Of the sampling.
        typical: Accept drafts by Medusa's typical acceptance, which is lossy; the base alone still samples exactly.
        template: Chat template: the tokenizer's own, vicuna_v1.1 or llama2_chat.
        dtype: Number format of base and drafters.
        device: auto takes the GPU where there is one.
        out: Folder for the results.
        overwrite: Replace results that are already there.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if typical and temperature == 0:
        raise ValueError("typical acceptance is a rule for sampling: give a --temperature above 0")
    files = questions or []
    if files and len(files) != len(benchmark):
        raise ValueError(f"{len(files)} --questions for {len(benchmark)} --benchmark: give one file for each, in order")
    folder = new_folder(out, overwrite)
    asked = {
        name: benchmarks.load(name, file, offset, limit)
        for name, file in zip(benchmark, files or [None] * len(benchmark), strict=True)
    }
    loaded = load_base(base, dtype, resolve_device(device))
    runner = Runner(loaded)
    exact = make_sampler(temperature, top_k, top_p, seed)
    accept = Typical(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed) if typical else exact
    sessions = {
        name if name == "none" or accept.lossless else f"{name} (lossy)": Session(
            runner, zoo.make(spec, runner), exact if name == "none" else accept
        )
        for name, spec in zoo.labels(["none", *(spec for spec in drafter if spec != "none")]).items()
    }
    for name, selected in asked.items():
        for question in selected:
            _require_room(loaded, name, question, template, max_new_tokens)
    if folder:
        _clear(folder)

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    given: dict[str, dict[str, list[Answer]]] = {}
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        for name, selected in asked.items():
            task = progress.add_task(name, total=len(selected) * len(sessions))
            given[name] = {drafter: [] for drafter in sessions}
            for found in answers(loaded, sessions, selected, template, max_new_tokens):
                given[name][found.drafter].append(found)
                if folder:
                    record.append(folder / "answers" / name / f"{_file_name(found.drafter)}.jsonl", found)
                progress.advance(task)
    left_out = sum(
        len(question.turns) - len(found.turns)
        for name, selected in asked.items()
        for question, found in zip(selected, given[name]["none"], strict=True)
    )
    summaries = {
        name: {drafter: metrics.summarise(found, of["none"]) for drafter, found in of.items()}
        for name, of in given.items()
    }
    console = Console()
    for table in report.table(summaries):
        console.print(table)
    console.print(COUNTING_RULE, style="dim")
    if left_out:
        console.print(f"{left_out} later turns were left out: they no longer fit into the base's context.")
    if folder:
        how = "greedy" if temperature == 0 else f"temperature {temperature}, top_k {top_k}, top_p {top_p}, seed {seed}"
        if typical:
            how += ", drafts accepted by typical acceptance: lossy"
        context = _context(base, dtype, loaded, f"{how}, at most {max_new_tokens} new tokens a turn")
        report.write_results(folder, summaries, context)
        (folder / "results.md").write_text(report.markdown(summaries, context), encoding="utf-8")
        page = report.write_report(folder, summaries, context, given, loaded.tokenizer.decode)
        console.print(f"Report: {page}")


def _clear(folder: Path) -> None:
    """Make room for new results, once nothing in the arguments can stop them any more."""
    for path in [*(folder / "answers").rglob("*.jsonl"), folder / "results.json", folder / "results.md"]:
        path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


def _require_room(base: Base, benchmark: str, question: Question, template: str, max_new_tokens: int) -> None:
    try:
        check_prompt(base, prompt_ids(base, [("user", question.turns[0])], template), max_new_tokens)
    except ValueError as error:
        raise ValueError(f"{benchmark}, question {question.question_id}: {error}") from error


def _file_name(drafter: str) -> str:
    return "".join(c if c.isalnum() or c in "._-=" else "_" for c in drafter)


def _context(base: str, dtype: str, loaded: Base, decoding: str) -> dict[str, str]:
    import transformers

    device = loaded.model.device
    machine = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    )
    return {
        "base": base,
        "dtype": dtype,
        "device": f"{device.type} ({machine}, {torch.get_num_threads()} threads)",
        "decoding": decoding,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": " ".join(["drafters", *sys.argv[1:]]),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "counting": COUNTING_RULE,
    }
