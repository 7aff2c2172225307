"""The wheel, installed without the checkout: commands, configs and the tiny base work from an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from data.hub import find_base, find_folder, shipped_folder

ROOT = Path(__file__).parents[1]
PACKAGES = ("data", "drafters", "inference", "train")
SUFFIXES = (".py", ".j2", ".jinja", ".mplstyle")  # of what the packages hold
BUILT_FROM = (*PACKAGES, "configs", "checkpoints", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")


def run(*command, cwd):
    """Run a command that cannot see the checkout and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The source archive and the wheel, built from a copy so that the checkout stays clean."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=out)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(archives, tmp_path_factory):
    """The scripts folder of a new virtual environment that holds the wheel.

    Dependencies come from the running environment through a .pth file. Python does not follow the .pth files of that
    environment in turn, so an editable install of the checkout is not importable here.
    """
    home = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    python = home / "bin" / "python"
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, archives[1], cwd=home)
    return home / "bin"


@pytest.fixture
def empty(tmp_path):
    """An empty current folder."""
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_both_archives_pass_twine(archives):
    run(sys.executable, "-m", "twine", "check", "--strict", *archives, cwd=archives[0].parent)


def test_the_wheel_holds_every_source_file_config_and_checkpoint(archives):
    names = set(zipfile.ZipFile(archives[1]).namelist())
    sources = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in SUFFIXES}
    sources |= {*(ROOT / "inference" / "serve" / "page").iterdir(), *(ROOT / "data").rglob("*.jsonl*")}
    sources |= {ROOT / package / "py.typed" for package in PACKAGES}
    shipped = {*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "checkpoints").glob("*/*")}
    expected = {path.relative_to(ROOT).as_posix() for path in sources}
    expected |= {f"data/{path.relative_to(ROOT).as_posix()}" for path in shipped}
    assert expected == {name for name in names if ".dist-info/" not in name}


@pytest.mark.slow
def test_the_installed_package_is_imported_and_not_the_checkout(installed, empty):
    code = "import data.files, drafters, inference, train; print(*(m.__file__ for m in (drafters, inference, train)))"
    for file in run(installed / "python", "-c", code, cwd=empty).split():
        assert Path(file).is_relative_to(installed.parent)


def test_the_commands_of_the_wheel_are_ours_and_print_their_help(installed, empty):
    assert "drafters COMMAND --help" in run(installed / "drafters", "--help", cwd=empty)
    ours = run(installed / "lightning", "--help", cwd=empty)
    assert "Train learned drafters" in ours
    assert run(installed / "python", "-m", "train", "--help", cwd=empty) == ours


@pytest.mark.slow
def test_training_runs_from_an_empty_folder_with_bare_config_names_and_the_tiny_base(installed, empty):
    configs = ("--config", "ctc.yaml", "--config", "debug.yaml")
    steps = ("--trainer.max_steps", 2, "--data.files", "[embedded:16]", "--data.val_size", 2)
    run(installed / "lightning", "fit", *configs, *steps, "--data.cache_dir", empty / "cache", cwd=empty)
    assert (empty / "runs" / "debug" / "checkpoints" / "best.ckpt").exists()


@pytest.mark.slow
def test_evaluation_runs_from_an_empty_folder_with_the_tiny_base(installed, empty):
    base = ("--base", "checkpoints/tiny-chat", "--drafter", "anpd")
    limits = ("--benchmark", "embedded", "--limit", 1, "--max-new-tokens", 4, "--repeats", 1)
    run(installed / "drafters", "eval", *base, *limits, "--out", "results", cwd=empty)
    assert "anpd" in (empty / "results" / "results.md").read_text(encoding="utf-8")


def test_the_current_folder_comes_before_what_ships_with_the_package(empty, monkeypatch):
    monkeypatch.chdir(empty)
    assert find_base("checkpoints/tiny-chat") == str(shipped_folder("checkpoints") / "tiny-chat")
    assert find_folder("checkpoints/smollm2-ctc", ()) == shipped_folder("checkpoints") / "smollm2-ctc"
    (empty / "checkpoints" / "tiny-chat").mkdir(parents=True)
    assert find_base("checkpoints/tiny-chat") == "checkpoints/tiny-chat"


def test_other_bases_are_left_as_they_are_named(empty, monkeypatch):
    monkeypatch.chdir(empty)
    for name in ("owner/name", "tiny-chat", "checkpoints/other", "checkpoints", "/checkpoints/tiny-chat"):
        assert find_base(name) == name


def test_the_extras_that_messages_name_exist():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    name = re.search(r'^name = "(.*)"$', pyproject, flags=re.M)[1]
    for path in (*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"):
        for package, extra in re.findall(r"pip install '?([\w-]+)\[(\w+)\]", path.read_text(encoding="utf-8")):
            assert package == name and f"\n{extra} = [" in pyproject, path
