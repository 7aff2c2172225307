"""Dimensions and weights of a toy base, without loading a model."""

import pytest
import torch

from drafters import CTC, BaseShape, BaseWeights, recipe

SHAPE = BaseShape(hidden_size=16, vocab_size=23, num_layers=3, num_heads=2, head_dim=8, intermediate_size=24)


@pytest.fixture
def shape():
    return SHAPE


@pytest.fixture
def base_weights():
    generator = torch.Generator().manual_seed(7)
    return BaseWeights(*(torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=generator) for _ in range(2)))


@pytest.fixture
def make_ctc():
    """Build a CTC drafter with weights large enough that context matters; equal options give equal weights."""

    def make(**arguments):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            options = {"num_frames": 6, "num_labels": 4, "num_nodes": 12, "top_k": 4} | arguments
            drafter = recipe.build(CTC, SHAPE, options)
            for weight in drafter.parameters():
                if weight.dim() == 2:
                    torch.nn.init.normal_(weight, std=0.3)
            torch.nn.init.normal_(drafter.blank_row, std=0.3)
        return drafter

    return make
