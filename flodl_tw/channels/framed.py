"""Connections of control frames: the loop that the join channel and the rendezvous share.

Bytes become frames, from behind the channel's magic on; a connection that has
said nothing whole by its deadline is dropped; whatever happens afterwards,
nothing more of an ended one is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from twisted.internet.interfaces import ITransport
from twisted.python.failure import Failure

from flodl_tw.channels.peeker import Peeker
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.core.errors import ViolationError, WireError
from flodl_tw.core.wire import MAGIC_BYTES, MAX_LATER_BYTES, Frame, FrameReader
from flodl_tw.deadlines import DeadlineQueue


class FramedProtocol(ABC):
    """One connection.  A subclass says what a frame means, what an unfit one leads to, and what an end means.

    ``hellos`` is the queue of its channel's deadline, ``what`` the first message that it waits for.
    """

    __slots__ = ("__weakref__", "_hellos", "_reader", "_what", "ended", "is_identified", "peeker")

    def __init__(self, peeker: Peeker, hellos: DeadlineQueue[FramedProtocol], what: str) -> None:
        self.peeker = peeker
        self.ended = False
        """Whether nothing more is read of it."""
        self.is_identified = False
        """Whether it has said who it is."""
        self._hellos = hellos
        self._what = what
        self._reader: FrameReader | None = None

    @abstractmethod
    def frame_received(self, frame: Frame) -> None:
        """A whole frame came; WireError or ViolationError where it may not."""

    @abstractmethod
    def broke(self, why: str) -> None:
        """It sent what it may not; ``why`` is for people."""

    @abstractmethod
    def left(self, *, lost: bool) -> None:
        """The peer has shut its side, or is gone altogether (``lost``); may come twice, and after ``finish``, too."""

    # The connection

    def makeConnection(self, transport: ITransport) -> None:  # noqa: B027
        """Bytes follow at once: the door calls with those that it has seen."""

    def dataReceived(self, data: bytes) -> None:
        if self.ended:
            return
        if self._reader is None:
            # The door passes the four bytes of the magic on with what follows.
            self._reader = FrameReader()
            data = data[MAGIC_BYTES:]
        reader = self._reader
        reader.feed(data)
        try:
            while not self.ended and (frame := reader.next_frame()) is not None:
                self.frame_received(frame)
        except (WireError, ViolationError) as error:
            self.broke(str(error))
        if not self.ended and not self.is_identified and self not in self._hellos:
            # Nearly every hello comes whole with its magic, and needs no deadline.
            self._hellos.start(self)

    def readConnectionLost(self) -> None:
        """The peer has shut its side.  Nobody here has anything to say to one that says nothing more."""
        self._gone(lost=False)
        self.peeker.close()

    def connectionLost(self, reason: Failure) -> None:
        self._gone(lost=True)

    # What a subclass does with it

    def identified(self) -> None:
        """It has said who it is: no deadline applies any more, and what follows is short."""
        self.is_identified = True
        self._hellos.stop(self)
        self.peeker.identified()
        if self._reader is not None:
            self._reader.max_payload = MAX_LATER_BYTES

    def finish(self) -> None:
        """Read nothing more of it, and close once what is written has left."""
        self.ended = True
        self._hellos.stop(self)
        self.peeker.close()

    def refuse(self, end: ConnectionEnd, why: str) -> None:
        """Drop it at once, with a line."""
        self.ended = True
        self._hellos.stop(self)
        self.peeker.drop(end, why)

    def expired(self) -> None:
        """The deadline of its hello has passed."""
        self.refuse(ConnectionEnd.HELLO_DEADLINE, f"no whole {self._what} within {self._hellos.seconds:g} s")

    def _gone(self, *, lost: bool) -> None:
        ended, self.ended = self.ended, True
        self._hellos.stop(self)
        self.peeker.identified()
        if not ended and not self.is_identified:
            self.peeker.left(ConnectionEnd.CUT_OFF_HELLO)
        self.left(lost=lost)
