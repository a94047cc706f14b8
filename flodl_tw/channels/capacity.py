"""How many connections the descriptors allow: accepting pauses when they are used up, and ranks have a share.

Twisted accepts in batches that grow without end, and a pause does not stop a
batch that has begun, which would eat the descriptors kept for everything else.
Its port is held to small batches here, and nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Final

from twisted.internet import tcp
from twisted.internet.interfaces import IListeningPort, IReactorTime
from twisted.logger import Logger

from flodl_tw.core.addresses import Address
from flodl_tw.limits import SPARE_DESCRIPTORS

TELL_SECS: Final = 60
"""At the limit accepting pauses and resumes with each connection; a line this often says it, in seconds."""
MOST_ACCEPTS: Final = 100
RESERVED: Final = 4
"""One of so many connections is kept free of ranks."""
ONE_OF: Final = 4
"""One address may have one of so many of the ranks' connections on each channel."""
_log = Logger()


class Capacity:
    """Counts open connections, and pauses the listening port while there are ``most`` of them."""

    def __init__(self, clock: IReactorTime, most: int, accepts: int = MOST_ACCEPTS) -> None:
        self.most = most
        self._clock = clock
        self._accepts = accepts
        self._open = 0
        self._of_ranks: dict[Hashable, tuple[tuple[str, str], int]] = {}
        self._by_address: Counter[tuple[str, str]] = Counter()
        self._ranks_open = 0
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

    @property
    def for_ranks(self) -> int:
        """What the channels of ranks may have; the rest is kept for joins and for the operator, who always get in."""
        return max(4, self.most - self.most // RESERVED)

    @property
    def for_one(self) -> int:
        """What one address may have of that on one channel."""
        return max(4, self.for_ranks // ONE_OF)

    def enter(self, rank: Hashable, address: Address, channel: str, count: int) -> str | None:
        """A rank's connection takes ``count`` descriptors until ``leave``; gives why it may not, or None.

        Loopback is held to what all have alone: a fleet may come from there, through sshd.
        """
        key = (address.shown, channel)
        if self._ranks_open + count > self.for_ranks:
            return f"ranks have {self._ranks_open} connections open, as many as the descriptors allow them"
        if self._by_address[key] + count > self.for_one and not address.loopback:
            return f"its address has {self._by_address[key]} connections on the {channel} channel, as many as one may"
        self._of_ranks[rank] = key, count
        self._by_address[key] += count
        self._ranks_open += count
        return None

    def leave(self, rank: Hashable) -> None:
        """Its connection is gone, if it was one of a rank."""
        key, count = self._of_ranks.pop(rank, (("", ""), 0))
        if count:
            self._ranks_open -= count
            self._by_address[key] -= count
            if not self._by_address[key]:
                del self._by_address[key]

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
