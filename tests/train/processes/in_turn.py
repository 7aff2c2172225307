"""Runs several `lightning` commands in turn, so that each process of a group imports everything only once.

python -m torch.distributed.run --nproc_per_node 2 in_turn.py '[["fit", "--config", "a.yaml"], ...]'
"""

import json
import sys

from train.cli import run_lightning

if __name__ == "__main__":
    for command in json.loads(sys.argv[1]):
        run_lightning(command)
