"""Each family of bases is either exact through a draft tree or refused with a reason, as `docs/bases.md` says."""

import re
from pathlib import Path

import pytest
import torch

from inference.generation import generate

PAGE = Path(__file__).parents[3] / "docs" / "bases.md"
TABLE = re.findall(r"^\| ([^|]+?) \|[^|]*\| ([^|]+?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)[1:]
ROWS = {family: verdict for families, verdict in TABLE for family in families.split("; ")}
LENGTH = 24


def test_the_page_lists_the_families_that_are_tested(families):
    assert sorted(ROWS) == sorted(families) and len(ROWS) >= 35


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # GPTBigCode before transformers 5.23
@pytest.mark.parametrize("label", ROWS)
def test_a_family_is_exact_through_a_draft_tree_or_refused(make_model, toy_tokenizer, label):
    model = make_model(label)
    prompts = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(1))
    arguments = {"drafter": "token_recycling", "tokenizer": toy_tokenizer, "max_new_tokens": LENGTH, "eos": []}
    if ROWS[label] != "exact":
        with pytest.raises(ValueError, match=re.escape(ROWS[label].removeprefix("refused: "))) as caught:
            generate(model, prompts.tolist(), **arguments)
        assert "\n" not in str(caught.value) and ROWS[label].startswith("refused: ")
        return
    # In transformers 5.17, Phi-3's `generate` forgets the text before the border if it has a cache.
    limits = {"max_new_tokens": LENGTH, "do_sample": False, "use_cache": label != "Phi-3, longrope scaling"}
    expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), **limits)[:, 6:]
    written = generate(model, prompts.tolist(), **arguments)
    assert [one.token_ids for one in written] == expected.tolist()
    steps = [step for one in written for step in one.steps]
    assert sum(step.accepted for step in steps) > 5 and expected.unique().numel() > 5
