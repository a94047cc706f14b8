"""Ranks that meet and say who they are: what a program gets from ``flodl-tw run`` or ``flodl-tw join``.

Without dependencies, and for ranks on one machine: rank 0 listens on loopback
and leaves its port in a file that is named for the run; the others dial it.
A real program hands the same variables to its own framework instead.

usage: flodl-tw run -n 4 --hosts 2 -- python examples/meet.py
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from pathlib import Path

PATIENCE_SECS = 30.0


def own_words() -> str:
    """This rank in a line, from its environment."""
    get = os.environ.get
    return (
        f"rank {get('RANK')} of {get('WORLD_SIZE')}, local rank {get('LOCAL_RANK')} of {get('LOCAL_WORLD_SIZE')} "
        f"on host {get('FLODL_HOST_NAME')} ({get('GROUP_RANK')} of {get('GROUP_WORLD_SIZE')}), "
        f"GPUs: {get('CUDA_VISIBLE_DEVICES', 'all')}"
    )


def listen(meeting_place: Path, others: int) -> None:
    """Rank 0: let everybody in, hear who they are, and tell all of them that they have met."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_SECS)
        part = meeting_place.with_suffix(".part")
        part.write_text(str(server.getsockname()[1]))
        part.replace(meeting_place)
        connections = [server.accept()[0] for _ in range(others)]
    meeting_place.unlink()
    words = [own_words()]
    for connection in connections:
        connection.settimeout(PATIENCE_SECS)
        words.append(connection.makefile().readline().strip())
    print("everybody is here:")
    for line in sorted(words, key=lambda line: int(line.split()[1])):
        print(f"  {line}")
    for connection in connections:
        connection.sendall(b"met\n")
        connection.close()


def dial(meeting_place: Path) -> None:
    """Any other rank: say who it is, and wait until all have met."""
    deadline = time.monotonic() + PATIENCE_SECS
    while not meeting_place.exists():
        if time.monotonic() > deadline:
            sys.exit(f"rank 0 did not come within {PATIENCE_SECS:g} s")
        time.sleep(0.01)
    with socket.create_connection(("127.0.0.1", int(meeting_place.read_text())), PATIENCE_SECS) as connection:
        connection.sendall(f"{own_words()}\n".encode())
        if connection.makefile().readline() != "met\n":
            sys.exit("rank 0 left before all had met")


def main() -> None:
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        sys.exit("usage: flodl-tw run -n 4 --hosts 2 -- python examples/meet.py")
    meeting_place = Path(tempfile.gettempdir(), f"flodl-tw-meet-{run_id}")
    if os.environ["RANK"] == "0":
        listen(meeting_place, int(os.environ["WORLD_SIZE"]) - 1)
    else:
        dial(meeting_place)


if __name__ == "__main__":
    main()
