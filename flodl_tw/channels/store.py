"""The store channel: torch.distributed's store on our port, for the ranks of the world that has formed.

Bytes to ``core/store.py``, what it says to the transport.  The store has no
authentication of its own, so who is let in goes by address: those of the
world's hosts, and no other.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, Final
from weakref import ref

from twisted.internet.interfaces import IPushProducer, ITransport
from twisted.python.failure import Failure
from zope.interface import implementer

from flodl_tw import sockets
from flodl_tw.channels.dead_peer import send
from flodl_tw.channels.front_door import FrontDoor, Peeker
from flodl_tw.controller import Controller
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.core.store.session import StoreEffects, StoreSession
from flodl_tw.core.store.world import WorldStore
from flodl_tw.limits import MAX_WARNED_ADDRESSES

PART_BYTES: Final = 256 * 1024
"""What is given to the transport at once; the next part waits until it has room."""
TURN_SECS: Final = 0.004
"""What clients with long answers or many queries may take of one turn of the reactor, all together, in seconds."""
WOKEN_AT_ONCE: Final = 256
"""Clients that one query wakes in its own turn; the others follow in the next."""
KEPT_WORLDS: Final = 2
"""Worlds whose keys are kept for connections that stay open: this one's, and one more that had any."""
TELL_SECS: Final = 60.0
"""A refused address has a log line as often as this, in seconds."""


class StoreFactory:
    """What all store connections share; the route of the store's first bytes."""

    def __init__(self, front: FrontDoor, controller: Controller) -> None:
        self.clock: Any = front.clock
        self._controller = controller
        self._told: OrderedDict[str, float] = OrderedDict()
        # A world whose connections are all closed is gone, and its keys with it.
        self._worlds: deque[ref[WorldStore]] = deque()
        self._due: deque[StoreProtocol] = deque()
        self._turn_is_due = False

    def buildProtocol(self, peeker: Peeker) -> StoreProtocol:
        """A client of the store."""
        return StoreProtocol(self, peeker)

    def admit(self, client: StoreProtocol) -> StoreSession | None:
        """The client's connection to the world's keys; None, and it is closed, where it has none."""
        peeker = client.peeker
        run = self._controller.run
        store = run.store
        if store is None or run.over:
            why = "no world has formed yet" if store is None else "the world's hosts have all left"
        elif not store.admits(peeker.address):
            why = "it is no address of this world's hosts, and the store is for them alone"
        else:
            peeker.identified()
            sockets.bear_pauses(peeker.transport)
            client.store = store
            store.clients.add(client)
            self._keep(store)
            return StoreSession(store.keys, client)
        self._refuse(peeker, why)
        return None

    def later(self, client: StoreProtocol) -> None:
        """Have the client go on in one of the next turns: what all of them do in one takes ``TURN_SECS`` about."""
        self._due.append(client)
        self._go_on_later()

    def _go_on_later(self) -> None:
        if self._due and not self._turn_is_due:
            self._turn_is_due = True
            self.clock.callLater(0, self._go_on)

    def _go_on(self) -> None:
        self._turn_is_due = False
        end = self.clock.seconds() + TURN_SECS
        try:
            for _ in range(len(self._due)):
                self._due.popleft().go_on()
                if self.clock.seconds() >= end:
                    break
        finally:
            self._go_on_later()

    def _keep(self, store: WorldStore) -> None:
        """A connection keeps its world's keys while it is open, but not for ever: the keys of two worlds are kept."""
        if self._worlds and self._worlds[-1]() is store:
            return
        self._worlds.append(ref(store))
        oldest = self._worlds.popleft()() if len(self._worlds) > KEPT_WORLDS else None
        for client in [] if oldest is None else list(oldest.clients):
            client.give_up("its world is over, and two more have used the store")

    def _refuse(self, peeker: Peeker, why: str) -> None:
        now = self.clock.seconds()
        told = self._told.get(peeker.peer)
        if told is not None and now < told + TELL_SECS:
            peeker.left(ConnectionEnd.STORE_REFUSED)
        else:
            self._told.pop(peeker.peer, None)
            self._told[peeker.peer] = now
            if len(self._told) > MAX_WARNED_ADDRESSES:
                self._told.popitem(last=False)
            peeker.dropped(ConnectionEnd.STORE_REFUSED, f"on the store channel: {why}")
        peeker.identified()
        peeker.transport.abortConnection()


@implementer(IPushProducer)
class StoreProtocol:
    """One client of the store.  Its keys are those of the world that it was let into, to its end."""

    __slots__ = (
        "__weakref__",
        "_connection",
        "_due",
        "_more",
        "_paused",
        "_shared",
        "_transport",
        "_unsent",
        "peeker",
        "store",
    )

    def __init__(self, shared: StoreFactory, peeker: Peeker) -> None:
        self.peeker = peeker
        self.store: WorldStore | None = None
        """The world's; None while it is not let in."""
        self._shared = shared
        self._transport: Any = peeker.transport
        self._connection: StoreSession | None = None
        self._paused = False
        self._more = False
        self._due = False
        # Answers that the transport has no room for yet: the stored objects themselves, not copies.
        self._unsent: deque[bytes | memoryview] = deque()

    def makeConnection(self, transport: ITransport) -> None:
        self._connection = self._shared.admit(self)
        if self._connection is not None:
            # A client that does not read is not read from, either.
            self._transport.registerProducer(self, True)

    def dataReceived(self, data: bytes) -> None:
        if self._connection is not None:
            self._do(self._connection, self._connection.feed(data))

    def readConnectionLost(self) -> None:
        """The client has shut its side: it has nothing to ask, and a wait of it is of no use to anybody."""
        self._last_words()

    def connectionLost(self, reason: Failure) -> None:
        self._leave()

    def write(self, data: bytes, *, at_once: bool = True) -> None:
        """An answer that this client has waited for, at once or in one of the next turns."""
        if at_once and not self._unsent:
            send(self._transport, data)
            return
        self._unsent.append(data)
        self._go_on_later()

    def give_up(self, why: str) -> None:
        """Close it, for the sake of others."""
        self.peeker.dropped(ConnectionEnd.STORE_CLOSED, f"on the store channel: {why}", warn=True)
        self._leave()
        self.peeker.transport.abortConnection()

    # IPushProducer: the transport's buffer is full, or has room again

    def pauseProducing(self) -> None:
        self._paused = True
        self._reading(False)

    def resumeProducing(self) -> None:
        self._paused = False
        if not self._due:
            self.go_on()

    def stopProducing(self) -> None:
        """The connection is gone."""

    def _do(self, connection: StoreSession, outcome: StoreEffects) -> None:
        self._more = outcome.more
        self._unsent.extend(outcome.replies)
        self._send_part()
        if self._unsent:
            self._is_reading(outcome.replies)
        for count, (woken, answer) in enumerate(outcome.wakeups):
            client: Any = woken.peer
            client.write(answer, at_once=count < WOKEN_AT_ONCE)
        if outcome.close is not None:
            self.peeker.dropped(ConnectionEnd.STORE_CLOSED, f"on the store channel: {outcome.close}", warn=True)
            self._last_words()
        elif self._connection is not None and (outcome.more or self._unsent):
            self._reading(False)
            self._go_on_later()

    def _is_reading(self, replies: Sequence[bytes]) -> None:
        """A long answer is on its way: the last, since nothing is answered beyond it."""
        assert self.store is not None
        if replies and len(replies[-1]) > PART_BYTES:
            for client in self.store.unread.add(self, replies[-1]):
                client.give_up("it does not read a long value, which has been replaced, and others need the room")

    def _send_part(self) -> None:
        if self._unsent and not self._paused:
            send(self._transport, self._next_part())

    def _next_part(self) -> bytes:
        """What to write next: small answers together, a piece of a long one alone."""
        unsent, part, room = self._unsent, list[bytes | memoryview](), PART_BYTES
        while unsent and room:
            first = unsent[0]
            if len(first) > room:
                view = memoryview(first)
                first, unsent[0] = view[:room], view[room:]
            else:
                unsent.popleft()
            part.append(first)
            room -= len(first)
        return b"".join(part)

    def _last_words(self) -> None:
        """Write what is answered already, and close."""
        if self._connection is not None:
            self._transport.writeSequence(map(bytes, self._unsent))
        self._leave()
        self.peeker.close()

    def _go_on_later(self) -> None:
        """Others have their turn between two parts of a long answer."""
        if not self._due and not self._paused:
            self._due = True
            self._shared.later(self)

    def go_on(self) -> None:
        """It is this client's turn."""
        self._due = False
        if self._connection is None or self._paused:
            return
        if self._transport.disconnecting:
            # The door is closing, and has no more turns for this client.
            self._leave()
            return
        self._send_part()
        if self._unsent:
            self._go_on_later()
        else:
            self.store.unread.remove(self)  # type: ignore[union-attr]
            if self._more:
                self._do(self._connection, self._connection.feed(b""))
        if not (self._unsent or self._more or self._paused):
            self._reading(True)

    def _reading(self, on: bool) -> None:
        if self._connection is None:
            return
        if on:
            self._transport.resumeProducing()
        else:
            self._transport.pauseProducing()

    def _leave(self) -> None:
        connection, self._connection = self._connection, None
        self._unsent.clear()
        if connection is None:
            return
        assert self.store is not None
        connection.lost()
        self.store.clients.discard(self)
        self.store.unread.remove(self)
        # A paused producer would keep a connection that is to close open.
        self._transport.unregisterProducer()
