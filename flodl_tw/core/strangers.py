"""What dials the port and speaks no channel of ours: told by its first four bytes, with what to do about it."""

from __future__ import annotations

from typing import Final

_AS_THEY_ARE: Final = "the proxy in front of this port has to pass bytes on as they are, without {option}"
_BY_START: Final = (
    ((b"PROX",), "a PROXY protocol header", _AS_THEY_ARE.format(option="send-proxy")),
    ((b"\r\n\r\n",), "a PROXY protocol header of version 2", _AS_THEY_ARE.format(option="send-proxy-v2")),
    (
        tuple(b"\x16\x03" + bytes((minor,)) for minor in range(5)),
        "TLS",
        "this port has none: write http:// for https://, or end TLS in front of it",
    ),
    ((b"PRI ",), "HTTP/2", "this port has HTTP/1.1 alone, for its client or the proxy in front of it to use"),
    ((b"CONN",), "HTTP's CONNECT", "this port is no proxy, and the client's settings say that it is"),
    ((b"SSH-",), "SSH", "its client has the wrong port"),
)


def told(magic: bytes) -> str:
    """Why a connection is dropped whose first four bytes are no channel's: a name for what knocked, or the bytes."""
    if magic[:1] == b"\3" and magic[2:] == b"\0\0":
        return "it speaks the store of torch before 2.2, which is another: torch 2.2 or newer is needed"
    for starts, what, advice in _BY_START:
        if magic.startswith(starts):
            return f"it speaks {what}: {advice}"
    return f"its first bytes {magic.hex()} are no channel's"
