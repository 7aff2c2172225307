"""The launches of a training step are those of its page, and its losses know how many they are."""

import pytest

from benchmarks import training_launches
from drafters.ctc import loss

NUM_FRAMES = 12
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in training_launches.RECIPES if name != "llama3_8b.yaml"]


@pytest.mark.parametrize("config", ["llama3_8b.yaml", *SLOW])
def test_the_table_of_the_page_has_the_launches_of_today(repository, config):
    """Versions of torch differ by a few operators; anchors and chunks are ours."""
    table = training_launches.table([config])
    page = (repository / "docs" / "results" / "training.md").read_text()
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in page.splitlines() if line[:1] == "|"]
    assert table.headings in lines
    own, (counted,) = next(line for line in lines if line[0] == f"`{config}`"), table.rows
    assert own[1:3] == counted[1:3]
    assert list(map(float, own[3:])) == pytest.approx(list(map(float, counted[3:])), rel=0.05, abs=0.006)
    assumed = loss.OTHER_CALLS + NUM_FRAMES * loss.FRAME_CALLS
    assert int(counted[3]) < 1.1 * assumed, "a chunk of the loss launches more operators than its size reckons with"


def test_only_recipes_with_a_known_shape_are_counted():
    with pytest.raises(ValueError, match=r"no recipe for a large base: 'small.yaml'; there are ctc.yaml, "):
        training_launches.table(["small.yaml"])
