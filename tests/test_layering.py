"""The arrows between the packages, read from the imports of every source file."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("data", "drafters", "inference", "train")
MAY_IMPORT = {
    "data": {"data"},
    "drafters": {"drafters"},
    "inference": {"inference", "data", "drafters"},
    "train": {"train", "inference", "data", "drafters"},
}
LONG_FILES = {"data/embedded.py"}  # tables of words
MOST_LINES = 300

SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
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


def imported_on_loading(module):
    """The project's modules that loading a module loads: imports outside functions and ``if TYPE_CHECKING``."""
    tree = ast.parse(SOURCES[module].read_text(encoding="utf-8"))
    later = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
        if hasattr(node, "body") and isinstance(node.body, list):
            node.body = [child for child in node.body if not isinstance(child, later)]
    return {name for name in imports(module, tree) if name in SOURCES}


@each_source
def test_imports_follow_the_arrows(module):
    package = module.split(".")[0]
    forbidden = {name for name in imports(module) if name.split(".")[0] in set(PACKAGES) - MAY_IMPORT[package]}
    assert not forbidden


@pytest.mark.parametrize("module", [name for name in SOURCES if name.startswith("drafters")])
def test_drafters_need_only_torch_numpy_numba_and_safetensors(module):
    roots = {name.split(".")[0] for name in imports(module)}
    assert roots <= {*sys.stdlib_module_names, "drafters", "torch", "numpy", "numba", "safetensors"}


def test_no_circle_of_imports():
    edges = {module: imported_on_loading(module) for module in SOURCES}
    loaded, path = set(), []

    def load(module):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in loaded:
            path.append(module)
            for name in sorted(edges[module] - {module}):
                load(name)
            loaded.add(path.pop())

    for module in SOURCES:
        load(module)


@each_source
def test_every_file_says_what_it_is_for(module):
    assert ast.get_docstring(ast.parse(SOURCES[module].read_text(encoding="utf-8")))


@each_source
def test_no_file_is_long(module):
    path = SOURCES[module]
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MOST_LINES or path.relative_to(ROOT).as_posix() in LONG_FILES


def test_packages_are_the_ones_the_build_lists():
    listed = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("packages"))
    found = {name for name, path in SOURCES.items() if path.name == "__init__.py"}
    assert set(ast.literal_eval(listed.partition("=")[2].strip())) == found


def test_the_reader_of_imports_sees_relative_late_and_guarded_ones(tmp_path, monkeypatch):
    text = "import data.a\nfrom . import x\nfrom ..up import y\ndef f():\n    import train\n"
    (tmp_path / "m.py").write_text(text + "if TYPE_CHECKING:\n    import inference\n")
    for name in ("data.a", "train", "inference"):
        monkeypatch.setitem(SOURCES, name, tmp_path / "none.py")
    monkeypatch.setitem(SOURCES, "pack.sub.m", tmp_path / "m.py")
    everything = {"data.a", "pack.sub", "pack.sub.x", "pack.up", "pack.up.y", "train", "inference"}
    assert set(imports("pack.sub.m")) == everything
    assert imported_on_loading("pack.sub.m") == {"data.a"}
