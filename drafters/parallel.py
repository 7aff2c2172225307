"""Drafters that predict T frames in one pass: options, the trunk over hidden states of the base, and its KV cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from drafters.checks import MAX_LAYERS, check_at_least, check_at_most, check_choices, check_hidden_layers, spread_layers
from drafters.losses import anchors as anchor_positions
from drafters.losses import gathered_logits
from drafters.losses.anchors import AnchoredFrames, LabelLossOptions, sample_columns
from drafters.nn.anchor_attention import AnchorMask, CacheMask, Mask
from drafters.nn.draft_cache import CachingDrafter, Context, Root
from drafters.nn.draft_vocabulary import DraftVocabulary, add_draft_tokens, restricted
from drafters.nn.lookup import Lookup, Passages
from drafters.nn.markov import Markov, markov_bias
from drafters.nn.table import Table
from drafters.nn.transformer import AttentionDraftModule, Trunk
from drafters.protocol import BaseShape, BaseWeights, Limits, RequiredOutputs, TrainingBatch
from drafters.tree import DraftTree
from drafters.trees.candidates import candidates, choose
from drafters.trees.search import Candidates, SearchLimits, search, with_passage


@dataclass(frozen=True)
class TrunkOptions:
    """The network that turns hidden states into frames.

    Args:
        num_frames: T, number of frames in one draft.
        num_layers: Number of decoder layers in the trunk.
        num_key_heads: Number of heads with keys and values, each for several heads with queries, as in most bases; null
            or a larger number for all heads. With fewer, the cache of a draft is smaller and a draft over it faster.
        intermediate_size: Width of the feed-forward networks; null for the base's. Most of a drafter's weights are
            there: with 1,536 instead of 4,864 one for Qwen2.5-Coder-0.5B has 24 instead of 42 MB in bfloat16.
        fusion_rank: Rank of the projection that fuses the hidden states; null for full rank. Only keys and values read
            what it fuses, and with few ``num_key_heads`` they are narrower. With 320 and feed-forward networks of 512
            a drafter for Qwen2.5-Coder-1.5B has 28 MB in bfloat16, where 1,536 alone leave 59.
        llama_layer: Take the draft module of the CTC paper, one LLaMA layer over the last hidden states themselves and
            the frames behind them, instead of DFlash's: no projection, no norms but the layer's own, ``causal``, and
            the last hidden state in the input of every frame. It cannot be served by vLLM.
        hidden_layers: Base layers whose hidden states are fused as context; 0 is the embedding, -1 the normed last
            hidden state. An empty list stands for five layers of L, evenly spaced from 2 to L - 2.
        tokens_in_context: Fuse the embedding of each position's token with the hidden states there, because late layers
            keep little of it. Drafters accepted 3 to 6 % more with it on one of two small bases. It cannot be exported
            to vLLM's own format.
        frames_differ: Give each frame an input embedding of its own. Otherwise they share one and differ only by their
            position.
        root_everywhere: Add the embedding of the root token to every frame, so that even a single layer can attend to
            earlier occurrences of the root. Otherwise only frame 0 gets it.
        lookup: Let each frame read the token in its place behind the longest earlier match of the text's last tokens
            (`drafters.nn.lookup`). So the drafter knows what prompt lookup would draft, and learns when to believe it.
        copy: Let the draft be what a ``lookup`` finds, all of it, with a probability that is learned: frames that are
            independent of each other cannot say that one token of a passage comes with all others.
        causal: Let a frame attend only to earlier frames of its draft. Otherwise frames attend to each other freely.
        markov_rank: Rank of a bias on each frame's logits given the previous token; 0 for no bias.
        markov_factors: What the two factors of that bias are made of: ``own``, tables over the vocabulary, or ``base``,
            linear maps of the base's embedding and of its LM head, which have fewer weights and learn faster.
        draft_vocab_size: Maximum number of tokens that can be drafted; null for the whole vocabulary. Training chooses
            the tokens that are most frequent in the assistant's text, and multiplies only their rows of the LM head.
    """

    num_frames: int = 8
    num_layers: int = 1
    num_key_heads: int | None = None
    intermediate_size: int | None = None
    fusion_rank: int | None = None
    llama_layer: bool = False
    hidden_layers: Sequence[int] = (-1,)
    tokens_in_context: bool = False
    frames_differ: bool = False
    root_everywhere: bool = False
    lookup: bool = False
    copy: bool = False
    causal: bool = False
    markov_rank: int = 0
    markov_factors: Literal["own", "base"] = "own"
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(1, num_frames=self.num_frames, num_layers=self.num_layers)
        check_at_most(MAX_LAYERS, num_frames=self.num_frames, num_layers=self.num_layers)
        check_at_least(0, markov_rank=self.markov_rank)
        for name in ("num_key_heads", "intermediate_size", "fusion_rank"):
            check_at_least(1, **{name: getattr(self, name) or 1})
        if self.copy and not self.lookup:
            raise ValueError("copy needs a lookup, which finds what is copied: set lookup to true")
        fuses = len(self.hidden_layers) != 1 or self.tokens_in_context or self.fusion_rank
        if self.llama_layer and (self.num_layers > 1 or fuses):
            raise ValueError(
                "llama_layer is one layer over the states of one base layer: set num_layers to 1, "
                "hidden_layers to [-1], tokens_in_context to false and fusion_rank to null"
            )


@dataclass(frozen=True)
class ParallelDraftOptions:
    """How frames become a draft tree; decoding may change these options.

    Args:
        tree: Kind of tree.
        num_nodes: M, largest number of nodes in a draft tree.
        top_k: T * top_k tokens may enter the tree, those that are most probable in any frame; with a bias between
            neighbouring tokens those that the draft is expected to show most often.
        min_probability: Nodes whose path is less probable than this are not fed to the base.
        window: Number of positions before the root that frames attend to, in training and in decoding; 0 for all. The
            time and the cache of a draft then do not grow with the text. Decoding may take fewer than training did, and
            should where texts are longer than those of the training. A ``lookup`` reads all of the text.
    """

    tree: str
    num_nodes: int = 32
    top_k: int = 8
    min_probability: float = 0.0
    window: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(0, num_nodes=self.num_nodes, min_probability=self.min_probability, window=self.window)
        check_at_least(1, top_k=self.top_k)


class OutputLayer(NamedTuple):
    """What turns frame states into distributions over the tokens that can be drafted."""

    base_weights: BaseWeights  # the base's embedding, and the rows of its LM head for these tokens, (V', D)
    bias: Markov | None  # the Markov bias as two tables
    vocabulary: DraftVocabulary | None  # the draft vocabulary, or None for the whole one


class Roots(NamedTuple):
    """Where drafts begin: A roots in each of B texts."""

    anchors: Tensor  # (B, A) their positions
    tokens: Tensor  # (B, A)
    passages: Passages | None  # what a lookup finds there, if the drafter has one


class ParallelDrafter(CachingDrafter):
    """One pass over T frames per anchor, each with a state that the base's LM head reads.

    A frame's input is a learned embedding and the embedding of the root token. Frames attend to keys and values
    projected from the base's hidden states strictly before the root (DFlash, arXiv 2602.06036). A subclass defines the
    ``loss`` and may replace the `search`. A draft is trained on ``num_labels`` next tokens, U. Each frame has its own
    input embedding, or all but frame 0 share one, as in DFlash. Frames before ``first_frame`` predict nothing.
    """

    anchors_at_once = 64
    has_blank = False  # as the last column of its logits
    draft_tokens: Tensor | None
    # For the attached base; a tuple, as a module among the attributes would become a part of the state dict.
    _output: OutputLayer | None = None

    def __init__(
        self,
        base: BaseShape,
        trunk: TrunkOptions,
        num_labels: int,
        loss: LabelLossOptions,
        draft: ParallelDraftOptions,
        first_frame: int = 0,
    ) -> None:
        super().__init__(draft.window)
        layers = tuple(trunk.hidden_layers) or spread_layers(base.num_layers)
        check_hidden_layers(layers, base)
        self.required_outputs = RequiredOutputs(layers)
        self.num_frames, self.num_labels, self.first_frame = trunk.num_frames, num_labels, first_frame
        self.llama_layer = trunk.llama_layer
        self.root_everywhere, self.causal = trunk.root_everywhere, trunk.causal or trunk.llama_layer
        self.tokens_in_context = self.reads_tokens = trunk.tokens_in_context
        self.copies, self.num_slots = trunk.copy, trunk.num_frames
        self.vocab_size = base.vocab_size
        self.loss_options, self.draft_options = loss, draft
        num_key_heads = min(trunk.num_key_heads or base.num_heads, base.num_heads)
        if base.num_heads % num_key_heads:
            raise ValueError(f"the {base.num_heads} heads of the base cannot share num_key_heads ({num_key_heads})")
        shape = replace(base, intermediate_size=trunk.intermediate_size or base.intermediate_size)
        if trunk.llama_layer:
            self.trunk: Trunk = AttentionDraftModule(shape, num_key_heads)
        else:
            fused = len(layers), trunk.tokens_in_context
            self.trunk = Trunk(shape, trunk.num_layers, *fused, num_key_heads, trunk.fusion_rank)
        num_embeddings = trunk.num_frames if trunk.frames_differ else 1
        self.frame_embedding = nn.Parameter(torch.randn(num_embeddings, base.hidden_size) * 0.02)
        self.lookup = Lookup(base, trunk.num_frames, first_frame, trunk.copy) if trunk.lookup else None
        self.num_found = (1 + trunk.num_frames) * trunk.lookup
        num_drafted = add_draft_tokens(self, trunk.draft_vocab_size, base.vocab_size)
        self.markov = markov_bias(base, trunk.markov_rank, trunk.markov_factors, self.has_blank, num_drafted)

    # ---- from hidden states to frames

    def context(self, hidden: Tensor, positions: Tensor, tokens: Tensor | None, embedding: Tensor) -> Context:
        """Keys and values for each layer, of hidden states (B, S, F * D) at positions (B, S) with tokens (B, S)."""
        dtype = self.frame_embedding.dtype
        embedded = embedding[tokens].to(dtype) if self.tokens_in_context and tokens is not None else None
        return self.trunk.context(hidden.to(dtype), positions, embedded)

    def roots(self, texts: Tensor, anchors: Tensor) -> Roots:
        """The roots at anchors (B, A) of texts (B, S)."""
        passages = self.lookup.find(texts, anchors) if self.lookup else None
        return Roots(anchors, texts.gather(1, anchors), passages)

    def forward(self, hidden: Tensor, roots: Roots, embedding: Tensor, tokens: Tensor | None = None) -> Tensor:
        """States (B, A, T, D) of the predicting frames of many roots; the context is projected once per text.

        Args:
            hidden: (B, S, F * D) hidden states of the base.
            roots: The roots.
            embedding: (V, D) the base's embedding.
            tokens: (B, S) the tokens at the positions; needed only with ``tokens_in_context``.
        """
        positions = torch.arange(hidden.shape[1], device=hidden.device).expand(len(hidden), -1)
        context = self.context(hidden, positions, tokens, embedding)
        return self.frames(context, roots, embedding, self._mask(roots, context).best())

    def frames(
        self, context: Context, roots: Roots, embedding: Tensor, mask: Mask, last: Tensor | None = None
    ) -> Tensor:
        """States (B, A, T, D) of the predicting frames, which attend to the `context` as the mask allows.

        ``last`` (B, A, D) are the context's states before the roots, needed for an `AttentionDraftModule` whose context
        does not begin at position 0.
        """
        inputs = self._inputs(roots, embedding)
        if self.llama_layer:
            if last is None:
                states = context[-1][0][:, 0]  # (B, S, D)
                before = (roots.anchors - 1).clamp(min=0)  # an anchor without a label may be 0
                last = states.gather(1, before[..., None].expand(-1, -1, states.shape[-1]))
            inputs = inputs + last[..., None, :]
        positions = roots.anchors[..., None] + torch.arange(self.num_frames, device=inputs.device)
        states = self.trunk(inputs.flatten(1, 2), positions.flatten(1), context, mask)
        return states.unflatten(1, (-1, self.num_frames))[:, :, self.first_frame :]

    def _inputs(self, roots: Roots, embedding: Tensor) -> Tensor:
        """What the trunk reads in each frame, (B, A, T, D)."""
        root = embedding[roots.tokens][..., None, :].to(self.frame_embedding.dtype)  # (B, A, 1, D)
        if self.root_everywhere:
            frames = self.frame_embedding.expand(self.num_frames, -1) + root  # (B, A, T, D)
        elif len(self.frame_embedding) > 1:
            frames = self.frame_embedding + nn.functional.pad(root, (0, 0, 0, self.num_frames - 1))
        else:
            masked = self.frame_embedding.expand(*root.shape[:2], self.num_frames - 1, -1)
            frames = torch.cat([root, masked], dim=-2)
        return frames if roots.passages is None else frames + roots.passages.additions(embedding).to(frames.dtype)

    def _mask(self, roots: Roots, context: Context) -> AnchorMask:
        """What the frames of some roots may attend to."""
        num_context, window = context[0][0].shape[-2], self.draft_options.window
        return AnchorMask(roots.anchors, self.num_frames, num_context, self.causal, window)

    # ---- from frames to trees

    def attach_base_weights(self, base_weights: BaseWeights) -> None:
        super().attach_base_weights(base_weights)
        self._output = None
        self._output = self.output(base_weights)

    def output(self, base_weights: BaseWeights) -> OutputLayer:
        """The output layer; for the attached base its tables are made only once."""
        if base_weights is self.base_weights and self._output is not None:
            return self._output
        weights, vocabulary = restricted(base_weights, self.draft_tokens)
        return OutputLayer(weights, None if self.markov is None else self.markov.folded(weights), vocabulary)

    def logits(self, frames: Tensor, base_weights: BaseWeights) -> Tensor:
        """Logits (..., V') of frame states (..., D) under the LM head's rows (V', D), in float32 at least."""
        return gathered_logits.base_logits(frames, base_weights)

    def table(self, frames: Tensor, roots: Roots, base_weights: BaseWeights) -> Table:
        """The candidates of each draft and, of a drafter that copies, the probabilities and tokens of the passages.

        Takes the frame states (B * A, T, D) below these roots.
        """
        weights, bias, vocabulary = self.output(base_weights)
        logits = self.logits(frames, weights)  # (B * A, T, V') or, with a blank, (B * A, T, V' + 1)
        num_candidates = self.draft_options.top_k * self.num_frames
        parts = choose(logits, roots.tokens.flatten(), len(weights.head), num_candidates, bias, vocabulary)
        dtype = parts[1].dtype
        if self.copies and roots.passages is not None:
            parts += [roots.passages.copy_logits(frames).sigmoid(), roots.passages.tokens.flatten(0, 1)]
        return Table.of(parts, dtype)

    def trees_from(self, parts: list[np.ndarray], limits: Limits) -> list[DraftTree]:
        options = self.draft_options
        is_chain = options.tree == "chain"  # cut in the end, as whether to copy is decided over the whole path
        depth = self.num_frames if is_chain else min(limits.max_depth, self.num_frames)
        num_nodes = min(options.num_nodes, limits.max_nodes)
        search_limits = SearchLimits(num_nodes, depth, limits.eos, options.min_probability, is_chain)
        trees = self.search(candidates(parts[:-2] if self.copies else parts), search_limits)
        if self.copies:
            rows = zip(trees, parts[-1].tolist(), parts[-2].tolist(), strict=True)
            trees = [with_passage(tree, passage, share, search_limits) for tree, passage, share in rows]
        return [tree.first(limits.max_depth) for tree in trees] if is_chain else trees

    def search(self, candidates: Candidates, limits: SearchLimits) -> list[DraftTree]:
        """The draft trees of candidates on the host."""
        return search(candidates, limits)

    # ---- training

    def loss_inputs(
        self, batch: TrainingBatch, base_weights: BaseWeights
    ) -> tuple[AnchoredFrames, Tensor, Tensor | None]:
        """What the losses take: frames at sampled anchors, the LM head (V', D), and the bias's right factor or None.

        With a draft vocabulary the labels are its columns, and end before the first token that cannot be drafted.
        """
        options, num_labels = self.loss_options, self.num_labels
        anchors, is_valid = anchor_positions.sample(batch.loss_mask, options.num_anchors)
        labels, valid = anchor_positions.following(batch.labels, batch.loss_mask, anchors, num_labels)
        roots = self.roots(batch.input_ids, anchors)
        frames = self(batch.hidden, roots, base_weights.embedding, batch.input_ids).flatten(0, 1)
        valid, labels = (valid & is_valid[..., None]).flatten(0, 1), labels.flatten(0, 1)
        copied, copy_logits = None, None
        if self.copies and roots.passages is not None:
            copied, copy_logits = roots.passages.begin_with(labels), roots.passages.copy_logits(frames)
        weights, vocabulary = restricted(base_weights, self.draft_tokens)
        left, right = None, None
        if self.markov is not None:
            left, right = self.markov.factors(torch.cat([roots.tokens.flatten()[:, None], labels], 1), weights)
        if vocabulary is not None:
            labels, valid = vocabulary.cut(labels, valid)
        anchored = AnchoredFrames(frames, labels, valid, left, copied, copy_logits)
        if self.training and options.num_columns:
            return sample_columns(anchored, weights.head, right, options.num_columns, self.has_blank)
        return anchored, weights.head, right

    # ---- drafting

    def cached(self, hidden: Tensor, positions: Tensor, tokens: Tensor | None, base_weights: BaseWeights) -> Context:
        here = None if tokens is None else tokens[:, :-1]
        return self.context(hidden, positions, here, base_weights.embedding)

    def found_in(self, text: Sequence[int]) -> np.ndarray:
        if self.lookup is None:
            return super().found_in(text)
        known = self._cache.text
        known.extend(text[len(known) :])  # only what is new is copied
        return self.lookup.find_on_host(np.frombuffer(known, np.int64)[None], np.array([[len(text) - 1]]))[0, 0]

    def drafted(self, context: Context, root: Root, base_weights: BaseWeights) -> Table:
        return self.table(*self.frames_below(context, root, base_weights), base_weights)

    def frames_below(self, context: Context, root: Root, base_weights: BaseWeights) -> tuple[Tensor, Roots]:
        """States (1, T, D) of the predicting frames below the last token of the cached text, and this root."""
        found, num_keys = root.found, context[0][0].shape[-2]
        passages = None if self.lookup is None or found is None else self.lookup.passages(found[None, None])
        roots = Roots(root.position, root.token, passages)
        mask: Mask = None  # all of the context is attended to
        if root.first is not None:
            mask = CacheMask(root.first[0], root.position[0], self.num_frames, num_keys, self.causal)
        elif self.causal:
            mask = AnchorMask(root.position, self.num_frames, num_keys, causal=True).dense()
        last = root.last(context[-1][0])[:, 0] if self.llama_layer else None
        return self.frames(context, roots, base_weights.embedding, mask, last)[:, 0], roots

    @torch.inference_mode()
    def propose_batch(
        self, context: Context, texts: Sequence[Tensor], base_weights: BaseWeights, limits: Limits
    ) -> list[DraftTree]:
        """The trees of B texts in one pass, for engines that keep the draft module's KV cache themselves.

        Args:
            context: For each layer the keys and values (B, h, S, d) that `context` gave for the positions of each text.
                Positions from its root on may hold anything finite.
            texts: The tokens of each text up to its root, on the CPU.
            base_weights: The base's embedding and LM head.
            limits: Limits of every proposal.
        """
        self.draft_forwards += 1
        ends = torch.tensor([[len(text) - 1, int(text[-1])] for text in texts])  # (B, 2): positions and tokens
        passages = self.lookup.find(pad_sequence([*texts], batch_first=True), ends[:, :1]) if self.lookup else None
        anchors, tokens = ends.to(self.frame_embedding.device).split(1, dim=1)
        roots = Roots(anchors, tokens, passages)
        mask = self._mask(roots, context)
        is_needed = self.causal or mask.window or len(texts) > 1  # a single text attends to all of its context
        frames = self.frames(context, roots, base_weights.embedding, mask.dense() if is_needed else None)[:, 0]
        return self.trees_from(self.table(frames, roots, base_weights).on_host(), limits)

    def known_text(
        self, hidden: Tensor, input_ids: Tensor, base_weights: BaseWeights, limits: Limits
    ) -> Callable[[Tensor], Table]:
        positions = torch.arange(len(hidden), device=hidden.device)[None]
        context = self.context(hidden[None], positions, input_ids[None], base_weights.embedding)

        def draft(anchors: Tensor) -> Table:
            roots = self.roots(input_ids[None], anchors[None])
            frames = self.frames(context, roots, base_weights.embedding, self._mask(roots, context).best())[0]
            return self.table(frames, roots, base_weights)

        return draft
