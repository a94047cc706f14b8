"""The rendezvous channel: frames of the ranks to the world's rendezvous, and its effects back to them."""

from __future__ import annotations

import socket
from collections.abc import Hashable
from typing import cast

from twisted.internet.interfaces import IDelayedCall, ITransport
from twisted.logger import Logger
from twisted.python.failure import Failure

from flodl_tw.channels.front_door import FrontDoor, Peeker
from flodl_tw.controller import Controller
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.core.errors import WireError
from flodl_tw.core.facts import VERSION_FACT
from flodl_tw.core.messages import RendezvousHello, Uid, decode_rendezvous, encode_rendezvous
from flodl_tw.core.rendezvous import Close, Complete, Effect, Fail, Rendezvous, Send, StartTimer, StopTimer, Timer
from flodl_tw.core.window import Phase
from flodl_tw.core.wire import MAGIC_BYTES, MAX_LATER_BYTES, Frame, FrameKind, FrameReader
from flodl_tw.core.world import World
from flodl_tw.deadlines import DeadlineQueue, guarded
from flodl_tw.run import Run


class RendezvousSession:
    """The rendezvous of one run's world: carries its effects out, and keeps its deadlines."""

    log = Logger()

    def __init__(self, front: FrontDoor, run: Run, world: World) -> None:
        self.run = run
        self.salt = world.salt
        self.version = cast(int, run.ledger.expected(VERSION_FACT))
        self.rendezvous = Rendezvous(world.assignments, socket.gethostname())
        self._clock = front.clock
        self._seconds = {Timer.QUIET: front.limits.rendezvous_quiet, Timer.UID: front.limits.rendezvous_talk}
        self._timers: dict[Timer, IDelayedCall] = {}
        self._peers: set[RendezvousProtocol] = set()
        run.at_end(self.end)

    def end(self) -> None:
        """The run is over: nobody meets any more."""
        self.rendezvous.end()
        for timer in list(self._timers):
            self._stop(timer)
        for peer in list(self._peers):
            peer.finish()

    def apply(self, effects: list[Effect]) -> None:
        """Carry effects out, in their order."""
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self._of(peer).send(encode_rendezvous(self.salt, self.version, message))
                case Close(peer, why):
                    self._of(peer).finish(why)
                case StartTimer(timer):
                    self._stop(timer)
                    self._timers[timer] = self._clock.callLater(self._seconds[timer], guarded, self._timed_out, timer)
                case StopTimer(timer):
                    self._stop(timer)
                case Fail(why):
                    self.run.part_failed(why)
                case Complete():
                    self.log.info("every rank has the communicator's id: the rendezvous is complete")

    def dialed(self, peer: RendezvousProtocol) -> None:
        """A connection that may be a rank's."""
        self._peers.add(peer)

    def left(self, peer: RendezvousProtocol) -> None:
        """A connection is gone, or as good as."""
        self._peers.discard(peer)
        self.apply(self.rendezvous.ended(peer))

    def _of(self, peer: Hashable) -> RendezvousProtocol:
        return cast(RendezvousProtocol, peer)

    def _stop(self, timer: Timer) -> None:
        call = self._timers.pop(timer, None)
        if call is not None and call.active():
            call.cancel()

    def _timed_out(self, timer: Timer) -> None:
        self._timers.pop(timer, None)
        self.apply(self.rendezvous.timed_out(timer))


class RendezvousFactory:
    """What all rendezvous connections share; the route of the rendezvous magic."""

    def __init__(self, front: FrontDoor, controller: Controller) -> None:
        self._front = front
        self._controller = controller
        self._meeting: RendezvousSession | None = None
        self.hellos: DeadlineQueue[RendezvousProtocol] = front.deadlines(
            front.limits.rendezvous_talk, RendezvousProtocol.hello_expired
        )

    def __call__(self, peeker: Peeker) -> RendezvousProtocol:
        """A connection that a rank may have dialed."""
        return RendezvousProtocol(self, peeker, self._current())

    def _current(self) -> RendezvousSession | None:
        run = self._controller.run
        if run.world is None or run.phase not in (Phase.FORMING, Phase.TRAINING):
            self._meeting = None
            return None
        if self._meeting is None or self._meeting.run is not run:
            self._meeting = RendezvousSession(self._front, run, run.world)
        return self._meeting


class RendezvousProtocol:
    """One rank's connection.  It belongs to the world that had formed when it dialed, and to no other."""

    def __init__(self, shared: RendezvousFactory, peeker: Peeker, meeting: RendezvousSession | None) -> None:
        self._shared = shared
        self._peeker = peeker
        self._meeting = meeting
        self._reader = FrameReader()
        self._magic_left = MAGIC_BYTES
        self._said_hello = False
        self._ended = False

    def makeConnection(self, transport: ITransport) -> None:
        self._shared.hellos.start(self)
        if self._meeting is not None:
            self._meeting.dialed(self)

    def dataReceived(self, data: bytes) -> None:
        if self._ended:
            return
        if self._meeting is None:
            self._drop(ConnectionEnd.RENDEZVOUS_EARLY, "it dialed the rendezvous, and no world is forming or training")
            return
        self._reader.feed(data[self._magic_left :])
        self._magic_left = 0
        try:
            while not self._ended and (frame := self._reader.next_frame()) is not None:
                self._frame(self._meeting, frame)
        except WireError as error:
            self._bad(self._meeting, str(error))

    def readConnectionLost(self) -> None:
        """The peer has shut its side: a rank needs both."""
        self._leave()
        self._peeker.close()

    def connectionLost(self, reason: Failure) -> None:
        self._leave()

    def hello_expired(self) -> None:
        """The deadline of the Hello has passed."""
        self._drop(ConnectionEnd.HELLO_DEADLINE, "no whole Hello at the rendezvous in time")

    def send(self, data: bytes) -> None:
        """Write to the rank."""
        self._peeker.transport.write(data)

    def finish(self, why: str | None = None) -> None:
        """Close, once what was written has left; ``why`` is for the log."""
        if why is not None:
            self._peeker.dropped(ConnectionEnd.RENDEZVOUS_REFUSED, why)
        self._ended = True
        self._shared.hellos.stop(self)
        self._peeker.close()

    def _frame(self, meeting: RendezvousSession, frame: Frame) -> None:
        if not frame.verifies(meeting.salt):
            raise WireError("its frame does not verify under this world's salt: it may be of an earlier run")
        if frame.version != meeting.version or frame.kind is not FrameKind.RENDEZVOUS:
            raise WireError(
                f"a {frame.kind.name.lower()} frame of version {frame.version}, "
                f"the rendezvous of this world is in version {meeting.version}"
            )
        message = decode_rendezvous(frame.payload)
        if not self._said_hello and isinstance(message, RendezvousHello):
            self._said_hello = True
            self._shared.hellos.stop(self)
            self._peeker.identified()
            self._reader.max_payload = MAX_LATER_BYTES
            meeting.apply(meeting.rendezvous.hello(self, message))
        elif self._said_hello and isinstance(message, Uid):
            meeting.apply(meeting.rendezvous.uid(self, message))
        else:
            raise WireError(f"{type(message).__name__} out of its turn")

    def _bad(self, meeting: RendezvousSession, why: str) -> None:
        if self._said_hello:
            meeting.apply(meeting.rendezvous.broke(self, f"at the rendezvous: {why}"))
        else:
            self.finish(f"at the rendezvous: {why}")

    def _drop(self, end: ConnectionEnd, why: str) -> None:
        self._ended = True
        self._shared.hellos.stop(self)
        self._peeker.drop(end, why)

    def _leave(self) -> None:
        if not self._ended and not self._said_hello:
            self._peeker.left(ConnectionEnd.CUT_OFF_HELLO)
        self._ended = True
        self._shared.hellos.stop(self)
        self._peeker.identified()
        if self._meeting is not None:
            self._meeting.left(self)
