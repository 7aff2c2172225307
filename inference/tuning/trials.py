"""Trials of ``drafters ouroboros-search``, and the JSON file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from data.files import read_json, validated, write_text
from inference.outputs import folder_above
from inference.results.metrics import decode_steps
from inference.results.records import Turn


@dataclass(frozen=True)
class Trial:
    """Measurements of decoding the questions with one setting.

    Args:
        tokens: Tokens of all answers.
        seconds: Wall time, prefill included.
        base_forwards: Forwards of the base, prefill included.
        draft_forwards: Forwards of the draft model, prefill included.
        steps: Base forwards without the first one of each turn, the prefill.
        gained: Tokens emitted in these steps.
        step_drafts: Forwards of the draft model in these steps.
    """

    tokens: int
    seconds: float
    base_forwards: int
    draft_forwards: int
    steps: int
    gained: int
    step_drafts: int

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Trial:
        """Sum up the turns of all answers."""
        steps, later = [step for turn in turns for step in turn.steps], decode_steps(turns)
        return cls(
            tokens=sum(len(turn.token_ids) for turn in turns),
            seconds=sum(turn.seconds for turn in turns),
            base_forwards=len(steps),
            draft_forwards=sum(step.draft_forwards for step in steps),
            steps=len(later),
            gained=sum(step.emitted for step in later),
            step_drafts=sum(step.draft_forwards for step in later),
        )

    def clock_time(self) -> float:
        """Seconds per token, the objective of Algorithm 1: every setting writes the same text."""
        return self.seconds / self.tokens

    def modelled_time(self, draft_cost: float) -> float:
        """Base forwards per token if a draft forward costs ``draft_cost`` of one; the same in every run."""
        return (self.base_forwards + draft_cost * self.draft_forwards) / self.tokens


class TrialFile:
    """Trials in a JSON file: by the arguments they were made with, then by the drafter's spec.

    It is not a `Journal` because one file holds the trials of several searches with different arguments. Each new trial
    replaces the file at once.

    Args:
        file: The file; None stores nothing.
        arguments: Everything that a trial depends on besides its spec.

    Raises:
        ValueError: The file does not hold trials, or its folder does not exist or is not writable.
    """

    def __init__(self, file: str | None, arguments: tuple[object, ...]) -> None:
        self.path = Path(file) if file else None
        self.key = json.dumps(arguments)
        self.trials: dict[str, dict[str, dict]] = {}
        if self.path and folder_above(self.path) != self.path.absolute().parent:
            raise ValueError(f"{file}: there is no folder {self.path.parent}; make it, or give another --out")
        if self.path and self.path.exists():
            try:
                self.trials = read_json(self.path)
                read = validated(dict[str, dict[str, Trial]], self.trials)
                if any(min(trial.tokens, trial.seconds) <= 0 for trials in read.values() for trial in trials.values()):
                    raise ValueError("a trial without tokens")
            except ValueError as error:
                raise ValueError(f"{file} holds no trials of ouroboros-search: give another --out") from error

    def get(self, spec: str) -> Trial | None:
        """Return the trial of a drafter, or None if there is none."""
        trial = self.trials.get(self.key, {}).get(spec)
        return validated(Trial, trial) if trial else None

    def add(self, spec: str, trial: Trial) -> None:
        """Store a trial."""
        self.trials.setdefault(self.key, {})[spec] = asdict(trial)
        if self.path:
            write_text(self.path, json.dumps(self.trials, indent=1))
