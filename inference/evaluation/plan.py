"""What an evaluation decodes, and how: known to every process, and to the journals of an interrupted run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from data.benchmarks import Question
from data.tokenizer import short_hash
from inference import drafter_specs
from inference.fingerprint import fingerprint
from inference.timing import processor_name
from inference.verifier.base import Dtype
from inference.verifier.options import SamplingOptions

# The names by which users know some keys of `EvaluationPlan.settings`.
LABELS = {"caps": "max_new_tokens", "files": "files of the base or a drafter"}
NEW_SETTINGS = ("processor", "transformers")  # keys that the journals of older versions lack


@dataclass(frozen=True)
class EvaluationPlan:
    """What an evaluation decodes, and how.

    Args:
        base: Folder or hub id of the base.
        dtype: Dtype of the weights.
        drafters: Spec of each drafter, by its name in the tables; the first one, ``none``, is the base alone.
        questions: The questions, by benchmark.
        caps: Maximum number of tokens of an answer, by benchmark.
        template: Chat template.
        sampling: How the next token is chosen.
        typical: Whether drafts are accepted by typical acceptance, which is lossy.
        devices: The device of each process.
        threads: Number of torch threads of each process.
        repeats: How often every question is decoded; ``auto`` decodes a benchmark until its speed-ups are precise.
        packed: Whether the base's weights are packed; see `load_base`.
        max_repeats: Maximum number of repeats with ``auto``.
        compile: Whether decoding steps are compiled.
    """

    base: str
    dtype: Dtype
    drafters: dict[str, str]
    questions: dict[str, list[Question]]
    caps: dict[str, int]
    template: str
    sampling: SamplingOptions
    typical: bool
    devices: tuple[str, ...]
    threads: int
    repeats: int | Literal["auto"]
    packed: bool = False
    max_repeats: int = 1
    compile: bool = False

    def num_answers(self, benchmarks: Iterable[str]) -> int:
        """Number of answers that all drafters give to benchmarks in one repeat."""
        return len(self.drafters) * sum(len(self.questions[benchmark]) for benchmark in benchmarks)

    @property
    def automatic(self) -> list[str]:
        """Names of the drafters whose number of fed tokens depends on times."""
        return [name for name, spec in self.drafters.items() if drafter_specs.is_auto(spec)]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that the answers and their times depend on, for the first line of a journal.

        The maximum number of repeats is no part of it: with another one, the repeats that are there are kept.
        """
        import transformers

        files = {folder for spec in self.drafters.values() if (folder := drafter_specs.split(spec)[1]) is not None}
        device = torch.device(self.devices[0])
        machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        return {
            "base": self.base,
            "drafters": self.drafters,
            "questions": {
                name: short_hash(json.dumps([question.as_dict() for question in questions]))
                for name, questions in self.questions.items()
            },
            "caps": self.caps,
            **asdict(self.sampling),
            "typical": self.typical,
            "template": self.template,
            "dtype": self.dtype,
            "devices": list(self.devices),
            "threads": self.threads,
            "repeats": self.repeats,
            "files": {
                name: fingerprint(name if name == self.base else drafter_specs.drafter_folder(name))
                for name in sorted({self.base, *files})
            },
            "machine": f"{machine}, torch {torch.__version__}",
            "transformers": transformers.__version__,
            **({"processor": processor_name()} if device.type == "cpu" else {}),
            # Left out where they are what they were before they could be chosen: older journals are still read.
            **({"packed": True} if self.packed else {}),
            **({"compile": True} if self.compile else {}),
        }

    def indices_of_process(self, number: int, benchmark: str) -> list[int]:
        """The indices of the questions that a process answers: of N processes, each takes every N-th question."""
        return list(range(number, len(self.questions[benchmark]), len(self.devices)))
