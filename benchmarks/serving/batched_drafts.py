"""CPU time of drafting for the requests of a batch, one request after another and all at once."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles
from time import process_time as clock

import torch
from torch import Tensor

from benchmarks.harness import ResultTable, alternate, llama_config, main, show
from drafters import CTC, Block
from drafters.ctc.drafter import CTCDraftOptions, CTCTrunkOptions
from drafters.ctc.loss import CTCLossOptions
from drafters.parallel.block import BlockDraftOptions, BlockTrunkOptions
from drafters.parallel.drafter import ParallelDrafter
from drafters.protocol import BaseShape, BaseWeights, Limits

ALONE, TOGETHER = "one by one", "together"
SMALL_VOCAB = 256
WIDTH = 64  # of the drafters' layers, which do not run here; the logits are given
SEARCHES = ["ctc", "ctc, Markov bias", "block, Markov bias"]


def batched_drafts(
    batches: list[int] = [1, 8, 32],  # noqa: B006
    vocab_size: int = 32000,
    num_frames: int = 8,
    top_k: int = 8,
    markov_rank: int = 64,
    num_tokens: int = 6,
    base: str = "1b",
    repeats: int = 10,
    threads: int = 1,
    out: str | None = None,
) -> None:
    """Measure what a batch of drafts costs after the drafter's forward: candidates, copy, and search of the chains.

    Args:
        batches: Numbers of requests in a batch.
        vocab_size: Vocabulary size V.
        num_frames: Number of frames T.
        top_k: Candidates per frame; T * top_k tokens may enter a chain.
        markov_rank: Rank of the bias of the arms that have one.
        num_tokens: Largest number of tokens of a chain.
        base: Shape of the base whose step is the yardstick: tiny, 100m, 1b, 3b or 7b; empty to leave it out.
        repeats: Runs of every arm; the arms alternate.
        threads: Number of torch threads.
        out: Markdown file to write the tables to.
    """
    if min(vocab_size, num_frames, top_k, markov_rank, num_tokens, threads, *batches) < 1 or repeats < 2:
        raise ValueError("batches and sizes must be at least 1, repeats at least 2")
    torch.set_num_threads(threads)
    shape = BaseShape(WIDTH, vocab_size, num_layers=1, num_heads=1, head_dim=WIDTH, intermediate_size=WIDTH)
    weights = BaseWeights(torch.randn(vocab_size, WIDTH), torch.randn(vocab_size, WIDTH))
    limits = Limits(num_tokens, eos=frozenset({2}))
    sizes = num_frames, top_k, num_tokens
    drafters = [
        _ctc(shape, sizes, 0),
        _ctc(shape, sizes, markov_rank),
        _block(shape, sizes, markov_rank),
    ]
    arms: dict[tuple[str, int, str], Callable[[], object]] = {}
    for name, drafter in zip(SEARCHES, drafters, strict=True):
        drafter.attach_base_weights(weights)
        for size in batches:
            logits, roots = _frames(drafter, size)
            arms[name, size, ALONE] = (
                lambda d=drafter, z=logits, r=roots: [  # type: ignore[misc]
                    d.trees_of(z[row : row + 1], r[row : row + 1], d.output(weights), limits)[0]
                    for row in range(len(r))
                ]
            )
            arms[name, size, TOGETHER] = lambda d=drafter, z=logits, r=roots: d.trees_of(
                z, r, d.output(weights), limits
            )  # type: ignore[misc]
    with torch.inference_mode():
        steps = {size: _step_seconds(base, vocab_size, size * (num_tokens + 1)) for size in batches} if base else {}
        seconds: dict[tuple[str, int, str], list[float]] = {arm: [] for arm in arms}
        for name, size, _ in arms:
            assert arms[name, size, ALONE]() == arms[name, size, TOGETHER](), "the drafts are the same"
        for _, _, arm in alternate(list(arms), 1, repeats, "drafts"):
            started = clock()
            arms[arm]()
            seconds[arm].append(clock() - started)
    table = ResultTable(f"CPU time of a draft, V = {vocab_size}", _headings(base))
    for name in SEARCHES:
        for size in batches:
            table.rows.append(_row(name, size, seconds, steps.get(size)))
    table.notes.append(
        f"T = {num_frames}, {num_frames * top_k} candidates, chains of up to {num_tokens} tokens, random logits, bias "
        f"of rank {markov_rank}; {repeats} runs of every arm in turn; medians of the process's CPU time, IQR = "
        "interquartile range / median of the drafts made together. The drafts of both arms are the same."
    )
    if base:
        table.notes.append(
            f"share = of a step of a LLaMA of shape {base} in float32 that verifies a chain for each request, taken as "
            "its number of layers times the time of one, and the LM head. The drafter's own forward is not part of it."
        )
    show([table], torch.device("cpu"), out)


def _headings(base: str) -> list[str]:
    return [
        "search",
        "batch",
        f"ms {ALONE}",
        f"ms {TOGETHER}",
        "ratio",
        "IQR",
        *([f"share of a {base} step"] * bool(base)),
    ]


def _row(name: str, size: int, seconds: dict[tuple[str, int, str], list[float]], step: float | None) -> list[str]:
    alone, together = seconds[name, size, ALONE], seconds[name, size, TOGETHER]
    low, _, high = quantiles(together, n=4)
    ratio = median(before / after for before, after in zip(alone, together, strict=True))
    cells = [name, str(size), *(f"{1e3 * median(times) / size:.3f}" for times in (alone, together)), f"{ratio:.2f}×"]
    cells.append(f"{(high - low) / median(together):.0%}")
    return cells if step is None else [*cells, f"{median(together) / step:.1%}"]


def _ctc(shape: BaseShape, sizes: tuple[int, int, int], rank: int) -> ParallelDrafter:
    num_frames, top_k, num_tokens = sizes
    draft = CTCDraftOptions(tree="chain", num_nodes=num_tokens, top_k=top_k)
    trunk = CTCTrunkOptions(num_frames=num_frames, markov_rank=rank)
    return _biased(CTC(shape, trunk, CTCLossOptions(num_labels=1), draft))


def _block(shape: BaseShape, sizes: tuple[int, int, int], rank: int) -> ParallelDrafter:
    num_frames, top_k, num_tokens = sizes
    draft = BlockDraftOptions(tree="chain", num_nodes=num_tokens, top_k=top_k)
    return _biased(Block(shape, BlockTrunkOptions(num_frames=num_frames, markov_rank=rank), draft=draft))


def _biased(drafter: ParallelDrafter) -> ParallelDrafter:
    """The drafter with a bias that is not zero, as training leaves it."""
    if drafter.markov is not None:
        torch.nn.init.normal_(drafter.markov.right, std=1.0)
    return drafter.requires_grad_(False).eval()


def _frames(drafter: ParallelDrafter, size: int) -> tuple[Tensor, Tensor]:
    """Logits and roots of a batch: in every frame a few symbols are far more probable than the others."""
    generator = torch.Generator().manual_seed(size)
    num_symbols = drafter.vocab_size + isinstance(drafter, CTC)
    logits = torch.randn(size, drafter.num_frames, num_symbols, generator=generator) * 1.5
    likely = torch.randint(num_symbols, (size, drafter.num_frames, 4), generator=generator)
    logits.scatter_add_(-1, likely, 10 + 3 * torch.randn(likely.shape, generator=generator))
    return logits, torch.randint(drafter.vocab_size, (size,), generator=generator)


def _step_seconds(shape: str, vocab_size: int, num_rows: int, repeats: int = 3) -> float:
    """CPU seconds of a forward of so many tokens, from one layer and the LM head of a base with random weights."""
    from transformers import LlamaForCausalLM

    config = llama_config(shape, SMALL_VOCAB, 4096)  # the LM head is measured apart
    num_layers, config.num_hidden_layers = config.num_hidden_layers, 1
    model = LlamaForCausalLM._from_config(config).eval()
    head, ids = torch.randn(vocab_size, config.hidden_size), torch.randint(config.vocab_size, (1, num_rows))
    hidden = torch.randn(num_rows, config.hidden_size)
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        for part, run in enumerate((lambda: model.model(ids), lambda: hidden @ head.T)):
            started = clock()
            run()
            times[part].append(clock() - started)
    return num_layers * min(times[0]) + min(times[1])


if __name__ == "__main__":
    main(batched_drafts)
