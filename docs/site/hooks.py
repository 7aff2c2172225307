"""What MkDocs generates from the code: the API and command references, tables of arguments, copies of root pages.

Registered under ``hooks`` in mkdocs.yml. Nothing here needs a network.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PACKAGES = ("drafters", "inference", "train", "data")
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import argument_tables  # noqa: E402
import benchmark_table  # noqa: E402
import formulas  # noqa: E402


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that exist only on the site."""
    pages = root_pages() | {"notebooks/quickstart.md": notebook_page()} | api_pages() | command_pages()
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in tables of arguments, turn formulas into MathML, and follow links out of docs/ to their copies."""
    path = page.file.src_uri
    markdown = re.sub(r"<!-- arguments: (\w+) -->", lambda match: argument_tables.table(match[1]), markdown)
    markdown = markdown.replace("<!-- benchmarks -->", benchmark_table.table())
    markdown = re.sub(
        r"```math\n(.*?)```", lambda match: formulas.to_mathml(match[1].strip()), markdown, flags=re.DOTALL
    )
    up = "../" * path.count("/")
    links = {
        "../checkpoints/README.md": "checkpoints.md",
        "../CHANGELOG.md": "changelog.md",
        "../CONTRIBUTING.md": "contributing.md",
        "notebooks/quickstart.ipynb": "notebooks/quickstart.md",
    }
    for old, new in links.items():
        markdown = markdown.replace(f"]({up}{old}", f"]({up}{new}")
    return markdown


def root_pages() -> dict[str, str]:
    """The README as the first page, and the other pages of the repository's root."""
    sources = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
    sources["checkpoints.md"] = "checkpoints/README.md"
    pages = {path: (ROOT / source).read_text(encoding="utf-8") for path, source in sources.items()}
    for path, text in pages.items():
        text = text.replace("](docs/", "](").replace("](../docs/", "](")
        text = text.replace("](checkpoints/README.md", "](checkpoints.md").replace(
            "](../checkpoints/README.md", "](checkpoints.md"
        )
        text = text.replace("](CONTRIBUTING.md", "](contributing.md").replace("](CHANGELOG.md", "](changelog.md")
        pages[path] = re.sub(r"\[(CITATION\.cff)\]\(CITATION\.cff\)", r"`\1`", text)
    return pages


def notebook_page() -> str:
    """The cells of the notebook, one below the other."""
    cells = json.loads((ROOT / "docs/notebooks/quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    blocks = [
        f"```python\n{text}\n```" if cell["cell_type"] == "code" else text
        for cell, text in zip(cells, texts, strict=True)
    ]
    return "\n\n".join(blocks)


def rooms(package: str) -> dict[str, list[str]]:
    """The modules of each folder of a package, by its dotted name."""
    folders: dict[str, list[str]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        names = path.relative_to(ROOT).with_suffix("").parts
        if "__pycache__" not in names:
            folders.setdefault(".".join(names[:-1]), []).append(".".join(names))
    return folders


def api_pages() -> dict[str, str]:
    """A page for each package, with one heading for each room and module."""
    pages = {}
    for package in PACKAGES:
        lines = [f"# {package}", "", summary(f"{package}.__init__"), ""]
        for room, modules in rooms(package).items():
            if room != package:
                lines += [f"## {room}", "", summary(f"{room}.__init__"), ""]
            for module in modules:
                if not module.endswith(("__init__", "__main__")):
                    lines += [f"### {module.rpartition('.')[2]}", "", f"::: {module}", ""]
        pages[f"reference/api/{package}.md"] = "\n".join(lines)
    return pages


def summary(module: str) -> str:
    """The docstring of a module, without importing it."""
    source = (ROOT / module.replace(".", "/")).with_suffix(".py")
    return ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""


def command_pages() -> dict[str, str]:
    """The help of every command, as its own parser prints it."""
    from train.cli import COMMANDS, run_drafters, run_lightning

    lines = [
        "# Commands",
        "",
        "The help texts below are printed by the commands' own parsers when this site is built.",
        "",
    ]
    lines += ["## drafters", "", *fenced(printed(run_drafters, ["--help"]))]
    for name in COMMANDS:
        lines += [f"### drafters {name}", "", *fenced(printed(run_drafters, [name, "--help"]))]
    lines += ["## lightning fit", "", *fenced(printed(run_lightning, ["fit", "--help"]))]
    return {"reference/commands.md": "\n".join(lines)}


def fenced(text: str) -> list[str]:
    return ["```text", text.rstrip(), "```", ""]


def printed(command, arguments: list[str]) -> str:
    """What a command prints, 100 columns wide."""
    out, before = io.StringIO(), sys.argv
    os.environ["COLUMNS"] = "100"
    sys.argv = ["lightning"]
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            command(arguments)
    finally:
        sys.argv = before
    return out.getvalue()
