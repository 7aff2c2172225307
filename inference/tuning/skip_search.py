"""``drafters skip-search``: predict which sublayers the base may leave out when it drafts for itself."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations, cycle
from pathlib import Path
from typing import Literal

from data import benchmarks
from drafters.atomic_write import atomic_write
from inference.api.prompts import fitting
from inference.engine.base import Dtype, load_base, resolve_device
from inference.engine.layer_skipping import default_skips, sublayers
from inference.engine.sampling import Greedy
from inference.evaluation.verify import alone
from inference.runs.outputs import new_file
from inference.tuning.skip_probe import Probe, draft_cost, measured_shares, parameter_shares, speed_up

SkipSet = frozenset[int]  # sublayers by number: below L the attention of that layer, from L on the MLPs
Layers = tuple[tuple[int, ...], tuple[int, ...]]


def as_layers(skips: SkipSet, num_layers: int) -> Layers:
    """The layers whose attention, and those whose MLP is skipped."""
    attention = tuple(sorted(sublayer for sublayer in skips if sublayer < num_layers))
    return attention, tuple(sorted(sublayer - num_layers for sublayer in skips if sublayer >= num_layers))


class _Spent(Exception):
    """As many sets were scored as were asked for."""


def search(
    score: Callable[[SkipSet], float], num_sublayers: int, starts: Sequence[SkipSet], evaluations: int, seed: int = 0
) -> SkipSet:
    """The best skip set found: all of them where they are few, else iterated local search.

    From the best start every single flip is tried in random order and taken where it helps; where none does, two
    random flips of the best set so far begin anew, then three, and so on. The same arguments give the same search.

    Args:
        score: The larger the better.
        num_sublayers: 2L.
        starts: Sets to begin with.
        evaluations: Distinct sets scored at most.
        seed: Of the order of flips.
    """
    rng, seen = random.Random(seed), {}

    def value(skips: SkipSet) -> float:
        if skips not in seen:
            if len(seen) == evaluations:
                raise _Spent
            seen[skips] = score(skips)
        return seen[skips]

    def climb(skips: SkipSet) -> None:
        flips, failed = rng.sample(range(num_sublayers), num_sublayers), 0
        while failed < num_sublayers:
            flips.append(flips.pop(0))
            flipped = skips ^ {flips[-1]}
            better = value(flipped) > value(skips)
            skips, failed = (flipped, 0) if better else (skips, failed + 1)

    with suppress(_Spent):
        if 2**num_sublayers <= evaluations:
            for size in range(num_sublayers + 1):
                for skips in combinations(range(num_sublayers), size):
                    value(frozenset(skips))
            raise _Spent
        climb(max(starts, key=value))
        for size in cycle(range(2, num_sublayers + 1)):
            climb(max(seen, key=seen.get) ^ frozenset(rng.sample(range(num_sublayers), size)))
    return max(seen, key=seen.get)


class SearchLog:
    """What is known of each skip set, a line each in a file: a search that was stopped goes on where it was.

    Nothing is written before the first set is added: a search that is refused leaves the file as it was.

    Args:
        path: Of the file; made where it is not there.
        settings: What the results depend on.
        overwrite: Begin anew, whatever the file holds.

    Raises:
        ValueError: The file is of other settings, or damaged.
    """

    def __init__(self, path: Path, settings: dict[str, object], overwrite: bool = False) -> None:
        self.path, header = path, json.dumps(settings, sort_keys=True)
        try:
            text = path.read_text(encoding="utf-8") if path.exists() and not overwrite else ""
            self._kept = text.split("\n")[:-1] or [header]  # without a line cut short
            rows = [json.loads(line) for line in self._kept]
            self.known: dict[SkipSet, list[float]] = {frozenset(row["skips"]): row["survival"] for row in rows[1:]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}): pass --overwrite to search anew") from error
        if self._kept[0] != header:
            raise ValueError(f"{path} is of a search with other settings: pass --overwrite, or another --out")

    def add(self, skips: SkipSet, survival: list[float]) -> None:
        """Remember what was found."""
        self.known[skips] = survival
        line = json.dumps({"skips": sorted(skips), "survival": survival})
        if self._kept:
            with atomic_write(self.path) as new:
                new.write_text("".join(f"{each}\n" for each in [*self._kept, line]), encoding="utf-8")
            self._kept = []
        else:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


def skip_search(
    base: str,
    out: str,
    benchmark: str = "embedded",
    questions: str | None = None,
    limit: int = 20,
    max_new_tokens: int = 128,
    num_draft: int = 8,
    stride: int = 4,
    evaluations: int = 400,
    cost: Literal["parameters", "measured"] = "parameters",
    seed: int = 0,
    template: str = "tokenizer",
    dtype: Dtype = "float32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    overwrite: bool = False,
) -> None:
    """Search the sublayers that self-speculative decoding skips, for the drafter self_speculative=OUT.

    Drafts are made along the base's own greedy answers, which tells how many of their tokens would be accepted; what a
    draft costs is its share of the base's parameters, or of its time. The best set is the one that this predicts to be
    fastest, on the answers it was chosen by; only `drafters eval` on other questions measures it. A search that was
    stopped goes on where it was; with more evaluations, further.

    Args:
        base: Folder or hub id of the base.
        out: JSON file for the best set; what was found so far stands beside it and ends in .search.jsonl.
        benchmark: Whose first turns are asked: one that `drafters eval` knows.
        questions: File of the benchmark, where it is not to come from the hub.
        limit: Questions at most; those that do not fit into the base's context are left out and not counted.
        max_new_tokens: Tokens of an answer at most.
        num_draft: Longest draft that is looked at.
        stride: A draft starts at every so many tokens of an answer.
        evaluations: Skip sets that are tried at most.
        cost: What a draft costs; parameters is its share of those a token reads, measured its share of the time here.
        seed: Of the search.
        template: Chat template: the tokenizer's own, vicuna_v1.1 or llama2_chat.
        dtype: Number format of the base.
        device: auto takes the GPU where there is one.
        overwrite: Begin anew, in place of what an earlier search left.
    """
    from rich.console import Console
    from rich.progress import Progress

    if min(num_draft, stride, evaluations) < 1 or max_new_tokens <= num_draft:
        raise ValueError(
            "need num_draft, stride and evaluations of at least 1 and max_new_tokens above num_draft, not "
            f"{num_draft}, {stride}, {evaluations} and {max_new_tokens}"
        )
    path = new_file(out, overwrite=True)  # a search that goes on replaces it
    log_path = new_file(str(path.with_suffix(".search.jsonl")), overwrite=True)
    if path.exists() and not log_path.exists() and not overwrite:
        raise ValueError(f"{out} is there and {log_path}, to go on from, is not: pass --overwrite, or another --out")
    about = {"base": base, "benchmark": benchmark, "questions": questions, "limit": limit, "template": template}
    about |= {"max_new_tokens": max_new_tokens, "longest_draft": num_draft, "stride": stride, "dtype": dtype}
    log = SearchLog(log_path, about, overwrite)
    benchmarks.check_selection(0, limit)
    chosen = benchmarks.load(benchmark, questions)
    loaded = load_base(base, dtype, resolve_device(device))
    num_layers = len(sublayers(loaded.model.base_model)[0])
    asked = fitting(loaded, benchmark, chosen, template, max_new_tokens, limit)
    prompts = asked.prompts
    default = frozenset(layer + half * num_layers for half in (0, 1) for layer in default_skips(num_layers)[half])
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        answers = progress.track(prompts, description="the base answers")
        texts = [(prompt, alone(loaded, prompt, max_new_tokens, Greedy())) for prompt in answers]
        probe = Probe(loaded, texts, num_draft, stride)
        shares = parameter_shares(loaded) if cost == "parameters" else measured_shares(loaded, texts[0][0])
        bar = progress.add_task("skip sets", total=min(evaluations, 4**num_layers))

        def score(skips: SkipSet) -> float:
            if skips not in log.known:
                log.add(skips, probe.survival(*as_layers(skips, num_layers)))
            progress.advance(bar)
            return speed_up(log.known[skips], draft_cost(shares, skips))[0]

        best = search(score, 2 * num_layers, [frozenset(), default], evaluations, seed)
    predicted, length = speed_up(log.known[best], draft_cost(shares, best))
    attention, mlp = as_layers(best, num_layers)
    found = {
        "attention": attention,
        "mlp": mlp,
        **about,
        "num_layers": num_layers,
        "num_draft": length,
        "agreement": log.known[best][0],
        "draft_cost": draft_cost(shares, best),
        "cost": cost,
        "predicted_speedup": predicted,
    }
    with atomic_write(path) as new:
        new.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    console = Console(soft_wrap=True, highlight=False)
    for line in asked.notes():
        console.print(f"left out: {line}", markup=False)
    console.print(
        f"best set: attention of layers {list(attention)} and MLP of layers {list(mlp)} skipped\n"
        f"agreement {found['agreement']:.1%} of first draft tokens; a draft token costs {found['draft_cost']:.2f} base "
        f"forwards ({cost}); drafts of {length}\n"
        f"predicted speed-up {predicted:.2f}, chosen and predicted on the same {len(probe.expected)} drafts: no "
        "measurement. Measure it on other questions:\n"
        f"  drafters eval --base {base} --drafter self_speculative={out}:num_draft={length},threshold=0,adaptive=false",
        markup=False,
    )
