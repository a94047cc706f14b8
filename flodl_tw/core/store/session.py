"""torch.distributed's store: queries in; replies, wake-ups and closes out.

A ``StoreSession`` is one client of one ``KeySpace``.  It answers query by query,
in order.  A WAIT or BARRIER is answered when its keys are there, and the queries
after it are answered meanwhile, so that CANCEL_WAIT comes through; torch's own
server does the same.  The store has no error reply: a client that does what it
may not is closed, and it alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from flodl_tw.core.errors import StoreError
from flodl_tw.core.store.keys import KeySpace
from flodl_tw.core.store.waits import Wait
from flodl_tw.core.store.wire import VALIDATE_NUMBER, Opcode, Query, QueryReader

DONE: Final = b"\0"
"""The answer of WAIT and BARRIER, and of a CHECK that found all."""
NOT_ALL: Final = b"\1"
"""The answer of a CHECK that did not."""
CANCELED: Final = b"\1"
"""The answer of CANCEL_WAIT."""

REPLY_BYTES: Final = 256 * 1024
"""Once a feed has given so many bytes of replies it gives no more: ten bytes can ask for eight million."""
QUERIES_A_FEED: Final = 256
"""Queries that one feed answers at most: the shortest are a byte, so that a segment can hold 65,536 of them."""
MOST_WAITS: Final = 8
"""Queries of one client that may wait at the same time, so that few waits end in one turn; torch's clients have one."""
JOIN_BYTES: Final = 4096
"""A value up to this size is copied behind its length; a longer one goes out as the object that is stored."""

_u64: Final = struct.Struct("<Q").pack
_i64: Final = struct.Struct("<q").pack
_u32: Final = struct.Struct("<I").pack


@dataclass(slots=True)
class StoreEffects:
    """What to do after a feed, in this order and before anything else is fed to the store.

    Write ``replies`` to this client, and each of ``wakeups`` to its connection.
    If ``close`` is a text, close this client once that has left; the text is for
    the log.  If ``more``, queries that have arrived are still to be answered: stop
    reading from the client, and once the replies have left and others have had
    their turn, feed it nothing (``b""``).
    """

    replies: list[bytes] = field(default_factory=list)
    wakeups: list[tuple[StoreSession, bytes]] = field(default_factory=list)
    close: str | None = None
    more: bool = False


class StoreSession:
    """One client.  ``peer`` is whatever the caller wants to find in a wake-up."""

    __slots__ = ("_held", "_out", "_reader", "_rest", "_rest_bytes", "_room", "_waits", "gone", "peer", "space")

    def __init__(self, space: KeySpace, peer: object = None) -> None:
        self.space = space
        self.peer = peer
        self.gone = False
        self._reader = QueryReader(space.limits)
        self._held = 0
        self._waits: dict[Wait, None] = {}
        # What the feed under way leads to, and how many bytes of replies it may still give.
        self._out = StoreEffects()
        self._room = 0
        # What is left of a long answer, and the bytes of the keys that it names.
        self._rest: Iterator[bytes] | None = None
        self._rest_bytes = 0

    def feed(self, data: bytes) -> StoreEffects:
        """Take bytes of the client's stream, in order."""
        out = self._out = StoreEffects()
        if self.gone:
            return out
        reader = self._reader
        self._room, left = REPLY_BYTES, QUERIES_A_FEED
        try:
            if self._held:
                self._hold(0)
            reader.feed(data)
            if self._rest is not None:
                self._go_on(self._rest)
            while self._room > 0 and left and (query := reader.next_query()) is not None:
                _ANSWERS[query[0]](self, query)
                left -= 1
            if held := reader.held + self._rest_bytes:
                self._hold(held)
                # Where nothing has stopped the loop above, what is held is a query that has not arrived whole.
                out.more = self._rest is not None or self._room <= 0 or not left
        except StoreError as error:
            out.close = str(error)
            self.lost()
        return out

    def lost(self) -> None:
        """The connection is gone, and so are its waits; what it has stored stays."""
        self.gone = True
        self._cancel()
        self._hold(0)
        self._reader = QueryReader(self.space.limits)
        self._rest, self._rest_bytes = None, 0

    def _hold(self, held: int) -> None:
        self.space.hold(held - self._held)
        self._held = held

    def _cancel(self) -> None:
        for wait in self._waits:
            self.space.cancel(wait)
        self._waits.clear()

    def _reply(self, reply: bytes) -> None:
        self._out.replies.append(reply)
        self._room -= len(reply)

    def _reply_all(self, parts: Iterator[bytes], keys: Iterable[bytes]) -> None:
        """Answer with all parts, in this feed and as many more as it takes; ``keys`` are what they hold."""
        self._go_on(parts)
        if self._rest is not None:
            # At least 1, since a key may be empty.
            self._rest_bytes = 1 + sum(map(len, keys))

    def _go_on(self, parts: Iterator[bytes]) -> None:
        self._rest = parts
        replies, room = self._out.replies, self._room
        for part in parts:
            replies.append(part)
            room -= len(part)
            if room <= 0:
                break
        else:
            self._rest, self._rest_bytes = None, 0
        self._room = room

    def _reply_value(self, value: bytes) -> None:
        self._out.replies += _parts(value)
        self._room -= len(value)

    def _end(self, waits: Sequence[Wait]) -> None:
        """Answer the queries that have waited until now."""
        for wait in waits:
            owner = wait.owner
            assert isinstance(owner, StoreSession)
            del owner._waits[wait]
            if owner is self:
                self._reply(DONE)
            else:
                self._out.wakeups.append((owner, DONE))

    def _validate(self, query: Query) -> None:
        if query[2] != VALIDATE_NUMBER:
            raise StoreError(f"VALIDATE carries {query[2]:#010x}, not {VALIDATE_NUMBER:#010x}")

    def _ping(self, query: Query) -> None:
        self._reply(_u32(query[2]))

    def _set(self, query: Query) -> None:
        key, value = query[1]
        self._end(self.space.set(key, value))

    def _compare_set(self, query: Query) -> None:
        key, expected, desired = query[1]
        value, ended = self.space.compare_set(key, expected, desired)
        self._end(ended)
        self._reply_value(value)

    def _get(self, query: Query) -> None:
        self._reply_value(self.space.get(query[1][0]))

    def _add(self, query: Query) -> None:
        total, ended = self.space.add(query[1][0], query[2])
        self._end(ended)
        self._reply(_i64(total))

    def _append(self, query: Query) -> None:
        key, value = query[1]
        self._end(self.space.append(key, value))

    def _delete_key(self, query: Query) -> None:
        self._reply(_i64(self.space.delete(query[1][0])))

    def _check(self, query: Query) -> None:
        self._reply(DONE if all(map(self.space.has, query[1])) else NOT_ALL)

    def _wait(self, query: Query) -> None:
        self._may_wait()
        self._later(self.space.wait(self, query[1]))

    def _barrier(self, query: Query) -> None:
        self._may_wait()
        wait, ended = self.space.barrier(self, query[1][0], query[2])
        self._end(ended)
        self._later(wait)

    def _may_wait(self) -> None:
        if len(self._waits) >= MOST_WAITS:
            raise StoreError(f"{len(self._waits)} queries of it wait, the limit is {MOST_WAITS}, and it has another")

    def _later(self, wait: Wait | None) -> None:
        if wait is None:
            self._reply(DONE)
        else:
            self._waits[wait] = None

    def _cancel_wait(self, query: Query) -> None:
        self._cancel()
        self._reply(CANCELED)

    def _getnumkeys(self, query: Query) -> None:
        self._reply(_i64(self.space.key_count))

    def _list_keys(self, query: Query) -> None:
        keys = self.space.listed()
        self._reply(_i64(len(keys)))
        self._reply_all((_u64(len(key)) + key for key in keys), keys)

    def _multi_get(self, query: Query) -> None:
        keys = query[1]
        # A value that is made for a later feed is that of the later moment.
        self._reply_all(chain.from_iterable(map(_parts, map(self.space.get, keys))), keys)

    def _multi_set(self, query: Query) -> None:
        self._end(self.space.set_all(dict(zip(query[1][::2], query[1][1::2], strict=True))))

    def _queue_push(self, query: Query) -> None:
        key, item = query[1]
        self._end(self.space.push(key, item))

    def _queue_pop(self, query: Query) -> None:
        length, item = self.space.pop(query[1][0])
        self._reply(_i64(length))
        if length:
            self._reply_value(item)

    def _queue_len(self, query: Query) -> None:
        self._reply(_i64(self.space.queue_length(query[1][0])))


def _parts(value: bytes) -> tuple[bytes, ...]:
    """A value on the wire."""
    size = len(value)
    return (_u64(size) + value,) if size <= JOIN_BYTES else (_u64(size), value)


_ANSWERS: Final[dict[int, Callable[[StoreSession, Query], None]]] = {
    opcode: getattr(StoreSession, f"_{opcode.name.lower()}") for opcode in Opcode
}
"""A query is answered by the method that has the name of its opcode."""
