"""The two drafters of docs/write-a-drafter.md are complete: they decode losslessly, and the learned one trains."""

import re
import sys
from pathlib import Path

import pytest
import torch

from drafters import DraftTree, Limits
from inference import generate, load_base
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from tests.conftest import toy_base
from tests.docs.conftest import load_script
from train.cli import run_drafters, run_lightning

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "write-a-drafter.md").read_text(encoding="utf-8")


def linear_heads(base):
    torch.manual_seed(0)
    drafter = load_script("examples/linear_heads").LinearHeads(base.shape).to(base.model.dtype)
    drafter.attach_base_weights(base.base_weights)
    return drafter


def repeat_after(base):
    return load_script("examples/repeat_after").RepeatAfter()


def test_each_example_is_under_sixty_lines_and_included_in_the_page():
    files = sorted(EXAMPLES.glob("*.py"))
    assert [file.stem for file in files] == ["linear_heads", "repeat_after"]
    for file in files:
        assert len(file.read_text(encoding="utf-8").splitlines()) < 60
        assert f"--8<--\ndocs/examples/{file.name}\n--8<--" in PAGE


@pytest.mark.slow
@pytest.mark.parametrize("make", [linear_heads, repeat_after], ids=lambda make: make.__name__)
@pytest.mark.parametrize("seed", range(4))
def test_each_example_changes_no_token_of_the_greedy_text(make, seed):
    base = toy_base(seed=seed)
    prompt = [5, 6, 7, 5, 6]
    expected = base.model.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :].tolist()
    assert Session(Runner(base), make(base)).run(prompt, 40).tokens == expected


def test_the_training_free_example_drafts_both_successors_and_forgets_rewound_tokens():
    drafter = load_script("examples/repeat_after").RepeatAfter(num_draft=2)
    drafter.begin([1, 2, 3, 1, 4, 1])
    tree = drafter.propose([1, 2, 3, 1, 4, 1], Limits(max_depth=8))
    assert tree == DraftTree.from_paths([[4, 1], [2, 3]])
    drafter.propose([1, 2, 3, 1, 4, 1, 9, 1], Limits(max_depth=8))
    drafter.rewind(6)
    assert drafter.propose([1, 2, 3, 1, 4, 1], Limits(max_depth=8)) == tree


@pytest.mark.slow
def test_the_learned_example_trains_with_the_command_of_the_page_and_decodes_from_its_folder(monkeypatch, tmp_path):
    (line,) = [line for line in PAGE.splitlines() if line.startswith("lightning fit") and "linear_heads" in line]
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["lightning"])
    run = ["--trainer.default_root_dir", str(tmp_path / "run"), "--data.cache_dir", str(tmp_path / "cache")]
    run_lightning([*line.partition("  #")[0].split()[1:], *run])
    run_drafters(["export", str(tmp_path / "run" / "checkpoints" / "best.ckpt"), str(tmp_path / "folder")])
    base = load_base("checkpoints/tiny-chat")
    plain, drafted = (
        generate(base, "Name a colour.", drafter=drafter, max_new_tokens=16)[0]
        for drafter in ("none", f"linear_heads={tmp_path / 'folder'}")
    )
    assert drafted.token_ids == plain.token_ids and drafted.steps[-1].draft_forwards == 1


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md", "docs/write-a-drafter.md"])
def test_the_python_examples_of_a_page_print_answers_in_plain_words(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, flags=re.S) if "import generate" in block]
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})
    printed = capsys.readouterr().out
    assert printed.count("The compass is a small tool that shows directions.") == block.count("print(")
    assert "tensor" not in printed and "[" not in printed
