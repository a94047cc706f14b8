"""The floor that ``join.py`` compares with: Twisted, one frame in, one frame out, and nothing else.

It answers every dial with the same Accept and, once COUNT have come, writes
the same WorldFormed to all.  No checks, no ledger, no deadlines, no log.

usage: peer.py PORT_FILE COUNT
"""

from __future__ import annotations

import socket
import sys

from twisted.internet.protocol import Factory, Protocol

from flodl_tw.core.messages import Accept, WorldFormed, encode_join
from flodl_tw.core.wire import HEADER_BYTES, MAGIC_BYTES, ZERO_KEY
from flodl_tw.state_folder import write_atomically

SALT = bytes(16)
ACCEPT = encode_join(ZERO_KEY, 4, Accept((0,), SALT.hex(), 600))
FORMED = encode_join(SALT, 4, WorldFormed("7b7d" * 130))


class Floor(Protocol):
    """One dial."""

    seen = 0

    def connectionMade(self) -> None:
        self.transport.setTcpNoDelay(True)

    def dataReceived(self, data: bytes) -> None:
        self.seen += len(data)
        if self.seen > MAGIC_BYTES + HEADER_BYTES:
            self.seen = -(1 << 30)
            self.factory.answered(self)


class FloorFactory(Factory):
    """All dials."""

    protocol = Floor
    noisy = False

    def __init__(self, count: int) -> None:
        self.count = count
        self.dials: list[Floor] = []

    def answered(self, dial: Floor) -> None:
        dial.transport.write(ACCEPT)
        self.dials.append(dial)
        if len(self.dials) == self.count:
            for each in self.dials:
                each.transport.write(FORMED)


if __name__ == "__main__":
    from pathlib import Path

    from twisted.internet import reactor

    listener = socket.socket(socket.AF_INET6)
    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.setblocking(False)
    listener.bind(("::", 0))
    listener.listen(4096)
    reactor.adoptStreamPort(listener.fileno(), socket.AF_INET6, FloorFactory(int(sys.argv[2])))
    write_atomically(Path(sys.argv[1]), f"{listener.getsockname()[1]}\n")
    reactor.run()
