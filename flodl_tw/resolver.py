"""Looking names up in threads that die with the process.

Twisted waits for its thread pool at the end, so a resolver that does not
answer would hold the exit for as long as it pleases.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import (
    IAddress,
    IHostnameResolver,
    IHostResolution,
    IReactorFromThreads,
    IReactorPluggableNameResolver,
    IResolutionReceiver,
)
from zope.interface import implementer

from flodl_tw.core.addresses import is_address

GetAddrInfo = Callable[..., Sequence[tuple[object, object, object, object, tuple[object, ...]]]]
MAX_ADDRESSES: Final = 8
"""Addresses of one name that are given; more would cost who dials them more time than they are worth."""


def use_thread_resolver(reactor: object) -> None:
    """Have every look-up of the reactor's endpoints and clients hold no exit."""
    IReactorPluggableNameResolver(reactor).installNameResolver(ThreadResolver(IReactorFromThreads(reactor)))


@implementer(IHostnameResolver)
class ThreadResolver:
    """Looks names up; those who wait for the same name share one look-up."""

    def __init__(self, reactor: IReactorFromThreads, getaddrinfo: GetAddrInfo = socket.getaddrinfo) -> None:
        self._reactor = reactor
        self._getaddrinfo = getaddrinfo
        self._waiting: dict[str, list[Deferred[list[str]]]] = {}

    def look_up(self, host: str) -> Deferred[list[str]]:
        """The numeric addresses of a name, in the system's order; fails with OSError where it has none.

        Cancelling it gives up the wait, not the look-up.
        """
        if is_address(host):
            return succeed([host])
        if host not in self._waiting:
            self._waiting[host] = []
            threading.Thread(target=self._ask, args=(host,), name=f"look-up of {host}", daemon=True).start()
        # A Deferred without a canceller takes one result more after it was cancelled, and ignores it.
        found: Deferred[list[str]] = Deferred()
        self._waiting[host].append(found)
        return found

    def _ask(self, host: str) -> None:
        answer: list[str] | OSError
        try:
            entries = self._getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answer = list(dict.fromkeys(_numeric(entry[4]) for entry in entries))[:MAX_ADDRESSES]
        except OSError as error:
            answer = error
        except UnicodeError:
            answer = OSError("it is no name")
        self._reactor.callFromThread(self._answered, host, answer)

    def _answered(self, host: str, answer: list[str] | OSError) -> None:
        for found in self._waiting.pop(host):
            if isinstance(answer, OSError):
                found.errback(answer)
            else:
                found.callback(answer)

    def resolveHostName(  # noqa: N802  Twisted's names
        self,
        resolutionReceiver: IResolutionReceiver,  # noqa: N803
        hostName: str,  # noqa: N803
        portNumber: int = 0,  # noqa: N803
        addressTypes: Sequence[type[IAddress]] | None = None,  # noqa: N803
        transportSemantics: str = "TCP",  # noqa: N803
    ) -> IHostResolution:
        """Twisted's way to ask: a name that has no address is one with none."""

        def found(hosts: list[str]) -> None:
            for host in hosts:
                kind = IPv6Address if ":" in host else IPv4Address
                if addressTypes is None or kind in addressTypes:
                    protocol = cast(Literal["TCP", "UDP"], transportSemantics)
                    resolutionReceiver.addressResolved(kind(protocol, host, portNumber))

        looking_up = self.look_up(hostName)
        resolution = Resolution(hostName, looking_up.cancel)
        resolutionReceiver.resolutionBegan(resolution)
        looking_up.addCallbacks(found, lambda _: None).addCallback(lambda _: resolutionReceiver.resolutionComplete())
        return resolution


@implementer(IHostResolution)
@dataclass(frozen=True)
class Resolution:
    """A look-up that goes on, as Twisted sees it."""

    name: str
    cancel: Callable[[], None]


def _numeric(address: tuple[object, ...]) -> str:
    """The host of a socket's address; a link-local one is nothing without its scope."""
    scope = address[3] if len(address) > 3 else 0
    return f"{address[0]}%{scope}" if scope else str(address[0])
