"""The map of the code in docs/design.md shows the folders and rooms that exist."""

import re
from pathlib import Path

from tests.docs.conftest import load_script

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "design.md").read_text(encoding="utf-8")


def test_the_tree_of_the_page_names_the_folders_that_exist():
    """After a change: ``python docs/layout.py``."""
    layout = load_script("layout")
    shown = [line.split("/")[0] for line in layout.BLOCK.search(PAGE)[2].splitlines()]
    assert shown == [line.split("/")[0] for line in layout.tree().splitlines()]


def test_the_picture_shows_every_room_that_the_layering_test_knows():
    """After a change: ``python docs/rooms_picture.py``."""
    picture = load_script("rooms_picture")
    drawn = re.findall(r">([^<>\n]+)</text>", (DOCS / "rooms.svg").read_text(encoding="utf-8"))
    for rows in picture.rooms().values():
        assert {part for row in rows for part in row} <= set(drawn)
