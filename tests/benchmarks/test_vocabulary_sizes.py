"""The benchmark that gives one drafter draft vocabularies of several sizes."""

import pytest
import torch

from benchmarks.ctc.vocabulary_sizes import vocabulary_sizes
from drafters import BaseShape, checkpoint
from drafters.checkpoint import DrafterConfig
from inference.verifier.base import load_base, tokenizer_hash

BASE = "checkpoints/tiny-chat"
SHAPE = BaseShape(hidden_size=192, vocab_size=1024, num_layers=8, num_heads=6, head_dim=32, intermediate_size=512)


def save_drafter(folder, factors):
    """A drafter as training starts with it."""
    base = load_base(BASE)
    options = {"trunk": {"num_frames": 4, "markov_rank": 4, "markov_factors": factors}, "loss": {"num_labels": 3}}
    config = DrafterConfig("drafters.CTC", options, SHAPE, BASE, tokenizer_hash(base.tokenizer))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drafter = config.build()
        drafter.initialise(base.base_weights)
    checkpoint.save(folder, drafter, config)
    return str(folder)


@pytest.mark.slow
def test_a_draft_vocabulary_of_all_tokens_changes_nothing_and_a_small_one_does(tmp_path):
    drafter, out = save_drafter(tmp_path / "ctc", "base"), tmp_path / "out.md"
    vocabulary_sizes(drafter, [1024, 4], ["embedded:40"], limit=1, max_new_tokens=24, budgets=[4, 12], out=str(out))
    lines = [line for line in out.read_text().splitlines() if line[:1] == "|"]
    headings, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    assert headings == ["draft vocabulary", "4 nodes", "12 nodes"]
    assert [row[0] for row in rows] == ["1,024", "1,024", "4"]
    whole, all_tokens, few = ([float(cell) for cell in row[1:]] for row in rows)
    assert all_tokens == whole and few != whole
    assert min(whole) > 1, "some drafts are accepted"


def test_a_bias_of_tables_of_its_own_is_refused(tmp_path):
    with pytest.raises(ValueError, match="markov_factors: base"):
        vocabulary_sizes(save_drafter(tmp_path / "ctc", "own"))
