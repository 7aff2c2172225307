"""Finds the configs and the tiny base that ship with the project, in a checkout and in an installed package."""

from pathlib import Path


def shipped_folder(name: str) -> Path:
    """Return the path of the top-level folder ``configs`` or ``checkpoints``.

    An installed wheel holds a copy inside this package (see setup.py); in a checkout it is next to the package.
    """
    package = Path(__file__).resolve().parent
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


def find_base(name: str) -> str:
    """Return where to load the base ``name`` from: `name` itself, or the shipped base of that name.

    A folder below the current one comes first, so ``checkpoints/tiny-chat`` can be replaced by another.
    """
    path = Path(name)
    if path.parts[:1] == ("checkpoints",) and not path.exists():
        shipped = shipped_folder("checkpoints").joinpath(*path.parts[1:])
        if (shipped / "config.json").is_file():
            return str(shipped)
    return name
