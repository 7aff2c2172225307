"""The README stays short, and the commands in it and in docs/ work."""

import re
import shlex
import subprocess
import sys
from dataclasses import is_dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import harness, learned_drafters
from drafters.recipe import draft_defaults
from inference import drafter_specs
from inference.options import QuestionOptions
from inference.tune import FILE, SKIPS, first_trials, read_space
from train.cli import parse, run_drafters, run_lightning

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]  # those of results/ record past runs
ALL_PAGES = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "checkpoints" / "README.md", *sorted(DOCS.glob("results/*.md"))]
OF_TODAY = [page for page in ALL_PAGES if page.name not in ("CHANGELOG.md", "decisions.md")]  # both name past files
FOLDERS = "(?:data|drafters|inference|train|benchmarks|checkpoints|tests|configs|docs)"
ON_SITE_ONLY = "reference/"  # pages that the site generates


def typed(page):
    """Return the command lines of a page, with continued lines joined and comments removed."""
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if command := line.split("  #")[0].strip():
                yield command


def lines_with(start):
    lines = dict.fromkeys(line for page in PAGES for line in typed(page) if line.startswith(start))
    assert lines
    return list(lines)


def test_the_readme_has_at_most_900_words():
    assert len(README.split()) <= 900


@pytest.mark.slow
def test_quickstart_ends_in_a_lossless_drafter_and_a_report(tmp_path):
    """The Makefile's own recipe, with fewer steps and questions; the environment is the one that runs the tests."""
    arguments = {
        "BIN": Path(sys.executable).parent,
        "RUN": tmp_path / "run",
        "FIT_ARGS": "--trainer.max_steps 2 --trainer.val_check_interval 2 --data.files [embedded:16] --data.val_size 2 "
        f"--data.batch_size 2 --model.max_val_tokens 16 --data.cache_dir {tmp_path / 'cache'}",
        "EVAL_ARGS": "--limit 1 --max-new-tokens 12",
    }
    made = subprocess.run(
        ["make", "-o", "install", "quickstart", *(f"{name}={value}" for name, value in arguments.items())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    assert "Nothing is lost" in made.stdout
    for file in ("report.html", "results.json", "results.md", "plots"):
        assert (tmp_path / "run" / "eval" / file).exists()


@pytest.mark.parametrize("line", lines_with("drafters "))
def test_every_drafters_line_parses(line, capsys):
    name, *arguments = shlex.split(line)[1:]
    if arguments == ["--help"]:
        with pytest.raises(SystemExit) as ended:
            run_drafters([name, "--help"])
        assert not ended.value.code and "usage" in capsys.readouterr().out
        return
    function, values = parse(name, arguments)
    assert callable(function) and values
    if name in ("eval", "tune"):
        check_names(values)


def check_names(values):
    """Raise an error unless the benchmarks, the drafters, their options and the space of a command exist."""
    values = values | {key: of for group in values.values() if is_dataclass(group) for key, of in vars(group).items()}
    QuestionOptions(values.get("benchmark")).caps()
    drafters, space = values.get("drafter") or [], values.get("space", [])
    for spec in [drafters] if isinstance(drafters, str) else drafters:
        parts = drafter_specs.split(spec)
        learned = parts.registration.learned_class
        options = draft_defaults(learned) if learned else drafter_specs._defaults(parts.registration.build)
        drafter_specs._typed(parts, options)
        assert {text.partition("=")[0] for text in space} <= {*options, FILE, SKIPS}
    if space and SKIPS not in space:  # whose layers are those of a base
        first_trials(read_space(space, drafters, None), values["search"])


@pytest.mark.parametrize("line", lines_with("python -m benchmarks."))
def test_every_line_of_a_benchmark_parses(line):
    module, *arguments = shlex.split(line)[2:]
    function, given = getattr(import_module(module), module.rpartition(".")[2]), []
    harness.main(wraps(function)(lambda **values: given.append(values)), arguments)
    (values,) = given
    assert {*values.get("arms", [])} <= {*learned_drafters.ARMS, *learned_drafters.GROUPS}
    if isinstance(benchmarks := values.get("benchmark"), list):
        check_names({"benchmark": benchmarks})


@pytest.mark.slow
@pytest.mark.parametrize("line", lines_with("lightning "))
def test_every_lightning_line_parses(line, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(DOCS / "examples"))
    monkeypatch.setattr(sys, "argv", ["lightning"])
    with pytest.raises(SystemExit) as ended:
        run_lightning([*shlex.split(line)[1:], "--print_config"])
    assert ended.value.code == 0 and "drafter:" in capsys.readouterr().out


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_to_a_file_leads_to_one(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:", ON_SITE_ONLY)):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_source_file_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    for name in re.findall(rf"`({FOLDERS}/(?:[\w/.-]+\.\w+)?)`", text):
        assert "NAME" in name or (ROOT / name).exists(), name
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert {*re.findall(r"`(test_\w+\.py)`", text)} <= tests
