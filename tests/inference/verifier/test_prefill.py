"""Prompts read in several forwards: the outputs and texts of one forward, and no forward larger than a chunk."""

import random
from dataclasses import replace

import pytest
import torch

from drafters import CTC, EAGLE, DraftTree, NoDrafter, RequiredOutputs
from drafters.protocol import UNLIMITED
from inference.verifier import runner as runner_module
from inference.verifier.base import Base
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from tests.inference.verifier.conftest import BORDER, CONTEXT

PROMPT = [random.Random(0).randrange(3, 40) for _ in range(30)]
TREE = DraftTree([5, 6, 7, 8], [-1, -1, 0, 2])
LABELS = ["LLaMA", "Mistral, sliding window", "Ministral", "GPT-2"]


@pytest.fixture
def forwards(monkeypatch):
    """The number of tokens and the largest mask of each forward of the base."""
    seen, run = [], runner_module.run_base

    def watched(model, fed, *others):
        sizes = [mask.numel() for mask in fed.masks.values() if mask is not None]
        seen.append((fed.ids.shape[1], max(sizes, default=0)))
        return run(model, fed, *others)

    monkeypatch.setattr(runner_module, "run_base", watched)
    return seen


@pytest.mark.parametrize("label", LABELS)
def test_a_prompt_in_chunks_gives_the_outputs_of_one_forward(make_model, toy_tokenizer, forwards, label):
    base, layers = Base(label, make_model(label, torch.float64), toy_tokenizer, check=False), RequiredOutputs((0, -1))
    whole = Runner(replace(base, prefill_chunk=0))
    expected = whole.forward(PROMPT, TREE, layers)
    assert forwards.pop() == (34, 34 * 34)
    whole.commit([0, 2])
    after = whole.forward([9], TREE, layers)
    for size in (1, 4, 7, 29, 30):
        runner = Runner(replace(base, prefill_chunk=size))
        forwards.clear()
        rows = runner.forward(PROMPT, TREE, layers)
        torch.testing.assert_close(rows.logits, expected.logits)
        torch.testing.assert_close(rows.hidden, expected.hidden)
        assert len(forwards) == -(-30 // size) and max(fed for fed, _ in forwards[:-1] or [(0, 0)]) <= size
        assert max(mask for _, mask in forwards) <= (size + len(TREE)) * 34
        runner.commit([0, 2])
        torch.testing.assert_close(runner.forward([9], TREE, layers).logits, after.logits)


def test_a_prompt_behind_the_border_of_longrope_scaling_is_read_at_once(make_model, toy_tokenizer, forwards):
    """Its angles depend on where a forward ends; prompts that end before the border are read in chunks."""
    base = Base("longrope", make_model("LLaMA, longrope scaling", torch.float64), toy_tokenizer, False, 4)
    logits = Runner(base).forward(PROMPT, DraftTree(), RequiredOutputs()).logits
    torch.testing.assert_close(logits, base.model(torch.tensor([PROMPT])).logits[0, -1:])
    Runner(base).forward(PROMPT[:10], DraftTree(), RequiredOutputs())
    assert [fed for fed, _ in forwards] == [30, 4, 4, 2]


@pytest.mark.parametrize(("kind", "options"), [(CTC, {}), (CTC, {"tokens_in_context": True}), (EAGLE, {})])
def test_a_learned_drafter_observes_a_text_anew_that_is_read_again_behind_the_border(
    make_model, make_random_ctc, toy_tokenizer, kind, options
):
    base = Base("longrope", make_model("Phi-3, longrope scaling", torch.float64), toy_tokenizer, check=False)
    expected = Session(Runner(base), NoDrafter()).run(PROMPT[: BORDER - 4], 12).tokens
    drafter = make_random_ctc(base, kind, **options)
    session = Session(Runner(base), drafter)
    assert session.run(PROMPT[: BORDER - 4], 12).tokens == expected
    fresh = Session(Runner(base), make_random_ctc(base, kind, **options))
    fresh.begin(session.seq)
    for each in (session, fresh):
        each.step(CONTEXT, max_nodes=0)
    assert session.drafter.propose(session.seq, UNLIMITED) == fresh.drafter.propose(fresh.seq, UNLIMITED)
