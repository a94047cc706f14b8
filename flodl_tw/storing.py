"""The store channel: torch.distributed's store on our port, for the ranks of the world that has formed.

Bytes to ``core/store.py``, what it says to the transport.  The store has no
authentication of its own, so who is let in goes by address: those of the
world's hosts, and no other.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any, Final

from twisted.internet.interfaces import IPushProducer, ITransport
from twisted.python.failure import Failure
from zope.interface import implementer

from flodl_tw import sockets
from flodl_tw.controller import Controller
from flodl_tw.core.store import Outcome, StoreConnection
from flodl_tw.limits import MAX_WARNED_ADDRESSES
from flodl_tw.mux import FrontDoor, Peeker
from flodl_tw.world_store import WorldStore

PART_BYTES: Final = 256 * 1024
"""What is given to the transport at once; the next part waits until it has room."""
TELL_SECS: Final = 60.0
"""A refused address has a log line as often as this, in seconds."""


class StoreChannel:
    """What all store connections share; the route of the store's first bytes."""

    def __init__(self, front: FrontDoor, controller: Controller) -> None:
        self.clock: Any = front.clock
        self._controller = controller
        self._told: OrderedDict[str, float] = OrderedDict()

    def __call__(self, peeker: Peeker) -> StoreClient:
        """The route of the store's magic."""
        return StoreClient(self, peeker)

    def admit(self, client: StoreClient) -> StoreConnection | None:
        """The client's connection to the world's keys; None, and it is closed, where it has none."""
        peeker = client.peeker
        run = self._controller.run
        store = run.store
        if store is None or run.over:
            why = "no world has formed yet" if store is None else "the world's hosts have all left"
        elif not store.admits(peeker.address):
            why = "it is no address of this world's hosts, and the store is for them alone"
        else:
            peeker.decided()
            sockets.bear_pauses(peeker.transport)
            client.store = store
            store.clients.add(client)
            return StoreConnection(store.keys, client)
        self._refuse(peeker, why)
        return None

    def _refuse(self, peeker: Peeker, why: str) -> None:
        now = self.clock.seconds()
        told = self._told.get(peeker.peer)
        if told is not None and now < told + TELL_SECS:
            peeker.left("store-refused")
        else:
            self._told.pop(peeker.peer, None)
            self._told[peeker.peer] = now
            if len(self._told) > MAX_WARNED_ADDRESSES:
                self._told.popitem(last=False)
            peeker.dropped("store-refused", f"on the store channel: {why}")
        peeker.decided()
        peeker.transport.abortConnection()


@implementer(IPushProducer)
class StoreClient:
    """One client of the store.  Its keys are those of the world that it was let into, to its end."""

    __slots__ = ("__weakref__", "_connection", "_more", "_paused", "_shared", "_unsent", "peeker", "store")

    def __init__(self, shared: StoreChannel, peeker: Peeker) -> None:
        self.peeker = peeker
        self.store: WorldStore | None = None
        """The world's; None while it is not let in."""
        self._shared = shared
        self._connection: StoreConnection | None = None
        self._paused = False
        self._more = False
        # Answers that the transport has no room for yet: the stored objects themselves, not copies.
        self._unsent: deque[bytes | memoryview] = deque()

    def makeConnection(self, transport: ITransport) -> None:
        self._connection = self._shared.admit(self)
        if self._connection is not None:
            # A client that does not read is not read from, either.
            transport.registerProducer(self, True)  # type: ignore[attr-defined]

    def dataReceived(self, data: bytes) -> None:
        if self._connection is not None:
            self._do(self._connection, self._connection.feed(data))

    def readConnectionLost(self) -> None:
        """The client has shut its side: it has nothing to ask, and a wait of it is of no use to anybody."""
        self._last_words()

    def connectionLost(self, reason: Failure) -> None:
        self._leave()

    def write(self, data: bytes) -> None:
        """An answer that this client has waited for."""
        if self._unsent:
            self._unsent.append(data)
        else:
            self.peeker.transport.write(data)

    # IPushProducer: the transport's buffer is full, or has room again

    def pauseProducing(self) -> None:
        self._paused = True
        self._reading(False)

    def resumeProducing(self) -> None:
        self._paused = False
        self._go_on()

    def stopProducing(self) -> None:
        """The connection is gone."""

    def _do(self, connection: StoreConnection, outcome: Outcome) -> None:
        self._more = outcome.more
        self._send(outcome.replies)
        for woken, answer in outcome.wakeups:
            client: Any = woken.peer
            client.write(answer)
        if outcome.close is not None:
            self.peeker.dropped("store-closed", f"on the store channel: {outcome.close}")
            self._last_words()
        elif outcome.more or self._unsent:
            self._reading(False)
            if not self._paused:
                # Others have their turn between two parts of a long answer.
                self._shared.clock.callLater(0, self._go_on)

    def _send(self, replies: Iterable[bytes]) -> None:
        self._unsent.extend(replies)
        while self._unsent and not self._paused:
            self.peeker.transport.write(self._next_part())

    def _next_part(self) -> bytes:
        """What to write next: small answers together, a piece of a long one alone."""
        part = [self._unsent.popleft()]
        size = len(part[0])
        if size > PART_BYTES:
            view = memoryview(part[0])
            self._unsent.appendleft(view[PART_BYTES:])
            return bytes(view[:PART_BYTES])
        while self._unsent and size + len(self._unsent[0]) <= PART_BYTES:
            part.append(self._unsent.popleft())
            size += len(part[-1])
        return bytes(part[0]) if len(part) == 1 else b"".join(part)

    def _last_words(self) -> None:
        """Write what is answered already, and close."""
        if self._connection is not None:
            self.peeker.transport.writeSequence(map(bytes, self._unsent))
        self._leave()
        self.peeker.close()

    def _go_on(self) -> None:
        if self._connection is None or self._paused:
            return
        transport: Any = self.peeker.transport
        if transport.disconnecting:
            # The door is closing, and has no more turns for this client.
            self._leave()
            return
        self._send(())
        if self._more and not self._unsent and self._connection is not None:
            self._do(self._connection, self._connection.feed(b""))
        if not self._more and not self._unsent and not self._paused:
            self._reading(True)

    def _reading(self, on: bool) -> None:
        transport: Any = self.peeker.transport
        if self._connection is None:
            return
        if on:
            transport.resumeProducing()
        else:
            transport.pauseProducing()

    def _leave(self) -> None:
        connection, self._connection = self._connection, None
        self._unsent.clear()
        if connection is None:
            return
        assert self.store is not None
        connection.lost()
        self.store.clients.discard(self)
        transport: Any = self.peeker.transport
        # A paused producer would keep a connection that is to close open.
        transport.unregisterProducer()
