"""Make the tables about the CTC drafter again from nothing, by running the commands that make them one by one."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import main
from benchmarks.learned_drafters import ARMS, GROUPS
from data.files.atomic_write import write_text
from data.files.bounded_json import read_json

DRAFTERS = "drafters"
RUN_DRAFTERS = "import sys; from train.cli.commands import main; sys.exit(main())"
TINY = "checkpoints/tiny-chat"
# Groups of arms that are trained with all seeds, and those that are trained with the first one only.
SEVERAL_SEEDS = ("drafters", "muon", "bias", "layers")
ONE_SEED = ("losses", "options", "anchors")
LIVE = ("medusa", "hydra", "eagle", "block_markov_base", "ctc_fused_base", "block_muon", "ctc_muon", "ctc_deep_muon")
SPLIT = ("ctc_10_8_muon", "block_10_muon")  # whose alignments are looked at
CURVES = ("medusa", "hydra", "eagle_8", "block_10_base", "block_10_muon", "ctc_10_8_base", "ctc_10_8_muon")


@dataclass(frozen=True)
class Part:
    """One command, and what it leaves behind.

    Args:
        name: Name of its files in the folder ``parts``.
        program: A module of the benchmarks, or ``drafters``.
        arguments: Its arguments.
        made: The Markdown file with its table; None if it prepares data for the others.
    """

    name: str
    program: str
    arguments: Sequence[str]
    made: Path | None = None

    @property
    def command(self) -> str:
        """The command as a user would type it, without the number of threads."""
        return shlex.join([*([] if self.program == DRAFTERS else ["python", "-m"]), self.program, *self.arguments])

    def run(self, threads: int) -> int:
        """Run it in a process of its own, and return its exit code."""
        started = ["-c", RUN_DRAFTERS] if self.program == DRAFTERS else ["-m", self.program]
        variables = os.environ | {"OMP_NUM_THREADS": str(threads)}
        return subprocess.run([sys.executable, *started, *self.arguments], env=variables, check=False).returncode


@dataclass(frozen=True)
class Text:
    """A base, the text that its drafters are trained on, and the questions that are decoded.

    Args:
        name: Name in the names of parts.
        base: Folder of the base.
        files: Training text.
        questions: Options that choose the questions of a benchmark of ours.
        evaluated: The same for `drafters eval`.
    """

    name: str
    base: str
    files: str
    questions: Sequence[str]
    evaluated: Sequence[str]


def every_table(
    out: str,
    gsm_base: str | None = None,
    gsm8k: str | None = None,
    seeds: list[int] = [0, 1, 2],  # noqa: B006
    steps: int = 600,
    long_steps: list[int] = [150, 600, 2400],  # noqa: B006
    live: int = 60,
    limit: int | None = None,
    conversations: int = 6000,
    groups: list[str] | None = None,
    only: list[str] | None = None,
    threads: int = 1,
) -> None:
    """Run the commands behind docs/results/ctc.md, and write one page of their tables with the time that each took.

    A part that is done is not run again: repeat the command to continue an interrupted run. The tables of tiny-chat
    need nothing that is not in the repository; those of gsm-chat-7m need that base and the questions of GSM8K. Left out
    are labels from human answers, other numbers of candidates, smaller vocabularies of a trained drafter, and live rows
    with the paper's tree or 64 nodes.

    Args:
        out: Folder for the text, the drafters, the tables and the page, tables.md.
        gsm_base: Folder of the base gsm-chat-7m; without it its tables are left out.
        gsm8k: Folder with GSM8K's train.jsonl and test.jsonl.
        seeds: Seeds of the main arms. Other arms have the first one only.
        steps: Training steps of all arms but those of the learning curves.
        long_steps: Numbers of training steps of the learning curves.
        live: Number of GSM8K questions that are decoded live; the embedded ones are 40, of two turns each.
        limit: Maximum number of questions of everything else, and of the embedded ones.
        conversations: Number of embedded conversations, and maximum number of GSM8K's questions that are answered for
            training, of which ctc.md has 4,096.
        groups: Groups of arms to train; by default drafters, muon, bias, layers, losses, options and
            anchors.
        only: Names of single parts to run; by default all.
        threads: Number of torch threads.
    """
    if (gsm_base is None) != (gsm8k is None):
        raise ValueError("give both --gsm_base and --gsm8k, or neither")
    chosen = groups or [*SEVERAL_SEEDS, *ONE_SEED]
    if unknown := [name for name in chosen if name not in GROUPS]:
        raise ValueError(f"unknown groups {', '.join(unknown)}: known are {', '.join(GROUPS)}")
    folder = Path(out)
    parts = list(without_base(folder))
    parts += tables_of_a_base(tiny_text(conversations, limit), folder, chosen, seeds, steps, long_steps)
    if gsm_base and gsm8k:
        text = gsm_text(gsm_base, gsm8k, folder, limit, live)
        parts.append(answers_of_the_base(text, f"{gsm8k}/train.jsonl", conversations))
        parts += tables_of_a_base(text, folder, chosen, seeds, steps, long_steps)
    if unknown := sorted(set(only or ()) - {part.name for part in parts}):
        raise ValueError(f"unknown parts {', '.join(unknown)}: known are {', '.join(part.name for part in parts)}")
    for part in parts:
        if only is None or part.name in only:
            run(part, folder, threads)
            write_text(folder / "tables.md", page(parts, folder, threads))
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
    )


def gsm_text(base: str, gsm8k: str, folder: Path, limit: int | None, live: int) -> Text:
    """The base gsm-chat-7m, with its own answers to GSM8K's questions for training."""
    asked = ["--questions", f"{gsm8k}/test.jsonl", "--offset", "1200"]
    return Text(
        "gsm",
        base,
        f"[{folder / 'gsm8k.jsonl'}]",
        [*asked, *(["--limit", str(limit)] if limit else [])],
        ["--benchmark", "gsm8k", *asked, "--limit", str(live), "--max-new-tokens", "200"],
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
        yield Part(name, f"benchmarks.ctc.{name}", ["--out", str(made)], made)


def tables_of_a_base(
    text: Text,
    folder: Path,
    groups: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    long_steps: Sequence[int],
) -> Iterator[Part]:
    """All parts of one base, in the order in which they need each other."""
    parts, store, trained = folder / "parts", folder / f"{text.name}-store", folder / text.name
    trained_on = ["--base", text.base, "--files", text.files]
    common = [*trained_on, "--features", str(store), *text.questions]
    options = ["--out", str(store), "--max-length", "384", "--layers=-1,2,4"]
    yield Part(f"{text.name}-features", DRAFTERS, ["features", *trained_on, *options])
    for group in groups:
        used = list(seeds if group in SEVERAL_SEEDS else seeds[:1])
        made = parts / f"{text.name}-{group}.md"
        options = ["--group", group, "--seeds", str(used), "--steps", str(steps), "--out", str(trained / str(steps))]
        figures = ["--figures", str(folder / "plots" / f"{text.name}-{group}")]
        yield Part(made.stem, "benchmarks.learned_drafters", [*common, *options, *figures, "--table", str(made)], made)
    made = parts / f"{text.name}-table2.md"
    options = ["--arms", "[medusa,block,ctc_paper,ctc]", "--seeds", str(list(seeds[:1])), "--steps", str(steps)]
    options += ["--out", str(trained / str(steps)), "--table", str(made)]
    yield Part(made.stem, "benchmarks.ctc.paper_table2", [*common, *options], made)
    made = parts / f"{text.name}-curves.md"
    arms = ["--arms", f"[{','.join(CURVES)}]", "--steps", str(list(long_steps)), "--seeds", str(list(seeds[:1]))]
    plot = ["--figure", str(folder / "plots" / f"{text.name}-curves.png")]
    yield Part(
        made.stem,
        "benchmarks.ctc.learning_curves",
        [*common, *arms, "--out", str(trained), *plot, "--table", str(made)],
        made,
    )
    made = parts / f"{text.name}-alignments.md"
    longest = trained / str(max(long_steps))
    split = ["--drafter", f"[{','.join(str(longest / name / f'seed{seeds[0]}' / 'drafter') for name in SPLIT)}]"]
    asked = ["--base", text.base, *text.questions, "--out", str(folder / f"{text.name}-alignments")]
    yield Part(made.stem, "benchmarks.ctc.alignments", [*asked, *split, "--table", str(made)], made)
    drafters = [
        f"{ARMS[name].drafter.lower()}={trained / str(steps) / name / f'seed{seed}' / 'drafter'}:num_nodes=16"
        for name in LIVE
        for seed in seeds
        if any(name in GROUPS[group] for group in groups)
    ]
    live = folder / f"{text.name}-live"
    asked = [argument for drafter in [*drafters, "anpd", "joint"] for argument in ("--drafter", drafter)]
    arguments = ["eval", "--base", text.base, *text.evaluated, "--repeats", "1", "--out", str(live)]
    yield Part(live.name, DRAFTERS, [*arguments, *asked], live / "results.md")


def run(part: Part, folder: Path, threads: int) -> None:
    """Run the command of a part, unless it is done, and keep its time.

    Raises:
        ValueError: The command failed.
    """
    record = folder / "parts" / f"{part.name}.json"
    known = read_json(record) if record.exists() else {}
    if known.get("is_done"):
        if known["command"] != part.command:
            raise ValueError(f"{part.name} was made by another command, see {record}: give another --out, or delete it")
        return
    print(f"{part.name}: {part.command}", flush=True)
    seconds, started = known.get("seconds", 0.0), time.monotonic()
    try:
        code = part.run(threads)
    finally:  # also when it is interrupted, as the next run continues
        known = {"command": part.command, "seconds": seconds + time.monotonic() - started, "is_done": False}
        write_text(record, json.dumps(known) + "\n")
    if code:
        raise ValueError(f"{part.name} failed with exit code {code}: see above, then run the same command again")
    write_text(record, json.dumps(known | {"is_done": True}) + "\n")


def page(parts: Sequence[Part], folder: Path, threads: int) -> str:
    """The tables that are done, each below its command and the minutes that it took."""
    sections, total = [], 0.0
    for part in parts:
        record = folder / "parts" / f"{part.name}.json"
        if not record.exists() or not (known := read_json(record))["is_done"]:
            continue
        total += known["seconds"]
        table = part.made.read_text(encoding="utf-8") if part.made else ""
        took = f"Took {known['seconds'] / 60:.1f} minutes."
        sections.append("\n\n".join([f"# {part.name}", f"```sh\n{known['command']}\n```", took, table]).strip())
    return "\n\n".join([f"All parts took {total / 3600:.1f} hours, with OMP_NUM_THREADS={threads}.", *sections]) + "\n"


if __name__ == "__main__":
    main(every_table)
