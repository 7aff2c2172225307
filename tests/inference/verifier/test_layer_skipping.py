"""Self-speculative decoding: the drafts are right, and neither cache nor modules keep anything of them."""

import copy
import json
import re

import pytest
import torch

from drafters import DraftTree, Limits, RequiredOutputs, SelfSpeculative
from inference import drafter_specs
from inference.verifier.base import Base
from inference.verifier.layer_skipping import (
    LayerSkippingSession,
    default_skips,
    read_skips,
    sublayers,
    without_sublayers,
)
from inference.verifier.layers import cache_argument
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler
from inference.verifier.session import Session
from tests.conftest import fresh_cache
from tests.inference.verifier.oracles import assert_cache_is_fresh, prompt_of

SETS = {  # of a base of three layers
    "nothing": ((), ()),
    "one layer": ((1,), (1,)),
    "the first attention and the last MLP": ((0,), (2,)),
    "the first layer": ((0,), (0,)),
    "every attention": ((0, 1, 2), ()),
    "everything": ((0, 1, 2), (0, 1, 2)),
}
TOLERANCE = {"sdpa": 1e-9, "eager": 1e-4}  # eager takes its softmax in float32
each_base = pytest.mark.parametrize(
    ("kind", "attention"), [("llama", "sdpa"), ("qwen2", "eager"), ("gpt2", "sdpa"), ("gpt2", "eager")]
)
each_set = pytest.mark.parametrize("skips", SETS.values(), ids=SETS)


def session_of(base, skips, sampler=None, inner_sampler=None, **arguments):
    runner = Runner(base)
    drafter = SelfSpeculative(LayerSkippingSession(runner, *skips, inner_sampler), **{"threshold": 0.0} | arguments)
    return Session(runner, drafter, sampler)


def zeroed(base, skips):
    """The same base with the output weights of these sublayers set to zero, which must compute the same as skipping."""
    model = copy.deepcopy(base.model)
    for layers, modules in zip(skips, sublayers(model.base_model), strict=True):
        for layer in layers:
            for name in ("o_proj", "down_proj", "c_proj"):
                if hasattr(modules[layer], name):
                    for weight in getattr(modules[layer], name).parameters():
                        weight.zero_()
    return model


@torch.inference_mode()
def drafted_by(base, skips, seq, cached, num_tokens, eos=frozenset(), threshold=0.0):
    """The draft by plain forwards: the prefix by the base, the rest by the zeroed base on the prefix's cache."""
    model, tokens = zeroed(base, skips), []
    while len(tokens) < num_tokens:
        cache = cache_argument(model, fresh_cache(base, seq[:cached]))
        distribution = model(torch.tensor([[*seq[cached:], *tokens]]), **cache).logits[0, -1].softmax(-1)
        tokens.append(distribution.argmax().item())
        if tokens[-1] in eos or distribution.max() < threshold:
            break
    return tokens


def primed(base, prompt, cached):
    """A runner that has committed the first tokens of the prompt."""
    runner = Runner(base)
    runner.reset(len(prompt) + 64)
    if cached:
        runner.forward(prompt[:cached], DraftTree(), RequiredOutputs())
        runner.commit([])
    return runner


# ---- the draft


@pytest.mark.slow
@each_base
@each_set
def test_a_draft_is_the_text_of_the_base_with_zeroed_sublayers_on_the_bases_cache(make_base, kind, attention, skips):
    base, prompt = make_base(kind, attention, layers=3), prompt_of(9)
    for cached in (5, 8):  # four tokens pending, and the root alone
        runner = primed(base, prompt, cached)
        session = LayerSkippingSession(runner, *skips)
        written = session.write(prompt, 6)
        assert written.tokens == drafted_by(base, skips, prompt, cached, 6) and not written.distributions
        assert session.forwards == 6
        assert session.write(prompt, 6) == written
        assert_cache_is_fresh(runner, prompt[:cached], TOLERANCE[attention])


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.05, 0.4, 1.1])
def test_a_draft_ends_after_the_first_token_below_the_threshold(make_base, threshold):
    base, skips = make_base(layers=3), SETS["one layer"]
    lengths = set()
    for length in range(2, 12):
        prompt = prompt_of(length)
        written = LayerSkippingSession(primed(base, prompt, length - 1), *skips).write(prompt, 8, threshold=threshold)
        assert written.tokens == drafted_by(base, skips, prompt, length - 1, 8, threshold=threshold)
        lengths.add(len(written.tokens))
    assert min(lengths) >= 1 and (threshold != 0.4 or len(lengths) > 1)
    assert threshold < 1 or lengths == {1}


@pytest.mark.slow
def test_a_draft_ends_after_an_end_of_sequence_token_and_where_the_context_ends(make_base):
    base, skips, prompt = make_base(layers=3, context=24), SETS["one layer"], prompt_of(9)
    session = LayerSkippingSession(primed(base, prompt, 8), *skips)
    whole = session.write(prompt, 100).tokens
    assert len(prompt) + len(whole) == 24
    for token in set(whole):
        cut = session.write(prompt, 100, frozenset({token})).tokens
        assert cut == whole[: whole.index(token) + 1]
    assert session.write(prompt, 0).tokens == []


def test_drawn_drafts_come_with_the_distributions_they_were_drawn_from(make_base):
    base, skips, prompt = make_base(layers=3), SETS["one layer"], prompt_of(9)
    sampler = KeyedSampler(0.7, top_k=9, seed=3)
    written = LayerSkippingSession(primed(base, prompt, 8), *skips, sampler).write(prompt, 5)
    model = zeroed(base, skips)
    assert len(written.distributions) == len(written.tokens) == 5
    for count, distribution in enumerate(written.distributions):
        cache = cache_argument(model, fresh_cache(base, prompt[:8]))
        logits = model(torch.tensor([[*prompt[8:], *written.tokens[:count]]]), **cache).logits[0, -1:]
        torch.testing.assert_close(distribution, sampler.probabilities(logits)[0], rtol=0, atol=1e-6)
        assert distribution[written.tokens[count]] > 0
    again = KeyedSampler(0.7, top_k=9, seed=3)
    assert LayerSkippingSession(primed(base, prompt, 8), *skips, again).write(prompt, 5).tokens == written.tokens


# ---- what a draft leaves behind


def forwards_of(model):
    return {name: vars(module).get("forward") for name, module in model.named_modules()}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_skipped_sublayers_do_not_run_in_the_view_and_the_model_stays_as_it_is(make_base, kind):
    model, ran = make_base(kind, layers=3).model.base_model, []
    attentions, mlps = sublayers(model)
    before = forwards_of(model)

    def note(module, name):  # inside the sublayer: a hook on itself would fire though it is covered
        inner = next(child for child in module.modules() if not list(child.children()))
        return inner.register_forward_hook(lambda *_: ran.append(name))

    hooks = [note(module, ("attention", layer)) for layer, module in enumerate(attentions)]
    hooks += [note(module, ("mlp", layer)) for layer, module in enumerate(mlps)]
    try:
        view = without_sublayers(model, (0, 2), (1,))
        view(torch.tensor([[5, 6]]))
        assert sorted(ran) == [("attention", 1), ("mlp", 0), ("mlp", 2)]
        assert {id(weight) for weight in view.parameters()} < {id(weight) for weight in model.parameters()}
        assert forwards_of(model) == before == dict.fromkeys(before)
        ran.clear()
        model(torch.tensor([[5, 6]]))
        assert len(ran) == 6
    finally:
        for hook in hooks:
            hook.remove()


def test_sublayers_are_skipped_though_a_forward_was_set_on_the_modules(make_base):
    """As accelerate does for quantised and offloaded models."""
    model, text, calls = make_base("gpt2", layers=3, seed=5).model.base_model, torch.tensor([[5, 6]]), []
    expected = without_sublayers(model, (), (1,))(text).last_hidden_state
    wrapped = model, model.h[1], model.h[1].mlp
    for module in wrapped:
        module.forward = lambda *args, whole=module.forward, **options: calls.append(1) or whole(*args, **options)
    own = [vars(module)["forward"] for module in wrapped]
    try:
        assert torch.equal(without_sublayers(model, (), (1,))(text).last_hidden_state, expected)
        assert not calls and [vars(module)["forward"] for module in wrapped] == own
        assert not torch.equal(model(text).last_hidden_state, expected) and len(calls) == 3
    finally:
        for module in wrapped:
            del module.forward


# ---- the text


def test_a_draft_drawn_from_the_bases_own_distribution_is_always_accepted(make_base):
    base = make_base(layers=3)
    samplers = KeyedSampler(0.9, seed=1), KeyedSampler(0.9, seed=2)
    result = session_of(base, SETS["nothing"], *samplers, num_draft=5).run(prompt_of(3), 31)
    assert all(step.accepted == step.fed_candidates == 5 for step in result.steps[1:])


# ---- skip sets by name, by file, by default


def test_by_default_every_second_layer_is_skipped_and_never_the_first_or_last():
    assert [default_skips(count)[0] for count in (1, 2, 3, 4, 6, 7)] == [(), (), (1,), (1,), (1, 3), (1, 3, 5)]
    assert all(attention == mlp for attention, mlp in map(default_skips, range(1, 9)))


def test_the_named_drafter_uses_the_runner_of_the_base(make_base, tmp_path):
    base = make_base(layers=3)
    runner, file = Runner(base), tmp_path / "skips.json"
    file.write_text(json.dumps({"attention": [0, 2], "mlp": [1]}))
    default = drafter_specs.make("self_speculative", runner)
    named = drafter_specs.make(
        f"self_speculative={file}:num_draft=3,threshold=0.5,adaptive=false,temperature=0.7,seed=3", runner
    )
    assert default.inner.runner is named.inner.runner is runner
    assert (default.inner.attention, default.inner.mlp, default.inner.sampler) == ((1,), (1,), None)
    assert (named.inner.attention, named.inner.mlp) == ((0, 2), (1,))
    assert (named.num_draft, named.threshold, named.adaptive) == (3, 0.5, False)
    assert isinstance(named.inner.sampler, KeyedSampler) and named.inner.sampler.seed == 3
    assert default.propose([5], Limits(max_depth=9)) == DraftTree([], range(-1, -1))


FOR_ANOTHER_BASE = '{"attention": [], "mlp": [], "num_layers": 5, "base": "big"}'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        *((text, 'give a skip set {"attention"') for text in ("[]", "3", '{"attention": [1]}', '{"attention": 1}')),
        (FOR_ANOTHER_BASE, "is for big with 5 layers, and this base has 3"),
    ],
)
def test_a_file_without_a_skip_set_for_this_base_is_refused(tmp_path, text, error):
    (tmp_path / "skips.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(error)) as refusal:
        read_skips(tmp_path / "skips.json", 3)
    assert "skips.json" in str(refusal.value)


@pytest.mark.parametrize("layers", [(3,), (-1,), (1, 1), ("1",), (True,)])
def test_layers_that_do_not_exist_or_are_named_twice_are_refused(make_base, layers):
    runner = Runner(make_base(layers=3))
    for skips in ((layers, ()), ((), layers)):
        with pytest.raises(ValueError, match="name layers 0 to 2 of toy-llama, none twice"):
            LayerSkippingSession(runner, *skips)


def test_a_model_with_another_layout_is_refused(toy_tokenizer):
    from transformers import AutoModelForCausalLM, OPTConfig

    config = OPTConfig(
        hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=40, word_embed_proj_dim=16
    )
    base = Base("other", AutoModelForCausalLM.from_config(config).eval(), toy_tokenizer)
    with pytest.raises(ValueError, match="no sublayers of opt models can be left out"):
        LayerSkippingSession(Runner(base))
