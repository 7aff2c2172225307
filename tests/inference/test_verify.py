"""``verify`` confirms that lossless drafters are lossless and reports lossy ones."""

import json

import numpy as np
import pytest
import torch

from benchmarks.pretrain import train_tokenizer
from data.conversations import load_conversations
from drafters import Drafter, DraftTree, registry
from drafters.tree import ROOT, ChildDistribution
from inference import drafter_specs
from inference import verify as module
from inference.commands import verify
from inference.options import ModelOptions, SamplingOptions, VerifyQuestions
from inference.verifier import attention, graphed, row_multiples
from inference.verifier.sampling import Greedy
from inference.verify import Comparison, compare, first_divergence, generate_reference


class Lossy(Drafter):
    """Drafts every token, so that with a wrong attention mask accepted nodes attend to their siblings."""

    def propose(self, seq, limits):
        return DraftTree(range(3, 300), [-1] * 297)


@pytest.fixture(scope="module")
def folder(make_base, tmp_path_factory):
    """A base with a chat template, on disk."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = train_tokenizer(load_conversations(["embedded:30:700"])[0], vocab_size=300)
    make_base(dtype=torch.float32, context=512, vocab=300).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class AlwaysSeven(Drafter):
    """Drafts token 7, and says truly or falsely from which distribution it was drawn.

    Args:
        claimed: Probability that it claims for token 7; the truth is 1.
    """

    samples_drafts = True

    def __init__(self, claimed=1.0):
        self.claimed = claimed

    def propose(self, seq, limits):
        probs = torch.full((300,), (1 - self.claimed) / 299)
        probs[7] = self.claimed
        return DraftTree([7], [ROOT], distributions=(ChildDistribution(ROOT, probs, (0,)),))


@pytest.mark.slow
@pytest.mark.parametrize(("claimed", "is_exact"), [(1.0, True), (1e-6, False)])
def test_the_distribution_decides_about_drafters_that_sample_their_drafts(
    folder, capsys, monkeypatch, claimed, is_exact
):
    make = lambda: AlwaysSeven(claimed)  # noqa: E731
    monkeypatch.setitem(registry._REGISTRATIONS, "seven", registry.Registration("seven", make))
    prompts, sampling = VerifyQuestions(limit=1, max_new_tokens=8), SamplingOptions(3.0, seed=1)
    model = ModelOptions(folder)
    arguments = model, prompts, sampling, ["seven", "anpd"], 60, 2
    if is_exact:
        verify(*arguments)
    else:
        with pytest.raises(SystemExit) as caught:
            verify(*arguments)
        assert caught.value.code == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert ("Nothing is lost" in printed) == is_exact
    assert "seven samples its drafts: its texts are others under the same seed." in printed
    found = "no difference from the base's distribution" if is_exact else "another distribution than the base's"
    assert f"seven: {found} (chi-squared" in printed
    assert "anpd: no difference from the base's distribution" in printed
    assert printed.count("The test errs in 1 % of runs; ") == 2


def compared(base, spec, prompts, max_new_tokens, sampler):
    expected = [generate_reference(base, prompt, max_new_tokens, sampler) for prompt in prompts]
    runner = graphed.make_runner(base)
    capped = [(prompt, max_new_tokens) for prompt in prompts]
    return compare(drafter_specs.make_session(spec, runner, sampler), capped, expected)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_verify_reports_that_drafters_are_lossless(folder, capsys, temperature):
    drafters = ["none", "anpd:order=3", "prompt_lookup"]
    prompts = VerifyQuestions(limit=3, max_new_tokens=16)
    verify(ModelOptions(folder), prompts, SamplingOptions(temperature), drafters, texts=0)
    printed = capsys.readouterr().out
    assert "Nothing is lost" in printed
    assert printed.count("3/3") == 3
    for name in ("none", "anpd:order=3", "prompt_lookup"):
        assert name in printed


@pytest.mark.slow
def test_verify_fails_for_a_lossy_drafter(folder, capsys, monkeypatch):
    monkeypatch.setitem(registry._REGISTRATIONS, "lossy", registry.Registration("lossy", Lossy))
    everything = lambda pending, parents, dtype, device: torch.zeros(2 * [pending + len(parents)], dtype=dtype)  # noqa: E731
    monkeypatch.setattr(attention, "kept_mask", everything)
    monkeypatch.setattr(attention, "causal_tree_mask", everything)
    monkeypatch.setattr(graphed, "check_once", lambda *_: None)  # which refuses such a runner
    model = ModelOptions(folder)
    with pytest.raises(SystemExit) as caught:
        prompts = VerifyQuestions(limit=3, max_new_tokens=24)
        verify(model, prompts, SamplingOptions(), ["none", "lossy"])
    assert caught.value.code == 1
    printed = capsys.readouterr().out
    assert "Nothing is lost" not in printed
    assert "differs from token" in printed
    assert "logit gap" in printed


@pytest.mark.slow
def test_verify_compares_logits_bit_for_bit(capsys, monkeypatch):
    prompts, drafters = VerifyQuestions(limit=3, max_new_tokens=24), ["anpd:order=3", "token_recycling"]
    model = ModelOptions(dtype="bfloat16")
    verify(model, prompts, SamplingOptions(), drafters)
    printed = " ".join(capsys.readouterr().out.split())
    assert "bit-identical rows: yes, fed in multiples of" in printed and "Nothing is lost" in printed
    assert "of the base's 3 answers" in printed and printed.count("3/3 │ 3/3") == 2
    monkeypatch.setattr(DraftTree, "ancestor_mask", lambda tree: np.tri(len(tree), dtype=bool))
    monkeypatch.setattr(graphed, "check_once", lambda *_: None)  # which refuses such a runner
    monkeypatch.setattr(row_multiples, "_rows_agree", lambda *_: True)
    with pytest.raises(SystemExit):
        verify(model, prompts, SamplingOptions(), ["token_recycling"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "differs from token" in printed and "Nothing is lost" not in printed


@pytest.mark.parametrize(
    ("drafters", "words", "said"),
    [(["none", "anpd:order=1"], 1, "order must be at least 2"), (["none"], 600, "shorten the prompts")],
)
def test_drafters_and_prompts_are_checked_before_anything_is_decoded(
    folder, tmp_path, monkeypatch, drafters, words, said
):
    questions = tmp_path / "questions.jsonl"
    rows = [{"question_id": 1, "category": "toy", "turns": ["hello " * words]}]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(module, "generate_reference", lambda *arguments: pytest.fail("the base was asked"))
    with pytest.raises(ValueError, match=said):
        prompts = VerifyQuestions([f"embedded={questions}"])
        verify(ModelOptions(folder), prompts, SamplingOptions(), drafters)


@pytest.mark.slow
def test_compare_counts_identical_texts_and_the_acceptance_length(make_base, oracle, monkeypatch):
    base, prompt = make_base(seed=5), [5, 6, 7]
    written = generate_reference(base, prompt, 20, Greedy())
    assert len(written) == 20
    make = lambda: oracle([*prompt, *written], length=2)  # noqa: E731
    monkeypatch.setitem(registry._REGISTRATIONS, "oracle", registry.Registration("oracle", make))
    # the prefill emits three tokens, then five steps three each, and the last two of three
    assert compared(base, "oracle", [prompt], 20, Greedy()) == Comparison(1, 17 / 6, [])
    assert compared(base, "none", [prompt], 20, Greedy()) == Comparison(1, 1.0, [])


def test_the_first_divergence_is_the_first_different_token(base):
    prompt, expected = [5, 6], [10, 11, 12, 13]
    logits = base.model(torch.tensor([[5, 6, 10, 11]])).logits[0, -1]
    found = first_divergence(base, 3, prompt, expected, [10, 11, 20, 13])
    assert (found.prompt, found.position, found.base_token, found.drafted_token) == (3, 2, 12, 20)
    assert found.logit_gap == pytest.approx((logits[12] - logits[20]).item(), abs=1e-5)


@pytest.mark.parametrize(("expected", "got", "tokens"), [([10, 11], [10], (11, 2)), ([10], [10, 11], (2, 11))])
def test_a_text_that_ends_early_diverges_at_its_end_token(base, expected, got, tokens):
    found = first_divergence(base, 0, [5, 6], expected, got)
    assert (found.position, found.base_token, found.drafted_token) == (1, *tokens)


@pytest.mark.slow
def test_the_models_own_generation_settings_do_not_count_as_losses(make_base, monkeypatch):
    """A chat model may have penalties in generation_config.json; the base's greedy text ignores them."""
    base = make_base(seed=5)
    monkeypatch.setattr(base.model.generation_config, "repetition_penalty", 1.8)
    assert compared(base, "anpd", [[5, 6], [9, 8, 7], [3]], 20, Greedy()).num_identical == 3


def test_an_end_token_defined_only_by_the_tokenizer_ends_both_texts(make_base, monkeypatch):
    base = make_base()
    monkeypatch.setattr(base.model.generation_config, "eos_token_id", None)
    assert generate_reference(base, [5, 6, 7], 30, Greedy())[-1] == 2
    assert compared(base, "anpd", [[5, 6, 7]], 30, Greedy()).num_identical == 1
