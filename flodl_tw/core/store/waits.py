"""Who waits for which keys of a store, and who is woken when one comes.

A wait counts its keys down as they come, as torch's server does: one that has
come and is deleted again is not waited for a second time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final


class Wait:
    """A query that is answered later: ``missing`` of its keys have not come since ``since``."""

    __slots__ = ("keys", "missing", "owner", "since")

    def __init__(self, owner: Any, keys: Collection[bytes], since: float) -> None:
        self.owner = owner
        self.keys = tuple(keys)
        self.missing = len(self.keys)
        self.since = since

    def counted_down(self) -> bool:
        """One of its keys has come; whether it was the last."""
        self.missing -= 1
        return not self.missing


Line = Wait | dict[Wait, None]
"""Who waits for one key, the oldest first: a wait alone, as nearly always, costs no line of its own."""


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

    def add(self, owner: Any, keys: Collection[bytes], since: float) -> Wait:
        """Register a wait for ``keys``, each named once."""
        wait = Wait(owner, keys, since)
        lines = self._lines
        for key in wait.keys:
            line = lines.get(key)
            if line is None:
                lines[key] = wait
                self.size += len(key)
            elif isinstance(line, Wait):
                lines[key] = {line: None, wait: None}
            else:
                line[wait] = None
        self._waits[wait] = None
        self.size += WAIT_BYTES * len(wait.keys)
        return wait

    def cancel(self, wait: Wait) -> None:
        """Forget a wait."""
        self._end(wait)
        lines = self._lines
        for key in wait.keys:
            line = lines.get(key)
            if line is wait:
                self._drop(key)
            elif isinstance(line, dict):
                line.pop(wait, None)
                if not line:
                    self._drop(key)

    def arrived(self, key: bytes) -> Sequence[Wait]:
        """A key has come for all who wait for it: the waits that this ends."""
        if key not in self._lines:
            return ()
        ended = [wait for wait in _waits_of(self._drop(key)) if wait.counted_down()]
        for wait in ended:
            self._end(wait)
        return ended

    def arrived_for_one(self, key: bytes) -> Sequence[Wait]:
        """An item has come: it ends the oldest wait that needs nothing else."""
        if key not in self._lines:
            return ()
        line = iter(_waits_of(self._lines[key]))
        ended = next((wait for wait in line if wait.counted_down()), None)
        # Those before it have seen an item come, and wait for what else they need.
        rest = dict.fromkeys(line)
        if rest:
            self._lines[key] = rest
        else:
            self._drop(key)
        if ended is None:
            return ()
        self._end(ended)
        return (ended,)

    def waiting(self, now: float, most: int) -> list[Waiting]:
        """What is waited for, the longest first."""
        first: dict[bytes, Waiting] = {}
        for wait in self._waits:
            for key in wait.keys:
                if len(first) == most:
                    return list(first.values())
                waits = _waits_of(self._lines.get(key, {}))
                if wait in waits and key not in first:
                    first[key] = Waiting(text_of(key), len(waits), max(0.0, now - wait.since))
        return list(first.values())

    def _end(self, wait: Wait) -> None:
        del self._waits[wait]
        self.size -= WAIT_BYTES * len(wait.keys)

    def _drop(self, key: bytes) -> Line:
        self.size -= len(key)
        return self._lines.pop(key)


def _waits_of(line: Line) -> Collection[Wait]:
    return (line,) if isinstance(line, Wait) else line


def text_of(key: bytes) -> str:
    """A key for people."""
    return key.decode("utf-8", "backslashreplace")
