"""Questions to one controller over HTTP, and their answers; each way of getting none is a sentence for people."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn

import treq
from treq.client import HTTPClient
from twisted.internet import error as errors
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint, TCP6ClientEndpoint
from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint
from twisted.internet.task import Cooperator
from twisted.web.client import URI, Agent, FileBodyProducer, RequestTransmissionFailed, ResponseFailed
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from flodl_tw.core.addresses import DEFAULT_PORT, FDL_PORT, show_endpoint
from flodl_tw.core.fields import ShapeError, decode_object
from flodl_tw.core.log_text import printable

if TYPE_CHECKING:
    from flodl_tw.reactor import IReactor

CONNECT_SECS: Final = 5.0
ANSWER_SECS: Final = 10.0
"""From the first dial to the last byte of the answer."""
MAX_ANSWER: Final = 64 * 1024
MAX_STATE: Final = 64 * 1024 * 1024
"""Bytes that are read of an answer with all of a run's hosts or ranks in it."""
MAX_CHARS: Final = 1000
"""Characters that are shown of a text that came with an answer."""
REFUSED: Final = 1
"""The exit status of what was refused, or what nothing answers."""
_URL: Final = "http://controller"
"""The agent has one endpoint, and the Host header is ours: treq's URLs have no IPv6 address with a zone."""


class AnswerError(Exception):
    """There is no answer that can be used; the text is for people, ``status`` is the command's."""

    status = REFUSED


class NoAnswerError(AnswerError):
    """Nothing answers, or not in time."""


class ForeignAnswerError(AnswerError):
    """Something answers, but not as a controller does."""


@dataclass(frozen=True, slots=True)
class ControllerAddress:
    """Where to ask, and the 16 bytes that show who asks.  They leave in a header alone, and are never shown."""

    host: str
    port: int
    token: bytes | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        """The controller, for people."""
        return show_endpoint(self.host, self.port)

    @property
    def host_header(self) -> str:
        """What HTTP calls it; ValueError for a name that no look-up can have."""
        # The zone of a link-local address means something on this host alone.
        host = self.host.partition("%")[0] if ":" in self.host else self.host.encode("idna").decode("ascii")
        return show_endpoint(host, self.port)

    def foreign(self, what: str) -> ForeignAnswerError:
        """What came is not a controller's, and why."""
        return ForeignAnswerError(f"{self.shown} answers, but not as a controller does: {what}")


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    controller: ControllerAddress
    code: int
    body: bytes

    def object(self) -> dict[str, object]:
        """The body as a JSON object."""
        try:
            return decode_object(self.body, "its answer")
        except ShapeError:
            begin = printable(self.body.decode("utf-8", "replace").strip(), 60) or "an empty body"
            raise self.controller.foreign(f"status {self.code}, and no JSON object: {begin}") from None


class ControllerClient:
    """Asks one controller, with a connection of its own for each question."""

    def __init__(self, http: HTTPClient, clock: IReactorTime, controller: ControllerAddress) -> None:
        self._http = http
        self.clock = clock
        self.controller = controller

    def ask(self, method: str, path: str, *, limit: int = MAX_ANSWER, body: object = None) -> Deferred[Answer]:
        """Ask once; the Deferred fails with NoAnswerError or ForeignAnswerError.

        ``body`` is sent as JSON.  The token goes with a POST alone: what is
        open to everybody needs none.
        """

        def too_slow(result: object, seconds: float) -> NoReturn:
            raise _no_answer(self.controller, f"no whole answer within {seconds:g} s")

        asked = Deferred.fromCoroutine(self._ask(method, path, limit, body))
        return asked.addTimeout(ANSWER_SECS, self.clock, too_slow)

    async def _ask(self, method: str, path: str, limit: int, body: object) -> Answer:
        data = bytearray()

        def take(part: bytes) -> None:
            data.extend(part)
            if len(data) > limit:
                raise self.controller.foreign(f"its answer is longer than {limit} bytes")

        try:
            headers = Headers({"Accept": ["application/json"], "Host": [self.controller.host_header]})
            if method == "POST" and self.controller.token is not None:
                headers.addRawHeader("Authorization", f"Bearer {self.controller.token.hex()}")
            sent = None
            if body is not None:
                headers.addRawHeader("Content-Type", "application/json")
                sent = json.dumps(body).encode()
            # A redirect would take the token to somebody else.
            response = await self._http.request(
                method, _URL + path, headers=headers, data=sent, allow_redirects=False, unbuffered=True
            )
            await treq.collect(response, take)
        except _FAILURES as error:
            raise _told(self.controller, error) from None
        return Answer(self.controller, response.code, bytes(data))


@implementer(IAgentEndpointFactory)
class _OneEndpoint:
    """Leads every request to one place, whatever its URL says."""

    def __init__(self, endpoint: IStreamClientEndpoint) -> None:
        self._endpoint = endpoint

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:  # noqa: N802  Twisted's name
        return self._endpoint


def make_client(reactor: IReactor, controller: ControllerAddress) -> ControllerClient:
    """A client that dials anew for each question, and knows no proxy."""
    # A look-up would lose the zone of a link-local address.
    kind = TCP6ClientEndpoint if ":" in controller.host else HostnameEndpoint
    endpoint = kind(reactor, controller.host, controller.port, timeout=CONNECT_SECS)
    agent = Agent.usingEndpointFactory(reactor, _OneEndpoint(endpoint))
    turns = Cooperator(scheduler=lambda turn: reactor.callLater(0, turn))
    http = HTTPClient(agent, data_to_body_producer=lambda data: FileBodyProducer(io.BytesIO(data), turns))
    return ControllerClient(http, reactor, controller)


# A name that cannot be looked up is a ValueError; OSError is what a resolver or a socket may say.
_FAILURES: Final = (
    errors.ConnectError,
    errors.ConnectionClosed,
    RequestTransmissionFailed,
    ResponseFailed,
    ValueError,
    OSError,
)
_REASONS: Final = (
    (errors.ConnectionRefusedError, "the connection was refused"),
    ((errors.TimeoutError, errors.TCPTimedOutError), f"no connection within {CONNECT_SECS:g} s"),
    ((errors.DNSLookupError, errors.UnknownHostError), "the name is unknown"),
    (errors.NoRouteError, "there is no route to it"),
    (errors.ConnectionLost, "the connection was reset"),
    (errors.ConnectionClosed, "it closed the connection without a whole answer"),
    (ValueError, "the name is none that can be looked up"),
)


def _told(controller: ControllerAddress, error: Exception) -> AnswerError:
    """A client's error in words, with what to check."""
    reasons = getattr(error, "reasons", None)
    cause = reasons[0].value if reasons else error
    if isinstance(error, ResponseFailed) and not isinstance(cause, errors.ConnectionClosed):
        return controller.foreign("what it sends is not HTTP")
    known = (why for kind, why in _REASONS if isinstance(cause, kind))
    return _no_answer(controller, next(known, printable(str(cause), MAX_CHARS)))


def _no_answer(controller: ControllerAddress, why: str) -> NoAnswerError:
    return NoAnswerError(
        f"nothing answers at {controller.shown}: {why}; check that the controller runs, "
        f"its address and its port ({DEFAULT_PORT} unless it was told otherwise; flodl's own launcher has {FDL_PORT})"
    )
