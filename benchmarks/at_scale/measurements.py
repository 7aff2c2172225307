"""What an answer of a wide base shows: speed by median step times, time by phase, acceptance, and equality of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from matplotlib.figure import Figure

from benchmarks.harness import ResultTable
from inference.evaluate import metrics
from inference.evaluate.answers import Answer, comparable, median_answers
from inference.evaluate.plots import FADED, PALETTE
from inference.verifier.session import PHASES, StepCost

Repeats = Sequence[Sequence[Answer]]  # the answers of each repeat, in the order of the questions
NONE = "none"  # the base alone
GIB = 1 << 30


class SearchClock:
    """Times the search for the tree on the host, the part of a proposal that does not grow with the base.

    Args:
        drafter: A drafter that builds its tree in one function on the host (CTC, block); others are not timed,
            as their search takes turns with the draft module.
    """

    def __init__(self, drafter: Any) -> None:
        self.seconds: list[float] = []
        if hasattr(drafter, "search"):
            drafter.search = self._timed(drafter.search)

    def _timed(self, search: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            started = perf_counter()
            tree = search(*arguments)
            self.seconds.append(perf_counter() - started)
            return tree

        return run


def decoding_seconds(steps: Sequence[StepCost]) -> float:
    """Seconds of all steps, each counted as the median of the steps that fed as many tokens.

    A few steps that waited for a core do not change it, as they change the wall time.
    """
    by_fed: dict[int, list[float]] = {}
    for step in steps:
        by_fed.setdefault(step.fed, []).append(sum(step.seconds))
    return sum(len(times) * median(times) for times in by_fed.values())


def median_phases(steps: Sequence[StepCost], clock: SearchClock) -> dict[str, float | None]:
    """Median milliseconds of a step by phase: the base's forward, the drafter, its search on the host, and the rest."""

    def of(*phases: str) -> float:
        return 1e3 * median(sum(step.seconds[PHASES.index(phase)] for phase in phases) for step in steps)

    search = 1e3 * median(clock.seconds) if clock.seconds else None
    draft = of("propose", "observe") - (search or 0.0)
    return {"forward": of("forward"), "draft": draft, "search": search, "other": of("accept", "commit")}


def measure(
    name: str,
    wide: Mapping[str, Repeats],
    small: Mapping[str, Sequence[Answer]],
    clock: SearchClock,
    num_parameters: int,
) -> dict[str, Any]:
    """Results of one drafter, for results.json.

    Args:
        name: The drafter's name.
        wide: The answers of the wide base, by drafter and repeat; that without a drafter is `NONE`.
        small: The answers of the small base in float32, by drafter.
        clock: Times of the drafter's search.
        num_parameters: Size of the drafter.
    """
    answers, baseline = (median_answers(wide[key]) for key in (name, NONE))
    summary = metrics.summarise(answers, baseline, list(zip(wide[name], wide[NONE], strict=True)))
    steps, base_steps = (_steps(wide[key]) for key in (name, NONE))
    seconds, base_seconds = (decoding_seconds(each) / _emitted(each) for each in (steps, base_steps))
    times = [sum(step.seconds) for step in steps]
    low, _, high = quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return {
        "parameters": num_parameters,
        "questions": len(answers),
        "acceptance_length": summary.acceptance.length.value,
        "fed_per_step": summary.acceptance.fed_per_step,
        "speedup": base_seconds / seconds,
        "wall_speedup": summary.speed.wall.value,
        "wall_speedup_interval": summary.speed.wall.interval,
        "step_ms": 1e3 * median(times),
        "step_spread": (high - low) / median(times),
        "phases_ms": median_phases(steps, clock),
        "identical": summary.identical,
        "small_acceptance_length": metrics.acceptance_length([turn for each in small[name] for turn in each.turns]),
        "same_texts_as_small": sum(map(_same_text, answers, small[NONE])),
        "same_steps_as_small": sum(
            comparable(own) == comparable(other) for own, other in zip(answers, small[name], strict=True)
        ),
    }


def _steps(repeats: Repeats) -> list[StepCost]:
    return [step for answers in repeats for answer in answers for step in metrics.decode_steps(answer.turns)]


def _emitted(steps: Sequence[StepCost]) -> int:
    return sum(step.emitted for step in steps)


def _same_text(answer: Answer, other: Answer) -> bool:
    return metrics.first_difference(answer, other) is None


def tables(result: Mapping[str, Any]) -> list[ResultTable]:
    """The tables of a run, from its JSON."""
    headings = ["drafter", "parameters", "speed-up", "wall", "acceptance", "small base's", "fed", "identical", "steps"]
    speed = ResultTable(result["title"], headings)
    phases = ResultTable(f"{result['title']}: time by phase", ["drafter", "step", "IQR", *next(_phases(result))])
    for (name, own), costs in zip(result["drafters"].items(), _phases(result), strict=True):
        count = own["questions"]
        speed.rows.append(
            [
                name,
                f"{own['parameters'] / 1e6:,.1f} M" if own["parameters"] else "",
                f"{own['speedup']:.2f}×",
                f"{own['wall_speedup']:.2f}×",
                f"{own['acceptance_length']:.3f}",
                f"{own['small_acceptance_length']:.3f}",
                f"{own['fed_per_step']:.1f}",
                f"{own['identical']}/{count}",
                f"{own['same_steps_as_small']}/{count}",
            ]
        )
        cells = ["" if cost is None else f"{cost:.2f}" for cost in costs.values()]
        phases.rows.append([name, f"{own['step_ms']:.2f}", f"{own['step_spread']:.0%}", *cells])
    same = min(own["same_texts_as_small"] for own in result["drafters"].values())
    count = next(iter(result["drafters"].values()))["questions"]
    speed.notes = [
        *result["settings"],
        "speed-up: seconds per token relative to none, prefill excluded, each step counted as the median of the steps "
        "that feed as many tokens; wall: by wall time, prefill included.",
        "small base's: acceptance length of the same drafter on the same questions at the base's own shape in float32; "
        f"steps: answers whose tokens and steps are those there, one by one (at least {same} of {count} texts are); "
        "identical: answers that are the same as without a drafter in this run.",
        f"The base has {result['parameters'] / 1e6:,.1f} M parameters; peak memory with all drafters "
        f"{result['peak_bytes'] / GIB:.1f} GiB.",
    ]
    phases.notes = [
        "Medians over the decoding steps in ms; IQR: interquartile range of a step's time / its median. forward: the "
        "base; draft: the drafter's passes; search: building the tree on the host, where it can be told from the "
        "passes; other: choosing and committing tokens."
    ]
    return [speed, phases]


def _phases(result: Mapping[str, Any]) -> Any:
    return (own["phases_ms"] for own in result["drafters"].values())


def plot_scaling(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the speed-up of each drafter against the parameters of the base: a line for each base, dtype and drafter."""
    figure = Figure(figsize=(7.2, 4.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color="#d8dce2", linewidth=0.6)
    lines: dict[str, list[tuple[float, float]]] = {}
    kinds = {(result["base"], result["dtype"]) for result in results}
    for result in sorted(results, key=lambda result: result["parameters"]):
        kind = f", {Path(result['base']).name}, {result['dtype']}" if len(kinds) > 1 else ""
        for name, own in result["drafters"].items():
            if name != NONE:
                lines.setdefault(f"{name}{kind}", []).append((result["parameters"] / 1e9, own["speedup"]))
    colours = PALETTE + FADED
    for index, (name, points) in enumerate(lines.items()):
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, color=colours[index % len(colours)])
    axes.axhline(1, color="#24292f", linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xscale("log")
    sizes = sorted({billions for points in lines.values() for billions, _ in points})
    axes.set_xticks(sizes, [f"{size:.2g}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("parameters of the base, billions")
    axes.set_ylabel("speed-up; dashed: without a drafter")
    axes.set_ylim(bottom=0)
    if lines:
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
