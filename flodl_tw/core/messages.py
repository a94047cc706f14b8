"""Join and rendezvous messages as dataclasses, and their bytes by version.

Version 2 is flodl 0.7.0's, version 4 is 0.8.0's; they differ in Hello alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from flodl_tw.core.errors import WireError
from flodl_tw.core.wire import (
    Decoder,
    FrameKind,
    encode_bytes,
    encode_frame,
    encode_i32,
    encode_text,
    encode_u32,
    encode_uint,
)

VERSIONS: Final = (2, 4)
"""The protocol versions that this project speaks."""

SIGNATURE_BYTES: Final = 32
UID_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class Hello:
    """A host offers itself.  ``local_devices`` is one byte a device; version 2 has no optional field."""

    host: str
    local_devices: bytes
    gpus: tuple[str, ...]
    libtorch: str
    dataset_sig: bytes
    run_id: str | None = None
    nccl_version: tuple[int, int, int] | None = None
    model_sig: bytes | None = None


@dataclass(frozen=True, slots=True)
class Accept:
    """The host is in, with these ranks; ``formation_wait_secs`` is what is left of the hard cap."""

    ranks: tuple[int, ...]
    salt_hex: str | None
    formation_wait_secs: int


@dataclass(frozen=True, slots=True)
class Reject:
    """The host is not in; the connection closes after this."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorldFormed:
    """The world, as hex of UTF-8 JSON for this host, and for its relay where there is one."""

    envelope_hex: str
    relay_spec_hex: str | None = None


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank of the host ended.  ``code`` -1 is any signal, -N signal N where the agent tells."""

    rank: int
    code: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The run is over for this host; the last message on its link."""

    reason: str


JoinMessage = Hello | Accept | Reject | WorldFormed | RankExited | Abort


class Role(IntEnum):
    """What a rank does in the rendezvous."""

    GENERATE = 0
    WAIT = 1


@dataclass(frozen=True, slots=True)
class RendezvousHello:
    """A rank presents itself.  ``dataset_sig`` is 32 bytes."""

    dataset_sig: bytes
    global_rank: int
    host_name: str


@dataclass(frozen=True, slots=True)
class RoleGiven:
    """The controller tells a rank its role."""

    role: Role


@dataclass(frozen=True, slots=True)
class Uid:
    """The communicator's unique id, 128 bytes, in either direction."""

    uid_bytes: bytes


RendezvousMessage = RendezvousHello | RoleGiven | Uid


def _optional_text(value: str | None) -> bytes:
    return b"\0" if value is None else b"\1" + encode_text(value)


def _fixed(value: bytes, size: int, what: str) -> bytes:
    if len(value) != size:
        raise WireError(f"{what} has {len(value)} bytes, not {size}")
    return value


def _hello_payload(hello: Hello, version: int) -> bytes:
    parts = [
        b"\0",
        encode_text(hello.host),
        encode_bytes(hello.local_devices),
        encode_uint(len(hello.gpus)),
        *map(encode_text, hello.gpus),
        encode_text(hello.libtorch),
        _fixed(hello.dataset_sig, SIGNATURE_BYTES, "dataset_sig"),
    ]
    if version == 2:
        if (hello.run_id, hello.nccl_version, hello.model_sig) != (None, None, None):
            raise WireError("run_id, nccl_version and model_sig do not exist in version 2")
        return b"".join(parts)
    parts.append(_optional_text(hello.run_id))
    nccl = hello.nccl_version
    parts.append(b"\0" if nccl is None else b"\1" + b"".join(map(encode_u32, nccl)))
    model = hello.model_sig
    parts.append(b"\0" if model is None else b"\1" + _fixed(model, SIGNATURE_BYTES, "model_sig"))
    return b"".join(parts)


def join_payload(message: JoinMessage, version: int) -> bytes:
    """A join message as bytes in ``version``; WireError when a value does not fit its field."""
    match message:
        case Hello():
            return _hello_payload(message, version)
        case Accept():
            ranks = encode_uint(len(message.ranks)) + b"".join(map(encode_u32, message.ranks))
            return b"\1" + ranks + _optional_text(message.salt_hex) + encode_uint(message.formation_wait_secs)
        case Reject():
            return b"\2" + encode_text(message.reason)
        case WorldFormed():
            return b"\3" + encode_text(message.envelope_hex) + _optional_text(message.relay_spec_hex)
        case RankExited():
            return b"\4" + encode_u32(message.rank) + encode_i32(message.code)
        case Abort():
            return b"\5" + encode_text(message.reason)


def encode_join(key: bytes, version: int, message: JoinMessage) -> bytes:
    return encode_frame(key, version, FrameKind.JOIN, join_payload(message, version))


def _decode_hello(decoder: Decoder, version: int) -> Hello:
    host = decoder.text()
    devices = decoder.byte_string()
    gpus = tuple([decoder.text() for _ in range(decoder.count())])
    libtorch = decoder.text()
    dataset_sig = decoder.raw(SIGNATURE_BYTES)
    if version == 2:
        return Hello(host, devices, gpus, libtorch, dataset_sig)
    run_id = decoder.text() if decoder.present() else None
    nccl = (decoder.u32(), decoder.u32(), decoder.u32()) if decoder.present() else None
    model_sig = decoder.raw(SIGNATURE_BYTES) if decoder.present() else None
    return Hello(host, devices, gpus, libtorch, dataset_sig, run_id, nccl, model_sig)


def decode_join(payload: bytes, version: int) -> JoinMessage:
    """The join message that ``payload`` holds in ``version``; WireError when it holds none."""
    decoder = Decoder(payload)
    variant = decoder.u32()
    match variant:
        case 0:
            return _decode_hello(decoder, version)
        case 1:
            ranks = tuple([decoder.u32() for _ in range(decoder.count())])
            salt_hex = decoder.text() if decoder.present() else None
            return Accept(ranks, salt_hex, decoder.u64())
        case 2:
            return Reject(decoder.text())
        case 3:
            return WorldFormed(decoder.text(), decoder.text() if decoder.present() else None)
        case 4:
            return RankExited(decoder.u32(), decoder.i32())
        case 5:
            return Abort(decoder.text())
    raise WireError(f"{variant} is no join message (0 to 5)")


def rendezvous_payload(message: RendezvousMessage) -> bytes:
    """A rendezvous message as bytes; the same in every version."""
    match message:
        case RendezvousHello():
            signature = _fixed(message.dataset_sig, SIGNATURE_BYTES, "dataset_sig")
            return b"\0" + signature + encode_u32(message.global_rank) + encode_text(message.host_name)
        case RoleGiven():
            return b"\1" + encode_u32(message.role)
        case Uid():
            return b"\2" + encode_bytes(_fixed(message.uid_bytes, UID_BYTES, "uid_bytes"))


def encode_rendezvous(key: bytes, version: int, message: RendezvousMessage) -> bytes:
    return encode_frame(key, version, FrameKind.RENDEZVOUS, rendezvous_payload(message))


def decode_rendezvous(payload: bytes) -> RendezvousMessage:
    """The rendezvous message that ``payload`` holds; WireError when it holds none."""
    decoder = Decoder(payload)
    variant = decoder.u32()
    match variant:
        case 0:
            return RendezvousHello(decoder.raw(SIGNATURE_BYTES), decoder.u32(), decoder.text())
        case 1:
            role = decoder.u32()
            if role > Role.WAIT:
                raise WireError(f"{role} is no role (0 or 1)")
            return RoleGiven(Role(role))
        case 2:
            return Uid(_fixed(decoder.byte_string(), UID_BYTES, "uid_bytes"))
    raise WireError(f"{variant} is no rendezvous message (0 to 2)")
