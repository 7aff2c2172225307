"""Make the tables about the CTC drafter again from nothing, by running the commands that make them one by one."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import main
from benchmarks.learned_drafters import ARMS, GROUPS
from data.files import output_lock, read_json, write_text
from train.resume import EXIT_CODES

RUN_DRAFTERS = "import sys; from train.cli import run_drafters as main; sys.exit(main())"
PROGRAMS = {"drafters": ["-c", RUN_DRAFTERS], "python": []}
CURVES = {
    "tiny": ["medusa", "hydra", "block_10_muon", "ctc_10_8_muon", "ctc_10_selfless_muon", "eagle_8"],
    "gsm": ["medusa", "block_muon", "ctc_muon", "ctc_deep_muon", "eagle"],
}
NOT_LIVE = ("medusa", "hydra")


class Part(NamedTuple):
    """A command as a user types it, and the Markdown file with its table, if it makes one."""

    name: str
    command: str
    made: Path | None = None


class Text(NamedTuple):
    """A base, its training text, options for the questions of learned_drafters and `drafters eval`, and arms."""

    name: str
    base: str
    files: str
    asked: dict[str, Any]
    evaluated: dict[str, Any]
    compared: Sequence[str]  # with all seeds
    curves: Sequence[str]  # with all lengths of training; those not in NOT_LIVE are also decoded with


def every_table(
    out: str,
    gsm_base: str | None = None,
    gsm8k: str | None = None,
    seeds: list[int] = [0, 1, 2],  # noqa: B006
    steps: int = 600,
    curve_steps: list[int] = [150, 600, 2400],  # noqa: B006
    limit: int | None = None,
    conversations: int = 6000,
) -> None:
    """Run the commands behind docs/results/ctc.md, and write one page of their tables with the time that each took.

    A part that is done is not run again: repeat the command to continue an interrupted run. The tables of tiny-chat
    need nothing that is not in the repository; those of gsm-chat-7m need that base and the questions of GSM8K. The
    environment variable OMP_NUM_THREADS sets the number of threads.

    Args:
        out: Folder for the text, the drafters, the tables and the page, tables.md.
        gsm_base: Folder of the base gsm-chat-7m; without it its tables are left out.
        gsm8k: Folder with GSM8K's train.jsonl and test.jsonl.
        seeds: Seeds of the arms that are compared. Learning curves and Table 2 have the first one only.
        steps: Training steps of all arms but those of the learning curves.
        curve_steps: Numbers of training steps of the learning curves.
        limit: Maximum number of questions; of GSM8K, 60 at most are decoded live.
        conversations: Number of embedded conversations that tiny-chat's drafters are trained on.
    """
    if (gsm_base is None) != (gsm8k is None):
        raise ValueError("give both --gsm_base and --gsm8k, or neither")
    if not seeds or not curve_steps:
        raise ValueError("--seeds and --curve_steps must not be empty")
    folder, few = Path(out), {"limit": limit} if limit else {}
    live = {"benchmark": "embedded", **few}
    tiny = Text(
        "tiny",
        "checkpoints/tiny-chat",
        f"[embedded:{conversations}]",
        {"questions": "", **live},
        live,
        GROUPS["best_long"],
        CURVES["tiny"],
    )
    parts: list[Part] = []
    if gsm_base and gsm8k:
        texts, test, capped = folder / "gsm8k.jsonl", f"{gsm8k}/test.jsonl", {"max-new-tokens": 200}
        gsm = Text(
            "gsm",
            gsm_base,
            f"[{texts}]",
            {"questions": test, "offset": 1200, **few},
            {"benchmark": f"gsm8k={test}", "rows": "1200:", "limit": min(60, limit or 60), **capped},
            GROUPS["best"],
            CURVES["gsm"],
        )
        own = {"base": gsm_base, "files": f"[{gsm8k}/train.jsonl]", "out": texts, "limit": 4096, **capped}
        parts = [Part("gsm-answers", command("drafters regenerate", own))]
        parts += parts_of_a_base(gsm, folder, seeds, steps, curve_steps)
    parts += parts_of_a_base(tiny, folder, seeds, steps, curve_steps)
    with output_lock(folder):
        run(parts, folder)
    print(f"wrote {folder / 'tables.md'}")


def command(program: str, options: dict[str, Any]) -> str:
    """The command line of a program; a list of values repeats its option."""
    pairs = [(key, each) for key, value in options.items() for each in (value if isinstance(value, list) else [value])]
    return f"{program} {shlex.join(f'--{key}={value}' for key, value in pairs)}"


def parts_of_a_base(text: Text, folder: Path, seeds: list[int], steps: int, curve_steps: list[int]) -> Iterator[Part]:
    """All parts of one base, each behind those that it needs."""
    store, trained = folder / f"{text.name}-store", folder / text.name
    trained_on = {"base": text.base, "files": text.files}
    features = {"out": store, "max-length": 384, "layers": "-1,2,4"}
    yield Part(f"{text.name}-features", command("drafters features", trained_on | features))

    def table(name: str, seeds: list[int], steps: list[int], options: dict[str, Any]) -> Part:
        made = folder / "parts" / f"{text.name}-{name}.md"
        given = {**trained_on, "features": store, **text.asked, "seeds": str(seeds), "steps": str(steps)}
        return Part(
            made.stem,
            command("python -m benchmarks.learned_drafters", {**given, "out": trained, "table": made, **options}),
            made,
        )

    yield table("compared", seeds, [steps], {"arms": f"[{','.join(text.compared)}]"})
    figure = folder / "plots" / f"{text.name}-curves.png"
    yield table("curves", seeds[:1], curve_steps, {"arms": f"[{','.join(text.curves)}]", "figure": figure})
    yield table("table2", seeds[:1], [steps], {"arms": "[medusa,block,ctc_paper,ctc]", "table2": "true"})
    drafters = [
        f"{ARMS[name].drafter.lower()}={trained / str(steps) / name / f'seed{seed}' / 'drafter'}:num_nodes=16"
        for name in text.curves
        for seed in seeds
        if name not in NOT_LIVE
    ]
    live = folder / f"{text.name}-live"
    evaluated = {"base": text.base, **text.evaluated, "repeats": 1, "out": live, "drafter": [*drafters, "anpd"]}
    yield Part(live.name, command("drafters eval", evaluated), live / "results.md")


def run(parts: Sequence[Part], folder: Path) -> None:
    """Run the commands of the parts that are not done, and write the page of their tables.

    Raises:
        ValueError: A command failed, or a part that is done was made by another command.
        SystemExit: SIGTERM stopped this, and with it the command that was running.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_CODES[signal.SIGTERM]))
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    path = folder / "parts.json"  # for each part its last command, the seconds so far, and whether it is done
    records: dict[str, Any] = read_json(path) if path.exists() else {}
    try:
        for part in parts:
            log = folder / "parts" / f"{part.name}.log"
            record = records.setdefault(part.name, {"command": part.command, "seconds": 0.0, "is_done": False})
            if not record["is_done"]:
                record["command"] = part.command
                try:
                    run_part(part, log, record)
                finally:
                    write_text(path, json.dumps(records, indent=1) + "\n")
            if record["command"] != part.command:
                raise ValueError(f"{part.name} was made by another command, see {path}: give another --out")
            if not record["is_done"]:
                raise ValueError(f"{part.name} failed, see {log}: run the same command again once the cause is mended")
    finally:
        signal.signal(signal.SIGTERM, before)
        write_text(folder / "tables.md", page(parts, records))


def run_part(part: Part, log: Path, record: dict[str, Any]) -> None:
    """Run one command, and note its time and whether it succeeded."""
    print(f"{part.name}: {part.command}", flush=True)
    program, *arguments = shlex.split(part.command)
    started = time.monotonic()
    with log.open("ab") as output:
        words = [sys.executable, *PROGRAMS[program], *arguments]
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
    try:
        process.wait()
    finally:
        process.terminate()  # does nothing if it has ended
        record["is_done"] = process.wait() == 0
        record["seconds"] += time.monotonic() - started


def page(parts: Sequence[Part], records: dict[str, Any]) -> str:
    """The tables that are done, each below its command and the minutes that it took, and what all parts took."""
    done = [part for part in parts if records.get(part.name, {}).get("is_done")]
    hours = sum(record["seconds"] for record in records.values()) / 3600
    sections = [f"{len(done)} of {len(parts)} parts are done. The time of all parts adds up to {hours:.1f} hours."]
    for part in done:
        table = part.made.read_text(encoding="utf-8") if part.made else ""
        took = f"Took {records[part.name]['seconds'] / 60:.1f} minutes."
        sections.append("\n\n".join([f"# {part.name}", f"```sh\n{part.command}\n```", took, table]).strip())
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    main(every_table)
