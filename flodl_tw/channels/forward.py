"""Forwarded channels: every byte to a backend and back, with nothing of its own.

A pair of legs, each an ordinary Twisted transport with the other leg for its
producer, so back-pressure is Twisted's.  Half-close and resets pass on.
"""

from __future__ import annotations

import os
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone, DNSLookupError
from twisted.internet.error import TimeoutError as ConnectTimeoutError
from twisted.internet.interfaces import IHalfCloseableProtocol, IPushProducer, ITransport
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from flodl_tw import sockets
from flodl_tw.channels.dead_peer import DeathWatch
from flodl_tw.channels.front_door import FrontDoor, Peeker
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.core.errors import SettingError
from flodl_tw.resolver import backend_from_string

LOG_EVERY_SECS: Final = 60
"""An unreachable backend is worth a line a minute, however many dials it costs."""


class ForwardFactory:
    """One channel's backend; the route of its magic.

    ``endpoint`` is ``tcp:HOST:PORT`` or ``unix:PATH``; SettingError where it is neither.
    """

    log = Logger()

    def __init__(self, front: FrontDoor, reactor: Any, name: str, endpoint: str) -> None:
        self.name = name
        self.front = front
        self.watch = DeathWatch(reactor)
        front.at_close(self.watch.stop)
        self._endpoint_text = endpoint
        try:
            self._backend = backend_from_string(reactor, endpoint)
        except ValueError as error:
            words = "native, off, " if name == "rendezvous" else ""
            raise SettingError(
                f"--{name}", repr(endpoint), f"it names no backend ({error})", f"give {words}tcp:HOST:PORT or unix:PATH"
            ) from None
        self._quiet_until = 0.0
        self._reset_since = 0

    def buildProtocol(self, peeker: Peeker) -> DialerLeg:
        """A dial to forward."""
        return DialerLeg(self, peeker)

    def connect(self, leg: BackendLeg) -> Deferred[Any]:
        """Connect a leg to the backend; it fails at the latest when the deadline has passed.

        The attempt counts toward the descriptors from here on, until it fails or the leg is gone.
        """
        self.front.capacity.opened()
        factory = Factory.forProtocol(lambda: leg)
        factory.noisy = False
        connecting = self._backend.connect(factory)
        return connecting.addTimeout(self.front.limits.connect, self.front.clock, _timed_out)

    def unreachable(self, failure: Failure) -> None:
        """A dial could not be forwarded."""
        now = self.front.clock.seconds()
        self._reset_since += 1
        if now < self._quiet_until:
            return
        self._quiet_until = now + LOG_EVERY_SECS
        count = self._reset_since
        self.log.warn(
            "the {name} channel's backend {endpoint} cannot be reached, {why}: {dials} reset; "
            "start the backend, or correct --{name}",
            name=self.name,
            endpoint=self._endpoint_text,
            why=_why(failure, self.front.limits.connect),
            dials="1 dial was" if count == 1 else f"{count} dials were",
        )
        self._reset_since = 0


def _timed_out(result: object, seconds: float) -> object:
    raise ConnectTimeoutError


def _why(failure: Failure, seconds: float) -> str:
    if failure.check(ConnectTimeoutError):
        return f"no answer within {seconds:g} s"
    if failure.check(DNSLookupError):
        return "its name does not resolve"
    number = getattr(failure.value, "osError", None)
    return os.strerror(number) if isinstance(number, int) else "it did not take the connection"


@implementer(IPushProducer)
class Leg:
    """One end of a forwarded connection.  What arrives goes to the other end; so does every kind of end."""

    transport: Any = None
    other: Leg
    watch: DeathWatch
    done_reading = False
    closing = False
    watched: int | None = None
    """The descriptor that the watch has of it."""

    def descriptor(self) -> int | None:
        """Its socket's descriptor, where there is one."""
        fileno = getattr(self.transport, "fileno", None)
        return None if fileno is None or (number := fileno()) < 0 else number

    def died(self) -> None:
        """It is dead, and nobody reads it."""
        self.abort()

    # IPushProducer, for the other end's transport

    def pauseProducing(self) -> None:
        self.transport.pauseProducing()
        self.watch.add(self)

    def resumeProducing(self) -> None:
        if not self.done_reading:
            self.watch.remove(self)
            self.transport.resumeProducing()

    def stopProducing(self) -> None:
        self.transport.stopProducing()

    # What arrives

    def dataReceived(self, data: bytes) -> None:
        self.other.transport.write(data)

    def readConnectionLost(self) -> None:
        """This end has sent its last byte."""
        if self.done_reading:
            return
        self.done_reading = True
        # The other end must not ask this one for more: a paused producer that is gone would keep it open for ever.
        self.other.transport.unregisterProducer()
        if self.other.done_reading:
            self.close()
            self.other.close()
        else:
            self.other.transport.loseWriteConnection()
            self.watch.add(self)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008  Twisted's signature
        self.watch.remove(self)
        if not self.closing:
            # Not by our doing: a reset, or a peer that is gone.  Its other end gets no orderly end either.
            self.closing = True
            self.other.abort()

    # Ends

    def close(self) -> None:
        """Close once what is written has left."""
        if not self.closing:
            self.closing = True
            self.watch.remove(self)
            self.transport.unregisterProducer()
            self.transport.loseConnection()

    def abort(self) -> None:
        """Reset both ends."""
        for leg in (self, self.other):
            if leg.transport is not None and leg.transport.connected:
                leg.closing = True
                leg.watch.remove(leg)
                leg.transport.unregisterProducer()
                leg.transport.abortConnection()


@implementer(IHalfCloseableProtocol)
class BackendLeg(Leg, Protocol):
    """The end that we dialed."""

    transport: Any

    def __init__(self, channel: ForwardFactory) -> None:
        self._channel = channel
        self.watch = channel.watch

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008  Twisted's signature
        self._channel.front.capacity.closed()
        super().connectionLost(reason)

    def writeConnectionLost(self) -> None:
        pass


class DialerLeg(Leg):
    """The end that dialed us.  Its first bytes wait, and the rest is not read, until the backend is there."""

    def __init__(self, channel: ForwardFactory, peeker: Peeker) -> None:
        self._channel = channel
        self._peeker = peeker
        self.watch = channel.watch
        self._waiting: list[bytes] | None = []
        self._connecting: Deferred[Any] | None = None

    def makeConnection(self, transport: ITransport) -> None:
        self.transport = transport
        self._peeker.identified()
        self.pauseProducing()
        self.other = BackendLeg(self._channel)
        self.other.other = self
        self._connecting = self._channel.connect(self.other)
        self._connecting.addCallbacks(self._connected, self._unreachable)
        self._connecting.addErrback(self._broken)

    def died(self) -> None:
        if self._waiting is None:
            super().died()
        else:
            self.watch.remove(self)
            self.transport.abortConnection()

    def dataReceived(self, data: bytes) -> None:
        if self._waiting is not None:
            self._waiting.append(data)
        else:
            super().dataReceived(data)

    def readConnectionLost(self) -> None:
        # While the backend is being connected nothing is read, so an end of stream waits there, too.
        if self._waiting is None:
            super().readConnectionLost()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008  Twisted's signature
        if self._waiting is None:
            super().connectionLost(reason)
            return
        self.closing = True
        self.watch.remove(self)
        if self._connecting is not None:
            self._connecting.cancel()

    def _connected(self, backend: BackendLeg) -> None:
        if self.closing:
            backend.closing = True
            backend.transport.abortConnection()
            return
        sockets.tune_backend(backend.transport, self._channel.front.limits)
        waiting, self._waiting = self._waiting or [], None
        self.transport.registerProducer(backend, True)
        backend.transport.registerProducer(self, True)
        backend.transport.writeSequence(waiting)
        self.resumeProducing()

    def _unreachable(self, failure: Failure) -> None:
        self._channel.front.capacity.closed()
        if self.closing:
            # It was given up because its dialer has gone.
            return
        self._channel.unreachable(failure)
        self.closing = True
        self.watch.remove(self)
        self._channel.front.ended[ConnectionEnd.BACKEND_UNREACHABLE] += 1
        self.transport.abortConnection()

    def _broken(self, failure: Failure) -> None:
        self._channel.log.failure("a forwarded connection could not be set up", failure)
        self.abort()
