"""DSpark's confidence head, with which an engine ends a draft before a token that is unlikely to be accepted."""

import torch
from torch import Tensor
from torch.nn import functional as F

from data.conversations import load_conversations
from data.rows import tokenise
from drafters import Block
from drafters.checkpoint import DrafterConfig
from drafters.losses import anchors as anchor_positions
from inference.verifier.base import Base
from train.features import compute_features

NAME = "confidence_head.proj"
NUM_ANCHORS, MAX_LENGTH = 64, 2048  # of a conversation


def confidence_head(drafter: Block, config: DrafterConfig, base: Base, files: str) -> dict[str, Tensor]:
    """Fit the head on conversations: sigmoid(w . [a frame's state, left factor of the token before] + b).

    It is the probability that a token is accepted if those before it are: a logistic regression with a standard normal
    prior on w (1, D + R), which a GGUF file holds with b (1,).
    """
    conversations, _ = load_conversations([files])
    template = config.training.get("template") or "tokenizer"
    texts = tokenise(conversations, base.tokenizer, template, min(base.context_length, MAX_LENGTH))
    parts = [_outcomes(drafter, base, *(torch.tensor([row[k]]) for k in ("input_ids", "loss_mask"))) for row in texts]
    inputs, accepted = (torch.cat(part) for part in zip(*parts, strict=True))
    weight = torch.zeros(inputs.shape[1] + 1, requires_grad=True)  # b last
    optimizer = torch.optim.LBFGS([weight], max_iter=500, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(inputs @ weight[:-1] + weight[-1], accepted)
        value = value + weight[:-1].square().sum() / (2 * len(inputs))
        value.backward()
        return value

    optimizer.step(loss)
    print(f"confidence fitted on {len(inputs):,} drafted tokens, of which {accepted.mean():.0%} are accepted")
    return {f"{NAME}.weight": weight.detach()[None, :-1], f"{NAME}.bias": weight.detach()[-1:]}


@torch.no_grad()
def _outcomes(drafter: Block, base: Base, input_ids: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """What the head reads (N, D + R) of each drafted token behind accepted ones, and whether it is accepted (N,)."""
    batch = compute_features(base, drafter.required_outputs.hidden_layers, input_ids, loss_mask.bool())
    anchors, reached = anchor_positions.sample(batch.loss_mask, NUM_ANCHORS)
    labels, valid = anchor_positions.following(batch.labels, batch.loss_mask, anchors, drafter.num_labels)
    roots, bias = drafter.roots(input_ids, anchors), drafter.markov and drafter.markov.folded(base.base_weights)
    frames = drafter(batch.hidden, roots, base.base_weights.embedding)[0].float()  # (A, U, D)
    token, reached, inputs, accepted = roots.tokens[0], reached[0], [], []
    for state, label, has_label in zip(frames.unbind(1), labels[0].T, valid[0].T, strict=True):
        left = F.embedding(token, bias.left) if bias else state.new_zeros(len(state), 1)
        logits = drafter.logits(state, base.base_weights)
        token = (logits + bias(token) if bias else logits).argmax(-1)
        inputs.append(torch.cat([state, left], -1)[reached := reached & has_label])
        accepted.append((token == label)[reached])
        reached = reached & (token == label)
    return torch.cat(inputs), torch.cat(accepted).float()
