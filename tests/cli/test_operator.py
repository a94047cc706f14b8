"""The operator's commands: what is printed, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from treq.client import HTTPClient
from treq.testing import StubTreq
from twisted.internet import error
from twisted.internet.defer import CancelledError, Deferred, fail
from twisted.internet.task import Clock
from twisted.web.resource import Resource

from flodl_tw.cli import operator
from flodl_tw.cli.client import ControllerClient
from flodl_tw.core.reports import RankError
from flodl_tw.core.store.wire import Opcode, StoreLimits
from flodl_tw.testing import ClockedController, make_hello
from flodl_tw.web.hello_json import hello_to_json
from flodl_tw.web.resource import StatusResource
from tests.core.store.queries import HELLO, many
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


class StatusTests(OperatorTestCase):
    def status(self, http: Any, *, as_json: bool = False) -> int:
        return self.command(self.client(http), partial(operator.show_status, as_json=as_json, watches=False))

    def test_a_run_at_a_glance(self) -> None:
        door = self.door()
        door.clock.advance(8)
        fill(door, 2, devices=4)
        self.assertEqual(self.status(self.http(door)), 0)
        self.assertEqual(
            self.said,
            [
                "The run at 127.0.0.1:29500 is staging: there is a quorum, and the operator may start it.",
                "  joined    8 ranks of 2 hosts; quorum 2 (met)",
                "  window    held for the operator's start",
                "  hard cap  the run fails in 9 min 52 s if no world has formed",
                "  start     manual, not armed",
                "",
                "HOST  RANKS  DEVICES  GPUS                           LIBTORCH           JOINED AFTER",
                "h0    0-3    0-3      4 x NVIDIA H100 (80GB, sm_90)  precompiled/cu128  8 s",
                "h1    4-7    0-3      4 x NVIDIA H100 (80GB, sm_90)  precompiled/cu128  8 s",
            ],
        )

    def test_json_is_the_body_as_it_is(self) -> None:
        door = self.door()
        door.dial().join(host="ü")
        self.assertEqual(self.status(self.http(door), as_json=True), 0)
        self.assertEqual(self.said, [door.controller.run.state_json().decode()])

    def failed(self, ranks: int = 1) -> ClockedController:
        """A run that failed of an exception on each of its ranks, while somebody waited for a key."""
        door = self.door(settings=replace(window(target_ranks=ranks), store=StoreLimits()))
        dial = door.dial()
        dial.join(devices=ranks)
        door.turn()
        dial.messages()
        door.dial().send(HELLO + many(Opcode.WAIT, b"/ready"))
        for rank in range(ranks):
            dial.send(dial.talk.reported(rank, RankError("ValueError", "boom " + "x" * 500, "a.py:1 in f" + "y" * 200)))
        dial.send(dial.talk.exited(0, 1))
        door.clock.advance(7)
        return door

    def test_a_run_that_failed_says_why_and_what_its_store_waits_for(self) -> None:
        self.assertEqual(self.status(self.http(self.failed())), 0)
        told = f"ValueError: boom {'x' * 500}, at a.py:1 in f{'y' * 200}"
        self.assertEqual(
            self.said[-4:],
            [
                f"failed: rank 0 of host 'gpu-a' exited with code 1 ({told})",
                f"rank 0: {told}",
                "store: 0 of 1 rank came, 0 keys, 0 bytes",
                "  1 client waiting for /ready, 7 s so far",
            ],
        )

    def test_many_ranks_that_died_are_no_answer_that_is_too_long(self) -> None:
        door = self.failed(100)
        self.assertGreater(len(json.dumps(door.controller.run.why())), 48 * 1024)
        self.assertEqual(self.status(self.http(door)), 0)
        self.assertEqual(len([line for line in self.said if ": ValueError" in line]), 8)

    def test_a_window_that_is_open_has_nothing_more_to_tell(self) -> None:
        site = Pages({b"/state.json": self.door().controller.run.state_json()})
        self.assertEqual(self.status(StubTreq(site)), 0)
        self.assertEqual(site.asked, [b"/state.json"])

    def test_a_controller_without_these_two_has_nothing_more_to_tell(self) -> None:
        site = Pages({b"/state.json": self.failed().controller.run.state_json()})
        self.assertEqual(self.status(StubTreq(site)), 0)
        self.assertEqual(site.asked, [b"/state.json", b"/run.json", b"/store.json"])
        self.assertTrue(self.said[-1].startswith("gpu-a"), self.said)

    def test_another_shape_is_told(self) -> None:
        state = self.failed().controller.run.state_json()
        self.assertEqual(self.status(StubTreq(Pages({b"/state.json": state, b"/run.json": b"{}"}))), 1)
        self.assertEqual(self.said[-1], NOT_OURS + "run.json's rank_errors is missing: it must be a list of objects")

    def test_a_controller_that_goes_after_its_state_has_told_it(self) -> None:
        http = self.http(self.failed())
        answers = iter((http.request, HTTPClient(FailingAgent()).request))

        def request(*asked: Any, **options: Any) -> Any:
            return next(answers)(*asked, **options)

        http.request = request
        self.assertEqual(self.status(http), 0)
        self.assertTrue(self.said[0].startswith("The run at 127.0.0.1:29500 is failed"))

    def test_json_is_the_state_alone(self) -> None:
        door = self.failed()
        self.assertEqual(self.status(self.http(door), as_json=True), 0)
        self.assertEqual(self.said, [door.controller.run.state_json().decode()])

    def test_nothing_that_answers(self) -> None:
        self.assertEqual(self.status(HTTPClient(FailingAgent())), 1)
        self.assertEqual(self.said, [REFUSED])

    def test_what_is_no_controller_is_told_in_one_line(self) -> None:
        for code, body, text in (
            (200, b"<html>hello</html>", f"its state {NO_JSON}"),
            (200, b"", f"its state {NO_JSON}"),
            (200, {"members": []}, "its state's phase is missing: it must be a text, in characters that UTF-8 has"),
            (404, {"error": "not found"}, "GET /state.json gets status 404"),
            (500, b"oops", "GET /state.json gets status 500"),
            (302, b"", "GET /state.json gets status 302"),
        ):
            for as_json in (False, True):
                self.said.clear()
                self.assertEqual(self.status(self.canned(code, body), as_json=as_json), 1)
                self.assertEqual(self.said, [NOT_OURS + text])


class WatchTests(OperatorTestCase):
    def watch(self, http: Any, clock: Clock, *, as_json: bool = False) -> Deferred[int]:
        watch = partial(operator.show_status, as_json=as_json, watches=True)
        client = ControllerClient(http, clock, *HERE)
        return Deferred.fromCoroutine(operator.told(client, watch, self.said.append, self.said.append))

    def after(self, clock: Clock, seconds: float) -> list[str]:
        """The lines that were printed within these seconds."""
        self.said.clear()
        clock.advance(seconds)
        return list(self.said)

    def test_a_change_is_printed_and_a_countdown_is_none(self) -> None:
        door = self.door()
        watching = self.watch(self.http(door), door.clock)
        self.assertEqual(len(self.said), 5)
        self.assertEqual(self.after(door.clock, 2), [])
        door.dial().join()
        self.assertEqual(self.after(door.clock, 1), [])
        printed = self.after(door.clock, 1)
        self.assertEqual((printed[0], printed[-1].split()[0]), ("", "gpu-a"))
        self.assertEqual(self.after(door.clock, 2), [])
        self.assertNoResult(watching)
        watching.cancel()
        self.failureResultOf(watching, CancelledError)

    def test_a_countdown_that_has_run_out_is_a_change(self) -> None:
        door = self.door(settings=window(min_rank_start=2))
        watching = self.watch(self.http(door), door.clock)
        for _ in range(150):
            self.assertEqual(self.after(door.clock, 2), [])
        self.assertIn("  window    past: the world forms as soon as there is a quorum", self.after(door.clock, 2))
        watching.cancel()
        self.failureResultOf(watching, CancelledError)

    def test_as_json_each_change_is_a_line(self) -> None:
        door = self.door()
        watching = self.watch(self.http(door), door.clock, as_json=True)
        door.dial().join()
        door.clock.advance(2)
        self.assertEqual([json.loads(line)["joined_ranks"] for line in self.said], [0, 1])
        watching.cancel()
        self.failureResultOf(watching, CancelledError)

    def test_it_ends_with_the_run(self) -> None:
        door = self.door(settings=window(target_ranks=1))
        watching = self.watch(self.http(door), door.clock)
        dial = door.dial()
        dial.join()
        door.clock.advance(2)
        self.assertTrue(any("is training" in line for line in self.said), self.said)
        dial.messages()
        dial.send(dial.talk.exited(0))
        dial.hang_up()
        door.turn()
        self.said.clear()
        door.clock.advance(2)
        self.assertEqual(self.successResultOf(watching), 0)
        self.assertIn("The run at 127.0.0.1:29500 is done: every rank has exited with 0.", self.said)

    def test_its_last_lines_say_why_the_run_failed(self) -> None:
        door = self.door(settings=window(target_ranks=1))
        watching = self.watch(self.http(door), door.clock)
        dial = door.dial()
        dial.join()
        door.turn()
        dial.messages()
        dial.send(dial.talk.exited(0, 3))
        door.turn()
        door.clock.advance(2)
        self.assertEqual(self.successResultOf(watching), 0)
        self.assertEqual(self.said[-1], "failed: rank 0 of host 'gpu-a' exited with code 3")

    def test_a_controller_that_was_never_there(self) -> None:
        self.assertEqual(self.successResultOf(self.watch(HTTPClient(FailingAgent()), Clock())), 1)
        self.assertEqual(self.said, [REFUSED])

    def test_a_controller_that_has_gone_is_asked_three_times(self) -> None:
        door = self.door()
        http = self.http(door)
        clock = Clock()
        here: Callable[..., Any] = http.request
        watching = self.watch(http, clock)
        gone: Callable[..., Any] = HTTPClient(FailingAgent()).request
        for request in (gone, gone, here, gone, gone):
            http.request = request
            self.assertEqual(self.after(clock, 2), [])
        self.assertNoResult(watching)
        (line,) = self.after(clock, 2)
        self.assertEqual(
            line,
            f"the controller has gone, its run was waiting: {REFUSED}; "
            "it ends with its run, unless it has --after-run hold or rearm: its log has the run's end",
        )
        self.assertEqual(self.successResultOf(watching), 1)


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
