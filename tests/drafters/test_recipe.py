"""Recipes: grouped options, their flat form, and the drafters by name."""

from dataclasses import FrozenInstanceError, fields

import pytest

from benchmarks.recipes import grouped
from drafters import CTC, LearnedDrafter, checkpoint, recipe, registry
from drafters.checkpoint import DrafterConfig

each_kind = pytest.mark.parametrize("name", registry.learned())


def test_options_by_name_are_sorted_into_groups_over_those_of_a_recipe():
    assert grouped(CTC, {"num_nodes": 64, "markov_rank": 2}, {"draft": {"num_nodes": 8, "top_k": 4}}) == {
        "draft": {"num_nodes": 64, "top_k": 4},
        "trunk": {"markov_rank": 2},
    }


def test_a_recipe_without_groups_is_refused(shape):
    config = DrafterConfig("drafters.CTC", {"num_nodes": 64}, shape, "toy", "0123456789abcdef")
    with pytest.raises(ValueError, match=r"arguments of drafters.CTC do not fit: .*'num_nodes'"):
        config.build()


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

    config = DrafterConfig(registry.full_path(Mine), {"draft": {"num_nodes": 3}}, shape, "toy", "0123456789abcdef")
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
