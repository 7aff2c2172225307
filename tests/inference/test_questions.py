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


def test_a_random_sample_depends_on_its_seed_alone_and_takes_every_row_as_often(file):
    def sample(rows):
        return [each.question_id for each in QuestionOptions([f"mt_bench={file}"], rows=rows).load()["mt_bench"]]

    samples = [sample(f"random:5:{seed}") for seed in range(300)]
    assert samples[:9] == [sample(f"random:5:{seed}") for seed in range(9)] and samples[0] == sample("random:5")
    assert all(len(set(each)) == 5 and each == sorted(each) for each in samples)
    assert all(90 < sum(row in each for each in samples) < 160 for row in range(3, 15))  # 125 are expected
    assert sample("random:99") == list(range(3, 15))


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
        ({"rows": "random:5:a"}, "or random:COUNT"),
        ({"rows": "random:0"}, "--rows random:0 selects none of the 40 questions of embedded"),
        ({"rows": "9000:"}, "--rows 9000: selects none of the 40 questions of embedded"),
        ({"benchmark": ["nonsense"]}, "nonsense"),
    ],
)
def test_mistakes_are_found_before_a_base_is_loaded(options, said):
    with pytest.raises(ValueError, match=said):
        QuestionOptions(**options).load()
