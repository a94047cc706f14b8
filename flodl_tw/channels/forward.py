"""Forwarded channels: every byte to a backend and back, with nothing of its own.

A pair of legs, each an ordinary Twisted transport with the other leg for its
producer, so back-pressure is Twisted's.  Half-close and resets pass on.
"""

from __future__ import annotations

import os
from typing import Final, NoReturn

from twisted.internet import interfaces
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectError, ConnectionDone, DNSLookupError
from twisted.internet.error import TimeoutError as ConnectTimeoutError
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from flodl_tw import sockets
from flodl_tw.channels.dead_peer import DeathWatch
from flodl_tw.channels.front_door import FrontDoor
from flodl_tw.channels.peeker import Peeker
from flodl_tw.core.addresses import is_address, parse_backend
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.core.wire import MAGIC_BYTES
from flodl_tw.deadlines import DeadlineQueue

LOG_EVERY_SECS: Final = 60
"""An unreachable backend is worth a line a minute, however many dials it costs."""

_log = Logger()


class IStream(interfaces.ITCPTransport, interfaces.IConsumer, interfaces.IPushProducer):
    """What a forward asks of a connection.  All of Twisted's have it: TCP, Unix sockets, and TLS over either."""


def client_endpoint(reactor: object, text: str) -> interfaces.IStreamClientEndpoint:
    """The endpoint of ``tcp:HOST:PORT`` or ``unix:PATH``; ValueError, with the reason, where ``text`` is neither."""
    # These bring OpenSSL with them, for which a server that forwards nothing need not wait.
    from twisted.internet.endpoints import HostnameEndpoint, TCP4ClientEndpoint, TCP6ClientEndpoint, UNIXClientEndpoint

    backend = parse_backend(text)
    if isinstance(backend, str):
        return UNIXClientEndpoint(reactor, backend)
    if not is_address(backend[0]):
        return HostnameEndpoint(reactor, *backend)
    return (TCP6ClientEndpoint if ":" in backend[0] else TCP4ClientEndpoint)(reactor, *backend)


class ForwardFactory:
    """One channel's backend, ``tcp:HOST:PORT`` or ``unix:PATH``; the route of its magic."""

    def __init__(self, front: FrontDoor, reactor: interfaces.IReactorFDSet, name: str, endpoint: str) -> None:
        self.name = name
        self.front = front
        self.watch = DeathWatch(reactor)
        front.at_close(self.watch.stop)
        self._endpoint_text = endpoint
        self._backend = client_endpoint(reactor, endpoint)
        self.idle: DeadlineQueue[DialerLeg] = front.deadlines(front.limits.forward_idle, DialerLeg.idled)
        self._quiet_until = 0.0
        self._reset_since = 0

    def buildProtocol(self, peeker: Peeker) -> DialerLeg:
        return DialerLeg(self, peeker)

    def connect(self, leg: BackendLeg) -> Deferred[interfaces.IProtocol]:
        """Connect a leg to the backend; it fails at the latest when the deadline has passed.

        The attempt counts toward the descriptors from here on, until it fails or the leg is gone.
        """
        self.front.capacity.opened()
        factory = Factory.forProtocol(lambda: leg)
        factory.noisy = False
        return self._backend.connect(factory).addTimeout(self.front.limits.connect, self.front.clock, _timed_out)

    def unreachable(self, failure: Failure) -> None:
        now = self.front.clock.seconds()
        self._reset_since += 1
        if now < self._quiet_until:
            return
        self._quiet_until = now + LOG_EVERY_SECS
        count, self._reset_since = self._reset_since, 0
        _log.warn(
            "the {name} channel's backend {endpoint} cannot be reached, {why}: {dials} reset; "
            "start the backend, or correct --{name}",
            name=self.name,
            endpoint=self._endpoint_text,
            why=_why(failure, self.front.limits.connect),
            dials="1 dial was" if count == 1 else f"{count} dials were",
        )


def _timed_out(result: object, seconds: float) -> NoReturn:
    raise ConnectTimeoutError


def _why(failure: Failure, seconds: float) -> str:
    if failure.check(ConnectTimeoutError):
        return f"no answer within {seconds:g} s"
    # Twisted's endpoint has a ValueError for what cannot be a name at all.
    if failure.check(DNSLookupError, ValueError):
        return "its name does not resolve"
    number = failure.value.osError if isinstance(failure.value, ConnectError) else None
    return os.strerror(number) if isinstance(number, int) else "it did not take the connection"


def half_closes(transport: interfaces.ITransport) -> bool:
    """Whether it can end its sending side alone; TLS ends both, though it has the names of the socket below it."""
    is_tls = interfaces.INegotiated.providedBy(transport)
    return not is_tls and interfaces.IHalfCloseableDescriptor.providedBy(transport)


@implementer(interfaces.IHalfCloseableProtocol, interfaces.IPushProducer)
class Leg(Protocol):
    """One end of a forwarded connection.  What arrives goes to the other end; so does every kind of end."""

    transport: IStream
    other: Leg
    done_reading = False
    closing = False
    watched: int | None = None

    def __init__(self, channel: ForwardFactory) -> None:
        self._channel = channel

    # IPushProducer, for the other end's transport

    def pauseProducing(self) -> None:
        self.transport.pauseProducing()
        self._channel.watch.add(self)

    def resumeProducing(self) -> None:
        if not self.done_reading:
            self._channel.watch.remove(self)
            self.transport.resumeProducing()

    def stopProducing(self) -> None:
        """The other end is gone, and its ``connectionLost`` says here what that means."""

    # What arrives

    def dataReceived(self, data: bytes) -> None:
        if not self.closing:
            self.other.transport.write(data)

    def readConnectionLost(self) -> None:
        """This end has sent its last byte."""
        if self.done_reading:
            return
        self.done_reading = True
        # The other end must not ask this one for more: a paused producer that is gone would keep it open for ever.
        self.other.transport.unregisterProducer()
        if self.other.done_reading or not half_closes(self.other.transport):
            self.close()
            self.other.close()
        else:
            self.other.transport.loseWriteConnection()
            self._channel.watch.add(self)

    def writeConnectionLost(self) -> None:
        """Our own half-close has left; nothing follows from it."""

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008  Twisted's signature
        self.connected = 0
        self._channel.watch.remove(self)
        if self.closing:
            return
        self.closing = True
        if reason.check(ConnectionDone):
            # TLS ends both ways at once.  What it has sent is still to reach the other end.
            self.other.close()
        else:
            # A reset, or a peer that is gone: the other end gets no orderly end either.
            self.other.abort()

    # Ends

    def close(self) -> None:
        """Close once what is written has left."""
        if not self.closing:
            self.closing = True
            self._channel.watch.remove(self)
            self.transport.unregisterProducer()
            # TLS is closed when the peer's answer to that has been read; a socket stops reading at once.
            self.transport.resumeProducing()
            self.transport.loseConnection()

    def abort(self) -> None:
        """Reset both ends, as far as they are connected."""
        for leg in (self, self.other):
            if leg.connected:
                leg.closing = True
                self._channel.watch.remove(leg)
                leg.transport.unregisterProducer()
                leg.transport.abortConnection()


class BackendLeg(Leg):
    """The end that we dialed."""

    other: DialerLeg

    def dataReceived(self, data: bytes) -> None:
        self._channel.idle.stop(self.other)
        super().dataReceived(data)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008  Twisted's signature
        self._channel.front.capacity.closed()
        super().connectionLost(reason)


class DialerLeg(Leg):
    """The end that dialed us.  Its first bytes wait, and the rest is not read, until the backend is there."""

    _connecting: Deferred[None]

    def __init__(self, channel: ForwardFactory, peeker: Peeker) -> None:
        super().__init__(channel)
        self._peeker = peeker
        self._waiting: list[bytes] | None = []

    def connectionMade(self) -> None:
        self._peeker.identified()
        self.pauseProducing()
        self.other = BackendLeg(self._channel)
        self.other.other = self
        self._connecting = self._channel.connect(self.other).addCallbacks(self._connected, self._unreachable)
        self._connecting.addErrback(self._broken)

    def dataReceived(self, data: bytes) -> None:
        if self._waiting is not None:
            self._waiting.append(data)
        else:
            self._channel.idle.stop(self)
            super().dataReceived(data)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008  Twisted's signature
        self._channel.idle.stop(self)
        if self._waiting is not None:
            self.closing = True
            self._connecting.cancel()
        super().connectionLost(reason)

    def _connected(self, _: object) -> None:
        backend = self.other
        if self.closing:
            self.abort()
            return
        sockets.tune_backend(backend.transport, self._channel.front.limits)
        waiting, self._waiting = self._waiting or [], None
        self.transport.registerProducer(backend, True)
        backend.transport.registerProducer(self, True)
        backend.transport.writeSequence(waiting)
        if sum(map(len, waiting)) <= MAGIC_BYTES:
            self._channel.idle.start(self)
        self.resumeProducing()

    def idled(self) -> None:
        """Neither end has said anything behind the channel's magic in time."""
        secs = self._channel.front.limits.forward_idle
        why = f"on the {self._channel.name} channel nothing followed its first four bytes within {secs} s"
        self._peeker.dropped(ConnectionEnd.IDLE_FORWARD, why)
        self.abort()

    def _unreachable(self, failure: Failure) -> None:
        self._channel.front.capacity.closed()
        if self.closing:
            # It was given up because its dialer has gone.
            return
        self._channel.unreachable(failure)
        self._channel.front.ended[ConnectionEnd.BACKEND_UNREACHABLE] += 1
        self.abort()

    def _broken(self, failure: Failure) -> None:
        _log.failure("a forwarded connection could not be set up", failure)
        self.abort()
