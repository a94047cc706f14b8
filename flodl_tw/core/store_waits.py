"""Who waits for which keys of a store, and who is woken when one comes.

A wait counts its keys down as they come, as torch's server does: one that has
come and is deleted again is not waited for a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

SPARE: Final = 64
"""Removed waits that a line may remember, and one for every eight that are there."""


class Line:
    """The waits for one key, the oldest first."""

    __slots__ = ("_removed", "key", "waits")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.waits: dict[Wait, None] = {}
        self._removed = 0

    def remove(self, wait: Wait) -> None:
        """One of them waits no longer; nothing happens where it is none of them."""
        if wait not in self.waits:
            return
        del self.waits[wait]
        self._removed += 1
        if self._removed > SPARE + len(self.waits) // 8:
            # Who looks for the first of a dict walks over all that have been removed before it.
            self.waits = dict(self.waits)
            self._removed = 0


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


WAIT_BYTES: Final = 100
"""What it costs about that one wait has one key more, beside the key itself, in bytes."""


class WaitLines:
    """The lines of one key space.

    ``size`` is bytes: the keys waited for, each counted once, and
    ``WAIT_BYTES`` for every key of every wait that has not ended.
    """

    __slots__ = ("_lines", "_waits", "size")

    def __init__(self) -> None:
        self._lines: dict[bytes, Line] = {}
        # The oldest first.
        self._waits: dict[Wait, None] = {}
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
        self._waits[wait] = None
        self.size += WAIT_BYTES * len(wait.lines)
        return wait

    def cancel(self, wait: Wait) -> None:
        """Forget a wait."""
        self._end(wait)
        for line in wait.lines:
            line.remove(wait)
            if not line.waits and self._lines.get(line.key) is line:
                self._drop(line)

    def arrived(self, key: bytes) -> Sequence[Wait]:
        """A key has come for all who wait for it: the waits that this ends."""
        line = self._lines.get(key)
        if line is None:
            return ()
        self._drop(line)
        ended = [wait for wait in line.waits if wait.counted_down()]
        for wait in ended:
            self._end(wait)
        return ended

    def arrived_for_one(self, key: bytes) -> Sequence[Wait]:
        """An item has come: it ends the oldest wait that needs nothing else."""
        line = self._lines.get(key)
        if line is None:
            return ()
        passed, ended = [], None
        for wait in line.waits:
            passed.append(wait)
            if wait.counted_down():
                ended = wait
                break
        for wait in passed:
            line.remove(wait)
        if not line.waits:
            self._drop(line)
        if ended is None:
            return ()
        self._end(ended)
        return (ended,)

    def waiting(self, now: float, most: int) -> list[Waiting]:
        """What is waited for, the longest first."""
        first: dict[bytes, Waiting] = {}
        for wait in self._waits:
            for line in wait.lines:
                if len(first) == most:
                    return list(first.values())
                if wait in line.waits and self._lines.get(line.key) is line and line.key not in first:
                    secs = max(0.0, now - wait.since)
                    first[line.key] = Waiting(text_of(line.key), len(line.waits), secs)
        return list(first.values())

    def _end(self, wait: Wait) -> None:
        del self._waits[wait]
        self.size -= WAIT_BYTES * len(wait.lines)

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
