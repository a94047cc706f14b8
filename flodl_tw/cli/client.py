"""One question to a controller over HTTP, and its answer, which nobody has to trust.

Every way of not getting one ends in a sentence that says what to check.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import treq
from hyperlink import EncodedURL
from treq.client import HTTPClient
from twisted.internet import error as errors
from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure
from twisted.web._newclient import ParseError
from twisted.web.client import RequestGenerationFailed, RequestTransmissionFailed, ResponseFailed

from flodl_tw.cli.http_client import ANSWER_SECS, CONNECT_SECS
from flodl_tw.core.addresses import DEFAULT_PORT, FDL_PORT, show_endpoint
from flodl_tw.core.log_text import printable, shortened

MAX_ANSWER: Final = 64 * 1024
MAX_CHARS: Final = 1000
"""Characters that are shown of a text that came with an answer."""


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
    def url(self) -> str:
        """Its address as a URL, without a path; raises ValueError for a host that can be in none."""
        if set(self.host) & set("/?#@\\[]") or not self.host.isprintable() or " " in self.host:
            raise ValueError(f"{self.host!r} is no host's name")
        host = self.host if ":" in self.host else self.host.encode("idna").decode("ascii")
        return f"http://{show_endpoint(host, self.port)}"


class NoAnswerError(Exception):
    """Nothing answers, or not in time; the text is for people."""


class ForeignAnswerError(Exception):
    """Something answers, but not as a controller does; the text is for people."""


def foreign(controller: ControllerAddress, what: str) -> ForeignAnswerError:
    """What came is not a controller's, and why."""
    return ForeignAnswerError(f"{controller.shown} answers, but not as a controller does: {what}")


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    controller: ControllerAddress
    code: int
    body: bytes

    def text(self) -> str:
        """The body as text."""
        try:
            return self.body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise foreign(self.controller, f"byte {error.start} of its answer is not UTF-8") from None

    def object(self) -> dict[str, Any]:
        """The body as a JSON object."""
        text = self.text()
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            begin = printable(shortened(text.strip(), 60))
            raise foreign(self.controller, f"status {self.code}, and no JSON: {begin or 'an empty body'}") from None
        if not isinstance(value, dict):
            raise foreign(self.controller, f"status {self.code}, and JSON that is no object")
        return value


class _TooLongError(Exception):
    """More of an answer than is read."""


async def ask(
    http: HTTPClient,
    controller: ControllerAddress,
    method: str,
    path: str,
    *,
    limit: int = MAX_ANSWER,
    body: Any = None,
) -> Answer:
    """Ask once.  Raises NoAnswerError or ForeignAnswerError.

    ``body`` is sent as JSON.  The token goes with a POST alone: what is open
    to everybody needs none.
    """
    data = bytearray()

    def take(part: bytes) -> None:
        if len(data) + len(part) > limit:
            raise _TooLongError
        data.extend(part)

    try:
        response = await _cancellable(_send(http, controller, method, path, body))
        await treq.collect(response, take)
    except _TooLongError:
        raise foreign(controller, f"its answer is longer than {limit} bytes") from None
    except _FAILURES as error:
        raise _told(controller, error) from None
    return Answer(controller, response.code, bytes(data))


def _send(http: HTTPClient, controller: ControllerAddress, method: str, path: str, body: Any) -> Deferred[Any]:
    url = controller.url
    # The zone of a link-local address means something on this host alone.
    headers = {"Accept": "application/json", "Host": re.sub("%[^]]*", "", url.removeprefix("http://"))}
    # A redirect would take the token to somebody else.
    options: dict[str, Any] = {"headers": headers, "allow_redirects": False, "unbuffered": True}
    if method == "GET":
        return http.get(_Url(url + path), **options)
    if controller.token is not None:
        headers["Authorization"] = f"Bearer {controller.token.hex()}"
    if body is not None:
        options["json"] = body
    return http.post(_Url(url + path), **options)


def _cancellable(asked: Deferred[Any]) -> Deferred[Any]:
    """The same, but a cancelled one always says so: a client may tell it as a name that is unknown."""

    def cancel(answered: Deferred[Any]) -> None:
        answered.errback(CancelledError())
        asked.cancel()

    answered: Deferred[Any] = Deferred(cancel)

    def pass_on(result: Any) -> None:
        # A Failure goes down the other's errbacks.
        if not answered.called:
            answered.callback(result)

    asked.addBoth(pass_on)
    return answered


class _Url(EncodedURL):
    """A URL that is sent as it was written: treq's own takes an IPv6 address for a name, and fails."""

    __slots__ = ("_written",)

    def __init__(self, written: str) -> None:
        super().__init__(scheme="http", host="controller")
        self._written = written

    def to_uri(self) -> _Url:
        return self

    def to_text(self, with_password: bool = False) -> str:
        return self._written


_FAILURES: Final = (
    errors.ConnectError,
    errors.ConnectionAborted,
    errors.ConnectionClosed,
    ParseError,
    RequestGenerationFailed,
    RequestTransmissionFailed,
    ResponseFailed,
    # A name that cannot be looked up is a ValueError; OSError is what a resolver or a socket may say.
    ValueError,
    OSError,
)
_REASONS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (errors.ConnectionRefusedError, "the connection was refused"),
    (errors.TimeoutError, f"no connection within {CONNECT_SECS:g} s"),
    (errors.TCPTimedOutError, f"no connection within {CONNECT_SECS:g} s"),
    (errors.DNSLookupError, "the name is unknown"),
    (errors.UnknownHostError, "the name is unknown"),
    (errors.NoRouteError, "there is no route to it"),
    (errors.ConnectionAborted, f"no whole answer within {ANSWER_SECS:g} s"),
    (errors.ConnectionLost, "the connection was reset"),
    (errors.ConnectionClosed, "it closed the connection without a whole answer"),
    (ValueError, "the name is none that can be looked up"),
)


def _causes(error: Any) -> Iterator[Any]:
    """The errors that a client's error wraps, or itself."""
    reasons = getattr(error, "reasons", None)
    if not reasons:
        yield error
    for reason in reasons or ():
        yield from _causes(reason.value if isinstance(reason, Failure) else reason)


def _unparsed(causes: list[Any]) -> bool:
    """Whether an answer failed by what was sent, not by the end of its connection."""
    if any(isinstance(cause, (ParseError, ValueError)) for cause in causes):
        return True
    return not any(isinstance(cause, (errors.ConnectionClosed, errors.ConnectionAborted)) for cause in causes)


def _told(controller: ControllerAddress, error: Exception) -> Exception:
    """A client's error in words, with what to check."""
    causes = list(_causes(error))
    if isinstance(error, ResponseFailed) and _unparsed(causes):
        return foreign(controller, "what it sends is not HTTP")
    known = [why for kind, why in _REASONS for cause in causes if isinstance(cause, kind)]
    why = known[0] if known else printable(shortened(str(causes[0]), MAX_CHARS))
    return NoAnswerError(
        f"nothing answers at {controller.shown}: {why}; check that the controller runs, "
        f"its address and its port ({DEFAULT_PORT} unless it was told otherwise; flodl's own launcher has {FDL_PORT})"
    )
