"""The agent's end of a join connection: its hello, what the controller says, and its end."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from twisted.internet.address import IPv6Address
from twisted.internet.defer import Deferred, DeferredQueue
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IDelayedCall, IReactorTime, ITCPTransport
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import LoopingCall
from twisted.python.failure import Failure

from flodl_tw import sockets
from flodl_tw.core.errors import WireError
from flodl_tw.core.join_client import TELLING_BYTES, JoinClient, language
from flodl_tw.core.messages import Hello, JoinMessage
from flodl_tw.core.reports import RankError
from flodl_tw.limits import CLOSE_GRACE, Limits

HEARTBEAT_SECS: Final = 5.0
"""Between two heartbeats: less than what any proxy calls idle."""


@dataclass(frozen=True, slots=True)
class LinkEnded:
    """The connection is gone; ``how`` for people, ``fault`` where the controller sent what it may not."""

    how: str
    fault: bool = False


Event = JoinMessage | LinkEnded


class JoinLink(Protocol):
    """One connection.  What happens on it comes in order: from ``next``, or to whom ``deliver_to`` names."""

    transport: ITCPTransport

    def __init__(self, clock: IReactorTime, limits: Limits, hello: Hello, token: bytes | None) -> None:
        self.talk = JoinClient(token=token)
        self._clock = clock
        self._limits = limits
        self._hello = hello
        self._events: DeferredQueue[Event] = DeferredQueue()
        self._happened: Callable[[Event], object] = self._events.put
        self._fault: str | None = None
        self._forced: IDelayedCall | None = None
        self._beats: LoopingCall | None = None
        self._first = b""
        self.ended = False
        """Whether the connection is gone."""
        self.gone: Deferred[None] = Deferred()
        """Fires when it is."""

    def connectionMade(self) -> None:
        sockets.tune_backend(self.transport, self._limits)
        sockets.tune_link(self.transport, self._limits)

    def greet(self) -> None:
        """Send the hello.  Not at once: of several connections that came about together only one may speak."""
        self.transport.write(self.talk.hello(self._hello))

    def dataReceived(self, data: bytes) -> None:
        if self._fault is not None:
            return
        if len(self._first) < TELLING_BYTES:
            self._first += data[:TELLING_BYTES]
        try:
            messages = self.talk.feed(data)
        except WireError as error:
            self._fault = language(self._first) or str(error)
            self.close()
            return
        for message in messages:
            self._happened(message)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008  Twisted's signature
        self.ended = True
        self._stop_beating()
        if self._forced is not None and self._forced.active():
            self._forced.cancel()
        self.gone.callback(None)
        if self._fault is not None:
            self._happened(LinkEnded(f"closed by us, for {self._fault}", fault=True))
        else:
            self._happened(LinkEnded("closed" if reason.check(ConnectionDone) else "lost"))

    def next(self, secs: float) -> Deferred[Event]:
        """The next event; TimeoutError after ``secs`` without one."""
        return self._events.get().addTimeout(secs, self._clock)

    def deliver_to(self, listener: Callable[[Event], None]) -> None:
        """Tell ``listener`` of every event from now on, those that wait included."""
        self._happened = listener
        while self._events.pending:
            listener(self._events.pending.pop(0))

    def report(self, rank: int, code: int) -> None:
        """A rank of this host ended; ``rank`` as the Accept named it."""
        if not self.ended:
            self.transport.write(self.talk.exited(rank, code))

    def explain(self, rank: int, error: RankError) -> None:
        """What a rank of this host died of, before its exit is reported."""
        if not self.ended:
            self.transport.write(self.talk.reported(rank, error))

    @property
    def peer(self) -> tuple[str, int]:
        """Where the controller was reached: a numeric address and a port."""
        address = self.transport.getPeer()
        scope = int(address.scopeID) if isinstance(address, IPv6Address) else 0
        # Without its scope nobody reaches a link-local address.
        host = f"{address.host}%{socket.if_indextoname(scope)}" if scope and "%" not in address.host else address.host
        return host, address.port

    def beat(self) -> None:
        """Send heartbeats from now on; only to a controller that says that it takes them."""
        if self.ended or self._forced is not None or self._beats is not None:
            return
        self._beats = LoopingCall(lambda: self.transport.write(self.talk.heartbeat()))
        self._beats.clock = self._clock
        self._beats.start(HEARTBEAT_SECS)

    def _stop_beating(self) -> None:
        if self._beats is not None and self._beats.running:
            self._beats.stop()

    def close(self) -> None:
        """Close once all is written, or after the grace by force."""
        if self.ended or self._forced is not None:
            return
        self._stop_beating()
        self.transport.loseConnection()
        self._forced = self._clock.callLater(CLOSE_GRACE, self.transport.abortConnection)


class LinkFactory(Factory[JoinLink]):
    """Makes the one link of a dial; several addresses may be tried, and one wins."""

    noisy = False

    def __init__(self, make: Callable[[], JoinLink]) -> None:
        self._make = make

    def buildProtocol(self, addr: object) -> JoinLink:
        return self._make()
