"""Make the tables about the CTC drafter again from nothing, by running the commands that make them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any

from benchmarks.harness import main
from benchmarks.learned_drafters import ARMS, GROUPS
from data.files import output_lock, read_json, write_text
from train.resume import EXIT_CODES

DRAFTERS = "drafters"
RUN_DRAFTERS = "import sys; from train.cli import run_drafters as main; sys.exit(main())"
TINY = "checkpoints/tiny-chat"


@dataclass(frozen=True)
class Part:
    """One command, and what it leaves behind.

    Args:
        name: Name of its files in the folder ``parts``.
        program: A module of the benchmarks, or ``drafters``.
        arguments: Its arguments.
        made: The Markdown file with its table; None if it prepares data for the others.
        needs: Names of the parts that must be done first.
        runs_alone: Whether nothing else may run at the same time, because it measures time. It gets as many threads as
            there may be processes.
    """

    name: str
    program: str
    arguments: Sequence[str]
    made: Path | None = None
    needs: Sequence[str] = ()
    runs_alone: bool = False

    @property
    def command(self) -> str:
        """The command as a user would type it, without the number of threads."""
        return shlex.join([*([] if self.program == DRAFTERS else ["python", "-m"]), self.program, *self.arguments])


@dataclass(frozen=True)
class Text:
    """A base, the text that its drafters are trained on, and the questions that are decoded.

    Args:
        name: Name in the names of parts.
        base: Folder of the base.
        files: Training text.
        questions: Options that choose the questions of a benchmark of ours.
        evaluated: The same for `drafters eval`.
        group: Arms that are compared with all seeds.
        curves: Those of them that have learning curves, in the order in which they are trained, the slowest first.
        split: CTC and block drafters, whose alignments are looked at.
        live: Arms that are decoded with.
        needs: The part that writes the training text, if there is one.
    """

    name: str
    base: str
    files: str
    questions: Sequence[str]
    evaluated: Sequence[str]
    group: str
    curves: Sequence[str]
    split: Sequence[str]
    live: Sequence[str]
    needs: Sequence[str] = ()


def every_table(
    out: str,
    gsm_base: str | None = None,
    gsm8k: str | None = None,
    seeds: list[int] = [0, 1, 2],  # noqa: B006
    steps: int = 600,
    curve_steps: list[int] = [150, 600, 2400],  # noqa: B006
    live: int = 60,
    limit: int | None = None,
    conversations: int = 6000,
    answers: int = 4096,
    ablations: list[str] = [],  # noqa: B006
    only: list[str] | None = None,
    processes: int = 1,
) -> None:
    """Run the commands behind docs/results/ctc.md, and write one page of their tables with the time that each took.

    A part that is done is not run again: repeat the command to continue an interrupted run. The tables of tiny-chat
    need nothing that is not in the repository; those of gsm-chat-7m need that base and the questions of GSM8K.

    Args:
        out: Folder for the text, the drafters, the tables and the page, tables.md.
        gsm_base: Folder of the base gsm-chat-7m; without it its tables are left out.
        gsm8k: Folder with GSM8K's train.jsonl and test.jsonl.
        seeds: Seeds of the arms that are compared. Learning curves and ablations have the first one only.
        steps: Training steps of all arms but those of the learning curves.
        curve_steps: Numbers of training steps of the learning curves.
        live: Number of GSM8K questions that are decoded live; the embedded ones are 40, of two turns each.
        limit: Maximum number of questions of everything else, and of the embedded ones.
        conversations: Number of embedded conversations that tiny-chat's drafters are trained on.
        answers: Maximum number of GSM8K's training questions whose answers gsm-chat-7m's drafters are trained on.
        ablations: Further groups of arms to train, as in `benchmarks.learned_drafters`, such as bias or losses.
        only: Names of single parts to run; by default all.
        processes: Number of parts that run at the same time, with one thread each.
    """
    if (gsm_base is None) != (gsm8k is None):
        raise ValueError("give both --gsm_base and --gsm8k, or neither")
    if processes < 1 or not seeds or not curve_steps:
        raise ValueError("--processes must be at least 1, and --seeds and --curve_steps must not be empty")
    if unknown := [name for name in ablations if name not in GROUPS]:
        raise ValueError(f"unknown groups {', '.join(unknown)}: known are {', '.join(GROUPS)}")
    folder = Path(out)
    parts: list[Part] = []
    if gsm_base and gsm8k:
        text = gsm_text(gsm_base, gsm8k, folder, limit, live)
        parts.append(answers_of_the_base(text, f"{gsm8k}/train.jsonl", answers))
        parts += tables_of_a_base(text, folder, ablations, seeds, steps, curve_steps)
    parts += tables_of_a_base(tiny_text(conversations, limit), folder, ablations, seeds, steps, curve_steps)
    parts += without_base(folder)
    if unknown := sorted(set(only or ()) - {part.name for part in parts}):
        raise ValueError(f"unknown parts {', '.join(unknown)}: known are {', '.join(part.name for part in parts)}")
    with output_lock(folder):
        try:
            run([part for part in parts if only is None or part.name in only], folder, processes)
        finally:
            write_text(folder / "tables.md", page(parts, folder))
    print(f"wrote {folder / 'tables.md'}")


def tiny_text(conversations: int, limit: int | None) -> Text:
    """The base that ships here, with its own corpus and questions."""
    few = ["--limit", str(limit)] if limit else []
    return Text(
        "tiny",
        TINY,
        f"[embedded:{conversations}]",
        ["--questions", "", "--benchmark", "embedded", *few],
        ["--benchmark", "embedded", *few],
        group="best_long",
        curves=("ctc_10_selfless_muon", "ctc_10_8_muon", "block_10_muon", "eagle_8", "hydra", "medusa"),
        split=("ctc_10_8_muon", "ctc_10_selfless_muon", "block_10_muon"),
        live=("eagle_8", "block_10_muon", "ctc_10_8_muon", "ctc_10_selfless_muon"),
    )


def gsm_text(base: str, gsm8k: str, folder: Path, limit: int | None, live: int) -> Text:
    """The base gsm-chat-7m, with its own answers to GSM8K's questions for training."""
    asked = ["--questions", f"{gsm8k}/test.jsonl", "--offset", "1200"]
    evaluated = ["--benchmark", f"gsm8k={gsm8k}/test.jsonl", "--rows", "1200:"]
    return Text(
        "gsm",
        base,
        f"[{folder / 'gsm8k.jsonl'}]",
        [*asked, *(["--limit", str(limit)] if limit else [])],
        [*evaluated, "--limit", str(live), "--max-new-tokens", "200"],
        group="best",
        curves=("ctc_deep_muon", "ctc_muon", "block_muon", "eagle", "medusa"),
        split=("ctc_muon", "block_muon"),
        live=("eagle", "block_muon", "ctc_muon", "ctc_deep_muon"),
        needs=("gsm-answers",),
    )


def answers_of_the_base(text: Text, questions: str, limit: int) -> Part:
    """The base's own answers, which its drafters are trained on."""
    answers = text.files.strip("[]")
    arguments = ["--base", text.base, "--files", f"[{questions}]", "--out", answers, "--limit", str(limit)]
    return Part(f"{text.name}-answers", DRAFTERS, ["regenerate", *arguments, "--max-new-tokens", "200"])


def without_base(folder: Path) -> Iterator[Part]:
    """The tables of the loss and of building trees, which need no base."""
    for name in ("loss_memory", "tree_building", "draft_vocabulary"):
        made = folder / "parts" / f"{name}.md"
        yield Part(name, f"benchmarks.ctc.{name}", ["--out", str(made)], made, runs_alone=True)


def tables_of_a_base(
    text: Text,
    folder: Path,
    ablations: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    curve_steps: Sequence[int],
) -> Iterator[Part]:
    """All parts of one base, each behind those that it needs."""
    parts, store, trained = folder / "parts", folder / f"{text.name}-store", folder / text.name
    trained_on = ["--base", text.base, "--files", text.files]
    common = [*trained_on, "--features", str(store), *text.questions]
    options = ["--out", str(store), "--max-length", "384", "--layers=-1,2,4"]
    features = Part(f"{text.name}-features", DRAFTERS, ["features", *trained_on, *options], needs=text.needs)
    yield features

    def training(arm: str, seed: int, count: int) -> Part:
        options = ["--arms", f"[{arm}]", "--seeds", f"[{seed}]", "--steps", str(count)]
        return Part(
            f"{text.name}-{count}-{arm}-seed{seed}",
            "benchmarks.learned_drafters",
            [*common, *options, "--out", str(trained / str(count))],
            needs=[features.name],
        )

    first, arms = seeds[0], GROUPS[text.group]
    in_curves = [training(arm, first, count) for count in sorted(curve_steps, reverse=True) for arm in text.curves]
    compared = {seed: [training(arm, seed, steps) for arm in arms] for seed in seeds}
    trainings = {part.name: part for part in [*compared[first], *in_curves, *chain(*compared.values())]}
    yield from trainings.values()

    made = parts / f"{text.name}-{text.group}.md"
    options = ["--group", text.group, "--seeds", str(list(seeds)), "--steps", str(steps)]
    options += ["--out", str(trained / str(steps)), "--figures", str(folder / "plots" / text.name)]
    options += ["--table", str(made)]
    needs = [part.name for part in chain(*compared.values())]
    yield Part(made.stem, "benchmarks.learned_drafters", [*common, *options], made, needs)
    made = parts / f"{text.name}-curves.md"
    options = ["--arms", f"[{','.join(text.curves)}]", "--steps", str(list(curve_steps)), "--seeds", f"[{first}]"]
    options += ["--out", str(trained), "--figure", str(folder / "plots" / f"{made.stem}.png"), "--table", str(made)]
    needs = [part.name for part in in_curves]
    yield Part(made.stem, "benchmarks.ctc.learning_curves", [*common, *options], made, needs)
    made = parts / f"{text.name}-alignments.md"
    longest = trained / str(max(curve_steps))
    split = ["--drafter", f"[{','.join(str(longest / name / f'seed{first}' / 'drafter') for name in text.split)}]"]
    asked = ["--base", text.base, *text.questions, "--out", str(folder / made.stem), "--table", str(made)]
    yield Part(made.stem, "benchmarks.ctc.alignments", [*asked, *split], made, needs)
    drafters = [
        f"{ARMS[name].drafter.lower()}={trained / str(steps) / name / f'seed{seed}' / 'drafter'}:num_nodes=16"
        for name in text.live
        for seed in seeds
    ]
    live = folder / f"{text.name}-live"
    asked = [argument for drafter in [*drafters, "anpd"] for argument in ("--drafter", drafter)]
    arguments = ["eval", "--base", text.base, *text.evaluated, "--repeats", "1", "--out", str(live), *asked]
    needs = [part.name for part in chain(*compared.values())]
    yield Part(live.name, DRAFTERS, arguments, live / "results.md", needs, runs_alone=True)
    made = parts / f"{text.name}-table2.md"
    options = ["--arms", "[medusa,block,ctc_paper,ctc]", "--seeds", f"[{first}]", "--steps", str(steps)]
    options += ["--out", str(trained / str(steps)), "--table", str(made)]
    needs = [part.name for part in compared[first]]
    yield Part(made.stem, "benchmarks.ctc.paper_table2", [*common, *options], made, needs)
    for group in ablations:  # one after another, as they may share arms
        needs, made = [made.stem], parts / f"{text.name}-{group}.md"
        options = ["--group", group, "--seeds", f"[{first}]", "--steps", str(steps)]
        options += ["--out", str(trained / str(steps)), "--table", str(made)]
        yield Part(made.stem, "benchmarks.learned_drafters", [*common, *options], made, needs)


def run(parts: Sequence[Part], folder: Path, processes: int) -> None:
    """Run the commands of the parts that are not done, and keep the time of each.

    A part starts as soon as those that it needs are done and a process is free. If one fails, those that need it are
    left out, and the others run. If a signal or an exception stops this, the commands that are running are stopped.

    Raises:
        ValueError: A command failed, a part needs another that is neither done nor among these, or a part that is done
            was made by another command.
    """
    waiting = unfinished(parts, folder)
    running: list[Running] = []
    failed: list[Running] = []
    with terminating() as is_terminated:
        try:
            while (waiting or running) and not is_terminated.is_set():
                for ended in [each for each in running if each.process.poll() is not None]:
                    running.remove(ended)
                    ended.write_record(folder)
                    if ended.process.returncode:
                        failed.append(ended)
                        waiting = without_dependents(waiting, ended.part.name)
                part = next_part(waiting, [each.part for each in running], processes)
                if part is None:
                    time.sleep(0.1)
                    continue
                waiting.remove(part)
                print(f"{part.name}: {part.command}", flush=True)
                running.append(Running(part, processes if part.runs_alone else 1, folder))
        finally:
            for each in running:
                each.process.terminate()
            for each in running:
                each.process.wait()
                each.write_record(folder)
    if is_terminated.is_set():
        sys.exit(EXIT_CODES[signal.SIGTERM])
    if failed:
        names = ", ".join(f"{each.part.name} (see {each.log})" for each in failed)
        raise ValueError(f"these parts failed: {names}; run the same command again once the cause is mended")


def unfinished(parts: Sequence[Part], folder: Path) -> list[Part]:
    """The parts that are not done.

    Raises:
        ValueError: One needs a part that is neither done nor among them, or was done by another command.
    """
    left = [part for part in parts if not is_done(part, folder)]
    names = {part.name for part in left}
    for part in left:
        for name in part.needs:
            if name not in names and not read_record(name, folder)["is_done"]:
                raise ValueError(f"{part.name} needs {name}, which is not done: add it to --only")
    return left


def without_dependents(parts: Sequence[Part], failed: str) -> list[Part]:
    """The parts that do not need a failed one, also not through others; each stands behind those that it needs."""
    blocked, left = {failed}, []
    for part in parts:
        if blocked.intersection(part.needs):
            blocked.add(part.name)
        else:
            left.append(part)
    return left


def next_part(waiting: Sequence[Part], running: Sequence[Part], processes: int) -> Part | None:
    """The first part that can start now; None if there is none. What runs alone waits until nothing else can run."""
    if len(running) >= processes or any(part.runs_alone for part in running):
        return None
    not_done = {part.name for part in [*waiting, *running]}
    ready = [part for part in waiting if not not_done.intersection(part.needs)]
    together = [part for part in ready if not part.runs_alone]
    return next(iter(together if together or running else ready), None)


@contextmanager
def terminating() -> Iterator[Event]:
    """An event that SIGTERM sets, instead of ending the process at once."""
    event = Event()
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, before)


class Running:
    """A part whose command is running.

    Args:
        part: The part.
        threads: Number of its torch threads.
        folder: Folder of the whole run.
    """

    def __init__(self, part: Part, threads: int, folder: Path) -> None:
        self.part, self.started = part, time.monotonic()
        self.log = folder / "parts" / f"{part.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        started = ["-c", RUN_DRAFTERS] if part.program == DRAFTERS else ["-m", part.program]
        variables = os.environ | {"OMP_NUM_THREADS": str(threads)}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *started, *part.arguments], env=variables, stdout=output, stderr=subprocess.STDOUT
            )

    def write_record(self, folder: Path) -> None:
        """Keep the time so far, added to that of earlier attempts, and whether the part is done."""
        record = {
            "command": self.part.command,
            "seconds": read_record(self.part.name, folder)["seconds"] + time.monotonic() - self.started,
            "is_done": self.process.returncode == 0,
        }
        write_text(record_path(self.part.name, folder), json.dumps(record) + "\n")


def record_path(name: str, folder: Path) -> Path:
    return folder / "parts" / f"{name}.json"


def read_record(name: str, folder: Path) -> dict[str, Any]:
    """What is known of a part: its last command, the seconds that it took so far, and whether it is done."""
    path = record_path(name, folder)
    return read_json(path) if path.exists() else {"command": "", "seconds": 0.0, "is_done": False}


def is_done(part: Part, folder: Path) -> bool:
    """Whether a part is done.

    Raises:
        ValueError: It was done by another command.
    """
    known = read_record(part.name, folder)
    if known["is_done"] and known["command"] != part.command:
        path = record_path(part.name, folder)
        raise ValueError(f"{part.name} was made by another command, see {path}: give another --out, or delete it")
    return known["is_done"]


def page(parts: Sequence[Part], folder: Path) -> str:
    """The tables that are done, each below its command and the minutes that it took, and what all parts took."""
    records = [(part, read_record(part.name, folder)) for part in parts]
    done = [(part, record) for part, record in records if record["is_done"] and record["command"] == part.command]
    hours = sum(record["seconds"] for _, record in records) / 3600
    sections = [f"{len(done)} of {len(parts)} parts are done. The time of all parts adds up to {hours:.1f} hours."]
    for part, record in done:
        if part.program == "benchmarks.learned_drafters" and part.made is None:
            continue  # a single training, whose time is in the tables
        table = part.made.read_text(encoding="utf-8") if part.made else ""
        took = f"Took {record['seconds'] / 60:.1f} minutes."
        sections.append("\n\n".join([f"# {part.name}", f"```sh\n{part.command}\n```", took, table]).strip())
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    main(every_table)
