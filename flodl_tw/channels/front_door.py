"""The front door: peeks at the first four bytes of a connection and hands it on.

The peeker stays the transport's protocol and passes everything to the protocol
that owns the channel, from the first byte on, so that protocol sees the
connection as if it had accepted it.  What it decides is where a connection
goes, never what it may do there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import (
    IAddress,
    IListeningPort,
    IReactorTime,
)
from twisted.internet.protocol import ServerFactory
from twisted.logger import Logger

from flodl_tw.channels.capacity import Capacity
from flodl_tw.channels.peeker import LOOPBACK, ChannelFactory, Peeker, internet_address
from flodl_tw.channels.pending import PendingConnections
from flodl_tw.channels.repeats import RepeatedLines
from flodl_tw.core.addresses import classify
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.deadlines import Closer, DeadlineQueue, Item, Wait, after
from flodl_tw.limits import MAX_WARNED_ADDRESSES, STOP_GRACE, Limits

_log = Logger()


class FrontDoor(ServerFactory):
    """Builds a peeker for each connection, and keeps the caps on those that are pending.

    ``make_routes`` gives the factory of each channel by its first four bytes;
    it is called once, with the door.  ``capacity`` is that of the descriptors.
    ``ended`` counts how connections ended that got nowhere.
    """

    noisy = False

    def __init__(
        self,
        clock: IReactorTime,
        limits: Limits,
        make_routes: Callable[[FrontDoor], Mapping[bytes, ChannelFactory]] = lambda door: {},
        *,
        max_pending: int = 4096,
        max_pending_per_host: int = 1024,
        capacity: Capacity | None = None,
    ) -> None:
        self.clock = clock
        self.limits = limits
        self.closer = Closer(clock)
        self.pending: PendingConnections[Peeker] = PendingConnections(clock.seconds, max_pending, max_pending_per_host)
        self.capacity = capacity or Capacity(clock, 1 << 20)
        self.ended: Counter[ConnectionEnd] = Counter()
        self._ends: list[Callable[[], None]] = []
        self.lines = RepeatedLines(clock)
        self.at_close(self.lines.clear)
        self.peeks: DeadlineQueue[Peeker] = self.deadlines(limits.peek, self._peek_expired)
        self._connections: set[Peeker] = set()
        self._warned: OrderedDict[str, None] = OrderedDict()
        self._closing: Deferred[None] | None = None
        self._force: Wait | None = None
        self.routes = make_routes(self)

    def __len__(self) -> int:
        return len(self._connections)

    def buildProtocol(self, addr: IAddress | None) -> Peeker:  # type: ignore[override]  # a peeker is an IProtocol
        """A peeker for a connection from ``addr``: a TCP address, or any other for a peer on this machine."""
        there = internet_address(addr)
        return Peeker(self, classify(LOOPBACK), None) if there is None else Peeker(self, classify(there[0]), there[1])

    def deadlines(self, seconds: float, expired: Callable[[Item], None]) -> DeadlineQueue[Item]:
        """A queue of deadlines for a channel, which goes when the door closes."""
        queue = DeadlineQueue(self.clock, seconds, expired)
        self.at_close(queue.clear)
        return queue

    def at_close(self, end: Callable[[], None]) -> None:
        """Have ``end`` called once every connection is gone; for what a channel holds of the reactor."""
        self._ends.append(end)

    def listening(self, port: IListeningPort) -> None:
        """What the connections come from, which may have to pause."""
        self.capacity.listening(port)

    def arrived(self, peeker: Peeker) -> None:
        """A connection was accepted."""
        self._connections.add(peeker)
        self.capacity.opened()
        if self._closing is not None:
            peeker.transport.abortConnection()
            return
        if not peeker.address.private:
            self._warn_public(peeker)
        self.peeks.start(peeker)
        crowded_out = self.pending.arrived(peeker)
        if crowded_out is not None:
            crowded_out.drop(ConnectionEnd.CROWDED_OUT, "too many connections have not said what they want")

    def gone(self, peeker: Peeker) -> None:
        """A connection is closed."""
        self._connections.discard(peeker)
        self.peeks.stop(peeker)
        self.closer.closed(peeker.transport)
        if self.pending.remove(peeker) and not peeker.has_channel:
            peeker.left(ConnectionEnd.BEFORE_CHANNEL)
        if self._closing is not None and not self._connections:
            self._all_gone(self._closing)
        self.capacity.leave(peeker)
        self.capacity.closed()

    def close_all(self) -> Deferred[None]:
        """Close every connection: the pending at once, the others after what is written has left.

        Fires when all are gone, which is within ``STOP_GRACE`` seconds.
        """
        closing = self._closing = Deferred()
        self.capacity.closing()
        for dial in self.pending:
            dial.transport.abortConnection()
        for peeker in list(self._connections):
            peeker.transport.loseConnection()
        self._force = after(self.clock, STOP_GRACE, self._abort_all)
        if not self._connections:
            self._all_gone(closing)
        return closing

    def _all_gone(self, closing: Deferred[None]) -> None:
        if closing.called:
            # A connection that was accepted meanwhile was turned away.
            return
        if self._force is not None:
            self._force.cancel()
        self.closer.clear()
        for end in self._ends:
            end()
        closing.callback(None)

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
        _log.warn(
            "{peer} is a public address, and what crosses this port is not encrypted: use a private network or sshd",
            peer=peeker.peer,
        )
