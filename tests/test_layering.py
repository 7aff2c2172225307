"""The arrows between packages and between their rooms (subpackages), read from the imports of every source file."""

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
PACKAGES = ("data", "drafters", "inference", "train")
DRAFTER_PARTS = {"learned.layers", "learned.losses", "learned.trees"}
# What each room may import of its own package; "" is the modules outside the rooms.
ROOMS = {
    "data": {
        "": {"feature_store", "files"},
        "benchmarks": {"", "files"},
        "feature_store": {"files"},
        "files": set(),
    },
    "drafters": {
        "": set(),
        "learned.layers": {""},
        "learned.losses": {"", "learned.layers"},
        "learned.trees": {"", "learned.layers"},
        "learned.parallel": {"", *DRAFTER_PARTS},
        "learned.heads": {"", "learned.parallel", *DRAFTER_PARTS},
        "learned.autoregressive": {"", *DRAFTER_PARTS},
        "learned.ctc": {"", "learned.parallel", *DRAFTER_PARTS},
        "training_free": {""},
        "combined": {"", "training_free"},
    },
    "inference": {
        "runs": set(),
        "sandbox": set(),
        "budget": set(),
        "engine": {"budget"},
        "compiled": {"engine"},
        "registry": {"budget", "engine"},
        "results": {"engine", "registry"},
        "serving.vllm": {"engine", "registry"},
        "serving.openai": {"budget", "engine", "registry", "api"},
        "serving": {"engine", "registry", "serving.vllm"},
        "api": {"budget", "engine", "compiled", "registry", "results"},
        "reporting": {"runs", "results"},
        "regeneration": {"runs", "engine"},
        "indexes": {"runs", "engine"},
        "chat": {"engine", "compiled", "registry", "api", "results", "reporting"},
        "replay": {"runs", "engine", "registry", "api", "results", "reporting"},
        "evaluation.served": {"runs", "engine", "registry", "api", "results", "regeneration", "serving"},
        "evaluation": {
            *("runs", "sandbox", "engine", "compiled", "registry", "api", "results", "reporting", "serving"),
            "evaluation.served",
        },
        "tuning": {"runs", "engine", "registry", "api", "results", "reporting", "evaluation"},
    },
    "train": {
        "checkpointing": set(),
        "validation": set(),
        "feature_store": set(),
        "modules": {"validation", "feature_store"},
        "callbacks": {"modules", "validation"},
        "export.formats": set(),
        "export": {"checkpointing", "modules", "validation", "feature_store", "export.formats"},
        "tools": {"validation"},
        "cli": {"callbacks", "checkpointing", "modules"},
        "": {"cli"},
    },
}
MAY_IMPORT = {
    "data": {"data"},
    "drafters": {"drafters", "data.files"},
    "inference": {"inference", "data", "drafters"},
    "train": {"train", "inference", "data", "drafters"},
}
LONG_FILES = {"data/embedded.py"}  # tables of words
MAX_LINES = 350
MAX_MODULES = 15

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


def room_of(module):
    """``drafters.learned.ctc.loss`` lies in ``learned.ctc``, ``drafters.tree`` in the empty room."""
    package, *inside = module.split(".")
    if SOURCES[module].name != "__init__.py":
        inside = inside[:-1]
    return package, ".".join(inside)


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
def test_imports_follow_the_arrows_between_rooms(module):
    package, room = room_of(module)
    allowed = {room, *ROOMS[package][room]}
    named = imported_modules(module) - FACADES
    own = {name for name in named if name.split(".")[0] == package}
    forbidden = {name for name in own if room_of(name)[1] not in allowed}
    assert not forbidden


@pytest.mark.parametrize("package", PACKAGES)
def test_the_arrows_between_rooms_form_no_cycle_and_name_rooms_that_exist(package):
    assert first_cycle(ROOMS[package]) is None
    rooms = {room_of(name)[1] for name in SOURCES if name.split(".")[0] == package and name not in FACADES}
    assert rooms == set(ROOMS[package])


@pytest.mark.slow
def test_no_cycle_of_imports_late_and_type_checking_imports_included():
    edges = {name: imported_modules(name) - FACADES for name in SOURCES if name not in FACADES}
    assert first_cycle(edges) is None


@pytest.mark.slow
def test_no_cycle_of_imports_on_loading():
    assert first_cycle({module: imported_on_loading(module) - {module} for module in SOURCES}) is None


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
    path = SOURCES[module]
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES or path.relative_to(ROOT).as_posix() in LONG_FILES


def test_no_room_is_crowded():
    benchmarks = [path for path in (ROOT / "benchmarks").rglob("*.py") if path.name != "__init__.py"]
    modules = Counter(path.parent for path in [*benchmarks, *(SOURCES[name] for name in SOURCES.keys() - FACADES)])
    assert max(modules.values()) <= MAX_MODULES


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
    assert imported_on_loading("pack.sub.m") == {"data.a"}
