"""Who waits for which keys of a store, and who is woken when one comes.

A wait counts its keys down as they come, as torch's server does: one that has
come and is deleted again is not waited for a second time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


class Line:
    """The waits for one key, the oldest first."""

    __slots__ = ("key", "waits")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.waits: dict[Wait, None] = {}


class Wait:
    """A query that is answered later: ``missing`` of its keys have not come since ``since``."""

    __slots__ = ("lines", "missing", "owner", "since")

    def __init__(self, owner: Any, lines: tuple[Line, ...], since: float) -> None:
        self.owner = owner
        self.lines = lines
        self.missing = len(lines)
        self.since = since

    def counted_down(self) -> bool:
        """One of its keys has come; whether it was the last."""
        self.missing -= 1
        return not self.missing


@dataclass(frozen=True, slots=True)
class Waiting:
    """For people: ``clients`` wait for ``key`` (as text), the first of them for ``seconds``."""

    key: str
    clients: int
    seconds: float


class WaitLines:
    """The lines of one key space.  ``size`` is the bytes of the keys waited for, each counted once."""

    __slots__ = ("_lines", "size")

    def __init__(self) -> None:
        self._lines: dict[bytes, Line] = {}
        self.size = 0

    def __len__(self) -> int:
        """How many keys are waited for."""
        return len(self._lines)

    def fresh(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of ``keys`` that nobody waits for yet."""
        return [key for key in keys if key not in self._lines]

    def add(self, owner: Any, keys: Iterable[bytes], since: float) -> Wait:
        """Register a wait for ``keys``, each named once."""
        wait = Wait(owner, tuple(map(self._line, keys)), since)
        for line in wait.lines:
            line.waits[wait] = None
        return wait

    def cancel(self, wait: Wait) -> None:
        """Forget a wait."""
        for line in wait.lines:
            line.waits.pop(wait, None)
            if not line.waits and self._lines.get(line.key) is line:
                self._drop(line)

    def arrived(self, key: bytes) -> Sequence[Wait]:
        """A key has come for all who wait for it: the waits that this ends."""
        line = self._lines.get(key)
        if line is None:
            return ()
        self._drop(line)
        return [wait for wait in line.waits if wait.counted_down()]

    def arrived_for_one(self, key: bytes) -> Sequence[Wait]:
        """An item has come: it ends the oldest wait that needs nothing else."""
        line = self._lines.get(key)
        while line is not None and line.waits:
            wait = next(iter(line.waits))
            del line.waits[wait]
            if not line.waits:
                self._drop(line)
            if wait.counted_down():
                return (wait,)
        return ()

    def waiting(self, now: float, most: int) -> list[Waiting]:
        """What is waited for, the longest first."""
        oldest = ((next(iter(line.waits)).since, line) for line in self._lines.values())
        first = heapq.nsmallest(most, oldest, key=lambda pair: pair[0])
        return [Waiting(text_of(line.key), len(line.waits), max(0.0, now - since)) for since, line in first]

    def _line(self, key: bytes) -> Line:
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(key)
            self.size += len(key)
        return line

    def _drop(self, line: Line) -> None:
        del self._lines[line.key]
        self.size -= len(line.key)


def text_of(key: bytes) -> str:
    """A key for people."""
    return key.decode("utf-8", "backslashreplace")
