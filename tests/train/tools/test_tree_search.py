"""`drafters tree-search` counts like a plain loop, and its tree decodes losslessly."""

import json

import numpy as np
import pytest
import torch

from data import embedded
from drafters import Medusa, TrainingBatch, checkpoint, recipe
from drafters.checkpoint import DrafterConfig
from drafters.trees.static import static_tree
from inference import drafter_specs
from inference.prompts import encode_messages
from inference.verifier.base import tokenizer_hash
from inference.verifier.runner import Runner
from train.cli import commands
from train.tools.tree_search import count_hits
from train.validation.base_answers import with_own_answers

K, RANKS = 3, 4


@pytest.fixture(scope="module")
def own_text(tiny_base):
    """The base's own greedy answers as training text."""
    prompts = [
        encode_messages(tiny_base, [("user", row["turns"][0])], "tokenizer")[-24:] for row in embedded.questions(6)
    ]
    rows = torch.tensor([[*prompt, 7] for prompt in prompts])
    mask = torch.zeros_like(rows, dtype=torch.bool)
    mask[:, -1] = True
    batch = with_own_answers(tiny_base, {"input_ids": rows, "loss_mask": mask}, 32)
    with torch.no_grad():
        hidden, last = tiny_base.hidden_states(batch["input_ids"], (-1,))
        labels = (last @ tiny_base.base_weights.head.T).argmax(-1)
    return TrainingBatch(hidden, last, batch["input_ids"], labels, batch["loss_mask"])


@pytest.fixture(scope="module")
def medusa(tiny_base, own_text):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drafter = recipe.build(
            Medusa, tiny_base.shape, {"num_heads": K, "num_anchors": 8, "top_k": RANKS, "num_nodes": 5}
        )
        drafter.initialise(tiny_base.base_weights)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
        for _ in range(30):
            loss, _ = drafter.loss(own_text, tiny_base.base_weights)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return drafter.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def folder(medusa, tiny, tiny_base, tmp_path_factory):
    """The drafter's folder."""
    place = tmp_path_factory.mktemp("medusa")
    arguments = {"num_heads": K, "top_k": RANKS, "num_nodes": 5}
    config = DrafterConfig(
        "drafters.Medusa", arguments, tiny_base.shape, str(tiny), tokenizer_hash(tiny_base.tokenizer)
    )
    checkpoint.save(place, medusa, config)
    return place


@pytest.fixture
def search(call, tiny, folder):
    def search(out, *more, drafter=None, data="embedded:6", top_k=RANKS):
        given = ["--base", tiny, "--drafter", drafter or f"medusa={folder}", "--data", data, "--out", out]
        return call(commands.main, "tree-search", *given, "--top-k", top_k, "--max-new-tokens", 24, *more)

    return search


@pytest.mark.slow
@torch.no_grad()
def test_hits_equal_those_of_a_loop_over_every_root(tiny_base, medusa):
    generator = torch.Generator().manual_seed(1)
    ids, mask = torch.randint(3, 400, (3, 12), generator=generator), torch.zeros(3, 12, dtype=torch.bool)
    mask[0, 4:9] = mask[1, 1:3] = mask[1, 6:] = mask[2, 11:] = True
    expected, positions = np.zeros((K, RANKS), dtype=int), [0] * K
    for text, answer in zip(ids, mask.tolist(), strict=True):
        for root in range(1, 11):
            for head in range(K):
                foreseen = root + head + 1
                if foreseen >= 12 or not all(answer[root : foreseen + 1]):
                    continue
                said = tiny_base.model(text[None, :foreseen]).logits[0, -1].argmax()
                state = tiny_base.hidden_states(text[None, :root], (-1,))[1][0, -1]
                ranked = medusa.logits(head, medusa.blocks[head](state), tiny_base.base_weights).argsort(
                    descending=True
                )
                expected[head] += (ranked[:RANKS] == said).numpy()
                positions[head] += 1
    for chunk in (1, 4, 512):
        medusa.chunk_anchors = chunk
        hits, seen = count_hits(medusa, tiny_base, {"input_ids": ids, "loss_mask": mask}, RANKS)
        assert hits.tolist() == expected.tolist() and seen.tolist() == positions
    assert positions[0] > 8


@pytest.mark.slow
@pytest.mark.parametrize("answers", ["greedy", "text"])
def test_the_tree_fits_the_measured_accuracies_and_decodes_losslessly(call, search, tiny, folder, tmp_path, answers):
    out = tmp_path / "tree.json"
    outcome = search(out, "--num-nodes", 7, "--answers", answers)
    assert outcome.code == 0, outcome.err
    found = json.loads(out.read_text())
    accuracies = np.array(found["accuracies"])
    assert accuracies.shape == (K, RANKS) and (accuracies.sum(1) <= 1 + 1e-9).all() and accuracies.any()
    static = [tuple(path) for path in found["static"]]
    assert static == static_tree(accuracies, 7) and 0 < len(static) <= 7
    assert found["num_positions"] > 50
    assert f"{found['expected_acceptance_length']:.2f} tokens a step" in outcome.out
    spec = f"medusa={folder}:static={out}"
    verified = call(commands.main, "verify", "--base", tiny, "--drafter", spec, "--limit", 2, "--max-new-tokens", 24)
    assert verified.code == 0 and "2/2" in verified.out


def test_a_static_tree_is_read_from_its_file_and_replaces_the_dynamic_one(tiny_base, folder, tmp_path):
    path = tmp_path / "tree.json"
    path.write_text('{"static": [[0], [3], [0, 1]]}', encoding="utf-8")
    drafter = drafter_specs.make(f"medusa={folder}:static={path}", Runner(tiny_base))
    assert drafter.static == [(0,), (3,), (0, 1)]
    hidden = torch.randn(4, tiny_base.shape.hidden_size)
    trees = drafter.draft_at(hidden, torch.arange(4), torch.tensor([1, 3]), tiny_base.base_weights)
    assert [list(tree.parents) for tree in trees] == [[-1, -1, 0]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is not a JSON file with an entry 'static'"),
        ("[", "is not a JSON file with an entry 'static'"),
        ("[[0]]", "is not a JSON file with an entry 'static'"),
        ('{"paths": [[0]]}', "is not a JSON file with an entry 'static'"),
        ('{"static": [[0, 1]]}', "rank path (0, 1) does not fit"),
        ('{"static": [0]}', "static must be a list of rank paths"),
    ],
)
def test_a_wrong_static_tree_file_is_refused_in_one_line(call, tiny, folder, tmp_path, text, said):
    path = tmp_path / "tree.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    outcome = call(commands.main, "verify", "--base", tiny, "--drafter", f"medusa={folder}:static={path}")
    assert said in outcome.one_line_error("drafters")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"drafter": "anpd"}, "a static tree is made of Medusa's heads: write medusa=FOLDER, not anpd"),
        ({"drafter": "medusa"}, "needs its folder"),
        ({"drafter": "medusa=no/such"}, "no drafter at no/such"),
        ({"data": "no.json"}, "no.json"),
        ({"top_k": 0}, "of at least 1"),
    ],
)
def test_an_impossible_search_is_refused_in_one_line_and_writes_nothing(search, tmp_path, arguments, said):
    assert said in search(tmp_path / "tree.json", **arguments).one_line_error("drafters")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_drafter_that_is_never_right_has_no_tree(search, tiny_base, tiny, tmp_path):
    config = DrafterConfig(
        "drafters.Medusa", {"num_heads": 1}, tiny_base.shape, str(tiny), tokenizer_hash(tiny_base.tokenizer)
    )
    useless = config.build()
    torch.nn.init.zeros_(useless.lm_heads[0].weight)
    checkpoint.save(tmp_path / "useless", useless, config)
    out = tmp_path / "tree.json"
    refused = search(out, drafter=f"medusa={tmp_path / 'useless'}", top_k=1)
    assert "no token of the first head was ever right" in refused.one_line_error("drafters")
    assert not out.exists()


@pytest.mark.slow
def test_a_tree_is_replaced_only_with_overwrite(search, tmp_path):
    out = tmp_path / "tree.json"
    out.write_text("mine", encoding="utf-8")
    assert "already there" in search(out).one_line_error("drafters")
    assert out.read_text() == "mine"
    assert search(out, "--overwrite").code == 0 and "static" in json.loads(out.read_text())
