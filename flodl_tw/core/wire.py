"""Channel magics, bincode shapes and control frames: bytes in, bytes out.

Nothing here knows what a message means (``messages.py`` does) or who sent it.
No length that arrives is believed before its bytes are there, and every
complaint is a ``WireError``.  Layouts: ``docs/wire.md``.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final

from flodl_tw.core.errors import WireError

MAGIC_BYTES: Final = 4
"""How many bytes tell the channels apart."""

RENDEZVOUS_MAGIC: Final = bytes.fromhex("e0170df1")
DATA_MAGIC: Final = bytes.fromhex("e1170df1")
CONTROL_MAGIC: Final = bytes.fromhex("e2170df1")
JOIN_MAGIC: Final = bytes.fromhex("e3170df1")
STORE_MAGIC: Final = bytes.fromhex("00cef785")
"""How every client of torch.distributed's store begins, from torch 2.2 on."""
HTTP_MAGICS: Final = (b"GET ", b"POST", b"HEAD", b"OPTI", b"PUT ", b"DELE", b"PATC")

HEARTBEAT_HEADER: Final = b"FLODL-TW-Heartbeats"
"""In the answers of a controller that takes heartbeats."""
FRAME_MAGIC: Final = bytes.fromhex("c4170df1")
HEADER_BYTES: Final = 24
TAG_BYTES: Final = 8
SALT_BYTES: Final = 16
ZERO_KEY: Final = bytes(SALT_BYTES)
"""The key of join frames under open admission."""

MAX_HELLO_BYTES: Final = 64 * 1024
"""Payload cap of the first frame of a connection."""
MAX_LATER_BYTES: Final = 4 * 1024
"""Payload cap of every later frame."""

_HEADER = struct.Struct("<4sI8sII")
_MAC_PREFIX = struct.Struct("<II")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_ONE_BYTE = tuple(bytes((value,)) for value in range(251))


class FrameKind(IntEnum):
    """The kinds of control frame in use; 4 and 5 are retired and refused."""

    CONTROL = 1
    TIMING = 2
    METRICS = 3
    RENDEZVOUS = 6
    JOIN = 7
    REPORT = 0x40
    """This project's own: what a rank said of its death (``reports.py``)."""
    HEARTBEAT = 0x41
    """This project's own, and empty: the host's link is in use, whatever a proxy thinks."""


_KINDS: Final = {int(kind): kind for kind in FrameKind}


def frame_tag(key: bytes, kind: int, payload: bytes) -> bytes:
    """The 8-byte authentication tag of a frame.  The version is not under it."""
    mac = _keyed(key).copy()
    mac.update(_MAC_PREFIX.pack(kind, len(payload)) + payload)
    return mac.digest()[:TAG_BYTES]


@lru_cache(maxsize=16)
def _keyed(key: bytes) -> hmac.HMAC:
    # A run has two keys, and to copy a keyed state costs half of what keying one does.
    return hmac.new(key, digestmod="sha256")


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole frame as it arrived; its tag is not yet checked."""

    version: int
    kind: FrameKind
    tag: bytes
    payload: bytes

    def verifies(self, key: bytes) -> bool:
        """Whether the sender held ``key`` (16 bytes); constant time in the tag."""
        return hmac.compare_digest(self.tag, frame_tag(key, self.kind, self.payload))


def encode_frame(key: bytes, version: int, kind: FrameKind, payload: bytes) -> bytes:
    tag = frame_tag(key, kind, payload)
    return _HEADER.pack(FRAME_MAGIC, version, tag, kind, len(payload)) + payload


class FrameReader:
    """Cuts a byte stream into frames, however the stream is split.

    Feed it with ``feed``; take frames with ``next_frame`` until it gives None.
    ``max_payload`` (bytes) is judged on the header, before a byte of the
    payload is kept; raise or lower it between frames.
    """

    __slots__ = ("_buffer", "max_payload")

    def __init__(self, max_payload: int = MAX_HELLO_BYTES) -> None:
        self._buffer = bytearray()
        self.max_payload = max_payload

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next_frame(self) -> Frame | None:
        """The next whole frame, or None until more bytes come.

        Raises WireError for a header that no honest peer writes.
        """
        buffer = self._buffer
        magic = bytes(buffer[:MAGIC_BYTES])
        if not FRAME_MAGIC.startswith(magic):
            raise WireError(f"frame magic is {magic.hex()}, not {FRAME_MAGIC.hex()}")
        if len(buffer) < HEADER_BYTES:
            return None
        _, version, tag, kind, length = _HEADER.unpack_from(buffer)
        known = _KINDS.get(kind)
        if known is None:
            raise WireError(f"frame kind {kind} is none of {sorted(_KINDS)}")
        if length > self.max_payload:
            raise WireError(f"payload of {length} bytes is over the limit of {self.max_payload}")
        end = HEADER_BYTES + length
        if len(buffer) < end:
            return None
        payload = bytes(buffer[HEADER_BYTES:end])
        del buffer[:end]
        return Frame(version, known, tag, payload)


class Decoder:
    """Reads bincode's standard encoding from one payload, in field order.

    Every method raises WireError when the payload is shorter than what it
    announces.  Bytes after the last field are left alone.
    """

    __slots__ = ("_data", "_position")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def raw(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._data):
            raise WireError(f"{count} bytes announced, {len(self._data) - self._position} left in the payload")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _varint(self, widest: int) -> int:
        position = self._position
        try:
            first = self._data[position]
        except IndexError:
            raise WireError("payload ends where a number should be") from None
        self._position = position + 1
        if first < 251:
            return first
        if first == 251:
            return int(_U16.unpack(self.raw(2))[0])
        if first == 252:
            return int(_U32.unpack(self.raw(4))[0])
        if first == 253 and widest == 64:
            return int(_U64.unpack(self.raw(8))[0])
        raise WireError(f"marker {first:#x} does not start a {widest}-bit number")

    def u32(self) -> int:
        return self._varint(32)

    def u64(self) -> int:
        return self._varint(64)

    def i32(self) -> int:
        """A signed number of 32 bits, zig-zag mapped on the wire."""
        mapped = self._varint(32)
        return (mapped >> 1) ^ -(mapped & 1)

    def count(self) -> int:
        """How many items follow; each takes at least a byte, so it is checked first."""
        items = self._varint(64)
        left = len(self._data) - self._position
        if items > left:
            raise WireError(f"{items} items announced, {left} bytes left in the payload")
        return items

    def byte_string(self) -> bytes:
        return self.raw(self.count())

    def text(self) -> str:
        encoded = self.byte_string()
        try:
            return encoded.decode("utf-8")
        except UnicodeDecodeError as error:
            raise WireError(f"text is not UTF-8 at its byte {error.start}") from None

    def present(self) -> bool:
        flag = self.raw(1)[0]
        if flag > 1:
            raise WireError(f"option flag is {flag}, neither 0 nor 1")
        return flag == 1


def encode_uint(value: int) -> bytes:
    """A varint for 0 <= value < 2**64, in its shortest form."""
    if 0 <= value < 251:
        return _ONE_BYTE[value]
    if not 0 <= value < 1 << 64:
        raise WireError(f"{value} does not fit an unsigned 64-bit number")
    if value < 1 << 16:
        return b"\xfb" + _U16.pack(value)
    if value < 1 << 32:
        return b"\xfc" + _U32.pack(value)
    return b"\xfd" + _U64.pack(value)


def encode_u32(value: int) -> bytes:
    if not 0 <= value < 1 << 32:
        raise WireError(f"{value} does not fit an unsigned 32-bit number")
    return encode_uint(value)


def encode_i32(value: int) -> bytes:
    """A zig-zag varint for a field that is 32 bits wide and signed."""
    if not -(1 << 31) <= value < 1 << 31:
        raise WireError(f"{value} does not fit a signed 32-bit number")
    return encode_uint((value << 1) ^ (value >> 31))


def encode_bytes(value: bytes) -> bytes:
    return encode_uint(len(value)) + value


def encode_text(value: str) -> bytes:
    try:
        return encode_bytes(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise WireError(f"character {error.start} of the text has no UTF-8 form") from None
