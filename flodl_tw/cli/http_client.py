"""An HTTP client for one question at a time, whose every step has its time.

treq on an agent that dials anew for each request, asks no proxy and takes
nothing compressed.
"""

from __future__ import annotations

from typing import Any, Final

from treq.client import HTTPClient
from twisted.internet import error as errors
from twisted.internet.defer import Deferred, succeed
from twisted.internet.endpoints import HostnameEndpoint
from twisted.internet.interfaces import IConsumer, IDelayedCall, IProtocolFactory, IStreamClientEndpoint
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.python.failure import Failure
from twisted.web.client import URI, Agent
from twisted.web.iweb import IAgentEndpointFactory, IBodyProducer
from zope.interface import implementer

CONNECT_SECS: Final = 5.0
ANSWER_SECS: Final = 10.0
"""From the first dial to the last byte of the answer."""


class _Timed(ProtocolWrapper):
    """A connection that is ended when its time is over, whatever it is at."""

    call: IDelayedCall

    def connectionLost(self, reason: Failure = Failure(errors.ConnectionDone())) -> None:  # noqa: B008  Twisted's signature
        if self.call.active():
            self.call.cancel()
        super().connectionLost(reason)


@implementer(IStreamClientEndpoint)
class _TimedEndpoint:
    """Dials a name; the connection and its answer each have their time."""

    def __init__(self, reactor: Any, uri: URI) -> None:
        self._reactor = reactor
        self._endpoint = HostnameEndpoint(reactor, uri.host, uri.port, timeout=CONNECT_SECS)

    def connect(self, factory: IProtocolFactory) -> Deferred[Any]:
        ends = self._reactor.seconds() + ANSWER_SECS
        connected: Deferred[Any] = self._endpoint.connect(_TimedFactory(factory))

        def too_slow(result: object, seconds: float) -> None:
            raise errors.TimeoutError

        def begun(timed: Any) -> Any:
            timed.call = self._reactor.callLater(max(0.0, ends - self._reactor.seconds()), timed.abortConnection)
            return timed.wrappedProtocol

        return connected.addTimeout(CONNECT_SECS, self._reactor, too_slow).addCallback(begun)


class _TimedFactory(WrappingFactory[_Timed]):
    """Makes timed connections."""

    protocol = _Timed
    noisy = False


@implementer(IAgentEndpointFactory)
class _Endpoints:
    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:  # noqa: N802  Twisted's name
        return _TimedEndpoint(self._reactor, uri)


class _PlainAgent(Agent):
    """Asks for nothing that is compressed, and takes nothing for it: a few bytes may be a gigabyte."""

    def request(self, method: bytes, uri: bytes, headers: Any = None, producer: Any = None) -> Deferred[Any]:
        if headers is not None:
            headers.removeHeader(b"accept-encoding")

        def plain(response: Any) -> Any:
            response.headers.removeHeader(b"content-encoding")
            return response

        return super().request(method, uri, headers, producer).addCallback(plain)


@implementer(IBodyProducer)
class _Body:
    """A few bytes, sent at once: treq's own way takes turns of the global reactor."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.length = len(data)

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        consumer.write(self._data)
        return succeed(None)

    def pauseProducing(self) -> None:
        """There is nothing left to pause."""

    def resumeProducing(self) -> None:
        """There is nothing left to resume."""

    def stopProducing(self) -> None:
        """There is nothing left to stop."""


def make_http(reactor: Any) -> HTTPClient:
    """A client that dials anew for each question, and knows no proxy."""
    agent = _PlainAgent.usingEndpointFactory(reactor, _Endpoints(reactor))
    return HTTPClient(agent, data_to_body_producer=_Body)
