"""The status channel: Klein behind the front door.

One connection carries one request.  Its head goes through a gate that
measures it, its whole has a deadline, and the answer closes the connection.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, cast

from klein import Klein
from twisted.internet.interfaces import IConsumer, ITransport
from twisted.python.failure import Failure
from twisted.web.iweb import IRequest
from twisted.web.server import Request, Site
from werkzeug.exceptions import MethodNotAllowed, NotFound

from flodl_tw.channels.front_door import FrontDoor, Peeker
from flodl_tw.controller import Controller
from flodl_tw.core.addresses import classify, show_endpoint
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.web.abort import abort_run
from flodl_tw.web.access import DeclinedError
from flodl_tw.web.actions import start_run
from flodl_tw.web.check import check_hello
from flodl_tw.web.connection import answer, answer_json, attempt_of
from flodl_tw.web.gate import RequestGate, Unfit, body_too_large
from flodl_tw.web.page import POLICY, page

ENDPOINTS: Final = (
    *("GET /state.json", "POST /start", "POST /abort", "POST /check"),
    *("GET /run.json", "GET /store.json"),
)
"""What a client that asked for something else is told; ``fdl``'s two come first."""


class StatusResource:
    """The endpoints.  ``ended`` counts connections that got nowhere; ``allowed_hosts`` are names for ``Host``."""

    app = Klein()

    def __init__(
        self, controller: Controller, ended: Mapping[ConnectionEnd, int], allowed_hosts: tuple[str, ...] = ()
    ) -> None:
        self.controller = controller
        self._ended = ended
        name = socket.gethostname().lower()
        self._own_names = frozenset(
            {"localhost", name, name.partition(".")[0], *(host.lower() for host in allowed_hosts)}
        )

    @app.route("/state.json", methods=["GET"])
    def state(self, request: IRequest) -> Any:
        """The state of the run, for programs."""
        return answer(request, 200, self.controller.run.state_json())

    @app.route("/run.json", methods=["GET"])
    def run(self, request: IRequest) -> Any:
        """What ``state.json`` has no key for: why the run failed, and of which exceptions its ranks died."""
        return answer_json(request, 200, self.controller.run.why())

    @app.route("/store.json", methods=["GET"])
    def store(self, request: IRequest) -> Any:
        """The store of the world that has formed, or null."""
        store = self.controller.run.store
        return answer_json(request, 200, {"store": None if store is None else store.view()})

    @app.route("/", methods=["GET"])
    async def root(self, request: Any) -> Any:
        """The page for a browser, the state for anything else."""
        if b"text/html" not in (request.getHeader(b"accept") or b""):
            return await answer(request, 200, self.controller.run.state_json())
        here = request.getHost()
        address = classify(here.host)
        # Through loopback a worker's way is another one, unless the port is bound there alone.
        reachable = address.shown if not address.loopback or not self.controller.credentialed else socket.gethostname()
        endpoint = show_endpoint(reachable, here.port)
        shown = page(self.controller, endpoint, self._ended)
        request.setHeader(b"content-security-policy", POLICY.encode())
        request.setHeader(b"x-content-type-options", b"nosniff")
        return await answer(request, 200, shown.encode(), b"text/html; charset=utf-8")

    @app.route("/start", methods=["POST"])
    def start(self, request: Any) -> Any:
        """The operator's start."""
        return answer_json(request, 200, start_run(self.controller.run, attempt_of(request), self._own_names))

    @app.route("/abort", methods=["POST"])
    def abort(self, request: Any) -> Any:
        """The operator's end of the run."""
        body = request.content.read()
        return answer_json(request, 200, abort_run(self.controller.run, attempt_of(request), self._own_names, body))

    @app.route("/check", methods=["POST"])
    def check(self, request: Any) -> Any:
        """Whether a hello would be admitted."""
        controller = self.controller
        told = check_hello(
            controller.run, controller.credentialed, attempt_of(request), self._own_names, request.content.read()
        )
        return answer_json(request, 200, told)

    @app.handle_errors(DeclinedError)
    def declined(self, request: IRequest, failure: Failure) -> Any:
        """A request that may not be done, or cannot."""
        assert isinstance(failure.value, DeclinedError)
        return answer_json(request, failure.value.code, {"error": str(failure.value)})

    @app.handle_errors(NotFound)
    def unknown(self, request: IRequest, failure: Failure) -> Any:
        """No such path."""
        return answer_json(request, 404, {"error": "not found", "endpoints": ENDPOINTS})

    @app.handle_errors(MethodNotAllowed)
    def wrong_method(self, request: Any, failure: Failure) -> Any:
        """A known path, asked in a way that it does not know."""
        allowed = ", ".join(sorted(failure.value.valid_methods or ()))  # type: ignore[union-attr]
        request.setHeader(b"allow", allowed.encode())
        return answer_json(request, 405, {"error": f"this path answers {allowed}"})

    # "/start//" is another path than "/start".
    app.url_map.merge_slashes = False


class StatusRequest(Request):
    """A request that tells its connection what has come of it, and closes it when it is answered."""

    def __init__(self, connection: StatusProtocol, channel: Any) -> None:
        super().__init__(channel)
        self._connection = connection

    def gotLength(self, length: int | None) -> None:
        # Where it knows no length Twisted opens a temporary file, and a body here is never more than 64 KiB.
        super().gotLength(0 if length is None else length)

    def handleContentChunk(self, data: bytes) -> None:
        if self._connection.takes_body(len(data)):
            super().handleContentChunk(data)

    def process(self) -> None:
        if not self._connection.whole():
            return
        self.setHeader(b"connection", b"close")
        self.channel.persistent = False
        if self.path == b"*" or self.path.startswith(b"//") or self.path[:4].lower() == b"/%2f":
            # Klein takes "//start" for "/start", and Twisted answers "*" by itself; neither is a path of ours.
            self.path = b"/unknown"
        super().process()

    def getRequestHostname(self) -> bytes:
        """Routing must not depend on what a client calls us; werkzeug refuses some Hosts with a traceback."""
        return b"localhost"


class StatusSite(Site):
    """Klein's site, without an access log: a request line may have the token in it."""

    def log(self, request: Any) -> None:
        pass


class StatusFactory:
    """What all status connections share; the route of the HTTP magics."""

    def __init__(self, front: FrontDoor, status: StatusResource) -> None:
        self.clock = front.clock
        self.limits = front.limits
        # The deadline is ours and in all, so the channel's own idle timeout is off.
        self.site = StatusSite(status.app.resource(), timeout=None, reactor=self.clock, parsePOSTFormSubmission=False)

    def buildProtocol(self, peeker: Peeker) -> StatusProtocol:
        """A connection with one request."""
        return StatusProtocol(self, peeker)


class Stage(Enum):
    """How far a status connection is."""

    READING = "reading"
    ANSWERING = "answering"
    REFUSED = "refused"


class StatusProtocol:
    """One HTTP connection, from its first byte to its answer.  What follows its one request is not read."""

    def __init__(self, shared: StatusFactory, peeker: Peeker) -> None:
        self._shared = shared
        self._peeker = peeker
        self._gate = RequestGate()
        self._stage = Stage.READING
        self._body_bytes = 0
        elapsed = shared.clock.seconds() - peeker.first_byte_at
        self._deadline = shared.clock.callLater(max(0.0, shared.limits.request - elapsed), self._expired)
        channel = shared.site.buildProtocol(None)
        channel.requestFactory = lambda http, queued: StatusRequest(self, http)
        self._http = channel

    def makeConnection(self, transport: ITransport) -> None:
        self._http.makeConnection(transport)

    def dataReceived(self, data: bytes) -> None:
        if self._stage is not Stage.READING:
            return
        passed = self._gate.feed(data)
        if isinstance(passed, Unfit):
            self._refuse(passed)
        elif passed:
            self._http.dataReceived(passed)
            closing = cast(Any, self._peeker.transport).disconnecting
            if closing and self._stage is Stage.READING:
                # The parser has answered 400 by itself.
                self._leave_reading(Stage.REFUSED)
                self._peeker.dropped(ConnectionEnd.HTTP_400, "its HTTP request does not parse")
                self._peeker.close()

    def readConnectionLost(self) -> None:
        """The client has shut its side: it still gets the answer to a whole request."""
        if self._stage is Stage.READING:
            self._cut_off()
            self._peeker.close()

    def connectionLost(self, reason: Failure) -> None:
        if self._stage is Stage.READING:
            self._cut_off()
        self._http.connectionLost(reason)

    def takes_body(self, count: int) -> bool:
        """Whether ``count`` more bytes of the body are within the limit; the request is refused if not."""
        self._body_bytes += count
        if self._stage is Stage.READING and self._body_bytes > self._gate.max_body:
            self._refuse(body_too_large(self._gate.max_body))
        return self._stage is Stage.READING

    def whole(self) -> bool:
        """The request has arrived, its body included; gives whether it is to be answered."""
        if self._stage is not Stage.READING:
            return False
        self._leave_reading(Stage.ANSWERING)
        self._peeker.identified()
        return True

    def _leave_reading(self, stage: Stage) -> None:
        self._stage = stage
        if self._deadline.active():
            self._deadline.cancel()

    def _cut_off(self) -> None:
        self._leave_reading(Stage.REFUSED)
        self._peeker.left(ConnectionEnd.CUT_OFF_REQUEST)

    def _refuse(self, unfit: Unfit) -> None:
        self._leave_reading(Stage.REFUSED)
        self._peeker.dropped(unfit.end, unfit.error)
        self._peeker.transport.write(unfit.response(head_only=self._gate.is_head))
        # The channel registered itself as a producer; a paused one would keep the connection open.
        IConsumer(self._peeker.transport).unregisterProducer()
        self._peeker.close()

    def _expired(self) -> None:
        # As with every deadline: what has arrived by now is read first.
        self._deadline = self._shared.clock.callLater(0, self._expire)

    def _expire(self) -> None:
        self._leave_reading(Stage.REFUSED)
        self._peeker.drop(
            ConnectionEnd.REQUEST_DEADLINE, f"no whole HTTP request within {self._shared.limits.request} s"
        )
