"""Loads a base as a training does, in one of several processes, and prints how much of it the process has to itself.

python -m torch.distributed.run --nproc_per_node 2 share.py FOLDER DTYPE
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import distributed

from inference.verifier.base import base_hash, load_base
from train.strategies import share


def share_of_memory():
    """The proportional set size of this process, in bytes: of a page that n processes have, an n-th."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def measure(folder, dtype, is_shared):
    before = share_of_memory()
    base = load_base(folder, dtype, movable=is_shared)
    own_hash = base_hash(base)
    if is_shared:
        barrier, size = distributed.barrier, distributed.get_world_size()
        rank = int(os.environ["LOCAL_RANK"])
        share(base, SimpleNamespace(local_rank=rank, node_rank=0, world_size=size, barrier=barrier))
        base.move_to("cpu")
        assert base_hash(base) == own_hash
    with torch.no_grad():
        states = base.hidden_states(torch.arange(32)[None], [1])[0]
    distributed.barrier()
    num_bytes = sum(weight.nbytes for weight in base.model.parameters())
    result = {"share": (share_of_memory() - before) / num_bytes, "hash": own_hash, "sum": states.double().sum().item()}
    distributed.barrier()
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    folder, *dtypes = sys.argv[1:]
    measure(folder, dtypes[0], False)  # what is imported only now
    for dtype in dtypes:
        found = {"dtype": dtype, "shared": measure(folder, dtype, True), "alone": measure(folder, dtype, False)}
        every = [{}] * distributed.get_world_size()
        distributed.all_gather_object(every, found)
        if distributed.get_rank() == 0:
            print(*map(json.dumps, every), sep="\n", flush=True)
    distributed.destroy_process_group()
