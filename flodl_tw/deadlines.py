"""Timers: the one helper that starts them, many equal deadlines for the price of one, and closing for good.

A queue of deadlines of one length needs one timer, since the first to enter
is the first to fall due.  A due timer looks at the clock again before it acts,
and a failure in what it calls is logged and ends nothing else.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, ParamSpec, TypeAlias, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime, ITCPTransport
from twisted.internet.task import deferLater
from twisted.logger import Logger

from flodl_tw.limits import CLOSE_GRACE

_log = Logger()
Item = TypeVar("Item", bound=Hashable)
P = ParamSpec("P")
Wait: TypeAlias = "Deferred[object]"
"""A timer that runs; ``cancel()`` stops it, and does nothing once it has fired."""


class DeadlineQueue(Generic[Item]):
    """Deadlines that all fall due the same number of ``seconds`` after they start."""

    def __init__(self, clock: IReactorTime, seconds: float, expired: Callable[[Item], None]) -> None:
        self.seconds = seconds
        self._clock = clock
        self._expired = expired
        self._due: OrderedDict[Item, float] = OrderedDict()
        self._timer: IDelayedCall | None = None

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, item: object) -> bool:
        return item in self._due

    def start(self, item: Item) -> None:
        """``expired(item)`` is called once the time is over, unless ``stop`` comes first."""
        # A restart goes to the end, where its new time is.
        self._due.pop(item, None)
        self._due[item] = self._clock.seconds() + self.seconds
        if self._timer is None:
            self._timer = self._clock.callLater(self.seconds, self._fire)

    def stop(self, item: Item) -> None:
        """Forget the item, if it is there.  The timer stays: it looks again when it fires."""
        self._due.pop(item, None)

    def clear(self) -> None:
        """Forget all, and the timer too."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        # Timers run before a turn's reads, and this one may be late: what has arrived by now is read first.
        self._timer = self._clock.callLater(0, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._clock.seconds()
        while self._due:
            item, due = next(iter(self._due.items()))
            if due > now:
                # A removed item leaves its timer behind, so this one may be early.
                self._timer = self._clock.callLater(due - now, self._fire)
                return
            del self._due[item]
            guarded(self._expired, item)


def guarded(body: Callable[P, object], *args: P.args, **options: P.kwargs) -> None:
    """Call ``body``; what it raises is logged as our fault, and stops here."""
    try:
        body(*args, **options)
    except Exception:
        _log.failure("a timer's work failed; everything else goes on")


def after(clock: IReactorTime, seconds: float, body: Callable[P, object], *args: P.args, **options: P.kwargs) -> Wait:
    """Call ``body``, guarded, in ``seconds``.  Cancelling what this gives, at any time, has it not be called."""
    waiting: Wait = deferLater(clock, seconds)
    waiting.addCallbacks(lambda _: guarded(body, *args, **options), lambda failure: failure.trap(CancelledError))
    return waiting


def use_monotonic_clock(reactor: IReactorTime) -> None:
    """Have the reactor's timers follow a clock that no step of the wall clock moves.

    Twisted's own is the wall clock: set back it stalls every timer, and set forward it fires them all.
    """
    reactor.seconds = time.monotonic  # type: ignore[method-assign]


class Closer:
    """Closes connections for good: asks first, and insists after the grace.

    A peer that does not read would keep its connection for ever otherwise.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._waiting: DeadlineQueue[ITCPTransport] = DeadlineQueue(
            clock, CLOSE_GRACE, lambda transport: transport.abortConnection()
        )

    def close(self, transport: ITCPTransport) -> None:
        """Let what is written leave, then close; by force after ``CLOSE_GRACE`` seconds."""
        if transport in self._waiting:
            # Asked already; asking again must not lengthen the grace.
            return
        self._waiting.start(transport)
        transport.loseConnection()

    def closed(self, transport: ITCPTransport) -> None:
        """The connection is gone."""
        self._waiting.stop(transport)

    def clear(self) -> None:
        """Stop the timer; for the end of the process."""
        self._waiting.clear()
