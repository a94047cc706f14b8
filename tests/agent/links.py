"""What the pumped tests of an agent share: a reactor that connects nothing by itself, and its connections."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable
from typing import Any

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.testing import MemoryReactorClock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from flodl_tw.testing import FakeTransport

PATIENCE = 10
"""Seconds that a thread may take to answer."""


def entries(*addresses: str) -> list[Any]:
    """What ``socket.getaddrinfo`` gives for a name that has these addresses."""
    return [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, 0, 0, 0))
        if ":" in address
        else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))
        for address in addresses
    ]


class LinkTransport(FakeTransport):
    """An agent's connection in memory, with a socket that can be tuned."""

    def __init__(self, clock: Any, peer: Any, *, reads: bool = True) -> None:
        super().__init__(clock, peer, reads)
        self.handle = socket.socket()

    def getHandle(self) -> Any:
        return self.handle

    def lose(self, why: Exception) -> None:
        self.handle.close()
        super().lose(why)


class HandReactor(MemoryReactorClock):
    """Calls from threads wait until a test runs them; connections come about when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: queue.Queue[Callable[[], object]] = queue.Queue()
        self.settled: set[int] = set()

    def callFromThread(self, call: Callable[..., object], *arguments: Any) -> None:  # noqa: N802  Twisted's name
        self._calls.put(lambda: call(*arguments))

    def thread_answers(self) -> None:
        """Run the next call that a thread makes."""
        self._calls.get(timeout=PATIENCE)()

    def dialed(self) -> list[str]:
        """The addresses that were dialed so far, in order."""
        return [client[0] for client in self.tcpClients]

    def open_dials(self) -> list[str]:
        """The addresses whose dial neither succeeded nor failed nor was given up."""
        return [
            address
            for place, address in enumerate(self.dialed())
            if place not in self.settled and not self.connectors[place].stoppedConnecting
        ]

    def take(self, place: int = -1, *, reads: bool = True) -> LinkTransport:
        """A dial succeeds; gives the connection's transport."""
        place %= len(self.tcpClients)
        self.settled.add(place)
        host, port, factory = self.tcpClients[place][:3]
        peer = (IPv6Address if ":" in host else IPv4Address)("TCP", host, port)
        transport = LinkTransport(self, peer, reads=reads)
        protocol = factory.buildProtocol(peer)
        transport.protocol = protocol
        protocol.makeConnection(transport)
        return transport

    def refuse(self, error: Exception, place: int = -1) -> None:
        """A dial fails."""
        place %= len(self.tcpClients)
        self.settled.add(place)
        self.tcpClients[place][2].clientConnectionFailed(self.connectors[place], Failure(error))


class AgentTestCase(SynchronousTestCase):
    """A reactor that a test works by hand."""

    def setUp(self) -> None:
        self.reactor = HandReactor()
        self.said: list[str] = []

    def assert_idle(self) -> None:
        """No timer runs, and no dial is open."""
        self.assertEqual([str(call) for call in self.reactor.getDelayedCalls()], [])
        self.assertEqual(self.reactor.open_dials(), [])

    def timers(self) -> list[float]:
        """In how many seconds each timer is due."""
        now = self.reactor.seconds()
        return sorted(round(call.getTime() - now, 6) for call in self.reactor.getDelayedCalls())


def done() -> ConnectionDone:
    """How a peer's close looks."""
    return ConnectionDone()


def lost() -> ConnectionLost:
    """How a reset looks."""
    return ConnectionLost()
