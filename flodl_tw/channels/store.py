"""The store channel: torch.distributed's store on our port, for the ranks of the world that has formed.

It passes bytes to ``core/store/session.py`` and writes what that gives.  The
store has no authentication of its own, so the peer's address decides who is let
in: those of the world's hosts, and no other.
"""

from __future__ import annotations

from collections import deque
from typing import Final, cast
from weakref import ref

from twisted.internet.interfaces import IConsumer, IPushProducer, ITransport
from twisted.python.failure import Failure
from zope.interface import Attribute, implementer

from flodl_tw import sockets
from flodl_tw.channels.dead_peer import send
from flodl_tw.channels.front_door import FrontDoor
from flodl_tw.channels.peeker import Peeker
from flodl_tw.controller import Controller
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.core.store.session import StoreEffects, StoreSession
from flodl_tw.core.store.world import WorldStore
from flodl_tw.deadlines import guarded

PART_BYTES: Final = 256 * 1024
"""What is given to the transport at once; the next part waits until it has room."""
TURN_SECS: Final = 0.004
"""What clients with long answers or many queries may take of one turn of the reactor, all together, in seconds."""
WOKEN_AT_ONCE: Final = 256
"""Clients that one query wakes in its own turn; the others follow in the next."""
KEPT_WORLDS: Final = 2
"""Worlds whose keys are kept for connections that stay open: this one's, and one more that had any."""


class IStream(ITransport, IConsumer, IPushProducer):
    """What a Twisted transport is that carries a stream: a TCP or Unix socket, or TLS over one."""

    disconnecting: bool = Attribute("Whether it has been asked to close.")


class StoreFactory:
    """What all store connections share."""

    def __init__(self, front: FrontDoor, controller: Controller) -> None:
        self._clock = front.clock
        self._controller = controller
        # A world whose connections are all closed is gone, and its keys with it.
        self._worlds: deque[ref[WorldStore]] = deque()
        self._due: deque[StoreProtocol] = deque()
        self._turn_is_due = False

    def buildProtocol(self, peeker: Peeker) -> StoreProtocol:
        """A client of the store."""
        return StoreProtocol(self, peeker)

    def admit(self, peeker: Peeker) -> WorldStore | None:
        """The store that the peer may use; None where there is none for it, and it is closed."""
        run = self._controller.run
        store = run.store
        if store is None:
            why = "no world has formed yet"
        elif run.over:
            why = "the world's hosts have all left"
        elif not store.admits(peeker.address):
            why = "it is no address of this world's hosts, and the store is for them alone"
            if awaited := store.awaited():
                why += (
                    f"; it may be another address of a host that no rank has come from yet ({awaited}), "
                    "whose ranks have to take the way of their agent: MASTER_ADDR as it was given to them"
                )
        else:
            peeker.identified()
            sockets.bear_pauses(peeker.transport)
            self._keep(store)
            return store
        peeker.drop(ConnectionEnd.STORE_REFUSED, f"on the store channel: {why}")
        return None

    def later(self, client: StoreProtocol) -> None:
        """Have the client go on in one of the next turns: what all of them do in one takes ``TURN_SECS`` about."""
        self._due.append(client)
        self._go_on_later()

    def _go_on_later(self) -> None:
        if self._due and not self._turn_is_due:
            self._turn_is_due = True
            self._clock.callLater(0, self._go_on)

    def _go_on(self) -> None:
        self._turn_is_due = False
        end = self._clock.seconds() + TURN_SECS
        for _ in range(len(self._due)):
            guarded(self._due.popleft().go_on)
            if self._clock.seconds() >= end:
                break
        self._go_on_later()

    def _keep(self, store: WorldStore) -> None:
        """Keep the keys of this world and of one before it: connections of older worlds are closed."""
        if self._worlds and self._worlds[-1]() is store:
            return
        self._worlds.append(ref(store))
        oldest = self._worlds.popleft()() if len(self._worlds) > KEPT_WORLDS else None
        for client in [] if oldest is None else list(oldest.clients):
            client.give_up("its world is over, and two more have used the store")


@implementer(IPushProducer)
class StoreProtocol:
    """One client of the store.  Its keys are those of the world that it was let into, to its end."""

    __slots__ = ("_due", "_factory", "_more", "_paused", "_session", "_store", "_transport", "_unsent", "peeker")

    _store: WorldStore
    _transport: IStream

    def __init__(self, factory: StoreFactory, peeker: Peeker) -> None:
        self.peeker = peeker
        self._factory = factory
        # None before it is let in, and after it has left.
        self._session: StoreSession | None = None
        # Whether the transport's buffer is full, queries are still to be answered, and a turn is due to it.
        self._paused = False
        self._more = False
        self._due = False
        # Answers that the transport has no room for yet: the stored objects themselves, not copies.
        self._unsent: deque[bytes | memoryview] = deque()

    def makeConnection(self, transport: ITransport) -> None:
        self._transport = cast(IStream, transport)
        store = self._factory.admit(self.peeker)
        if store is None:
            return
        self._store = store
        self._session = StoreSession(store.keys, self)
        store.clients.add(self)
        # The transport says when its buffer is full: a client that does not read is not read from, either.
        self._transport.registerProducer(self, True)

    def dataReceived(self, data: bytes) -> None:
        if self._session is not None:
            self._do(self._session.feed(data))

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
        self._dropped(why)
        self._leave()
        self.peeker.transport.abortConnection()

    def go_on(self) -> None:
        """It is this client's turn."""
        self._due = False
        if self._session is None or self._paused:
            return
        if self._transport.disconnecting:
            # The door is closing, and has no more turns for this client.
            self._leave()
            return
        self._send_part()
        if not self._unsent:
            self._store.unread.pop(self, None)
            if self._more:
                self._do(self._session.feed(b""))
        if self._unsent or self._more:
            self._go_on_later()
        elif self._session is not None and not self._paused:
            self._transport.resumeProducing()

    # IPushProducer: the transport's buffer is full, or has room again

    def pauseProducing(self) -> None:
        self._paused = True
        self._transport.pauseProducing()

    def resumeProducing(self) -> None:
        self._paused = False
        if not self._due:
            self.go_on()

    def stopProducing(self) -> None:
        """The connection is gone."""

    # What a feed leads to

    def _do(self, effects: StoreEffects) -> None:
        self._more = effects.more
        self._unsent.extend(effects.replies)
        self._send_part()
        if self._unsent and effects.replies and len(effects.replies[-1]) > PART_BYTES:
            # A long answer is always the last: nothing is answered after it before it has left.
            self._store.reads(self, effects.replies[-1])
        for count, (woken, answer) in enumerate(effects.wakeups):
            client = woken.peer
            assert isinstance(client, StoreProtocol)
            client.write(answer, at_once=count < WOKEN_AT_ONCE)
        if effects.close is not None:
            self._dropped(effects.close)
            self._last_words()
        elif self._session is not None and (self._more or self._unsent):
            self._transport.pauseProducing()
            self._go_on_later()

    def _go_on_later(self) -> None:
        """Others have their turn between two parts of a long answer."""
        if not self._due and not self._paused:
            self._due = True
            self._factory.later(self)

    def _send_part(self) -> None:
        if self._unsent and not self._paused:
            send(self._transport, self._next_part())

    def _next_part(self) -> bytes:
        """What to write next: small answers together, or a piece of a long one."""
        unsent, part, room = self._unsent, list[bytes | memoryview](), PART_BYTES
        while unsent and room:
            first = unsent.popleft()
            if len(first) > room:
                view = memoryview(first)
                first = view[:room]
                unsent.appendleft(view[room:])
            part.append(first)
            room -= len(first)
        return b"".join(part)

    # Ends

    def _dropped(self, why: str) -> None:
        self.peeker.dropped(ConnectionEnd.STORE_CLOSED, f"on the store channel: {why}", warn=True)

    def _last_words(self) -> None:
        """Write what is answered already, and close."""
        if self._unsent:
            self._transport.write(b"".join(self._unsent))
        self._leave()
        self.peeker.close()

    def _leave(self) -> None:
        """Be a client no more: its waits are forgotten, what it has stored stays."""
        session, self._session = self._session, None
        self._unsent.clear()
        if session is None:
            return
        session.lost()
        self._store.clients.discard(self)
        self._store.unread.pop(self, None)
        # A paused producer would keep a connection that is to close open.
        self._transport.unregisterProducer()
