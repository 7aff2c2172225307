"""The table of launches, copies and waits counts what it says, and that of the docs is the one of this code."""

import pytest
import torch

from benchmarks import launches
from drafters.nn import graph


def test_views_are_not_counted_and_a_graph_counts_once(monkeypatch):
    counter, numbers = launches.Launches(), torch.ones(2, 3)
    monkeypatch.setattr(graph, "captured", counter.captured)
    added = graph.captured(lambda: numbers.add_(1).mul_(2), torch.device("cpu"))
    with counter:
        assert numbers.view(3, 2).t()[0].unsqueeze(0).shape == (1, 3)
        assert (counter.operators, counter.graphs) == (0, 0)
        added()
        added()
        assert (counter.operators, counter.graphs) == (0, 2)
        numbers += 1
        assert (counter.operators, counter.graphs) == (1, 2)
    assert numbers.unique().item() == 2 * (2 * (1 + 1) + 1) + 1


@pytest.mark.slow
@pytest.mark.parametrize("graphed", [False, True])
def test_the_tables_of_the_docs_have_the_counts_of_today(repository, graphed):
    """Versions of torch and transformers differ by a few operators; copies and waits are ours."""
    table = launches.table(graphed)
    page = (repository / "docs" / "design.md").read_text().partition(f"\n### {table.title}\n\n")[2]
    shown = [[cell.strip() for cell in line[1:-1].split("|")] for line in page.partition("\n\n")[0].splitlines()]
    heading, _, *rows = shown
    expected = [[name, *row[1:]] for row in rows for name in row[0].split("; ")]  # equal rows are written as one
    assert heading == table.headings and [row[0] for row in expected] == [row[0] for row in table.rows]
    for row, counted in zip(expected, table.rows, strict=True):
        for title, own, cell in zip(heading[1:], row[1:], counted[1:], strict=True):
            own, cell = (list(map(int, text.split(" + "))) for text in (own, cell))
            few = 0 if title in (launches.WAITS, launches.TO_DEVICE) else 0.05
            assert own == pytest.approx(cell, rel=few), (row[0], title)
