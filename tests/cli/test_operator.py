"""The operator's commands: what is printed, and the exit status."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from treq.client import HTTPClient
from treq.testing import StubTreq
from twisted.internet import error
from twisted.internet.defer import Deferred, fail
from twisted.internet.task import Clock
from twisted.web.resource import Resource

from flodl_tw.cli import operator
from flodl_tw.cli.client import ControllerClient
from flodl_tw.testing import ClockedController, make_hello
from flodl_tw.web.hello_json import hello_to_json
from flodl_tw.web.resource import StatusResource
from tests.pumped import HYBRID, MANUAL, TOKEN, PumpedTestCase, fill, window

HERE = ("127.0.0.1", 29500)
NAMED = ("ctl", 29500)
REFUSED = (
    "nothing answers at 127.0.0.1:29500: connection refused; check that the controller runs, its address "
    "and its port (29500 unless it was told otherwise; flodl's own launcher has 1337)"
)
WHOLES = "whole numbers from 0 to 999999999999999999"
WHOLE = WHOLES.replace("numbers", "number")
NO_JSON = "is not JSON: Expecting value: line 1 column 1 (char 0)"
NOT_OURS = "127.0.0.1:29500 answers, but not as a controller does: "
HINT = "; the token is given with --token-file FILE or FLODL_JOIN_TOKEN"


class Canned(Resource):
    """Answers everything alike, and remembers what it was asked."""

    isLeaf = True  # noqa: N815  Twisted's name

    def __init__(self, code: int = 200, body: bytes = b"{}") -> None:
        super().__init__()
        self.code = code
        self.body = body
        self.asked: list[tuple[bytes, bytes, bytes]] = []

    def render(self, request: Any) -> bytes:
        self.asked.append((request.method, request.uri, request.content.read()))
        request.setResponseCode(self.code)
        return self.body


class Pages(Resource):
    """Answers these paths with these bodies, 404 for others, and remembers what it was asked."""

    isLeaf = True  # noqa: N815  Twisted's name

    def __init__(self, bodies: dict[bytes, bytes]) -> None:
        super().__init__()
        self.bodies = bodies
        self.asked: list[bytes] = []

    def render(self, request: Any) -> bytes:
        self.asked.append(request.path)
        body = self.bodies.get(request.path)
        request.setResponseCode(404 if body is None else 200)
        return body or b"{}"


class FailingAgent:
    """Nothing listens."""

    def request(self, *request: Any) -> Deferred[Any]:
        return fail(error.ConnectionRefusedError(111))


class OperatorTestCase(PumpedTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.said: list[str] = []

    def client(self, http: Any, *controller: Any) -> ControllerClient:
        """A client of this controller, on a clock that stands still."""
        return ControllerClient(http, Clock(), *(controller or HERE))

    def command(self, client: ControllerClient, conversation: operator.Conversation) -> int:
        """The exit status of a conversation that ends at once."""
        told = operator.told(client, conversation, self.said.append, self.said.append)
        status: int = self.successResultOf(Deferred.fromCoroutine(told))
        return status

    def door(self, **options: Any) -> ClockedController:
        """A controller whose window is held for the operator, with a quorum of two."""
        options = {"settings": window(start_mode=MANUAL, min_rank_start=2), **options}
        return ClockedController(options.pop("settings"), **options)

    def http(self, door: ClockedController) -> Any:
        """A client that reaches the door's status, from loopback."""
        return StubTreq(StatusResource(door.controller, {}).app.resource())

    def canned(self, code: int, body: object) -> Any:
        """A client that gets this."""
        return StubTreq(Canned(code, body if isinstance(body, bytes) else json.dumps(body).encode()))


class StartTests(OperatorTestCase):
    def start(self, http: Any, *controller: Any) -> int:
        return self.command(self.client(http, *controller), operator.send_start)

    def test_a_start_forms_the_world(self) -> None:
        door = self.door()
        fill(door, 1, devices=3)
        self.assertEqual(self.start(self.http(door)), 0)
        self.assertEqual(self.said, ["the run at 127.0.0.1:29500 is started: 3 ranks joined, quorum 2"])
        door.turn()
        self.assertEqual(door.state()["phase"], "training")

    def test_a_start_that_is_refused_says_why(self) -> None:
        auto = self.door(settings=window())
        early = self.door(settings=window(start_mode=HYBRID, min_rank_start=2))
        for door, text in ((auto, "the start mode is auto"), (early, "quorum not met: 0 of 2 ranks have joined")):
            self.said.clear()
            self.assertEqual(self.start(self.http(door)), 1)
            (line,) = self.said
            self.assertTrue(line.startswith(f"127.0.0.1:29500 refuses: {text}"), line)
            self.assertNotIn("--token-file", line)

    def test_who_needs_a_token_learns_how_to_give_one(self) -> None:
        door = self.door(token=TOKEN)
        fill_with_token(door)
        # A name that is not the machine's needs the token, even from loopback.
        self.assertEqual(self.start(self.http(door), *NAMED), 1)
        (line,) = self.said
        self.assertTrue(line.startswith("ctl:29500 refuses: this may be a web page's doing"), line)
        self.assertTrue(line.endswith(HINT), line)
        self.said.clear()
        self.assertEqual(self.start(self.http(door), *NAMED, bytes(16)), 1)
        self.assertNotIn(bytes(16).hex(), self.said[0])
        self.said.clear()
        self.assertEqual(self.start(self.http(door), *NAMED, TOKEN), 0)

    def test_an_older_controller_is_named_so(self) -> None:
        for command, endpoint in (
            (operator.send_start, "POST /start"),
            (partial(operator.send_abort, reason="why"), "POST /abort"),
            (partial(operator.ask_check, hello={}), "POST /check"),
        ):
            self.said.clear()
            client = self.client(self.canned(404, {"error": "not found", "endpoints": []}))
            self.assertEqual(self.command(client, command), 1)
            self.assertEqual(
                self.said,
                [
                    f"127.0.0.1:29500 does not know {endpoint} (status 404): it is an older controller, "
                    "or flodl's own launcher"
                ],
            )

    def test_answers_that_are_no_controllers(self) -> None:
        for code, body, text in (
            (200, {"armed": True, "min_rank_start": 1}, f"its answer's joined_ranks is missing: it must be a {WHOLE}"),
            (200, {"armed": True, "joined_ranks": True}, f"its answer's joined_ranks true: it must be a {WHOLE}"),
            (200, [], "its answer (status 200) is not an object of JSON"),
            (403, {"error": 7}, "its answer's error 7: it must be a text, in characters that UTF-8 has"),
            (502, b"<h1>Bad Gateway</h1>", f"its answer (status 502) {NO_JSON}"),
        ):
            self.said.clear()
            self.assertEqual(self.start(self.canned(code, body)), 1)
            self.assertEqual(self.said, [NOT_OURS + text])

    def test_a_refusal_is_escaped_and_cut(self) -> None:
        self.assertEqual(self.start(self.canned(409, {"error": "\x1b[2J" + "x" * 5000})), 1)
        (line,) = self.said
        self.assertTrue(line.startswith("127.0.0.1:29500 refuses: \\x1b[2Jxxx"))
        self.assertTrue(line.endswith("x…"))
        self.assertLess(len(line), 1050)


class AbortTests(OperatorTestCase):
    def abort(self, http: Any, reason: str | None) -> int:
        return self.command(self.client(http), partial(operator.send_abort, reason=reason))

    def test_an_abort_ends_the_run_with_its_reason(self) -> None:
        door = self.door()
        fill(door, 2)
        self.assertEqual(self.abort(self.http(door), "wrong data set ü"), 0)
        self.assertEqual(self.said, ["the run at 127.0.0.1:29500 is aborted: 2 hosts told"])
        self.assertEqual(door.state()["phase"], "failed")
        self.assertIn("wrong data set ü", door.controller.run.failure or "")

    def test_without_a_reason_the_controllers_own_words_stand(self) -> None:
        resource = Canned(200, b'{"aborted":true,"joined_hosts":1}')
        self.assertEqual(self.abort(StubTreq(resource), None), 0)
        self.assertEqual(self.abort(StubTreq(resource), "why"), 0)
        self.assertEqual(resource.asked, [(b"POST", b"/abort", b""), (b"POST", b"/abort", b'{"reason": "why"}')])
        self.assertEqual(self.said[0], "the run at 127.0.0.1:29500 is aborted: 1 host told")

    def test_a_run_that_is_over_is_not_aborted(self) -> None:
        door = self.door()
        self.assertEqual(self.abort(self.http(door), "a"), 0)
        self.said.clear()
        self.assertEqual(self.abort(self.http(door), "b"), 1)
        self.assertTrue(self.said[0].startswith("127.0.0.1:29500 refuses: the run is failed already"), self.said)

    def test_a_reason_that_is_none_is_refused(self) -> None:
        self.assertEqual(self.abort(self.http(self.door()), " "), 1)
        self.assertIn("refuses: reason ' ': it is blank", self.said[0])


class CheckTests(OperatorTestCase):
    def check(self, http: Any, hello: Any, *controller: Any) -> int:
        return self.command(self.client(http, *controller), partial(operator.ask_check, hello=hello))

    def test_each_verdict_has_its_status(self) -> None:
        door = self.door()
        door.dial().join(host="gpu-a", devices=2)
        http = self.http(door)
        state = door.state()
        for fields, status, begin, end in (
            ({"host": "gpu-b", "devices": 3}, 0, "would admit this host: ranks 2-4", "ranks 2-4"),
            ({"host": "gpu-a"}, 1, "would refuse this host: duplicate-host: ", " (a later attempt may be admitted)"),
            ({"host": "b", "devices": 0}, 2, "would refuse this host: no-devices: ", " (no retry can fix it)"),
        ):
            self.said.clear()
            self.assertEqual(self.check(http, hello_to_json(make_hello(**fields), 4)), status)
            (line,) = self.said
            self.assertTrue(line.startswith(f"127.0.0.1:29500 {begin}"), line)
            self.assertTrue(line.endswith(end), line)
        self.assertEqual(door.state(), state)

    def test_a_check_without_the_token_is_told_how_to_give_it(self) -> None:
        http = self.http(self.door(token=TOKEN))
        hello = hello_to_json(make_hello(), 4)
        self.assertEqual(self.check(http, hello), 2)
        self.assertTrue(self.said[0].startswith("127.0.0.1:29500 refuses: a check needs the token"), self.said)
        self.assertTrue(self.said[0].endswith(HINT), self.said)
        self.said.clear()
        self.assertEqual(self.check(http, hello, *HERE, bytes(16)), 2)
        self.assertTrue(self.said[0].endswith(HINT), self.said)
        self.assertNotIn(bytes(16).hex(), self.said[0])
        self.assertEqual(self.check(http, hello, *HERE, TOKEN), 0)

    def test_a_verdict_that_is_none(self) -> None:
        for body, text in (
            ({}, "its answer's reason is missing: it must be a text, in characters that UTF-8 has"),
            ({"admitted": 1}, "its answer's admitted 1: it must be true or false"),
            ({"admitted": False, "retry": 0, "reason": "x"}, "its answer's retry 0: it must be true or false"),
            (
                {"admitted": False, "retry": False},
                "its answer's reason is missing: it must be a text, in characters that UTF-8 has",
            ),
            ({"admitted": True}, f"its answer's ranks is missing: it must be a list of {WHOLES}"),
            (
                {"admitted": True, "ranks": ["0"]},
                f"its answer's ranks[0] '0': it must be a {WHOLES.replace('numbers', 'number')}",
            ),
        ):
            self.said.clear()
            self.assertEqual(self.check(self.canned(200, body), {}), 1)
            self.assertEqual(self.said, [NOT_OURS + text])

    def test_nothing_that_answers_may_be_retried(self) -> None:
        self.assertEqual(self.check(HTTPClient(FailingAgent()), {}), 1)
        self.assertEqual(self.said, [REFUSED])


def fill_with_token(door: ClockedController) -> None:
    """Two ranks join with the token."""
    door.dial(token=TOKEN).join(devices=2)
