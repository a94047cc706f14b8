"""The front door: peeks at the first four bytes of a connection and hands it on.

The peeker stays the transport's protocol and passes everything to the protocol
that owns the channel, from the first byte on, so that protocol sees the
connection as if it had accepted it.  What it decides is where a connection
goes, never what it may do there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, cast

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import (
    IAddress,
    IDelayedCall,
    IHalfCloseableProtocol,
    IProtocol,
    IReactorTime,
    ITCPTransport,
    ITransport,
)
from twisted.internet.protocol import ServerFactory
from twisted.logger import Logger, LogLevel
from twisted.python.failure import Failure
from zope.interface import implementer

from flodl_tw.channels.pending import PendingConnections
from flodl_tw.core.addresses import Address, classify, show_endpoint
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.core.wire import CONTROL_MAGIC, DATA_MAGIC, MAGIC_BYTES, RENDEZVOUS_MAGIC, STORE_MAGIC
from flodl_tw.deadlines import Closer, DeadlineQueue
from flodl_tw.limits import MAX_WARNED_ADDRESSES, STOP_GRACE, Limits

UNSERVED: Final = {
    RENDEZVOUS_MAGIC: "rendezvous",
    DATA_MAGIC: "data",
    CONTROL_MAGIC: "control",
    STORE_MAGIC: "store",
}
"""Channels that may have no subsystem in a run, for the log line that says so."""

OLD_TORCH: Final = " (they look like torch's before 2.2, whose store is another: torch 2.2 or newer is needed)"


class Channel(Protocol):
    """What owns a connection once its first bytes are known; a Twisted protocol that decides on half-close."""

    def makeConnection(self, transport: ITransport) -> None: ...

    def dataReceived(self, data: bytes) -> None: ...

    def readConnectionLost(self) -> None:
        """The peer has shut its side; ours still works."""

    def connectionLost(self, reason: Failure) -> None: ...


class PausablePort(Protocol):
    """The part of a listening port that the door needs to stop accepting for a while."""

    numberAccepts: int

    def startReading(self) -> None: ...

    def stopReading(self) -> None: ...


Route = Callable[["Peeker"], Channel]


@implementer(IProtocol, IHalfCloseableProtocol)
class Peeker:
    """One connection: pending until its first bytes have been read and its owner has said ``identified``."""

    __slots__ = ("__weakref__", "_channel", "_counted", "_head", "door", "first_byte_at", "peer", "port", "transport")

    transport: ITCPTransport

    def __init__(self, door: FrontDoor, peer: str, port: int) -> None:
        self.door = door
        self.peer = peer
        self.port = port
        self.first_byte_at = 0.0
        """When its first byte came, on the door's clock, in seconds."""
        self._head = b""
        self._counted = False
        self._channel: Channel | None = None

    @property
    def address(self) -> Address:
        """The peer's address."""
        return classify(self.peer)

    @property
    def from_loopback(self) -> bool:
        """Whether the peer is on this host, or came through its sshd."""
        return self.address.loopback

    @property
    def endpoint(self) -> str:
        """The peer, as log lines show it."""
        return show_endpoint(self.peer, self.port)

    def identified(self) -> None:
        """The owner has all that it needs: no deadline and no cap applies from here on."""
        self.door.pending.remove(self)

    def close(self) -> None:
        """Let what is written leave, then close; by force after the grace."""
        self.identified()
        self.door.closer.close(self.transport)

    def drop(self, end: ConnectionEnd, why: str) -> None:
        """Close an pending connection at once; one log line says who and why."""
        self.dropped(end, why)
        self.identified()
        self.transport.abortConnection()

    def dropped(self, end: ConnectionEnd, why: str, level: Any = LogLevel.info) -> None:
        """Count and log an end that its peer brought about."""
        self._counted = True
        self.door.ended[end] += 1
        self.door.log.emit(level, "dropped {who}: {why}", who=self.endpoint, why=why)

    def left(self, end: ConnectionEnd) -> None:
        """Count an end that means nothing: a probe, a scan, a peer that went away.  Not worth a line."""
        if self._counted:
            # It ended by our doing, and is counted so.
            return
        self._counted = True
        self.door.ended[end] += 1
        self.door.log.debug("{who} left: {end}", who=self.endpoint, end=end.value)

    # IProtocol and IHalfCloseableProtocol

    def makeConnection(self, transport: ITransport) -> None:
        self.transport = cast(ITCPTransport, transport)
        self.connectionMade()

    def connectionMade(self) -> None:
        self.door.arrived(self)

    def dataReceived(self, data: bytes) -> None:
        if self._channel is not None:
            self._channel.dataReceived(data)
            return
        if not self._head:
            self.first_byte_at = self.door.clock.seconds()
        self._head += data
        if len(self._head) >= MAGIC_BYTES:
            self._route()

    def readConnectionLost(self) -> None:
        if self._channel is not None:
            self._channel.readConnectionLost()
        else:
            self.left(ConnectionEnd.BEFORE_CHANNEL)
            self.close()

    def writeConnectionLost(self) -> None:
        # Nobody here shuts only the sending side, so this comes with the connection's end alone.
        pass

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008  Twisted's signature
        self.door.gone(self)
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.connectionLost(reason)

    def _route(self) -> None:
        head, self._head = self._head, b""
        magic = head[:MAGIC_BYTES]
        self.door.peeks.stop(self)
        route = self.door.routes.get(magic)
        if route is not None:
            self._channel = channel = route(self)
            channel.makeConnection(self.transport)
            channel.dataReceived(head)
        elif magic in UNSERVED:
            self.drop(ConnectionEnd.UNSERVED_CHANNEL, f"nothing serves the {UNSERVED[magic]} channel in this run")
        else:
            hint = OLD_TORCH if magic[:1] == b"\3" and magic[2:] == b"\0\0" else ""
            self.drop(ConnectionEnd.UNKNOWN_CHANNEL, f"its first bytes {magic.hex()} are no channel's{hint}")

    @property
    def has_channel(self) -> bool:
        """Whether the first four bytes have found their owner."""
        return self._channel is not None


class FrontDoor(ServerFactory):
    """Builds a peeker for each connection, and keeps the caps on those that are pending.

    ``routes`` maps the first four bytes to the builder of a channel's protocol; whoever joins the parts sets it.
    ``capacity`` is how many connections may be open before accepting pauses,
    ``accepts`` how many are accepted before others have their turn.
    ``ended`` counts how connections ended that got nowhere.
    """

    log = Logger()
    noisy = False

    def __init__(
        self,
        clock: IReactorTime,
        limits: Limits,
        *,
        max_pending: int = 4096,
        max_pending_per_host: int = 1024,
        capacity: int = 1 << 20,
        accepts: int = 100,
    ) -> None:
        self.clock = clock
        self.limits = limits
        self.routes: Mapping[bytes, Route] = {}
        self.closer = Closer(clock)
        self.pending = PendingConnections(clock.seconds, max_pending, max_pending_per_host)
        self._queues: list[DeadlineQueue[Any]] = []
        self._ends: list[Callable[[], None]] = []
        self.peeks: DeadlineQueue[Peeker] = self.deadlines(limits.peek, self._peek_expired)
        self.ended: Counter[ConnectionEnd] = Counter()
        self.port: PausablePort | None = None
        self.capacity = capacity
        self.accepts = accepts
        self._connections: set[Peeker] = set()
        self._backends = 0
        self._paused = False
        self._pause_told = 0.0
        self._warned: OrderedDict[str, None] = OrderedDict()
        self._closing = False
        self._emptied: Deferred[None] | None = None
        self._force: IDelayedCall | None = None

    def __len__(self) -> int:
        return len(self._connections)

    def buildProtocol(self, addr: IAddress | None) -> Peeker:  # type: ignore[override]  # a peeker is an IProtocol
        """A peeker for a connection from ``addr``, a TCP address."""
        host, port = addr.host, addr.port  # type: ignore[union-attr]
        return Peeker(self, classify(host).shown, port)

    def deadlines(self, seconds: float, expired: Callable[[Any], None]) -> DeadlineQueue[Any]:
        """A queue of deadlines for a channel, which goes when the door closes."""
        queue: DeadlineQueue[Any] = DeadlineQueue(self.clock, seconds, expired)
        self._queues.append(queue)
        return queue

    def at_close(self, end: Callable[[], None]) -> None:
        """Have ``end`` called once every connection is gone; for what a channel holds of the reactor."""
        self._ends.append(end)

    def arrived(self, peeker: Peeker) -> None:
        """A connection was accepted."""
        self._connections.add(peeker)
        if self._closing:
            peeker.transport.abortConnection()
            return
        if not classify(peeker.peer).private:
            self._warn_public(peeker)
        self.peeks.start(peeker)
        if self.port is not None and getattr(self.port, "numberAccepts", 0) > self.accepts:
            # Twisted lets a batch grow without end, and pausing does not stop one: it would eat the spare descriptors.
            self.port.numberAccepts = self.accepts
        crowded_out = self.pending.arrived(peeker)
        if crowded_out is not None:
            cast(Peeker, crowded_out).drop(
                ConnectionEnd.CROWDED_OUT, "too many connections have not said what they want"
            )
        self._weigh()

    def gone(self, peeker: Peeker) -> None:
        """A connection is closed."""
        self._connections.discard(peeker)
        self.peeks.stop(peeker)
        pending = self.pending.remove(peeker)
        self.closer.closed(peeker.transport)
        if pending and not peeker.has_channel:
            peeker.left(ConnectionEnd.BEFORE_CHANNEL)
        if self._closing and not self._connections:
            self._all_gone()
        self._weigh()

    def backend_opened(self) -> None:
        """A connection to a backend counts toward the descriptors like one that was accepted."""
        self._backends += 1
        self._weigh()

    def backend_closed(self) -> None:
        """It is gone."""
        self._backends -= 1
        self._weigh()

    def _weigh(self) -> None:
        full = len(self._connections) + self._backends >= self.capacity
        if self.port is None or self._closing or full is self._paused:
            return
        self._paused = full
        if not full:
            self.port.startReading()
            return
        self.port.stopReading()
        if self.clock.seconds() >= self._pause_told:
            # At the limit it pauses and resumes with each connection; a line a minute says it.
            self._pause_told = self.clock.seconds() + 60
            self.log.warn(
                "{count} connections are open, as many as the descriptors allow: accepting pauses until one closes "
                "(raise the limit with ulimit -n or LimitNOFILE)",
                count=self.capacity,
            )

    def close_all(self) -> Deferred[None]:
        """Close every connection: the pending at once, the others after what is written has left.

        Fires when all are gone, which is within ``STOP_GRACE`` seconds.
        """
        self._closing = True
        emptied = self._emptied = Deferred()
        for dial in self.pending:
            cast(Peeker, dial).transport.abortConnection()
        for peeker in list(self._connections):
            peeker.transport.loseConnection()
        self._force = self.clock.callLater(STOP_GRACE, self._abort_all)
        if not self._connections:
            self._all_gone()
        return emptied

    def _all_gone(self) -> None:
        if self._force is not None and self._force.active():
            self._force.cancel()
        for queue in self._queues:
            queue.clear()
        self.closer.clear()
        ends, self._ends = self._ends, []
        for end in ends:
            end()
        emptied, self._emptied = self._emptied, None
        if emptied is not None:
            emptied.callback(None)

    def _abort_all(self) -> None:
        for peeker in list(self._connections):
            peeker.transport.abortConnection()

    def _peek_expired(self, peeker: Peeker) -> None:
        peeker.drop(ConnectionEnd.PEEK_DEADLINE, f"no channel within {self.limits.peek} s")

    def _warn_public(self, peeker: Peeker) -> None:
        if peeker.peer in self._warned:
            return
        self._warned[peeker.peer] = None
        if len(self._warned) > MAX_WARNED_ADDRESSES:
            self._warned.popitem(last=False)
        self.log.warn(
            "{peer} is a public address, and what crosses this port is not encrypted: use a private network or sshd",
            peer=peeker.peer,
        )
