"""The endpoints of the status channel."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

from klein import Klein
from twisted.internet import defer
from twisted.python.failure import Failure
from twisted.web.http import NO_CONTENT
from twisted.web.iweb import IRequest
from werkzeug.exceptions import MethodNotAllowed, NotFound

from flodl_tw.controller import Controller
from flodl_tw.core.addresses import classify, show_endpoint
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.core.wire import HEARTBEAT_HEADER
from flodl_tw.run import Run
from flodl_tw.web.access import DeclinedError, authorise
from flodl_tw.web.actions import abort_run, check_hello, start_run
from flodl_tw.web.answers import answer, answer_json, attempt_of
from flodl_tw.web.page import POLICY, page

HOLD_SECS: Final = 20
"""What the answer to a question may wait for the end of a run."""
MAX_HELD: Final = 256
"""Answers that wait; one more is given at once."""
Answered = Awaitable[bytes | None]
Action = Callable[[Run, str, bytes], dict[str, object]]

ENDPOINTS: Final = (
    *("GET /state.json", "POST /start", "POST /abort", "POST /check"),
    *("GET /run.json", "GET /store.json"),
)
"""What a client that asked for something else is told; ``fdl``'s two come first."""


class StatusResource:
    """The endpoints.  ``ended`` counts connections that got nowhere.

    ``join_endpoint`` says where workers dial, and ``allowed_hosts`` are names for ``Host``.
    """

    app = Klein()

    def __init__(
        self,
        controller: Controller,
        ended: Mapping[ConnectionEnd, int],
        join_endpoint: Callable[[], str | None] = lambda: None,
        allowed_hosts: tuple[str, ...] = (),
    ) -> None:
        self.controller = controller
        self._join_endpoint = join_endpoint
        self._ended = ended
        self._held = 0
        name = socket.gethostname().lower()
        self._own_names = frozenset(
            {"localhost", name, name.partition(".")[0], *(host.lower() for host in allowed_hosts)}
        )

    @app.route("/state.json", methods=["GET"])
    def state(self, request: IRequest) -> Answered:
        """The state of the run, for programs; its headers tell our agents what they may send."""
        request.setHeader(HEARTBEAT_HEADER, b"1")
        return answer(request, 200, self.controller.run.state_json())

    @app.route("/run.json", methods=["GET"])
    async def run(self, request: IRequest) -> bytes | None:
        """What ``state.json`` has no key for: the run's id, why it failed, and of which exceptions its ranks died.

        With ``?wait=RUN_ID`` the answer is held until that run is over, or for ``HOLD_SECS``.
        """
        if request.args.get(b"wait") == [self.controller.run.run_id.encode()] and self._held < MAX_HELD:
            self._held += 1
            with suppress(defer.TimeoutError, defer.CancelledError):
                await self.controller.when_over().addTimeout(HOLD_SECS, self.controller.clock)
            self._held -= 1
        return await answer_json(request, 200, self.controller.why())

    @app.route("/store.json", methods=["GET"])
    def store(self, request: IRequest) -> Answered:
        """The store of the world that has formed, or null."""
        store = self.controller.run.store
        return answer_json(request, 200, {"store": None if store is None else store.view()})

    @app.route("/", methods=["GET"])
    async def root(self, request: IRequest) -> bytes | None:
        """The page for a browser, the state for anything else."""
        if b"text/html" not in (request.getHeader(b"accept") or b""):
            return await answer(request, 200, self.controller.run.state_json())
        here = request.getHost()
        # A browser's own way here may be none for a worker: through loopback, say, or a tunnel.
        endpoint = self._join_endpoint() or show_endpoint(classify(here.host).shown, here.port)
        shown = page(self.controller, endpoint, self._ended)
        request.setHeader(b"content-security-policy", POLICY.encode())
        request.setHeader(b"x-content-type-options", b"nosniff")
        return await answer(request, 200, shown.encode(), b"text/html; charset=utf-8")

    @app.route("/start", methods=["POST"])
    def start(self, request: IRequest) -> Answered:
        """The operator's start."""
        return self._act(request, start_run, "start a run", "a start")

    @app.route("/abort", methods=["POST"])
    def abort(self, request: IRequest) -> Answered:
        """The operator's end of the run."""
        return self._act(request, abort_run, "abort a run", "an abort")

    @app.route("/check", methods=["POST"])
    def check(self, request: IRequest) -> Answered:
        """Whether a hello would be admitted; it needs the token wherever it comes from, and so does this."""
        return self._act(request, check_hello, "check a host", "a check", needs_token=self.controller.credentialed)

    def _act(
        self, request: IRequest, action: Action, verb: str, what: str, *, needs_token: bool | None = None
    ) -> Answered:
        """Do it, where the request may; from elsewhere it needs a token, unless ``needs_token`` says more."""
        attempt, run = attempt_of(request), self.controller.run
        authorise(verb, what, attempt, self.controller.salt.hex(), self._own_names, needs_token=needs_token)
        return answer_json(request, 200, action(run, attempt.address, request.content.read()))

    @app.handle_errors(DeclinedError)
    def declined(self, request: IRequest, failure: Failure) -> Answered:
        """A request that may not be done, or cannot."""
        assert isinstance(failure.value, DeclinedError)
        return answer_json(request, failure.value.code, {"error": str(failure.value)})

    @app.handle_errors(NotFound)
    def unknown(self, request: IRequest, failure: Failure) -> Answered:
        """No such path."""
        return answer_json(request, 404, {"error": "not found", "endpoints": ENDPOINTS})

    @app.handle_errors(MethodNotAllowed)
    def wrong_method(self, request: IRequest, failure: Failure) -> Answered:
        """A known path, asked in a way that it does not know.  Balancers ask which ways it knows."""
        allowed = ", ".join(sorted(failure.value.valid_methods or ()))  # type: ignore[union-attr]
        request.setHeader(b"allow", allowed.encode())
        if request.method == b"OPTIONS":
            return answer(request, NO_CONTENT, b"")
        return answer_json(request, 405, {"error": f"this path answers {allowed}"})

    # "/start//" is another path than "/start".
    app.url_map.merge_slashes = False
