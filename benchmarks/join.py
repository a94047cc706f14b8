"""How fast hosts join, what one costs, and how fast the process comes and goes.

Everything runs on the loopback.  The server is the real ``twistd``; beside it,
in the same run, stands the floor of ``peer.py``, and ratios to it are what to
compare between machines: a wall clock on a shared machine is noisy, the
server's own CPU time less so.

usage: join.py [--rounds N] [--hosts N,N,...]
"""

from __future__ import annotations

import argparse
import contextlib
import select
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator

from shared import (
    HERE,
    Server,
    close_all,
    controller,
    dial_at_once,
    head,
    hello,
    raise_descriptor_limit,
    row,
    served,
)

from flodl_tw.core.wire import FRAME_MAGIC, HTTP_MAGICS


@contextlib.contextmanager
def floor(count: int) -> Iterator[Server]:
    """The floor, for ``count`` hosts."""
    command = (sys.executable, HERE / "peer.py", "port", str(count))
    with tempfile.TemporaryDirectory() as folder, served(*command, folder=folder) as server:
        yield server


def count_frames(data: bytes) -> int:
    return data.count(FRAME_MAGIC)


def crowd(count: int, server: Server) -> tuple[float, float, float]:
    """Seconds of wall, microseconds of the server's CPU a host, KiB a host."""
    cpu, memory = server.cpu_secs(), server.rss_kib()
    # An Accept and a WorldFormed.
    wall, sockets = dial_at_once(server.port, [hello(index) for index in range(count)], 2, count_frames)
    result = wall, (server.cpu_secs() - cpu) / count * 1e6, (server.rss_kib() - memory) / count
    close_all(sockets)
    return result


def single_joins(server: Server, count: int, first: int = 0) -> list[float]:
    """Milliseconds from dialing to the Accept, one host after another."""
    took = []
    sockets = []
    for index in range(first, first + count):
        bytes_out = hello(index)
        started = time.perf_counter()
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(bytes_out)
        if FRAME_MAGIC not in sock.recv(4096):
            raise SystemExit("a host was turned away")
        took.append((time.perf_counter() - started) * 1e3)
        sockets.append(sock)
    close_all(sockets)
    return took


def stuck_peers(port: int, count: int) -> list[socket.socket]:
    """Peers that say nothing, stop inside a hello, or inside an HTTP head."""
    parts = (b"", hello(0)[:40], HTTP_MAGICS[0] + b"/state.json HTTP/1.1\r\nHost: ")
    sockets = []
    for index in range(count):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(parts[index % len(parts)])
        sockets.append(sock)
    return sockets


def stop_secs(*, reads: bool) -> float:
    """Seconds from SIGTERM to the end, with 100 joined hosts."""
    with controller("--start=hybrid", "--min-rank-start=100", "--after-run=hold") as server:
        sockets = []
        for index in range(100):
            sock = socket.socket()
            if not reads:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(hello(index))
            sock.recv(4096)
            sockets.append(sock)
        if not reads:
            # Fill one peer's receive window: an answer that it never reads.
            stuck = socket.socket()
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            stuck.connect(("127.0.0.1", server.port))
            stuck.sendall(b"GET /state.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            sockets.append(stuck)
            time.sleep(0.1)
        started = time.perf_counter()
        server.process.send_signal(signal.SIGTERM)
        if reads:
            poller = select.poll()
            for sock in sockets:
                poller.register(sock.fileno(), select.POLLIN)
            by_descriptor = {sock.fileno(): sock for sock in sockets}
            while by_descriptor:
                for descriptor, _ in poller.poll(1000):
                    if not by_descriptor[descriptor].recv(4096):
                        poller.unregister(descriptor)
                        by_descriptor.pop(descriptor).close()
        server.process.wait(10)
        took = time.perf_counter() - started
        close_all(sockets)
        return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hosts", default="100,2000,8000")
    arguments = parser.parse_args()
    raise_descriptor_limit()
    head()
    rounds = range(arguments.rounds)
    for count in map(int, arguments.hosts.split(",")):
        ours, peer = [], []
        for _ in rounds:
            with controller(f"--target-ranks={count}", f"--max-pending={4 * count}") as server:
                ours.append(crowd(count, server))
            with floor(count) as server:
                peer.append(crowd(count, server))
        columns = (
            ("the world forms, wall", "s", "2 at 8000"),
            ("server CPU a host", "µs", "200"),
            ("memory a host", "KiB", "4"),
        )
        for place, (name, unit, aim) in enumerate(columns):
            row(f"{count} hosts: {name}", [r[place] for r in ours], [r[place] for r in peer], unit, aim)
    alone, beside, peer_alone, started, peer_started, base = [], [], [], [], [], []
    for _ in rounds:
        with controller("--min-rank-start=100000") as server:
            started.append(server.start_secs)
            base.append(server.rss_kib() / 1024)
            alone.append(statistics.median(single_joins(server, 300)))
            stuck = stuck_peers(server.port, 500)
            beside.append(statistics.median(single_joins(server, 300, 1000)))
            close_all(stuck)
        with floor(1 << 30) as server:
            peer_started.append(server.start_secs)
            peer_alone.append(statistics.median(single_joins(server, 300)))
    row("single join", alone, peer_alone, "ms", "0.3")
    row("single join beside 500 stuck peers", beside, peer_alone, "ms", "0.3")
    row("start to listening", started, peer_started, "s", "0.4")
    row("memory at the start", base, None, "MiB", "60")
    row("SIGTERM to gone, peers that read", [stop_secs(reads=True) for _ in rounds], None, "s", "1")
    row("SIGTERM to gone, peers that don't", [stop_secs(reads=False) for _ in rounds], None, "s", "3")


if __name__ == "__main__":
    main()
