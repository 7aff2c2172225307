"""The page of `make gpu`: what its parts show, what one that fails leaves, and what a repeated run measures again."""

import fcntl
import os
import re
import shlex
import sys
import time
from functools import partial

import pytest
import torch

from benchmarks import gpu, gpu_parts, harness
from benchmarks.harness import ResultTable
from train.cli import parse

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_run_before(monkeypatch):
    monkeypatch.delenv(gpu.STARTED, raising=False)


@pytest.fixture
def machine(tmp_path):
    return gpu_parts.Machine(CPU, gpu_parts.TINY, tmp_path)


def works(machine):
    yield ResultTable("Title", ["arm"], [["a"]], ["a note"])


def fails(machine):
    yield "the first table"
    raise ValueError("its cause")


def hangs(machine):
    yield from works(machine)
    time.sleep(60)


def test_a_part_that_fails_or_hangs_costs_only_itself_and_what_it_had_measured_stays(machine):
    parts = {"fails": (20, fails), "hangs": (0.2, hangs), "works": (20, works)}
    gpu.run(parts, machine, 60)
    page = (machine.folder / "page.md").read_text()
    for name in ("machine", "date", "versions"):
        assert f"- {name}: `" in page
    failed = page[page.index("## fails") : page.index("## hangs")]
    assert re.search(r"failed after \d+ s of at most 20: `ValueError: its cause`\n\nthe first table\n", failed)
    assert "test_gpu.py" in failed  # where it was raised
    table = "### Title\n\n| arm |\n| --- |\n| a |\n\n- a note\n"
    assert re.search(rf"`TimeoutError: not ready after 0 s`\n\n{re.escape(table)}", page)
    assert re.search(rf"## works\n\ndone after \d+ s of at most 20\n\n{re.escape(table)}$", page)


def test_the_page_is_there_while_the_parts_run(machine):
    seen = []

    def looks(machine):
        yield "a table"
        seen.append((machine.folder / "page.md").read_text())
        yield "another one"

    gpu.run({"first": (20, works), "looks": (20, looks), "last": (20, works)}, machine, 60)
    assert re.search(
        r"## first\n\ndone [^#]*### Title[^#]*## looks\n\ndid not end\n\na table\n\n## last\n\nnot run\n$", seen[0]
    )


def test_a_repeated_run_measures_what_is_not_done_and_what_failed_last(machine):
    order, is_broken = [], [True]

    def part(name, machine):
        order.append(name)
        yield name
        if name == "b" and is_broken[0]:
            raise KeyboardInterrupt if len(order) < 3 else ValueError

    parts = {name: (20, partial(part, name)) for name in "abcd"}
    with pytest.raises(KeyboardInterrupt):
        gpu.run(parts, machine, 60)
    assert order == ["a", "b"] and "## b\n\ndid not end" in (machine.folder / "page.md").read_text()
    os.environ.pop(gpu.STARTED)  # another process
    gpu.run(parts, machine, 60)
    is_broken[0] = False
    gpu.run(parts, machine, 60)
    gpu.run(parts, machine, 60)
    assert order == [*"ab", *"cdb", *"b"]
    assert (machine.folder / "page.md").read_text().count("\ndone after") == 4


def test_sections_of_another_card_are_measured_again(machine):
    measured = []

    def part(machine):
        measured.append(machine.folder)
        yield "a table"

    for _ in range(2):
        gpu.run({"part": (20, part)}, machine, 60)
    assert len(measured) == 1
    (machine.folder / "conditions.json").write_text('{"machine": "another card"}')
    gpu.run({"part": (20, part)}, machine, 60)
    assert len(measured) == 2


def test_what_there_is_no_time_for_is_not_run(machine):
    gpu.run({"works": (20, works)}, machine, 0)
    assert (machine.folder / "page.md").read_text().endswith("## works\n\nnot run\n")


def test_another_process_goes_on_where_an_error_has_left_the_device_useless(machine, monkeypatch):
    started, order = [], []

    def breaks(machine):
        order.append("breaks")
        yield from fails(machine)

    parts = {"breaks": (20, breaks), "works": (20, works)}

    def other_process(program, arguments):
        started.append(arguments)
        monkeypatch.setattr(gpu, "works", lambda device: True)
        gpu.run(parts, machine, 60)  # which has the environment of the first
        raise SystemExit

    monkeypatch.setattr(gpu, "works", lambda device: False)
    monkeypatch.setattr(os, "execv", other_process)
    with pytest.raises(SystemExit):
        gpu.run(parts, machine, 60)
    assert started == [[sys.executable, *sys.orig_argv[1:]]]
    page = (machine.folder / "page.md").read_text()
    assert page.count("failed after") == page.count("done after") == 1 and order == ["breaks"]


def test_a_command_shows_what_it_prints_and_ends_with_all_that_it_started(machine):
    lock = machine.folder / "lock"
    fails = f'{shlex.quote(sys.executable)} -c \'print("{{asked}}"); raise ValueError("its cause")\''
    hangs = "(flock 9; echo waiting; sleep 60) 9> {out}/lock & wait"
    parts = {"fails": (20, partial(gpu_parts.run_command, fails)), "hangs": (1, partial(gpu_parts.run_command, hangs))}
    gpu.run(parts, machine, 60)
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    page = (machine.folder / "page.md").read_text()
    assert f"```text\n{machine.sizes.asked}\n```" in page and "`ChildProcessError: ValueError: its cause`" in page
    assert "```text\nwaiting\n```" in page and "`TimeoutError: not ready after 1 s`" in page


def test_the_commands_of_the_page_exist(machine):
    commands = [part.args[0] for _, part in gpu_parts.PARTS.values() if isinstance(part, partial)]
    assert len(commands) > 5
    for command in commands:
        program, name, *words = shlex.split(command.format(asked=machine.sizes.asked, out="OUT").rpartition("; ")[2])
        assert program in ("drafters", "lightning")
        if program == "drafters":
            parse(name, words)


@pytest.mark.slow
def test_what_is_measured_in_small(machine):
    """At a shape with grouped heads; without a GPU the steps of graphs are called, not captured."""
    parts = {name: part for name, part in gpu_parts.PARTS.items() if not isinstance(part[1], partial)}
    assert list(parts) == ["card", "steps", "drafts", "sessions", "training"]
    gpu.run(parts, machine, 300)
    page = (machine.folder / "page.md").read_text()
    assert page.count("\ndone after") == len(parts), page
    tables = {
        title.strip(): [
            [cell.strip() for cell in line[1:-1].split("|")] for line in rest.splitlines() if line[:1] == "|"
        ]
        for title, _, rest in (section.partition("\n") for section in page.split("\n### ")[1:])
    }
    times = [title for title in tables if title.startswith(("Steps", "Drafts", "Sessions", "Time"))]
    assert len(times) == 3 + 2 + 2 + 1
    for title in times:
        headings, _, *rows = tables[title]
        ratios = [place for place, heading in enumerate(headings) if heading.endswith("/ bytes")]
        assert ratios and "GB" in headings
        assert all(float(row[place].rstrip("×")) > 0 for row in rows for place in ratios)
    for title in ("Sessions, graphed", "Sessions, eager"):
        headings, _, *rows = tables[title]
        for row in (dict(zip(headings, row, strict=True)) for row in rows):
            assert row["identical"] == "1/1" and row["acceptance"] == row["small base's"]
        assert float(row["acceptance"]) > 1.5, "the drafter that ships drafts well"
    memory = {row[0]: float(row[1]) for row in tables["Memory of a step of llama3_8b.yaml on 2 texts of 48 tokens"][2:]}
    assert memory["estimated"] == pytest.approx(memory["measured"], rel=0.3)


@pytest.mark.slow
def test_where_graphs_fail_the_eager_times_stay(machine, monkeypatch):
    def refuses(self, kind, make=gpu_parts.Machine.runner):
        if kind == "graphed":
            raise ValueError("it cannot be graphed")
        return make(self, kind)

    monkeypatch.setattr(gpu_parts.Machine, "runner", refuses)
    gpu.run({name: gpu_parts.PARTS[name] for name in ("card", "steps", "drafts")}, machine, 300)
    page = (machine.folder / "page.md").read_text()
    assert page.count("`ValueError: it cannot be graphed`") == 2
    assert page.count("### Steps") == len(machine.sizes.contexts) and page.count("\n| 15 |") == len(
        machine.sizes.contexts
    )
    assert re.search(r"\| 1 \| 2,000 \| [\d.]+ \| [\d.]+ \| [\d.]+× \| \d+% \|\n", page)


def test_no_gpu_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu, "resolve_device", lambda name: CPU)
    with pytest.raises(SystemExit, match="2"):
        harness.main(gpu.gpu, ["--out", str(tmp_path)])
    assert "give --tiny true" in capsys.readouterr().err
