"""What was never measured on a GPU, on one page: each part is a command of its own, with a time limit of its own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from benchmarks.harness import main, markdown, origin
from data.files import write_text
from inference.verifier.base import resolve_device

SIZES = {  # on a GPU, and tiny
    "text": ("--files '[embedded:2000]' --steps '[150]'", "--files '[embedded:16]' --steps '[1]'"),
    "asked": ("--limit 4 --max_new_tokens 48", "--limit 1 --max_new_tokens 4"),
    "wide": ("--shape 7b --limit 2", "--shape 100m --dtype float32 --limit 1 --max_new_tokens 4 --vocab_size 2000"),
    "bases": ("--bases '[7b]' --dtypes '[bfloat16]'", "--bases '[draft]' --dtypes '[float32]' --repeats 2"),
    "shape": ("--shape 3b --dtype bfloat16 --precision bf16 --length 512 --anchors '[0]'", "--shape draft"),
}
LEARN = "python -m benchmarks.learned_drafters --base checkpoints/tiny-chat --questions '' --benchmark embedded {asked}"
LEARN += " {text} --seeds '[0]' --arms '[medusa,hydra,eagle3,block,ctc]' --out {out}/drafters"
VERIFY, SPEED = "drafters verify {asked} {drafters}", "python -m benchmarks.training_speed {shape} --configs"
FIT = "rm -rf {out}/fit; lightning fit --config ctc.yaml --config debug.yaml --trainer.default_root_dir {out}/fit"
FIT += " --trainer.accelerator auto --trainer.precision bf16-mixed --trainer.enable_progress_bar false"
PARTS = {  # the seconds that a part may take, and its command
    "drafters": (120, LEARN),
    "lossless": (60, VERIFY),
    "bit-identical": (60, f"{VERIFY} --dtype bfloat16 --bitwise true"),
    "at scale": (100, "python -m benchmarks.at_scale {wide} {drafters}"),
    "steps": (60, "python -m benchmarks.steps {bases} --nodes '[0,1,4,16,64]'"),
    "compiled": (150, "python -m benchmarks.steps {bases} --nodes '[0,16]' --compiled true"),
    "FlexAttention": (120, f"{SPEED} '[ctc.yaml,block.yaml]'"),
    "training": (60, f"{SPEED} '[medusa.yaml,eagle.yaml,eagle3.yaml]'"),
    "fit": (60, FIT),
    "FSDP2": (60, f"{FIT} --config strategy/fsdp.yaml"),
    "DeepSpeed 2": (60, f"{FIT} --config strategy/deepspeed_2.yaml"),
    "DeepSpeed 3": (60, f"{FIT} --config strategy/deepspeed_3.yaml"),
    "compiled, lossless": (120, "drafters verify {asked} --forward compiled --drafter joint --drafter anpd"),
}
SECONDS, DONE = 600, "done"  # of all parts together, and how a section begins that is not measured again


def gpu(out: str = "runs/gpu", tiny: bool = False) -> None:
    """Measure on a GPU of 24 GB or more what no CPU shows, and write one page, page.md, within ten minutes.

    A part that fails or reaches its time limit costs only itself. Repeat the command to run what is not done.

    Args:
        out: Folder for the page, the output of each part and the drafters.
        tiny: Run the same parts at a tiny shape, also without a GPU.
    """
    if not tiny and resolve_device("auto").type == "cpu":
        raise ValueError("PyTorch sees no GPU here: give --tiny true to try the same parts at a tiny shape")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the part that runs ends with this program
    run(PARTS, {name: sizes[tiny] for name, sizes in SIZES.items()}, Path(out) / ("tiny" if tiny else "full"), SECONDS)


def drafter_options(folder: Path) -> str:
    """The options for all drafters; the learned ones are those whose training has ended."""
    learned = {path.parts[-3]: path for path in sorted(folder.glob("drafters/*/*/seed0/drafter"))}
    learned |= {"merged": learned["ctc"]} if "ctc" in learned else {}
    specs = ["joint", "anpd", *(f"{name}={path}" for name, path in learned.items())]
    return shlex.join(word for spec in specs for word in ("--drafter", spec))


def run(parts: Mapping[str, tuple[float, str]], sizes: Mapping[str, str], folder: Path, seconds: float) -> None:
    """Run the parts that are not done, and write the page after each; together they have a number of seconds."""
    deadline, about = time.monotonic() + seconds, origin(resolve_device("auto"))
    page = f"# Measured on {about['machine'].partition(';')[0]}\n\n{markdown([], about)}"
    for name, (limit, template) in parts.items():
        command = template.format(**sizes, out=shlex.quote(str(folder)), drafters=drafter_options(folder))
        section, heading = folder / f"{name}.md", f"\n## {name}\n\n```sh\n{command}\n```\n\n"
        if not section.exists() or not section.read_text(encoding="utf-8").startswith(heading + DONE):
            print(f"{name}: {command}", flush=True)
            limit = max(0, min(limit, deadline - time.monotonic()))
            write_text(section, heading + measure(command, limit, folder / name))
        page += section.read_text(encoding="utf-8")
        write_text(folder / "page.md", page)
    print(f"wrote {folder / 'page.md'}")


def measure(command: str, limit: float, log: Path) -> str:
    """Run a command, end it with all its processes at the limit, and return how it ended and its output as Markdown."""
    log.parent.mkdir(parents=True, exist_ok=True)
    started, logs = time.monotonic(), [Path(f"{log}.{kind}") for kind in ("out", "err")]
    with logs[0].open("wb") as out, logs[1].open("wb") as err:
        process = subprocess.Popen(command, shell=True, stdout=out, stderr=err, start_new_session=True)
        try:
            result = "failed" if process.wait(limit) else DONE
        except subprocess.TimeoutExpired:
            result = "stopped"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    result += f" after {time.monotonic() - started:.0f} s of at most {limit:.0f}"
    output, error = (path.read_text(encoding="utf-8", errors="replace").replace("`", "'").strip() for path in logs)
    result += f": `{error.splitlines()[-1]}`" if error and not result.startswith(DONE) else ""
    _, is_markdown, tables = f"\n{output}".partition("\n## ")
    return f"{result}\n" + (f"\n### {tables}\n" if is_markdown else f"\n```text\n{output}\n```\n" if output else "")


if __name__ == "__main__":
    main(gpu)
