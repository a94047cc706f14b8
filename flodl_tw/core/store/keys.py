"""The keys of one world's store: values, queues, and who waits for what.

What an operation costs grows with what it moves, not with the number of keys;
only ``listed`` walks them.  What is written is checked against the caps as a
whole before any of it is stored, so an operation that raises has changed nothing.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from flodl_tw.core.errors import StoreError
from flodl_tw.core.log_text import quoted
from flodl_tw.core.store.waits import Wait, Waiting, WaitLines, text_of
from flodl_tw.core.store.wire import StoreLimits

WORKERS_KEY: Final = b"init/"
"""The key to which every client that waits for its world adds one; torch puts a slash before all others."""
_NUMBER: Final = re.compile(rb"[ \t-\r]*[+-]?[0-9]+")
_SURE_DIGITS: Final = 18
"""So many digits fit into 64 bits, whatever they are."""
_HALF: Final = 1 << 63


class KeySpace:
    """What one world has stored.  ``seconds`` tells the time, for the waits.

    An operation that writes returns the waits that it ended.  The cap
    ``total_bytes`` covers ``stored`` (keys and values, items of queues and the
    queues' names) and ``held`` (unfinished queries, and waits); the cap
    ``total_keys`` covers keys and items of queues.
    """

    def __init__(self, seconds: Callable[[], float], limits: StoreLimits | None = None) -> None:
        self.limits = limits if limits is not None else StoreLimits()
        self.stored = 0
        self.items = 0
        self._seconds = seconds
        self._values: dict[bytes, bytes | bytearray] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waits = WaitLines()
        self._unfinished = 0

    @property
    def key_count(self) -> int:
        """How many keys have a value; queues don't count."""
        return len(self._values)

    @property
    def held(self) -> int:
        """The bytes that are kept beside what is stored."""
        return self._unfinished + self._waits.size

    def listed(self) -> list[bytes]:
        """The keys that have a value now."""
        limit = self.limits.keys_a_query
        if len(self._values) > limit:
            raise StoreError(f"LIST_KEYS would name {len(self._values)} keys, the limit of one query is {limit}")
        return list(self._values)

    @property
    def workers(self) -> int:
        """How many clients have counted themselves in."""
        try:
            return number_of(WORKERS_KEY, self._values.get(WORKERS_KEY, b"0"))
        except StoreError:
            return 0

    def has(self, key: bytes) -> bool:
        """Whether a CHECK or a WAIT finds it: a value, or a queue that isn't empty."""
        return key in self._values or key in self._queues

    def get(self, key: bytes) -> bytes:
        """The value itself, not a copy; empty where there is none."""
        value = self._values.get(key, b"")
        if isinstance(value, bytearray):
            # APPEND has made it one, and goes on with a new one.
            value = self._values[key] = bytes(value)
        return value

    def set(self, key: bytes, value: bytes) -> Sequence[Wait]:
        """Store a value."""
        self._put(key, value)
        return self._waits.arrived(key)

    def set_all(self, pairs: dict[bytes, bytes]) -> Sequence[Wait]:
        """Store all of them or, where that breaks a cap, none."""
        values = self._values
        fresh = [key for key in pairs if key not in values]
        before = sum(len(values[key]) for key in pairs if key in values)
        grown = sum(map(len, pairs.values())) + sum(map(len, fresh)) - before
        self._make_room(grown, len(fresh))
        self.stored += grown
        values.update(pairs)
        return [wait for key in pairs for wait in self._waits.arrived(key)]

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> tuple[bytes, Sequence[Wait]]:
        """Store ``desired`` where ``expected`` is, or where nothing is and nothing is expected; give what is there.

        Where nothing is and something was expected, it gives ``expected``, as torch does.
        """
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            return desired, self.set(key, desired)
        return (expected if present is None else self.get(key)), ()

    def add(self, key: bytes, amount: int) -> tuple[int, Sequence[Wait]]:
        """Add to a number; one that isn't there is 0."""
        total = self._sum(key, amount)
        return total, self.set(key, b"%d" % total)

    def append(self, key: bytes, more: bytes) -> Sequence[Wait]:
        """Add to the end of a value; the whole stays under the cap of a value."""
        value = self._values.get(key)
        if value is None:
            return self.set(key, more)
        size = len(value) + len(more)
        if size > self.limits.value_bytes:
            raise StoreError(
                f"APPEND makes the value of {named(key)} {size} bytes, over the limit of {self.limits.value_bytes}"
            )
        self._make_room(len(more), 0)
        if isinstance(value, bytes):
            value = self._values[key] = bytearray(value)
        value += more
        self.stored += len(more)
        return self._waits.arrived(key)

    def delete(self, key: bytes) -> bool:
        """Forget a value, and say whether there was one.  A wait that has counted it does not wait for it again."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self.stored -= len(key) + len(value)
        return True

    def push(self, key: bytes, item: bytes) -> Sequence[Wait]:
        """Put an item at the end of a queue; the oldest wait that needs nothing else ends."""
        queue = self._queues.get(key)
        grown = len(item) + (len(key) if queue is None else 0)
        self._make_room(grown, 1)
        if queue is None:
            queue = self._queues[key] = deque()
        queue.append(item)
        self.stored += grown
        self.items += 1
        return self._waits.arrived_for_one(key)

    def pop(self, key: bytes) -> tuple[int, bytes]:
        """The length of a queue, and its first item, which is taken where there is one."""
        queue = self._queues.get(key)
        if queue is None:
            return 0, b""
        length = len(queue)
        item = queue.popleft()
        self.items -= 1
        self.stored -= len(item)
        if not queue:
            del self._queues[key]
            self.stored -= len(key)
        return length, item

    def queue_length(self, key: bytes) -> int:
        """How many items a queue has."""
        queue = self._queues.get(key)
        return 0 if queue is None else len(queue)

    def wait(self, owner: object, keys: Iterable[bytes]) -> Wait | None:
        """Register a wait for those of ``keys`` that are missing; None where none is."""
        missing = [key for key in keys if key not in self._values and key not in self._queues]
        if not missing:
            return None
        wait = Wait(owner, dict.fromkeys(missing), self._seconds())
        self._make_room(wait.size, 0)
        self._waits.add(wait)
        return wait

    def barrier(self, owner: object, key: bytes, world: int) -> tuple[Wait | None, Sequence[Wait]]:
        """Count one more in: a wait until the count reaches ``world``, or None and the waits that it ended."""
        count = self._sum(key, 1)
        if count >= world:
            return None, self.set(key, b"%d" % count)
        wait = Wait(owner, (key,), self._seconds())
        self._put(key, b"%d" % count, wait.size)
        self._waits.add(wait)
        return wait, ()

    def cancel(self, wait: Wait) -> None:
        """Forget a wait."""
        self._waits.cancel(wait)

    def waiting(self, most: int = 100) -> list[Waiting]:
        """What is waited for, the longest first."""
        return self._waits.waiting(self._seconds(), most)

    def hold(self, change: int) -> None:
        """A connection keeps more (or, below 0, fewer) bytes of unfinished queries than before."""
        if change > 0:
            self._make_room(change, 0)
        self._unfinished += change

    def _put(self, key: bytes, value: bytes, beside: int = 0) -> None:
        """Store a value, if there is also room for so many bytes beside it."""
        old = self._values.get(key)
        grown = len(key) + len(value) if old is None else len(value) - len(old)
        self._make_room(grown + beside, old is None)
        self._values[key] = value
        self.stored += grown

    def _make_room(self, size: int, keys: int) -> None:
        """Refuse what would break a cap of the whole; what makes nothing larger is never refused."""
        if keys and len(self._values) + self.items + keys > self.limits.total_keys:
            raise StoreError(f"the store holds all of the {self.limits.total_keys} keys it may (--store-max-keys)")
        if size > 0 and self.stored + self.held + size > self.limits.total_bytes:
            raise StoreError(
                f"{size} bytes more, beside {self.stored + self.held}, are over the store's limit of "
                f"{self.limits.total_bytes} (--store-max-bytes)"
            )

    def _sum(self, key: bytes, amount: int) -> int:
        value = self._values.get(key)
        total = amount if value is None else number_of(key, value) + amount
        return (total + _HALF) % (2 * _HALF) - _HALF


def number_of(key: bytes, value: bytes | bytearray) -> int:
    """A value as C reads a number: blanks, a sign, digits; what follows them is not looked at."""
    if len(value) <= _SURE_DIGITS and value.isdigit():
        # What ADD itself has stored, nearly always.
        return int(value)
    match = _NUMBER.match(value)
    if match is None:
        raise StoreError(f"the value of {named(key)} is no number to add to")
    try:
        number = int(match.group())
    except ValueError:
        # Python reads no more than some thousand digits.
        number = _HALF
    if not -_HALF <= number < _HALF:
        raise StoreError(f"the value of {named(key)} is a number of more than 64 bits")
    return number


def named(key: bytes) -> str:
    """A key in a reason: quoted, and short."""
    return quoted(text_of(key))
