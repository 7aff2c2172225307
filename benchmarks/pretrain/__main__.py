"""Pre-train a base: ``python -m benchmarks.pretrain``."""

import sys

from benchmarks.pretrain import run

run(sys.argv[1:])
