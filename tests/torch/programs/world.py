"""What a training program does with its world, and one line of JSON from each rank about what came of it.

usage: world.py [FILE]    with FILE, training goes on until it exists; where it does already, there is none
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

STEPS = 3
RATE = 0.01
MOST_SECS = 540
"""A rank that is stuck shows where, before the test gives it up."""


def train(rank: int, until: Path | None) -> tuple[list[float], int]:
    """A model of one weight, of 0 at first, on one sample a rank; gives the weight after each of the first steps."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model.module.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    sample = torch.tensor([[rank + 1.0]])
    weights: list[float] = []
    steps = 0
    over = torch.zeros(1)
    while steps < STEPS or (until is not None and not over.item()):
        optimizer.zero_grad()
        (model(sample) - 1).pow(2).mean().backward()
        optimizer.step()
        steps += 1
        if steps <= STEPS:
            weights.append(round(model.module.weight.item(), 6))
        if until is not None:
            if steps == STEPS and rank == 0:
                print("training", flush=True)
            # All of them stop at the same step.
            over.fill_(rank == 0 and until.exists())
            dist.broadcast(over, 0)
    return weights, steps


@record
def main() -> None:
    faulthandler.dump_traceback_later(MOST_SECS, exit=True)
    until = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
    )
    told: dict[str, Any] = {"rank": rank, "torch": torch.__version__.partition("+")[0]}
    told["keys of an earlier run"] = store.check(["left behind"])
    dist.barrier()
    store.set("left behind", "by this one")
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    told["sum"] = total.item()
    ends = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total, group=ends)
        told["sum of the ends"] = total.item()
    gathered: list[Any] = [None] * size
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    dist.all_gather_object(gathered, [int(os.environ[name]) for name in names])
    told["places"] = gathered
    if until is None or not until.exists():
        told["weights"], steps = train(rank, until)
        told["trained on"] = steps > STEPS
    dist.monitored_barrier()
    print(json.dumps(told), flush=True)
    # Nobody leaves before all are through the barrier: gloo's last word may be lost with the process that said it.
    if store.add("through", 1) == size:
        store.set("all are through", "")
    store.wait(["all are through"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
