"""Reads the speculation counters of vLLM and of ``drafters serve`` from the text format of Prometheus."""

from __future__ import annotations

import re

from inference.results.served_figures import SpeculationCounts

SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
POSITION = re.compile(r'(?:^|,)position="(\d{1,3})"')
VLLM, OWN = "vllm:spec_decode_num_", "drafters_"


def read_counts(text: str) -> SpeculationCounts | None:
    """Return the counters of speculation, added up over all engines of the server; None if there are none.

    Args:
        text: The metrics. Lines that are no samples are skipped.
    """
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for name, labels, number in SAMPLE.findall(text):
        if not name.startswith((VLLM, OWN)):
            continue
        try:
            value = int(float(number))
        except (ValueError, OverflowError):  # NaN and infinity too
            continue
        totals[name] = totals.get(name, 0) + value
        if name == f"{VLLM}accepted_tokens_per_pos_total" and (match := POSITION.search(labels)):
            positions[int(match[1])] = positions.get(int(match[1]), 0) + value
    accepted, rejected, forwards = (
        totals.get(f"{OWN}{name}_total") for name in ("accepted_draft_tokens", "rejected_draft_tokens", "base_forwards")
    )
    if accepted is not None and rejected is not None and forwards is not None:
        return SpeculationCounts(accepted + rejected, accepted, forwards=forwards)
    drafts, drafted, accepted = (
        totals.get(f"{VLLM}{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if drafts is None or drafted is None or accepted is None:
        return None
    by_position = [positions.get(position, 0) for position in range(max(positions, default=-1) + 1)]
    return SpeculationCounts(drafted, accepted, drafts, by_position=by_position)
