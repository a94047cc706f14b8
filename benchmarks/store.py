"""torch's store on our port beside torch's own: queries, what one costs, crowds, large values, wake-ups, memory.

Everything runs on the loopback, each server in a process of its own: the real
``twistd``, which has formed a world of one host, ``TCPStore`` with libuv where
a Python with torch is found, and Twisted with nothing behind it.  The load is this process, which speaks the
store's bytes over plain sockets and is the same for both.  The servers take
turns in every round, so the ratios are what to compare; the rate of 64 clients
is that of the load as much as of the server, the CPU a query is the server's own.

usage: store.py [--rounds N] [--seconds N] [--connections N] [--torch-python PATH]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shared import (
    PATIENCE,
    Server,
    close_all,
    controller,
    cpu_secs,
    dial_at_once,
    head,
    hello,
    raise_descriptor_limit,
    row,
    served,
)

from flodl_tw.core.messages import WorldFormed
from flodl_tw.core.store.wire import VALIDATE_NUMBER, Opcode
from flodl_tw.testing import SimulatedClient

CROWD = 4096
LARGE = 8 * 1024 * 1024
WAKEUPS = 200
LONGEST_SECS = 40.0
"""No further round begins after so long."""
VALUE = b"x" * 20
SINK = bytearray(LARGE + 8)
UNITS = {
    "CPU a query": ("µs", "15"),
    "memory": ("MiB", ""),
    "8 MiB": ("ms", ""),
    "waiter": ("µs", ""),
    "at once, until": ("s", ""),
}
"""What a figure is in, and its aim, by a part of its name."""
TORCH_SERVER = """
import datetime, pathlib, socket, sys
import torch
import torch.distributed as dist

listener = socket.create_server(("127.0.0.1", 0))
minute = datetime.timedelta(seconds=60)
store = dist.TCPStore("127.0.0.1", listener.getsockname()[1], None, True, minute, wait_for_workers=False,
                      use_libuv=True, master_listen_fd=listener.detach())
pathlib.Path("version").write_text(torch.__version__)
pathlib.Path("part").write_text(str(store.port))
pathlib.Path("part").rename("port")
sys.stdin.read()
"""
FLOOR_SERVER = """
import pathlib
from twisted.internet import protocol, reactor

class Floor(protocol.Protocol):
    answer = b"echo"

    def connectionMade(self):
        self.transport.setTcpNoDelay(True)

    def dataReceived(self, data):
        self.transport.write(self.answer)
        self.answer = b"\\0"

factory = protocol.Factory.forProtocol(Floor)
port = reactor.listenTCP(0, factory, backlog=4096, interface="127.0.0.1")
pathlib.Path("part").write_text(str(port.getHost().port))
pathlib.Path("part").rename("port")
reactor.run()
"""

# The bytes of a client


def text(value: bytes) -> bytes:
    """A string or value."""
    return struct.pack("<Q", len(value)) + value


def ping(nonce: int) -> bytes:
    return struct.pack("<BI", Opcode.PING, nonce)


def put(key: bytes, value: bytes) -> bytes:
    return bytes([Opcode.SET]) + text(key) + text(value)


def get(key: bytes) -> bytes:
    return bytes([Opcode.GET]) + text(key)


def add(key: bytes, amount: int) -> bytes:
    return bytes([Opcode.ADD]) + text(key) + struct.pack("<q", amount)


def wait(key: bytes) -> bytes:
    return struct.pack("<BQ", Opcode.WAIT, 1) + text(key)


GREETING = struct.pack("<BI", Opcode.VALIDATE, VALIDATE_NUMBER) + ping(os.getpid())
"""What a client of torch 2.5 or newer begins with; four bytes come back."""
ECHO_BYTES = 4


# The servers


@dataclass
class Measured:
    """What one server did, round by round."""

    figures: dict[str, list[float]] = field(default_factory=dict)

    def note(self, name: str, figure: float) -> None:
        self.figures.setdefault(name, []).append(figure)


@contextlib.contextmanager
def our_store() -> Iterator[Server]:
    """The controller after the start of a world on this host, so that the loopback is let in."""
    options = ("--target-ranks=1", "--interface=127.0.0.1")
    with controller(*options) as server, socket.create_connection(("127.0.0.1", server.port)) as host:
        host.settimeout(PATIENCE)
        host.sendall(hello(0))
        talk = SimulatedClient()
        while not any(isinstance(message, WorldFormed) for message in talk.feed(host.recv(4096))):
            pass
        yield server


@contextlib.contextmanager
def torch_store(python: Path) -> Iterator[tuple[Server, str]]:
    """torch's own server, on the loopback alone, and its version."""
    command = (python, "-I", "-W", "ignore", "-c", TORCH_SERVER)
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(folder, "log").open("wb") as log,
        # It ends with its standard input.
        served(*command, folder=folder, stdin=subprocess.PIPE, stderr=log) as server,
    ):
        yield server, Path(folder, "version").read_text()


@contextlib.contextmanager
def floor() -> Iterator[Server]:
    """Twisted and nothing else: a byte for whatever comes, which is what a WAIT for a key that is there gets."""
    command = (sys.executable, "-I", "-c", FLOOR_SERVER)
    with tempfile.TemporaryDirectory() as folder, served(*command, folder=folder) as server:
        yield server


def find_torch(named: str | None) -> Path | None:
    """The Python with torch that is named, or the newest one in the cache folder."""
    if named is not None:
        return Path(named).absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "flodl-tw")
    found = [path for path in cache.glob("torch-*/bin/python") if re.fullmatch(r"torch-[\d.]+", path.parts[-3])]
    return max(found, key=lambda path: [int(part) for part in re.findall(r"\d+", path.parts[-3])], default=None)


# The load


def some(sock: socket.socket) -> int:
    """Take what there is of an answer, and say how much; the benchmark fails where the server closes instead."""
    taken = sock.recv_into(SINK)
    if not taken:
        raise SystemExit("the server has closed a connection")
    return taken


def received(sock: socket.socket, size: int) -> None:
    """Take the ``size`` bytes of an answer."""
    while size > 0:
        size -= some(sock)


def client(port: int) -> socket.socket:
    """A connection that has had its echo."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.settimeout(PATIENCE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(GREETING)
    received(sock, ECHO_BYTES)
    return sock


Step = tuple[tuple[bytes, ...], int]
"""Queries, which are sent one by one as torch does, and the size of what comes back."""


def mixed(index: int) -> list[Step]:
    """SET and GET of a key of one's own, and ADD to one that all share: three queries."""
    key = b"/worker/%d/key" % index
    return [((put(key, VALUE), get(key)), 8 + len(VALUE)), ((add(b"/worker/shared", 1),), 8)]


def present(index: int) -> list[Step]:
    """WAIT for a key that is there."""
    return [((wait(b"/worker/%d/key" % index),), 1)]


Load = tuple[str, Callable[[int], list[Step]]]
"""Its name, and what client number so-and-so asks round and round."""


class Asker:
    """A client that asks its queries round and round, each as soon as the one before is answered."""

    def __init__(self, port: int, steps: list[Step]) -> None:
        self.sock = client(port)
        self.asked = 0
        self._steps = steps
        self._next = 0
        self._left = 0

    def ask(self) -> None:
        queries, self._left = self._steps[self._next]
        self._next = (self._next + 1) % len(self._steps)
        self.asked += len(queries)
        for query in queries:
            self.sock.send(query)

    def answered(self) -> bool:
        """Take what has come; whether that is all of the answer."""
        self._left -= some(self.sock)
        return not self._left


def drive(server: Server, askers: list[Asker], seconds: float) -> tuple[float, float]:
    """Queries a second, and microseconds of the server's CPU a query."""
    poller = select.epoll()
    by_descriptor = {asker.sock.fileno(): asker for asker in askers}
    for descriptor in by_descriptor:
        poller.register(descriptor, select.EPOLLIN)
    cpu, started = cpu_secs(server.process.pid), time.perf_counter()
    for asker in askers:
        asker.ask()
    waiting = len(askers)
    while waiting:
        events = poller.poll(PATIENCE)
        if not events:
            raise SystemExit(f"{waiting} queries have no answer after {PATIENCE} s")
        more = time.perf_counter() - started < seconds
        for descriptor, _ in events:
            asker = by_descriptor[descriptor]
            if not asker.answered():
                continue
            if more:
                asker.ask()
            else:
                waiting -= 1
    took, asked = time.perf_counter() - started, sum(asker.asked for asker in askers)
    poller.close()
    return asked / took, (cpu_secs(server.process.pid) - cpu) / asked * 1e6


# What is measured


MIXED: Final = ("SET, GET, ADD", mixed)
PRESENT: Final = ("WAIT for what is there", present)


def queries(server: Server, measured: Measured, clients: int, seconds: float, *loads: Load) -> None:
    """The loads, one after the other, on the same connections' keys."""
    for name, steps in loads:
        askers = [Asker(server.port, steps(index)) for index in range(clients)]
        rate, cost = drive(server, askers, seconds)
        close_all([asker.sock for asker in askers])
        measured.note(f"{name}, {clients} at once: queries a second", rate)
        measured.note(f"{name}, {clients} at once: server CPU a query", cost)


def large_value(server: Server, measured: Measured) -> None:
    """A value as large as the store takes, there and back."""
    with client(server.port) as sock:
        started = time.perf_counter()
        sock.sendall(put(b"/large", bytes(LARGE)) + ping(1))
        received(sock, ECHO_BYTES)
        stored = time.perf_counter()
        sock.sendall(get(b"/large"))
        received(sock, 8 + LARGE)
        measured.note("SET of 8 MiB", (stored - started) * 1e3)
        measured.note("GET of 8 MiB", (time.perf_counter() - stored) * 1e3)
        # The next round's is a new key, too.
        sock.sendall(bytes([Opcode.DELETE_KEY]) + text(b"/large"))
        received(sock, 8)


def wakeups(server: Server, measured: Measured, first: int) -> None:
    """From a SET to the answer of the WAIT of another."""
    took = []
    with client(server.port) as waiter, client(server.port) as setter:
        for number in range(first, first + WAKEUPS):
            key = b"/late/%d" % number
            # The echo says that the wait is there.
            waiter.sendall(wait(key) + ping(number))
            received(waiter, ECHO_BYTES)
            query = put(key, VALUE)
            started = time.perf_counter()
            setter.sendall(query)
            received(waiter, 1)
            took.append((time.perf_counter() - started) * 1e6)
    measured.note("SET to the waiter's answer", statistics.median(took))


def crowd(server: Server, measured: Measured, count: int) -> None:
    """Many connections at once."""
    took, sockets = dial_at_once(server.port, [GREETING] * count, ECHO_BYTES)
    close_all(sockets)
    measured.note(f"{count} connections at once, until all have their echo", took)


def memory(server: Server, measured: Measured, count: int) -> None:
    """Before any connection, and beside a crowd of them; before the other figures, and once."""
    measured.note("memory at the start", server.rss_kib() / 1024)
    _, sockets = dial_at_once(server.port, [GREETING] * count, ECHO_BYTES)
    measured.note(f"memory with {count} connections", server.rss_kib() / 1024)
    close_all(sockets)


def table(ours: Measured, torch: Measured) -> None:
    """Every figure of ours beside torch's."""
    for name, figures in ours.figures.items():
        unit, aim = next((told for part, told in UNITS.items() if part in name), ("", ""))
        row(name, figures, torch.figures.get(name), unit, aim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="how long each load lasts")
    parser.add_argument("--connections", type=int, default=CROWD)
    parser.add_argument("--torch-python", metavar="PATH", help="an interpreter that has torch")
    arguments = parser.parse_args()
    count = min(arguments.connections, raise_descriptor_limit() - 100)
    python = find_torch(arguments.torch_python)
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        servers = [(stack.enter_context(our_store()), ours := Measured())]
        torch = Measured()
        if python is None:
            print("No Python with torch was found (--torch-python PATH names one): only our own figures.\n")
        else:
            server, version = stack.enter_context(torch_store(python))
            servers.append((server, torch))
            print(f"Beside torch {version}.\n")
        twisted, bare = stack.enter_context(floor()), Measured()
        for server, measured in servers:
            memory(server, measured, count)
        for number in range(arguments.rounds):
            if number and time.perf_counter() - started > LONGEST_SECS:
                print(f"The machine is slow: {number} of {arguments.rounds} rounds.\n")
                break
            for server, measured in servers:
                for clients in (1, 64):
                    queries(server, measured, clients, arguments.seconds, MIXED, PRESENT)
                wakeups(server, measured, number * WAKEUPS)
                large_value(server, measured)
                crowd(server, measured, count)
            for clients in (1, 64):
                queries(twisted, bare, clients, arguments.seconds, PRESENT)
    head("torch", "ratio to torch")
    table(ours, torch)
    print()
    head("bare Twisted", "ratio to it")
    for name, figures in bare.figures.items():
        if "CPU" in name:
            row(name, ours.figures[name], figures, "µs", "")


if __name__ == "__main__":
    main()
