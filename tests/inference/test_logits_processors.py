"""Logits processors that read the text: with speculation, ``generate`` returns what it returns without."""

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria

from drafters import NoDrafter
from inference import Speculation, generate, speculate, stream

PROMPTS = [torch.tensor([[3 + i, 4 + (5 * i) % 31, 9, 3 + i, 4 + (5 * i) % 31][i % 3 :]]) for i in range(20)]
NUM_TOKENS = 10


class Counting(LogitsProcessor):
    """Keeps a state and writes to its input: it bans a token that depends on the number of calls so far."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        scores[:, 7 * len(self.seen) % 40] = -torch.inf
        return scores


def after_last(batch, text):
    """Allows four tokens that depend on the last one."""
    return [int(text[-1] * factor % 40) for factor in (3, 7, 11, 13)]


SETTINGS = {
    "penalties": {"repetition_penalty": 1.5, "encoder_repetition_penalty": 1.4},
    "ngrams": {"no_repeat_ngram_size": 2, "min_new_tokens": 7, "bad_words_ids": [[5], [7, 8], [9, 3]]},
    "prefix": {"prefix_allowed_tokens_fn": after_last, "forced_eos_token_id": 2},
    "guidance": {"guidance_scale": 1.5, "sequence_bias": [[[3, 4], 5.0]], "renormalize_logits": True},
}
OF_A_BATCH = [
    SETTINGS["penalties"],
    SETTINGS["ngrams"],
    {"min_length": 9, "repetition_penalty": 1.2, "exponential_decay_length_penalty": (3, 1.2)},
]


def with_and_without(base, prompt, adversary, seed=0, **arguments):
    """The results of generate without a drafter and with a draft tree that holds the text among wrong tokens."""
    expected = base.model.generate(prompt, max_new_tokens=NUM_TOKENS, **arguments)
    speculation = Speculation(adversary(getattr(expected, "sequences", expected)[0].tolist(), seed))
    got = base.model.generate(prompt, max_new_tokens=NUM_TOKENS, custom_generate=speculation, **arguments)
    return expected, got, sum(step.accepted for step in speculation.steps)


# ---- greedy


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_greedy_text_through_a_tree_is_that_of_generate_for_twenty_prompts(base, adversary, setting):
    num_accepted = num_changed = 0
    for seed, prompt in enumerate(PROMPTS):
        expected, got, accepted = with_and_without(base, prompt, adversary, seed, **setting)
        assert got.tolist() == expected.tolist()
        num_accepted += accepted
        num_changed += seed < 5 and got.tolist() != base.model.generate(prompt, max_new_tokens=NUM_TOKENS).tolist()
    assert num_accepted > 20 and num_changed > 0


@pytest.mark.slow
def test_a_processor_with_a_state_is_called_as_by_generate(base, adversary):
    for seed, prompt in enumerate(PROMPTS[:5]):
        mine, theirs = Counting(), Counting()
        expected = base.model.generate(prompt, max_new_tokens=NUM_TOKENS, logits_processor=[theirs])
        way = Speculation(adversary(expected[0].tolist(), seed))
        got = base.model.generate(prompt, max_new_tokens=NUM_TOKENS, logits_processor=[mine], custom_generate=way)
        assert got.tolist() == expected.tolist() and mine.seen == theirs.seen


@pytest.mark.slow
@pytest.mark.parametrize("setting", OF_A_BATCH, ids=["penalties", "ngrams", "lengths"])
def test_several_padded_texts_are_processed_with_their_padding(base, setting):
    ids = torch.tensor([[0, 0, 0, 9], [3, 4, 5, 6], [0, 12, 7, 30]])
    arguments = {"max_new_tokens": NUM_TOKENS, "pad_token_id": 0, "attention_mask": (ids != 0).long(), **setting}
    expected = base.model.generate(ids, **arguments)
    assert base.model.generate(ids, custom_generate=speculate, **arguments).tolist() == expected.tolist()


# ---- sampling


@pytest.mark.slow
def test_sampled_text_through_a_tree_is_the_one_without_and_its_scores_are_those_of_generate(base, adversary):
    """Scores are compared along the sampled text, which transformers is forced to write."""
    setting = {"do_sample": True, "temperature": 1.3, "top_k": 12, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    setting |= {"max_new_tokens": NUM_TOKENS, "return_dict_in_generate": True, "output_scores": True}
    num_accepted = 0
    for seed, prompt in enumerate(PROMPTS[:8]):

        def sample(drafter, prompt=prompt, seed=seed):
            torch.manual_seed(seed)
            speculation = Speculation(drafter)
            return base.model.generate(prompt, custom_generate=speculation, **setting), speculation.steps

        alone, _ = sample(NoDrafter())
        (text,) = alone.sequences.tolist()
        through_tree, steps = sample(adversary(text, seed))
        num_accepted += sum(step.accepted for step in steps)
        assert through_tree.sequences.tolist() == [text]
        for num_known, mine, other in zip(range(prompt.shape[1], 64), alone.scores, through_tree.scores, strict=False):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
            known = torch.tensor([text[:num_known]])
            (theirs,) = base.model.generate(known, **setting | {"max_new_tokens": 1}).scores
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    assert num_accepted > 8


# ---- scores


class StopsWhenSure(StoppingCriteria):
    """Stops at a token with a score above a threshold, and records what it gets."""

    def __init__(self, threshold):
        self.threshold, self.shown = threshold, []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append(None if scores is None else torch.cat(scores).max(-1).values)
        return torch.tensor([scores is not None and scores[-1].max().item() > self.threshold])


@pytest.mark.parametrize("place", [0, 3, 9])
def test_scores_are_returned_and_given_to_criteria_as_by_generate(base, adversary, place):
    arguments = {"repetition_penalty": 1.3, "output_scores": True, "output_logits": True, "eos_token_id": None}
    arguments |= {"max_new_tokens": NUM_TOKENS, "return_dict_in_generate": True}
    free = base.model.generate(PROMPTS[1], **arguments)
    threshold = torch.cat(free.scores).max(-1).values.sort().values[-1 - place].item() - 1e-3
    mine, theirs = StopsWhenSure(threshold), StopsWhenSure(threshold)
    expected = base.model.generate(PROMPTS[1], stopping_criteria=[theirs], **arguments)
    way = Speculation(adversary(free.sequences[0].tolist()))
    got = base.model.generate(PROMPTS[1], stopping_criteria=[mine], custom_generate=way, **arguments)
    assert got.sequences.tolist() == expected.sequences.tolist()
    for ours, other in ((got.scores, expected.scores), (got.logits, expected.logits), (mine.shown, theirs.shown)):
        assert len(ours) == len(other) == got.sequences.shape[1] - PROMPTS[1].shape[1]
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-5)
    assert not got.scores[0].is_inference()
    del arguments["output_scores"], arguments["output_logits"]
    base.model.generate(
        PROMPTS[1], stopping_criteria=[mine := StopsWhenSure(0)], custom_generate=speculate, **arguments
    )
    assert mine.shown == [None] * NUM_TOKENS, "scores that are not returned are not given to criteria either"


# ---- our own generate and stream


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_generate_and_stream_take_processors_too(base, adversary, temperature):
    prompt = PROMPTS[1][0].tolist()

    def tokens(drafter, calls):
        options = {"max_new_tokens": 20, "temperature": temperature, "logits_processor": [calls], "eos": []}
        (result,) = generate(base, prompt, drafter, **options)
        calls.seen.clear()
        assert "".join(stream(base, prompt, drafter, **options)) == result.text
        return result.token_ids

    alone, through_tree = Counting(), Counting()
    text = tokens("none", alone)
    assert tokens(adversary([*prompt, *text]), through_tree) == text
    assert alone.seen == through_tree.seen == [[[*prompt, *text[:length]]] for length in range(20)]
