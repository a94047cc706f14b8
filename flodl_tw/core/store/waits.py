"""Who waits for which keys of a store, and who is woken when one comes.

A wait counts its keys down as they come, as torch's server does: one that has
come and is deleted again is not waited for a second time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

WAIT_BYTES: Final = 300
"""What it costs about that one wait has one key more, beside the key itself, in bytes."""


class Wait:
    """A query of ``owner`` that is answered later: ``missing`` of its keys have not come since ``since``."""

    __slots__ = ("keys", "missing", "owner", "since", "size")

    def __init__(self, owner: object, keys: Collection[bytes], since: float) -> None:
        self.owner = owner
        self.keys = tuple(keys)
        self.missing = len(self.keys)
        self.since = since
        self.size = sum(map(len, self.keys)) + WAIT_BYTES * len(self.keys)
        """What it counts toward the store's bytes."""

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
    """The waits of one key space; for each key a line of those that miss it, the oldest first.

    ``size`` is what all waits that have not ended count toward the store's bytes.
    """

    __slots__ = ("_lines", "_waits", "size")

    def __init__(self) -> None:
        self._lines: dict[bytes, dict[Wait, None]] = {}
        # The oldest first.
        self._waits: dict[Wait, None] = {}
        self.size = 0

    def add(self, wait: Wait) -> None:
        """Register a wait, whose keys are each named once."""
        for key in wait.keys:
            self._lines.setdefault(key, {})[wait] = None
        self._waits[wait] = None
        self.size += wait.size

    def cancel(self, wait: Wait) -> None:
        """Forget a wait."""
        self._end(wait)
        for key in wait.keys:
            line = self._lines.get(key, {})
            line.pop(wait, None)
            if not line:
                self._lines.pop(key, None)

    def arrived(self, key: bytes) -> Sequence[Wait]:
        """A key has come for all who wait for it: the waits that this ends."""
        line = self._lines.pop(key, None)
        if line is None:
            return ()
        ended = [wait for wait in line if wait.counted_down()]
        for wait in ended:
            self._end(wait)
        return ended

    def arrived_for_one(self, key: bytes) -> Sequence[Wait]:
        """An item has come: it ends the oldest wait that needs nothing else."""
        line = iter(self._lines.pop(key, ()))
        ended = next((wait for wait in line if wait.counted_down()), None)
        # Those before it have seen an item come, and wait for what else they need; those after it still wait for one.
        rest = dict.fromkeys(line)
        if rest:
            self._lines[key] = rest
        if ended is None:
            return ()
        self._end(ended)
        return (ended,)

    def waiting(self, now: float, most: int) -> list[Waiting]:
        """What is waited for, the longest first; at most so many keys."""
        found: dict[bytes, Waiting] = {}
        for wait in self._waits:
            for key in wait.keys:
                if len(found) == most:
                    return list(found.values())
                line = self._lines.get(key, {})
                # Some of its keys may have come already.
                if wait in line and key not in found:
                    found[key] = Waiting(text_of(key), len(line), max(0.0, now - wait.since))
        return list(found.values())

    def _end(self, wait: Wait) -> None:
        del self._waits[wait]
        self.size -= wait.size


def text_of(key: bytes) -> str:
    """A key for people."""
    return key.decode("utf-8", "backslashreplace")
