"""The options of ``drafters eval``, and the formats of ``drafters report``."""

from dataclasses import dataclass
from typing import Literal

Format = Literal["md", "csv", "parquet", "latex"]


@dataclass(frozen=True)
class EvaluationOptions:
    """How `drafters eval` measures.

    Args:
        drafter: NAME[=FILE][:key=value,...], such as joint, anpd:order=4 or ctc=FOLDER; may be repeated. By default
            prompt_lookup and joint; the base alone, none, is always measured too.
        repeats: How often every question is decoded; auto repeats until timing errors are at most 5 %.
        reset: Reset each drafter before each benchmark. If false, it goes on with what it remembers of those before.
        run_code: Run the programs in the answers to humaneval and mbpp in bubblewrap, to measure pass@1.
        server: Measure vllm, or a server that runs: [NAME=]URL, may be repeated; the first is the baseline.
        concurrency: Number of requests at once that a server gets; may be repeated. By default 1, 4 and 16.
    """

    drafter: list[str] | None = None
    repeats: int | Literal["auto"] = "auto"
    reset: bool = True
    run_code: bool = False
    server: list[str] | None = None
    concurrency: list[int] | None = None
