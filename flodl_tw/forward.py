"""Forwarded channels: every byte to a backend and back, with nothing of its own.

A pair of legs, each an ordinary Twisted transport that is the other's producer
and consumer, so back-pressure is Twisted's.  Half-close and resets pass on.
"""

from __future__ import annotations

from typing import Any, Final

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import clientFromString
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol, ITransport
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from flodl_tw import sockets
from flodl_tw.core.window import SettingError
from flodl_tw.mux import FrontDoor, Peeker

LOG_EVERY_SECS: Final = 60
"""An unreachable backend is worth a line a minute, however many dials it costs."""


class ForwardChannel:
    """One channel's backend; the route of its magic.

    ``endpoint`` is a Twisted client endpoint's description, such as
    ``tcp:host:port`` or ``unix:path``; SettingError where it is none.
    """

    log = Logger()

    def __init__(self, front: FrontDoor, reactor: Any, name: str, endpoint: str) -> None:
        self.name = name
        self.front = front
        self._endpoint_text = endpoint
        try:
            self._endpoint = clientFromString(reactor, endpoint)
        except (ValueError, TypeError) as error:
            why = "a part of it is missing or too much" if isinstance(error, TypeError) else str(error)
            words = "native, off, " if name == "rendezvous" else ""
            raise SettingError(
                f"--{name}", endpoint, f"it is no client endpoint ({why})", f"give {words}tcp:HOST:PORT or unix:PATH"
            ) from None
        self._quiet_until = 0.0
        self._unlogged = 0

    def __call__(self, peeker: Peeker) -> DialerLeg:
        """A dial to forward."""
        return DialerLeg(self, peeker)

    def connect(self, leg: BackendLeg) -> Deferred[Any]:
        """Connect a leg to the backend; it fails at the latest when the deadline has passed."""
        factory = Factory.forProtocol(lambda: leg)
        factory.noisy = False
        connecting: Deferred[Any] = self._endpoint.connect(factory)
        return connecting.addTimeout(self.front.limits.connect, self.front.clock)

    def unreachable(self, failure: Failure) -> None:
        """A dial could not be forwarded."""
        now = self.front.clock.seconds()
        self._unlogged += 1
        if now < self._quiet_until:
            return
        self._quiet_until = now + LOG_EVERY_SECS
        self.log.warn(
            "the {name} channel's backend {endpoint} cannot be reached ({why}): {count} dials reset since the last "
            "such line; start it, or correct --{name}",
            name=self.name,
            endpoint=self._endpoint_text,
            why=failure.getErrorMessage(),
            count=self._unlogged,
        )
        self._unlogged = 0


class Leg:
    """One end of a forwarded connection.  What arrives goes to the other end; so does every kind of end."""

    transport: Any
    other: Leg
    done_reading = False
    closing = False

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

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008  Twisted's signature
        if not self.closing:
            # Not by our doing: a reset, or a peer that is gone.  Its other end gets no orderly end either.
            self.closing = True
            self.other.abort()

    def close(self) -> None:
        """Close once what is written has left."""
        if not self.closing:
            self.closing = True
            self.transport.unregisterProducer()
            self.transport.loseConnection()

    def abort(self) -> None:
        """Reset."""
        if not self.closing or self.transport.connected:
            self.closing = True
            self.transport.unregisterProducer()
            self.transport.abortConnection()


@implementer(IHalfCloseableProtocol)
class BackendLeg(Leg, Protocol):
    """The end that we dialed."""

    def __init__(self, front: FrontDoor) -> None:
        self._front = front

    def connectionMade(self) -> None:
        self._front.backend_opened()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008  Twisted's signature
        self._front.backend_closed()
        super().connectionLost(reason)

    def writeConnectionLost(self) -> None:
        pass


class DialerLeg(Leg):
    """The end that dialed us.  Its first bytes wait, and the rest is not read, until the backend is there."""

    def __init__(self, channel: ForwardChannel, peeker: Peeker) -> None:
        self._channel = channel
        self._peeker = peeker
        self._waiting: list[bytes] | None = []
        self._connecting: Deferred[Any] | None = None

    def makeConnection(self, transport: ITransport) -> None:
        self.transport = transport
        self._peeker.decided()
        self.transport.pauseProducing()
        self.other = BackendLeg(self._channel.front)
        self.other.other = self
        self._connecting = self._channel.connect(self.other)
        self._connecting.addCallbacks(self._connected, self._unreachable)

    def dataReceived(self, data: bytes) -> None:
        if self._waiting is not None:
            self._waiting.append(data)
        else:
            super().dataReceived(data)

    def readConnectionLost(self) -> None:
        if self._waiting is None:
            super().readConnectionLost()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008  Twisted's signature
        if self._waiting is not None:
            self.closing = True
            if self._connecting is not None:
                self._connecting.cancel()
        else:
            super().connectionLost(reason)

    def _connected(self, backend: BackendLeg) -> None:
        if self.closing:
            backend.closing = True
            backend.transport.abortConnection()
            return
        sockets.tune_backend(backend.transport, self._channel.front.limits)
        waiting, self._waiting = self._waiting or [], None
        self.transport.registerProducer(backend.transport, True)
        backend.transport.registerProducer(self.transport, True)
        backend.transport.writeSequence(waiting)
        self.transport.resumeProducing()

    def _unreachable(self, failure: Failure) -> None:
        if self.closing:
            failure.trap(CancelledError)
            return
        self._channel.unreachable(failure)
        self.closing = True
        self._channel.front.ended["backend-unreachable"] += 1
        self.transport.abortConnection()
