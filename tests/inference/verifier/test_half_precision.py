"""Drafters in bfloat16 and float16 on a base of the same dtype: the base's own greedy text, except at near-ties."""

import pytest
import torch

from drafters import CTC, Block, recipe
from inference.verifier.runner import Runner
from inference.verifier.session import Session

PROMPT, NEW = [1, 9, 4, 7, 12, 5], 40
DRAFTERS = {
    "ctc": (CTC, {}),
    "ctc, bias between tokens": (CTC, {"markov_rank": 4}),
    "ctc, causal, two fused layers": (CTC, {"causal": True, "num_layers": 2, "hidden_layers": [1, -1]}),
    "ctc, paper tree": (CTC, {"tree": "paper"}),
    "ctc, drawn": (CTC, {"draws": 4, "markov_rank": 4, "markov_factors": "base"}),
    "block, bias between tokens": (Block, {"markov_rank": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_the_bases_own_except_at_near_ties(make_base, name, dtype):
    base, (kind, arguments) = make_base(dtype=dtype), DRAFTERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        options = {"num_frames": 5, **({"num_labels": 4} if kind is CTC else {}), **arguments}
        drafter = recipe.build(kind, base.shape, options)
        for weight in drafter.parameters():
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, std=0.3)
    drafter.to(dtype).eval().attach_base_weights(base.base_weights)
    written = Session(Runner(base), drafter).run(PROMPT, NEW)
    assert len(written.tokens) == NEW and sum(step.fed_candidates for step in written.steps) > NEW
    logits = base.model(torch.tensor([PROMPT + written.tokens])).logits[0, len(PROMPT) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(written.tokens)[:, None])[:, 0]
    rounding = 8 * torch.finfo(dtype).eps * logits.abs().amax(-1)
    assert (chosen >= logits.amax(-1) - rounding).all(), "each token is the argmax given those before, or as good as it"
