"""The queries of torch.distributed's store, cut out of a byte stream however it is split.

A query is an opcode and its arguments; there is no framing, so only reading
every field tells where the next query begins.  Every length and count is checked
as soon as it is there, before anything is kept for it, and what is kept grows
with what has arrived, never with what was announced.  What a query does is in
``session.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, repeat
from typing import Final

from flodl_tw.core.errors import StoreError

VALIDATE_NUMBER: Final = 0x3C85F7CE
"""What a VALIDATE carries."""

GATHER_BYTES: Final = 16 * 1024
"""A longer value that has not all arrived is kept in pieces of at least this size, which are joined once."""


# What a field of a query is.  The two that carry bytes come first, in the order of their caps.
_KEY, _VALUE, _I64, _U32, _COUNT = range(5)
_NUMBERS: Final = {_I64: struct.Struct("<q"), _U32: struct.Struct("<I"), _COUNT: struct.Struct("<Q")}
_length_at: Final = struct.Struct("<Q").unpack_from


class Opcode(IntEnum):
    """What a query begins with, and the fields that follow."""

    VALIDATE = (0x00, _U32)
    SET = (0x01, _KEY, _VALUE)
    COMPARE_SET = (0x02, _KEY, _VALUE, _VALUE)
    GET = (0x03, _KEY)
    ADD = (0x04, _KEY, _I64)
    CHECK = (0x05, _COUNT)
    WAIT = (0x06, _COUNT)
    GETNUMKEYS = (0x07,)
    DELETE_KEY = (0x08, _KEY)
    APPEND = (0x09, _KEY, _VALUE)
    MULTI_GET = (0x0A, _COUNT)
    MULTI_SET = (0x0B, _COUNT)
    CANCEL_WAIT = (0x0C,)
    PING = (0x0D, _U32)
    QUEUE_PUSH = (0x0E, _KEY, _VALUE)
    QUEUE_POP = (0x0F, _KEY)
    QUEUE_LEN = (0x10, _KEY)
    LIST_KEYS = (0x11,)
    BARRIER = (0x12, _KEY, _I64)

    shape: tuple[int, ...]

    def __new__(cls, code: int, *shape: int) -> Opcode:
        self = int.__new__(cls, code)
        self._value_ = code
        self.shape = shape
        return self


_SHAPES: Final = {int(opcode): opcode.shape for opcode in Opcode}


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What one query may carry (torch's own caps), and what one key space may hold."""

    key_bytes: int = 8 * 1024
    value_bytes: int = 8 * 1024 * 1024
    keys_a_query: int = 128 * 1024
    total_bytes: int = 256 * 1024 * 1024
    total_keys: int = 1_000_000


Query = tuple[int, list[bytes], int]
"""An opcode, its keys and values in their order on the wire, and its number (the count, where there is one)."""


class QueryReader:
    """Cuts one connection's byte stream into queries.

    Feed it with ``feed``; take queries with ``next_query`` until it gives None.
    """

    __slots__ = (
        *("_at", "_begun", "_caps", "_data", "_keys_a_query", "_kind", "_missing"),
        *("_number", "_opcode", "_open", "_parts", "_pieces", "_plan", "_taken"),
    )

    def __init__(self, limits: StoreLimits) -> None:
        self._caps = (limits.key_bytes, limits.value_bytes)
        self._keys_a_query = limits.keys_a_query
        self._data = b""
        self._at = 0
        self._begun = False
        self._opcode = 0
        self._parts: list[bytes] = []
        self._number = 0
        self._plan: Iterator[int] = iter(())
        # Whether a query has begun and not ended, which field comes next, and how many bytes of it have been read.
        self._open = False
        self._kind: int | None = None
        self._taken = 0
        # A long value that is still arriving, and how many bytes of it are still to come.
        self._pieces: list[bytes] = []
        self._missing = 0

    @property
    def held(self) -> int:
        """How many bytes are kept: what the unfinished query has brought so far, and what has not been looked at."""
        return self._taken + len(self._data) - self._at

    def feed(self, data: bytes) -> None:
        """Take bytes of the stream, in order."""
        if self._missing:
            data = self._gather(data)
        rest = self._data[self._at :] if self._at < len(self._data) else b""
        self._data = rest + data if rest else data
        self._at = 0

    def next_query(self) -> Query | None:
        """The next whole query, or None until more bytes come.

        Raises StoreError for what no client may send; the reader is of no use after that.
        """
        data, end = self._data, len(self._data)
        if not self._open:
            if self._at == end:
                return None
            self._begin(data[self._at])
        elif self._missing:
            return None
        at, kind, plan, parts, caps = self._at, self._kind, self._plan, self._parts, self._caps
        while kind is not None:
            if kind > _VALUE:
                layout = _NUMBERS[kind]
                stop = at + layout.size
                if stop > end:
                    break
                self._number = layout.unpack_from(data, at)[0]
                if kind == _COUNT:
                    plan = self._counted()
            else:
                body = at + 8
                if body > end:
                    break
                length = _length_at(data, at)[0]
                if length > caps[kind]:
                    what = "key" if kind == _KEY else "value"
                    raise StoreError(f"a {what} of {length} bytes is over the limit of {caps[kind]}")
                stop = body + length
                if stop > end:
                    break
                parts.append(data[body:stop])
            at = stop
            kind = next(plan, None)
        if kind is not None:
            self._suspend(kind, plan, at)
            return None
        self._at, self._open, self._taken, self._parts = at, False, 0, []
        return self._opcode, parts, self._number

    def _begin(self, opcode: int) -> None:
        shape = _SHAPES.get(opcode)
        if shape is None:
            raise StoreError(f"opcode {opcode:#04x} is none of torch's store (0x00 to {max(Opcode):#04x})")
        if not self._begun:
            if opcode != Opcode.VALIDATE:
                raise StoreError(
                    f"its first opcode is {opcode:#04x}, not VALIDATE (0x00): torch 2.2 or newer is needed"
                )
            self._begun = True
        self._opcode, self._number, self._open = opcode, 0, True
        self._at += 1
        self._plan = iter(shape)
        self._kind = next(self._plan, None)

    def _counted(self) -> Iterator[int]:
        """What follows a count.  An iterator: nothing is made for items that have not come."""
        count = self._number
        if count > self._keys_a_query:
            raise StoreError(f"{count} keys in one query are over the limit of {self._keys_a_query}")
        if self._opcode == Opcode.MULTI_SET:
            return chain.from_iterable(repeat((_KEY, _VALUE), count))
        return repeat(_KEY, count)

    def _suspend(self, kind: int, plan: Iterator[int], at: int) -> None:
        """The bytes end within a field: keep where we are, and what has come of it."""
        data = self._data
        self._kind, self._plan = kind, plan
        self._taken += at - self._at
        self._at = at
        if kind != _VALUE or len(data) - at < 8:
            return
        length = _length_at(data, at)[0]
        if length <= GATHER_BYTES:
            return
        self._taken += 8
        self._missing = length
        self._gather(data[at + 8 :])
        self._data, self._at = b"", 0

    def _gather(self, data: bytes) -> bytes:
        """Take what belongs to the long value; give back what comes after it."""
        piece, rest = data[: self._missing], data[self._missing :]
        self._taken += len(piece)
        self._missing -= len(piece)
        pieces = self._pieces
        if pieces and len(pieces[-1]) < GATHER_BYTES:
            # A value that trickles in does not become a million objects.
            pieces[-1] += piece
        else:
            pieces.append(piece)
        if not self._missing:
            self._parts.append(b"".join(pieces))
            pieces.clear()
            self._kind = next(self._plan, None)
        return rest
