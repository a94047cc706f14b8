"""Questions to one controller over HTTP; each way of getting no answer is a sentence for people."""

from __future__ import annotations

import io
import json
from typing import Final, NoReturn

import treq
from treq.client import HTTPClient
from twisted.internet import error as errors
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint, TCP6ClientEndpoint
from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint
from twisted.internet.task import Cooperator
from twisted.python.failure import Failure
from twisted.web.client import URI, Agent, FileBodyProducer, RequestTransmissionFailed, ResponseFailed
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from flodl_tw.agent.dial import reason_of
from flodl_tw.core.addresses import DEFAULT_PORT, FDL_PORT, show_endpoint
from flodl_tw.core.log_text import printable
from flodl_tw.reactor import IReactor

CONNECT_SECS: Final = 5.0
ANSWER_SECS: Final = 10.0
"""From the first dial to the last byte of the answer."""
MAX_CHARS: Final = 1000
"""Characters that are shown of a text that came with an answer."""
REFUSED: Final = 1
"""The exit status of what was refused, or what nothing answers."""
# OSError is what a look-up or a socket may say; a name that no look-up can have is a ValueError.
_FAILURES: Final = (
    *(errors.ConnectError, errors.ConnectionClosed, RequestTransmissionFailed, ResponseFailed),
    *(ValueError, OSError),
)


class AnswerError(Exception):
    """There is no answer that can be used; the text is for people, ``status`` is the command's."""

    def __init__(self, text: str, status: int = REFUSED) -> None:
        super().__init__(text)
        self.status = status


class NoAnswerError(AnswerError):
    """Nothing answers, or not in time."""


class ControllerClient:
    """Asks one controller, with a connection of its own for each question.

    ``token`` (16 bytes) shows who asks; it leaves in a header alone, and is never shown.
    """

    def __init__(self, http: HTTPClient, clock: IReactorTime, host: str, port: int, token: bytes | None = None) -> None:
        self.clock = clock
        self.shown = show_endpoint(host, port)
        """The controller, for people."""
        self._http = http
        self._host = host
        self._port = port
        self._token = token

    def ask(
        self, method: str, path: str, body: object = None, *, secs: float = ANSWER_SECS
    ) -> Deferred[tuple[int, bytes]]:
        """The status and the body of an answer; the Deferred fails with AnswerError.

        ``body`` is sent as JSON, and ``secs`` are what the whole answer may
        take.  The token goes with a POST alone: what is open to everybody needs none.
        """

        def too_slow(result: object, seconds: float) -> NoReturn:
            raise self._no_answer(f"no whole answer within {seconds:g} s")

        asked = Deferred.fromCoroutine(self._ask(method, path, body))
        return asked.addTimeout(secs, self.clock, too_slow)

    def foreign(self, what: str) -> AnswerError:
        """What came is not a controller's, and why."""
        return AnswerError(f"{self.shown} answers, but not as a controller does: {what}")

    async def _ask(self, method: str, path: str, body: object) -> tuple[int, bytes]:
        headers = Headers({"Accept": ["application/json"]})
        if method == "POST" and self._token is not None:
            headers.addRawHeader("Authorization", f"Bearer {self._token.hex()}")
        sent = None
        if body is not None:
            headers.addRawHeader("Content-Type", "application/json")
            sent = json.dumps(body).encode()
        try:
            # The zone of a link-local address means something on this host alone.
            host = self._host.partition("%")[0] if ":" in self._host else self._host.encode("idna").decode("ascii")
            headers.addRawHeader("Host", show_endpoint(host, self._port))
            # The endpoint and the Host header are ours: treq's URLs have no IPv6 address with a zone.
            # A redirect would take the token to somebody else.
            response = await self._http.request(
                method, f"http://controller{path}", headers=headers, data=sent, allow_redirects=False, unbuffered=True
            )
            return response.code, await treq.content(response)
        except _FAILURES as error:
            raise self._told(error) from None

    def _told(self, error: Exception) -> AnswerError:
        """A client's error in words, with what to check."""
        reasons = getattr(error, "reasons", None)
        cause = reasons[0].value if reasons else error
        if isinstance(cause, errors.ConnectionClosed):
            return self._no_answer("it closed the connection without a whole answer")
        if isinstance(error, ResponseFailed):
            return self.foreign("what it sends is not HTTP")
        return self._no_answer(printable(reason_of(Failure(cause)).rstrip("."), MAX_CHARS))

    def _no_answer(self, why: str) -> NoAnswerError:
        return NoAnswerError(
            f"nothing answers at {self.shown}: {why}; check that the controller runs, its address and its port "
            f"({DEFAULT_PORT} unless it was told otherwise; flodl's own launcher has {FDL_PORT})"
        )


@implementer(IAgentEndpointFactory)
class _OneEndpoint:
    """Leads every request to one place, whatever its URL says."""

    def __init__(self, endpoint: IStreamClientEndpoint) -> None:
        self._endpoint = endpoint

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:  # noqa: N802  Twisted's name
        return self._endpoint


def make_client(reactor: IReactor, host: str, port: int, token: bytes | None = None) -> ControllerClient:
    """A client that dials anew for each question, and knows no proxy."""
    # A look-up would lose the zone of a link-local address.
    kind = TCP6ClientEndpoint if ":" in host else HostnameEndpoint
    agent = Agent.usingEndpointFactory(reactor, _OneEndpoint(kind(reactor, host, port, timeout=CONNECT_SECS)))
    turns = Cooperator(scheduler=lambda turn: reactor.callLater(0, turn))
    http = HTTPClient(agent, data_to_body_producer=lambda data: FileBodyProducer(io.BytesIO(data), turns))
    return ControllerClient(http, reactor, host, port, token)
