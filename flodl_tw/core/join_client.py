"""The agent's side of the join talk: messages to bytes and back, with no I/O."""

from __future__ import annotations

from flodl_tw.core.errors import WireError
from flodl_tw.core.messages import (
    Accept,
    Hello,
    JoinMessage,
    RankExited,
    Reject,
    decode_join,
    encode_join,
)
from flodl_tw.core.reports import RankError, report_payload
from flodl_tw.core.wire import JOIN_MAGIC, SALT_BYTES, ZERO_KEY, FrameKind, FrameReader, encode_frame

MAX_ANSWER_BYTES = 1 << 20
"""Payload cap of what a controller sends: a host's envelope is a few KiB."""
TELLING_BYTES = 24
"""How many of the first bytes of a stranger tell what it speaks."""


def language(first: bytes) -> str | None:
    """What somebody speaks who is no controller, from the first bytes of it; None where that is unknown."""
    if first.startswith(b"HTTP/"):
        return "it speaks HTTP: a web server or a web proxy is there"
    if first[:2] in (b"\x15\x03", b"\x16\x03"):
        return "it speaks TLS: this link has none, so the proxy there is to pass TCP through"
    if first[:2] == b"\0\0" and first[3:9] == b"\4\0\0\0\0\0":
        return "it speaks HTTP/2: the proxy there is to pass TCP through"
    if first.startswith((b"PROXY ", b"\r\n\r\n\0\r\nQUIT\n")):
        return "it sends a PROXY protocol header: switch send-proxy off there"
    return "it speaks SSH: its port is none of a controller's" if first.startswith(b"SSH-") else None


class JoinClient:
    """One host's talk with a controller, in one protocol version.

    ``token`` (16 bytes) is what the host was given; without one it joins under
    open admission and takes the session salt from its Accept.
    """

    def __init__(self, version: int = 4, token: bytes | None = None) -> None:
        self.version = version
        self.join_key = ZERO_KEY if token is None else token
        self.salt = token
        """What keys the control link (16 bytes); None before an Accept under open admission."""
        self.ranks: tuple[int, ...] = ()
        """The ranks of the Accept."""
        self._is_in = False
        self._reader = FrameReader(max_payload=MAX_ANSWER_BYTES)

    def hello(self, hello: Hello) -> bytes:
        """The first bytes of a dial: the channel's magic and the hello."""
        return JOIN_MAGIC + encode_join(self.join_key, self.version, hello)

    def exited(self, rank: int, code: int = 0) -> bytes:
        """A rank of this host ended; ``rank`` as its Accept named it, ``code`` -N for signal N."""
        if self.salt is None:
            raise ValueError("no rank can exit before an Accept")
        return encode_join(self.salt, self.version, RankExited(rank, code))

    def reported(self, rank: int, error: RankError) -> bytes:
        """What a rank of this host died of: a frame of our own, for a controller that says that it takes it."""
        if self.salt is None:
            raise ValueError("no rank can die before an Accept")
        return encode_frame(self.salt, self.version, FrameKind.REPORT, report_payload(rank, error))

    def heartbeat(self) -> bytes:
        """A frame of our own that says nothing, for a controller that says that it takes it."""
        if self.salt is None:
            raise ValueError("there is no link before an Accept")
        return encode_frame(self.salt, self.version, FrameKind.HEARTBEAT, b"")

    def feed(self, data: bytes) -> list[JoinMessage]:
        """The messages that ``data`` completes.

        Raises WireError for one that does not parse, does not verify under
        the key that its kind asks for, is in another version, or answers a
        hello that has been accepted; what came before it in ``data`` is lost,
        for such a controller is not believed.
        """
        self._reader.feed(data)
        messages = []
        while (frame := self._reader.next_frame()) is not None:
            if frame.kind is not FrameKind.JOIN:
                raise WireError(f"a frame of kind {frame.kind.name.lower()} came on the join link")
            message = decode_join(frame.payload, frame.version)
            answer = isinstance(message, Accept | Reject)
            key = self.join_key if answer else self.salt
            if key is None or not frame.verifies(key):
                raise WireError(
                    f"the {type(message).__name__} does not verify: its sender does not hold this run's key"
                )
            if frame.version != self.version:
                raise WireError(
                    f"the {type(message).__name__} is in version {frame.version}, the hello in {self.version}"
                )
            if answer and self._is_in:
                raise WireError(f"the {type(message).__name__} came after an Accept")
            if isinstance(message, Accept):
                self._accepted(message)
            messages.append(message)
        return messages

    def _accepted(self, accept: Accept) -> None:
        self._is_in = True
        self.ranks = accept.ranks
        if accept.salt_hex is None:
            if self.salt is None:
                raise WireError("an Accept under open admission has no salt")
            return
        try:
            salt = bytes.fromhex(accept.salt_hex)
        except ValueError:
            salt = b""
        if len(salt) != SALT_BYTES:
            raise WireError(f"an Accept's salt has {len(accept.salt_hex)} characters, not {2 * SALT_BYTES} hex digits")
        self.salt = salt
