"""Ranks that wait for keys of the store; rank 1 raises when its key comes, and the others' never does."""

from __future__ import annotations

import faulthandler
import os

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

MOST_SECS = 540
"""A rank that is stuck shows where, before the test gives it up."""


class LabelError(ValueError):
    """What a data set may raise."""


@record
def main() -> None:
    faulthandler.dump_traceback_later(MOST_SECS, exit=True)
    dist.init_process_group("gloo")
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
    )
    if dist.get_rank() == 1:
        store.wait(["go"])
        raise LabelError("batch 7 has no labels")
    store.wait(["never"])


if __name__ == "__main__":
    main()
