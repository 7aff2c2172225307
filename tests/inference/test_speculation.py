"""With speculation, transformers' ``generate`` returns what it returns without."""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList, TextIteratorStreamer
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from drafters import ANPD
from inference import Speculation, drafter_specs, speculate
from inference.verifier.layers import cache_argument
from inference.verifier.sampling import KeyedSampler
from inference.verify import generate_reference
from tests.conftest import refusal

PROMPT = torch.tensor([[3, 4, 5, 3, 4]])


def both(base, ids=PROMPT, drafter="anpd", **arguments):
    """The results of generate without and with speculation."""
    expected = base.model.generate(ids, **arguments)
    return expected, base.model.generate(ids, custom_generate=speculate, drafter=drafter, **arguments)


def assert_same(base, ids=PROMPT, drafter="anpd", **arguments):
    expected, got = both(base, ids, drafter, **arguments)
    assert got.dtype == expected.dtype and got.tolist() == expected.tolist()
    return expected.tolist()


# ---- greedy


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("drafter", ["none", "anpd", "prompt_lookup:num_draft=4", "self_speculative", ANPD(order=3)])
def test_greedy_text_is_that_of_generate(make_base, kind, drafter):
    base = make_base(kind)
    for ids in ([[3]], [[9, 8, 9, 8]], [[30, 31, 32, 33, 34, 35, 36]]):
        assert_same(base, torch.tensor(ids), drafter, max_new_tokens=30)


def test_a_correct_draft_is_accepted_and_a_step_emits_several_tokens(base, oracle):
    (expected,) = base.model.generate(PROMPT, max_new_tokens=21, eos_token_id=None).tolist()
    speculation = Speculation(oracle(expected, length=6))
    got = base.model.generate(PROMPT, max_new_tokens=21, eos_token_id=None, custom_generate=speculation)
    assert got.tolist() == [expected] and speculation.generations[0].tokens == expected[5:]
    assert [step.emitted for step in speculation.steps] == [7, 7, 7] and speculation.acceptance_length == 7


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 1},
        {"max_length": 11},
        {"max_new_tokens": 59},
        {"max_new_tokens": 30, "cache_implementation": "static"},
        {"generation_config": GenerationConfig(max_new_tokens=9, eos_token_id=7)},
        {"max_new_tokens": 12, "renormalize_logits": True},
        {"max_new_tokens": 12, "max_time": 1e-9},
        {"max_new_tokens": 12, "logits_processor": [logits_process.TypicalLogitsWarper(0.3)]},
        {"max_new_tokens": 12, "position_ids": torch.arange(5)[None]},
    ],
)
@pytest.mark.parametrize("drafter", ["none", "anpd"])
def test_limits_and_options_of_generate_are_respected(base, drafter, arguments):
    assert_same(base, PROMPT, drafter, **arguments)


@pytest.mark.parametrize("place", [0, 1, 4, 9])
def test_text_ends_with_the_first_end_of_sequence_token(base, oracle, place):
    free = base.model.generate(PROMPT, max_new_tokens=20, eos_token_id=None)[0].tolist()
    ends = [free[5 + place], 39]
    (text,) = assert_same(base, PROMPT, oracle(free), max_new_tokens=20, eos_token_id=ends)
    assert text[-1] == ends[0] and len(text) <= 6 + place


# ---- several texts


@pytest.mark.slow
def test_several_texts_are_decoded_separately_and_padded_as_by_generate(base):
    ids = torch.tensor([[0, 0, 0, 9], [3, 4, 5, 6], [0, 12, 7, 30], [0, 0, 21, 22]])
    mask = (ids != 0).long()
    arguments = {"max_new_tokens": 30, "pad_token_id": 0, "attention_mask": mask}
    texts = assert_same(base, ids, **arguments)
    assert 0 in {text[-1] for text in texts}, "one of them should end early"
    speculation = Speculation()
    base.model.generate(ids, custom_generate=speculation, **arguments)
    assert len(speculation.generations) == 4
    assert speculation.generations[1].tokens == generate_reference(base, [3, 4, 5, 6], 30, None)


# ---- stopping


class StopsAt(StoppingCriteria):
    """Stops when the text has a number of different tokens, and records what it was called with."""

    def __init__(self, different):
        self.different, self.shown = different, []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append(input_ids.tolist())
        return torch.tensor([len(set(input_ids[0].tolist())) >= self.different])


@pytest.mark.slow
@pytest.mark.parametrize("different", [4, 7, 10, 1000])
def test_stopping_criteria_see_the_text_grow_token_by_token(base, oracle, different):
    arguments = {"max_new_tokens": 25, "eos_token_id": None}
    free = base.model.generate(PROMPT, **arguments)[0].tolist()
    mine, theirs = StopsAt(different), StopsAt(different)
    expected = base.model.generate(PROMPT, stopping_criteria=[theirs], **arguments)
    speculation = Speculation(oracle(free))
    got = base.model.generate(PROMPT, stopping_criteria=[mine], custom_generate=speculation, **arguments)
    assert got.tolist() == expected.tolist() and mine.shown == theirs.shown
    assert sum(step.emitted for step in speculation.steps) == got.shape[1] - 5


# ---- streamers


class Recorder(BaseStreamer):
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append((tuple(value.shape), value.tolist()))

    def end(self):
        self.seen.append("end")


@pytest.mark.parametrize("way", [speculate, Speculation()])
def test_a_streamer_gets_the_same_values_as_from_generate(base, way):
    mine, theirs = Recorder(), Recorder()
    base.model.generate(PROMPT, max_new_tokens=20, streamer=theirs)
    base.model.generate(PROMPT, max_new_tokens=20, streamer=mine, custom_generate=way)
    assert mine.seen == theirs.seen and mine.seen[-1] == "end" and len(mine.seen) > 3


def wrapped(*args, **options):
    """What users write around `speculate`, to log or to time it."""
    return speculate(*args, **options)


class OtherGenerate:
    """A model whose ``generate`` is a wrapper itself."""

    def __init__(self, model):
        self.model = model

    def generate(self, *args, **options):
        return self.model.generate(*args, **options)


@pytest.mark.parametrize("way", [speculate, wrapped, functools.partial(wrapped, drafter="none")])
def test_a_text_streamer_ends(base, way):
    streamer = TextIteratorStreamer(base.tokenizer, skip_prompt=True, timeout=1)
    (ids,) = OtherGenerate(base.model).generate(PROMPT, max_new_tokens=20, streamer=streamer, custom_generate=way)
    assert "".join(streamer) == base.tokenizer.decode(ids[5:])


def test_a_wrapper_that_calls_from_another_thread_passes_the_streamer_on(base):
    def elsewhere(*args, **options):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(speculate, *args, **options).result()

    with pytest.raises(ValueError, match=r"its streamer is unknown: pass streamer=\.\.\. on"):
        base.model.generate(PROMPT, max_new_tokens=9, custom_generate=elsewhere)
    streamer = TextIteratorStreamer(base.tokenizer, skip_prompt=True, timeout=1)
    way = functools.partial(elsewhere, streamer=streamer)
    (ids,) = base.model.generate(PROMPT, max_new_tokens=9, streamer=streamer, custom_generate=way)
    assert "".join(streamer) == base.tokenizer.decode(ids[5:])


def test_a_speculation_object_is_refused_while_it_is_decoding(base):
    speculation = Speculation()

    class DecodesAgain(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            base.model.generate(input_ids, max_new_tokens=2, custom_generate=speculation)

    with pytest.raises(ValueError, match="already decoding: make one for each thread"):
        base.model.generate(PROMPT, max_new_tokens=5, custom_generate=speculation, stopping_criteria=[DecodesAgain()])
    base.model.generate(PROMPT, max_new_tokens=5, custom_generate=speculation)


# ---- sampling


@pytest.mark.slow
def test_manual_seed_repeats_a_sampled_text_with_any_drafter(base, oracle):
    arguments = {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.9, "max_new_tokens": 30}

    def sample(seed, drafter):
        torch.manual_seed(seed)
        return base.model.generate(PROMPT, custom_generate=speculate, drafter=drafter, **arguments)[0].tolist()

    texts = [sample(seed, "none") for seed in range(3)]
    assert [sample(seed, "anpd") for seed in range(3)] == texts
    assert [sample(seed, oracle(text)) for seed, text in enumerate(texts)] == texts
    assert len({tuple(text) for text in texts}) == 3
    several = base.model.generate(PROMPT, custom_generate=speculate, num_return_sequences=3, **arguments)
    assert len({tuple(text) for text in several.tolist()}) == 3
    torch.manual_seed(0)
    key = int(torch.randint(2**62, ()))
    assert texts[0][5:] == generate_reference(base, PROMPT[0].tolist(), 30, KeyedSampler(0.8, 12, 0.9, key))


def test_greedy_decoding_does_not_advance_torchs_generator(base):
    before = torch.get_rng_state()
    base.model.generate(PROMPT, max_new_tokens=3, custom_generate=speculate)
    assert torch.equal(torch.get_rng_state(), before)


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"position_ids": torch.arange(5)[None] + 1}, "position_ids"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1]])}, "padding on the left"),
        ({"max_new_tokens": 60}, "lower max_new_tokens"),
        ({"drafter": "ctc=nowhere"}, "tokenizer=..."),
    ],
)
def test_options_that_would_change_the_text_are_refused_in_one_line(base, arguments, said):
    options = {"custom_generate": speculate, "max_new_tokens": 5} | arguments
    assert said in refusal(base.model.generate, PROMPT, **options)


def test_an_assistant_model_a_cache_and_input_embeddings_are_refused(base, make_base):
    arguments = {"custom_generate": wrapped, "max_new_tokens": 5}
    with pytest.raises(ValueError, match="assisted generation"):
        base.model.generate(PROMPT, assistant_model=make_base(seed=1).model, **arguments)
    with pytest.raises(ValueError, match=r"a cache of your own \((cache|past_key_values)=...\)"):
        base.model.generate(PROMPT, **arguments, **cache_argument(base.model, DynamicCache()))
    with pytest.raises(ValueError, match="inputs_embeds"):
        base.model.generate(inputs_embeds=base.model.get_input_embeddings()(PROMPT), **arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"stopping_criteria": [StopsAt(7)]}, "a streamer or stopping criteria"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"logits_processor": LogitsProcessorList([LogitsProcessor()])}, "LogitsProcessor"),
        ({"prefix_allowed_tokens_fn": lambda batch, ids: [3]}, "PrefixConstrainedLogitsProcessor"),
    ],
)
def test_what_needs_the_texts_of_a_batch_side_by_side_is_refused(base, arguments, said):
    with pytest.raises(ValueError, match=f"with {said} with several texts at once: .*generate without"):
        base.model.generate(PROMPT.repeat(2, 1), custom_generate=speculate, max_new_tokens=5, **arguments)


# ---- drafters and runners that are kept


def test_a_drafter_is_built_once_per_model(base, make_base, monkeypatch):
    made = []
    monkeypatch.setattr(drafter_specs, "make", lambda *args: made.append(args) or ANPD())
    speculation = Speculation("anpd")
    for _ in range(3):
        base.model.generate(PROMPT, max_new_tokens=3, custom_generate=speculation)
    assert len(made) == 1
    make_base(seed=1).model.generate(PROMPT, max_new_tokens=3, custom_generate=speculation)
    assert len(made) == 2


@pytest.mark.slow
def test_a_drafter_folder_is_checked_against_the_given_tokenizer_or_the_models_own(chat):
    ids = chat.tokenizer("What is 3 + 4?", return_tensors="pt").input_ids
    spec = f"draft_model={chat.name}:num_draft=3"
    expected = chat.model.generate(ids, max_new_tokens=12)
    nameless = copy.deepcopy(chat.model)
    nameless.name_or_path = ""
    for model, speculation in [(chat.model, Speculation(spec)), (nameless, Speculation(spec, chat.tokenizer))]:
        assert model.generate(ids, max_new_tokens=12, custom_generate=speculation).tolist() == expected.tolist()
        assert speculation.acceptance_length == 4
