"""Things that happen once, and that several may wait for."""

from __future__ import annotations

from typing import Generic, TypeVar

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

T = TypeVar("T")


class Once(Generic[T]):
    """Something that happens once.  Each who waits for it has a Deferred of its own, and may ask late."""

    def __init__(self) -> None:
        self._results: list[T | Failure] = []
        self._waiting: list[Deferred[T]] = []

    def wait(self) -> Deferred[T]:
        """Fires when it has happened, or fails when it cannot happen any more."""
        waiting: Deferred[T] = Deferred(self._waiting.remove)
        self._waiting.append(waiting)
        self._tell()
        return waiting

    def happened(self, result: T | Failure) -> None:
        """It has happened, or never will; what comes after the first time says nothing new."""
        if not self._results:
            self._results.append(result)
            self._tell()

    def _tell(self) -> None:
        while self._results and self._waiting:
            self._waiting.pop(0).callback(self._results[0])
