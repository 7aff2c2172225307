"""Sweeps: the grid, its maps, and cells that equal single evaluations, also after interruptions."""

import json
from itertools import pairwise, product

import matplotlib
import numpy as np
import pytest
import torch

from inference.evaluation.evaluate import evaluate
from inference.evaluation.question_options import QuestionOptions
from inference.tuning import sweep_plots
from inference.tuning.grid import Axis, Cell, cells, read_axes, read_axis
from inference.tuning.sweep import sweep
from inference.tuning.sweep_report import MeasuredCell, noise, ranked
from inference.verifier.options import ModelOptions, SamplingOptions
from train.cli.commands import grouped

# ---- the grid


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("order=2..5", "2 3 4 5"),
        ("order=2..3,8,16..17", "2 3 8 16 17"),
        ("gap=-1..1", "-1 0 1"),
        ("tree=paper,chain", "paper chain"),
        ("fade=0.5", "0.5"),
        ("file=../runs/a..b,c=d", "../runs/a..b c=d"),
    ],
)
def test_an_axis_is_a_name_and_its_values(text, values):
    assert read_axis(text) == Axis(text.split("=")[0], tuple(values.split()))


@pytest.mark.parametrize("text", ["order", "order=", "=2", "order=2,,3", "order=2,2", "order=2..4,3", "order=5..2"])
def test_a_text_that_is_not_an_axis_is_refused_and_quoted(text):
    with pytest.raises(ValueError, match="axis") as caught:
        read_axis(text)
    assert repr(text) in str(caught.value) and "\n" not in str(caught.value)


def test_the_last_axis_varies_fastest_and_the_file_follows_the_name():
    axes = read_axes(["file=a,b/c", "num_nodes=4,8"], "ctc:top_k=3")
    assert [(cell.place, cell.spec) for cell in cells("ctc:top_k=3", axes)] == [
        (("a", "4"), "ctc=a:top_k=3,num_nodes=4"),
        (("a", "8"), "ctc=a:top_k=3,num_nodes=8"),
        (("b/c", "4"), "ctc=b/c:top_k=3,num_nodes=4"),
        (("b/c", "8"), "ctc=b/c:top_k=3,num_nodes=8"),
    ]
    assert [cell.spec for cell in cells("joint=corpus.bin", read_axes(["order=2"], "joint"))] == [
        "joint=corpus.bin:order=2"
    ]


@pytest.mark.parametrize(
    ("grid", "drafter"),
    [(["order=2", "order=3"], "anpd"), (["order=2"], "anpd:update=true,order=4"), (["file=a"], "ctc=b")],
)
def test_an_argument_that_is_given_twice_is_refused(grid, drafter):
    with pytest.raises(ValueError, match="is given twice"):
        read_axes(grid, drafter)


# ---- the maps


@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 1), (2, 3), (3, 1, 2), (2, 3, 2), (2, 2, 3, 2)])
def test_every_cell_of_a_grid_appears_in_one_map_at_its_place(sizes):
    axes = [Axis(f"axis{index}", tuple(f"v{value}" for value in range(size))) for index, size in enumerate(sizes)]
    places = list(product(*(axis.values for axis in axes)))
    measured = {place: float(number) for number, place in enumerate(places)} | {places[-1]: None}
    maps = sweep_plots.panels(axes, measured)
    found = {}
    for panel in maps:
        fixed = dict(part.split(" ") for part in panel.title.split(", ") if part)
        for row, column in np.ndindex(panel.values.shape):
            here = fixed | {panel.rows.name: panel.rows.values[row], panel.columns.name: panel.columns.values[column]}
            place = tuple(here.get(axis.name, axis.values[0]) for axis in axes)
            assert place not in found
            found[place] = panel.values[row, column]
    assert np.isnan(found.pop(places[-1])) and found == {place: measured[place] for place in places[:-1]}
    if len([size for size in sizes if size > 1]) > 1:
        assert len(maps[0].rows.values) > 1 and len(maps[0].columns.values) > 1


@pytest.mark.slow
@pytest.mark.parametrize("metric", sweep_plots.METRICS)
@pytest.mark.parametrize("values", [[1.2, 0.8, None], [None, None, None], [1.0, 1.0, 1.0]])
def test_maps_are_drawn_even_if_measurements_are_missing_or_equal(tmp_path, metric, values):
    maps = sweep_plots.panels([Axis("a_file", tuple("xyz"))], {(key,): v for key, v in zip("xyz", values, strict=True)})
    sweep_plots.draw(metric, "anpd", maps, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("speedups", "told"),
    [
        ([0.55, 0.6, 0.65], "none is faster"),
        ([0.9, 1.0, 1.1], "white: equally fast"),
        ([1.4, 1.5, 1.6], "all are faster"),
    ],
)
def test_colours_separate_speedups_and_show_which_are_above_one(speedups, told):
    colours, norm, said = sweep_plots.scale("speedup", speedups[0], speedups[-1])
    inks = [matplotlib.colormaps[colours](norm(value))[:3] for value in speedups]
    assert said == told
    assert all(np.linalg.norm(np.subtract(one, other)) > 0.3 for one, other in pairwise(inks))
    greenness = [green - (red + blue) / 2 for red, green, blue in inks]
    assert all(np.sign(round(g, 1)) in (0, np.sign(v - 1)) for g, v in zip(greenness, speedups, strict=True))
    assert any(round(g, 1) for g in greenness)


# ---- the work


def run_sweep(base, drafter, grid, out, limit=5, **questions):
    sweep(ModelOptions(base), QuestionOptions(limit=limit, **questions), SamplingOptions(), drafter, grid, out)


@pytest.fixture(scope="module")
def tiny(make_base, tmp_path_factory):
    """Arguments of a sweep: a base in a folder, and four questions made of its words."""
    folder, base = tmp_path_factory.mktemp("tiny"), make_base(dtype=torch.float32, context=512)
    base.model.save_pretrained(folder / "base")
    base.tokenizer.save_pretrained(folder / "base")
    rng = np.random.default_rng(0)
    with (folder / "questions.jsonl").open("w") as file:
        for number in range(4):
            turns = [" ".join(f"w{word}" for word in rng.integers(3, 12, 12)) for _ in range(1 + number % 2)]
            file.write(json.dumps({"question_id": number, "category": "words", "turns": turns}) + "\n")
    file = str(folder / "questions.jsonl")
    return {"base": str(folder / "base"), "benchmark": "mt_bench", "questions": file, "max_new_tokens": 60}


GRID = ["order=2,3", "num_draft=1,4"]
UNTIMED = ("acceptance_length", "tokens", "identical", "fed_per_step", "acceptance_by_depth")


def read(out):
    return json.loads((out / "sweep.json").read_text())["cells"]


def untimed(out):
    return {cell["spec"]: [cell[name] for name in UNTIMED] for cell in read(out)}


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The folder of a sweep that was not interrupted."""
    out = tmp_path_factory.mktemp("whole") / "new"
    run_sweep(drafter="anpd", grid=GRID, out=str(out), **tiny)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "grid"), [("anpd", GRID), ("joint:order=2", ["num_nodes=2,9"])])
def test_a_cell_is_what_a_single_evaluation_measures(tiny, whole, tmp_path, drafter, grid):
    out = whole
    if drafter != "anpd":
        out = tmp_path / "sweep"
        run_sweep(drafter=drafter, grid=grid, out=str(out), **tiny)
    specs = [cell.spec for cell in cells(drafter, read_axes(grid, drafter))]
    single = tiny | {"benchmark": [tiny["benchmark"]], "questions": [tiny["questions"]]}
    evaluate(**grouped(evaluate, single | {"drafter": specs, "repeats": 1, "out": str(tmp_path / "eval")}))
    expected = json.loads((tmp_path / "eval" / "results.json").read_text())["results"]["mt_bench"]
    assert list(untimed(out)) == specs
    for cell in read(out):
        assert {name: cell[name] for name in UNTIMED} == {name: expected[cell["spec"]][name] for name in UNTIMED}
    assert len({cell["acceptance_length"] for cell in read(out)}) > 1


@pytest.mark.slow
def test_an_interrupted_sweep_continues_and_a_larger_grid_measures_only_new_cells(tiny, whole, tmp_path):
    lines = (whole / "cells.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "cells.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:40])  # stopped within the third cell
    run_sweep(drafter="anpd", grid=GRID, out=str(tmp_path), **tiny)
    done = (tmp_path / "cells.jsonl").read_bytes().splitlines(keepends=True)
    assert done[:3] == lines[:3] and len(done) == len(lines) == 5  # the very times of the cells that were whole
    assert untimed(tmp_path) == untimed(whole)
    run_sweep(drafter="anpd", grid=["order=2,3,5", "num_draft=1"], out=str(tmp_path), **tiny)
    more = (tmp_path / "cells.jsonl").read_bytes().splitlines(keepends=True)
    assert more[:5] == done and [json.loads(line)["spec"] for line in more[5:]] == ["anpd:order=5,num_draft=1"]
    assert [cell["place"] for cell in read(tmp_path)] == [["2", "1"], ["3", "1"], ["5", "1"]]


@pytest.mark.slow
def test_cells_measured_with_other_settings_are_not_mixed(tiny, whole):
    before = (whole / "cells.jsonl").read_bytes()
    with pytest.raises(
        ValueError, match=r"was started with .*2 questions.*: repeat that command to continue it, pass --over"
    ):
        run_sweep(drafter="anpd", grid=GRID, out=str(whole), limit=2, **tiny)
    assert (whole / "cells.jsonl").read_bytes() == before


def test_the_page_contains_both_rankings_and_both_maps(whole):
    page = (whole / "sweep.md").read_text()
    for title, metric in (("speed-up", "speedup"), ("acceptance length", "acceptance_length")):
        assert (whole / f"{metric}.png").read_bytes().startswith(b"\x89PNG") and f"({metric}.png)" in page
        table = page.split(f"## By {title}\n\n")[1].split("\n\n")[0].splitlines()
        expected = sorted(read(whole), key=lambda cell: -cell[metric])
        assert [line.split(" | ")[:2] for line in table[2:]] == [
            [f"| {c['place'][0]}", c["place"][1]] for c in expected
        ]
    assert "The speed of plain decoding varied between the cells by up to" in page


@pytest.mark.slow
def test_an_impossible_combination_is_left_out_and_a_wrong_value_refused(tiny, tmp_path, capsys):
    small = tiny | {"limit": 1, "max_new_tokens": 8}
    run_sweep(drafter="self_draft", grid=["branch_len=4,6", "gram=3,4"], out=str(tmp_path / "a"), **small)
    assert [cell["place"] for cell in read(tmp_path / "a")] == [["4", "3"], ["6", "3"], ["6", "4"]]
    assert "left out: self_draft:branch_len=4,gram=4: need" in capsys.readouterr().out
    for grid, message in [
        (["branch_len=2,6", "gram=3,4"], "branch_len=2,gram=3: need branch_len >= 3"),
        (["branchlen=4,6"], "takes branch_len, num_branches, .*not 'branchlen=4'"),
        (["gram=3,x"], "gram must be int, not 'x'"),
        (["file=nowhere"], "nowhere"),
    ]:
        with pytest.raises(ValueError, match=message):
            run_sweep(drafter="self_draft", grid=grid, out=str(tmp_path / "b"), **small)
    assert not (tmp_path / "b").exists()


def test_cells_without_a_number_are_ranked_last():
    found = [MeasuredCell(Cell((), "anpd"), {"speedup": value}, 1.0) for value in (None, 0.5, 2.0)]
    assert [one.summary["speedup"] for one in ranked(found, "speedup")] == [2.0, 0.5, None]


def test_the_noise_is_the_spread_of_the_speed_of_plain_decoding():
    assert noise([MeasuredCell(Cell((), "anpd"), {}, speed) for speed in (110.0, 100.0, 125.0)]) == pytest.approx(0.25)
