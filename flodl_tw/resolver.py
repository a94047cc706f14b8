"""Where a forwarded channel goes: ``tcp:HOST:PORT`` or ``unix:PATH``, checked at the start, looked up at each dial.

A name is looked up in a thread of its own that dies with the process: Twisted
waits for its thread pool at the end, and a resolver that does not answer would
hold the process for as long as it pleases.
"""

from __future__ import annotations

import socket
import threading
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP6ClientEndpoint, UNIXClientEndpoint
from twisted.internet.error import DNSLookupError
from twisted.internet.interfaces import IProtocolFactory

from flodl_tw.core.addresses import is_address

MAX_NAME: Final = 253
MAX_PATH_BYTES: Final = 107


class UnixBackend:
    """A backend on a Unix socket."""

    def __init__(self, reactor: Any, path: str) -> None:
        size = len(path.encode("utf-8", "surrogateescape"))
        if not path or "\0" in path or size > MAX_PATH_BYTES:
            raise ValueError(f"its path has {size} bytes, the limits are 1 and {MAX_PATH_BYTES}, with no NUL")
        self._endpoint = UNIXClientEndpoint(reactor, path)

    def connect(self, factory: IProtocolFactory) -> Deferred[Any]:
        """A new connection."""
        connecting: Deferred[Any] = self._endpoint.connect(factory)
        return connecting


class TCPBackend:
    """A backend at an address or a name; dials that wait for one look-up share it."""

    def __init__(self, reactor: Any, host: str, port: int) -> None:
        if not 1 <= port <= 65535:
            raise ValueError(f"its port is {port}, the limits are 1 and 65535")
        if not 1 <= len(host) <= MAX_NAME or not host.isprintable() or any(map(str.isspace, host)):
            raise ValueError("its host is empty, too long, or no name")
        self._reactor = reactor
        self._host = host
        self._port = port
        self._waiting: list[Deferred[str]] | None = None

    def connect(self, factory: IProtocolFactory) -> Deferred[Any]:
        """A new connection.  Cancelling it gives up the wait for a look-up, not the look-up."""
        return Deferred.fromCoroutine(self._connect(factory))

    async def _connect(self, factory: IProtocolFactory) -> Any:
        address = self._host if is_address(self._host) else await self._look_up()
        kind = TCP6ClientEndpoint if ":" in address else TCP4ClientEndpoint
        return await kind(self._reactor, address, self._port).connect(factory)

    def _look_up(self) -> Deferred[str]:
        if self._waiting is None:
            self._waiting = []
            threading.Thread(target=self._ask, name=f"look-up of {self._host}", daemon=True).start()
        waiting: Deferred[str] = Deferred(self._given_up)
        self._waiting.append(waiting)
        return waiting

    def _given_up(self, waiting: Deferred[str]) -> None:
        if self._waiting is not None and waiting in self._waiting:
            self._waiting.remove(waiting)

    def _ask(self) -> None:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            answer: str | None = str(found[0][4][0])
        except (OSError, UnicodeError):
            answer = None
        self._reactor.callFromThread(self._answered, answer)

    def _answered(self, address: str | None) -> None:
        waiting, self._waiting = self._waiting or [], None
        for each in waiting:
            if address is None:
                each.errback(DNSLookupError(f"{self._host} does not resolve"))
            else:
                each.callback(address)


Backend = UnixBackend | TCPBackend


def backend_from_string(reactor: Any, text: str) -> Backend:
    """The backend that ``text`` names; ValueError, with the reason, where it names none.

    An IPv6 address stands in brackets, or with its colons escaped as in
    Twisted's endpoint strings.
    """
    kind, _, rest = text.partition(":")
    if kind == "unix":
        return UnixBackend(reactor, rest)
    if kind != "tcp":
        raise ValueError(f"{kind!r} is neither tcp nor unix")
    host, _, port = rest.rpartition(":")
    if not (port.isascii() and port.isdecimal()) or len(port) > 5:
        raise ValueError("its port is no number")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return TCPBackend(reactor, host.replace("\\:", ":"), int(port))
