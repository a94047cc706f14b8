"""How many connections the descriptors allow: accepting pauses when they are used up.

Twisted accepts in batches that grow without end, and a pause does not stop a
batch that has begun, which would eat the descriptors kept for everything else.
Its port is held to small batches here, and nowhere else.
"""

from __future__ import annotations

from typing import Final

from twisted.internet import tcp
from twisted.internet.interfaces import IListeningPort, IReactorTime
from twisted.logger import Logger

from flodl_tw.limits import SPARE_DESCRIPTORS

TELL_SECS: Final = 60
"""At the limit accepting pauses and resumes with each connection; a line this often says it, in seconds."""
MOST_ACCEPTS: Final = 100
_log = Logger()


class Capacity:
    """Counts open connections, and pauses the listening port while there are ``most`` of them."""

    def __init__(self, clock: IReactorTime, most: int, accepts: int = MOST_ACCEPTS) -> None:
        self.most = most
        self._clock = clock
        self._accepts = accepts
        self._open = 0
        self._port: tcp.Port | None = None
        self._paused = False
        self._tell_again_at = 0.0

    @classmethod
    def of_descriptors(cls, clock: IReactorTime, descriptors: int) -> Capacity:
        """What a process may have that may open ``descriptors`` files."""
        most = max(descriptors - SPARE_DESCRIPTORS, descriptors // 2)
        return cls(clock, most, max(1, min(MOST_ACCEPTS, (descriptors - most) // 3)))

    def listening(self, port: IListeningPort) -> None:
        """What is accepted from; a port that Twisted has no way to pause is left alone."""
        self._port = port if isinstance(port, tcp.Port) else None
        if self._port is not None:
            self._port.numberAccepts = self._accepts

    def closing(self) -> None:
        """The port is being closed, and is not to be paused or resumed any more."""
        self._port = None

    def opened(self) -> None:
        """One more connection, accepted or dialed."""
        self._open += 1
        if self._port is not None and self._port.numberAccepts > self._accepts:
            self._port.numberAccepts = self._accepts
        self._weigh()

    def closed(self) -> None:
        """One less."""
        self._open -= 1
        self._weigh()

    def _weigh(self) -> None:
        full = self._open >= self.most
        if self._port is None or full is self._paused:
            return
        self._paused = full
        if not full:
            self._port.startReading()
            return
        self._port.stopReading()
        if self._clock.seconds() >= self._tell_again_at:
            self._tell_again_at = self._clock.seconds() + TELL_SECS
            _log.warn(
                "{count} connections are open, as many as the descriptors allow: accepting pauses until one closes "
                "(raise the limit with ulimit -n or LimitNOFILE)",
                count=self.most,
            )
