"""Options of drafters that predict T frames in one pass: their network, and how frames become a draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from drafters.checks import MAX_LAYERS, check_at_least, check_at_most, check_choices


@dataclass(frozen=True)
class TrunkOptions:
    """The network that turns hidden states into frames.

    Args:
        num_frames: T, number of frames in one draft.
        num_layers: Number of decoder layers in the trunk.
        hidden_layers: Base layers whose hidden states are fused as context; 0 is the embedding, -1 the normed last
            hidden state.
        tokens_in_context: Fuse the embedding of each position's own token with its hidden states, of which late layers
            keep little. Of two small bases, drafters of one accepted 3 to 6 % more with it. It cannot be exported to
            vLLM's own format.
        root_everywhere: Add the embedding of the root token to every frame, so that even a single layer can attend to
            earlier occurrences of the root. Otherwise only frame 0 gets it.
        causal: Let a frame attend only to earlier frames of its draft. Otherwise frames attend to each other freely.
        markov_rank: Rank of a bias on each frame's logits given the previous token; 0 for no bias.
        markov_factors: What the two factors of that bias are made of: ``own``, tables over the vocabulary, or ``base``,
            linear maps of the base's embedding and of its LM head, which have fewer weights and learn faster.
        draft_vocab_size: Number of tokens that can be drafted; null for the whole vocabulary. Training chooses the
            tokens that are most frequent in the assistant's text, and multiplies only their rows of the LM head.
    """

    num_frames: int = 8
    num_layers: int = 1
    hidden_layers: Sequence[int] = (-1,)
    tokens_in_context: bool = False
    root_everywhere: bool = False
    causal: bool = False
    markov_rank: int = 0
    markov_factors: Literal["own", "base"] = "own"
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(1, num_frames=self.num_frames, num_layers=self.num_layers)
        check_at_most(MAX_LAYERS, num_frames=self.num_frames, num_layers=self.num_layers)
        check_at_least(0, markov_rank=self.markov_rank)


@dataclass(frozen=True)
class ParallelDraftOptions:
    """How frames become a draft tree; decoding may change these options.

    Args:
        tree: Kind of tree.
        num_nodes: M, largest number of nodes in a draft tree.
        top_k: T * top_k tokens may enter the tree: those that are most probable in any frame or, with a bias between
            neighbouring tokens, those that the draft is expected to show most often.
        min_probability: Nodes whose path is less probable than this are not fed to the base.
        step_costs: File written by ``drafters step-cost``. A tree then stops growing where a further node costs more
            time than it gains. Empty for trees of ``num_nodes``.
        window: Number of positions before the root that frames attend to, in training and in decoding; 0 for all. The
            time and the cache of a draft then do not grow with the text. Decoding may take fewer than training did.
    """

    tree: str
    num_nodes: int = 32
    top_k: int = 8
    min_probability: float = 0.0
    step_costs: str = ""
    window: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(0, num_nodes=self.num_nodes, min_probability=self.min_probability, window=self.window)
        check_at_least(1, top_k=self.top_k)
