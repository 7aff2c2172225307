"""Run the benchmark: ``python -m benchmarks.at_scale``."""

from benchmarks.at_scale.command import at_scale
from benchmarks.harness import main

main(at_scale)
