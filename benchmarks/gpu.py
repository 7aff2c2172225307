"""What only a GPU shows, on one page in ten minutes: every part has a time limit, and one that fails costs no other."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.gpu_parts import FULL, PARTS, TINY, Machine, Part
from benchmarks.harness import main, markdown, origin
from data.files import read_json, write_text
from inference.verifier.base import prepare_process, resolve_device

SECONDS, GRACE = 600, 30  # of all parts together; of a part that does not end at its limit, before the process does
DONE, NOT_RUN = "done", "not run\n"  # how a section begins that is not measured again; a part without a section
STARTED = "GPU_PAGE_STARTED"  # environment variable: when this run began, for the process that goes on with it


def gpu(out: str = "runs/gpu", tiny: bool = False) -> None:
    """Measure on a GPU of 24 GB or more what no CPU shows, and write one page, page.md, within ten minutes.

    A part that fails or reaches its time limit costs only itself. Repeat the command to run what is not done.

    Args:
        out: Folder for the page and the section of each part.
        tiny: Run the same parts at a tiny shape, also without a GPU.
    """
    if not tiny and resolve_device("auto").type == "cpu":
        raise ValueError("PyTorch sees no GPU here: give --tiny true to try the same parts at a tiny shape")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a command that a part runs ends with this program
    machine = Machine(resolve_device("auto"), TINY if tiny else FULL, Path(out) / ("tiny" if tiny else "full"))
    prepare_process(machine.device, sums_alike=True)
    run(PARTS, machine, SECONDS)


def run(parts: Mapping[str, tuple[float, Part]], machine: Machine, seconds: float) -> None:
    """Run the parts that are not done, those that failed before last; the page is written after each table.

    An error can leave a GPU useless to this process. Another one then goes on with the parts that have not been run.
    """
    started = float(os.environ.setdefault(STARTED, str(time.time())))
    about = origin(machine.device)
    head = f"# Measured on {about['machine'].partition(';')[0]}\n\n{markdown([], about)}"
    sections = {name: machine.folder / f"{name}.md" for name in parts}
    conditions = {"machine": about["machine"].partition(";")[0], "versions": about["versions"]}
    if (made := machine.folder / "conditions.json").exists() and read_json(made) != conditions:
        for path in (*sections.values(), machine.folder / "card.json"):  # of another card, or other versions
            path.unlink(missing_ok=True)
    write_text(made, json.dumps(conditions))
    for name in sorted(parts, key=lambda name: sections[name].exists()):
        section, (limit, part) = sections[name], parts[name]
        if section.exists() and (is_done(section) or section.stat().st_mtime >= started):
            continue
        if (limit := min(limit, started + seconds - time.time())) <= 0:
            break
        print(f"{name}: at most {limit:.0f} s", flush=True)
        for text in measure(part, machine, limit):
            write_text(section, text)
            write_page(machine.folder, head, sections)
        if not is_done(section) and not works(machine.device):
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    write_page(machine.folder, head, sections)
    del os.environ[STARTED]
    print(f"wrote {machine.folder / 'page.md'}")


def is_done(section: Path) -> bool:
    """Whether a part has ended without an error."""
    return section.read_text(encoding="utf-8").startswith(DONE)


def write_page(folder: Path, head: str, sections: Mapping[str, Path]) -> None:
    """Write the sections of all parts, in their order, on one page."""
    page = head
    for name, section in sections.items():
        page += f"\n## {name}\n\n{section.read_text(encoding='utf-8') if section.exists() else NOT_RUN}"
    write_text(folder / "page.md", page)


def measure(part: Part, machine: Machine, limit: float) -> Iterator[str]:
    """Run a part, and yield its section as it stands before it, after each of its tables, and in the end."""
    started, tables, error = time.monotonic(), "", ""
    yield "did not end\n"
    try:
        with time_limit(limit):
            for table in part(machine):
                text = table if isinstance(table, str) else f"#{table.markdown()}"  # below the part's heading
                tables += f"\n{text.strip()}\n"
                yield f"did not end\n{tables}"
    except Exception as caught:
        last_lines = [] if isinstance(caught, ChildProcessError) else traceback.format_exc().splitlines()[-20:]
        error = f": `{type(caught).__name__}: {' '.join(str(caught).split())[:300]}`".replace("``", "`")
        tables += "\n```text\n" + "\n".join(last_lines) + "\n```\n" if last_lines else ""
    if error:
        machine.release()  # what the part had begun may be half done
    result = "failed" if error else DONE
    yield f"{result} after {time.monotonic() - started:.0f} s of at most {limit:.0f}{error}\n{tables}"


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what runs longer; if that does not end it, end the process."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not ready after {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        faulthandler.cancel_dump_traceback_later()


def works(device: torch.device) -> bool:
    """Whether the device still computes: after an illegal access to its memory it refuses everything."""
    try:
        return torch.ones(1, device=device).add(1).item() == 2
    except RuntimeError:
        return False


if __name__ == "__main__":
    main(gpu)
