"""Dialing the controller: each address of its name, again and again, with a line whenever the reason changes.

A name is looked up in a thread of its own that dies with the process: Twisted
waits for its thread pool at the end, and a resolver that does not answer would
hold the process for as long as it pleases.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

from twisted.internet import error
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP6ClientEndpoint
from twisted.internet.error import ConnectError, ConnectingCancelledError
from twisted.internet.interfaces import IProtocolFactory
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from flodl_tw.core.addresses import is_address, show_endpoint

ATTEMPTS: Final = 60
PAUSE_SECS: Final = 0.5
"""Between two attempts, on average; the time scale leaves it alone."""
HEAD_START_SECS: Final = 0.3
"""What an address has before the next one of the name is tried beside it."""
LOOK_UP_SECS: Final = 10
MAX_ADDRESSES: Final = 8

LookUp = Callable[[str, int], list[str]]


class DialError(Exception):
    """No address answered in all attempts; its text names each with its reason."""


def look_up(host: str, port: int) -> list[str]:
    """The addresses of a name or of a numeric address, in the system's order; OSError where it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(_numeric(entry[4]) for entry in found))[:MAX_ADDRESSES]


def _numeric(address: tuple[Any, ...]) -> str:
    """The address of a socket's name; a link-local one is nothing without its scope."""
    scope = address[3] if len(address) > 3 else 0
    return f"{address[0]}%{scope}" if scope else str(address[0])


def _no_answer(value: Any, secs: float) -> Any:
    raise OSError(f"no answer within {secs:g} s")


class Dialer:
    """Dials one controller.  ``attempts`` is scaled already; ``connect_secs`` is what one address may take."""

    def __init__(
        self,
        reactor: Any,
        host: str,
        port: int,
        *,
        attempts: int,
        connect_secs: float,
        say: Callable[[str], None],
        look_up: LookUp = look_up,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._reactor = reactor
        self._host = host
        self._port = port
        self._attempts = attempts
        self._connect_secs = connect_secs
        self._say = say
        self._look_up = look_up
        self._jitter = jitter

    async def dial(self, factory: IProtocolFactory) -> Any:
        """A connection's protocol; DialError once every attempt has failed."""
        endpoint = show_endpoint(self._host, self._port)
        told = None
        for attempt in range(self._attempts):
            if attempt:
                await deferLater(self._reactor, PAUSE_SECS * (0.5 + self._jitter()))
            try:
                return await self._try_once(factory)
            except DialError as why:
                reason = str(why)
            if reason != told:
                told = reason
                self._say(f"{endpoint} does not answer yet ({reason}); trying up to {self._attempts} times")
        raise DialError(f"{endpoint} did not answer in {self._attempts} attempts ({told})")

    async def _try_once(self, factory: IProtocolFactory) -> Any:
        try:
            addresses = await self._addresses()
        except OSError as why:
            raise DialError(f"the name {self._host!r} cannot be looked up: {why.strerror or why}") from None
        if not addresses:
            raise DialError(f"the name {self._host!r} has no address")
        return await Race(self._reactor, addresses, self._port, self._connect_secs).run(factory)

    async def _addresses(self) -> list[str]:
        if is_address(self._host):
            return [self._host]
        found: Deferred[list[str]] = Deferred()
        threading.Thread(target=self._ask, args=(found,), name=f"look-up of {self._host}", daemon=True).start()
        found.addTimeout(LOOK_UP_SECS, self._reactor, _no_answer)
        return await found

    def _ask(self, found: Deferred[list[str]]) -> None:
        answer: list[str] | OSError
        try:
            answer = self._look_up(self._host, self._port)
        except (OSError, UnicodeError) as why:
            answer = why if isinstance(why, OSError) else OSError("it is no name")
        self._reactor.callFromThread(self._answered, found, answer)

    def _answered(self, found: Deferred[list[str]], answer: list[str] | OSError) -> None:
        if found.called:
            return
        if isinstance(answer, OSError):
            found.errback(answer)
        else:
            found.callback(answer)


class Race:
    """One attempt at several addresses: each has a head start before the next; the first to answer wins."""

    def __init__(self, reactor: Any, addresses: list[str], port: int, connect_secs: float) -> None:
        self._reactor = reactor
        self._waiting = list(addresses)
        self._port = port
        self._connect_secs = connect_secs
        self._running: dict[str, Deferred[Any]] = {}
        self._reasons: dict[str, str] = {}
        self._next: Any = None
        self._won: Deferred[Any] = Deferred(lambda _: self._stop())

    def run(self, factory: IProtocolFactory) -> Deferred[Any]:
        """The winner's protocol, or DialError with each address and its reason."""
        self._factory = factory
        self._start_one()
        return self._won

    def _start_one(self) -> None:
        address = self._waiting.pop(0)
        kind = TCP6ClientEndpoint if ":" in address else TCP4ClientEndpoint
        connecting = kind(self._reactor, address, self._port, timeout=self._connect_secs).connect(self._factory)
        self._running[address] = connecting
        if self._waiting:
            self._next = self._reactor.callLater(HEAD_START_SECS, self._start_one)
        connecting.addCallbacks(self._connected, self._failed, callbackArgs=(address,), errbackArgs=(address,))

    def _connected(self, protocol: Any, address: str) -> None:
        self._running.pop(address, None)
        # Those that are given up connect no more, so no other comes here.
        self._stop()
        self._won.callback(protocol)

    def _failed(self, failure: Failure, address: str) -> None:
        self._running.pop(address, None)
        if failure.check(ConnectingCancelledError) or self._won.called:
            return
        self._reasons[address] = reason_of(failure)
        if self._waiting:
            self._cancel_next()
            self._start_one()
        elif not self._running:
            # In an order of its own: a name whose addresses rotate gives the same line again.
            self._won.errback(DialError("; ".join(f"{each}: {why}" for each, why in sorted(self._reasons.items()))))

    def _stop(self) -> None:
        self._waiting.clear()
        self._cancel_next()
        for connecting in list(self._running.values()):
            connecting.cancel()

    def _cancel_next(self) -> None:
        if self._next is not None and self._next.active():
            self._next.cancel()


def reason_of(failure: Failure) -> str:
    """Why a connection did not come about, in the system's words."""
    why = failure.value
    if isinstance(why, ConnectError) and isinstance(why.osError, int):
        return os.strerror(why.osError).lower()
    if isinstance(why, error.TimeoutError):
        return "no answer in time"
    return failure.getErrorMessage()
