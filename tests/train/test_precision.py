"""Training in bfloat16, on a quantised base, and with activation checkpointing."""

from functools import partial

import pytest
import torch
from torch import nn

from benchmarks import recipes
from drafters import CTC, Medusa
from inference import bases
from inference.verifier.base import load_base
from train.cli import run_lightning
from train.module import DrafterTraining


@pytest.fixture(scope="module")
def wide(make_tiny):
    """A base whose width is the block size of the quantisation."""
    return make_tiny("wide", hidden_size=64)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.05), ("nf4", 0.3)])
def test_a_quantised_base_has_nearly_the_same_outputs_and_an_unquantised_head(wide, dtype, error):
    whole, small = load_base(str(wide), "bfloat16"), load_base(str(wide), dtype, movable=True)
    assert type(small.model.model.layers[0].mlp.up_proj) is not nn.Linear
    assert torch.equal(small.base_weights.head, whole.base_weights.head)
    assert torch.equal(small.base_weights.embedding, whole.base_weights.embedding)
    assert not any(weight.requires_grad for weight in small.model.parameters())
    ids = torch.randint(3, 400, (2, 24), generator=torch.Generator().manual_seed(0))
    (expected, _), (found, _) = (base.hidden_states(ids, (1, -1)) for base in (whole, small))
    assert found.dtype == torch.bfloat16
    assert (found - expected).float().norm() < error * expected.float().norm()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "bf16-mixed"), ("int8", "32-true")])
def test_a_drafter_trains_in_bfloat16_and_on_a_quantised_base(call, write_recipe, wide, tmp_path, dtype, precision):
    config = write_recipe(tmp_path, {"base": str(wide), "base_dtype": dtype}, max_steps=2, precision=precision)
    call(run_lightning, "fit", "--config", config).succeeded()
    weights = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert weights and all(weight.dtype == torch.float32 and weight.isfinite().all() for weight in weights.values())


@pytest.mark.slow
def test_a_quantised_base_without_bitsandbytes_is_refused(call, write_recipe, wide, tmp_path, monkeypatch):
    monkeypatch.setattr(bases, "find_spec", lambda package: None)
    done = call(run_lightning, "fit", "--config", write_recipe(tmp_path, {"base": str(wide), "base_dtype": "nf4"}))
    assert "a base in nf4 needs bitsandbytes and accelerate: pip install" in done.one_line_error("lightning")


def kept_for_backward(module, batch):
    """Return the bytes that a loss keeps for its backward pass, and the gradients."""
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss, _ = module.drafter.loss(batch, module.base.base_weights)
    loss.backward()
    return sum(kept.values()), {name: weight.grad for name, weight in module.drafter.named_parameters()}


@pytest.mark.slow
def test_activation_checkpointing_gives_the_same_gradients_with_less_memory(tiny):
    drafter = partial(
        recipes.build, CTC, init_args={"num_frames": 6, "num_labels": 4, "num_layers": 3, "num_anchors": 64}
    )
    ids = torch.randint(3, 400, (2, 40), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "loss_mask": torch.ones_like(ids, dtype=torch.bool)}
    found = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        module = DrafterTraining(str(tiny), drafter, activation_checkpointing=recomputed)
        found.append(kept_for_backward(module, module.training_batch(batch)))
    (everything, expected), (little, gradients) = found
    assert little < everything / 2
    torch.testing.assert_close(gradients, expected)


def test_activation_checkpointing_is_refused_for_a_drafter_without_a_trunk(tiny):
    with pytest.raises(ValueError, match="Medusa has no trunk"):
        DrafterTraining(str(tiny), Medusa, activation_checkpointing=True)
