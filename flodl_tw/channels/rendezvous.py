"""The rendezvous channel: frames of the ranks to the world's rendezvous, and its effects back to them."""

from __future__ import annotations

import socket
from collections.abc import Hashable
from typing import cast

from twisted.internet.interfaces import ITransport
from twisted.logger import Logger

from flodl_tw.channels.framed import FramedProtocol
from flodl_tw.channels.front_door import FrontDoor
from flodl_tw.channels.peeker import Peeker
from flodl_tw.controller import Controller
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.core.errors import WireError
from flodl_tw.core.facts import VERSION_FACT
from flodl_tw.core.messages import RendezvousHello, Uid, decode_rendezvous, encode_rendezvous
from flodl_tw.core.rendezvous import Close, Complete, Effect, Fail, Rendezvous, Send, StartTimer, Timer
from flodl_tw.core.window import Phase
from flodl_tw.core.wire import Frame, FrameKind
from flodl_tw.core.world import World
from flodl_tw.deadlines import DeadlineQueue, Wait, after
from flodl_tw.run import Run

_log = Logger()


class RendezvousSession:
    """The rendezvous of one run's world: carries its effects out, and keeps its deadline."""

    def __init__(self, front: FrontDoor, run: Run, world: World) -> None:
        self.run = run
        self.salt = world.salt
        self.version = cast(int, run.ledger.expected(VERSION_FACT))
        self.rendezvous = Rendezvous(world.assignments, socket.gethostname())
        self._clock = front.clock
        self._seconds = {Timer.QUIET: front.limits.rendezvous_quiet, Timer.UID: front.limits.rendezvous_talk}
        self._timer: Wait | None = None
        self._peers: set[RendezvousProtocol] = set()
        run.at_end(self.end)

    def end(self) -> None:
        """The run is over: no rank gets a role or an id any more."""
        self.rendezvous.end()
        self._stop_timer()
        for peer in list(self._peers):
            peer.end()

    def apply(self, effects: list[Effect]) -> None:
        """Carry effects out, in their order."""
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self._of(peer).send(encode_rendezvous(self.salt, self.version, message))
                case Close(peer, why):
                    self._of(peer).end(why)
                case StartTimer(timer):
                    self._stop_timer()
                    self._timer = after(self._clock, self._seconds[timer], self._timed_out)
                case Fail(why):
                    self._stop_timer()
                    self.run.part_failed(why)
                case Complete():
                    self._stop_timer()
                    _log.info("every rank has the communicator's id: the rendezvous is complete")

    def dialed(self, peer: RendezvousProtocol) -> None:
        """A connection that may be a rank's."""
        self._peers.add(peer)

    def left(self, peer: RendezvousProtocol) -> None:
        """A connection is gone, or as good as."""
        self._peers.discard(peer)
        self.apply(self.rendezvous.ended(peer))

    def _of(self, peer: Hashable) -> RendezvousProtocol:
        return cast(RendezvousProtocol, peer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _timed_out(self) -> None:
        self.apply(self.rendezvous.timed_out())


class RendezvousFactory:
    """What all rendezvous connections share: the session of the current world, and the deadline of a Hello."""

    def __init__(self, front: FrontDoor, controller: Controller) -> None:
        self._front = front
        self._controller = controller
        self._session: RendezvousSession | None = None
        self.hellos: DeadlineQueue[FramedProtocol] = front.deadlines(
            front.limits.rendezvous_talk, FramedProtocol.expired
        )

    def buildProtocol(self, peeker: Peeker) -> RendezvousProtocol:
        """A connection that a rank may have dialed."""
        return RendezvousProtocol(self, peeker, self._current())

    def _current(self) -> RendezvousSession | None:
        run = self._controller.run
        if run.world is None or run.phase not in (Phase.FORMING, Phase.TRAINING):
            self._session = None
            return None
        if self._session is None or self._session.run is not run:
            self._session = RendezvousSession(self._front, run, run.world)
        return self._session


class RendezvousProtocol(FramedProtocol):
    """One rank's connection.  It belongs to the world that had formed when it dialed, and to no other."""

    __slots__ = ("_session",)

    def __init__(self, shared: RendezvousFactory, peeker: Peeker, session: RendezvousSession | None) -> None:
        super().__init__(peeker, shared.hellos, "Hello at the rendezvous")
        self._session = session

    def makeConnection(self, transport: ITransport) -> None:
        if self._session is None:
            self.refuse(ConnectionEnd.RENDEZVOUS_EARLY, "it dialed the rendezvous, and no world is forming or training")
        else:
            self._session.dialed(self)

    def send(self, data: bytes) -> None:
        """Write to the rank."""
        self.peeker.transport.write(data)

    def end(self, why: str | None = None) -> None:
        """Close, once what was written has left; ``why`` is for the log."""
        if why is not None:
            self.peeker.dropped(ConnectionEnd.RENDEZVOUS_REFUSED, why)
        self.finish()

    # FramedProtocol

    def frame_received(self, frame: Frame) -> None:
        session = self._session
        assert session is not None
        if not frame.verifies(session.salt):
            raise WireError("its frame does not verify under this world's salt: it may be of an earlier run")
        if frame.version != session.version or frame.kind is not FrameKind.RENDEZVOUS:
            raise WireError(
                f"a {frame.kind.name.lower()} frame of version {frame.version}, "
                f"the rendezvous of this world is in version {session.version}"
            )
        message = decode_rendezvous(frame.payload)
        if not self.is_identified and isinstance(message, RendezvousHello):
            self.identified()
            session.apply(session.rendezvous.hello(self, message))
        elif self.is_identified and isinstance(message, Uid):
            session.apply(session.rendezvous.uid(self, message))
        else:
            raise WireError(f"{type(message).__name__} out of its turn")

    def broke(self, why: str) -> None:
        if self.is_identified and self._session is not None:
            self._session.apply(self._session.rendezvous.broke(self, f"at the rendezvous: {why}"))
        else:
            self.end(f"at the rendezvous: {why}")

    def left(self, *, lost: bool) -> None:
        if self._session is not None:
            self._session.left(self)
