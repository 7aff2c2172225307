"""The parts of the documentation site that are generated from the code; every drafter is on it."""

import re
from pathlib import Path

import pytest
import yaml

from data.benchmarks import BENCHMARKS
from drafters import recipe
from drafters.registry import learned, registered
from inference import model_drafters  # noqa: F401  registers the drafters that need a model
from tests.docs.conftest import load_script

ROOT = Path(__file__).parents[2]
DRAFTERS = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
LEARNED = learned()
NAMES = [name for name in registered() if name != "none"]


@pytest.fixture(scope="module")
def argument_tables():
    return load_script("site/argument_tables")


def test_the_page_on_drafters_has_a_table_of_arguments_for_each_of_the_catalogue():
    assert sorted(re.findall(r"<!-- arguments: (\w+) -->", DRAFTERS)) == sorted(NAMES)


@pytest.mark.parametrize("name", LEARNED)
def test_each_argument_of_a_learned_drafter_has_a_meaning_in_its_table(name, argument_tables):
    rows = re.findall(r"^    \| `([\w.]+)` \| `[^`]+` \| (.*) \|$", argument_tables.table(name), flags=re.M)
    assert rows
    for argument, meaning in rows:
        assert meaning.strip(), argument


@pytest.mark.parametrize("name", NAMES)
def test_what_decoding_may_change_is_marked_for_learned_drafters_only(name, argument_tables):
    changeable = recipe.draft_defaults(LEARNED[name]) if name in LEARNED else {}
    marked = re.findall(r"`draft\.(\w+)` .* \*\(decoding\)\* \|$", argument_tables.table(name), flags=re.M)
    assert set(marked) == set(changeable)


def test_the_table_of_benchmarks_has_each_with_the_prompts_of_its_styles():
    assert "<!-- benchmarks -->" in (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    rows = load_script("site/benchmark_table").table().splitlines()
    for name, benchmark in BENCHMARKS.items():
        (row,) = (row for row in rows if name in row.split(" | ")[0].removeprefix("| ").split(", "))
        for style, own in benchmark.styles.items():
            assert f"{style}: " in row and own.prompt.split("\n")[0].replace("|", "\\|") in row


def test_every_page_is_in_the_navigation_and_nothing_is_loaded_from_other_sites():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = {page for section in config["nav"] for page in pages(section)}
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert written <= listed
    assert config["theme"]["font"] is False and "extra_javascript" not in config


def pages(entry):
    """Return the files below an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    below = entry.values() if isinstance(entry, dict) else entry
    return [page for part in below for page in pages(part)]
