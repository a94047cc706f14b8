"""Dialing the controller: each address of its name, again and again, with a line whenever the reason changes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Final, NoReturn, TypeVar, cast

from twisted.internet import error
from twisted.internet.defer import CancelledError, Deferred, FailureGroup, race
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP6ClientEndpoint
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IReactorTime
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from flodl_tw.core.addresses import show_endpoint
from flodl_tw.resolver import ThreadResolver

ATTEMPTS: Final = 60
PAUSE_SECS: Final = 0.5
"""Between two attempts, on average; the time scale leaves it alone."""
HEAD_START_SECS: Final = 0.3
"""What an address has before the next one of the name is tried beside it."""
LOOK_UP_SECS: Final = 10

Made = TypeVar("Made", bound=Protocol)


class DialError(Exception):
    """No address answered in all attempts; its text names each with its reason."""


def _no_answer(value: object, secs: float) -> NoReturn:
    raise OSError(f"no answer within {secs:g} s")


@dataclass
class Dialer:
    """Dials one controller.  ``attempts`` is scaled already; ``connect_secs`` is what one address may take."""

    reactor: IReactorTime
    host: str
    port: int
    _: KW_ONLY
    attempts: int
    connect_secs: float
    say: Callable[[str], None]
    resolver: ThreadResolver
    jitter: Callable[[], float] = random.random

    async def dial(self, factory: Factory[Made]) -> Made:
        """A connection's protocol, which ``factory`` has made; DialError once every attempt has failed."""
        endpoint = show_endpoint(self.host, self.port)
        told = None
        for attempt in range(self.attempts):
            if attempt:
                await deferLater(self.reactor, PAUSE_SECS * (0.5 + self.jitter()))
            try:
                return cast(Made, await self._try_once(factory))
            except DialError as why:
                reason = str(why)
            if reason != told:
                told = reason
                self.say(f"{endpoint} does not answer yet ({reason}); trying up to {self.attempts} times")
        raise DialError(f"{endpoint} did not answer in {self.attempts} attempts ({told})")

    async def _try_once(self, factory: IProtocolFactory) -> IProtocol:
        """Dial all addresses, each with a head start before the next; the first to answer wins.

        Twisted's HostnameEndpoint does the same, and keeps the reason of one address alone.
        """
        try:
            addresses = await self.resolver.look_up(self.host).addTimeout(LOOK_UP_SECS, self.reactor, _no_answer)
        except OSError as why:
            raise DialError(f"the name {self.host!r} cannot be looked up: {why.strerror or why}") from None
        dials = [self._connect(factory, address, HEAD_START_SECS * place) for place, address in enumerate(addresses)]
        try:
            _, protocol = await race(dials)
        except FailureGroup as group:
            if any(failure.check(CancelledError, error.ConnectingCancelledError) for failure in group.failures):
                raise CancelledError from None
            reasons = [f"{each}: {reason_of(failure)}" for each, failure in zip(addresses, group.failures, strict=True)]
            # In an order of its own: a name whose addresses rotate gives the same line again.
            raise DialError("; ".join(sorted(reasons))) from None
        return protocol

    def _connect(self, factory: IProtocolFactory, address: str, wait: float) -> Deferred[IProtocol]:
        kind = TCP6ClientEndpoint if ":" in address else TCP4ClientEndpoint
        endpoint = kind(self.reactor, address, self.port, timeout=self.connect_secs)
        if not wait:
            return endpoint.connect(factory)
        return deferLater(self.reactor, wait).addCallback(lambda _: endpoint.connect(factory))


def reason_of(failure: Failure) -> str:
    """Why a connection did not come about, in the system's words."""
    why = failure.value
    if isinstance(why, error.ConnectError) and isinstance(why.osError, int):
        return os.strerror(why.osError).lower()
    if isinstance(why, error.TimeoutError):
        return "no answer in time"
    return failure.getErrorMessage()
