"""The status channel: one connection carries one HTTP request, and the answer closes it.

twisted.web reads the request.  Here each limit gets a status code of its own,
the whole request has one deadline, and what follows the request is not read.
"""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import unquote_to_bytes

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel
from twisted.web.http_headers import Headers
from twisted.web.server import Request, Site

from flodl_tw.channels.peeker import Peeker
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.core.fields import compact
from flodl_tw.deadlines import after
from flodl_tw.limits import MAX_BODY, MAX_CHECK_BODY, MAX_HEAD, MAX_START_LINE
from flodl_tw.web.answers import answer_headers
from flodl_tw.web.under_way import AnswersUnderWay


class StatusRequest(Request):
    """A request that tells its connection what has come of it."""

    channel: StatusProtocol

    def gotLength(self, length: int | None) -> None:
        # Where it knows no length Twisted opens a temporary file, and a body here is never more than 64 KiB.
        super().gotLength(0 if length is None else length)

    def handleContentChunk(self, data: bytes) -> None:
        if self.channel.takes_body(len(data)):
            super().handleContentChunk(data)

    def process(self) -> None:
        self.channel.identified()
        if self.method == b"OPTIONS" and self.path == b"*":
            # It asks about the whole server, which answers as for its page.
            self.path = b"/"
        elif self.path == b"*" or self.path.startswith(b"//") or self.path[:4].lower() == b"/%2f":
            # Klein takes "//start" for "/start", and Twisted answers "*" by itself; neither is a path of ours.
            self.path = b"/unknown"
        super().process()

    def getRequestHostname(self) -> bytes:
        """Routing must not depend on what a client calls us; werkzeug refuses some Hosts with a traceback."""
        return b"localhost"


class StatusProtocol(HTTPChannel):
    """One HTTP connection, from its first byte to its answer.

    Its deadline is its own and in all: the channel's ends a client that is idle, and none that sends a byte a second.
    It has no factory, so nothing writes an access log, which would have the tokens of its URLs.
    """

    requestFactory = StatusRequest  # noqa: N815  Twisted's name
    # A line that lacks its CR is told from one that has not ended.
    delimiter = b"\n"

    def __init__(self, site: Site, under_way: AnswersUnderWay, peeker: Peeker) -> None:
        super().__init__()
        self.site = site
        self._under_way = under_way
        self._peeker = peeker
        self._reading = True
        self._answering = False
        self._start_line = b""
        self._lines = self._head_bytes = self._body_bytes = 0
        self._max_body = MAX_BODY
        self.MAX_LENGTH = MAX_START_LINE + 1
        self._clock = peeker.door.clock
        elapsed = self._clock.seconds() - peeker.first_byte_at
        self._deadline = after(self._clock, max(0.0, peeker.door.limits.request - elapsed), self._expired)

    # What the transport and the peeker call

    def dataReceived(self, data: bytes) -> None:
        if self._reading:
            super().dataReceived(data)

    def readConnectionLost(self) -> None:
        """The client has shut its side: it still gets the answer to a whole request."""
        if self._reading:
            self._cut_off()
            self._peeker.close()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008  Twisted's signature
        if self._reading:
            self._cut_off()
        self._under_way.end(self)
        super().connectionLost(reason)

    # What HTTPChannel calls while it reads; each may find that the request is refused

    def lineReceived(self, line: bytes) -> bool:
        """Count a line of the head before it is read; gives whether the rest is not to be read."""
        line, ending = line[:-1], line[-1:]
        if not self._lines:
            self._begin(line)
        self._lines += 1
        self._head_bytes += len(line) + 2
        # What is left for the next line, which ends in two bytes.
        self.MAX_LENGTH = MAX_HEAD - self._head_bytes - 1
        if ending != b"\r":
            self._refuse(400, "the lines of a request end in CR LF")
        elif self._lines > self.maxHeaders:
            self._refuse(431, f"the request's head is over the limit of {self.maxHeaders} lines")
        else:
            super().lineReceived(line)
        return not self._reading

    def lineLengthExceeded(self, line: bytes) -> bool:  # noqa: N802  Twisted's name
        if self._lines:
            self._refuse(431, f"the request's head is over the limit of {MAX_HEAD} bytes")
        else:
            self._begin(line)
            self._refuse(414, f"the request line is over the limit of {MAX_START_LINE} bytes")
        return True

    def headerReceived(self, line: bytes) -> bool:
        try:
            return bool(super().headerReceived(line))
        except ValueError:
            # int() takes no Content-Length of thousands of digits.
            self._refuse_body()
            return False

    def allHeadersReceived(self) -> None:
        if len(self.requests[-1].requestHeaders.getRawHeaders(b"host", [])) > 1:
            self._refuse(400, "the request has more than one Host")
        elif not _is_utf8(unquote_to_bytes(self._start_line)):
            self._refuse(400, "the request line is not UTF-8")
        elif (self.length or 0) > self._max_body:
            self._refuse_body()
        else:
            super().allHeadersReceived()

    def allContentReceived(self) -> None:
        if self._reading:
            super().allContentReceived()

    def checkPersistence(self, request: Request, version: bytes) -> bool:  # noqa: N802  Twisted's name
        return False

    def loseConnection(self) -> None:
        """The answer is written, or a refusal: the parser's own is a bare 400."""
        if self._reading:
            self._stop_reading()
            self._peeker.dropped(ConnectionEnd.HTTP_400, "its HTTP request does not parse")
        super().loseConnection()
        if not self._answering:
            self._peeker.close()

    # What requests ask and call

    def getPeer(self) -> IPv4Address | IPv6Address:
        """The peer as the door has it: one behind a Unix socket is on this machine."""
        return _address(self._peeker.peer, self._peeker.port or 0)

    def getHost(self) -> IPv4Address | IPv6Address:
        """Where the peer has reached us: behind a Unix socket, at loopback."""
        return _address(*self._peeker.dialed)

    def takes_body(self, count: int) -> bool:
        """Whether ``count`` more bytes of the body are within the limit; the request is refused if not."""
        self._body_bytes += count
        if self._reading and self._body_bytes > self._max_body:
            self._refuse_body()
        return self._reading

    def identified(self) -> None:
        """The request has arrived, its body included."""
        self._stop_reading()
        self._answering = True
        self._peeker.identified()

    def answers(self, body: bytes) -> None:
        """This body is what it is being sent, until the connection is gone."""
        self._under_way.begin(self, body)

    # Ends

    def give_up(self) -> None:
        """Others need the room that its answer takes."""
        self._peeker.drop(ConnectionEnd.UNREAD_ANSWER, "it does not read its HTTP answer, and others need the room")

    def _begin(self, start_line: bytes) -> None:
        self._start_line = start_line
        target = start_line.split(b" ")[1:2]
        if target and target[0].partition(b"?")[0] == b"/check":
            # A hello, for the path as it is spelled here alone.
            self._max_body = MAX_CHECK_BODY

    def _refuse_body(self) -> None:
        self._refuse(413, f"the request's body is over the limit of {self._max_body} bytes")

    def _refuse(self, code: int, error: str) -> None:
        self._stop_reading()
        self._peeker.dropped(ConnectionEnd[f"HTTP_{code}"], error)
        body = compact({"error": error}).encode()
        headers = Headers({name: [value] for name, value in answer_headers(body).items()})
        self.writeHeaders(b"HTTP/1.1", b"%d" % code, HTTPStatus(code).phrase.encode(), headers)
        if not self._start_line.startswith(b"HEAD "):
            self.write(body)
        self.loseConnection()

    def _stop_reading(self) -> None:
        self._reading = False
        self._deadline.cancel()

    def _cut_off(self) -> None:
        self._stop_reading()
        self._peeker.left(ConnectionEnd.CUT_OFF_REQUEST)

    def _expired(self) -> None:
        # As with every deadline: what has arrived by now is read first.
        self._deadline = after(self._clock, 0, self._expire)

    def _expire(self) -> None:
        self._stop_reading()
        secs = self._peeker.door.limits.request
        self._peeker.drop(ConnectionEnd.REQUEST_DEADLINE, f"no whole HTTP request within {secs} s")


def _address(host: str, port: int) -> IPv4Address | IPv6Address:
    return (IPv6Address if ":" in host else IPv4Address)("TCP", host, port)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
