"""Recipes: grouped options, their flat form, and the drafters by name."""

from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from drafters import CTC, LearnedDrafter, checkpoint, recipe, registry
from drafters.checkpoint import DrafterConfig

FLAT = {
    "ctc": {"num_frames": 6, "num_labels": 4, "markov_rank": 2, "objective": "ctc", "num_nodes": 9, "tree": "chain"},
    "block": {"num_frames": 5, "frames_differ": True, "decay": 0.7, "num_nodes": 9, "tree": "chain"},
    "medusa": {"num_heads": 3, "decay": 0.7, "num_nodes": 9, "tree": "chain", "static": [[0], [1]]},
    "hydra": {"num_heads": 3, "prefix_attention": True, "distillation": True, "num_nodes": 9, "width": 4},
    "eagle": {"noise": 0.1, "depth": 3, "num_nodes": 9, "tree": "chain", "draws": 2},
    "eagle3": {"hidden_layers": [0, 1, -1], "num_unroll": 2, "decay": 0.5, "depth": 3, "num_nodes": 9},
}
each_kind = pytest.mark.parametrize("name", FLAT)


def options_of(init_args):
    """Return the options of a recipe by name, from every group."""
    return {key.rpartition(".")[2]: value for key, value in recipe.flattened(init_args).items()}


@each_kind
def test_a_flat_recipe_is_sorted_into_groups_without_losing_an_option(name):
    drafter_class = registry.learned()[name]
    groups = recipe.groups(drafter_class)
    nested = recipe.nested(FLAT[name], groups)
    assert options_of(nested) == FLAT[name]
    assert nested["draft"]["num_nodes"] == 9
    assert recipe.nested(nested, groups) == nested


@each_kind
def test_a_flat_recipe_builds_the_drafter_of_the_nested_one(shape, name):
    drafter_class = registry.learned()[name]
    built = []
    for init_args in (FLAT[name], recipe.nested(FLAT[name], recipe.groups(drafter_class))):
        torch.manual_seed(0)
        built.append(recipe.build(drafter_class, shape, init_args))
    flat, nested = built
    assert flat.draft_options == nested.draft_options and flat.draft_options.num_nodes == 9
    assert flat.state_dict().keys() == nested.state_dict().keys()
    assert all(torch.equal(weight, nested.state_dict()[key]) for key, weight in flat.state_dict().items())


def test_a_flat_key_overrides_the_option_of_its_group():
    groups = recipe.groups(CTC)
    assert recipe.nested({"num_nodes": 64, "draft": {"num_nodes": 8, "top_k": 4}}, groups) == {
        "draft": {"num_nodes": 64, "top_k": 4}
    }


@each_kind
def test_every_option_has_one_name_in_one_group_and_cannot_be_written_to(name):
    groups = recipe.groups(registry.learned()[name])
    names = [field.name for group in groups.values() for field in fields(group)]
    assert len(names) == len(set(names)) and not set(names) & groups.keys()
    for group in groups.values():
        with pytest.raises(FrozenInstanceError):
            setattr(group(), fields(group)[0].name, None)


def test_a_third_party_drafter_loads_from_its_folder_by_its_full_path(shape, tmp_path, monkeypatch):
    registrations = dict(registry._REGISTRATIONS)
    monkeypatch.setattr(registry, "_REGISTRATIONS", registrations)

    class Mine(CTC):
        pass

    config = DrafterConfig(registry.full_path(Mine), {"num_nodes": 3}, shape, "toy", "0123456789abcdef")
    with pytest.raises(ValueError, match="is not a registered learned drafter: import the module that registers it"):
        config.build()
    registry.register("mine")(Mine)
    checkpoint.save(tmp_path, config.build(), config)
    loaded, _ = checkpoint.load(tmp_path)
    assert type(loaded) is Mine and isinstance(loaded, LearnedDrafter)
    assert registry.learned()["mine"] is Mine


def test_two_drafters_cannot_share_a_name():
    with pytest.raises(ValueError, match="two drafters are registered as 'ctc'"):
        registry.register("ctc")(type("Other", (CTC,), {}))
