"""One connection, until its first four bytes have said whose it is; and what every owner of one needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, Protocol, cast

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import (
    IAddress,
    IHalfCloseableProtocol,
    IProtocol,
    IReactorTime,
    ITCPTransport,
    ITransport,
)
from twisted.logger import LogLevel
from twisted.python.failure import Failure
from zope.interface import implementer

from flodl_tw.channels.capacity import Capacity
from flodl_tw.channels.pending import PendingConnections
from flodl_tw.channels.repeats import RepeatedLines
from flodl_tw.core import strangers
from flodl_tw.core.addresses import DEFAULT_PORT, Address, classify, show_endpoint
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.core.wire import CONTROL_MAGIC, DATA_MAGIC, MAGIC_BYTES, RENDEZVOUS_MAGIC, STORE_MAGIC
from flodl_tw.deadlines import Closer, DeadlineQueue
from flodl_tw.limits import Limits

OF_RANKS: Final = {
    RENDEZVOUS_MAGIC: "rendezvous",
    DATA_MAGIC: "data",
    CONTROL_MAGIC: "control",
    STORE_MAGIC: "store",
}
"""The channels of ranks, by name: in a run nothing may serve one, and connections on it have caps."""

LOOPBACK: Final = "127.0.0.1"


def internet_address(addr: IAddress | None) -> tuple[str, int] | None:
    """Host and port of an address that has them; None for a Unix socket's."""
    return (addr.host, addr.port) if isinstance(addr, IPv4Address | IPv6Address) else None


class Channel(Protocol):
    """What owns a connection once its first bytes are known; a Twisted protocol that decides on half-close."""

    def makeConnection(self, transport: ITransport) -> None: ...

    def dataReceived(self, data: bytes) -> None: ...

    def readConnectionLost(self) -> None:
        """The peer has shut its side; ours still works."""

    def connectionLost(self, reason: Failure) -> None: ...


class ChannelFactory(Protocol):
    """Makes the owners of a channel's connections."""

    def buildProtocol(self, peeker: Peeker) -> Channel:
        """The owner of one connection, which the door connects and hands the bytes that it has seen."""


class Door(Protocol):
    """What a peeker asks of the door that it came through."""

    clock: IReactorTime
    limits: Limits
    capacity: Capacity
    closer: Closer
    ended: Counter[ConnectionEnd]
    lines: RepeatedLines
    peeks: DeadlineQueue[Peeker]
    pending: PendingConnections[Peeker]
    routes: Mapping[bytes, ChannelFactory]

    def arrived(self, peeker: Peeker) -> None:
        """It was accepted."""

    def gone(self, peeker: Peeker) -> None:
        """It is closed."""


@implementer(IProtocol, IHalfCloseableProtocol)
class Peeker:
    """One connection: pending until its first bytes have been read and its owner has said ``identified``."""

    __slots__ = (
        *("__weakref__", "_channel", "_counted", "_head"),
        *("address", "door", "first_byte_at", "port", "transport"),
    )

    transport: ITCPTransport

    def __init__(self, door: Door, address: Address, port: int | None) -> None:
        self.door = door
        self.address = address
        """The peer's; one behind a Unix socket is on this machine, so it counts as loopback's."""
        self.port = port
        """The peer's port; None behind a Unix socket."""
        self.first_byte_at = 0.0
        """When its first byte came, on the door's clock, in seconds."""
        self._head = b""
        self._counted = False
        self._channel: Channel | None = None

    @property
    def peer(self) -> str:
        """The peer's address, as it is shown and counted."""
        return self.address.shown

    @property
    def from_loopback(self) -> bool:
        """Whether the peer is on this host, or came through its sshd."""
        return self.address.loopback

    @property
    def endpoint(self) -> str:
        """The peer, as log lines show it."""
        return "a Unix socket's peer" if self.port is None else show_endpoint(self.peer, self.port)

    @property
    def dialed(self) -> tuple[str, int]:
        """The host and port of ours that the peer has reached, by which its ranks reach us, too.

        A peer behind a Unix socket has reached neither: it gets loopback's, with the default port.
        """
        here = internet_address(self.transport.getHost())
        return (LOOPBACK, DEFAULT_PORT) if here is None else (classify(here[0]).shown, here[1])

    def identified(self) -> None:
        """The owner has all that it needs: no deadline and no cap applies from here on."""
        self.door.pending.remove(self)

    def close(self) -> None:
        """Let what is written leave, then close; by force after the grace."""
        self.identified()
        self.door.closer.close(self.transport)

    def drop(self, end: ConnectionEnd, why: str) -> None:
        """Close a pending connection at once; one log line says who and why."""
        self.dropped(end, why)
        self.identified()
        self.transport.abortConnection()

    def dropped(self, end: ConnectionEnd, why: str, *, warn: bool = False) -> None:
        """Count an end that its peer brought about, and log it as ``RepeatedLines`` does."""
        self.left(end)
        # What is worth a warning has a line for each reason: the second one may be what the operator has to mend.
        level, kind = (LogLevel.warn, f"{end.value}: {why}") if warn else (LogLevel.info, end.value)
        self.door.lines.line(self.peer, kind, f"dropped {self.endpoint}: {why}", level)

    def left(self, end: ConnectionEnd) -> None:
        """Count an end, the first alone.  That of a probe, a scan or a peer that went away is not worth a line."""
        if not self._counted:
            self._counted = True
            self.door.ended[end] += 1

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
        factory = self.door.routes.get(magic)
        name = OF_RANKS.get(magic)
        # A forwarded dial takes a connection to its backend, too.
        count = 1 if magic == STORE_MAGIC else 2
        if factory is not None and name is not None:
            crowded = self.door.capacity.enter(self, self.address, name, count)
            if crowded is not None:
                self.drop(ConnectionEnd.CHANNEL_FULL, crowded)
                return
        if factory is not None:
            self._channel = channel = factory.buildProtocol(self)
            channel.makeConnection(self.transport)
            channel.dataReceived(head)
        elif name is not None:
            self.drop(ConnectionEnd.UNSERVED_CHANNEL, f"nothing serves the {name} channel in this run")
        else:
            self.drop(ConnectionEnd.UNKNOWN_CHANNEL, strangers.told(magic))

    @property
    def has_channel(self) -> bool:
        """Whether the first four bytes have found their owner."""
        return self._channel is not None
