"""Medusa and Hydra start from the base's head, improve in training, and are accepted live as simulated."""

from functools import cache, partial

import lightning as L
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from data import embedded
from drafters import Hydra, Medusa, NoDrafter, recipe
from inference.prompts import encode_messages
from inference.verifier.base import load_base
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from train.cli import lightning_command
from train.module import DrafterTraining
from train.validation.base_answers import with_own_answers
from train.validation.simulate import simulate

SMALL = {"num_heads": 4, "num_anchors": 24, "num_nodes": 8, "top_k": 4}
KINDS = {
    "medusa": partial(recipe.build, Medusa, init_args=SMALL),
    "medusa, static": partial(
        recipe.build, Medusa, init_args=SMALL | {"static": [[0], [1], [0, 0], [0, 1], [0, 0, 0], [2]]}
    ),
    "medusa, the base's head": partial(recipe.build, Medusa, init_args=SMALL | {"own_heads": False}),
    "hydra": partial(recipe.build, Hydra, init_args=SMALL),
    "hydra++": partial(
        recipe.build,
        Hydra,
        init_args=SMALL | {"num_layers": 4, "prefix_attention": True, "distillation": True, "width": 4},
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def trainer(tmp_path, **arguments):
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        limit_val_batches=1,
        check_val_every_n_epoch=100,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **arguments,
    )


def heads_of(module):
    return [head.weight for head in module.drafter.lm_heads]


@pytest.fixture(scope="module")
def base(tiny):
    """The tiny base in float64, where the session's cache and one plain forward agree to the last bit that matters."""
    loaded = load_base(str(tiny))
    loaded.model.double()
    return loaded


@pytest.fixture(scope="module")
def prompts(base):
    return [encode_messages(base, [("user", row["turns"][0])], "tokenizer")[-24:] for row in embedded.questions(5)]


@cache
def alone(base, prompt):
    """The base's text without a drafter."""
    return Session(Runner(base), NoDrafter()).run(prompt, 32).tokens


@pytest.fixture(scope="module")
def own_text(tiny_base, prompts):
    """A batch of the base's own greedy answers, which a drafter can learn to predict."""
    rows = torch.tensor([[*prompt, 7] for prompt in prompts])
    mask = torch.zeros_like(rows, dtype=torch.bool)
    mask[:, -1] = True
    return with_own_answers(tiny_base, {"input_ids": rows, "loss_mask": mask}, 32)


@pytest.fixture(scope="module")
def trained(tiny, own_text, tmp_path_factory):
    """Trains a kind of drafter once, and returns the module with the validation metrics before and after."""
    made = {}

    def train(kind):
        if kind not in made:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                module = DrafterTraining(str(tiny), KINDS[kind], max_val_tokens=32, learning_rate=1e-2)
                batches, run = (
                    DataLoader([own_text], batch_size=None),
                    trainer(tmp_path_factory.mktemp("t"), max_steps=60),
                )
                (start,) = run.validate(module, batches, verbose=False)
                run.fit(module, batches)
                (end,) = run.validate(module, batches, verbose=False)
            made[kind] = module, start, end
        return made[kind]

    return train


@pytest.mark.slow
@each_kind
def test_training_lowers_the_loss_and_raises_the_acceptance_length(trained, kind):
    module, start, end = trained(kind)
    assert end["val/loss"] < 0.7 * start["val/loss"]
    assert end["val/acceptance_length"] > start["val/acceptance_length"] + 0.5
    assert all(name.startswith("drafter.") for name in module.state_dict())


@pytest.mark.slow
@each_kind
def test_simulated_acceptance_equals_live_acceptance_step_for_step(base, trained, prompts, kind):
    emitted = []
    for trained_for in (0, 60):
        if trained_for:
            drafter = KINDS[kind](base.shape)
            drafter.load_state_dict(trained(kind)[0].drafter.state_dict())
        else:
            with torch.random.fork_rng():
                torch.manual_seed(3)
                drafter = KINDS[kind](base.shape)
        drafter.double().eval().attach_base_weights(base.base_weights)
        emitted = []
        for prompt in prompts:
            decoded = Session(Runner(base), drafter).run(prompt, 32)
            assert decoded.tokens == alone(base, tuple(prompt))
            text = torch.tensor([*prompt, *decoded.tokens])
            with torch.no_grad():
                hidden = base.hidden_states(text[None], drafter.required_outputs.hidden_layers)[0][0]
            live = [step.emitted for step in decoded.steps[1:]]
            assert simulate(drafter, hidden, text, (len(prompt), len(text)), base.base_weights) == live
            assert {step.draft_forwards for step in decoded.steps[1:-1]} == {1}
            emitted += live
    assert sum(emitted) / len(emitted) > 1.5, "the comparison says little where hardly anything is accepted"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Medusa, Hydra])
def test_output_layers_start_as_the_bases_head_and_are_restored_from_a_checkpoint(tiny, own_text, tmp_path, kind):
    drafter = partial(recipe.build, kind, init_args=SMALL)
    make = partial(DrafterTraining, str(tiny), drafter, learning_rate=1e-2, val_answers="text")
    module, batches = make(), DataLoader([own_text], batch_size=None)
    head = module.base.base_weights.head
    assert all(torch.equal(weight, head) for weight in heads_of(module))
    first = trainer(tmp_path, max_steps=3)
    first.fit(module, batches)
    trained = [weight.detach().clone() for weight in heads_of(module)]
    assert not any(torch.equal(weight, head) for weight in trained)
    first.save_checkpoint(tmp_path / "three.ckpt")

    validated = make()
    trainer(tmp_path).validate(validated, batches, ckpt_path=tmp_path / "three.ckpt", verbose=False, weights_only=False)
    assert all(map(torch.equal, heads_of(validated), trained))
    resumed = make()
    trainer(tmp_path, max_steps=3).fit(resumed, batches, ckpt_path=tmp_path / "three.ckpt", weights_only=False)
    assert all(map(torch.equal, heads_of(resumed), trained))
    trainer(tmp_path, max_steps=0).fit(module, batches)
    assert all(map(torch.equal, heads_of(module), trained)), "a second training of the same module continues the first"


@pytest.mark.slow
def test_a_drafter_is_initialised_only_once_over_several_trainings(tiny, own_text, tmp_path):
    calls = []

    class Counted(Medusa):
        def initialise(self, base_weights):
            calls.append(base_weights.head.shape)
            super().initialise(base_weights)

    module, batches = (
        DrafterTraining(str(tiny), partial(recipe.build, Counted, init_args=SMALL)),
        DataLoader([own_text], batch_size=None),
    )
    for _ in range(2):
        run = trainer(tmp_path, max_steps=1)
        run.validate(module, batches, verbose=False)
        run.fit(module, batches)
    assert calls == [module.base.base_weights.head.shape]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("medusa.yaml", {"num_heads": 5, "num_layers": 1, "decay": 0.8, "own_heads": True, "tree": "best_first"}),
        ("hydra.yaml", {"num_heads": 5, "num_layers": 1, "prefix_attention": False, "distillation": False}),
    ],
)
def test_the_shipped_configs_have_the_papers_settings(call, name, expected):
    outcome = call(lightning_command.main, "fit", "--config", name, "--config", "debug.yaml", "--print_config")
    assert outcome.code == 0, outcome.err
    model = yaml.safe_load(outcome.out)["model"]
    assert (model["learning_rate"], model["schedule"]) == (1e-3, "cosine")
    options = {key.rpartition(".")[2]: value for key, value in recipe.flattened(model["drafter"]["init_args"]).items()}
    assert options.items() >= expected.items()
