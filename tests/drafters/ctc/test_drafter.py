"""The CTC drafter: its training computes the same function as its drafting."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from drafters import BaseWeights, Limits, TrainingBatch
from drafters.ctc.loss import CTCOutput, emit, run_recursion
from drafters.losses.anchors import AnchoredFrames
from drafters.nn import draft_cache
from tests.drafters.conftest import committed, ready

S = 20


def decode_frames(drafter, hidden, ids, anchors, base_weights, monkeypatch):
    """Return the frames and trees of every anchor as in the decoding loop, step by step with the draft cache."""
    drafter.attach_base_weights(base_weights)
    drafter.begin(ids[: anchors[0]].tolist())
    frames, trees, done, read = [], [], 0, drafter.table
    monkeypatch.setattr(drafter, "table", lambda x, *others: frames.append(x[0].clone()) or read(x, *others))
    for anchor in anchors:
        drafter.observe(committed(hidden[done:anchor]))
        done = anchor
        trees.append(drafter.propose(ids[: anchor + 1].tolist(), Limits(max_depth=100)))
    monkeypatch.undo()
    return torch.stack(frames), trees


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"root_everywhere": False},
        {"num_layers": 3},
        {"causal": True, "num_layers": 2},
        {"hidden_layers": [0, -1], "num_layers": 2},
        {"window": 4, "causal": True, "num_layers": 2},
        {"tokens_in_context": True, "hidden_layers": [0, -1], "num_layers": 2},
        {"lookup": True},
        {"lookup": True, "window": 6},
        {"lookup": True, "copy": True},
        {"llama_layer": True},
        {"llama_layer": True, "window": 4, "root_everywhere": False, "num_key_heads": 1},
    ],
)
def test_training_at_an_anchor_equals_decoding_at_that_root(make_ctc, base_weights, text, monkeypatch, arguments):
    drafter, (hidden, ids) = make_ctc(**arguments), text
    hidden = torch.cat([hidden * (i + 1) for i in range(len(drafter.required_outputs.hidden_layers))], -1)
    anchors = [1, 2, 5, 6, 11, 19]
    at = torch.tensor([anchors])
    trained = drafter(hidden[None], drafter.roots(ids[None], at), base_weights.embedding, ids[None])[0]
    decoded, trees = decode_frames(drafter, hidden, ids, anchors, base_weights, monkeypatch)
    torch.testing.assert_close(decoded, trained, rtol=1e-4, atol=1e-5)
    assert all(0 < len(tree) <= 12 for tree in trees)
    assert trees == drafter.draft_at(hidden, ids, at[0], base_weights)


def test_frames_of_a_llama_layer_are_those_of_transformers_over_the_states_and_the_frames_behind_them(
    make_ctc, base_weights, text, shape, monkeypatch
):
    """The layer runs anew for each root, over the states before it and T inputs, each with the last state in it."""
    drafter, (hidden, ids) = make_ctc(llama_layer=True), text
    sizes = {"hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size}
    config = LlamaConfig(**sizes, num_attention_heads=shape.num_heads, rms_norm_eps=shape.norm_eps)
    config._attn_implementation = "eager"
    layer, rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)
    weights = {
        name.removeprefix("trunk.layers.0."): weight
        for name, weight in drafter.trunk.state_dict(prefix="trunk.").items()
    }
    layer.load_state_dict(weights)
    anchors, expected = [1, 2, 5, 6, 11, 19], []
    for anchor in anchors:
        frames = hidden[anchor - 1] + base_weights.embedding[ids[anchor]] + drafter.frame_embedding
        states = torch.cat([hidden[:anchor], frames])[None]
        mask = torch.full((states.shape[1], states.shape[1]), -torch.inf).triu(1)[None, None]
        places = torch.arange(states.shape[1])[None]
        expected.append(layer(states, mask, position_embeddings=rotary(states, places))[0, anchor:])
    at = torch.tensor([anchors])
    trained = drafter(hidden[None], drafter.roots(ids[None], at), base_weights.embedding)[0]
    torch.testing.assert_close(trained, torch.stack(expected), rtol=1e-4, atol=1e-5)
    decoded, _ = decode_frames(drafter, hidden, ids, anchors, base_weights, monkeypatch)
    torch.testing.assert_close(decoded, torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gap", [1, 30])
@pytest.mark.parametrize("reads_tokens", [False, True])
def test_with_a_window_frames_read_only_the_last_positions_from_a_bounded_cache(
    make_ctc, base_weights, monkeypatch, gap, reads_tokens
):
    """Training and decoding both equal a drafter without a window that is given no other positions."""
    monkeypatch.setattr(draft_cache, "SLACK", 1)
    arguments, anchors = {"num_layers": 2, "tokens_in_context": reads_tokens}, list(range(1, 60, gap))
    drafter, whole = make_ctc(window=5, **arguments), make_ctc(**arguments)
    hidden, ids = torch.randn(60, 16), torch.randint(0, 23, (60,))
    at = torch.tensor([anchors])
    trained = drafter(hidden[None], drafter.roots(ids[None], at), base_weights.embedding, ids[None])[0]
    decoded, _ = decode_frames(drafter, hidden, ids, anchors, base_weights, monkeypatch)
    for index, anchor in enumerate(anchors):
        first = max(0, anchor - 5)
        window, root = torch.arange(first, anchor), whole.roots(ids[None], at[:, index, None])
        context = whole.context(hidden[None, window], window[None], ids[None, window], base_weights.embedding)
        expected = whole.frames(context, root, base_weights.embedding, None)[0, 0]
        torch.testing.assert_close(trained[index], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(decoded[index], expected, rtol=1e-4, atol=1e-5)
    assert max(keys.shape[-2] for keys, _ in drafter._cache._buffers) <= 2 * (5 + 1)


@pytest.mark.parametrize("reads_tokens", [False, True])
def test_a_rewound_window_fills_up_again(make_ctc, base_weights, reads_tokens):
    """After a long rewind nothing is left to draft from; as soon as the window is full again, drafts are the same."""
    hidden, ids = torch.randn(300, 16), torch.randint(0, 23, (300,))
    drafter = make_ctc(window=5, tokens_in_context=reads_tokens)
    drafter.attach_base_weights(base_weights)
    ready(drafter, hidden, ids, 250)
    drafter.propose(ids[:251].tolist(), Limits(9))
    drafter.rewind(251 - draft_cache.SLACK)
    at = torch.tensor([250 - draft_cache.SLACK, 199, 206])
    expected = drafter.draft_at(hidden, ids, at, base_weights)
    assert drafter.propose(ids[: at[0] + 1].tolist(), Limits(9)) == expected[0], "few positions are kept for that"
    drafter.rewind(100)
    assert len(drafter.propose(ids[:100].tolist(), Limits(9))) == 0
    drafter.observe(committed(hidden[99:199]))
    assert drafter.propose(ids[:200].tolist(), Limits(9)) == expected[1]
    drafter.observe(committed(hidden[199:206]))
    assert drafter.propose(ids[:207].tolist(), Limits(9)) == expected[2]


@pytest.mark.parametrize("arguments", [{}, {"draws": 5}], ids=["search", "drawn"])
def test_a_bias_from_the_base_trains_searches_and_draws_as_the_tables_it_folds_to(
    make_ctc, base_weights, text, arguments
):
    hidden, ids = text
    drafter = make_ctc(markov_rank=3, markov_factors="base", num_anchors=S, **arguments)
    tables = make_ctc(markov_rank=3, num_anchors=S, **arguments)
    folded = drafter.markov.folded(base_weights).state_dict()
    others = {name: weight for name, weight in drafter.state_dict().items() if not name.startswith("markov.")}
    tables.load_state_dict(others | {f"markov.{name}": weight for name, weight in folded.items()})
    batch = TrainingBatch(hidden[None], hidden[None], ids[None], ids[None].roll(-1, 1), torch.ones(1, S).bool())
    torch.testing.assert_close(drafter.loss(batch, base_weights)[0], tables.loss(batch, base_weights)[0])
    anchors = torch.arange(1, S)
    assert drafter.draft_at(hidden, ids, anchors, base_weights) == tables.draft_at(hidden, ids, anchors, base_weights)
    proposed = []
    for variant in (drafter, tables):
        variant.attach_base_weights(base_weights)
        tree = ready(variant, hidden, ids, 6).propose(ids[:7].tolist(), Limits(9, draft_seed=1))
        probs = [distribution.probs.tolist() for distribution in tree.distributions]
        proposed.append((tree.tokens, tree.parents, probs))
    assert proposed[0] == proposed[1] and len(proposed[0][0]) > 0
    assert set(drafter.state_dict()) == {*others, "markov.left", "markov.right", "markov.blank"}


def test_tokens_in_the_context_are_one_more_layer_of_normed_embeddings(make_ctc, base_weights, text, shape):
    """The reference fuses the embeddings, divided by their root mean square, as if the base had given them."""
    reading, fusing, (hidden, ids) = make_ctc(tokens_in_context=True), make_ctc(hidden_layers=[-1, 0]), text
    weights = reading.state_dict()
    gain = weights.pop("trunk.token_norm.weight").uniform_(0.5, 2)
    fusing.load_state_dict(weights)
    embedded = base_weights.embedding[ids]
    normed = embedded / (embedded.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt()
    fused, at = torch.cat([hidden, normed * gain], -1)[None], torch.tensor([[1, 7, 19]])
    expected = fusing(fused, fusing.roots(ids[None], at), base_weights.embedding)
    states = reading(hidden[None], reading.roots(ids[None], at), base_weights.embedding, ids[None])
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-6)


def test_the_context_of_a_known_text_is_read_once_for_any_number_of_chunks(make_ctc, base_weights, text, monkeypatch):
    (hidden, ids), drafter, reads = text, make_ctc(), []
    drafter.trunk.fc.register_forward_hook(lambda *_: reads.append(1))
    monkeypatch.setattr(drafter, "anchors_at_once", 2)
    drafter.draft_at(hidden, ids, torch.arange(1, S), base_weights)
    assert len(reads) == 1


def test_the_blank_logit_of_a_bfloat16_drafter_is_as_precise_as_in_its_loss(make_ctc):
    drafter, frames = make_ctc().bfloat16(), torch.randn(6, 16).bfloat16()
    head = torch.zeros(23, 16).bfloat16()
    blank = drafter.logits(frames, BaseWeights(head, head))[..., -1]
    torch.testing.assert_close(blank, frames.float() @ drafter.blank_row.float() + drafter.blank_bias.float())


def passage_at(drafter, ids, anchor):
    """The tokens that a drafter may copy at an anchor, and the number of tokens before them that match."""
    if not drafter.copies:
        return [], 0
    passages = drafter.lookup.find(ids[None], anchor.reshape(1, 1))
    return passages.tokens[0, 0].tolist(), passages.lengths[0, 0].item()


@pytest.mark.parametrize(
    "arguments", [{"markov_rank": 3}, {}, {"tree": "chain", "markov_rank": 3}, {"lookup": True, "copy": True}], ids=str
)
def test_the_nodes_of_a_drafter_have_the_probabilities_that_its_loss_raises(make_ctc, base_weights, arguments):
    drafter = make_ctc(**arguments)
    hidden, ids = torch.randn(12, 16), torch.randint(0, 3 if drafter.copies else 23, (12,))
    anchors = torch.tensor([3, 7, 11])
    trees = drafter.draft_at(hidden, ids, anchors, base_weights)
    roots = drafter.roots(ids[None], anchors[None])
    all_frames = drafter(hidden[None], roots, base_weights.embedding, ids[None])[0]
    passages, lengths = map(list, zip(*(passage_at(drafter, ids, anchor) for anchor in anchors), strict=True))
    drafts = zip(trees, anchors.tolist(), all_frames, passages, lengths, strict=True)
    for tree, anchor, frames, passage, length in drafts:
        assert len(tree) > 1
        share = 0.0
        if length:
            share = (frames.mean(0) @ drafter.lookup.copy_state + drafter.lookup.copy_bias[length - 1]).sigmoid().item()
        for node, probability in enumerate(tree.probabilities):
            labels, left, right = torch.tensor([tree.path_tokens(node)]), None, None
            if drafter.markov is not None:
                left, right = drafter.markov.factors(torch.cat([ids[anchor].reshape(1, 1), labels], 1), base_weights)
            anchored = AnchoredFrames(frames[None], labels, torch.ones_like(labels, dtype=torch.bool), left)
            emissions = emit(anchored, base_weights.head, CTCOutput(drafter.blank_row, drafter.blank_bias[0], right))
            states = run_recursion(emissions.enter, emissions.stay, emissions.blank, labels)
            is_copied = tree.path_tokens(node) == passage[: tree.depths[node]]
            expected = (1 - share) * states.prefix[0, -1].exp().item() + share * is_copied
            if not is_copied or probability != pytest.approx(share):  # what the search did not find is only copied
                assert probability == pytest.approx(expected, rel=1e-4)


def test_whether_a_chain_copies_does_not_depend_on_how_deep_it_may_be(make_ctc, base_weights):
    drafter = make_ctc(lookup=True, copy=True, tree="chain")
    hidden, ids = torch.randn(40, 16), torch.randint(0, 3, (40,))
    inputs = hidden, ids, torch.arange(1, 39), base_weights
    for depth in (1, 2, 3):
        chains = zip(drafter.draft_at(*inputs, Limits(max_depth=depth)), drafter.draft_at(*inputs), strict=True)
        assert all(list(chain.tokens) == list(deepest.tokens[:depth]) for chain, deepest in chains)
