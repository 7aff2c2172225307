"""Which rows of which benchmarks a command decodes."""

import json

import pytest

from inference.questions import QuestionOptions


@pytest.fixture
def file(tmp_path):
    rows = [{"question_id": number, "category": "a", "turns": [f"w{number}"]} for number in range(3, 15)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "q.jsonl"


@pytest.mark.parametrize("rows", [":", "2:5", "::4", "-3:", "5:2:-1"])
def test_rows_are_selected_as_python_slices_do(file, rows):
    (questions,) = QuestionOptions([f"mt_bench={file}"], rows=rows).load().values()
    expected = eval(f"list(range(3, 15))[{rows}]")
    assert [question.question_id for question in questions] == expected


def test_each_benchmark_has_its_own_file_style_and_cap(file):
    options = QuestionOptions([f"mt_bench={file}", f"file={file}", "embedded"], limit=2)
    assert options.files() == {"mt_bench": str(file), "file": str(file), "embedded": None}
    assert list(options.load()) == ["mt_bench", "file", "embedded"]
    assert options.caps()["mt_bench"] == 512 and set(QuestionOptions(max_new_tokens=7).caps().values()) == {7}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"benchmark": ["embedded", "embedded"]}, "the benchmark embedded is named twice"),
        ({"limit": 0}, "limit must be at least 1, not 0"),
        *(({"rows": wrong}, "rows must be a slice such as") for wrong in ("", "3", "a:b", "1:2:3:4", "::0", "1.5:")),
        ({"rows": "9000:"}, "--rows 9000: selects none of the 40 questions of embedded"),
        ({"benchmark": ["nonsense"]}, "nonsense"),
    ],
)
def test_mistakes_are_found_before_a_base_is_loaded(options, said):
    with pytest.raises(ValueError, match=said):
        QuestionOptions(**options).load()
