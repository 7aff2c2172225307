"""The arrows between packages and between their rooms (subpackages), read from the imports of every source file."""

import ast
import sys
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
PACKAGES = ("data", "drafters", "inference", "train")
# The parts of each package, lowest first: its modules and its folders. A part may import parts of lower lines only.
LAYERS = {
    "data": """
        batches computing_limit dtypes safe_text
        files
        hub
        gguf
        features tokenizer
        sources
        benchmarks conversations
        templates
        rows
        module
    """,
    "drafters": """
        tree
        protocol
        checks dry_run public_formats recipe registry
        checkpoint losses nn
        trees
        training_free
        merged
        eagle medusa parallel
        block ctc hydra
    """,
    "inference": """
        arguments bases journal runs sandbox server_process timing
        verifier
        indexes openai_server prompts
        options
        regenerate
        model_drafters
        drafter_specs
        verify vllm
        llama_cpp
        evaluate
        generation
        chat serve speculation
        tune
        commands
    """,
    "train": """
        arguments checkpoints divisor initial_drafter model_card served strategies validation
        features optimizer
        formats
        export module
        import_drafter memory resume
        callbacks commands
        lightning_cli
        cli
        __main__
    """,
}
LEVELS = {
    package: {part: level for level, line in enumerate(lines.strip().splitlines()) for part in line.split()}
    for package, lines in LAYERS.items()
}
MAY_IMPORT = {
    "data": {"data"},
    "drafters": {"drafters", "data.files"},
    "inference": {"inference", "data", "drafters"},
    "train": {"train", "inference", "data", "drafters"},
}
MAX_LINES = 500
MAX_FOLDERS = 4

SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
FACADES = {name for name, path in SOURCES.items() if path.name == "__init__.py"}  # give out what their rooms define
each_source = pytest.mark.parametrize("module", SOURCES)


def imports(module, tree=None):
    """The absolute names of what a file imports, anywhere in it or in one part of its syntax tree."""
    path = SOURCES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree or ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def imported_modules(module):
    """The project's modules that a file names, late and type-checking imports included; the deepest name counts."""
    names = {name for name in imports(module) if name in SOURCES}
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)} - {module}


def part_of(module):
    """``drafters.ctc.loss`` lies in ``ctc``, ``drafters.tree`` is a part of its own."""
    package, part, *_ = module.split(".")
    return package, part


def first_cycle(edges):
    """A path of names that ends where it began, or None."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            path.append(name)
            for other in sorted(edges.get(name, ())):
                if found := visit(other):
                    return found
            done.add(path.pop())
        return None

    return next(filter(None, map(visit, edges)), None)


@each_source
def test_imports_follow_the_arrows_between_packages(module):
    allowed = tuple(f"{name}." for name in MAY_IMPORT[module.split(".")[0]])
    own = {name for name in imports(module) if name.split(".")[0] in PACKAGES}
    assert not {name for name in own if not f"{name}.".startswith(allowed)}


@pytest.mark.parametrize("module", [name for name in SOURCES if name not in FACADES])
def test_imports_between_the_parts_of_a_package_go_down(module):
    package, part = part_of(module)
    levels = LEVELS[package]
    named = {name for name in imported_modules(module) - FACADES if name.split(".")[0] == package}
    above = {name for name in named if part_of(name)[1] != part and levels[part_of(name)[1]] >= levels[part]}
    assert not above


@pytest.mark.parametrize("package", PACKAGES)
def test_the_layers_name_the_parts_that_exist(package):
    parts = {part_of(name)[1] for name in SOURCES if name.split(".")[0] == package and name != package}
    assert parts == set(LEVELS[package])


@pytest.mark.slow
def test_no_cycle_of_imports_late_and_type_checking_imports_included():
    edges = {name: imported_modules(name) - FACADES for name in SOURCES if name not in FACADES}
    assert first_cycle(edges) is None


def test_a_cycle_is_found():
    assert first_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


@pytest.mark.parametrize("module", [name for name in SOURCES if name.startswith("drafters")])
def test_drafters_need_only_torch_numpy_numba_and_safetensors(module):
    roots = {name.split(".")[0] for name in imports(module) if not name.startswith("data.files")}
    assert roots <= {*sys.stdlib_module_names, "drafters", "torch", "numpy", "numba", "safetensors"}


@each_source
def test_every_file_says_what_it_is_for(module):
    assert ast.get_docstring(ast.parse(SOURCES[module].read_text(encoding="utf-8")))


@each_source
def test_no_file_is_long(module):
    assert len(SOURCES[module].read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_folders_are_at_most_four_deep():
    assert max(len(path.relative_to(ROOT).parent.parts) for path in SOURCES.values()) <= MAX_FOLDERS


def test_every_folder_with_sources_is_a_package_that_the_build_finds():
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES.values()}
    assert folders <= set(find_packages(str(ROOT)))


def test_the_reader_of_imports_sees_relative_late_and_guarded_ones(tmp_path, monkeypatch):
    text = "import data.a\nfrom . import x\nfrom ..up import y\ndef f():\n    import train\n"
    (tmp_path / "m.py").write_text(text + "if TYPE_CHECKING:\n    import inference\n")
    for name in ("data.a", "train", "inference"):
        monkeypatch.setitem(SOURCES, name, tmp_path / "none.py")
    monkeypatch.setitem(SOURCES, "pack.sub.m", tmp_path / "m.py")
    everything = {"data.a", "pack.sub", "pack.sub.x", "pack.up", "pack.up.y", "train", "inference"}
    assert set(imports("pack.sub.m")) == everything
    assert imported_modules("pack.sub.m") == {"data.a", "train", "inference"}
