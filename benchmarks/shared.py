"""What the benchmarks share: servers in processes of their own, many dials at once, and the rows of a table."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from flodl_tw.core.messages import encode_join
from flodl_tw.core.wire import JOIN_MAGIC, ZERO_KEY
from flodl_tw.testing import make_hello

HERE = Path(__file__).parent
PATIENCE = 120.0


class Server:
    """A server process and what the kernel says of it."""

    def __init__(self, process: subprocess.Popen[bytes], port_file: Path, started: float) -> None:
        self.process = process
        deadline = started + 30
        while not port_file.exists():
            if process.poll() is not None or time.perf_counter() > deadline:
                raise SystemExit(f"the server did not start: {process.args!r}")
            time.sleep(0.002)
        self.port = int(port_file.read_text())
        self.start_secs = time.perf_counter() - started

    def cpu_secs(self) -> float:
        """User and system time of its first thread so far, to the nanosecond."""
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[0]) / 1e9

    def rss_kib(self) -> float:
        """Resident memory."""
        return memory(self.process.pid)[0] * 1024


@contextlib.contextmanager
def served(
    *command: str | Path, folder: str, stdin: int | None = None, stderr: IO[bytes] | None = None
) -> Iterator[Server]:
    """A server that runs in ``folder`` and leaves its port in the file ``port`` there; killed at the end."""
    started = time.perf_counter()
    environ = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    with subprocess.Popen(command, cwd=folder, env=environ, stdin=stdin, stderr=stderr) as process:
        try:
            yield Server(process, Path(folder, "port"), started)
        finally:
            process.kill()


@contextlib.contextmanager
def controller(*options: str) -> Iterator[Server]:
    """The real controller, through twistd."""
    command = (
        str(Path(sys.executable).with_name("twistd")),
        *("-n", "--pidfile=", "--logfile=log", "flodl-controller", "--open-admission"),
        *("--port=0", "--port-file=port", "--state-dir=state", *options),
    )
    with tempfile.TemporaryDirectory() as folder, served(*command, folder=folder) as server:
        # It loads its web server once it listens, which is no part of what is measured.
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"GET /state.json HTTP/1.0\r\n\r\n")
            while client.recv(4096):
                pass
        yield server


def memory(pid: int) -> tuple[float, float]:
    """Resident and proportional memory of a process, in MiB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = {name: int(kib) / 1024 for name, kib in re.findall(r"^(Rss|Pss): +([0-9]+) kB", text, re.MULTILINE)}
    return found["Rss"], found["Pss"]


def cpu_secs(pid: int) -> float:
    """User and system time of a process so far, all its threads, to the hundredth."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / 100


def raise_descriptor_limit() -> int:
    """As many open files as the system grants; gives how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def hello(index: int) -> bytes:
    """The first bytes of host number ``index``."""
    return JOIN_MAGIC + encode_join(ZERO_KEY, 4, make_hello(f"gpu-node-{index:05d}.cluster.example"))


def dial_at_once(
    port: int, greetings: Sequence[bytes], wanted: int, measure: Callable[[bytes], int] = len
) -> tuple[float, list[socket.socket]]:
    """One connection for each greeting; seconds until the last has its ``wanted`` of an answer, and the connections.

    ``measure`` says how much of that some bytes are: by default each byte is one.
    """
    poller = select.epoll()
    sockets: dict[int, socket.socket] = {}
    left: dict[int, int] = {}
    unsent: dict[int, bytes] = {}
    started = time.perf_counter()
    for greeting in greetings:
        sock = socket.socket()
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect(("127.0.0.1", port))
        sockets[sock.fileno()] = sock
        left[sock.fileno()] = wanted
        try:
            # On the loopback the connection is there at once, unless the backlog is full.
            sock.send(greeting)
            poller.register(sock.fileno(), select.EPOLLIN)
        except BlockingIOError:
            unsent[sock.fileno()] = greeting
            poller.register(sock.fileno(), select.EPOLLOUT)
    while left:
        if time.perf_counter() - started > PATIENCE:
            raise SystemExit(f"{len(left)} of {len(greetings)} connections have no answer after {PATIENCE} s")
        for descriptor, event in poller.poll(1, 4096):
            if event & select.EPOLLOUT:
                sockets[descriptor].send(unsent.pop(descriptor))
                poller.modify(descriptor, select.EPOLLIN)
                continue
            data = sockets[descriptor].recv(4096)
            if not data:
                raise SystemExit("the server has closed a connection")
            left[descriptor] -= measure(data)
            if left[descriptor] <= 0:
                del left[descriptor]
                poller.unregister(descriptor)
    poller.close()
    return time.perf_counter() - started, list(sockets.values())


def close_all(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def head(floor: str = "floor", ratio: str = "ratio to the floor") -> None:
    """The first lines of a table."""
    print(f"| what | median | spread | {floor} | {ratio} | aim |\n| --- | --- | --- | --- | --- | --- |", flush=True)


def row(name: str, ours: list[float], peer: list[float] | None, unit: str, aim: str) -> None:
    """One line of the table: medians, the spread, and the median of the ratios round by round."""
    spread = f"{min(ours):.3g}-{max(ours):.3g}"
    floor_text, ratio = "", ""
    if peer:
        floor_text = f"{statistics.median(peer):.3g}"
        ratio = f"{statistics.median(a / b for a, b in zip(ours, peer, strict=True) if b):.2f}"
    print(f"| {name} | {statistics.median(ours):.3g} {unit} | {spread} | {floor_text} | {ratio} | {aim} |", flush=True)
